/* causal_mask.c -- the driver of cattn_mask: ranges of keys as a matrix of bytes. */
#include <string.h>

#include "check_params.h"
#include "rowwise.h"
#include "visible_keys.h"

static void mask_rows(void *context, int64_t task, struct cattn_worker *worker) {
    const struct cattn_mask_params *p = context;
    (void)worker; /* a task is too short to be interrupted */
    struct cattn_batch_range batch_range;
    cattn_batch_range(&p->ranges, 0, NULL, 0, &batch_range);
    const int64_t n_rows = cattn_rows_per_task(p->seqlen_k), first = task * n_rows;
    const int64_t last = first + n_rows < p->seqlen_q ? first + n_rows : p->seqlen_q;
    for (int64_t i = first; i < last; i++) {
        const struct cattn_range visible = cattn_visible_keys(&batch_range, i);
        uint8_t *row = p->mask + i * p->seqlen_k;
        memset(row, 0, (size_t)p->seqlen_k);
        for (int64_t k = visible.lo; k < visible.hi; k++)
            row[k] = 1;
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
