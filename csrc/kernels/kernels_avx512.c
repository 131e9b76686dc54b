/* kernels_avx512.c -- the AVX-512 table: 12 chains and 12 sums in 32 registers. Compiled twice, with REAL_BITS 32 and
 * 64. */
#define ISA avx512
#define MR 12
#define NR 1
#include "simd_avx512.h"

#include "kernels.inc.h"
