/* mask.c -- key ranges, tensor addressing (see mask.h), and ranges as a matrix of bytes. */
#include "mask.h"

#include <string.h>

#include "rowwise.h"

/* A side of a window this long ends beyond every array, wherever the query stands, and within int64. */
#define FAR (2 * CATTN_MAX_OFFSET)

int64_t cattn_batch_offset(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                           int64_t index) {
    int64_t offset = 0;
    for (int d = n_batch_dims - 1; d >= 0 && index; d--) {
        offset += index % batch_shape[d] * tensor->batch[d];
        index /= batch_shape[d];
    }
    return offset;
}

static int64_t clamp(int64_t value, int64_t least, int64_t most) {
    return value < least ? least : value > most ? most : value;
}

int64_t cattn_batch_number(const struct cattn_tensor *numbers, int64_t common, int n_batch_dims,
                           const int64_t *batch_shape, int64_t index) {
    return numbers->data
               ? ((const int64_t *)numbers->data)[cattn_batch_offset(numbers, n_batch_dims, batch_shape, index)]
               : common;
}

void cattn_batch_range(const struct cattn_ranges *r, int n_batch_dims, const int64_t *batch_shape, int64_t index,
                       struct cattn_batch_range *batch_range) {
    batch_range->offset = cattn_batch_number(&r->offsets, r->offset, n_batch_dims, batch_shape, index);
    batch_range->n_queries = cattn_batch_number(&r->query_lengths, r->query_length, n_batch_dims, batch_shape, index);
    batch_range->n_keys = cattn_batch_number(&r->key_lengths, r->key_length, n_batch_dims, batch_shape, index);
    batch_range->left = clamp(r->left, 0, FAR);
    batch_range->right = clamp(r->right, 0, FAR);
    if (r->lower_right)
        batch_range->offset = batch_range->n_keys - batch_range->n_queries;
    if (r->all_visible) {
        batch_range->n_queries = INT64_MAX;
        batch_range->n_keys = r->seqlen_k;
        batch_range->left = batch_range->right = FAR;
    }
}

struct cattn_range cattn_visible_keys(const struct cattn_batch_range *batch_range, int64_t i) {
    struct cattn_range range;
    cattn_visible_ranges(batch_range, i, 1, &range.lo, &range.hi);
    return range;
}

/* first, first + 1, ..., n of them, each from 0 to most. */
static void clamp_run(int64_t first, int n, int64_t most, int64_t *to) {
    const int64_t least = clamp(first, 0, most);
    if (least == clamp(first + n - 1, 0, most)) /* all of them are: there is often no other */
        for (int r = 0; r < n; r++)
            to[r] = least;
    else
        for (int r = 0; r < n; r++)
            to[r] = clamp(first + r, 0, most);
}

void cattn_visible_ranges(const struct cattn_batch_range *batch_range, int64_t i, int n, int64_t *lo, int64_t *hi) {
    const int64_t n_keys = batch_range->n_keys;
    const int there = (int)clamp(batch_range->n_queries - i, 0, n); /* queries behind the last one see nothing */
    const int64_t first = i + batch_range->offset - batch_range->left,
                  end = i + batch_range->offset + batch_range->right + 1;
    clamp_run(first, there, n_keys, lo);
    clamp_run(end, there, n_keys, hi);
    for (int r = there; r < n; r++)
        lo[r] = hi[r] = 0;
}

/* ---- as a matrix ---- */

static void mask_rows(void *context, int64_t task, struct cattn_worker *worker) {
    const struct cattn_mask_params *p = context;
    (void)worker;
    struct cattn_batch_range batch_range;
    cattn_batch_range(&p->ranges, 0, NULL, 0, &batch_range);
    const int64_t n_rows = cattn_rows_per_task(p->seqlen_k), first = task * n_rows;
    const int64_t last = first + n_rows < p->seqlen_q ? first + n_rows : p->seqlen_q;
    for (int64_t i = first; i < last; i++) {
        const struct cattn_range seen = cattn_visible_keys(&batch_range, i);
        uint8_t *row = p->mask + i * p->seqlen_k;
        memset(row, 0, (size_t)p->seqlen_k);
        for (int64_t k = seen.lo; k < seen.hi; k++)
            row[k] = 1;
    }
}

enum cattn_status cattn_mask(const struct cattn_mask_params *params) {
    if (params->seqlen_k == 0)
        return CATTN_OK;
    const int64_t n_tasks = cattn_ceil_div(params->seqlen_q, cattn_rows_per_task(params->seqlen_k));
    struct cattn_mask_params run = *params;
    return cattn_parallel_for(n_tasks, params->num_threads, 0, mask_rows, &run, &params->poll);
}
