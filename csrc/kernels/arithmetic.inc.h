/* arithmetic.inc.h -- whether the compiler kept the arithmetic of the source: a check of each built table.
 *
 * The bit contract needs IEEE arithmetic in the order that is written. Flags such as -ffast-math permit a compiler to
 * change it: setup.py takes them back, but a compiler can have them from a configuration file or a variable, too. If it
 * says so, the build stops here. If it does not, the table's own results tell.
 */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0) ||                           \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "cattn needs exact arithmetic: remove -ffast-math, -Ofast, /fp:fast and the like from the compiler's flags"
#endif
_Static_assert(sizeof 1.0 == sizeof(double), "remove -fsingle-precision-constant from the compiler's flags");

/* Hidden from the optimiser, so that nothing is computed at compile time. 46/49 is not the rounded product of 46 and
 * the rounded 1/49. */
static const volatile real arithmetic_operands[] = {0, 1, 46, 49, (real)INFINITY};

INLINE real power_of_two(int n) { return from_bits((real_bits)(REAL_BIAS + n) << REAL_MANT); }

/* Whether each lane of v has the bits of x. */
INLINE bool lanes_are(vf v, real x) {
    real lanes[LANES];
    vf_storeu(lanes, v);
    bool equal = true;
    for (int i = 0; i < LANES; i++)
        equal &= to_bits(lanes[i]) == to_bits(x);
    return equal;
}

/* Runs in the default floating-point mode. */
static bool keeps_arithmetic(void) {
    const vf zero = vf_set1(arithmetic_operands[0]), one = vf_set1(arithmetic_operands[1]);
    const vf x = vf_set1(arithmetic_operands[2]), y = vf_set1(arithmetic_operands[3]);
    const vf inf = vf_set1(arithmetic_operands[4]), nan = inf - inf;
    const vf large = vf_set1(power_of_two(REAL_MANT + 2)) * one, ulp = vf_set1(power_of_two(-REAL_MANT)) * one;
    const vf above = one + ulp, minus_square = zero - (above + ulp);
    const vf normal = vf_set1(from_bits((real_bits)1 << REAL_MANT)) * one; /* the smallest */

    /* sums in the order that is written; products rounded before they are added, and rounded to the width of real */
    bool kept = lanes_are(large + one - large, 0) && lanes_are(above * above + minus_square, 0);
    kept &= lanes_are(vf_fma(above, above, minus_square), HAS_FMA ? power_of_two(-2 * REAL_MANT) : 0);
    /* quotients, also of several numbers by the same one and by a constant */
    kept &= lanes_are(vf_div(x, y), (real)46 / 49) && lanes_are(vf_div(one, y), (real)1 / 49);
    kept &= lanes_are(vf_div(x, vf_set1(49)), (real)46 / 49);
    /* -0 + 0 is +0; NaN equals nothing and exceeds nothing; half of the smallest normal number is not 0 */
    kept &= lanes_are((zero - one) * zero + vf_set1(0), 0);
    kept &= lanes_are(vf_select(vf_eq(nan, nan), one, zero), 0) && lanes_are(vf_select(vf_lt(x, nan), one, zero), 0);
    kept &= lanes_are(vf_select(vf_eq(inf - inf, zero), one, zero), 0);
    return kept && lanes_are(normal - normal * vf_set1((real)0.5), from_bits((real_bits)1 << (REAL_MANT - 1)));
}
