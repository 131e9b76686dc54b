/* dispatch.h -- the vector instructions of this processor, and the kernel table in use. */
#ifndef CATTN_DISPATCH_H
#define CATTN_DISPATCH_H

#include "../cattn.h"
#include "../kernels/kernels.h"

/* ---- the vector instructions that this processor has ---- */

/* A feature counts only if the operating system saves its registers too: the test reads XGETBV.
 */

#define CATTN_CPU_FMA 1u
#define CATTN_CPU_AVX2 2u   /* with FMA and F16C */
#define CATTN_CPU_AVX512 4u /* F, BW, DQ and VL together, with AVX2 */
/* AMD's family 25, Zen 3 and Zen 4. Zen 4 does a 512-bit operation as two of 256 bits: tiles of 12 x 1 vectors are 1 to
 * 4 % faster there than 8 x 2, and 20 % slower on Zen 5. */
#define CATTN_CPU_AMD_25 8u
#define CATTN_CPU_AVX512_BF16 16u /* with AVX-512 */
/* Multiplies pairs of bfloat16 at half the rate of FMAs, so that two FMAs a pair are faster where operands stay in
 * registers: all processors of Intel so far, whose VDPBF16PS starts every other cycle. AMD's starts twice a cycle. */
#define CATTN_CPU_SLOW_PAIRS 32u
/* Tiles of bfloat16 (AMX), with AVX-512 and its bfloat16. A process also needs the system's permission for them:
 * cattn_os_permit_tiles. */
#define CATTN_CPU_AMX 64u

/* The sum of this processor's features; the same at any time, on any thread. */
unsigned cattn_cpu(void);

/* ---- the kernel table in use ---- */

const struct cattn_kernels *cattn_kernels_for(enum cattn_dtype dtype);
const struct cattn_row_kernels *cattn_row_kernels_for(enum cattn_dtype dtype);
/* Two tables with equal lanes and tiles: for tiles, and for few rows, whose conversions and memory take the time. */
struct cattn_kernel_pair {
    const struct cattn_kernels *tiles, *few;
};
/* The kernels of float32 with products of bfloat16. A call asks once, because tests switch. */
struct cattn_kernel_pair cattn_bf16_kernels(enum cattn_bf16_products products);

#endif
