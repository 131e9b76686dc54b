/* fma.h -- cattn_fma(a, b, c) and cattn_fmaf(a, b, c): a * b + c, rounded once, with every C library.
 *
 * Where the compiler has an instruction, and with C libraries that are known to be right, these are fma() and fmaf().
 * Others are wrong. The functions of mingw-w64 round twice, as does zig's runtime library for some subnormal results.
 * Musl's fma() gives +0, not -0, for a tiny negative product plus +0. There the tables without an instruction use the
 * two functions below, which tests/core/fma.c compares with right ones.
 *
 * They are the algorithms of S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
 * using rounding to odd", IEEE Transactions on Computers 57(4), 2008. A sum that is rounded to odd (if it is inexact,
 * to the neighbour whose last bit is 1) and has two bits more than the result can be rounded again without harm: it is
 * never halfway between two results unless the exact sum is. All assume rounding to nearest, which fp_mode.h sets.
 */
#ifndef CATTN_FMA_H
#define CATTN_FMA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__FP_FAST_FMA) || defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__GLIBC__) || defined(__APPLE__)
#define CATTN_OWN_FMA 0
#define cattn_fma fma
#define cattn_fmaf fmaf
#else
#define CATTN_OWN_FMA 1
#define cattn_fma cattn_own_fma
#define cattn_fmaf cattn_own_fmaf
#endif

/* a + b and the rounding error of it: together exactly the sum. Knuth's algorithm. */
static inline double cattn_two_sum(double a, double b, double *error) {
    const double sum = a + b, b_part = sum - a;
    *error = (a - (sum - b_part)) + (b - b_part);
    return sum;
}

/* a * b and the rounding error of it, for operands far from overflow and underflow. Dekker's algorithm, on halves of 26
 * bits. */
static inline double cattn_two_product(double a, double b, double *error) {
    const double split = 0x1p27 + 1, product = a * b;
    const double a_high = split * a - (split * a - a), a_low = a - a_high;
    const double b_high = split * b - (split * b - b), b_low = b - b_high;
    *error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low;
    return product;
}

/* a + b, rounded to odd. If the sum is not finite, the error is NaN and both comparisons are false. */
static inline double cattn_odd_sum(double a, double b) {
    double error, sum = cattn_two_sum(a, b, &error);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if ((error < 0 || error > 0) && (bits & 1) == 0)
        bits += (error > 0) == (sum > 0) ? 1 : UINT64_MAX; /* to the neighbour on the side of the error */
    memcpy(&sum, &bits, sizeof sum);
    return sum;
}

/* The product is exact in double, and double has more than two bits more than float. */
static inline float cattn_own_fmaf(float a, float b, float c) {
    return (float)cattn_odd_sum((double)a * (double)b, (double)c);
}

static inline double cattn_own_fma(double a, double b, double c) {
    /* Wider than the product's 106 bits and the result's 53: c this far above the product is the result, and c this far
     * below decides between two results as any other number of its sign does. */
    const int far = 120;
    double low, rest, c_low, high, c_scaled;
    int a_exponent, b_exponent, c_exponent;
    if (a == 0 || b == 0 || !isfinite(a) || !isfinite(b))
        return a * b + c;
    if (c == 0 || !isfinite(c))
        return c == 0 ? a * b : c; /* not a * b + c, whose product may underflow or overflow */

    /* in units of 2^exponent, where the product is from 1/4 to 1: nothing below overflows or underflows */
    a = frexp(a, &a_exponent);
    b = frexp(b, &b_exponent);
    c_scaled = frexp(c, &c_exponent);
    const int exponent = a_exponent + b_exponent, shift = c_exponent - exponent;
    if (shift > far)
        return c;
    c_scaled = ldexp(c_scaled, shift < -far ? -far : shift);

    const double product = cattn_two_product(a, b, &low);
    const double c_high = cattn_two_sum(c_scaled, low, &c_low);
    high = cattn_two_sum(product, c_high, &rest);
    rest = cattn_odd_sum(c_low, rest);
    double result = high + rest;

    /* A subnormal result has fewer bits. The sum with 2^-1022, which is 2^52 of its units, is rounded to a unit. */
    const double smallest_normal = ldexp(1, -1022 - exponent);
    if (fabs(result) < smallest_normal) {
        const double sign = copysign(1, result), base = sign * smallest_normal;
        double base_low;
        high = cattn_two_sum(base, high, &base_low);
        result = copysign((high + cattn_odd_sum(base_low, rest)) - base, sign);
    }
    return ldexp(result, exponent);
}

#endif
