/* rowwise.h -- what the drivers of softmax and dropout share: both work through independent rows of strided arrays, and
 * a task is a batch of consecutive rows, large enough that handing it out costs nothing.
 */
#ifndef CATTN_ROWWISE_H
#define CATTN_ROWWISE_H

#include "dispatch.h"
#include "mask.h"
#include "parallel.h"

/* Elements of a task: some ten microseconds. */
#define CATTN_TASK_ELEMENTS 32768

static inline int64_t cattn_rows_per_task(int64_t n_cols) {
    return n_cols >= CATTN_TASK_ELEMENTS ? 1 : CATTN_TASK_ELEMENTS / (n_cols + 1) + 1;
}

/* Where a row of `tensor` starts, its elements of the given size. */
static inline void *cattn_row_at(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                                 int64_t row, size_t element) {
    return (char *)tensor->data + cattn_batch_offset(tensor, n_batch_dims, batch_shape, row) * (int64_t)element;
}

#endif
