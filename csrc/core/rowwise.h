/* rowwise.h -- what the drivers of softmax and dropout share: independent rows of strided arrays.
 *
 * A task is a number of consecutive rows, large enough that handing it to a thread costs next to nothing.
 */
#ifndef CATTN_ROWWISE_H
#define CATTN_ROWWISE_H

#include "parallel.h"
#include "strides.h"

/* Elements of a task: some ten microseconds of work. */
#define CATTN_TASK_ELEMENTS 32768

static inline int64_t cattn_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static inline int64_t cattn_rows_per_task(int64_t n_cols) {
    return n_cols >= CATTN_TASK_ELEMENTS ? 1 : CATTN_TASK_ELEMENTS / (n_cols + 1) + 1;
}

/* The start of a row of `tensor`, whose elements have `element` bytes. */
static inline void *cattn_row_at(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                                 int64_t row, size_t element) {
    return (char *)tensor->data + cattn_batch_offset(tensor, n_batch_dims, batch_shape, row) * (int64_t)element;
}

#endif
