/* arithmetic.c -- what kernels/arithmetic.inc.h finds about the flags that this file was compiled with: exit code 0 if
 * the arithmetic is exact. Compiled with REAL_BITS 32 or 64, and with VECTOR_BYTES for vectors.
 */
#ifdef VECTOR_BYTES
#include "kernels/simd_gnu.h"
#else
#include "kernels/simd_scalar.h"
#endif

#include "kernels/arithmetic.inc.h"

int main(void) { return keeps_arithmetic() ? 0 : 1; }
