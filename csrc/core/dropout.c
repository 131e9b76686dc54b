/* dropout.c -- the driver of dropout, with random bits by position (Philox) or in sequence (PyTorch's generator). */
#include <math.h>
#include <string.h>

#include "../fp_mode.h"
#include "dispatch.h"
#include "random.h"
#include "rowwise.h"

/* ---- tasks take tickets at a sequence of dropout bits ---- */

/* Keys of a long row between two checks for an interrupt; a multiple of CATTN_STREAM_KEYS. */
#define LOOK_KEYS (1 << 16)

void cattn_dropout_stream_begin(struct cattn_dropout_stream *stream, const struct cattn_torch_random *random,
                                double keep_probability) {
    cattn_tickets_begin(&stream->tickets, 1);
    cattn_torch_dropout_begin(&stream->cursor, random, keep_probability);
}

void cattn_dropout_stream_end(struct cattn_dropout_stream *stream, struct cattn_torch_random *random) {
    if (random)
        cattn_torch_dropout_end(&stream->cursor, random);
    cattn_tickets_end(&stream->tickets);
}

int64_t cattn_dropout_stream_keys(struct cattn_torch_dropout *cursor, int64_t k0, int64_t n_keys, uint8_t *kept,
                                  struct cattn_worker *worker) {
    if (worker && k0 % LOOK_KEYS == 0 && cattn_should_stop(worker))
        return 0;
    const int64_t n = cattn_min(n_keys - k0, CATTN_STREAM_KEYS);
    cattn_torch_dropout_next(cursor, n, kept);
    return n;
}

/* Keeps the bits from key `first` on, as keys 0, 1, ... Returns false if the call was stopped. */
static bool draw_row(struct cattn_torch_dropout *cursor, int64_t first, int64_t n_keys, uint8_t *bits,
                     struct cattn_worker *worker) {
    uint8_t kept[CATTN_STREAM_KEYS];
    memset(bits, 0, (size_t)cattn_dropout_stream_row_bytes(n_keys));
    for (int64_t k0 = 0, n; k0 < n_keys; k0 += n) {
        n = cattn_dropout_stream_keys(cursor, k0, n_keys, kept, worker);
        if (n == 0)
            return false;
        for (int64_t k = first > k0 ? first - k0 : 0; k < n; k++) {
            const int64_t key = k0 + k - first;
            bits[key >> 3] |= (uint8_t)(kept[k] << (key & 7));
        }
    }
    return true;
}

bool cattn_dropout_stream_take(struct cattn_dropout_stream *stream, int64_t task, const struct cattn_rows *rows,
                               struct cattn_worker *worker) {
    const int64_t n_keys = rows->call.seqlen_k;
    if (worker && !cattn_tickets_wait(&stream->tickets, 0, task, worker))
        return false;
    /* the cursor is this task's until it passes the ticket on */
    for (int r = 0; r < rows->n_rows; r++) {
        uint8_t *bits = rows->scratch.drop_bits + (cattn_size)r * cattn_dropout_stream_row_bytes(n_keys);
        if (!draw_row(&stream->cursor, rows->first_key, n_keys, bits, worker))
            return false; /* the whole call stops: no task waits for the next ticket for long */
    }
    cattn_tickets_pass(&stream->tickets, 0);
    return true;
}

/* ---- the driver of dropout, with random bits by position (Philox) or in sequence (PyTorch's generator) ---- */

void cattn_set_dropout(struct cattn_dropout_spec *spec, double p) {
    spec->enabled = p > 0.0;
    spec->torch = NULL;
    spec->seed = 0;
    spec->keep_probability = spec->keep_scale = 1.0;
    spec->threshold = (uint64_t)1 << 32;
    if (!spec->enabled)
        return;
    const unsigned mode = cattn_fp_enter(); /* the caller's rounding must not show */
    spec->keep_probability = 1.0 - p;
    spec->threshold = (uint64_t)rint((1.0 - p) * 4294967296.0);
    spec->keep_scale = p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
    cattn_fp_leave(mode);
}

void cattn_drop_fill(const struct cattn_dropout_spec *spec, int64_t batch, struct cattn_drop *drop) {
    const uint64_t threshold = spec->enabled ? spec->threshold : (uint64_t)1 << 32; /* keeps all */
    drop->enabled = spec->enabled;
    drop->batch_twice = (uint32_t)(2 * batch);
    drop->threshold_hi = (uint32_t)(threshold >> 16);
    drop->threshold_lo = (uint32_t)(threshold & 0xffff);
    if (!spec->enabled) { /* the threshold keeps all, whatever the key */
        memset(drop->key, 0, sizeof drop->key);
        return;
    }
    /* Philox's key schedule: each round adds a constant to each half */
    uint32_t key0 = (uint32_t)spec->seed, key1 = (uint32_t)(spec->seed >> 32);
    for (int round = 0; round < CATTN_PHILOX_ROUNDS; round++) {
        drop->key[round][0] = key0;
        drop->key[round][1] = key1;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

struct dropout_job {
    const struct cattn_dropout_params *params;
    const struct cattn_row_kernels *kernels;
    struct cattn_drop drop;
    struct cattn_long_rows rows;
    double scale;                       /* of the elements that are kept */
    struct cattn_torch_dropout *cursor; /* PyTorch's generator, or NULL */
};

/* Halves are widened, computed and narrowed in pieces of this; whole runs of Philox counters. */
#define WIDE_PIECE 1024

/* Drops elements of part of a row. `drawn` is the mask from PyTorch's generator, or NULL to draw by Philox here. */
static void drop_plain(const struct dropout_job *job, const struct cattn_dropout_row *row, const uint8_t *drawn) {
    if (drawn)
        job->kernels->torch_drop(row->n, row->x, row->x_stride, drawn, row->keep_scale, row->out, row->out_stride);
    else
        job->kernels->dropout_row(row);
}

/* The same in any storage. */
static void drop_stored(const struct dropout_job *job, const struct cattn_dropout_row *row, const uint8_t *drawn) {
    const enum cattn_storage storage = job->params->storage;
    if (storage == CATTN_STORED_PLAIN) {
        drop_plain(job, row, drawn);
        return;
    }
    float wide[WIDE_PIECE];
    struct cattn_dropout_row piece = *row;
    piece.x = piece.out = wide;
    piece.x_stride = piece.out_stride = 1;
    for (int64_t done = 0; done < row->n; done += piece.n) {
        const int64_t to_boundary = WIDE_PIECE - (int64_t)(piece.first % WIDE_PIECE);
        piece.n = row->n - done < to_boundary ? row->n - done : to_boundary;
        job->kernels->widen_row(storage, (const uint16_t *)row->x + done * row->x_stride, row->x_stride, piece.n, wide);
        drop_plain(job, &piece, drawn ? drawn + done : NULL);
        job->kernels->narrow_row(storage, wide, piece.n, (uint16_t *)row->out + done * row->out_stride,
                                 row->out_stride);
        piece.first += (uint64_t)piece.n;
        piece.mask = piece.mask ? piece.mask + piece.n * piece.mask_stride : NULL;
    }
}

/* Columns begin .. end-1 of one row; `drawn` as above. */
static void dropout_one(const struct dropout_job *job, int64_t row, int64_t begin, int64_t end, const uint8_t *drawn) {
    const struct cattn_dropout_params *p = job->params;
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const char *x = cattn_row_at(&p->x, job->rows.n_batch_dims, p->batch_shape, row, element);
    char *out = cattn_row_at(&p->out, job->rows.n_batch_dims, p->batch_shape, row, element);
    uint8_t *mask = p->mask.data ? cattn_row_at(&p->mask, job->rows.n_batch_dims, p->batch_shape, row, 1) : NULL;
    const struct cattn_dropout_row args = {
        .n = end - begin,
        .first = (uint64_t)(row * job->rows.n_cols + begin),
        .x = x + begin * p->x.col * (int64_t)element,
        .x_stride = p->x.col,
        .out = out + begin * p->out.col * (int64_t)element,
        .out_stride = p->out.col,
        .mask = mask ? mask + begin * p->mask.col : NULL,
        .mask_stride = p->mask.data ? p->mask.col : 0,
        .keep_scale = job->scale,
        .drop = job->drop,
    };
    drop_stored(job, &args, drawn);
    for (int64_t i = 0; drawn && args.mask && i < args.n; i++)
        args.mask[i * args.mask_stride] = drawn[i];
}

/* The same with Philox's bits. */
static void dropout_piece(const void *context, int64_t row, int64_t begin, int64_t end) {
    dropout_one(context, row, begin, end, NULL);
}

static void dropout_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct dropout_job *job = context;
    (void)worker; /* a task is too short to be interrupted */
    cattn_each_piece(&job->rows, task, dropout_piece, job);
}

/* ---- PyTorch's generator: one thread, since the bits come in sequence ---- */

/* Elements of the mask that are drawn at a time. */
#define TORCH_PIECE 4096

static void torch_task(void *context, int64_t task, struct cattn_worker *worker) {
    struct dropout_job *job = context;
    const struct cattn_dropout_params *p = job->params;
    const double q = p->dropout.keep_probability;
    const int64_t n_cols = job->rows.n_cols, total = job->rows.n_rows * n_cols;
    /* 1 / q, divided in the precision of the data as PyTorch does */
    job->scale = p->dtype == CATTN_F32 ? (double)(1.0f / (float)q) : 1.0 / q;
    if (p->storage != CATTN_STORED_PLAIN) {
        float scale = (float)job->scale;
        uint16_t half;
        job->kernels->narrow_row(p->storage, &scale, 1, &half, 1);
        job->kernels->widen_row(p->storage, &half, 1, 1, &scale);
        job->scale = (double)scale;
    }
    uint8_t mask[TORCH_PIECE];
    (void)task; /* there is one */
    for (int64_t done = 0; done < total && !cattn_should_stop(worker); done += TORCH_PIECE) {
        const int64_t ready = total - done < TORCH_PIECE ? total - done : TORCH_PIECE;
        cattn_torch_dropout_next(job->cursor, ready, mask);
        for (int64_t used = 0; used < ready;) {
            const int64_t row = (done + used) / n_cols, begin = (done + used) % n_cols;
            const int64_t n = n_cols - begin < ready - used ? n_cols - begin : ready - used;
            dropout_one(job, row, begin, begin + n, mask + used);
            used += n;
        }
    }
}

static enum cattn_status torch_dropout(struct dropout_job *job) {
    const struct cattn_dropout_params *p = job->params;
    struct cattn_torch_dropout cursor;
    job->cursor = &cursor;
    cattn_torch_dropout_begin(&cursor, p->dropout.torch, p->dropout.keep_probability);
    const enum cattn_status status = cattn_parallel_for(1, 1, 0, torch_task, job, &p->poll);
    if (status == CATTN_OK)
        cattn_torch_dropout_end(&cursor, p->dropout.torch);
    return status;
}

enum cattn_status cattn_dropout(const struct cattn_dropout_params *p) {
    CATTN_CHECK(dropout, p);
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    struct dropout_job job = {
        .params = p,
        .kernels = cattn_row_kernels_for(p->dtype),
        .rows = {.n_batch_dims = p->n_batch_dims,
                 .batch_shape = p->batch_shape,
                 .n_rows = p->n_rows,
                 .n_cols = p->n_cols},
        .scale = p->dropout.keep_scale,
    };
    cattn_drop_fill(&p->dropout, 0, &job.drop);
    const struct cattn_tensor *const tensors[] = {&p->x, &p->out, &p->mask};
    cattn_merge_rows(&job.rows, tensors, 3);
    if (p->dropout.torch)
        return torch_dropout(&job);
    return cattn_parallel_for(job.rows.n_tasks, p->num_threads, 0, dropout_task, &job, &p->poll);
}
