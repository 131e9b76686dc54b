/* strides.h -- where the part of a strided tensor lies that belongs to one batch entry.
 *
 * Batch entries are numbered in C order over the batch dimensions.
 */
#ifndef CATTN_STRIDES_H
#define CATTN_STRIDES_H

#include "../cattn.h"

/* Elements from a tensor's start to batch entry `index`. */
int64_t cattn_batch_offset(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                           int64_t index);

/* The int64 of batch entry `index`; `common` if the tensor is absent. */
int64_t cattn_batch_number(const struct cattn_tensor *numbers, int64_t common, int n_batch_dims,
                           const int64_t *batch_shape, int64_t index);

#endif
