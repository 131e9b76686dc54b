/* linear_attention.c -- the driver of linear attention with a state: heads and strips of columns are tasks. */
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "scratch.h"

/* Multiply-adds from which on threads are worth their start. */
#define PARALLEL_WORK 3e5
/* Tasks of a thread that even out their times. */
#define TASKS_EACH 3

struct linear_job {
    const struct cattn_linear_attention_params *params;
    const struct cattn_row_kernels *kernels;
    int64_t columns, pieces; /* of a task, and of a state */
    cattn_size strip_size, scratch_size;
};

/* One head of a tensor, from an element on, with `element` bytes for each. */
static struct cattn_strided part_of(const struct cattn_linear_attention_params *p, const struct cattn_tensor *tensor,
                                    int64_t entry, int64_t head, int64_t offset, size_t element) {
    struct cattn_strided part = {NULL, tensor->head, tensor->row, tensor->col};
    if (tensor->data)
        part.data = (char *)tensor->data + (cattn_batch_offset(tensor, p->n_batch_dims, p->batch_shape, entry) +
                                            head * tensor->head + offset) *
                                               (int64_t)element;
    return part;
}

static struct cattn_token_span span_of(const struct cattn_linear_attention_params *p, int64_t entry) {
    return cattn_token_span(p->edges, &p->lengths, p->length, p->n_batch_dims, p->batch_shape, entry);
}

/* Queries of one state. */
static int64_t queries_each(const struct cattn_linear_attention_params *p) {
    return p->query_heads > p->n_states ? p->query_heads / p->n_states : 1;
}

/* The tokens of one state, whose `strip` is at the start of the scratch: from a column on. */
static struct cattn_state_columns state_at(const struct cattn_linear_attention_params *p, int64_t entry, int64_t head,
                                           int64_t column, char *scratch, cattn_size strip_size,
                                           struct cattn_worker *worker) {
    const size_t element = cattn_element_size(p->dtype), stored = cattn_stored_size(p->dtype, p->storage);
    const int64_t each = queries_each(p);
    const int64_t query_head = p->query_heads > p->n_states ? head * each : head / (p->n_states / p->query_heads);
    const int64_t key_head = head / (p->n_states / p->key_heads), value_head = head / (p->n_states / p->value_heads);
    const struct cattn_token_span span = span_of(p, entry);
    return (struct cattn_state_columns){
        .stop = cattn_stop_of(worker),
        .n_tokens = span.n,
        .n_columns = p->d_v - column,
        .d_k = p->d_k,
        .n_queries = each,
        .scale = p->scale,
        .storage = p->storage,
        .decay_by_row = p->decay_by_row,
        .query = part_of(p, &p->query, entry, query_head, span.first * p->query.row, stored),
        .key = part_of(p, &p->key, entry, key_head, span.first * p->key.row, stored),
        .value = part_of(p, &p->value, entry, value_head, span.first * p->value.row + column * p->value.col, stored),
        .out = part_of(p, &p->out, entry, head * each, span.first * p->out.row + column * p->out.col, stored),
        .decay = part_of(p, &p->decay, entry, head, span.first * p->decay.row, element),
        .beta = part_of(p, &p->beta, entry, head, span.first * p->beta.row, element),
        .state = part_of(p, &p->state, entry, head, column * p->state.col, element),
        .state_out = part_of(p, &p->state_out, entry, head, column * p->state_out.col, element),
        .strip = scratch,
        .tokens = scratch + strip_size,
    };
}

/* Numbers that are cleared between two polls. */
#define CLEARED 1000000

/* Zeroes the outputs after the end of a sequence, from row `first` on; `element` bytes a number. */
static void clear_rows(struct cattn_strided out, int64_t n_heads, int64_t first, int64_t end, int64_t n_columns,
                       size_t element, struct cattn_worker *worker) {
    const int64_t together = out.col == 1 ? n_columns : 1; /* elements side by side */
    const int64_t between = 1 + CLEARED / (n_columns + 1);
    for (int64_t head = 0; head < n_heads && out.data; head++)
        for (int64_t row = first; row < end && (row % between != 0 || !cattn_should_stop(worker)); row++)
            for (int64_t c = 0; c < n_columns; c += together)
                memset((char *)out.data + (head * out.head + row * out.row + c * out.col) * (int64_t)element, 0,
                       (size_t)together * element);
}

static void linear_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct linear_job *job = context;
    const struct cattn_linear_attention_params *p = job->params;
    const int64_t piece = task % job->pieces, head = task / job->pieces % p->n_states;
    const int64_t entry = task / job->pieces / p->n_states, column = piece * job->columns;
    struct cattn_state_columns args =
        state_at(p, entry, head, column, cattn_worker_scratch(worker), job->strip_size, worker);
    args.n_columns = cattn_min(job->columns, args.n_columns);
    job->kernels->state_columns(&args);
    if (!p->edges)
        clear_rows(args.out, args.n_queries, args.n_tokens, p->seqlen, args.n_columns,
                   cattn_stored_size(p->dtype, p->storage), worker);
}

/* Whole states if they are enough tasks, else pieces of them. */
static int64_t divide_states(struct linear_job *job, int64_t n_states, int num_threads) {
    const struct cattn_linear_attention_params *p = job->params;
    const int64_t wanted = num_threads > 1 ? cattn_ceil_div((int64_t)num_threads * TASKS_EACH, n_states) : 1;
    const int64_t strips = cattn_ceil_div(p->d_v, CATTN_STRIP_COLUMNS);
    job->columns = cattn_ceil_div(strips, cattn_min(wanted, strips)) * CATTN_STRIP_COLUMNS;
    job->pieces = cattn_ceil_div(p->d_v, job->columns);
    return n_states * job->pieces;
}

enum cattn_status cattn_linear_attention(const struct cattn_linear_attention_params *p) {
    CATTN_CHECK(linear_attention, p);
    const int64_t n_states = p->n_batch * p->n_states;
    if (n_states == 0 || p->d_v == 0 || (p->seqlen == 0 && (!p->state_out.data || p->d_k == 0)))
        return CATTN_OK;
    struct linear_job job = {.params = p, .kernels = cattn_row_kernels_for(p->dtype)};
    const int64_t n_queries = queries_each(p);
    const size_t element = cattn_element_size(p->dtype);
    job.strip_size = (cattn_size)(p->d_k * CATTN_STRIP_COLUMNS) * element;
    job.scratch_size = job.strip_size + (cattn_size)CATTN_STATE_NUMBERS(p->d_k, n_queries, p->decay_by_row) * element +
                       CATTN_PAD * element;
    const double work = (double)n_states * (double)p->seqlen * (double)p->d_k * (double)p->d_v;
    const int num_threads = work < PARALLEL_WORK ? 1 : p->num_threads;
    const int64_t n_tasks = divide_states(&job, n_states, num_threads);
    return cattn_parallel_for(n_tasks, num_threads, job.scratch_size, linear_task, &job, &p->poll);
}

/* ---- gradients ---- */

struct gradient_job {
    const struct cattn_linear_attention_backward_params *params;
    const struct cattn_row_kernels *kernels;
    char *residual, *decay_rows; /* of all states; decay_rows may be NULL */
    int64_t each, pieces;        /* columns or rows of a task, and tasks of a state */
    cattn_size scratch_size;
};

static cattn_size carve_gradient(const struct gradient_job *job, void *memory, cattn_size size,
                                 struct cattn_state_gradient *g) {
    const struct cattn_linear_attention_params *p = &job->params->forward;
    const size_t element = cattn_element_size(p->dtype);
    const cattn_size strip = (cattn_size)(p->d_v * CATTN_STRIP_ROWS) * element;
    const cattn_size kept = p->decay.data ? 1 : 0, blocks = (cattn_size)cattn_ceil_div(p->seqlen, CATTN_STATE_TOKENS);
    const int64_t n_queries = queries_each(p);
    struct cattn_arena arena = cattn_arena(memory, size, true);
    g->forward.strip = cattn_carve(&arena, (cattn_size)(p->d_k * CATTN_STRIP_COLUMNS) * element + strip);
    g->forward.tokens = cattn_carve(
        &arena, (cattn_size)(CATTN_STATE_NUMBERS(p->d_k, n_queries, p->decay_by_row) + CATTN_PAD) * element);
    g->grad_strip = cattn_carve(&arena, strip);
    g->history = cattn_carve(&arena, kept * CATTN_STATE_HISTORY * element);
    g->checkpoints = cattn_carve(&arena, kept * blocks * strip);
    g->columns = cattn_carve(&arena, (cattn_size)CATTN_STATE_COLUMN_NUMBERS(p->d_v, n_queries) * element);
    return arena.used;
}

/* The gradients of the state of a task. */
static struct cattn_state_gradient gradient_at(const struct gradient_job *job, int64_t task,
                                               struct cattn_worker *worker) {
    const struct cattn_linear_attention_backward_params *params = job->params;
    const struct cattn_linear_attention_params *p = &params->forward;
    const size_t element = cattn_element_size(p->dtype), stored = cattn_stored_size(p->dtype, p->storage);
    const int64_t piece = task % job->pieces, head = task / job->pieces % p->n_states;
    const int64_t entry = task / job->pieces / p->n_states, of_queries = head * queries_each(p);
    const int64_t first = span_of(p, entry).first;
    struct cattn_state_gradient g = {.begin = piece * job->each, .d_v = p->d_v};
    char *scratch = cattn_worker_scratch(worker);
    g.forward = state_at(p, entry, head, 0, scratch, 0, worker);
    carve_gradient(job, scratch, job->scratch_size, &g);
    const int64_t row = p->edges ? head * p->seqlen + first : (entry * p->n_states + head) * p->seqlen;
    g.grad_out = part_of(p, &params->grad_out, entry, of_queries, first * params->grad_out.row, stored);
    g.grad_final = part_of(p, &params->grad_final, entry, head, 0, element);
    g.grad_query = part_of(p, &params->grad_query, entry, of_queries, first * params->grad_query.row, element);
    g.grad_key = part_of(p, &params->grad_key, entry, head, first * params->grad_key.row, element);
    g.grad_value = part_of(p, &params->grad_value, entry, head, first * params->grad_value.row, element);
    g.grad_state = part_of(p, &params->grad_state, entry, head, 0, element);
    g.grad_decay = part_of(p, &params->grad_decay, entry, head, first * params->grad_decay.row, element);
    g.grad_beta = part_of(p, &params->grad_beta, entry, head, first * params->grad_beta.row, element);
    g.residual = (struct cattn_strided){job->residual + row * p->d_v * (int64_t)element, 0, p->d_v, 1};
    if (p->decay_by_row) {
        g.decay_rows = g.grad_decay;
        g.grad_decay.data = NULL;
    } else if (job->decay_rows) {
        g.decay_rows = (struct cattn_strided){job->decay_rows + row * p->d_k * (int64_t)element, 0, p->d_k, 1};
    }
    return g;
}

static void columns_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct gradient_job *job = context;
    struct cattn_state_gradient g = gradient_at(job, task, worker);
    g.end = cattn_min(g.begin + job->each, g.d_v);
    job->kernels->gradient_columns(&g);
}

static void rows_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct gradient_job *job = context;
    struct cattn_state_gradient g = gradient_at(job, task, worker);
    g.end = cattn_min(g.begin + job->each, g.forward.d_k);
    job->kernels->gradient_rows(&g);
}

static void tokens_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct gradient_job *job = context;
    const struct cattn_linear_attention_params *p = &job->params->forward;
    const size_t element = cattn_element_size(p->dtype);
    const struct cattn_state_gradient g = gradient_at(job, task, worker);
    job->kernels->gradient_tokens(&g);
    if (p->edges)
        return;
    const int64_t from = g.forward.n_tokens, end = p->seqlen;
    clear_rows(g.grad_query, g.forward.n_queries, from, end, p->d_k, element, worker);
    clear_rows(g.grad_key, 1, from, end, p->d_k, element, worker);
    clear_rows(g.grad_value, 1, from, end, p->d_v, element, worker);
    clear_rows(g.grad_beta, 1, from, end, 1, element, worker);
    if (p->decay_by_row)
        clear_rows(g.decay_rows, 1, from, end, p->d_k, element, worker);
    else
        clear_rows(g.grad_decay, 1, from, end, 1, element, worker);
}

static enum cattn_status run_tasks(struct gradient_job *job, int num_threads, int64_t size, int64_t each,
                                   cattn_task_fn *task) {
    const struct cattn_linear_attention_params *p = &job->params->forward;
    job->each = each;
    job->pieces = cattn_ceil_div(size, each);
    return cattn_parallel_for(p->n_batch * p->n_states * job->pieces, num_threads, job->scratch_size, task, job,
                              &p->poll);
}

enum cattn_status cattn_linear_attention_backward(const struct cattn_linear_attention_backward_params *params) {
    CATTN_CHECK(linear_attention_backward, params);
    const struct cattn_linear_attention_params *p = &params->forward;
    const size_t element = cattn_element_size(p->dtype);
    const int64_t n_states = p->n_batch * p->n_states;
    if (n_states == 0 || (p->seqlen == 0 && p->d_k * p->d_v == 0))
        return CATTN_OK;
    const int64_t n_tokens = (p->edges ? p->n_states : n_states) * p->seqlen;
    const cattn_size of_decay = p->decay.data && !p->decay_by_row ? (cattn_size)(n_tokens * p->d_k) * element : 0;
    char *memory = cattn_allocate((cattn_size)(n_tokens * p->d_v) * element + of_decay + 1); /* at least one byte */
    if (!memory)
        return CATTN_NO_MEMORY;
    struct gradient_job job = {.params = params, .kernels = cattn_row_kernels_for(p->dtype), .residual = memory};
    struct cattn_state_gradient unused;
    job.decay_rows = p->decay.data && !p->decay_by_row ? memory + (cattn_size)(n_tokens * p->d_v) * element : NULL;
    job.scratch_size = carve_gradient(&job, NULL, 0, &unused);
    const double work = (double)n_states * (double)p->seqlen * (double)p->d_k * (double)p->d_v;
    const int num_threads = work < PARALLEL_WORK ? 1 : p->num_threads;
    enum cattn_status status = run_tasks(&job, num_threads, p->d_v, CATTN_STRIP_COLUMNS, columns_task);
    if (status == CATTN_OK)
        status = run_tasks(&job, num_threads, p->d_k, CATTN_STRIP_ROWS, rows_task);
    if (status == CATTN_OK)
        status = run_tasks(&job, num_threads, 1, 1, tokens_task);
    free(memory);
    return status;
}
