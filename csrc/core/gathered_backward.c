/* gathered_backward.c -- the gradients of attention with key_indices.
 *
 * The call of each unit has gradients of its gathered keys, which are added to the gradients of the keys that they come
 * from. Units that share a key-value head add in the order of their heads and queries, and each in the order of its
 * list. Tickets keep that order whatever the number of threads.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../fp_mode.h"
#include "attention.h"
#include "parallel.h"
#include "params.h"
#include "plan.h"

/* Units whose gradients a task keeps before it adds them: with more of them a thread waits less often, but they leave
 * the caches, and there are fewer tasks for the last thread to share. */
#define MOST_UNITS 8
#define BUDGET ((cattn_size)2 << 20)
#define FAIR_TASKS 4

struct gathered_job {
    const struct cattn_backward_params *params;
    struct cattn_gather_plan plan;
    cattn_size scratch_size;
    int64_t n_places, units_per_place; /* what units add to: gradients of one key-value head, or of all */
    struct cattn_tickets tickets;
    int64_t units_per_task;
    double *sinks;                /* [batch][head], or NULL */
    struct cattn_misfit *misfits; /* the first of each unit, or NULL */
    atomic_int status;            /* the first that is not CATTN_OK */
};

/* A unit, in the scratch of a task. */
struct gathered_unit {
    struct cattn_gather *gather;
    struct cattn_backward_params call;
    void *grad_key, *grad_value; /* [gathered][column] */
    void *grad_bias;             /* [head][row][gathered] */
    void *grad_sinks;            /* [head] */
};

static struct gathered_unit *lay_out(const struct gathered_job *job, struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &job->params->forward;
    const cattn_size n = (cattn_size)p->n_indices, element = cattn_element_size(p->dtype);
    const cattn_size heads = (cattn_size)job->plan.heads_per_unit,
                     pairs = n * heads * (cattn_size)job->plan.rows_per_unit;
    struct gathered_unit unused = {.gather = NULL}, *unit = cattn_carve(arena, sizeof *unit),
                         *u = unit ? unit : &unused;
    u->gather = cattn_gather_lay_out(&job->plan, p, arena);
    u->grad_key = cattn_carve(arena, n * (cattn_size)p->head_dim * element);
    u->grad_value = cattn_carve(arena, n * (cattn_size)p->d_v * element);
    u->grad_bias = cattn_carve(arena, job->params->grad_bias.data ? pairs * element : 0);
    u->grad_sinks = cattn_carve(arena, heads * element);
    return unit;
}

/* ---- a unit ---- */

/* The part of a result of the forward pass, or of its gradient, that belongs to the unit. */
static struct cattn_tensor part_of(const struct gathered_job *job, const struct gathered_unit *u,
                                   const struct cattn_tensor *tensor, size_t element) {
    const int64_t start = cattn_batch_start(&job->params->forward, tensor, u->gather->batch.index);
    return cattn_gather_part(u->gather, tensor, start, element);
}

/* An array of scratch as a tensor, all 0. */
static struct cattn_tensor cleared(void *data, int64_t heads, int64_t rows, int64_t cols, size_t element) {
    memset(data, 0, (size_t)(heads * rows * cols) * element);
    return (struct cattn_tensor){.data = data, .head = heads > 1 ? rows * cols : 0, .row = cols, .col = 1};
}

static void heads_to_rows(struct cattn_tensor *tensor) {
    tensor->row = tensor->head;
    tensor->head = 0;
}

/* Heads that share a list and have one query become the queries of one head: all are computed at once. A sink belongs
 * to a head, and so does its gradient. */
static void merge_heads(struct cattn_backward_params *call) {
    struct cattn_attention_params *forward = &call->forward;
    if (forward->seqlen_q != 1 || forward->sinks.data)
        return;
    struct cattn_tensor *const tensors[] = {&forward->query,  &forward->attn_mask, &forward->gate,  &forward->out,
                                            &forward->lse,    &call->grad_out,     &call->grad_lse, &call->grad_query,
                                            &call->grad_bias, &call->grad_gate};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        heads_to_rows(tensors[i]);
    for (int b = 0; b < forward->n_bias; b++)
        heads_to_rows(&forward->bias[b]);
    forward->seqlen_q = forward->num_heads;
    forward->num_heads = forward->group_size = 1;
    if (forward->ranges.query_length > 0)
        forward->ranges.query_length = forward->seqlen_q;
}

static void describe(struct gathered_job *job, struct gathered_unit *u, int64_t index) {
    const struct cattn_backward_params *params = job->params;
    const struct cattn_attention_params *p = &params->forward;
    const struct cattn_gather *g = u->gather;
    struct cattn_backward_params *call = &u->call;
    const size_t element = cattn_element_size(p->dtype), stored = cattn_stored_size(p->dtype, p->storage);
    const int64_t heads = g->call.num_heads;
    cattn_clear_backward(call);
    call->forward = g->call;
    call->misfit = job->misfits ? &job->misfits[index] : NULL;
    call->plain_out = params->plain_out;
    call->forward.out = part_of(job, u, &p->out, params->plain_out ? element : stored);
    call->forward.lse = part_of(job, u, &p->lse, p->double_lse ? sizeof(double) : element);
    call->grad_out = part_of(job, u, &params->grad_out, stored);
    call->grad_lse = part_of(job, u, &params->grad_lse, sizeof(double));
    call->grad_query = part_of(job, u, &params->grad_query, element);
    call->grad_gate = part_of(job, u, &params->grad_gate, element);
    call->grad_key = cleared(u->grad_key, 1, g->n_keys, p->head_dim, element);
    call->grad_value = cleared(u->grad_value, 1, g->n_keys, p->d_v, element);
    if (params->grad_bias.data)
        call->grad_bias = cleared(u->grad_bias, heads, g->n_rows, g->n_keys, element);
    if (params->grad_sinks.data) {
        call->grad_sinks = cleared(u->grad_sinks, heads, 1, 1, element);
        call->grad_sinks.head = 1;
    }
    merge_heads(call);
}

/* ---- adding ---- */

#define ADD(type)                                                                                                      \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        const type sum = ((type *)to)[i] + ((const type *)from)[i];                                                    \
        ((type *)to)[i] = sum == sum ? sum : (type)NAN;                                                                \
    }

/* to += from, n elements with unit stride, where every NaN becomes the same one. */
static void add(enum cattn_dtype dtype, void *restrict to, const void *restrict from, int64_t n) {
    if (dtype == CATTN_F32)
        ADD(float)
    else
        ADD(double)
}

/* Adds the gradient of gathered rows to the rows that they come from. */
static void add_rows(const struct gathered_job *job, const struct gathered_unit *u, const struct cattn_tensor *to,
                     const struct cattn_tensor *from) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_gather *g = u->gather;
    const int64_t start = cattn_batch_start(p, to, g->batch.index) + g->first_head / p->group_size * to->head;
    for (int64_t k = 0; k < g->n_keys; k++)
        add(p->dtype, cattn_tensor_at(p, to, start + g->index[k] * to->row), cattn_tensor_at(p, from, k * from->row),
            from->row);
}

/* The gradient of the bias; its axes that are summed over have stride 0. */
static void add_bias(const struct gathered_job *job, const struct gathered_unit *u) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *to = &job->params->grad_bias, *from = &u->call.grad_bias;
    const struct cattn_gather *g = u->gather;
    const struct cattn_tensor part = part_of(job, u, to, cattn_element_size(p->dtype));
    for (int64_t head = 0; head < g->call.num_heads; head++)
        for (int64_t row = 0; row < g->n_rows; row++)
            for (int64_t k = 0; k < g->n_keys; k++)
                add(p->dtype, cattn_tensor_at(p, &part, head * to->head + row * to->row + g->index[k] * to->col),
                    cattn_tensor_at(p, from, (head * g->n_rows + row) * g->n_keys + k), 1);
}

static void add_sinks(const struct gathered_job *job, const struct gathered_unit *u) {
    const struct cattn_attention_params *p = &job->params->forward;
    double *to = job->sinks + u->gather->batch.index * p->num_heads + u->gather->first_head;
    for (int64_t head = 0; head < u->gather->call.num_heads; head++)
        to[head] += cattn_number_at(p->dtype, u->grad_sinks, head);
}

/* Heads and batch entries may share a gradient of the bias: then all units add to one place. */
static int64_t count_places(const struct gathered_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    return job->params->grad_bias.data ? 1 : p->n_batch * (p->num_heads / p->group_size);
}

/* Where a misfit of the unit's call is in the tensors. */
static void place_misfit(const struct gathered_unit *u, struct cattn_misfit *misfit) {
    const bool merged = u->call.forward.num_heads != u->gather->call.num_heads;
    const int64_t head = merged ? misfit->row : misfit->head, row = merged ? 0 : misfit->row;
    misfit->batch = u->gather->batch.index;
    misfit->head = u->gather->first_head + head;
    misfit->row = u->gather->first_row + row;
}

/* The gradients of the gathered keys of one unit. NULL: the call was stopped, or there is no memory. */
static struct gathered_unit *compute_unit(struct gathered_job *job, int64_t index, struct cattn_arena *arena,
                                          struct cattn_worker *worker) {
    struct gathered_unit *u = lay_out(job, arena);
    cattn_gather_unit(&job->plan, &job->params->forward, index, worker, u->gather);
    describe(job, u, index);
    const enum cattn_status status = cattn_attention_backward(&u->call);
    int ok = CATTN_OK;
    if (status != CATTN_OK) {
        atomic_compare_exchange_strong(&job->status, &ok, status);
        return NULL;
    }
    if (job->misfits && job->misfits[index].found)
        place_misfit(u, &job->misfits[index]);
    return u;
}

static void add_unit(const struct gathered_job *job, const struct gathered_unit *u) {
    const struct cattn_backward_params *params = job->params;
    add_rows(job, u, &params->grad_key, &u->call.grad_key);
    add_rows(job, u, &params->grad_value, &u->call.grad_value);
    if (params->grad_bias.data)
        add_bias(job, u);
    if (job->sinks)
        add_sinks(job, u);
}

/* Units are numbered by batch entry, head and queries, so that the units of a place follow each other. A task computes
 * some of them before it waits for its ticket. Consecutive tasks are of different places, so that few threads wait. */
static void units_task(void *context, int64_t task, struct cattn_worker *worker) {
    struct gathered_job *job = context;
    struct gathered_unit *units[MOST_UNITS];
    const int64_t place = task % job->n_places, ticket = task / job->n_places;
    const int64_t first = ticket * job->units_per_task;
    const int64_t n = cattn_min(job->units_per_task, job->units_per_place - first);
    struct cattn_arena arena = cattn_arena(cattn_worker_scratch(worker), job->scratch_size, true);
    for (int64_t i = 0; i < n; i++)
        units[i] = compute_unit(job, place * job->units_per_place + first + i, &arena, worker);
    if (!cattn_tickets_wait(&job->tickets, place, ticket, worker))
        return;
    for (int64_t i = 0; i < n; i++)
        if (units[i])
            add_unit(job, units[i]);
    cattn_tickets_pass(&job->tickets, place);
}

/* All units of a place: nobody waits. */
static void place_task(void *context, int64_t place, struct cattn_worker *worker) {
    struct gathered_job *job = context;
    for (int64_t i = 0; i < job->units_per_place && !cattn_should_stop(worker); i++) {
        struct cattn_arena arena = cattn_arena(cattn_worker_scratch(worker), job->scratch_size, true);
        const struct gathered_unit *u = compute_unit(job, place * job->units_per_place + i, &arena, worker);
        if (!u)
            return;
        add_unit(job, u);
    }
}

/* ---- the call ---- */

/* Rounds the gradients of the sinks, and copies the first misfit. */
static void finish(const struct gathered_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *to = &job->params->grad_sinks;
    const unsigned mode = cattn_fp_enter();
    for (int64_t i = 0; job->sinks && i < p->n_batch * p->num_heads; i++) {
        void *place = cattn_tensor_at(p, to, cattn_batch_start(p, to, i / p->num_heads) + i % p->num_heads * to->head);
        const double sum = job->sinks[i] == job->sinks[i] ? job->sinks[i] : (double)NAN;
        if (p->dtype == CATTN_F32)
            *(float *)place = (float)sum;
        else
            *(double *)place = sum;
    }
    cattn_fp_leave(mode);
    for (int64_t i = 0; job->misfits && i < job->plan.n_units && !job->params->misfit->found; i++)
        *job->params->misfit = job->misfits[i];
}

static enum cattn_status run_units(struct gathered_job *job) {
    const struct cattn_poll *poll = &job->params->forward.poll;
    const int n_threads = job->plan.num_threads;
    if (cattn_plan_whole_units(job->n_places, n_threads, false))
        return cattn_parallel_for(job->n_places, n_threads, job->scratch_size, place_task, job, poll);
    const int64_t fair = job->units_per_place / (FAIR_TASKS * n_threads),
                  fitting = (int64_t)(BUDGET / job->scratch_size);
    const int64_t some = cattn_min(cattn_min(fair, fitting), MOST_UNITS);
    job->units_per_task = some < 1 ? 1 : some;
    job->scratch_size *= (cattn_size)job->units_per_task;
    if (!cattn_tickets_begin(&job->tickets, job->n_places))
        return CATTN_NO_MEMORY;
    const int64_t n_tasks = job->n_places * cattn_ceil_div(job->units_per_place, job->units_per_task);
    const enum cattn_status status = cattn_parallel_for(n_tasks, n_threads, job->scratch_size, units_task, job, poll);
    cattn_tickets_end(&job->tickets);
    return status;
}

static enum cattn_status run(struct gathered_job *job) {
    enum cattn_status status = run_units(job);
    if (status == CATTN_OK)
        status = (enum cattn_status)atomic_load(&job->status);
    if (status == CATTN_OK)
        finish(job);
    return status;
}

enum cattn_status cattn_gathered_backward(const struct cattn_backward_params *params) {
    CATTN_CHECK(backward, params);
    const struct cattn_attention_params *p = &params->forward;
    struct gathered_job job = {.params = params, .plan = cattn_gather_plan(p, true)};
    if (job.plan.n_units == 0)
        return CATTN_OK;
    job.n_places = count_places(&job);
    job.units_per_place = job.plan.n_units / job.n_places;
    struct cattn_arena count = cattn_arena(NULL, 0, true);
    lay_out(&job, &count);
    job.scratch_size = count.used;
    atomic_init(&job.status, CATTN_OK);
    job.sinks = params->grad_sinks.data
                    ? cattn_allocate_zeros((cattn_size)(p->n_batch * p->num_heads), sizeof *job.sinks)
                    : NULL;
    job.misfits = params->misfit ? cattn_allocate_zeros((cattn_size)job.plan.n_units, sizeof *job.misfits) : NULL;
    const bool allocated = !job.sinks == !params->grad_sinks.data && !job.misfits == !params->misfit;
    const enum cattn_status status = allocated ? run(&job) : CATTN_NO_MEMORY;
    free(job.sinks);
    free(job.misfits);
    return status;
}
