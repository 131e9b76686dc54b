/* kernels_scalar.c -- libm's fma, one lane: the yardstick of the tests. Compiled twice, with REAL_BITS 32 and 64. */
#define ISA scalar
#define MR 4
#define NR 1
#include "simd_scalar.h"

#include "kernels.inc.h"
