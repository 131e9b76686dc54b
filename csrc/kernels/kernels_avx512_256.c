/* kernels_avx512_256.c -- the AVX-512 table for processors that split 512-bit operations in two (AMD Zen 4). Compiled
 * with REAL_BITS 16, 17, 32 and 64.
 *
 * They do one FMA a cycle, so loads do not limit them. 12 chains and 12 sums fit into 32 registers, which saves the
 * spills of larger tiles.
 */
#ifdef __x86_64__ /* a Mac's compiler may make one object for two machines */
#define ISA avx512_256
#define MR 12
#define NR 1
#include "simd_avx512.h"

#include "kernels.inc.h"
#endif
