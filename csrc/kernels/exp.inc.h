/* exp.inc.h -- exp, tanh, the tail of the normal distribution and the logarithm, with the same bits on every table.
 *
 * `vf_exp` takes x <= 0, -inf or NaN. exp(0) is exactly 1, exp(-inf) is exactly +0, NaN stays NaN, and results below
 * the smallest normal number are +0. `vf_tanh` takes any x and serves softcap. tanh(-x) is -tanh(x), also for zeros.
 * docs/accuracy.md has the bounds of the errors.
 *
 * The argument is reduced by powers of two: rounding to the nearest integer with a magic number, ln 2 in two parts.
 * Then follows a minimax polynomial (Remez, relative error, the first two coefficients pinned to 1 and x).
 */

#if REAL_BITS == 32
#define EXP_MAGIC 0x1.8p23f      /* adding it leaves the nearest integer in the low bits */
#define EXP_CUT (-0x1.5d589ep6f) /* the lowest above -126 ln 2: the result is normal */
#define EXP_LOG2E 0x1.715476p0f
#define EXP_LN2_HI 0x1.62e4p-1f /* 15 bits, so n * hi is exact */
#define EXP_LN2_LO 0x1.7f7d1cp-20f
#define TANH_FAR (-1.125f)  /* -2|x| at the x where tanh(x) is about 1/2 */
#define LOGISTIC_FAR 120.0f /* the logistic function of -x, and its multiples by x, are 0 from there on */
static const real exp_poly[] = {1.0f, 0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f, 0x1.1239e2p-7f, 0x1.6a2434p-10f};
#define TAIL_FAR 15.0f /* the tail times a is 0 from there on, its density times a, too */
static const real tail_poly[] = {0x1.1274fp+1f,  0x1.f0d77ep-2f,   -0x1.ee92fp-4f,  -0x1.cd027p-6f,
                                 0x1.1cc006p-5f, -0x1.0dd574p-8f,  -0x1.181be4p-7f, 0x1.d4da38p-9f,
                                 0x1.0696f2p-9f, -0x1.45c4a4p-10f, -0x1.43aaaep-11f};
#else
#define EXP_MAGIC 0x1.8p52
#define EXP_CUT (-0x1.6232bdd7abcd2p9) /* the lowest above -1022 ln 2 */
#define EXP_LOG2E 0x1.71547652b82fep0
#define EXP_LN2_HI 0x1.62e42fefa3800p-1 /* 42 bits, so n * hi is exact */
#define EXP_LN2_LO 0x1.ef35793c76730p-45
#define TANH_FAR (-1.125)
#define LOGISTIC_FAR 760.0
static const real exp_poly[] = {1.0,
                                0x1.000000000000ap-1,
                                0x1.55555555554fap-3,
                                0x1.555555555088dp-5,
                                0x1.1111111127b92p-7,
                                0x1.6c16c184261aap-10,
                                0x1.a01a012a6bfd9p-13,
                                0x1.a0199a17bfbb3p-16,
                                0x1.71df253711dfap-19,
                                0x1.28ad67da0addcp-22,
                                0x1.ad7f7cfc0e86ep-26};
#define TAIL_FAR 39.0
static const real tail_poly[] = {
    0x1.1274efe513fcep+1,   0x1.f0d781612b284p-2,   -0x1.ee922c3c21d68p-4,  -0x1.cd09354b5427ep-6,
    0x1.1ca0300faf24p-5,    -0x1.0d34a787fe6a2p-8,  -0x1.144ecb5f5b2b3p-7,  0x1.d7b3eec3be2fcp-9,
    0x1.aaf1334f34667p-10,  -0x1.8b6c41514a09p-10,  -0x1.6d0e3274dee77p-13, 0x1.0940d5394cda8p-11,
    -0x1.5c95b80d27695p-15, -0x1.355c12850a5e6p-13, 0x1.33c7384bb3daap-15,  0x1.3e3b4f6594a8ep-15,
    -0x1.0f3a0b55c0971p-16, -0x1.1c557484a33f7p-17, 0x1.70eacabd00b34p-18,  0x1.ad55b6488a5d2p-20,
    -0x1.8b66604600bafp-20, -0x1.0e544fc4714aep-22, 0x1.20bf5f5c229c1p-22,  0x1.f1b3c306e593ap-26,
    -0x1.753c1f9e49a33p-26};
#endif
#define TAIL_MIDDLE 3.9375

/* A polynomial with the coefficients c[0] .. c[n - 1]; n is a constant of at most 32. */
INLINE vf horner(const real *c, int n, vf x) {
    vf p = vf_set1(c[n - 1]);
#pragma GCC unroll 32
    for (int i = n - 2; i >= 0; i--)
        p = vf_fma(p, x, vf_set1(c[i]));
    return p;
}

/* (e^r - 1) / r */
INLINE vf exp_horner(vf r) { return horner(exp_poly, sizeof exp_poly / sizeof *exp_poly, r); }

/* Splits x = n ln 2 + r, with r to more digits than x has. */
INLINE vf reduce(vf x, vf *n) {
    const vf magic = vf_set1(EXP_MAGIC);
    *n = vf_fma(x, vf_set1(EXP_LOG2E), magic) - magic;
    return vf_fma(*n, vf_set1(-EXP_LN2_LO), vf_fma(*n, vf_set1(-EXP_LN2_HI), x));
}

/* Below the cut the result is +0. That includes x = -inf, for which r is NaN. */
INLINE vf vf_exp(vf x) {
    vf n, r = reduce(x, &n);
    return vf_scale2_unless(vf_lt(x, vf_set1(EXP_CUT)), vf_fma(exp_horner(r), r, vf_set1(1)), n);
}

/* exp(a - b + c) * (1 + factor) for a small `factor`, and its logarithm. Recovers the digits that rounding a - b loses,
 * provided that |b| is the larger one: `lost` is that rounding error, and exp(lost) is 1 + lost. */
INLINE vf vf_exp_of_difference(vf a, vf b, vf c, vf factor, vf *log) {
    const vf d = a - b, lost = a - (d + b), x = d + c, little = lost + factor;
    vf p = vf_exp(x);
    *log = x + little;
    return vf_select(vf_lt(x, vf_set1(EXP_CUT)), vf_set1(0), vf_fma(p, little, p));
}

/* tanh of any x, from exp(-2|x|) = q = 1 + e. Near 0 it is -e / (2 + e), because e is accurate there. Farther out it is
 * 1 - 2q / (2 + e): q is small, so its errors are small compared with 1. */
INLINE vf vf_tanh(vf x) {
    const vf one = vf_set1(1), y = vf_max(vf_set1(EXP_CUT), vf_max(x, -x) * vf_set1(-2));
    vf n, r = reduce(y, &n);
    const vf power = vf_scale2(one, n);
    const vf m = exp_horner(r) * r;
    const vf q = vf_fma(m, power, power), e = vf_fma(m, power, power - one);
    const vm far = vf_lt(y, vf_set1(TANH_FAR));
    vf t = vf_div(vf_select(far, q + q, e), e + vf_set1(2)); /* far: 1 + tanh(-|x|); near: tanh(-|x|) */
    t = vf_select(far, t - one, t);
    t = vf_select(vf_lt(x, vf_set1(0)), t, -t);
    return vf_select(vf_eq(x, vf_set1(0)), x, t); /* a zero keeps its sign */
}

/* e^r - 1 for an r that is reduced. With `reduce`, e^x = (1 + m) * 2^n: unlike vf_exp this has no cut, and results
 * below the smallest normal number keep their digits until `scale_far` rounds them. */
INLINE vf exp_rest(vf r) { return exp_horner(r) * r; }

/* x * 2^n for an integer n from -2 * REAL_BIAS + 2 to 0, rounded once, also to a subnormal number: the first of two
 * steps is exact if |x| is 1/2 or more, or n is 0. */
INLINE vf scale_far(vf x, vf n) {
#ifdef SCALE2_IS_COMPLETE
    return vf_scale2(x, n);
#else
    const vf magic = vf_set1(EXP_MAGIC), half = vf_fma(n, vf_set1((real)0.5), magic) - magic;
    return vf_scale2(vf_scale2(x, half), n - half);
#endif
}

/* 1 + e, and e = (1 + m) * 2^n without the digits that do not count there. */
INLINE vf logistic_divisor(vf m, vf n, vf *e) {
#ifndef SCALE2_IS_COMPLETE
    n = vf_max(n, vf_set1(-100));
#endif
    *e = vf_scale2(vf_set1(1) + m, n);
    return vf_set1(1) + *e;
}

/* The logistic function 1 / (1 + exp(-x)) of any x, and 1 minus it, which is the function of -x: the smaller one of the
 * two keeps its digits down to the smallest subnormal number. */
INLINE vf vf_logistic(vf x, vf *other) {
    const vm negative = vf_lt(x, vf_set1(0));
    vf n, e, r = reduce(vf_max(vf_set1(-LOGISTIC_FAR), vf_select(negative, x, -x)), &n);
    const vf m = exp_rest(r), large = vf_div(vf_set1(1), logistic_divisor(m, n, &e));
    const vf small = scale_far(vf_fma(large, m, large), n);
    *other = vf_select(vf_eq(x, x), vf_select(negative, large, small), x);
    return vf_select(vf_eq(x, x), vf_select(negative, small, large), x);
}

/* The error of the rounded product a * b. Without an FMA by Dekker's algorithm, on halves of the digits, for operands
 * far from overflow. */
INLINE vf product_error(vf a, vf b, vf product) {
#if HAS_FMA
    return vf_fma(a, b, -product);
#else
    const vf split = vf_set1(REAL_BITS == 32 ? (real)0x1.002p12 : (real)0x1.0000002p27);
    const vf a_high = split * a - (split * a - a), a_low = a - a_high;
    const vf b_high = split * b - (split * b - b), b_low = b - b_high;
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low;
#endif
}

/* The tail of the normal distribution without its exponential, inverted: 2 / (exp(a^2 / 2) * (1 - erf(a / sqrt 2))) for
 * 0 <= a <= TAIL_FAR. It is 2 + a * h, where h grows slowly from 1.6 to 2.5 and is a polynomial of
 * (a - TAIL_MIDDLE) / (a + TAIL_MIDDLE): Chebyshev's interpolation, whose error is below 6e-9 in float32 and 2e-16 in
 * float64. TAIL_MIDDLE is such that the first coefficient is nearly a float32. */
INLINE vf inverse_tail(vf a) {
    const vf middle = vf_set1((real)TAIL_MIDDLE), t = vf_div(a - middle, a + middle);
    return vf_fma(a, horner(tail_poly, sizeof tail_poly / sizeof *tail_poly, t), vf_set1(2));
}

/* Natural logarithm of a positive normal number, in double: log(2^e m) with m in [sqrt(1/2), sqrt(2)), by the series of
 * 2 atanh((m-1)/(m+1)). It uses only products and sums, so that the bits do not depend on an FMA or on libm. log(1) is
 * exactly 0. */
static double log_positive(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 0x1.6a09e667f3bcdp0) {
        m *= 0.5;
        exponent++;
    }
    double s = (m - 1) / (m + 1), z = s * s, series = 0;
    for (int k = 23; k >= 3; k -= 2)
        series = (series + 1.0 / k) * z;
    return exponent * 0x1.62e42fefa3800p-1 + (exponent * 0x1.ef35793c76730p-45 + 2 * (s + s * series));
}
