/* visible_keys.c -- from causality, windows, lengths and first keys to a range of keys; see attention.h. */
#include <string.h>

#include "attention.h"
#include "params.h"
#include "rowwise.h"

/* A side of a window this long reaches past both ends of the keys from every position, and positions +- it stay within
 * int64. */
#define FAR (2 * CATTN_MAX_OFFSET)

static int64_t clamp(int64_t value, int64_t least, int64_t most) {
    value = value < least ? least : value;
    return value > most ? most : value;
}

void cattn_batch_range(const struct cattn_ranges *r, int n_batch_dims, const int64_t *batch_shape, int64_t index,
                       struct cattn_batch_range *batch_range) {
    batch_range->offset = cattn_batch_number(&r->offsets, r->offset, n_batch_dims, batch_shape, index);
    batch_range->n_queries = cattn_batch_number(&r->query_lengths, r->query_length, n_batch_dims, batch_shape, index);
    batch_range->n_keys = cattn_batch_number(&r->key_lengths, r->key_length, n_batch_dims, batch_shape, index);
    batch_range->first_key = cattn_batch_number(&r->first_keys, r->first_key, n_batch_dims, batch_shape, index);
    batch_range->left = clamp(r->left, 0, FAR);
    batch_range->right = clamp(r->right, 0, FAR);
    if (r->lower_right)
        batch_range->offset = batch_range->n_keys - batch_range->n_queries;
    if (r->all_visible) {
        batch_range->n_queries = INT64_MAX;
        batch_range->n_keys = r->seqlen_k;
        batch_range->first_key = 0;
        batch_range->left = batch_range->right = FAR;
    }
    batch_range->offset -= batch_range->first_key;
    batch_range->n_keys -= cattn_min(batch_range->n_keys, batch_range->first_key);
}

struct cattn_range cattn_visible_keys(const struct cattn_batch_range *batch_range, int64_t i) {
    struct cattn_range range;
    cattn_visible_ranges(batch_range, i, 1, &range.lo, &range.hi);
    return range;
}

/* Writes first, first + 1, ..., n of them, each clamped to least .. most. If both ends clamp to one number, all do:
 * without a mask that is so for every task, and a plain fill is quicker. */
static void clamp_run(int64_t first, int n, int64_t least, int64_t most, int64_t *to) {
    const int64_t common = clamp(first, least, most);
    if (common == clamp(first + n - 1, least, most))
        for (int r = 0; r < n; r++)
            to[r] = common;
    else
        for (int r = 0; r < n; r++)
            to[r] = clamp(first + r, least, most);
}

void cattn_visible_ranges(const struct cattn_batch_range *batch_range, int64_t i, int n, int64_t *lo, int64_t *hi) {
    const int64_t n_keys = batch_range->n_keys;
    const int64_t position = i + batch_range->offset;
    const int valid = (int)clamp(batch_range->n_queries - i, 0, n); /* queries after the last one see nothing */
    clamp_run(position - batch_range->left, valid, 0, n_keys, lo);
    clamp_run(position + batch_range->right + 1, valid, 0, n_keys, hi);
    for (int r = valid; r < n; r++)
        lo[r] = hi[r] = 0;
}

/* ---- ranges of keys as a matrix of bytes ---- */

/* Keys of a row between two looks at a stop. */
#define PIECE ((int64_t)1 << 16)

static void mask_rows(void *context, int64_t task, struct cattn_worker *worker) {
    const struct cattn_mask_params *p = context;
    struct cattn_batch_range batch_range;
    cattn_batch_range(&p->ranges, 0, NULL, 0, &batch_range);
    const int64_t n_rows = cattn_rows_per_task(p->seqlen_k), first = task * n_rows;
    const int64_t last = first + n_rows < p->seqlen_q ? first + n_rows : p->seqlen_q;
    for (int64_t i = first; i < last; i++) {
        const struct cattn_range visible = cattn_visible_keys(&batch_range, i);
        uint8_t *row = p->mask + i * p->seqlen_k;
        for (int64_t k = 0; k < p->seqlen_k && !(k > 0 && cattn_should_stop(worker)); k += PIECE) {
            const int64_t end = cattn_min(k + PIECE, p->seqlen_k), hi = cattn_min(end, visible.hi);
            const int64_t lo = visible.lo > k ? visible.lo : k;
            memset(row + k, 0, (size_t)(end - k));
            if (lo < hi)
                memset(row + lo, 1, (size_t)(hi - lo));
        }
    }
}

enum cattn_status cattn_mask(const struct cattn_mask_params *params) {
    CATTN_CHECK(mask, params);
    if (params->seqlen_k == 0)
        return CATTN_OK;
    const int64_t n_tasks = cattn_ceil_div(params->seqlen_q, cattn_rows_per_task(params->seqlen_k));
    struct cattn_mask_params copy = *params; /* tasks take a pointer that is not const */
    return cattn_parallel_for(n_tasks, params->num_threads, 0, mask_rows, &copy, &params->poll);
}
