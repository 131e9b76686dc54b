/* attention_backward.c -- the driver of attention's gradients: steps, their order, and the tickets that enforce it.
 *
 * A step is one block of queries of one head against all keys that it sees. The steps of a unit (the query heads that
 * read one key-value head) add to the same gradients of keys and values, in the order of heads and blocks. The steps
 * that share a gradient of the bias do the same. Tickets keep that order whatever the number of threads.
 */
#include <math.h>
#include <stdlib.h>

#include "../fp_mode.h"
#include "attention.h"
#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "plan.h"
#include "random.h"

struct backward_job {
    const struct cattn_backward_params *params;
    const struct cattn_kernels *kernels;
    const struct cattn_backward_steps *steps; /* of attention's gradients, or of its derivative's */
    struct cattn_backward_plan plan;
    struct cattn_call_shape scores, grads, keys; /* what the rows of each view share */
    struct cattn_tangent_calls tangent_calls;    /* the same, if of_tangents */
    struct cattn_tickets *tickets;               /* NULL: nobody has to wait */
    struct cattn_dropout_stream *dropout_stream; /* serial dropout bits, or NULL */
    double *sinks;                               /* [batch][head][block], or NULL */
    struct cattn_misfit *misfits;                /* the same, the first of each block; or NULL */
};

struct step {
    int64_t unit, index; /* the unit, and the step's number in it */
    int64_t batch, head, block;
    int64_t n_taken, n_passed; /* column blocks of a shared gradient of the bias: taken so far, and passed on */
};

static struct step find_step(const struct backward_job *job, int64_t unit, int64_t index) {
    return (struct step){.unit = unit,
                         .index = index,
                         .batch = unit / job->plan.units_per_batch,
                         .head = unit % job->plan.units_per_batch * job->params->forward.group_size +
                                 index / job->plan.blocks_per_head,
                         .block = index % job->plan.blocks_per_head};
}

/* ---- from tensors to a step ---- */

/* The view for grad_out V^T. */
static struct cattn_call_shape call_of_grads(const struct cattn_backward_params *params,
                                             const struct cattn_call_shape *scores) {
    struct cattn_call_shape call = cattn_call_of_products(scores);
    call.query_col = params->grad_out.col;
    call.head_dim = scores->d_v;
    call.score_options.scale = scores->keep_scale;
    return call;
}

/* The view for dQ = dS K: the keys take the place of the values. */
static struct cattn_call_shape call_of_keys(const struct cattn_call_shape *scores) {
    struct cattn_call_shape call = *scores;
    call.d_v = scores->head_dim;
    call.acc_cols = cattn_round_up(scores->head_dim, CATTN_PAD);
    return call;
}

static void set_up_bias(const struct cattn_backward_params *params, struct cattn_backward *b, const struct step *step) {
    const struct cattn_attention_params *p = &params->forward;
    const struct cattn_tensor *bias = &params->grad_bias;
    b->grad_bias[0] = b->grad_bias_row[0] = b->grad_bias_keys = NULL;
    if (!bias->data)
        return;
    const int64_t start = cattn_head_start(p, bias, step->batch, step->head);
    const int64_t first_key = params->bias_sum == CATTN_BIAS_SUM_COLS ? 0 : b->scores.first_key;
    if (params->bias_sum == CATTN_BIAS_SUM_ROWS) {
        b->grad_bias_keys = cattn_tensor_at(p, bias, start + first_key);
        return;
    }
    void **rows = params->bias_sum == CATTN_BIAS_SUM_COLS ? b->grad_bias_row : b->grad_bias;
    for (int r = 0; r < b->scores.n_rows; r++)
        rows[r] = cattn_tensor_at(p, bias, start + (step->block * CATTN_TILE_ROWS + r) * bias->row + first_key);
}

/* For halves: reads the float32 output of the forward pass that the caller kept, not the rounded one. */
static void set_up_plain_out(const struct cattn_attention_params *p, struct cattn_backward *b, const struct step *step,
                             int64_t first_row) {
    b->out_storage = CATTN_STORED_PLAIN;
    for (int r = 0; r < b->scores.n_rows; r++)
        b->scores.per_row->out[r] = cattn_tensor_at(
            p, &p->out, cattn_head_start(p, &p->out, step->batch, step->head) + (first_row + r) * p->out.row);
}

/* Sets the tangents and the forward results that the jvp_backward steps read. */
static void set_up_tangents(const struct backward_job *job, const struct step *step, struct cattn_backward *b) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tangents *tangents = &job->params->tangents;
    const struct cattn_rows *rows = &b->scores;
    struct cattn_jvp_backward *j = (struct cattn_jvp_backward *)b;
    const struct cattn_place place = {step->batch, step->head, step->block * CATTN_TILE_ROWS};
    cattn_score_tangents_fill(&j->tangents, p, tangents, &job->tangent_calls, rows, &place);
    j->has_value = tangents->value.data;
    const struct cattn_matrix value = cattn_tangent_matrix(p, &tangents->value, rows, &place),
                              key = cattn_tangent_matrix(p, &tangents->key, rows, &place);
    cattn_rows_view(&j->grads, &job->grads, rows, &value, NULL);
    cattn_rows_view(&j->keys, &job->keys, rows, NULL, &key);
    j->out_tangent_col = tangents->out.col;
    for (int r = 0; r < rows->n_rows; r++) {
        j->out_tangent[r] = cattn_tangent_row(p, &tangents->out, &place, r, !job->params->plain_out);
        j->lse_tangent[r] = cattn_tangent_row(p, &tangents->lse, &place, r, false);
    }
}

/* Sets n_rows to 0, and nothing else, for a step past the end of a packed sequence. */
static struct cattn_backward *set_up(const struct backward_job *job, const struct step *step, void *memory) {
    const struct cattn_backward_params *params = job->params;
    const struct cattn_attention_params *p = &params->forward;
    struct cattn_backward *b = cattn_backward_lay_out(&job->plan, params, job->kernels, memory);
    struct cattn_rows *rows = &b->scores;
    const int64_t first_row = cattn_rows_of_block(rows, p, &job->scores, step->batch, step->head, step->block);
    if (rows->n_rows == 0)
        return b;
    const int64_t first_key = cattn_sequence_start(p, &p->key_starts, step->batch) + rows->first_key;
    const int64_t kv_head = step->head / p->group_size;
    b->out_storage = p->storage;
    if (params->plain_out)
        set_up_plain_out(p, b, step, first_row);
    cattn_rows_view(&b->grads, &job->grads, rows, &rows->value, NULL);
    cattn_rows_view(&b->keys, &job->keys, rows, NULL, &rows->key);
    set_up_bias(params, b, step);
    const struct cattn_tensor *query = &params->grad_query, *key = &params->grad_key, *value = &params->grad_value;
    const struct cattn_tensor *grad_out = &params->grad_out, *grad_lse = &params->grad_lse, *gate = &params->grad_gate;
    const double *grad_lse_data = grad_lse->data;
    b->has_grad_lse = grad_lse_data;
    for (int r = 0; r < rows->n_rows; r++) {
        b->grad_query[r] = cattn_tensor_at(
            p, query, cattn_head_start(p, query, step->batch, step->head) + (first_row + r) * query->row);
        b->grad_out[r] = cattn_stored_at(
            p, grad_out, cattn_head_start(p, grad_out, step->batch, step->head) + (first_row + r) * grad_out->row);
        if (gate->data)
            b->grad_gate[r] = cattn_tensor_at(
                p, gate, cattn_head_start(p, gate, step->batch, step->head) + (first_row + r) * gate->row);
        if (grad_lse_data)
            b->grad_lse[r] =
                grad_lse_data[cattn_head_start(p, grad_lse, step->batch, step->head) + (first_row + r) * grad_lse->row];
    }
    b->grad_key =
        cattn_tensor_at(p, key, cattn_batch_start(p, key, step->batch) + kv_head * key->head + first_key * key->row);
    b->grad_key_row = key->row;
    b->grad_value = cattn_tensor_at(
        p, value, cattn_batch_start(p, value, step->batch) + kv_head * value->head + first_key * value->row);
    b->grad_value_row = value->row;
    if (params->of_tangents)
        set_up_tangents(job, step, b);
    return b;
}

/* ---- tickets ----
 *
 * A place is a part of a gradient that several steps add to. A step's ticket there is the number of steps before it.
 */

/* Places are the key blocks of each unit, then the pairs (query block, column block) of each gradient of a shared bias.
 * Column blocks are cut as key blocks are, but from column 0: batch entries with other first keys have other key
 * blocks.
 */
static int64_t place_of_keys(const struct backward_job *job, const struct step *step, int64_t key_block) {
    return step->unit * job->plan.n_key_blocks + key_block;
}

/* A shared gradient of the bias is contiguous, so its offset gives the number of its matrix. */
static int64_t place_of_bias(const struct backward_job *job, const struct step *step, int64_t column_block) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *bias = &job->params->grad_bias;
    const int64_t start = cattn_head_start(p, bias, step->batch, step->head);
    const int64_t row = start / (p->seqlen_q * p->seqlen_k) * job->plan.blocks_per_head + step->block;
    return (job->plan.n_units + row) * job->plan.n_key_blocks + column_block;
}

/* The number of pairs (batch entry, head) before this one that share its gradient of the bias. */
static int64_t bias_ticket(const struct backward_job *job, const struct step *step) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *bias = &job->params->grad_bias;
    /* a number in mixed radix, whose digits are the head and the batch indices that share the gradient */
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

/* The places of the last step are the last ones. */
static int64_t count_places(const struct backward_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    if (!job->plan.shares_bias || job->plan.n_key_blocks == 0)
        return job->plan.n_units * job->plan.n_key_blocks;
    const struct step last = {
        .batch = p->n_batch - 1, .head = p->num_heads - 1, .block = job->plan.blocks_per_head - 1};
    return place_of_bias(job, &last, job->plan.n_key_blocks - 1) + 1;
}

/* Without tickets one thread runs all steps of a unit in order, so nobody has to wait. */
static bool wait_for_ticket(const struct backward_job *job, int64_t place, int64_t ticket,
                            struct cattn_worker *worker) {
    return !job->tickets || cattn_tickets_wait(job->tickets, place, ticket, worker);
}

static void pass_ticket(const struct backward_job *job, int64_t place) {
    if (job->tickets)
        cattn_tickets_pass(job->tickets, place);
}

/* Waits for the step's turn at all columns before `end` of a shared gradient of the bias. Returns false if the call was
 * stopped. */
static bool take_columns(const struct backward_job *job, struct step *step, int64_t end, struct cattn_worker *worker) {
    for (; step->n_taken < job->plan.n_key_blocks && step->n_taken * CATTN_BLOCK_KEYS < end; step->n_taken++)
        if (!wait_for_ticket(job, place_of_bias(job, step, step->n_taken), bias_ticket(job, step), worker))
            return false;
    return true;
}

/* Passes on the column blocks that end at or before `end`. */
static void pass_columns(const struct backward_job *job, struct step *step, int64_t end) {
    for (; step->n_passed < step->n_taken && (step->n_passed + 1) * CATTN_BLOCK_KEYS <= end; step->n_passed++)
        pass_ticket(job, place_of_bias(job, step, step->n_passed));
}

/* ---- steps ---- */

/* One key block. A step that sees none of its keys still takes its tickets, because later steps wait for them. Returns
 * false if the call was stopped. */
static bool run_block(const struct backward_job *job, struct step *step, struct cattn_backward *b,
                      struct cattn_range keys, int64_t key_block, struct cattn_worker *worker) {
    const int64_t k0 = key_block * CATTN_BLOCK_KEYS, k1 = cattn_block_end(k0, b->scores.n_keys);
    const bool sees = cattn_rows_see_block(&b->scores, keys, k0, k1);
    if (sees)
        job->steps->scores(b, k0, k1);
    if (job->params->grad_bias.data) {
        const int64_t end = b->scores.first_key + k0 + CATTN_BLOCK_KEYS; /* of the block's columns */
        if (job->plan.shares_bias && !take_columns(job, step, end, worker))
            return false;
        if (sees)
            job->kernels->backward_bias(b, k0, k1);
        if (job->plan.shares_bias)
            pass_columns(job, step, end);
    }
    /* steps->query overwrites dS, so it comes after backward_bias */
    if (sees)
        job->steps->query(b, k0, k1);
    const int64_t place = place_of_keys(job, step, key_block);
    if (!wait_for_ticket(job, place, step->index, worker))
        return false;
    if (sees)
        job->steps->keys(b, k0, k1);
    pass_ticket(job, place);
    return true;
}

/* The place of a step in arrays with one element for each batch entry, head and block. */
static int64_t place_of_step(const struct backward_job *job, const struct step *step) {
    return (step->batch * job->params->forward.num_heads + step->head) * job->plan.blocks_per_head + step->block;
}

/* Checks the rows of a step against lse and out, after all key blocks. */
static void check_fit(const struct backward_job *job, const struct step *step, const struct cattn_backward *b) {
    const struct cattn_attention_params *p = &job->params->forward;
    struct cattn_misfit found = {.batch = step->batch, .head = step->head};
    if (!cattn_find_misfit(b, job->params, job->kernels, &found))
        return;
    found.row += cattn_sequence_start(p, &p->query_starts, step->batch) + step->block * CATTN_TILE_ROWS;
    job->misfits[place_of_step(job, step)] = found;
}

/* A whole step. `ticket` is the step's number in the dropout stream; unused without one. Returns false if the call was
 * stopped. */
static bool run_step(const struct backward_job *job, struct step *step, int64_t ticket, struct cattn_worker *worker) {
    struct cattn_backward *b = set_up(job, step, cattn_worker_scratch(worker));
    if (job->dropout_stream && !cattn_dropout_stream_take(job->dropout_stream, ticket, &b->scores, worker))
        return false;
    const bool has_rows = b->scores.n_rows > 0;
    struct cattn_range keys = {0, 0};
    if (has_rows) {
        job->steps->begin(b);
        keys = cattn_rows_keys(&b->scores);
    }
    for (int64_t key_block = 0; key_block < job->plan.n_key_blocks; key_block++)
        if (cattn_should_stop(worker) || !run_block(job, step, b, keys, key_block, worker))
            return false;
    if (!has_rows)
        return true;
    if (job->misfits)
        check_fit(job, step, b);
    if (job->sinks)
        job->sinks[place_of_step(job, step)] = job->steps->sink(b);
    job->kernels->backward_finish(b);
    return true;
}

/* All steps of a unit, in order. */
static void unit_task(void *context, int64_t unit, struct cattn_worker *worker) {
    const struct backward_job *job = context;
    for (int64_t index = 0; index < job->plan.steps_per_unit; index++) {
        struct step step = find_step(job, unit, index);
        if (!run_step(job, &step, unit * job->plan.steps_per_unit + index, worker))
            return;
    }
}

/* One step. A dropout stream and a shared bias require the order of (batch entry, head, block). Otherwise consecutive
 * tasks are of different units, so that few threads wait for steps of the same unit. */
static void step_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct backward_job *job = context;
    const int64_t n_units = job->plan.n_units, n_steps = job->plan.steps_per_unit;
    const bool ordered = job->plan.shares_bias || job->plan.uses_stream;
    struct step step =
        find_step(job, ordered ? task / n_steps : task % n_units, ordered ? task % n_steps : task / n_units);
    run_step(job, &step, task, worker);
}

/* Adds up the sinks' parts of each head, block by block. The gradient of a sink is minus that sum. */
static void finish_sinks(const struct backward_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *to = &job->params->grad_sinks;
    const unsigned mode = cattn_fp_enter();
    for (int64_t batch = 0; batch < p->n_batch; batch++)
        for (int64_t head = 0; head < p->num_heads; head++) {
            double sum = 0;
            for (int64_t block = 0; block < job->plan.blocks_per_head; block++)
                sum += job->sinks[(batch * p->num_heads + head) * job->plan.blocks_per_head + block];
            sum = sum == sum ? 0 - sum : (double)NAN; /* 0 - sum is never -0; any NaN becomes the canonical one */
            void *place = cattn_tensor_at(p, to, cattn_batch_start(p, to, batch) + head * to->head);
            if (p->dtype == CATTN_F32)
                *(float *)place = (float)sum;
            else
                *(double *)place = sum;
        }
    cattn_fp_leave(mode);
}

static enum cattn_status run_steps(struct backward_job *job) {
    const struct cattn_backward_plan *plan = &job->plan;
    const struct cattn_poll *poll = &job->params->forward.poll;
    if (plan->whole_units)
        return cattn_parallel_for(plan->n_units, plan->num_threads, plan->scratch_size, unit_task, job, poll);
    const int64_t n_steps = plan->n_units * plan->steps_per_unit;
    struct cattn_tickets tickets;
    if (!cattn_tickets_begin(&tickets, count_places(job)))
        return CATTN_NO_MEMORY;
    job->tickets = &tickets;
    const enum cattn_status status =
        cattn_parallel_for(n_steps, plan->num_threads, plan->scratch_size, step_task, job, poll);
    cattn_tickets_end(&tickets);
    return status;
}

/* Copies the first misfit, whichever thread has found it. */
static void finish_misfits(const struct backward_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    const int64_t n = p->n_batch * p->num_heads * job->plan.blocks_per_head;
    for (int64_t i = 0; i < n && !job->params->misfit->found; i++)
        *job->params->misfit = job->misfits[i];
}

/* Arrays with one element for each batch entry, head and block, all 0. */
static bool allocate(struct backward_job *job) {
    const struct cattn_attention_params *p = &job->params->forward;
    const cattn_size n = (cattn_size)(p->n_batch * p->num_heads * job->plan.blocks_per_head);
    if (job->params->grad_sinks.data)
        job->sinks = cattn_allocate_zeros(n, sizeof *job->sinks);
    if (job->params->misfit)
        job->misfits = cattn_allocate_zeros(n, sizeof *job->misfits);
    return (job->sinks || !job->params->grad_sinks.data) && (job->misfits || !job->params->misfit);
}

static void release(struct backward_job *job) {
    free(job->sinks);
    free(job->misfits);
}

enum cattn_status cattn_attention_backward(const struct cattn_backward_params *params) {
    CATTN_CHECK(backward, params);
    const struct cattn_attention_params *p = &params->forward;
    struct backward_job job = {.params = params, .kernels = cattn_kernels_for(p->dtype)};
    job.steps = params->of_tangents ? &job.kernels->jvp_backward : &job.kernels->backward;
    job.plan = cattn_backward_plan(params, job.kernels);
    cattn_call_shape_fill(p, &job.scores);
    job.grads = call_of_grads(params, &job.scores);
    job.keys = call_of_keys(&job.scores);
    if (params->of_tangents)
        cattn_tangent_calls_fill(&job.scores, &params->tangents, &job.tangent_calls);
    if (job.plan.n_units * job.plan.steps_per_unit == 0)
        return CATTN_OK;
    if (!allocate(&job)) {
        release(&job);
        return CATTN_NO_MEMORY;
    }
    struct cattn_dropout_stream dropout_stream;
    if (job.plan.uses_stream) {
        cattn_dropout_stream_begin(&dropout_stream, p->dropout.torch, p->dropout.keep_probability);
        job.dropout_stream = &dropout_stream;
    }
    const enum cattn_status status = run_steps(&job);
    /* a call that failed leaves the generator where it was */
    if (job.dropout_stream)
        cattn_dropout_stream_end(&dropout_stream, status == CATTN_OK ? p->dropout.torch : NULL);
    if (job.sinks && status == CATTN_OK)
        finish_sinks(&job);
    if (job.misfits && status == CATTN_OK)
        finish_misfits(&job);
    release(&job);
    return status;
}
