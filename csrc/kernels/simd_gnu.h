/* simd_gnu.h -- the vocabulary by GNU vectors of VECTOR_BYTES bytes, for any CPU.
 *
 * 16 bytes is the portable table (SSE2, NEON), 64 the test-only twin of the AVX-512 table.
 *
 * Subscripts and loops over lanes are allowed here, and only here: compilers turn them into vector code where the CPU
 * has an instruction for it.
 */
#include "simd.h"

/* Vectors wider than the CPU's have no fixed calling convention. None crosses a call: everything here is inlined. */
#pragma GCC diagnostic ignored "-Wpsabi"

#define LANES (VECTOR_BYTES * 8 / REAL_BITS)
#if defined(__aarch64__) || VECTOR_BYTES == 64 /* NEON; the twin of AVX-512 */
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
/* NEON names an intrinsic on floats: what compilers make of loops over lanes is often single lanes. */
#if defined(__AARCH64EL__) && VECTOR_BYTES == 16
#include <arm_neon.h>
#define HAS_LANES
#if REAL_BITS == 32
#define NEON(op) op##_f32
#define NEON_INTEGERS vcvtq_s32_f32
#else
#define NEON(op) op##_f64
#define NEON_INTEGERS vcvtq_s64_f64
#endif
#endif
typedef real vf __attribute__((vector_size(VECTOR_BYTES)));
typedef real_bits v_bits __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
#if REAL_BITS == 32
typedef int32_t vm __attribute__((vector_size(VECTOR_BYTES))); /* all ones or all zeros per lane */
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
#else
typedef int64_t vm __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t vi __attribute__((vector_size(VECTOR_BYTES)));
#endif
typedef uint64_t vu_wide __attribute__((vector_size(LANES * 8)));
/* Both halves of the 64-bit products, as vectors of the same width. */
typedef struct {
    vu low, high;
} vw;

#define EACH_LANE(i) for (int i = 0; i < LANES; i++)

INLINE vf vf_set1(real x) { return x - (vf){0}; } /* minus: -0 + 0 would be +0 */
INLINE vf vf_loadu_n(const real *p, int n) {
    vf v = {0};
    memcpy(&v, p, (size_t)n * sizeof(real));
    return v;
}
INLINE vf vf_loadu(const real *p) { return vf_loadu_n(p, LANES); }
INLINE void vf_storeu(real *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE void vf_storeu_n(real *p, vf v, int n) { memcpy(p, &v, (size_t)n * sizeof(real)); }
/* fma() without an instruction would be a slow call of libm: such machines get a table outside the bit contract. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF)
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif
INLINE vf vf_fma(vf a, vf b, vf c) {
#ifdef NEON
    return NEON(vfmaq)(c, a, b);
#elif HAS_FMA
    vf r;
    EACH_LANE(i) r[i] = REAL_FMA(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}
INLINE vf vf_div(vf a, vf b) { return a / b; }
INLINE vm vf_lt(vf a, vf b) { return (vm)(a < b); }
INLINE vm vf_eq(vf a, vf b) { return (vm)(a == b); }
INLINE vm vm_and(vm a, vm b) { return a & b; }
INLINE vm vm_or(vm a, vm b) { return a | b; }
INLINE vm vm_not(vm a) { return ~a; }
INLINE bool vm_any(vm m) {
    uint64_t words[sizeof(vm) / 8], any = 0;
    memcpy(words, &m, sizeof m);
    for (size_t i = 0; i < sizeof(vm) / 8; i++)
        any |= words[i];
    return any != 0;
}
INLINE vf vf_select(vm m, vf a, vf b) { return (vf)(((vm)a & m) | ((vm)b & ~m)); }
INLINE vf vf_max(vf a, vf b) { return vf_select((vm)(a > b), a, b); }
INLINE vf vf_min(vf a, vf b) { return vf_select((vm)(a < b), a, b); }
INLINE vf vf_abs(vf x) { return (vf)((vm)x & ~(vm)vf_set1((real)-0.0)); }
#ifdef HAS_LANES
#define LANE(i) NEON(vdupq_laneq)(v, (i) % LANES) /* a constant */
INLINE vf vf_lane(vf v, int i) { return i < 2 ? i < 1 ? LANE(0) : LANE(1) : i < 3 ? LANE(2) : LANE(3); }
#endif
INLINE vf vf_scale2(vf x, vf n) {
#ifdef NEON
    const vi whole = NEON_INTEGERS(n); /* defined for any n */
#else
    /* for NaN and n out of range the exponent does not matter, but the conversion must not be undefined behaviour */
    const vf limit = vf_set1((real)REAL_BIAS);
    const vf inside = vf_select(vm_and(vf_lt(-limit, n), vf_lt(n, limit)), n, (vf){0});
    const vi whole = __builtin_convertvector(inside, vi);
#endif
    return x * (vf)(((v_bits)whole + REAL_BIAS) << REAL_MANT);
}
INLINE vf vf_scale2_unless(vm m, vf x, vf n) { return (vf)((vm)vf_scale2(x, n) & ~m); }
INLINE void vf_transpose(vf v[LANES]) {
    real t[LANES][LANES];
    EACH_LANE(i) vf_storeu(t[i], v[i]);
    EACH_LANE(i) EACH_LANE(j) v[i][j] = t[j][i];
}
INLINE vf vf_swap_pairs(vf v) {
    vf r = v; /* GCC at -O1 does not see that the loop sets every lane */
    EACH_LANE(i) r[i] = v[i ^ 1];
    return r;
}
INLINE vf vf_from_bytes_n(const uint8_t *p, int n) {
    vf v = {0};
    for (int i = 0; i < n; i++)
        v[i] = p[i] ? (real)0 : -(real)INFINITY;
    return v;
}
INLINE vf vf_from_bytes(const uint8_t *p) { return vf_from_bytes_n(p, LANES); }

#if REAL_BITS == 32
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vb_signed __attribute__((vector_size(LANES)));
INLINE vh vh_loadu_n(const uint16_t *p, int n) {
    vh a = {0};
    memcpy(&a, p, (size_t)n * sizeof *p);
    return a;
}
INLINE vh vh_loadu(const uint16_t *p) { return vh_loadu_n(p, LANES); }
INLINE void vh_storeu(uint16_t *p, vh a) { memcpy(p, &a, sizeof a); }
INLINE void vh_storeu_n(uint16_t *p, vh a, int n) { memcpy(p, &a, (size_t)n * sizeof *p); }
INLINE vu vu_joined(vh low, vh high) {
    const vh both[2] = {low, high};
    vu pairs;
    memcpy(&pairs, both, sizeof pairs);
    return pairs;
}
INLINE vf vf_from_f16(vh a) {
    const vu w = __builtin_convertvector(a, vu), magnitude = (w & 0x7fff) << 13;
    const vu finite = (vu)((vf)magnitude * vf_set1(0x1p112f)); /* changes the exponent bias, also of subnormals */
    const vu special = (vu)((w & 0x7c00) == 0x7c00);
    return (vf)((special & (magnitude | 0x7f800000)) | (~special & finite) | (w & 0x8000) << 16);
}
INLINE vf vf_from_bf16(vh a) { return (vf)(__builtin_convertvector(a, vu) << 16); }
INLINE vb vb_loadu_n(const uint8_t *p, int n) {
    vb b = {0};
    memcpy(&b, p, (size_t)n);
    return b;
}
INLINE vb vb_loadu(const uint8_t *p) { return vb_loadu_n(p, LANES); }
INLINE vf vf_from_i8(vb b) { return __builtin_convertvector(__builtin_convertvector((vb_signed)b, vi), vf); }
/* As float16 it has the same sign, and exponent and mantissa of a number 256 times smaller. */
INLINE vf vf_from_f8(vb b) {
    const vh w = __builtin_convertvector(b, vh);
    const vf v = vf_from_f16((w & 0x80) << 8 | (w & 0x7f) << 7);
    return vf_select(vf_eq(vf_max(v, -v), vf_set1(1.875f)), vf_set1(NAN), v); /* 480 / 256: 448 is the largest number */
}
/* The three ranges of a result (subnormal, normal, too large or NaN) are computed for all lanes, then selected. */
INLINE vh vh_f16(vf v) {
    const vu w = (vu)v, a = w & 0x7fffffff;
    const vu subnormal = (vu)((vf)a + vf_set1(0.5f)) - 0x3f000000; /* the sum rounds to multiples of 2^-24 */
    const vu normal = (a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13;
    const vu special = (vu)(a > 0x7f800000) & 0x200;
    const vu small = (vu)(a < 0x38800000), large = (vu)(a >= 0x47800000);
    const vu r = (small & subnormal) | (~small & ~large & normal) | (large & (special | 0x7c00));
    return __builtin_convertvector(r | (w >> 16 & 0x8000), vh);
}
INLINE vh vh_bf16(vf v) {
    const vu w = (vu)v;
    return __builtin_convertvector((w + 0x7fff + (w >> 16 & 1)) >> 16, vh);
}
#endif

INLINE vu vu_set1(uint32_t x) { return x - (vu){0}; }
INLINE vu vu_loadu(const uint32_t *p) {
    vu a;
    memcpy(&a, p, sizeof a);
    return a;
}
INLINE void vu_storeu(uint32_t *p, vu a) { memcpy(p, &a, sizeof a); }
INLINE vu vu_add(vu a, vu b) { return a + b; }
INLINE vu vu_xor(vu a, vu b) { return a ^ b; }
INLINE vu vu_and(vu a, vu b) { return a & b; }
INLINE vu vu_shr16(vu a) { return a >> 16; }
#if REAL_BITS == 32
INLINE vu vu_of_vf(vf v) { return (vu)v; }
INLINE vf vf_of_vu(vu a) { return (vf)a; }
INLINE vu vu_shl16(vu a) { return a << 16; }
#endif
INLINE vw vw_from(vu a) { return (vw){a, a}; }
INLINE vw vw_mul(vw a, uint32_t m) {
    vu_wide product = __builtin_convertvector(a.low, vu_wide) * m;
    return (vw){__builtin_convertvector(product, vu), __builtin_convertvector(product >> 32, vu)};
}
INLINE vw vw_high(vw a) { return (vw){a.high, a.high}; }
INLINE vw vw_xor(vw a, vw b, uint32_t c) { return (vw){a.low ^ b.low ^ c, a.high}; }
INLINE vu vw_low(vw a) { return a.low; }
INLINE vm vu_lt(vu a, vu b) { return __builtin_convertvector(a < b, vm); }
INLINE vm vu_eq(vu a, vu b) { return __builtin_convertvector(a == b, vm); }
INLINE vu vu_digits(const uint32_t *words, int r) {
    vu digits = {0}; /* as in vf_swap_pairs */
    EACH_LANE(i) {
        uint32_t word = words[digit_word(r + i)];
        digits[i] = ((r + i) >> 3) & 1 ? word >> 16 : word & 0xffff;
    }
    return digits;
}
