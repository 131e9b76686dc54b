/* strides.c -- batch entries of strided tensors; see strides.h. */
#include "strides.h"

int64_t cattn_batch_offset(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                           int64_t index) {
    int64_t offset = 0;
    for (int d = n_batch_dims - 1; d >= 0 && index; d--) {
        offset += index % batch_shape[d] * tensor->batch[d];
        index /= batch_shape[d];
    }
    return offset;
}

int64_t cattn_batch_number(const struct cattn_tensor *numbers, int64_t common, int n_batch_dims,
                           const int64_t *batch_shape, int64_t index) {
    return numbers->data
               ? ((const int64_t *)numbers->data)[cattn_batch_offset(numbers, n_batch_dims, batch_shape, index)]
               : common;
}
