/* attention_backward.c -- the driver of attention's gradients: steps, their order, and who adds when.
 *
 * A step is one block of queries of one head against all keys that it sees. Steps of one unit, the query heads that
 * read one key-value head, add to the same gradients of keys and values: in order, head by head and block by block. The
 * same goes for the gradient of a bias that several heads or leading indices share. A step does its own work on a block
 * of keys, waits until it is its turn there, adds its part and passes the turn on; so every sum has one order, whatever
 * the number of threads. Blocks start at multiples of CATTN_TILE_ROWS queries and CATTN_BLOCK_KEYS keys: the order
 * hangs on the lengths alone.
 */
#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "../fp_mode.h"
#include "arena.h"
#include "attention_rows.h"
#include "check_params.h"
#include "dispatch.h"
#include "dropout_stream.h"
#include "parallel.h"
#include "plan.h"
#include "tickets.h"

/* Multiply-adds of the forward pass below which other threads would wake up too late to help. */
#define POOL_WORK 800000.0
/* From so many units a thread on, the last one to finish keeps few waiting. */
#define PLENTY 4

struct backward_job {
    const struct cattn_backward_params *params;
    const struct cattn_kernels *kernels;
    int num_threads;
    int64_t n_units, units_per_batch;
    int64_t blocks_per_head, steps_per_unit, n_key_blocks;
    bool shares_bias;                            /* several heads or leading indices add to one gradient */
    struct cattn_tickets *tickets;               /* NULL: one thread */
    struct cattn_dropout_stream *dropout_stream; /* serial dropout bits, or NULL */
    double *sinks;                               /* [lead][head][block], or NULL */
    size_t scratch_size;                         /* bytes a thread */
};

/* Where a task stands. */
struct step {
    int64_t unit, index; /* of the unit; among its steps */
    int64_t batch, head, block;
};

static struct step find_step(const struct backward_job *job, int64_t unit, int64_t index) {
    return (struct step){.unit = unit,
                         .index = index,
                         .batch = unit / job->units_per_batch,
                         .head = unit % job->units_per_batch * job->params->forward.group_size +
                                 index / job->blocks_per_head,
                         .block = index % job->blocks_per_head};
}

/* ---- scratch ---- */

static int64_t padded(int64_t cols) { return (cols + CATTN_PAD - 1) / CATTN_PAD * CATTN_PAD; }

/* Points `b` and its views at their scratch. Called without memory to measure, with memory to cut it; only then may
 * those pointers be used. */
static void lay_out(const struct backward_job *job, struct cattn_backward *b, struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &job->params->forward;
    const size_t size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS;
    const size_t depth = (size_t)(p->head_dim > p->d_v ? p->head_dim : p->d_v);
    const bool copies = cattn_plan_copies(p, &p->key) || cattn_plan_copies(p, &p->value);
    const size_t panel = (size_t)job->kernels->lanes * (size_t)job->kernels->nr;
    struct cattn_rows *s = &b->scores, *g = &b->grads, *k = &b->keys;
    b->query_cols = padded(p->head_dim);
    b->grad_cols = padded(p->d_v);
    s->drop_bits[0] =
        job->dropout_stream ? cattn_carve(arena, rows * cattn_dropout_stream_row_bytes(p->seqlen_k)) : NULL;
    s->packed_query = cattn_carve(arena, rows * (size_t)p->head_dim * size);
    g->packed_query = cattn_carve(arena, rows * (size_t)p->d_v * size);
    b->query_rows = cattn_carve(arena, rows * (size_t)b->query_cols * size);
    b->grad_rows = cattn_carve(arena, rows * (size_t)b->grad_cols * size);
    s->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    g->score = k->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    s->cap_slope = p->softcap > 0 ? cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size) : NULL;
    g->cap_slope = NULL;
    s->key_rows = g->key_rows = cattn_carve(arena, (size_t)job->kernels->mr * depth * size);
    s->block_rows = g->block_rows = k->block_rows = cattn_carve(arena, copies ? CATTN_BLOCK_KEYS * depth * size : 0);
    s->block_max = g->block_max = cattn_carve(arena, rows * size);
    k->value_panel = cattn_carve(arena, CATTN_BLOCK_KEYS * panel * size);
    k->alpha = cattn_carve(arena, rows * size);
    k->acc = cattn_carve(arena, rows * (size_t)b->query_cols * size);
    b->lse = cattn_carve(arena, rows * size);
    b->lse_residual = cattn_carve(arena, rows * size);
    b->lse_factor = cattn_carve(arena, rows * size);
    b->delta = cattn_carve(arena, rows * size);
    b->bias_sum = cattn_carve(arena, rows * size);
    b->bias_part = cattn_carve(arena, CATTN_BLOCK_KEYS * size);
}

/* ---- from tensors to a step ---- */

/* grad_out against the values: products without a mask of their own. */
static void set_up_grads(const struct cattn_backward_params *params, struct cattn_backward *b, int64_t start) {
    const struct cattn_attention_params *p = &params->forward;
    struct cattn_rows *grads = &b->grads;
    for (int r = 0; r < grads->n_rows; r++)
        grads->query[r] = cattn_stored_at(p, &params->grad_out, start + r * params->grad_out.row);
    grads->query_col = params->grad_out.col;
    grads->head_dim = p->d_v;
    grads->scale = grads->keep_scale;
    grads->key = grads->value;
    grads->key_row = grads->value_row;
    grads->key_col = grads->value_col;
    grads->softcap = 0;
    grads->has_slopes = false;
    grads->fully_ranged = true;
}

static void set_up_keys(const struct cattn_backward_params *params, struct cattn_backward *b) {
    struct cattn_rows *keys = &b->keys;
    keys->value = keys->key;
    keys->value_row = keys->key_row;
    keys->value_col = keys->key_col;
    keys->d_v = params->forward.head_dim;
    keys->acc_cols = b->query_cols;
}

static void set_up_bias(const struct cattn_backward_params *params, struct cattn_backward *b, const struct step *step) {
    const struct cattn_attention_params *p = &params->forward;
    const struct cattn_tensor *bias = &params->grad_bias;
    b->grad_bias[0] = b->grad_bias_row[0] = b->grad_bias_keys = NULL;
    if (!bias->data)
        return;
    const int64_t start = cattn_batch_start(p, bias, step->batch) + step->head * bias->head;
    if (params->bias_sum == CATTN_BIAS_SUM_ROWS) {
        b->grad_bias_keys = cattn_tensor_at(p, bias, start);
        return;
    }
    void **rows = params->bias_sum == CATTN_BIAS_SUM_COLS ? b->grad_bias_row : b->grad_bias;
    for (int r = 0; r < b->scores.n_rows; r++)
        rows[r] = cattn_tensor_at(p, bias, start + (step->block * CATTN_TILE_ROWS + r) * bias->row);
}

static struct cattn_backward *set_up(const struct backward_job *job, const struct step *step, void *memory) {
    const struct cattn_backward_params *params = job->params;
    const struct cattn_attention_params *p = &params->forward;
    struct cattn_arena arena = cattn_arena(memory, job->scratch_size, true);
    struct cattn_backward *b = cattn_carve(&arena, sizeof *b);
    assert(b); /* a step always has scratch */
    struct cattn_batch batch;
    cattn_batch(p, step->batch, &batch);
    const int64_t kv_head = step->head / p->group_size, first = step->block * CATTN_TILE_ROWS;
    const int64_t left = p->seqlen_q - first;
    struct cattn_rows *rows = &b->scores;
    rows->n_rows = (int)(left < CATTN_TILE_ROWS ? left : CATTN_TILE_ROWS);
    cattn_rows_common(rows, p, &batch, kv_head);
    const struct cattn_tensor *query = &params->grad_query, *key = &params->grad_key, *value = &params->grad_value;
    const int64_t start = cattn_batch_start(p, query, step->batch) + step->head * query->head + first * query->row;
    cattn_rows_of_head(rows, p, &batch, 0, rows->n_rows, step->head, first);
    b->grads = b->keys = *rows; /* the same masks and ranges; scratch and operands are of their own */
    lay_out(job, b, &arena);
    cattn_rows_drop_bits(rows);
    for (int r = 0; r < rows->n_rows; r++)
        b->grad_query[r] = cattn_tensor_at(p, query, start + r * query->row);
    const struct cattn_tensor *grad_out = &params->grad_out;
    set_up_grads(params, b,
                 cattn_batch_start(p, grad_out, step->batch) + step->head * grad_out->head + first * grad_out->row);
    set_up_keys(params, b);
    set_up_bias(params, b, step);
    b->grad_key = cattn_tensor_at(p, key, cattn_batch_start(p, key, step->batch) + kv_head * key->head);
    b->grad_key_row = key->row;
    b->grad_value = cattn_tensor_at(p, value, cattn_batch_start(p, value, step->batch) + kv_head * value->head);
    b->grad_value_row = value->row;
    return b;
}

/* ---- turns ---- */

/* Places are the key blocks of each unit, then (key block, query block) of each gradient of a shared bias. */
static int64_t place_of_keys(const struct backward_job *job, const struct step *step, int64_t key_block) {
    return step->unit * job->n_key_blocks + key_block;
}

static int64_t matrix_size(const struct cattn_attention_params *p) { return p->seqlen_q * p->seqlen_k; }

/* A shared bias is contiguous: its matrices follow one another. */
static int64_t place_of_bias(const struct backward_job *job, const struct step *step, int64_t key_block) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *bias = &job->params->grad_bias;
    const int64_t start = cattn_batch_start(p, bias, step->batch) + step->head * bias->head;
    const int64_t row = start / matrix_size(p) * job->blocks_per_head + step->block;
    return (job->n_units + row) * job->n_key_blocks + key_block;
}

/* How many (lead, head) before this one share its gradient of the bias. */
static int64_t bias_ticket(const struct backward_job *job, const struct step *step) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *bias = &job->params->grad_bias;
    int64_t ticket = 0, count = 1, index = step->batch;
    if (bias->head == 0) {
        ticket = step->head;
        count = p->num_heads;
    }
    for (int d = p->n_batch_dims - 1; d >= 0; d--) {
        if (bias->batch[d] == 0) {
            ticket += index % p->batch_shape[d] * count;
            count *= p->batch_shape[d];
        }
        index /= p->batch_shape[d];
    }
    return ticket;
}

static int64_t count_places(const struct backward_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    if (!job->shares_bias || job->n_key_blocks == 0)
        return job->n_units * job->n_key_blocks;
    const struct step last = {.batch = p->n_batch - 1, .head = p->num_heads - 1, .block = job->blocks_per_head - 1};
    return place_of_bias(job, &last, job->n_key_blocks - 1) + 1;
}

static bool wait_at(const struct backward_job *job, int64_t place, int64_t ticket, struct cattn_worker *worker) {
    return !job->tickets || cattn_tickets_wait(job->tickets, place, ticket, worker);
}

static void pass_at(const struct backward_job *job, int64_t place) {
    if (job->tickets)
        cattn_tickets_pass(job->tickets, place);
}

/* ---- steps ---- */

/* One block of keys. A step that sees none of it takes its turns all the same. False: asked to stop. */
static bool pass_block(const struct backward_job *job, const struct step *step, struct cattn_backward *b,
                       struct cattn_range keys, int64_t key_block, struct cattn_worker *worker) {
    const int64_t k0 = key_block * CATTN_BLOCK_KEYS, n_keys = b->scores.n_keys;
    const int64_t k1 = k0 + CATTN_BLOCK_KEYS < n_keys ? k0 + CATTN_BLOCK_KEYS : n_keys;
    const bool sees = keys.lo < k1 && k0 < keys.hi;
    if (sees)
        job->kernels->backward_scores(b, k0, k1);
    if (job->params->grad_bias.data) {
        const int64_t place = job->shares_bias ? place_of_bias(job, step, key_block) : 0;
        if (job->shares_bias && !wait_at(job, place, bias_ticket(job, step), worker))
            return false;
        if (sees)
            job->kernels->backward_bias(b, k0, k1);
        if (job->shares_bias)
            pass_at(job, place);
    }
    if (sees)
        job->kernels->backward_query(b, k0, k1);
    const int64_t place = place_of_keys(job, step, key_block);
    if (!wait_at(job, place, step->index, worker))
        return false;
    if (sees)
        job->kernels->backward_keys(b, k0, k1);
    pass_at(job, place);
    return true;
}

/* turn: among the steps that draw bits from a serial stream. False: asked to stop. */
static bool pass_step(const struct backward_job *job, const struct step *step, int64_t ticket,
                      struct cattn_worker *worker) {
    const struct cattn_attention_params *p = &job->params->forward;
    struct cattn_backward *b = set_up(job, step, cattn_worker_scratch(worker));
    if (job->dropout_stream && !cattn_dropout_stream_take(job->dropout_stream, ticket, b->scores.n_rows, p->seqlen_k,
                                                          b->scores.drop_bits[0], worker))
        return false;
    job->kernels->backward_begin(b);
    const struct cattn_range keys = cattn_rows_keys(&b->scores);
    for (int64_t key_block = 0; key_block < job->n_key_blocks; key_block++)
        if (cattn_should_stop(worker) || !pass_block(job, step, b, keys, key_block, worker))
            return false;
    if (job->sinks)
        job->sinks[(step->batch * p->num_heads + step->head) * job->blocks_per_head + step->block] =
            job->kernels->backward_sink(b);
    job->kernels->backward_finish(b);
    return true;
}

/* Units are plenty: each is one thread's, and nobody waits. */
static void unit_task(void *context, int64_t unit, struct cattn_worker *worker) {
    const struct backward_job *job = context;
    for (int64_t index = 0; index < job->steps_per_unit; index++) {
        const struct step step = find_step(job, unit, index);
        if (!pass_step(job, &step, unit * job->steps_per_unit + index, worker))
            return;
    }
}

/* The steps of all units, in turn: the other units' steps are what a thread has to do while one unit's are late. */
static void step_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct backward_job *job = context;
    const struct step step = find_step(job, task % job->n_units, task / job->n_units);
    pass_step(job, &step, 0, worker);
}

/* The same in the order of (lead, head, block), which serial bits and a shared bias want. */
static void ordered_step_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct backward_job *job = context;
    const struct step step = find_step(job, task / job->steps_per_unit, task % job->steps_per_unit);
    pass_step(job, &step, task, worker);
}

/* The blocks of each head, in order. */
static void finish_sinks(const struct backward_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *to = &job->params->grad_sinks;
    const unsigned mode = cattn_fp_enter();
    for (int64_t batch = 0; batch < p->n_batch; batch++)
        for (int64_t head = 0; head < p->num_heads; head++) {
            double sum = 0;
            for (int64_t block = 0; block < job->blocks_per_head; block++)
                sum += job->sinks[(batch * p->num_heads + head) * job->blocks_per_head + block];
            sum = sum == sum ? 0 - sum : (double)NAN;
            void *place = cattn_tensor_at(p, to, cattn_batch_start(p, to, batch) + head * to->head);
            if (p->dtype == CATTN_F32)
                *(float *)place = (float)sum;
            else
                *(double *)place = sum;
        }
    cattn_fp_leave(mode);
}

/* Does another (lead, head) have the same gradient of the bias? */
static bool shares_bias(const struct cattn_backward_params *params) {
    const struct cattn_attention_params *p = &params->forward;
    const struct cattn_tensor *bias = &params->grad_bias;
    if (!bias->data || params->bias_sum != CATTN_BIAS_NO_SUM)
        return false;
    bool shares = bias->head == 0 && p->num_heads > 1;
    for (int d = 0; d < p->n_batch_dims; d++)
        shares |= bias->batch[d] == 0 && p->batch_shape[d] > 1;
    return shares;
}

static struct backward_job plan(const struct cattn_backward_params *params) {
    const struct cattn_attention_params *p = &params->forward;
    struct backward_job job = {.params = params, .kernels = cattn_kernels_for(p->dtype), .num_threads = p->num_threads};
    job.units_per_batch = p->num_heads / p->group_size;
    job.n_units = p->n_batch * job.units_per_batch;
    job.blocks_per_head = p->seqlen_q / CATTN_TILE_ROWS + (p->seqlen_q % CATTN_TILE_ROWS != 0);
    job.steps_per_unit = job.blocks_per_head * p->group_size;
    job.n_key_blocks = p->seqlen_k / CATTN_BLOCK_KEYS + (p->seqlen_k % CATTN_BLOCK_KEYS != 0);
    job.shares_bias = shares_bias(params);
    if (cattn_attention_work(p) < POOL_WORK || job.num_threads < 1)
        job.num_threads = 1;
    return job;
}

static enum cattn_status run_steps(struct backward_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    struct cattn_arena count = cattn_arena(NULL, 0, false);
    struct cattn_backward unused;
    cattn_carve(&count, sizeof unused);
    lay_out(job, &unused, &count);
    job->scratch_size = count.used;
    if (job->num_threads == 1 ||
        (!job->shares_bias && !job->dropout_stream && job->n_units >= PLENTY * job->num_threads))
        return cattn_parallel_for(job->n_units, job->num_threads, job->scratch_size, unit_task, job, &p->poll);
    cattn_task_fn *const task = job->shares_bias || job->dropout_stream ? ordered_step_task : step_task;
    const int64_t n_steps = job->n_units * job->steps_per_unit;
    struct cattn_tickets tickets;
    if (!cattn_tickets_begin(&tickets, count_places(job)))
        return CATTN_NO_MEMORY;
    job->tickets = &tickets;
    const enum cattn_status status =
        cattn_parallel_for(n_steps, job->num_threads, job->scratch_size, task, job, &p->poll);
    cattn_tickets_end(&tickets);
    return status;
}

enum cattn_status cattn_attention_backward(const struct cattn_backward_params *params) {
    CATTN_CHECK(backward, params);
    const struct cattn_attention_params *p = &params->forward;
    struct backward_job job = plan(params);
    if (job.n_units * job.steps_per_unit == 0)
        return CATTN_OK;
    if (params->grad_sinks.data) {
        job.sinks = calloc((size_t)(p->n_batch * p->num_heads * job.blocks_per_head), sizeof *job.sinks);
        if (!job.sinks)
            return CATTN_NO_MEMORY;
    }
    struct cattn_dropout_stream dropout_stream;
    if (p->dropout.enabled && p->dropout.torch && p->seqlen_k > 0) {
        cattn_dropout_stream_begin(&dropout_stream, p->dropout.torch, p->dropout.keep_probability);
        job.dropout_stream = &dropout_stream;
    }
    const enum cattn_status status = run_steps(&job);
    if (job.dropout_stream)
        cattn_dropout_stream_end(&dropout_stream, status == CATTN_OK ? p->dropout.torch : NULL);
    if (job.sinks && status == CATTN_OK)
        finish_sinks(&job);
    free(job.sinks);
    return status;
}
