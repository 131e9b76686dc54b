/* kernels_avx512_bf16.c -- products of bfloat16 by the instruction VDPBF16PS, for the tables avx512_bf16,
 * avx512_bf16_few and avx512_256_bf16. Compiled once, with REAL_BITS 16: their other kernels are the ones of avx512 and
 * avx512_256.
 */
#ifdef __x86_64__ /* a Mac's compiler may make one object for two machines */
#define ISA avx512_bf16
#define MR 8
#define NR 2
#include "simd_avx512.h"

#include "kernels.inc.h"
#endif
