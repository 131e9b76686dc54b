/* simd_scalar.h -- one lane: plain C with the fma of fma.h. Slow, with the same bits: the tests compare against it. */
#include "simd.h"

#define LANES 1
#define REGISTERS 16
#define HAS_FMA 1
typedef real vf;
typedef bool vm;
typedef uint32_t vu;
typedef uint64_t vw;

INLINE vf vf_set1(real x) { return x; }
INLINE vf vf_loadu(const real *p) { return *p; }
INLINE vf vf_loadu_n(const real *p, int n) { return n > 0 ? *p : (real)0; }
INLINE void vf_storeu(real *p, vf v) { *p = v; }
INLINE void vf_storeu_n(real *p, vf v, int n) {
    if (n > 0)
        *p = v;
}
INLINE vf vf_fma(vf a, vf b, vf c) { return REAL_FMA(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return a > b ? a : b; }
INLINE vf vf_min(vf a, vf b) { return a < b ? a : b; }
INLINE vf vf_abs(vf x) { return from_bits(to_bits(x) << 1 >> 1); }
INLINE vf vf_div(vf a, vf b) { return a / b; }
INLINE vf vf_scale2(vf x, vf n) {
    /* for NaN and n out of range the exponent does not matter, but the conversion must not be undefined behaviour */
    const real limit = (real)REAL_BIAS;
    int e = n > -limit && n <= limit ? (int)n : 0;
    return x * from_bits((real_bits)(e + REAL_BIAS) << REAL_MANT);
}
INLINE vf vf_scale2_unless(vm m, vf x, vf n) { return m ? 0 : vf_scale2(x, n); }
INLINE vm vf_lt(vf a, vf b) { return a < b; }
INLINE vm vf_eq(vf a, vf b) { return a == b; }
INLINE vm vm_and(vm a, vm b) { return a && b; }
INLINE vm vm_or(vm a, vm b) { return a || b; }
INLINE vm vm_not(vm a) { return !a; }
INLINE bool vm_any(vm m) { return m; }
INLINE vf vf_select(vm m, vf a, vf b) { return m ? a : b; }
INLINE void vf_transpose(vf v[LANES]) { (void)v; }
INLINE vf vf_from_bytes(const uint8_t *p) { return *p ? (real)0 : -(real)INFINITY; }
INLINE vf vf_from_bytes_n(const uint8_t *p, int n) { return n > 0 ? vf_from_bytes(p) : (real)0; }

#if REAL_BITS == 32
typedef uint16_t vh;
typedef uint8_t vb;
INLINE vh vh_loadu(const uint16_t *p) { return *p; }
INLINE vh vh_loadu_n(const uint16_t *p, int n) { return n > 0 ? *p : 0; }
INLINE void vh_storeu(uint16_t *p, vh a) { *p = a; }
INLINE void vh_storeu_n(uint16_t *p, vh a, int n) {
    if (n > 0)
        *p = a;
}
INLINE vu vu_joined(vh low, vh high) {
    const vh both[2] = {low, high};
    vu pair;
    memcpy(&pair, both, sizeof pair);
    return pair;
}
INLINE vf vf_from_f16(vh a) {
    const uint32_t magnitude = (a & 0x7fffu) << 13, sign = (a & 0x8000u) << 16;
    if ((a & 0x7c00) == 0x7c00)
        return from_bits(sign | magnitude | 0x7f800000u);
    return from_bits(sign | to_bits(from_bits(magnitude) * 0x1p112f)); /* changes the bias, also of subnormals */
}
INLINE vf vf_from_bf16(vh a) { return from_bits((uint32_t)a << 16); }
INLINE vb vb_loadu(const uint8_t *p) { return *p; }
INLINE vb vb_loadu_n(const uint8_t *p, int n) { return n > 0 ? *p : 0; }
INLINE vf vf_from_i8(vb b) { return (vf)(int8_t)b; }
/* As float16 it has the same sign, and exponent and mantissa of a number 256 times smaller. */
INLINE vf vf_from_f8(vb b) {
    return (b & 0x7f) == 0x7f ? (vf)NAN : vf_from_f16((vh)((b & 0x80u) << 8 | (b & 0x7fu) << 7));
}
INLINE vh vh_f16(vf v) {
    const uint32_t w = to_bits(v), a = w & 0x7fffffffu, sign = w >> 16 & 0x8000u;
    if (a < 0x38800000u) /* the sum rounds to multiples of 2^-24 */
        return (vh)(sign | (to_bits(from_bits(a) + 0.5f) - 0x3f000000u));
    if (a >= 0x47800000u)
        return (vh)(sign | (a > 0x7f800000u ? 0x7e00u : 0x7c00u));
    return (vh)(sign | (a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13);
}
INLINE vh vh_bf16(vf v) {
    const uint32_t w = to_bits(v);
    return (vh)((w + 0x7fffu + (w >> 16 & 1u)) >> 16);
}
#endif

INLINE vu vu_set1(uint32_t x) { return x; }
INLINE vu vu_loadu(const uint32_t *p) { return *p; }
INLINE void vu_storeu(uint32_t *p, vu a) { *p = a; }
INLINE vu vu_add(vu a, vu b) { return a + b; }
INLINE vu vu_xor(vu a, vu b) { return a ^ b; }
INLINE vu vu_and(vu a, vu b) { return a & b; }
INLINE vu vu_shr16(vu a) { return a >> 16; }
#if REAL_BITS == 32
INLINE vu vu_of_vf(vf v) { return to_bits(v); }
INLINE vf vf_of_vu(vu a) { return from_bits(a); }
INLINE vu vu_shl16(vu a) { return a << 16; }
#endif
INLINE vw vw_from(vu a) { return a; }
INLINE vw vw_mul(vw a, uint32_t m) { return (a & 0xffffffffu) * m; }
INLINE vw vw_high(vw a) { return a >> 32; }
INLINE vw vw_xor(vw a, vw b, uint32_t c) { return a ^ b ^ c; }
INLINE vu vw_low(vw a) { return (vu)a; }
INLINE vm vu_lt(vu a, vu b) { return a < b; }
INLINE vm vu_eq(vu a, vu b) { return a == b; }
INLINE vu vu_digits(const uint32_t *words, int r) {
    uint32_t word = words[digit_word(r)];
    return (r >> 3) & 1 ? word >> 16 : word & 0xffff;
}
