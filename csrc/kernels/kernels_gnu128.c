/* kernels_gnu128.c -- the portable table with 16-byte vectors. Compiled with REAL_BITS 16, 17, 32 and 64.
 *
 * NEON has 32 registers: 8 x 2 vectors load 10 operands for 16 FMAs and keep 16 chains in flight, enough for four FMA
 * units. SSE2 has 16.
 */
#define ISA gnu128
#ifdef __aarch64__
#define MR 8
#else
#define MR 4
#endif
#define NR 2
#define VECTOR_BYTES 16
#include "simd_gnu.h"

#include "kernels.inc.h"
