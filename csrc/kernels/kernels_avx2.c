/* kernels_avx2.c -- the AVX2 table: 12 accumulators in 16 registers. Compiled with REAL_BITS 16, 17, 32 and 64. */
#ifdef __x86_64__ /* a Mac's compiler may make one object for two machines */
#define ISA avx2
#define MR 6
#define NR 2
#include "simd_avx2.h"

#include "kernels.inc.h"
#endif
