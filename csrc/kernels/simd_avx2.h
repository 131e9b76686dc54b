/* simd_avx2.h -- 8 floats or 4 doubles; needs AVX2 and FMA. */
#include "simd.h"

#include <immintrin.h>

/* VF names an intrinsic on floats, VU and VU_BITS on 32-bit integers: these fill a register beside 8 floats, and half
 * of one beside 4 doubles. VH and VH_BITS do so on 16-bit integers beside floats. VU_COUNT is the type of a
 * shift's count, VU_ODD is the blend mask of the odd
 * integers, VF_OF their bits as floats. */
#if REAL_BITS == 32
#define LANES 8
typedef __m256 vf;
typedef __m256 vm; /* all ones or all zeros per lane */
typedef __m256i vu;
typedef __m128i vh;
typedef __m128i vb; /* in the low half */
#define VF(op) _mm256_##op##_ps
#define VU(op) _mm256_##op
#define VU_BITS(op) _mm256_##op##_si256
#define VU_ODD 0xaa
#define VU_COUNT int
#define VH(op) _mm_##op
#define VH_BITS(op) _mm_##op##_si128
#define VF_OF(integers) _mm256_castsi256_ps(integers)
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
#define VF_OF(integers) _mm256_castsi256_pd(_mm256_cvtepi32_epi64(integers))
INLINE __m256i lanes_below(int n) { return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3)); }
#endif

#define REGISTERS 16
#include "simd_x86.h"

/* ---- both element types ---- */

INLINE vf vf_loadu_n(const real *p, int n) { return VF(maskload)(p, lanes_below(n)); }
INLINE void vf_storeu_n(real *p, vf v, int n) { VF(maskstore)(p, lanes_below(n), v); }
INLINE vf vf_select(vm m, vf a, vf b) { return VF(blendv)(b, a, m); }
INLINE vm vf_lt(vf a, vf b) { return VF(cmp)(a, b, _CMP_LT_OQ); }
INLINE vm vf_eq(vf a, vf b) { return VF(cmp)(a, b, _CMP_EQ_OQ); }
INLINE vm vm_and(vm a, vm b) { return VF (and)(a, b); }
INLINE vm vm_or(vm a, vm b) { return VF(or)(a, b); }
INLINE void vf_transpose(vf v[LANES]) {
    enum { N = LANES / 2 };
    transpose_parts(v);
    /* then the 2 x 2 halves themselves */
    UNROLLED(i, N) {
        const vf low = v[i], high = v[i + N];
        v[i] = VF(permute2f128)(low, high, 0x20);
        v[i + N] = VF(permute2f128)(low, high, 0x31);
    }
}
INLINE vm vm_not(vm a) { return VF(xor)(a, VF(castsi256)(_mm256_set1_epi32(-1))); }
INLINE bool vm_any(vm m) { return VF(movemask)(m) != 0; }

#if REAL_BITS == 32 /* ---- 8 floats ---- */

INLINE vf vf_scale2(vf x, vf n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(REAL_BIAS));
    return x * _mm256_castsi256_ps(_mm256_slli_epi32(e, REAL_MANT));
}
INLINE vf vf_from_bytes(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
    __m256i zero = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
    return _mm256_and_ps(_mm256_castsi256_ps(zero), _mm256_set1_ps(-INFINITY));
}

INLINE vb vb_loadu(const uint8_t *p) { return _mm_loadl_epi64((const void *)p); }
INLINE vb vb_loadu_n(const uint8_t *p, int n) {
    uint8_t lanes[LANES] = {0};
    memcpy(lanes, p, (size_t)n);
    return vb_loadu(lanes);
}
INLINE vf vf_from_f8(vb b) {
    const __m128i all_but_sign = _mm_set1_epi8(0x7f);
    const __m128i nan = _mm_cmpeq_epi8(_mm_and_si128(b, all_but_sign), all_but_sign);
    /* all bits of a lane make a NaN */
    return VF(or)(VF(cvtph)(f16_from_f8(b)), VF_OF(VU(cvtepi8_epi32)(nan)));
}
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
INLINE vu vu_joined(vh low, vh high) { return _mm256_set_m128i(high, low); }
INLINE vh vh_f16(vf v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vh vh_bf16(vf v) {
    const vu high = bf16_bits(v);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

#else /* ---- 4 doubles; 4 integers fit into a __m128i ---- */

INLINE vf vf_scale2(vf x, vf n) {
    __m256i e = _mm256_cvtepi32_epi64(_mm_add_epi32(_mm256_cvtpd_epi32(n), _mm_set1_epi32(REAL_BIAS)));
    return x * _mm256_castsi256_pd(_mm256_slli_epi64(e, REAL_MANT));
}
INLINE vf vf_from_bytes(const uint8_t *p) {
    int four;
    memcpy(&four, p, 4);
    __m256i wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    __m256i zero = _mm256_cmpeq_epi64(wide, _mm256_setzero_si256());
    return _mm256_and_pd(_mm256_castsi256_pd(zero), _mm256_set1_pd(-(double)INFINITY));
}

#endif

INLINE vf vf_scale2_unless(vm m, vf x, vf n) { return VF(andnot)(m, vf_scale2(x, n)); }

INLINE vw vw_xor(vw a, vw b, uint32_t c) {
    const vu k = vu_set1(c);
    return (vw){vu_xor(vu_xor(a.even, b.even), k), vu_xor(vu_xor(a.odd, b.odd), k)};
}
INLINE vu vw_low(vw a) { return VU(blend_epi32)(a.even, VU(slli_epi64)(a.odd, 32), VU_ODD); }

/* AVX2 compares signed integers only. Digits are below 2^16 and thresholds at most 2^16, so that is right. */
INLINE vm vu_lt(vu a, vu b) { return VF_OF(VU(cmpgt_epi32)(b, a)); }
INLINE vm vu_eq(vu a, vu b) { return VF_OF(VU(cmpeq_epi32)(a, b)); }

/* Bytes have no masked load in AVX2, so they are copied first. The lanes from n on become +0. */
INLINE vf vf_from_bytes_n(const uint8_t *p, int n) {
    uint8_t bytes[LANES];
    memset(bytes, 1, sizeof bytes);
    memcpy(bytes, p, (size_t)n);
    return vf_from_bytes(bytes);
}
