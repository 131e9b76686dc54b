/* gathered_backward.c -- the driver of the gradients of attention with key_indices: the call of each unit has gradients
 * of its gathered keys, which are added to those of the keys that they come from. See gathered_keys.h.
 *
 * Units that share a key-value head add in the order of their heads and queries, and each in the order of its list.
 * Tickets keep that order whatever the number of threads.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../fp_mode.h"
#include "check_params.h"
#include "gathered_keys.h"
#include "tickets.h"

struct gathered_job {
    const struct cattn_backward_params *params;
    struct cattn_gather_plan plan;
    size_t scratch_size;
    struct cattn_tickets tickets;
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
    const size_t n = (size_t)p->n_indices, element = cattn_element_size(p->dtype);
    const size_t heads = (size_t)job->plan.heads_per_unit, pairs = n * heads * (size_t)job->plan.rows_per_unit;
    struct gathered_unit unused, *unit = cattn_carve(arena, sizeof *unit), *u = unit ? unit : &unused;
    u->gather = cattn_gather_lay_out(&job->plan, p, arena);
    u->grad_key = cattn_carve(arena, n * (size_t)p->head_dim * element);
    u->grad_value = cattn_carve(arena, n * (size_t)p->d_v * element);
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
    return (struct cattn_tensor){data, heads > 1 ? rows * cols : 0, cols, 1, {0}};
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
    call->grad_key = cleared(u->grad_key, 1, g->n_keys, p->head_dim, element);
    call->grad_value = cleared(u->grad_value, 1, g->n_keys, p->d_v, element);
    if (params->grad_bias.data)
        call->grad_bias = cleared(u->grad_bias, heads, g->n_rows, g->n_keys, element);
    if (params->grad_sinks.data) {
        call->grad_sinks = cleared(u->grad_sinks, heads, 1, 1, element);
        call->grad_sinks.head = 1;
    }
}

/* ---- adding ---- */

/* to += from, where every NaN becomes the same one. */
static void add(enum cattn_dtype dtype, void *to, int64_t to_stride, const void *from, int64_t n) {
    if (dtype == CATTN_F32)
        for (int64_t i = 0; i < n; i++) {
            const float sum = ((float *)to)[i * to_stride] + ((const float *)from)[i];
            ((float *)to)[i * to_stride] = sum == sum ? sum : (float)NAN;
        }
    else
        for (int64_t i = 0; i < n; i++) {
            const double sum = ((double *)to)[i * to_stride] + ((const double *)from)[i];
            ((double *)to)[i * to_stride] = sum == sum ? sum : (double)NAN;
        }
}

/* Adds the gradient of gathered rows to the rows that they come from. */
static void add_rows(const struct gathered_job *job, const struct gathered_unit *u, const struct cattn_tensor *to,
                     const struct cattn_tensor *from) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_gather *g = u->gather;
    const int64_t start = cattn_batch_start(p, to, g->batch.index) + g->first_head / p->group_size * to->head;
    for (int64_t k = 0; k < g->n_keys; k++)
        add(p->dtype, cattn_tensor_at(p, to, start + g->index[k] * to->row), 1, cattn_tensor_at(p, from, k * from->row),
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
                add(p->dtype, cattn_tensor_at(p, &part, head * to->head + row * to->row + g->index[k] * to->col), 1,
                    cattn_tensor_at(p, from, head * from->head + row * from->row + k), 1);
}

static void add_sinks(const struct gathered_job *job, const struct gathered_unit *u) {
    const struct cattn_attention_params *p = &job->params->forward;
    double *to = job->sinks + u->gather->batch.index * p->num_heads + u->gather->first_head;
    for (int64_t head = 0; head < u->gather->call.num_heads; head++)
        to[head] += p->dtype == CATTN_F32 ? (double)((const float *)u->grad_sinks)[head]
                                          : ((const double *)u->grad_sinks)[head];
}

/* What a unit adds to is a place: its key-value head or, because heads and batch entries may share a gradient of the
 * bias, all there is. */
static int64_t count_places(const struct gathered_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    return job->params->grad_bias.data ? 1 : p->n_batch * (p->num_heads / p->group_size);
}

static void run_unit(void *context, int64_t index, struct cattn_worker *worker) {
    struct gathered_job *job = context;
    const struct cattn_backward_params *params = job->params;
    const struct cattn_attention_params *p = &params->forward;
    struct cattn_arena arena = cattn_arena(cattn_worker_scratch(worker), job->scratch_size, true);
    struct gathered_unit *u = lay_out(job, &arena);
    cattn_gather_unit(&job->plan, p, index, worker, u->gather);
    describe(job, u, index);
    const enum cattn_status status = cattn_attention_backward(&u->call);
    int ok = CATTN_OK;
    if (status != CATTN_OK)
        atomic_compare_exchange_strong(&job->status, &ok, status);
    if (job->misfits && job->misfits[index].found) {
        job->misfits[index].batch = u->gather->batch.index;
        job->misfits[index].head += u->gather->first_head;
        job->misfits[index].row += u->gather->first_row;
    }
    /* units are numbered by batch entry, head and queries, so that those of a place follow each other */
    const int64_t units_per_place = job->plan.n_units / count_places(job);
    const int64_t place = index / units_per_place;
    if (!cattn_tickets_wait(&job->tickets, place, index % units_per_place, worker))
        return;
    if (status == CATTN_OK) {
        add_rows(job, u, &params->grad_key, &u->call.grad_key);
        add_rows(job, u, &params->grad_value, &u->call.grad_value);
        if (params->grad_bias.data)
            add_bias(job, u);
        if (job->sinks)
            add_sinks(job, u);
    }
    cattn_tickets_pass(&job->tickets, place);
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

static enum cattn_status run(struct gathered_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    if (!cattn_tickets_begin(&job->tickets, count_places(job)))
        return CATTN_NO_MEMORY;
    enum cattn_status status =
        cattn_parallel_for(job->plan.n_units, job->plan.num_threads, job->scratch_size, run_unit, job, &p->poll);
    cattn_tickets_end(&job->tickets);
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
    struct cattn_arena count = cattn_arena(NULL, 0, true);
    lay_out(&job, &count);
    job.scratch_size = count.used;
    atomic_init(&job.status, CATTN_OK);
    job.sinks = params->grad_sinks.data ? calloc((size_t)(p->n_batch * p->num_heads), sizeof *job.sinks) : NULL;
    job.misfits = params->misfit ? calloc((size_t)job.plan.n_units, sizeof *job.misfits) : NULL;
    const bool allocated = !job.sinks == !params->grad_sinks.data && !job.misfits == !params->misfit;
    const enum cattn_status status = allocated ? run(&job) : CATTN_NO_MEMORY;
    free(job.sinks);
    free(job.misfits);
    return status;
}
