/* simd.h -- the vocabulary of the kernels, defined for one element type and one instruction set at a time.
 *
 * kernels_table.c is compiled with REAL_BITS 32 and 64, and includes the simd_*.h of its instruction set, which defines
 * LANES and the names below. Vectors take + - * directly. Everything else goes through these names,
 * because casts, comparisons, ?: and v[i] mean different things on float, GNU vectors and __m512.
 */
/* clang-format off: a table */
/*
 *   real  vf           element, vector of LANES elements
 *   vm                 one truth value per lane
 *   vh                 LANES 16-bit halves; only where real is float
 *   vb                 LANES bytes; only where real is float
 *   vu                 LANES unsigned 32-bit integers
 *   vw                 LANES unsigned 64-bit integers, for products of vu
 *
 *   REGISTERS          number of vector registers
 *
 *   vf_set1(x)  vf_loadu(p)  vf_storeu(p, v)
 *   vf_loadu_n(p, n)   the first n elements, 0 in the other lanes; reads nothing after p[n-1]
 *   vf_storeu_n(p, v, n)
 *   vf_stream(p, v)    vf_storeu that bypasses the caches; p is aligned to the vector's size. HAS_STREAM is defined if
 *                      such stores exist. Call stream_end() before the next store that another thread may see
 *   vf_fma(a, b, c)    a*b + c, rounded once
 *   HAS_FMA            1; or 0 where vf_fma rounds twice (x86 without FMA): that table is outside the bit contract
 *   vf_max(a, b)       a > b ? a : b, hence b if either is NaN
 *   vf_min(a, b)       a < b ? a : b, hence b if either is NaN
 *   vf_abs(x)          without the sign, also of zeros
 *   vf_div(a, b)
 *   vf_scale2(x, n)    x * 2^n for an integer n held in a vf; arbitrary if |n| exceeds the exponent range; NaN stays
 *                      NaN. SCALE2_IS_COMPLETE is defined if it is right, and rounded once, for every n
 *   vf_scale2_unless(m, x, n)  vf_scale2(x, n), and +0 where m holds
 *   vf_lt(a, b)  vf_eq(a, b)      -> vm, false for NaN
 *   vm_and  vm_or  vm_not  vm_any(m)
 *   vf_select(m, a, b) m ? a : b, bit for bit
 *   vf_transpose(v)    the LANES x LANES matrix in v[0 .. LANES-1], in place
 *   vf_lane(v, i)      lane i in all lanes. HAS_LANES is defined if an FMA takes such an operand
 *   vf_swap_pairs(v)   lanes 0 and 1 exchanged, 2 and 3, ...; not where LANES is 1
 *   vf_from_bytes(p)   LANES bytes: -inf where 0, +0 elsewhere
 *   vf_from_bytes_n(p, n)
 *
 *   vh_loadu(p)  vh_loadu_n(p, n)  vh_storeu(p, a)  vh_storeu_n(p, a, n)
 *   vf_from_f16(a)  vf_from_bf16(a)       exact
 *   HALVES_ARE_QUICK   defined if these conversions take one or two instructions, and then also:
 *   vf_half_bf16(v, j)                    v holds 2 LANES bfloat16: those with the indices 2 i + j
 *   vh_f16(v)  vh_bf16(v)                 rounded to nearest, ties to even; NaN must be the quiet one without a payload
 *
 *   vb_loadu(p)  vb_loadu_n(p, n)
 *   vf_from_i8(b)                         signed integers
 *   vf_from_f8(b)                         float8_e4m3fn / 256; NaN of any kind
 *   vf_quarter_i8(v, j)                   v holds 4 LANES signed integers: 2^24 times those with the indices 4 i + j.
 *                                         Defined as vf_half_bf16 is; then these conversions are quick, too
 *
 *   vu_of_vf(v)  vf_of_vu(a)  vu_shl16(a) the same bits, and 32-bit integers moved left; only where real is float
 *   vf_pair_dot(a, b, c)                  the instruction of bf16_products.inc.h
 *   HAS_PAIR_DOT                          defined if there is one
 *   vh_rounded(v)  vf_paired(even, odd)   rounded to bfloat16, subnormal elements to zeros; as pairs
 *   HAS_BF16_ROUNDING                     defined if there are instructions for them
 *   vu_rounded(low, high)                 pairs of the elements of low, then of high
 *   vu_joined(low, high)                  the bits of low, then of high, as they would lie in memory
 *   FLUSHES_BY_MODE                       defined if a mode of the processor flushes subnormals as it does
 *
 *   vu_half_pairs(p)                      pairs of the elements i and i + LANES of 2 LANES halves. HAS_HALF_PAIRS is
 *                                         defined if there is an instruction for them
 *
 *   vu_set1  vu_add  vu_xor  vu_and  vu_shr16(a)  vu_loadu(p)  vu_storeu(p, a)
 *   vw_from(a)  vw_low(w)                 to 64 bits a lane and back; the high 32 bits are arbitrary
 *   vw_mul(w, m)  vw_high(w)              the 64-bit product of the low halves with a scalar m; the high 32 bits of a
 *                                         product, moved low
 *   vw_xor(a, b, c)                       a ^ b ^ c with a scalar c
 *   vu_lt(a, b)  vu_eq(a, b)              -> vm of the same lanes
 *   vu_digits(words, r)  16-bit digits of the elements r .. r+LANES-1, from the words of philox_words
 *
 * The bit contract requires of a header: vf_fma rounds once, results in the normal range are IEEE's, nothing flushes
 * subnormals, vf_scale2 is exact wherever the result is normal.
 */
/* clang-format on */
#ifndef CATTN_SIMD_H
#define CATTN_SIMD_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "fma.h"

/* 16: floats whose products of queries, keys, weights and values are of bfloat16; see bf16_products.inc.h */
#if REAL_BITS == 16
#define BF16_PRODUCTS
#undef REAL_BITS
#define REAL_BITS 32
#define TABLE_BITS 16
#elif REAL_BITS == 17 /* the same with sums in the order of tiles */
#define BF16_PRODUCTS
#define BF16_TILES
#undef REAL_BITS
#define REAL_BITS 32
#define TABLE_BITS 17
#else
#define TABLE_BITS REAL_BITS
#endif

#if REAL_BITS == 32
typedef float real;
typedef uint32_t real_bits;
#define REAL_MAX FLT_MAX
#define REAL_MANT 23
#define REAL_BIAS 127
#define REAL_FMA cattn_fmaf
#define REAL_SQRT sqrtf
#elif REAL_BITS == 64
typedef double real;
typedef uint64_t real_bits;
#define REAL_MAX DBL_MAX
#define REAL_MANT 52
#define REAL_BIAS 1023
#define REAL_FMA cattn_fma
#define REAL_SQRT sqrt
#else
#error "REAL_BITS must be 16, 17, 32 or 64"
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
/* Hides x from the optimiser, so that nothing is computed from it in advance. */
#define OPAQUE(x) __asm__("" : "+r"(x))
/* A loop over i = 0 .. n-1 that is unrolled completely: after inlining, n is a constant of at most 16. */
#ifdef KEEP_LOOPS /* unrolled, a table for tests takes twice as long to compile */
#define UNROLLED(i, n) for (int i = 0; i < (n); i++)
#elif defined(__clang__) /* before version 19 it keeps a loop with a count if n is not the same in all callers */
/* NOLINTNEXTLINE(bugprone-macro-parentheses): i is declared */
#define UNROLLED(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); i++)
#else
/* NOLINTNEXTLINE(bugprone-macro-parentheses): i is declared */
#define UNROLLED(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#endif

INLINE real_bits to_bits(real x) {
    real_bits bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE real from_bits(real_bits bits) {
    real x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The index into the words of philox_words of the word that holds the digit of element r (of 128). */
INLINE int digit_word(int r) { return 16 * (r >> 4 & 3) + 8 * (r >> 6) + (r & 7); }

#endif
