/* simd_avx2.h -- 8 floats or 4 doubles; needs AVX2 and FMA. */
#include "simd.h"

#include <immintrin.h>

#define HAS_FMA 1
/* VF names an intrinsic on floats, VU and VU_BITS on 32-bit integers: these fill a register beside 8 floats, and half
 * of one beside 4 doubles. VU_ODD is the blend mask of the odd integers. */
#if REAL_BITS == 32
#define LANES 8
typedef __m256 vf;
typedef __m256 vm; /* all ones or all zeros per lane */
typedef __m256i vu;
#define VF(op) _mm256_##op##_ps
#define VU(op) _mm256_##op
#define VU_BITS(op) _mm256_##op##_si256
#define VU_ODD 0xaa
INLINE __m256i lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#else
#define LANES 4
typedef __m256d vf;
typedef __m256d vm;
typedef __m128i vu;
#define VF(op) _mm256_##op##_pd
#define VU(op) _mm_##op
#define VU_BITS(op) _mm_##op##_si128
#define VU_ODD 0xa
INLINE __m256i lanes_below(int n) { return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3)); }
#endif

/* ---- both element types ---- */

INLINE vf vf_set1(real x) { return VF(set1)(x); }
INLINE vf vf_loadu(const real *p) { return VF(loadu)(p); }
INLINE vf vf_loadu_n(const real *p, int n) { return VF(maskload)(p, lanes_below(n)); }
INLINE void vf_storeu(real *p, vf v) { VF(storeu)(p, v); }
INLINE void vf_storeu_n(real *p, vf v, int n) { VF(maskstore)(p, lanes_below(n), v); }
#define HAS_STREAM 1
INLINE void vf_stream(real *p, vf v) { VF(stream)(p, v); }
INLINE void stream_end(void) { _mm_sfence(); }
INLINE vf vf_fma(vf a, vf b, vf c) { return VF(fmadd)(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return VF(max)(a, b); }
INLINE vf vf_div(vf a, vf b) { return VF(div)(a, b); }
INLINE vf vf_select(vm m, vf a, vf b) { return VF(blendv)(b, a, m); }
INLINE vm vf_lt(vf a, vf b) { return VF(cmp)(a, b, _CMP_LT_OQ); }
INLINE vm vf_eq(vf a, vf b) { return VF(cmp)(a, b, _CMP_EQ_OQ); }
INLINE vm vm_and(vm a, vm b) { return VF (and)(a, b); }
INLINE vm vm_or(vm a, vm b) { return VF(or)(a, b); }
INLINE bool vm_any(vm m) { return VF(movemask)(m) != 0; }

#if REAL_BITS == 32 /* ---- 8 floats ---- */

INLINE vm vm_not(vm a) { return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1))); }
INLINE vf vf_scale2(vf x, vf n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(REAL_BIAS));
    return x * _mm256_castsi256_ps(_mm256_slli_epi32(e, REAL_MANT));
}
INLINE void vf_transpose(vf v[LANES]) {
    __m256 t[8];
    /* 2x2 blocks, then 4x4 inside each 128-bit half, then the halves themselves */
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        v[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        v[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        v[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        v[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        v[i] = t[i];
}
INLINE vf vf_from_bytes(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
    __m256i zero = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
    return _mm256_and_ps(_mm256_castsi256_ps(zero), _mm256_set1_ps(-INFINITY));
}

typedef __m128i vh;
#define HALVES_ARE_QUICK
INLINE vh vh_loadu(const uint16_t *p) { return _mm_loadu_si128((const void *)p); }
INLINE vh vh_loadu_n(const uint16_t *p, int n) {
    uint16_t lanes[LANES] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return vh_loadu(lanes);
}
INLINE void vh_storeu(uint16_t *p, vh a) { _mm_storeu_si128((void *)p, a); }
INLINE void vh_storeu_n(uint16_t *p, vh a, int n) {
    uint16_t lanes[LANES];
    vh_storeu(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof *p);
}
INLINE vf vf_from_f16(vh a) { return _mm256_cvtph_ps(a); }
INLINE vf vf_from_bf16(vh a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)); }
INLINE vh vh_f16(vf v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* AVX2 has no conversion to bfloat16: adds half of the last place that stays, minus one if that place is even. */
INLINE vh vh_bf16(vf v) {
    const __m256i w = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(w, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

#else /* ---- 4 doubles; 4 integers fit into a __m128i ---- */

INLINE vm vm_not(vm a) { return _mm256_xor_pd(a, _mm256_castsi256_pd(_mm256_set1_epi32(-1))); }
INLINE vf vf_scale2(vf x, vf n) {
    __m256i e = _mm256_cvtepi32_epi64(_mm_add_epi32(_mm256_cvtpd_epi32(n), _mm_set1_epi32(REAL_BIAS)));
    return x * _mm256_castsi256_pd(_mm256_slli_epi64(e, REAL_MANT));
}
INLINE void vf_transpose(vf v[LANES]) {
    __m256d a = _mm256_unpacklo_pd(v[0], v[1]), b = _mm256_unpackhi_pd(v[0], v[1]);
    __m256d c = _mm256_unpacklo_pd(v[2], v[3]), d = _mm256_unpackhi_pd(v[2], v[3]);
    v[0] = _mm256_permute2f128_pd(a, c, 0x20);
    v[1] = _mm256_permute2f128_pd(b, d, 0x20);
    v[2] = _mm256_permute2f128_pd(a, c, 0x31);
    v[3] = _mm256_permute2f128_pd(b, d, 0x31);
}
INLINE vf vf_from_bytes(const uint8_t *p) {
    int four;
    memcpy(&four, p, 4);
    __m256i wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    __m256i zero = _mm256_cmpeq_epi64(wide, _mm256_setzero_si256());
    return _mm256_and_pd(_mm256_castsi256_pd(zero), _mm256_set1_pd(-(double)INFINITY));
}

#endif

INLINE vu vu_set1(uint32_t x) { return VU(set1_epi32)((int)x); }
INLINE vu vu_loadu(const uint32_t *p) { return VU_BITS(loadu)((const void *)p); }
INLINE void vu_storeu(uint32_t *p, vu a) { VU_BITS(storeu)((void *)p, a); }
INLINE vu vu_add(vu a, vu b) { return VU(add_epi32)(a, b); }
INLINE vu vu_xor(vu a, vu b) { return VU_BITS(xor)(a, b); }
INLINE vu vu_and(vu a, vu b) { return VU_BITS (and)(a, b); }
INLINE vu vu_shr16(vu a) { return VU(srli_epi32)(a, 16); }
/* Even and odd lanes apart: the multiplication takes 32-bit factors from the even lanes. */
typedef struct {
    vu even, odd;
} vw;
INLINE vw vw_from(vu a) { return (vw){a, VU(srli_epi64)(a, 32)}; }
INLINE vw vw_mul(vw a, uint32_t m) {
    const vu k = vu_set1(m);
    return (vw){VU(mul_epu32)(a.even, k), VU(mul_epu32)(a.odd, k)};
}
INLINE vw vw_high(vw a) { return (vw){VU(srli_epi64)(a.even, 32), VU(srli_epi64)(a.odd, 32)}; }
INLINE vw vw_xor(vw a, vw b, uint32_t c) {
    const vu k = vu_set1(c);
    return (vw){vu_xor(vu_xor(a.even, b.even), k), vu_xor(vu_xor(a.odd, b.odd), k)};
}
INLINE vu vw_low(vw a) { return VU(blend_epi32)(a.even, VU(slli_epi64)(a.odd, 32), VU_ODD); }

/* AVX2 compares signed integers only. Digits are below 2^16 and thresholds at most 2^16, so that is right. */
#if REAL_BITS == 32
INLINE vm vu_lt(vu a, vu b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)); }
INLINE vm vu_eq(vu a, vu b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)); }
#else
INLINE vm vu_lt(vu a, vu b) { return _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm_cmpgt_epi32(b, a))); }
INLINE vm vu_eq(vu a, vu b) { return _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm_cmpeq_epi32(a, b))); }
#endif

/* Bytes have no masked load in AVX2, so they are copied first. The lanes from n on become +0. */
INLINE vf vf_from_bytes_n(const uint8_t *p, int n) {
    uint8_t bytes[LANES];
    memset(bytes, 1, sizeof bytes);
    memcpy(bytes, p, (size_t)n);
    return vf_from_bytes(bytes);
}
INLINE vu vu_digits(const uint32_t *words, int r) {
    vu w = vu_loadu(words + digit_word(r));
    return (r >> 3) & 1 ? vu_shr16(w) : vu_and(w, vu_set1(0xffff));
}
