/* dropout.c -- what a dropout decision needs, and the drivers of dropout: random bits by position, or in sequence.
 */
#include "dropout.h"

#include <string.h>

#include "check_params.h"
#include "dispatch.h"
#include "rowwise.h"
#include "torch_dropout.h"

/* Rows this long are dropped out in pieces; whole runs of Philox counters. */
#define DROPOUT_PIECE ((int64_t)1 << 16)

void cattn_drop(const struct cattn_dropout_spec *spec, int64_t batch, struct cattn_drop *drop) {
    const uint64_t threshold = spec->enabled ? spec->threshold : (uint64_t)1 << 32; /* keeps all */
    drop->enabled = spec->enabled;
    drop->batch_twice = (uint32_t)(2 * batch);
    drop->threshold_hi = (uint32_t)(threshold >> 16);
    drop->threshold_lo = (uint32_t)(threshold & 0xffff);
    if (!spec->enabled) { /* any key will do */
        memset(drop->key, 0, sizeof drop->key);
        return;
    }
    /* the key schedule: each round adds a Weyl constant to each half */
    uint32_t key0 = (uint32_t)spec->seed, key1 = (uint32_t)(spec->seed >> 32);
    for (int round = 0; round < CATTN_PHILOX_ROUNDS; round++) {
        drop->key[round][0] = key0;
        drop->key[round][1] = key1;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

struct dropout_run {
    const struct cattn_dropout_params *params;
    const struct cattn_kernels *kernels;
    struct cattn_drop drop;
    int n_batch_dims; /* after merging */
    int64_t n_rows, n_cols;
    int64_t rows_per_task; /* 1 where rows are cut */
    int64_t pieces;        /* of a row */
};

/* Do the rows of the last leading dimension follow each other without a gap? */
static bool continues(const struct cattn_tensor *tensor, int last, int64_t n_cols) {
    return !tensor->data || tensor->batch[last] == n_cols * tensor->col;
}

/* Elements are independent, so leading dimensions that all tensors run through in one go become longer rows. */
static void merge_rows(struct dropout_run *run) {
    const struct cattn_dropout_params *p = run->params;
    for (int last = run->n_batch_dims - 1; last >= 0; last--) {
        if (!continues(&p->x, last, run->n_cols) || !continues(&p->out, last, run->n_cols) ||
            !continues(&p->mask, last, run->n_cols))
            break;
        run->n_cols *= p->batch_shape[last];
        run->n_rows /= p->batch_shape[last];
        run->n_batch_dims = last;
    }
}

/* Halves are computed in pieces of this: whole runs of Philox counters. */
#define WIDE_PIECE 1024

static void dropout_row(const struct dropout_run *run, const struct cattn_dropout_row *row) {
    const enum cattn_storage storage = run->params->storage;
    if (storage == CATTN_STORED_PLAIN) {
        run->kernels->dropout_row(row);
        return;
    }
    float wide[WIDE_PIECE];
    struct cattn_dropout_row piece = *row;
    piece.x = piece.out = wide;
    piece.x_stride = piece.out_stride = 1;
    for (int64_t done = 0; done < row->n; done += piece.n) {
        const int64_t to_boundary = WIDE_PIECE - (int64_t)(piece.first % WIDE_PIECE);
        piece.n = row->n - done < to_boundary ? row->n - done : to_boundary;
        run->kernels->widen_row(storage, (const uint16_t *)row->x + done * row->x_stride, row->x_stride, piece.n, wide);
        run->kernels->dropout_row(&piece);
        run->kernels->narrow_row(storage, wide, piece.n, (uint16_t *)row->out + done * row->out_stride,
                                 row->out_stride);
        piece.first += (uint64_t)piece.n;
        piece.mask = piece.mask ? piece.mask + piece.n * piece.mask_stride : NULL;
    }
}

/* Columns begin .. end-1 of one row. */
static void dropout_one(const struct dropout_run *run, int64_t row, int64_t begin, int64_t end) {
    const struct cattn_dropout_params *p = run->params;
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const char *x = cattn_row_at(&p->x, run->n_batch_dims, p->batch_shape, row, element);
    char *out = cattn_row_at(&p->out, run->n_batch_dims, p->batch_shape, row, element);
    uint8_t *mask = p->mask.data ? cattn_row_at(&p->mask, run->n_batch_dims, p->batch_shape, row, 1) : NULL;
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
    dropout_row(run, &args);
}

static void dropout_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct dropout_run *run = context;
    (void)worker; /* a task is too short to be interrupted */
    if (run->pieces > 1) {
        const int64_t begin = task % run->pieces * DROPOUT_PIECE, end = begin + DROPOUT_PIECE;
        dropout_one(run, task / run->pieces, begin, end < run->n_cols ? end : run->n_cols);
        return;
    }
    const int64_t first = task * run->rows_per_task, left = run->n_rows - first;
    for (int64_t i = 0; i < run->rows_per_task && i < left; i++)
        dropout_one(run, first + i, 0, run->n_cols);
}

/* ---- a torch stream: one thread, since the bits come in sequence ---- */

/* Mask elements made ahead. */
#define TORCH_PIECE 4096

struct torch_run {
    const struct dropout_run *rows;
    struct cattn_torch_dropout cursor;
    double scale; /* 1 / keep_probability, divided in the precision of the data as PyTorch does */
};

static void torch_apply_halves(const struct torch_run *run, int64_t n, const uint16_t *x, const uint8_t *mask,
                               uint16_t *out) {
    const struct cattn_dropout_params *p = run->rows->params;
    const struct cattn_kernels *kernels = run->rows->kernels;
    float wide[WIDE_PIECE];
    for (int64_t done = 0; done < n; done += WIDE_PIECE) {
        const int64_t piece = n - done < WIDE_PIECE ? n - done : WIDE_PIECE;
        kernels->widen_row(p->storage, x + done * p->x.col, p->x.col, piece, wide);
        kernels->torch_drop(piece, wide, 1, mask + done, run->scale, wide, 1);
        kernels->narrow_row(p->storage, wide, piece, out + done * p->out.col, p->out.col);
    }
}

/* n columns of one row, from `begin` on. */
static void torch_apply(const struct torch_run *run, int64_t row, int64_t begin, int64_t n, const uint8_t *mask) {
    const struct dropout_run *rows = run->rows;
    const struct cattn_dropout_params *p = rows->params;
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const char *x = cattn_row_at(&p->x, rows->n_batch_dims, p->batch_shape, row, element);
    char *out = cattn_row_at(&p->out, rows->n_batch_dims, p->batch_shape, row, element);
    x += begin * p->x.col * (int64_t)element;
    out += begin * p->out.col * (int64_t)element;
    if (p->storage != CATTN_STORED_PLAIN)
        torch_apply_halves(run, n, (const uint16_t *)x, mask, (uint16_t *)out);
    else
        rows->kernels->torch_drop(n, x, p->x.col, mask, run->scale, out, p->out.col);
    if (p->mask.data) {
        uint8_t *to = cattn_row_at(&p->mask, rows->n_batch_dims, p->batch_shape, row, 1);
        for (int64_t i = 0; i < n; i++)
            to[(begin + i) * p->mask.col] = mask[i];
    }
}

static void torch_task(void *context, int64_t task, struct cattn_worker *worker) {
    struct torch_run *run = context;
    const struct cattn_dropout_params *p = run->rows->params;
    const double q = p->dropout.keep_probability;
    const int64_t n_cols = run->rows->n_cols, total = run->rows->n_rows * n_cols;
    run->scale = p->dtype == CATTN_F32 ? (double)(1.0f / (float)q) : 1.0 / q;
    if (p->storage != CATTN_STORED_PLAIN) {
        float scale = (float)run->scale;
        uint16_t half;
        run->rows->kernels->narrow_row(p->storage, &scale, 1, &half, 1);
        run->rows->kernels->widen_row(p->storage, &half, 1, 1, &scale);
        run->scale = (double)scale;
    }
    uint8_t mask[TORCH_PIECE];
    (void)task; /* the only one */
    for (int64_t done = 0; done < total && !cattn_should_stop(worker); done += TORCH_PIECE) {
        const int64_t ready = total - done < TORCH_PIECE ? total - done : TORCH_PIECE;
        cattn_torch_dropout_next(&run->cursor, ready, mask);
        for (int64_t used = 0; used < ready;) {
            const int64_t row = (done + used) / n_cols, begin = (done + used) % n_cols;
            const int64_t n = n_cols - begin < ready - used ? n_cols - begin : ready - used;
            torch_apply(run, row, begin, n, mask + used);
            used += n;
        }
    }
}

static enum cattn_status torch_dropout(const struct dropout_run *rows) {
    const struct cattn_dropout_params *p = rows->params;
    struct torch_run run = {.rows = rows};
    cattn_torch_dropout_begin(&run.cursor, p->dropout.torch, p->dropout.keep_probability);
    const enum cattn_status status = cattn_parallel_for(1, 1, 0, torch_task, &run, &p->poll);
    if (status == CATTN_OK)
        cattn_torch_dropout_end(&run.cursor, p->dropout.torch);
    return status;
}

enum cattn_status cattn_dropout(const struct cattn_dropout_params *p) {
    CATTN_CHECK(dropout, p);
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    struct dropout_run run = {
        .params = p,
        .kernels = cattn_kernels_for(p->dtype),
        .n_batch_dims = p->n_batch_dims,
        .n_rows = p->n_rows,
        .n_cols = p->n_cols,
    };
    cattn_drop(&p->dropout, 0, &run.drop);
    merge_rows(&run);
    if (p->dropout.torch)
        return torch_dropout(&run);
    run.rows_per_task = cattn_rows_per_task(run.n_cols);
    run.pieces = run.n_cols > 2 * DROPOUT_PIECE ? cattn_ceil_div(run.n_cols, DROPOUT_PIECE) : 1;
    const int64_t n_tasks = run.pieces > 1 ? run.n_rows * run.pieces : cattn_ceil_div(run.n_rows, run.rows_per_task);
    return cattn_parallel_for(n_tasks, p->num_threads, 0, dropout_task, &run, &p->poll);
}
