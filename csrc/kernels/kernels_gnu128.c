/* kernels_gnu128.c -- the portable table with 16-byte vectors. Compiled twice, with REAL_BITS 32 and 64. */
#define ISA gnu128
#define MR 4
#define NR 2
#define VECTOR_BYTES 16
#include "simd_gnu.h"

#include "kernels.inc.h"
