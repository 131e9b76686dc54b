/* rowwise.c -- rows of independent elements, merged and cut into tasks; see rowwise.h. */
#include "rowwise.h"

/* Columns of a piece; whole runs of Philox counters. */
#define ROW_PIECE ((int64_t)1 << 16)

/* Whether the rows of batch dimension `last` follow each other without a gap. */
static bool continues(const struct cattn_tensor *tensor, int last, int64_t n_cols) {
    return !tensor->data || tensor->batch[last] == n_cols * tensor->col;
}

void cattn_merge_rows(struct cattn_long_rows *rows, const struct cattn_tensor *const *tensors, int n_tensors) {
    for (int last = rows->n_batch_dims - 1; last >= 0; last--) {
        bool all = true;
        for (int i = 0; i < n_tensors; i++)
            all = all && continues(tensors[i], last, rows->n_cols);
        if (!all)
            break;
        rows->n_cols *= rows->batch_shape[last];
        rows->n_rows /= rows->batch_shape[last];
        rows->n_batch_dims = last;
    }
    rows->rows_per_task = cattn_rows_per_task(rows->n_cols);
    rows->pieces = rows->n_cols > 2 * ROW_PIECE ? cattn_ceil_div(rows->n_cols, ROW_PIECE) : 1;
    rows->n_tasks = rows->pieces > 1 ? rows->n_rows * rows->pieces : cattn_ceil_div(rows->n_rows, rows->rows_per_task);
}

void cattn_each_piece(const struct cattn_long_rows *rows, int64_t task,
                      void (*one)(const void *context, int64_t row, int64_t begin, int64_t end), const void *context) {
    if (rows->pieces > 1) {
        const int64_t begin = task % rows->pieces * ROW_PIECE, end = begin + ROW_PIECE;
        one(context, task / rows->pieces, begin, end < rows->n_cols ? end : rows->n_cols);
        return;
    }
    const int64_t first = task * rows->rows_per_task, left = rows->n_rows - first;
    for (int64_t i = 0; i < rows->rows_per_task && i < left; i++)
        one(context, first + i, 0, rows->n_cols);
}
