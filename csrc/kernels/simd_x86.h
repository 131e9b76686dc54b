/* simd_x86.h -- the part of the vocabulary that AVX2 and AVX-512 define alike.
 *
 * The header that includes it has defined VF, VU and VU_BITS: intrinsics on floats, on 32-bit integers, and on integers
 * as bits. With floats also VF_OF, vh, vb, VH and VH_BITS.
 */

#define HAS_FMA 1
INLINE vf vf_set1(real x) { return VF(set1)(x); }
INLINE vf vf_loadu(const real *p) { return VF(loadu)(p); }
INLINE void vf_storeu(real *p, vf v) { VF(storeu)(p, v); }
#define HAS_STREAM 1
INLINE void vf_stream(real *p, vf v) { VF(stream)(p, v); }
INLINE void stream_end(void) { _mm_sfence(); }
INLINE vf vf_fma(vf a, vf b, vf c) { return VF(fmadd)(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return VF(max)(a, b); }
INLINE vf vf_min(vf a, vf b) { return VF(min)(a, b); }
INLINE vf vf_abs(vf x) { return VF(andnot)(vf_set1((real)-0.0), x); }
INLINE vf vf_div(vf a, vf b) { return VF(div)(a, b); }
INLINE vf vf_swap_pairs(vf v) { return VF(permute)(v, REAL_BITS == 32 ? 0xb1 : 0x55 & ((1 << LANES) - 1)); }

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
/* Transposes the squares inside each 128-bit part: 2 x 2 doubles, or 4 x 4 floats in two steps. */
INLINE void transpose_parts(vf v[LANES]) {
    vf t[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        t[i] = VF(unpacklo)(v[i], v[i + 1]);
        t[i + 1] = VF(unpackhi)(v[i], v[i + 1]);
    }
#if REAL_BITS == 32
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        v[i] = VF(shuffle)(t[i], t[i + 2], 0x44);
        v[i + 1] = VF(shuffle)(t[i], t[i + 2], 0xee);
        v[i + 2] = VF(shuffle)(t[i + 1], t[i + 3], 0x44);
        v[i + 3] = VF(shuffle)(t[i + 1], t[i + 3], 0xee);
    }
#else
    UNROLLED(i, LANES)
        v[i] = t[i];
#endif
}
#if LANES <= 8
INLINE vu vu_digits(const uint32_t *words, int r) {
    vu w = vu_loadu(words + digit_word(r));
    return (r >> 3) & 1 ? vu_shr16(w) : vu_and(w, vu_set1(0xffff));
}
#endif

#if REAL_BITS == 32
#define FLUSHES_BY_MODE
INLINE vu vu_of_vf(vf v) { return VU_BITS(castps)(v); }
INLINE vf vf_of_vu(vu a) { return VF_OF(a); }
INLINE vu vu_shl16(vu a) { return VU(slli_epi32)(a, 16); }
#define HALVES_ARE_QUICK
INLINE vf vf_from_f16(vh a) { return VF(cvtph)(a); }
INLINE vf vf_from_bf16(vh a) { return VF_OF(VU(slli_epi32)(VU(cvtepu16_epi32)(a), 16)); }
INLINE vf vf_half_bf16(vf v, int j) {
    const vu bits = VU_BITS(castps)(v);
    return VF_OF(j == 0 ? VU(slli_epi32)(bits, 16) : vu_and(bits, vu_set1(0xffff0000)));
}
/* The bits of v rounded to bfloat16, in the low halves: adds half of the last place that stays, minus one if that place
 * is even. AVX2 has no conversion, AVX512-BF16 is not required, and its conversion flushes subnormals. */
INLINE vu bf16_bits(vf v) {
    const vu w = VU_BITS(castps)(v), odd = vu_and(vu_shr16(w), vu_set1(1));
    return vu_shr16(vu_add(w, vu_add(odd, vu_set1(0x7fff))));
}

INLINE vf vf_from_i8(vb b) { return VF(cvtepi32)(VU(cvtepi8_epi32)(b)); }
/* The bits of float8_e4m3fn as float16: the same sign, and exponent and mantissa of a number 256 times smaller. The
 * byte's sign is extended, so that bit 15 has it; bit 14 has it too, and is cleared. */
INLINE vh f16_from_f8(vb b) {
    return VH_BITS (and)(VH(slli_epi16)(VH(cvtepi8_epi16)(b), 7), VH(set1_epi16)((short)0xbf80));
}
/* An integer moves to the highest byte, and the bytes below it are cleared where there are any. */
INLINE vf vf_quarter_i8(vf v, int j) {
    vu bits = VU_BITS(castps)(v);
    if (j < 3)
        bits = VU(slli_epi32)(bits, (VU_COUNT)(24 - 8 * j));
    if (j > 0)
        bits = vu_and(bits, vu_set1(0xff000000));
    return VF(cvtepi32)(bits);
}
#endif
