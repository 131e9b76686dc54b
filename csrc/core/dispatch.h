/* dispatch.h -- the kernel table in use. */
#ifndef CATTN_DISPATCH_H
#define CATTN_DISPATCH_H

#include "../cattn.h"
#include "../kernels/kernels.h"

const struct cattn_kernels *cattn_kernels_for(enum cattn_dtype dtype);
/* The kernels of attention in float32 with products of bfloat16: the members of a forward pass. */
const struct cattn_kernels *cattn_bf16_kernels(void);

#endif
