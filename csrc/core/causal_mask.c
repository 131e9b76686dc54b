/* causal_mask.c -- the driver of cattn_mask: ranges of keys as a matrix of bytes. */
#include <string.h>

#include "check_params.h"
#include "rowwise.h"
#include "visible_keys.h"

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
