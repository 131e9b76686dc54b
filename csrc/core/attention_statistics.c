/* attention_statistics.c -- the driver of the statistics of attention weights.
 *
 * After the forward pass for the log-sum-exp, each block of queries of each head meets the keys that it sees. Blocks of
 * one head add to the same column sums, in order, under tickets.
 */
#include "attention.h"
#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "plan.h"

struct statistics_job {
    const struct cattn_statistics_params *params;
    const struct cattn_kernels *kernels;
    struct cattn_statistics_plan plan;
    struct cattn_call_shape call;
    struct cattn_tickets *tickets; /* NULL: nobody has to wait */
};

static void *result_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset) {
    return tensor->data ? cattn_tensor_at(p, tensor, offset) : NULL;
}

/* The first row of the block that counts in the column sums: the last queries of the batch entry do. */
static int64_t first_received(const struct cattn_statistics_params *params, int64_t batch, int64_t block) {
    struct cattn_batch_range range;
    cattn_batch_range(&params->forward.ranges, params->forward.n_batch_dims, params->forward.batch_shape, batch,
                      &range);
    const int64_t first = range.n_queries - cattn_min(range.n_queries, params->observation_window);
    const int64_t row = first - block * CATTN_TILE_ROWS;
    return row > 0 ? row : 0;
}

static struct cattn_statistics *set_up(const struct statistics_job *job, int64_t unit, int64_t block, void *memory) {
    const struct cattn_statistics_params *params = job->params;
    const struct cattn_attention_params *p = &params->forward;
    const int64_t batch = unit / p->num_heads, head = unit % p->num_heads;
    struct cattn_statistics *s = cattn_statistics_lay_out(&job->plan, params, job->kernels, memory);
    const int64_t first_row = cattn_rows_of_block(&s->rows, p, &job->call, batch, head, block);
    s->wants_received = false;
    if (s->rows.n_rows == 0)
        return s;
    for (int i = 0; i < CATTN_N_ROW_STATISTICS; i++)
        s->row_results[i] = result_at(
            p, &params->rows[i], cattn_head_start(p, &params->rows[i], batch, head) + first_row * params->rows[i].row);
    s->top_k = params->top_k;
    if (params->top_k > 0) {
        const struct cattn_tensor *keys = &params->top_keys, *weights = &params->top_weights;
        s->top_weights =
            cattn_tensor_at(p, weights, cattn_head_start(p, weights, batch, head) + first_row * weights->row);
        s->top_keys = (int64_t *)keys->data + cattn_head_start(p, keys, batch, head) + first_row * keys->row;
    }
    const int64_t first_key = cattn_sequence_start(p, &p->key_starts, batch) + s->rows.first_key;
    s->received = result_at(p, &params->received, cattn_head_start(p, &params->received, batch, head) + first_key);
    s->received_max =
        result_at(p, &params->received_max, cattn_head_start(p, &params->received_max, batch, head) + first_key);
    const int64_t first = first_received(params, batch, block);
    s->wants_received = job->plan.adds_columns && first < s->rows.n_rows;
    s->first_received = s->wants_received ? (int)first : 0;
    return s;
}

/* Adds the column sums of a key block in its turn. A block of queries without any still takes its ticket, because later
 * ones wait for it. Returns false if the call was stopped. */
static bool add_columns(const struct statistics_job *job, const struct cattn_statistics *s, int64_t unit, int64_t block,
                        int64_t key_block, struct cattn_worker *worker) {
    const int64_t place = unit * job->plan.n_key_blocks + key_block;
    if (job->tickets && !cattn_tickets_wait(job->tickets, place, block, worker))
        return false;
    job->kernels->statistics_add(s, key_block * CATTN_BLOCK_KEYS);
    if (job->tickets)
        cattn_tickets_pass(job->tickets, place);
    return true;
}

/* Returns false if the call was stopped. */
static bool run_block(const struct statistics_job *job, int64_t unit, int64_t block, struct cattn_worker *worker) {
    struct cattn_statistics *s = set_up(job, unit, block, cattn_worker_scratch(worker));
    const bool has_rows = s->rows.n_rows > 0;
    struct cattn_range keys = {0, 0};
    if (has_rows) {
        job->kernels->statistics_begin(s);
        keys = cattn_rows_keys(&s->rows);
    }
    for (int64_t key_block = 0; key_block < job->plan.n_key_blocks; key_block++) {
        const int64_t k0 = key_block * CATTN_BLOCK_KEYS, k1 = cattn_block_end(k0, s->rows.n_keys);
        if (cattn_should_stop(worker))
            return false;
        s->columns_begin = s->columns_end = 0; /* unless the kernel finds some */
        if (cattn_rows_see_block(&s->rows, keys, k0, k1))
            job->kernels->statistics_block(s, k0, k1);
        if (job->plan.adds_columns && !add_columns(job, s, unit, block, key_block, worker))
            return false;
    }
    if (has_rows)
        job->kernels->statistics_finish(s);
    return true;
}

static void unit_task(void *context, int64_t unit, struct cattn_worker *worker) {
    const struct statistics_job *job = context;
    for (int64_t block = 0; block < job->plan.blocks_per_unit; block++)
        if (!run_block(job, unit, block, worker))
            return;
}

/* Consecutive tasks are of different units, so that few threads wait for blocks of the same unit. */
static void block_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct statistics_job *job = context;
    run_block(job, task % job->plan.n_units, task / job->plan.n_units, worker);
}

static enum cattn_status run_blocks(struct statistics_job *job) {
    const struct cattn_statistics_plan *plan = &job->plan;
    const struct cattn_poll *poll = &job->params->forward.poll;
    if (plan->whole_units)
        return cattn_parallel_for(plan->n_units, plan->num_threads, plan->scratch_size, unit_task, job, poll);
    const int64_t n_tasks = plan->n_units * plan->blocks_per_unit;
    if (!plan->adds_columns)
        return cattn_parallel_for(n_tasks, plan->num_threads, plan->scratch_size, block_task, job, poll);
    struct cattn_tickets tickets;
    if (!cattn_tickets_begin(&tickets, plan->n_units * plan->n_key_blocks))
        return CATTN_NO_MEMORY;
    job->tickets = &tickets;
    const enum cattn_status status =
        cattn_parallel_for(n_tasks, plan->num_threads, plan->scratch_size, block_task, job, poll);
    cattn_tickets_end(&tickets);
    return status;
}

enum cattn_status cattn_attention_statistics(const struct cattn_statistics_params *params) {
    CATTN_CHECK(statistics, params);
    const struct cattn_attention_params *p = &params->forward;
    const enum cattn_status status = cattn_attention(p);
    if (status != CATTN_OK)
        return status;
    struct statistics_job job = {.params = params, .kernels = cattn_kernels_for(p->dtype)};
    job.plan = cattn_statistics_plan(params, job.kernels);
    cattn_call_shape_fill(p, &job.call);
    job.call.has_positions = true;
    if (job.plan.n_units * job.plan.blocks_per_unit == 0)
        return CATTN_OK;
    return run_blocks(&job);
}
