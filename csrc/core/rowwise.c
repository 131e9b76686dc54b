/* rowwise.c -- the drivers of softmax and of dropout: both work through independent rows of strided arrays.
 *
 * A task is a batch of consecutive rows, large enough that handing it out costs nothing; rows of any length are one
 * kernel call. Softmax needs no scratch; what it leaves for a masked row is written by the kernel too.
 */
#include "dispatch.h"
#include "mask.h"
#include "parallel.h"

/* Elements of a task: some ten microseconds. */
#define TASK_ELEMENTS 32768
/* Rows this long are dropped out in pieces; whole runs of Philox counters. */
#define DROPOUT_PIECE ((int64_t)1 << 16)

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static int64_t rows_per_task(int64_t n_cols) { return n_cols >= TASK_ELEMENTS ? 1 : TASK_ELEMENTS / (n_cols + 1) + 1; }

/* Elements (of the given size) from the tensor's start to this row, as an address. */
static void *row_at(const struct cattn_tensor *tensor, int n_lead, const int64_t *lead_shape, int64_t row,
                    size_t element) {
    return (char *)tensor->data + cattn_lead_offset(tensor, n_lead, lead_shape, row) * (int64_t)element;
}

static size_t element_size(enum cattn_dtype dtype) { return dtype == CATTN_F32 ? sizeof(float) : sizeof(double); }

/* ---- softmax ---- */

struct softmax_run {
    const struct cattn_softmax_params *params;
    const struct cattn_kernels *kernels;
    int64_t rows_per_task;
};

static void softmax_one(const struct softmax_run *run, int64_t row) {
    const struct cattn_softmax_params *p = run->params;
    const size_t element = element_size(p->dtype);
    struct cattn_range visible = {0, p->n_cols};
    if (p->is_causal) {
        const int64_t i = row % p->lead_shape[p->n_lead - 1];
        const int64_t offset =
            cattn_query_offset(&p->query_offset, p->offset_value, p->n_lead, p->lead_shape, row);
        visible = cattn_visible_keys(true, i + offset, p->n_cols);
    }
    const struct cattn_softmax_row args = {
        .n = p->n_cols,
        .lo = visible.lo,
        .hi = visible.hi,
        .x = row_at(&p->x, p->n_lead, p->lead_shape, row, element),
        .x_stride = p->x.col,
        .out = row_at(&p->out, p->n_lead, p->lead_shape, row, element),
        .out_stride = p->out.col,
        .keep = p->mask.data ? row_at(&p->mask, p->n_lead, p->lead_shape, row, 1) : NULL,
        .keep_stride = p->mask.data ? p->mask.col : 0,
        .scale = p->scale,
        .renormalize = p->method == CATTN_SOFTMAX_RENORMALIZE,
    };
    run->kernels->softmax_row(&args);
}

static void softmax_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct softmax_run *run = context;
    const int64_t first = task * run->rows_per_task, left = run->params->n_rows - first;
    for (int64_t i = 0; i < run->rows_per_task && i < left; i++) {
        if (cattn_should_stop(worker))
            return;
        softmax_one(run, first + i);
    }
}

enum cattn_status cattn_softmax(const struct cattn_softmax_params *p) {
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    struct softmax_run run = {p, cattn_kernels_for(p->dtype), rows_per_task(p->n_cols)};
    return cattn_parallel_for(ceil_div(p->n_rows, run.rows_per_task), p->num_threads, 0, softmax_task, &run, &p->poll);
}

/* ---- dropout ---- */

struct dropout_run {
    const struct cattn_dropout_params *params;
    const struct cattn_kernels *kernels;
    struct cattn_drop drop;
    int64_t rows_per_task; /* 1 where rows are cut */
    int64_t pieces;        /* of a row */
};

/* Columns begin .. end-1 of one row. */
static void dropout_one(const struct dropout_run *run, int64_t row, int64_t begin, int64_t end) {
    const struct cattn_dropout_params *p = run->params;
    const size_t element = element_size(p->dtype);
    const char *x = row_at(&p->x, p->n_lead, p->lead_shape, row, element);
    char *out = row_at(&p->out, p->n_lead, p->lead_shape, row, element);
    uint8_t *mask = p->mask.data ? row_at(&p->mask, p->n_lead, p->lead_shape, row, 1) : NULL;
    const struct cattn_dropout_row args = {
        .n = end - begin,
        .first = (uint64_t)(row * p->n_cols + begin),
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
    const struct cattn_dropout_params *p = run->params;
    if (run->pieces > 1) {
        const int64_t begin = task % run->pieces * DROPOUT_PIECE, end = begin + DROPOUT_PIECE;
        dropout_one(run, task / run->pieces, begin, end < p->n_cols ? end : p->n_cols);
        return;
    }
    const int64_t first = task * run->rows_per_task, left = p->n_rows - first;
    for (int64_t i = 0; i < run->rows_per_task && i < left && !cattn_should_stop(worker); i++)
        dropout_one(run, first + i, 0, p->n_cols);
}

enum cattn_status cattn_dropout(const struct cattn_dropout_params *p) {
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    struct dropout_run run = {
        .params = p,
        .kernels = cattn_kernels_for(p->dtype),
        .drop = {.enabled = true,
                 .key0 = (uint32_t)p->dropout.seed,
                 .key1 = (uint32_t)(p->dropout.seed >> 32),
                 .threshold_hi = (uint32_t)(p->dropout.threshold >> 16),
                 .threshold_lo = (uint32_t)(p->dropout.threshold & 0xffff)},
        .rows_per_task = rows_per_task(p->n_cols),
        .pieces = p->n_cols > 2 * DROPOUT_PIECE ? ceil_div(p->n_cols, DROPOUT_PIECE) : 1,
    };
    const int64_t n_tasks = run.pieces > 1 ? p->n_rows * run.pieces : ceil_div(p->n_rows, run.rows_per_task);
    return cattn_parallel_for(n_tasks, p->num_threads, 0, dropout_task, &run, &p->poll);
}
