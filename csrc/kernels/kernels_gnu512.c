/* kernels_gnu512.c -- test only: the tile shapes of the AVX-512 table on any CPU with FMA. Compiled with
 * REAL_BITS 16, 17, 32 and 64. */
#ifdef __x86_64__ /* a Mac's compiler may make one object for two machines */
#define ISA gnu512
#define MR 8
#define NR 2
#define VECTOR_BYTES 64
#define QUICK_TO_COMPILE
#define KEEP_LOOPS
#include "simd_gnu.h"

#include "kernels.inc.h"
#endif
