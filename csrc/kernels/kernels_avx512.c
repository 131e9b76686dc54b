/* kernels_avx512.c -- the AVX-512 table for processors with 512-bit units. Compiled with REAL_BITS 16, 17, 32 and 64.
 *
 * Such a processor does two loads and two FMAs a cycle, and every broadcast operand is a load: tiles of 8 x 2 vectors
 * load 10 operands for 16 FMAs (scores, 6 x 2: 8 for 12), where 12 x 1 would load 13 for 12. Keys and values that
 * stream by are prefetched once, into the L1 cache: more requests take the slots of the loads (AMD Zen 5).
 *
 * Products of two matrices in the table's own type have tiles of 8 x 3 vectors, which load 11 operands for 24 FMAs, and
 * pack both operands from 192 rows on, so that all loads are in the order of memory.
 */
#ifdef __x86_64__ /* a Mac's compiler may make one object for two machines */
#define ISA avx512
#define MR 8
#define NR 2
#if REAL_BITS > 17
#define PRODUCT_MR 8
#define PRODUCT_NR 3
#define PRODUCT_PACKS_FROM 192
#endif
#define STREAM_AHEAD 24576
#include "simd_avx512.h"

#include "kernels.inc.h"
#endif
