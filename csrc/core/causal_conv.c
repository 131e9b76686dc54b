/* causal_conv.c -- the driver of the short convolution before linear attention: blocks of tokens are tasks. */
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "rowwise.h"
#include "scratch.h"

/* Factors of one row that are read between two polls. */
#define FACTORS_TOGETHER ((int64_t)1 << 22)

struct conv_job {
    const struct cattn_conv_params *params;
    const struct cattn_row_kernels *kernels;
    char *weight;            /* [part of the channels][width][channels of it], in the dtype of the computation */
    int64_t part;            /* channels that are computed together: all, unless the width is very large */
    int64_t rows;            /* of the transposed weight in a task */
    int64_t block, n_blocks; /* tokens of a task, and tasks of a batch entry */
};

static void *row_at(const struct cattn_conv_params *p, const struct cattn_tensor *tensor, int64_t entry, int64_t row) {
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    char *at = cattn_row_at(tensor, p->n_batch_dims, p->batch_shape, entry, element);
    return at + row * tensor->row * (int64_t)element;
}

static struct cattn_token_span span_of(const struct cattn_conv_params *p, int64_t entry) {
    return cattn_token_span(p->edges, &p->lengths, p->length, p->n_batch_dims, p->batch_shape, entry);
}

/* The row of x at `token` of an entry whose first row is `first`: one of the state before token 0, NULL without state.
 */
static void *source_at(const struct cattn_conv_params *p, int64_t entry, int64_t first, int64_t token, int64_t *col) {
    *col = token < 0 ? p->state.col : p->x.col;
    if (token >= 0)
        return row_at(p, &p->x, entry, first + token);
    return p->state.data ? row_at(p, &p->state, entry, token + p->width - 1) : NULL;
}

/* The channels of a row from `first` on. `rows` and `cols` are at these channels, and at the next part afterwards. */
static void run_part(const struct conv_job *job, const char **rows, const int64_t *cols, int64_t first, char *out) {
    const struct cattn_conv_params *p = job->params;
    const int64_t stored = (int64_t)cattn_stored_size(p->dtype, p->storage);
    const int64_t element = (int64_t)cattn_element_size(p->dtype);
    const struct cattn_conv_row args = {
        .n = cattn_min(job->part, p->n_channels - first),
        .width = p->width,
        .silu = p->silu,
        .storage = p->storage,
        .rows = (const void *const *)rows,
        .cols = cols,
        .weight = job->weight + first * p->width * element,
        .bias = p->bias.data ? (char *)p->bias.data + first * p->bias.col * element : NULL,
        .bias_col = p->bias.data ? p->bias.col : 0,
        .out = out + first * p->out.col * stored,
        .out_col = p->out.col,
    };
    job->kernels->conv_row(&args);
    for (int64_t j = 0; j < p->width && job->part < p->n_channels; j++)
        if (rows[j])
            rows[j] += job->part * cols[j] * stored;
}

static void conv_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct conv_job *job = context;
    const struct cattn_conv_params *p = job->params;
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const int64_t entry = task / job->n_blocks, begin = task % job->n_blocks * job->block;
    const struct cattn_token_span span = span_of(p, entry);
    const int64_t end = p->edges ? span.n : p->seqlen;
    const char **rows = cattn_worker_scratch(worker);
    int64_t *cols = (int64_t *)(rows + p->width);
    for (int64_t t = begin; t < end && t < begin + job->block && !cattn_should_stop(worker); t++) {
        char *out = row_at(p, &p->out, entry, span.first + t);
        if (t >= span.n) {
            for (int64_t c = 0; c < p->n_channels; c++)
                memset(out + c * p->out.col * (int64_t)element, 0, element);
            continue;
        }
        for (int64_t j = 0; j < p->width; j++)
            rows[j] = source_at(p, entry, span.first, t - p->width + 1 + j, &cols[j]);
        for (int64_t first = 0; first < p->n_channels && (first == 0 || !cattn_should_stop(worker)); first += job->part)
            run_part(job, rows, cols, first, out);
    }
}

/* The last width - 1 rows, in ascending order: the new state may be the old one. */
static void write_state(const struct cattn_conv_params *p, int64_t entry, struct cattn_worker *worker) {
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const struct cattn_token_span span = span_of(p, entry);
    int64_t col;
    for (int64_t i = 0; i < p->width - 1 && !cattn_should_stop(worker); i++) {
        char *to = row_at(p, &p->state_out, entry, i);
        const char *from = source_at(p, entry, span.first, span.n + i - p->width + 1, &col);
        for (int64_t c = 0; c < p->n_channels; c++, to += p->state_out.col * (int64_t)element) {
            if (from)
                memmove(to, from + c * col * (int64_t)element, element);
            else
                memset(to, 0, element);
        }
    }
}

static void state_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct conv_job *job = context;
    write_state(job->params, task, worker);
}

static void transpose_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct conv_job *job = context;
    const struct cattn_conv_params *p = job->params;
    const int64_t element = (int64_t)cattn_element_size(p->dtype), end = cattn_min((task + 1) * job->rows, p->width);
    (void)worker;
    for (int64_t first = 0; first < p->n_channels; first += job->part) {
        const int64_t n = cattn_min(job->part, p->n_channels - first);
        char *to = job->weight + (first * p->width + task * job->rows * n) * element;
        for (int64_t j = task * job->rows; j < end; j++)
            for (int64_t c = first; c < first + n; c++, to += element)
                memcpy(to, (char *)p->weight.data + (c * p->weight.row + j * p->weight.col) * element, (size_t)element);
    }
}

static enum cattn_status transpose(struct conv_job *job) {
    const struct cattn_conv_params *p = job->params;
    job->rows = cattn_rows_per_task(p->n_channels);
    if (job->rows < p->width)
        return cattn_parallel_for(cattn_ceil_div(p->width, job->rows), p->num_threads, 0, transpose_task, job,
                                  &p->poll);
    transpose_task(job, 0, NULL);
    return CATTN_OK;
}

enum cattn_status cattn_causal_conv(const struct cattn_conv_params *p) {
    CATTN_CHECK(conv, p);
    if (p->n_batch == 0 || p->n_channels == 0)
        return CATTN_OK;
    struct conv_job job = {.params = p, .kernels = cattn_row_kernels_for(p->dtype), .weight = p->weight.data};
    const int64_t part = cattn_ceil_div(FACTORS_TOGETHER / p->width + 1, CATTN_STRIP_COLUMNS) * CATTN_STRIP_COLUMNS;
    job.part = cattn_min(part, p->n_channels);
    char *memory = NULL;
    enum cattn_status status = CATTN_OK;
    if (p->weight.row != 1 || p->weight.col != p->n_channels || job.part < p->n_channels) {
        memory = cattn_allocate((cattn_size)(p->width * p->n_channels) * cattn_element_size(p->dtype));
        if (!memory)
            return CATTN_NO_MEMORY;
        job.weight = memory;
        status = transpose(&job);
    }
    const int64_t longest = p->edges ? p->longest : p->seqlen;
    job.block = cattn_rows_per_task(p->n_channels * p->width);
    job.n_blocks = cattn_ceil_div(longest, job.block);
    const cattn_size scratch = (cattn_size)p->width * (sizeof(void *) + sizeof(int64_t));
    if (status == CATTN_OK)
        status = cattn_parallel_for(p->n_batch * job.n_blocks, p->num_threads, scratch, conv_task, &job, &p->poll);
    if (status == CATTN_OK && p->state_out.data && p->width > 1)
        status = cattn_parallel_for(p->n_batch, 1, 0, state_task, &job, &p->poll);
    free(memory);
    return status;
}
