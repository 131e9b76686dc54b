/* fma.c -- the fma and fmaf of csrc/kernels/fma.h, on hard and on random operands.
 *
 *   fma N    all triples of special values, then N random triples of each kind
 *
 * Prints a line for each of the two types: the number of triples, a hash of the results, and how many of them the
 * function of the C library and the plain expression (for float: in double, rounded twice) get wrong. The hash must be
 * the same on every machine. The exit code is 1 if cattn_fma or cattn_fmaf, as this build selects them, differ from
 * cattn_own_fma and cattn_own_fmaf. So where a right C library is in use, cattn's own functions are right, too.
 */
#include <fenv.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fma.h"

static uint64_t source;

/* SplitMix64 */
static uint64_t draw(void) {
    uint64_t z = source += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static int64_t between(int64_t least, int64_t most) { return least + (int64_t)(draw() % (uint64_t)(most - least + 1)); }
static bool chance(int percent) { return between(0, 99) < percent; }

static uint64_t bits64(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? UINT64_C(0x7ff8000000000000) : bits; /* NaNs have no order and no sign */
}
static uint64_t bits32(float x) { return bits64((double)x); }

static double from64(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

struct count {
    uint64_t n, hash, selected_wrong, library_wrong, plain_wrong;
};

static void mix(struct count *count, uint64_t bits) {
    count->n++;
    count->hash = (count->hash ^ bits) * UINT64_C(0x9e3779b97f4a7c15);
    count->hash ^= count->hash >> 29;
}

static void wrong(uint64_t *counter, const char *name, double a, double b, double c, uint64_t own, uint64_t got) {
    if (++*counter <= 3 && *name)
        fprintf(stderr, "%s(%a, %a, %a) = %a, but cattn's own gives %a\n", name, a, b, c, from64(got), from64(own));
}

static void try64(struct count *count, double a, double b, double c) {
    const uint64_t own = bits64(cattn_own_fma(a, b, c)), selected = bits64(cattn_fma(a, b, c));
    mix(count, own);
    if (selected != own)
        wrong(&count->selected_wrong, "cattn_fma", a, b, c, own, selected);
    count->library_wrong += bits64(fma(a, b, c)) != own;
    count->plain_wrong += bits64(a * b + c) != own;
}

static void try32(struct count *count, float a, float b, float c) {
    const uint64_t own = bits32(cattn_own_fmaf(a, b, c)), selected = bits32(cattn_fmaf(a, b, c));
    mix(count, own);
    if (selected != own)
        wrong(&count->selected_wrong, "cattn_fmaf", (double)a, (double)b, (double)c, own, selected);
    count->library_wrong += bits32(fmaf(a, b, c)) != own;
    count->plain_wrong += bits32((float)((double)a * (double)b + (double)c)) != own;
}

/* ---- special values ---- */

static const double SPECIAL64[] = {
    0,
    0x1p-1074,
    0x1.8p-1073,
    0x1.0000000000001p-1022,
    0x1.ffffffffffffep-1023,
    0x1p-1022,
    0x1p-1023,
    0x1.0000000000001p-1021,
    0x1p-969,
    0x1p-540,
    0x1.0000000000001p-538,
    0x1p-537,
    0x1.6a09e667f3bcdp-537,
    0x1p-511,
    0x1p-106,
    0x1p-54,
    0x1.0000000000001p-54,
    0x1p-53,
    0x1p-52,
    0x1.fffffffffffffp-2,
    0x1p-1,
    0x1.8p-1,
    0x1.fffffffffffffp-1,
    1,
    0x1.0000000000001p0,
    0x1.0000000000002p0,
    0x1.0000001p0,
    0x1.0000002p0,
    1.5,
    3,
    0x1.fffffffffffffp0,
    0x1.000001p27,
    0x1p52,
    0x1.0000000000001p53,
    0x1p53,
    0x1p54,
    0x1p106,
    0x1p511,
    0x1p512,
    0x1.fffffffffffffp511,
    0x1p970,
    0x1.fffffffffffffp1022,
    0x1p1023,
    DBL_MAX,
    INFINITY,
    NAN,
};
static const float SPECIAL32[] = {
    0,
    0x1p-149f,
    0x1.8p-148f,
    0x1.000002p-126f,
    0x1.fffffcp-127f,
    0x1p-126f,
    0x1p-127f,
    0x1.000002p-125f,
    0x1p-102f,
    0x1p-76f,
    0x1.000002p-75f,
    0x1p-74f,
    0x1.6a09e6p-75f,
    0x1p-48f,
    0x1p-25f,
    0x1.000002p-25f,
    0x1p-24f,
    0x1p-23f,
    0x1.fffffep-2f,
    0x1p-1f,
    0x1.8p-1f,
    0x1.fffffep-1f,
    1,
    0x1.000002p0f,
    0x1.000004p0f,
    0x1.002p0f,
    0x1.004p0f,
    1.5f,
    3,
    0x1.fffffep0f,
    0x1.002p12f,
    0x1p23f,
    0x1.000002p24f,
    0x1p24f,
    0x1p25f,
    0x1p48f,
    0x1p63f,
    0x1p64f,
    0x1.fffffep63f,
    0x1p103f,
    0x1.fffffep126f,
    0x1p127f,
    FLT_MAX,
    INFINITY,
    NAN,
};
enum { N64 = sizeof SPECIAL64 / sizeof *SPECIAL64, N32 = sizeof SPECIAL32 / sizeof *SPECIAL32 };

static void try_special(struct count *count64, struct count *count32) {
    for (int signs = 0; signs < 8; signs++) {
        const double sign[3] = {signs & 1 ? -1 : 1, signs & 2 ? -1 : 1, signs & 4 ? -1 : 1};
        for (int a = 0; a < N64; a++)
            for (int b = 0; b < N64; b++)
                for (int c = 0; c < N64; c++)
                    try64(count64, sign[0] * SPECIAL64[a], sign[1] * SPECIAL64[b], sign[2] * SPECIAL64[c]);
        for (int a = 0; a < N32; a++)
            for (int b = 0; b < N32; b++)
                for (int c = 0; c < N32; c++)
                    try32(count32, (float)sign[0] * SPECIAL32[a], (float)sign[1] * SPECIAL32[b],
                          (float)sign[2] * SPECIAL32[c]);
    }
}

/* ---- random operands ---- */

/* A number whose mantissa is random, or nearly a short one, with an exponent between two. */
static double random_number(int precision, int least, int most) {
    uint64_t mantissa = draw() >> 12;
    if (chance(30))
        mantissa &= UINT64_MAX << between(20, 52);
    if (chance(20))
        mantissa ^= (UINT64_C(1) << between(0, 40)) - 1;
    mantissa = mantissa >> (53 - precision) << (53 - precision) & UINT64_C(0xfffffffffffff);
    const double magnitude = ldexp(1 + (double)mantissa * 0x1p-52, (int)between(least, most));
    return chance(50) ? -magnitude : magnitude;
}

/* Moves x by a few of its units in the last place. */
static double near(double x) { return from64(bits64(x) + (uint64_t)between(-3, 3)); }
static float near32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits += (uint32_t)between(-3, 3);
    memcpy(&x, &bits, sizeof bits);
    return x;
}

/* The exponent of c, given the exponent of the product: anywhere, or where the two sums interact, or cancel. */
static int beside(int exponent, int precision) {
    return exponent + (int)(chance(50) ? between(-2 * precision - 3, 2 * precision + 3) : between(-1, 2));
}

static int clamp(int x, int least, int most) { return x < least ? least : x > most ? most : x; }

static void try_random64(struct count *count) {
    const int kind = (int)between(0, 3);
    const int at = kind == 0 ? -1022 : kind == 1 ? 1023 : (int)between(-1000, 1000); /* of the product */
    const int first = clamp((int)between(at - 900, at + 900), -1070, 1020);
    const int second = clamp(at - first + (int)between(-60, 60), -1074, 1023);
    const double a = random_number(53, first, first), b = random_number(53, second, second);
    const int third = clamp(beside(first + second, 53), -1074, 1023);
    double c = random_number(53, third, third);
    if (chance(25) && isfinite(a * b))
        c = near(-(a * b));
    try64(count, a, b, c);
}

/* A number with exactly this many bits, of which the last is 1. */
static double odd_number(int n_bits) { return (double)((draw() >> (64 - n_bits)) | UINT64_C(1) << (n_bits - 1) | 1); }

/* A product of 24 or 25 bits is halfway between two floats as often as not. Then c decides, and double may lose it. */
static void try_halfway32(struct count *count) {
    const int n_bits = (int)between(2, 23), at = (int)between(-140, 100);
    const double a = ldexp(odd_number(n_bits), at), b = odd_number(25 - n_bits);
    try32(count, (float)a, (float)b, (float)random_number(24, -149, clamp(at + 24, -149, 127)));
}

static void try_random32(struct count *count) {
    if (chance(20)) {
        try_halfway32(count);
        return;
    }
    const int kind = (int)between(0, 3);
    const int at = kind == 0 ? -126 : kind == 1 ? 127 : (int)between(-120, 120);
    const int first = clamp((int)between(at - 100, at + 100), -149, 126);
    const int second = clamp(at - first + (int)between(-30, 30), -149, 127);
    const float a = (float)random_number(24, first, first), b = (float)random_number(24, second, second);
    const int third = clamp(beside(first + second, 24), -149, 127);
    float c = (float)random_number(24, third, third);
    if (chance(25) && isfinite(a * b))
        c = near32(-(a * b));
    try32(count, a, b, c);
}

static bool report(const char *name, const struct count *count) {
    printf("%s: %" PRIu64 " triples, hash %016" PRIx64 ", wrong: library %" PRIu64 ", plain %" PRIu64 "\n", name,
           count->n, count->hash, count->library_wrong, count->plain_wrong);
    return count->selected_wrong == 0;
}

int main(int argc, char **argv) {
    struct count count64 = {0}, count32 = {0};
    if (argc != 2) {
        fprintf(stderr, "usage: %s N\n", argv[0]);
        return 2;
    }
    printf("cattn_fma is %s\n", CATTN_OWN_FMA ? "cattn's own" : "fma()");
    try_special(&count64, &count32);
    for (int64_t i = 0, n = atoll(argv[1]); i < n; i++) {
        try_random64(&count64);
        try_random32(&count32);
    }
    const bool ok = report("fma", &count64);
    return report("fmaf", &count32) && ok ? 0 : 1;
}
