/* exp.inc.h -- exponentials and the logarithm, the same bits on every instruction set.
 *
 * Both exponentials take x <= 0, -inf or NaN: exp(0) is 1 and exp(-inf) is +0 exactly, NaN stays NaN, and what would
 * fall below the smallest normal number is +0. Reduction by powers of two with round-to-nearest through a magic number,
 * then a minimax polynomial (Remez, relative error, constant term pinned to 1).
 *
 *   exp_lean   for attention: one constant, x*log2(e) - n in one rounding; the error grows with |x|, it is at most
 *              2.2 + 0.22|x| ULP in float32 and 1 + 0.13|x| in float64
 *   exp_full   for softmax: ln 2 in two parts; below 1 ULP over the whole range
 *   tanh_full  for softcap, of any x: built like exp_full; at most 3 ULP, 1.6 where it exceeds a half
 */

#if REAL_BITS == 32
#define EXP_MAGIC 0x1.8p23f      /* adding it leaves the nearest integer in the low bits */
#define EXP_CUT (-0x1.5d589ep6f) /* the lowest above -126 ln 2: the result is normal */
#define EXP_LOG2E 0x1.715476p0f
#define EXP_LN2_HI 0x1.62e4p-1f /* 15 bits, so n * hi is exact */
#define EXP_LN2_LO 0x1.7f7d1cp-20f
#define TANH_FAR (-1.125f) /* -2|x| where tanh is about 1/2 */
static const real exp2_poly[] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba12p-10f};
static const real exp_poly[] = {1.0f, 0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f, 0x1.1239e2p-7f, 0x1.6a2434p-10f};
#else
#define EXP_MAGIC 0x1.8p52
#define EXP_CUT (-0x1.6232bdd7abcd2p9) /* the lowest above -1022 ln 2 */
#define EXP_LOG2E 0x1.71547652b82fep0
#define EXP_LN2_HI 0x1.62e42fefa3800p-1 /* 42 bits, so n * hi is exact */
#define EXP_LN2_LO 0x1.ef35793c76730p-45
#define TANH_FAR (-1.125)
static const real exp2_poly[] = {0x1.62e42fefa39efp-1,  0x1.ebfbdff82c5a4p-3,  0x1.c6b08d7049fe8p-5,
                                 0x1.3b2ab6fba011ap-7,  0x1.5d87fe78cd6d2p-10, 0x1.4309130ed8cbcp-13,
                                 0x1.ffcbfba980214p-17, 0x1.62bfc79d4ee48p-20, 0x1.b5267ce1af2c9p-24,
                                 0x1.e61b4f94c16bbp-28, 0x1.e79bb42bb9aa7p-32};
static const real exp_poly[] = {1.0,
                                0x1.0000000000000p-1,
                                0x1.555555555555bp-3,
                                0x1.5555555555503p-5,
                                0x1.111111110ec5dp-7,
                                0x1.6c16c16c3048ep-10,
                                0x1.a01a01b37e392p-13,
                                0x1.a01a01368efaap-16,
                                0x1.71ddf020cad51p-19,
                                0x1.27e5b4474932bp-22,
                                0x1.af6be7ea4c9b9p-26,
                                0x1.1e3d2b97d0eaap-29};
#endif

/* c[0] + r*(c[1] + ...), innermost first */
INLINE vf horner(vf r, const real *c, int n) {
    vf p = vf_set1(c[n - 1]);
#pragma GCC unroll 16
    for (int i = n - 2; i >= 0; i--)
        p = vf_fma(p, r, vf_set1(c[i]));
    return p;
}

/* 1 + r*(c[0] + r*(c[1] + ...)) */
INLINE vf horner_one(vf r, const real *c, int n) { return vf_fma(horner(r, c, n), r, vf_set1(1)); }

INLINE vf exp_lean(vf x) {
    const vf log2e = vf_set1(EXP_LOG2E), magic = vf_set1(EXP_MAGIC);
    /* 1) n = nearest integer of x*log2(e) */
    vf n = vf_fma(x, log2e, magic) - magic;
    /* 2) r = x*log2(e) - n in [-1/2, 1/2], the product unrounded */
    vf r = vf_fma(x, log2e, -n);
    /* 3) 2^r 2^n; the select also covers x = -inf, where r is NaN */
    vf p = horner_one(r, exp2_poly, sizeof exp2_poly / sizeof *exp2_poly);
    return vf_select(vf_lt(x, vf_set1(EXP_CUT)), vf_set1(0), vf_scale2(p, n));
}

/* x = n ln 2 + r, to more digits than x has */
INLINE vf reduce_full(vf x, vf *n) {
    const vf magic = vf_set1(EXP_MAGIC);
    *n = vf_fma(x, vf_set1(EXP_LOG2E), magic) - magic;
    return vf_fma(*n, vf_set1(-EXP_LN2_LO), vf_fma(*n, vf_set1(-EXP_LN2_HI), x));
}

INLINE vf exp_full(vf x) {
    vf n, r = reduce_full(x, &n);
    vf p = horner_one(r, exp_poly, sizeof exp_poly / sizeof *exp_poly);
    return vf_select(vf_lt(x, vf_set1(EXP_CUT)), vf_set1(0), vf_scale2(p, n));
}

/* tanh of any x, from exp(-2|x|) = q = 1 + e. Near 0 it is -e / (2 + e), for e keeps its digits; farther out
 * 1 - 2q / (2 + e), for q is small and so are its errors beside 1. */
INLINE vf tanh_full(vf x) {
    const vf one = vf_set1(1), y = vf_max(vf_set1(EXP_CUT), vf_max(x, -x) * vf_set1(-2));
    vf n, r = reduce_full(y, &n);
    const vf power = vf_scale2(one, n);
    const vf m = horner(r, exp_poly, sizeof exp_poly / sizeof *exp_poly) * r;
    const vf q = vf_fma(m, power, power), e = vf_fma(m, power, power - one);
    const vm far = vf_lt(y, vf_set1(TANH_FAR));
    vf t = vf_div(vf_select(far, q + q, e), e + vf_set1(2)); /* of -|x| */
    t = vf_select(far, t - one, t);
    return vf_select(vf_lt(x, vf_set1(0)), t, -t);
}

/* Natural logarithm of a positive normal number, in double: log(2^e m) with m in [sqrt(1/2), sqrt(2)) by the series of
 * 2 atanh((m-1)/(m+1)). Plain products and sums, so the bits do not depend on an FMA; log(1) is 0. */
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
