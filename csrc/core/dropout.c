/* dropout.c -- what a dropout decision needs, and the driver of dropout.
 */
#include "dropout.h"

#include "rowwise.h"

/* Rows this long are dropped out in pieces; whole runs of Philox counters. */
#define DROPOUT_PIECE ((int64_t)1 << 16)

struct cattn_drop cattn_drop(const struct cattn_dropout_spec *spec, int64_t lead) {
    const uint64_t threshold = spec->enabled ? spec->threshold : (uint64_t)1 << 32; /* keeps all */
    struct cattn_drop drop = {
        .enabled = spec->enabled,
        .lead2 = (uint32_t)(2 * lead),
        .threshold_hi = (uint32_t)(threshold >> 16),
        .threshold_lo = (uint32_t)(threshold & 0xffff),
    };
    /* the key schedule: each round adds a Weyl constant to each half */
    uint32_t key0 = (uint32_t)spec->seed, key1 = (uint32_t)(spec->seed >> 32);
    for (int round = 0; round < CATTN_PHILOX_ROUNDS; round++) {
        drop.key[round][0] = key0;
        drop.key[round][1] = key1;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return drop;
}

struct dropout_run {
    const struct cattn_dropout_params *params;
    const struct cattn_kernels *kernels;
    struct cattn_drop drop;
    int n_lead; /* after merging */
    int64_t n_rows, n_cols;
    int64_t rows_per_task; /* 1 where rows are cut */
    int64_t pieces;        /* of a row */
};

/* Do the rows of the last leading dimension follow each other without a gap? */
static bool continues(const struct cattn_tensor *tensor, int last, int64_t n_cols) {
    return !tensor->data || tensor->lead[last] == n_cols * tensor->col;
}

/* Elements are independent, so leading dimensions that all tensors run through in one go become longer rows. */
static void merge_rows(struct dropout_run *run) {
    const struct cattn_dropout_params *p = run->params;
    for (int last = run->n_lead - 1; last >= 0; last--) {
        if (!continues(&p->x, last, run->n_cols) || !continues(&p->out, last, run->n_cols) ||
            !continues(&p->mask, last, run->n_cols))
            break;
        run->n_cols *= p->lead_shape[last];
        run->n_rows /= p->lead_shape[last];
        run->n_lead = last;
    }
}

/* Columns begin .. end-1 of one row. */
static void dropout_one(const struct dropout_run *run, int64_t row, int64_t begin, int64_t end) {
    const struct cattn_dropout_params *p = run->params;
    const size_t element = cattn_element_size(p->dtype);
    const char *x = cattn_row_at(&p->x, run->n_lead, p->lead_shape, row, element);
    char *out = cattn_row_at(&p->out, run->n_lead, p->lead_shape, row, element);
    uint8_t *mask = p->mask.data ? cattn_row_at(&p->mask, run->n_lead, p->lead_shape, row, 1) : NULL;
    const struct cattn_dropout_row args = {
        .n = end - begin,
        .first = (uint64_t)(row * run->n_cols + begin),
        .x = x + begin * p->x.col * (int64_t)element,
        .x_stride = p->x.col,
        .out = out + begin * p->out.col * (int64_t)element,
        .out_stride = p->out.col,
        .mask = mask ? mask + begin * p->mask.col : NULL,
        .mask_stride = p->mask.data ? p->mask.col : 0,
        .keep_scale = p->dropout.keep_scale,
        .drop = run->drop,
    };
    run->kernels->dropout_row(&args);
}

static void dropout_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct dropout_run *run = context;
    if (run->pieces > 1) {
        const int64_t begin = task % run->pieces * DROPOUT_PIECE, end = begin + DROPOUT_PIECE;
        dropout_one(run, task / run->pieces, begin, end < run->n_cols ? end : run->n_cols);
        return;
    }
    const int64_t first = task * run->rows_per_task, left = run->n_rows - first;
    for (int64_t i = 0; i < run->rows_per_task && i < left && !cattn_should_stop(worker); i++)
        dropout_one(run, first + i, 0, run->n_cols);
}

enum cattn_status cattn_dropout(const struct cattn_dropout_params *p) {
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    struct dropout_run run = {
        .params = p,
        .kernels = cattn_kernels_for(p->dtype),
        .drop = cattn_drop(&p->dropout, 0),
        .n_lead = p->n_lead,
        .n_rows = p->n_rows,
        .n_cols = p->n_cols,
    };
    merge_rows(&run);
    run.rows_per_task = cattn_rows_per_task(run.n_cols);
    run.pieces = run.n_cols > 2 * DROPOUT_PIECE ? cattn_ceil_div(run.n_cols, DROPOUT_PIECE) : 1;
    const int64_t n_tasks = run.pieces > 1 ? run.n_rows * run.pieces : cattn_ceil_div(run.n_rows, run.rows_per_task);
    return cattn_parallel_for(n_tasks, p->num_threads, 0, dropout_task, &run, &p->poll);
}
