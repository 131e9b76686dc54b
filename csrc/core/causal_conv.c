/* causal_conv.c -- the driver of the short convolution before linear attention: blocks of tokens are tasks. */
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "rowwise.h"
#include "scratch.h"

struct conv_job {
    const struct cattn_conv_params *params;
    const struct cattn_row_kernels *kernels;
    const void *weight;      /* [width][channels], in the dtype of the computation */
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

static void conv_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct conv_job *job = context;
    const struct cattn_conv_params *p = job->params;
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const int64_t entry = task / job->n_blocks, begin = task % job->n_blocks * job->block;
    const struct cattn_token_span span = span_of(p, entry);
    const int64_t end = p->edges ? span.n : p->seqlen;
    const void **rows = cattn_worker_scratch(worker);
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
        const struct cattn_conv_row args = {.n = p->n_channels,
                                            .width = p->width,
                                            .silu = p->silu,
                                            .storage = p->storage,
                                            .rows = rows,
                                            .cols = cols,
                                            .weight = job->weight,
                                            .bias = p->bias.data,
                                            .bias_col = p->bias.data ? p->bias.col : 0,
                                            .out = out,
                                            .out_col = p->out.col};
        job->kernels->conv_row(&args);
    }
}

/* The last width - 1 rows, in ascending order: the new state may be the old one. */
static void write_state(const struct cattn_conv_params *p, int64_t entry) {
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const struct cattn_token_span span = span_of(p, entry);
    int64_t col;
    for (int64_t i = 0; i < p->width - 1; i++) {
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
    if (!cattn_should_stop(worker))
        write_state(job->params, task);
}

static void transpose(const struct cattn_conv_params *p, char *to) {
    const size_t element = cattn_element_size(p->dtype);
    for (int64_t j = 0; j < p->width; j++)
        for (int64_t c = 0; c < p->n_channels; c++, to += element)
            memcpy(to, (char *)p->weight.data + (c * p->weight.row + j * p->weight.col) * (int64_t)element, element);
}

enum cattn_status cattn_causal_conv(const struct cattn_conv_params *p) {
    CATTN_CHECK(conv, p);
    if (p->n_batch == 0 || p->n_channels == 0)
        return CATTN_OK;
    struct conv_job job = {.params = p, .kernels = cattn_row_kernels_for(p->dtype), .weight = p->weight.data};
    char *memory = NULL;
    if (p->weight.row != 1 || p->weight.col != p->n_channels) {
        memory = cattn_allocate((cattn_size)(p->width * p->n_channels) * cattn_element_size(p->dtype));
        if (!memory)
            return CATTN_NO_MEMORY;
        transpose(p, memory);
        job.weight = memory;
    }
    const int64_t longest = p->edges ? p->longest : p->seqlen;
    job.block = cattn_rows_per_task(p->n_channels * p->width);
    job.n_blocks = cattn_ceil_div(longest, job.block);
    const cattn_size scratch = (cattn_size)p->width * (sizeof(void *) + sizeof(int64_t));
    enum cattn_status status =
        cattn_parallel_for(p->n_batch * job.n_blocks, p->num_threads, scratch, conv_task, &job, &p->poll);
    if (status == CATTN_OK && p->state_out.data && p->width > 1)
        status = cattn_parallel_for(p->n_batch, 1, 0, state_task, &job, &p->poll);
    free(memory);
    return status;
}
