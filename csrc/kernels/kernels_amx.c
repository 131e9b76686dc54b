/* kernels_amx.c -- products of bfloat16 by the instruction TDPBF16PS, which multiplies tiles (AMX), for the table
 * avx512_amx. Compiled once, with REAL_BITS 17: its other kernels are the ones of avx512.
 */
#ifdef __x86_64__ /* a Mac's compiler may make one object for two machines */
#define ISA amx
#define MR 8
#define NR 2
#define TILE_INSTRUCTIONS
#include "simd_avx512.h"

#include "kernels.inc.h"
#endif
