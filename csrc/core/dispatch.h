/* dispatch.h -- the kernel table in use. */
#ifndef CATTN_DISPATCH_H
#define CATTN_DISPATCH_H

#include "../cattn.h"
#include "../kernels/kernels.h"

const struct cattn_kernels *cattn_kernels_for(enum cattn_dtype dtype);
/* Two tables with equal lanes and tiles: for tiles, and for few rows, whose conversions and memory take the time. */
struct cattn_kernel_pair {
    const struct cattn_kernels *tiles, *few;
};
/* The kernels of float32 with products of bfloat16. A call asks once, because tests switch. */
struct cattn_kernel_pair cattn_bf16_kernels(enum cattn_bf16_products products);

#endif
