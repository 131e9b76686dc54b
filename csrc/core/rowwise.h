/* rowwise.h -- independent rows of strided arrays, for softmax, dropout, norms, activations and rotary positions. */
#ifndef CATTN_ROWWISE_H
#define CATTN_ROWWISE_H

#include "parallel.h"
#include "params.h"

/* A task is a number of consecutive rows, large enough that handing it to a thread costs next to nothing.
 */

/* Elements of a task: some ten microseconds of work. */
#define CATTN_TASK_ELEMENTS 32768

static inline int64_t cattn_rows_per_task(int64_t n_cols) {
    return n_cols >= CATTN_TASK_ELEMENTS ? 1 : CATTN_TASK_ELEMENTS / (n_cols + 1) + 1;
}

/* The start of a row of `tensor`, whose elements have `element` bytes. */
static inline void *cattn_row_at(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                                 int64_t row, size_t element) {
    return (char *)tensor->data + cattn_batch_offset(tensor, n_batch_dims, batch_shape, row) * (int64_t)element;
}

/* The rows of functions whose elements are independent, too: they may be merged, and long ones are cut into pieces. */
struct cattn_long_rows {
    int n_batch_dims;
    const int64_t *batch_shape;
    int64_t n_rows, n_cols;
    int64_t rows_per_task; /* 1 where rows are cut */
    int64_t pieces;        /* of a row, each a task */
    int64_t n_tasks;
};

/* Batch dimensions without gaps in any of the tensors become part of longer rows. Fills in the sizes of the tasks. */
void cattn_merge_rows(struct cattn_long_rows *rows, const struct cattn_tensor *const *tensors, int n_tensors);

/* Calls one(context, row, begin, end) for the columns begin .. end-1 of each row of a task. */
void cattn_each_piece(const struct cattn_long_rows *rows, int64_t task,
                      void (*one)(const void *context, int64_t row, int64_t begin, int64_t end), const void *context);

#endif
