/* simd_avx512.h -- 16 floats or 8 doubles; needs AVX-512 F, BW, DQ, VL. */
#include "simd.h"

#include <immintrin.h>

/* VF names an intrinsic on floats, VU and VU_BITS on 32-bit integers: these fill a register beside 16 floats, and half
 * of one beside 8 doubles. VH and VH_BITS do so on 16-bit integers beside floats. VU_COUNT is the type of a
 * shift's count, VU_ODD is the blend mask of the odd
 * integers, VF_OF their bits as floats. VF_PARTS shuffles the 128-bit parts. */
#if REAL_BITS == 32
#define LANES 16
typedef __m512 vf;
typedef __mmask16 vm;
typedef __m512i vu;
typedef __m256i vh;
typedef __m128i vb;
#define VF(op) _mm512_##op##_ps
#define VF_MASK(op) _mm512_##op##_ps_mask
#define VF_PARTS _mm512_shuffle_f32x4
#define VU(op) _mm512_##op
#define VU_BITS(op) _mm512_##op##_si512
#define VF_OF(integers) _mm512_castsi512_ps(integers)
#define VU_ODD 0xaaaa
#define VU_COUNT unsigned
#define VH(op) _mm256_##op
#define VH_BITS(op) _mm256_##op##_si256
#else
#define LANES 8
typedef __m512d vf;
typedef __mmask8 vm;
typedef __m256i vu;
#define VF(op) _mm512_##op##_pd
#define VF_MASK(op) _mm512_##op##_pd_mask
#define VF_PARTS _mm512_shuffle_f64x2
#define VU(op) _mm256_##op
#define VU_BITS(op) _mm256_##op##_si256
#define VU_ODD 0xaa
#endif

#define REGISTERS 32
#include "simd_x86.h"

/* ---- both element types ---- */

INLINE vm lanes_below(int n) { return (vm)((1u << n) - 1u); }
INLINE vf vf_loadu_n(const real *p, int n) { return VF(maskz_loadu)(lanes_below(n), p); }
INLINE void vf_storeu_n(real *p, vf v, int n) { VF(mask_storeu)(p, lanes_below(n), v); }
#define SCALE2_IS_COMPLETE
INLINE vf vf_scale2(vf x, vf n) { return VF(scalef)(x, n); }
INLINE vf vf_scale2_unless(vm m, vf x, vf n) { return VF(maskz_scalef)((vm)~m, x, n); }
INLINE vf vf_select(vm m, vf a, vf b) { return VF(mask_blend)(m, b, a); }
INLINE vm vf_lt(vf a, vf b) { return VF_MASK(cmp)(a, b, _CMP_LT_OQ); }
INLINE vm vf_eq(vf a, vf b) { return VF_MASK(cmp)(a, b, _CMP_EQ_OQ); }
INLINE vm vm_and(vm a, vm b) { return (vm)(a & b); }
INLINE vm vm_or(vm a, vm b) { return (vm)(a | b); }
INLINE vm vm_not(vm a) { return (vm)~a; }
INLINE bool vm_any(vm m) { return m != 0; }
INLINE void vf_transpose(vf v[LANES]) {
    enum { N = LANES / 4 };
    vf t[LANES];
    transpose_parts(v);
    /* the 128-bit parts, 4 x 4 of them, in two steps */
    UNROLLED(i, N) {
        t[i] = VF_PARTS(v[i], v[i + N], 0x88);
        t[i + N] = VF_PARTS(v[i], v[i + N], 0xdd);
        t[i + 2 * N] = VF_PARTS(v[i + 2 * N], v[i + 3 * N], 0x88);
        t[i + 3 * N] = VF_PARTS(v[i + 2 * N], v[i + 3 * N], 0xdd);
    }
    UNROLLED(i, N) {
        v[i] = VF_PARTS(t[i], t[i + 2 * N], 0x88);
        v[i + N] = VF_PARTS(t[i + N], t[i + 3 * N], 0x88);
        v[i + 2 * N] = VF_PARTS(t[i], t[i + 2 * N], 0xdd);
        v[i + 3 * N] = VF_PARTS(t[i + N], t[i + 3 * N], 0xdd);
    }
}
/* -inf where a byte is 0, else +0. */
INLINE vf masked_where_zero(__m128i bytes) {
    vm zero = (vm)_mm_testn_epi8_mask(bytes, bytes);
    return VF(mask_blend)(zero, VF(setzero)(), vf_set1(-(real)INFINITY));
}
INLINE vf vf_from_bytes_n(const uint8_t *p, int n) {
    return masked_where_zero(_mm_mask_loadu_epi8(_mm_set1_epi8(1), lanes_below(n), p));
}

INLINE vw vw_xor(vw a, vw b, uint32_t c) {
    const vu k = vu_set1(c);
    /* 0x96 is the truth table of a ^ b ^ c */
    return (vw){VU(ternarylogic_epi32)(a.even, b.even, k, 0x96), VU(ternarylogic_epi32)(a.odd, b.odd, k, 0x96)};
}
INLINE vu vw_low(vw a) { return VU(mask_blend_epi32)(VU_ODD, a.even, VU(slli_epi64)(a.odd, 32)); }
INLINE vm vu_lt(vu a, vu b) { return VU(cmplt_epu32_mask)(a, b); }
INLINE vm vu_eq(vu a, vu b) { return VU(cmpeq_epi32_mask)(a, b); }

#if REAL_BITS == 32 /* ---- 16 floats ---- */

INLINE vf vf_from_bytes(const uint8_t *p) { return masked_where_zero(_mm_loadu_si128((const void *)p)); }

INLINE vb vb_loadu(const uint8_t *p) { return _mm_loadu_si128((const void *)p); }
INLINE vb vb_loadu_n(const uint8_t *p, int n) { return _mm_maskz_loadu_epi8(lanes_below(n), p); }
INLINE vf vf_from_f8(vb b) {
    const __m128i all_but_sign = _mm_set1_epi8(0x7f);
    const vm number = _mm_cmpneq_epi8_mask(_mm_and_si128(b, all_but_sign), all_but_sign);
    return _mm512_mask_cvtph_ps(vf_set1(NAN), number, f16_from_f8(b));
}
INLINE vh vh_loadu(const uint16_t *p) { return _mm256_loadu_si256((const void *)p); }
INLINE vh vh_loadu_n(const uint16_t *p, int n) { return _mm256_maskz_loadu_epi16(lanes_below(n), p); }
INLINE void vh_storeu(uint16_t *p, vh a) { _mm256_storeu_si256((void *)p, a); }
INLINE void vh_storeu_n(uint16_t *p, vh a, int n) { _mm256_mask_storeu_epi16(p, lanes_below(n), a); }
/* maskz with all lanes: without optimisation, GCC's _mm512_cvtps_ph is a macro that warns of a sign conversion. */
INLINE vh vh_f16(vf v) {
    return _mm512_maskz_cvtps_ph((__mmask16)0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE vh vh_bf16(vf v) { return _mm512_cvtepi32_epi16(bf16_bits(v)); }
#define HAS_HALF_PAIRS
INLINE vu vu_half_pairs(const uint16_t *p) {
    const __m512i lanes = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(lanes, _mm512_loadu_si512((const void *)p));
}
INLINE vu vu_joined(vh low, vh high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

#if defined(__AVX512BF16__) && defined(BF16_PRODUCTS)
#ifndef BF16_TILES
#define HAS_PAIR_DOT
INLINE vf vf_pair_dot(vu a, vu b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#endif
#define HAS_BF16_ROUNDING
INLINE vh vh_rounded(vf v) { return (__m256i)_mm512_cvtneps_pbh(v); }
INLINE vu vu_rounded(vf low, vf high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
INLINE vu vf_paired(vf even, vf odd) {
    const __m512i lanes = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(lanes, vu_rounded(even, odd));
}
#endif

INLINE vu vu_digits(const uint32_t *words, int r) {
    /* r is a multiple of 16, so these are the low halves of eight words, then their high halves */
    __m512i w = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)(words + digit_word(r))));
    __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(16), 1);
    return _mm512_and_si512(_mm512_srlv_epi32(w, shift), _mm512_set1_epi32(0xffff));
}

#else /* ---- 8 doubles; 8 integers fit into a __m256i ---- */

INLINE vf vf_from_bytes(const uint8_t *p) { return masked_where_zero(_mm_loadl_epi64((const void *)p)); }

#endif
