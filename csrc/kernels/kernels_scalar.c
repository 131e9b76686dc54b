/* kernels_scalar.c -- one lane and the fma of fma.h; the tests compare the other tables with this one. Compiled with
 * REAL_BITS 16, 17, 32 and 64. */
#define ISA scalar
#define MR 4
#define NR 1
#define QUICK_TO_COMPILE
#include "simd_scalar.h"

#include "kernels.inc.h"
