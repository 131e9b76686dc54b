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

#include "arena.h"
#include "attention_rows.h"
#include "cpu_features.h"
#include "dispatch.h"
#include "drawn.h"
#include "parallel.h"
#include "plan.h"
#include "turns.h"

/* Multiply-adds of the forward pass below which other threads would wake up too late to help. */
#define POOL_WORK 800000.0
/* From so many units a thread on, the last one to finish keeps few waiting. */
#define PLENTY 4

struct run {
    const struct cattn_backward_params *params;
    const struct cattn_kernels *kernels;
    int num_threads;
    int64_t n_units, units_per_lead;
    int64_t blocks_per_head, steps_per_unit, n_key_blocks;
    bool shares_bias;          /* several heads or leading indices add to one gradient */
    struct cattn_turns *turns; /* NULL: one thread */
    struct cattn_drawn *drawn; /* serial dropout bits, or NULL */
    double *sinks;             /* [lead][head][block], or NULL */
    size_t scratch_size;       /* bytes a thread */
};

/* Where a task stands. */
struct step {
    int64_t unit, index; /* of the unit; among its steps */
    int64_t lead, head, block;
};

static struct step find_step(const struct run *run, int64_t unit, int64_t index) {
    return (struct step){.unit = unit,
                         .index = index,
                         .lead = unit / run->units_per_lead,
                         .head = unit % run->units_per_lead * run->params->forward.group_size +
                                 index / run->blocks_per_head,
                         .block = index % run->blocks_per_head};
}

/* ---- scratch ---- */

static int64_t padded(int64_t cols) { return (cols + CATTN_PAD - 1) / CATTN_PAD * CATTN_PAD; }

/* Points `b` and its views at their scratch. Called without memory to measure, with memory to cut it; only then may
 * those pointers be used. */
static void lay_out(const struct run *run, struct cattn_backward *b, struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &run->params->forward;
    const size_t size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS;
    const size_t depth = (size_t)(p->head_dim > p->d_v ? p->head_dim : p->d_v);
    const bool copies = cattn_plan_copies(p, &p->key) || cattn_plan_copies(p, &p->value);
    const size_t panel = (size_t)run->kernels->lanes * (size_t)run->kernels->nr;
    struct cattn_rows *s = &b->scores, *g = &b->grads, *k = &b->keys;
    b->query_cols = padded(p->head_dim);
    b->grad_cols = padded(p->d_v);
    s->kept[0] = run->drawn ? cattn_carve(arena, rows * cattn_drawn_row_bytes(p->seqlen_k)) : NULL;
    s->packed_query = cattn_carve(arena, rows * (size_t)p->head_dim * size);
    g->packed_query = cattn_carve(arena, rows * (size_t)p->d_v * size);
    b->query_rows = cattn_carve(arena, rows * (size_t)b->query_cols * size);
    b->grad_rows = cattn_carve(arena, rows * (size_t)b->grad_cols * size);
    s->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    g->score = k->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    s->cap_slope = p->softcap > 0 ? cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size) : NULL;
    g->cap_slope = NULL;
    s->key_rows = g->key_rows = cattn_carve(arena, (size_t)run->kernels->mr * depth * size);
    s->block_rows = g->block_rows = k->block_rows = cattn_carve(arena, copies ? CATTN_BLOCK_KEYS * depth * size : 0);
    s->block_max = g->block_max = cattn_carve(arena, rows * size);
    k->value_panel = cattn_carve(arena, CATTN_BLOCK_KEYS * panel * size);
    k->alpha = cattn_carve(arena, rows * size);
    k->acc = cattn_carve(arena, rows * (size_t)b->query_cols * size);
    b->lse = cattn_carve(arena, rows * size);
    b->lse_lack = cattn_carve(arena, rows * size);
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
    const int64_t start = cattn_lead_start(p, bias, step->lead) + step->head * bias->head;
    if (params->bias_sum == CATTN_BIAS_SUM_ROWS) {
        b->grad_bias_keys = cattn_tensor_at(p, bias, start);
        return;
    }
    void **rows = params->bias_sum == CATTN_BIAS_SUM_COLS ? b->grad_bias_row : b->grad_bias;
    for (int r = 0; r < b->scores.n_rows; r++)
        rows[r] = cattn_tensor_at(p, bias, start + (step->block * CATTN_TILE_ROWS + r) * bias->row);
}

static struct cattn_backward *set_up(const struct run *run, const struct step *step, void *memory) {
    const struct cattn_backward_params *params = run->params;
    const struct cattn_attention_params *p = &params->forward;
    struct cattn_arena arena = cattn_arena(memory, run->scratch_size, true);
    struct cattn_backward *b = cattn_carve(&arena, sizeof *b);
    assert(b); /* a step always has scratch */
    struct cattn_lead lead;
    cattn_lead(p, step->lead, &lead);
    const int64_t kv_head = step->head / p->group_size, first = step->block * CATTN_TILE_ROWS;
    const int64_t left = p->seqlen_q - first;
    struct cattn_rows *rows = &b->scores;
    rows->n_rows = (int)(left < CATTN_TILE_ROWS ? left : CATTN_TILE_ROWS);
    cattn_rows_common(rows, p, &lead, kv_head);
    const struct cattn_tensor *query = &params->grad_query, *key = &params->grad_key, *value = &params->grad_value;
    const int64_t start = cattn_lead_start(p, query, step->lead) + step->head * query->head + first * query->row;
    cattn_rows_of_head(rows, p, &lead, 0, rows->n_rows, step->head, first);
    b->grads = b->keys = *rows; /* the same masks and ranges; scratch and operands are of their own */
    lay_out(run, b, &arena);
    cattn_rows_drawn(rows);
    for (int r = 0; r < rows->n_rows; r++)
        b->grad_query[r] = cattn_tensor_at(p, query, start + r * query->row);
    const struct cattn_tensor *grad_out = &params->grad_out;
    set_up_grads(params, b,
                 cattn_lead_start(p, grad_out, step->lead) + step->head * grad_out->head + first * grad_out->row);
    set_up_keys(params, b);
    set_up_bias(params, b, step);
    b->grad_key = cattn_tensor_at(p, key, cattn_lead_start(p, key, step->lead) + kv_head * key->head);
    b->grad_key_row = key->row;
    b->grad_value = cattn_tensor_at(p, value, cattn_lead_start(p, value, step->lead) + kv_head * value->head);
    b->grad_value_row = value->row;
    return b;
}

/* ---- turns ---- */

/* Places are the key blocks of each unit, then (key block, query block) of each gradient of a shared bias. */
static int64_t place_of_keys(const struct run *run, const struct step *step, int64_t key_block) {
    return step->unit * run->n_key_blocks + key_block;
}

static int64_t matrix_size(const struct cattn_attention_params *p) { return p->seqlen_q * p->seqlen_k; }

/* A shared bias is contiguous: its matrices follow one another. */
static int64_t place_of_bias(const struct run *run, const struct step *step, int64_t key_block) {
    const struct cattn_attention_params *p = &run->params->forward;
    const struct cattn_tensor *bias = &run->params->grad_bias;
    const int64_t start = cattn_lead_start(p, bias, step->lead) + step->head * bias->head;
    const int64_t row = start / matrix_size(p) * run->blocks_per_head + step->block;
    return (run->n_units + row) * run->n_key_blocks + key_block;
}

/* How many (lead, head) before this one share its gradient of the bias. */
static int64_t bias_turn(const struct run *run, const struct step *step) {
    const struct cattn_attention_params *p = &run->params->forward;
    const struct cattn_tensor *bias = &run->params->grad_bias;
    int64_t turn = 0, count = 1, index = step->lead;
    if (bias->head == 0) {
        turn = step->head;
        count = p->num_heads;
    }
    for (int d = p->n_lead - 1; d >= 0; d--) {
        if (bias->lead[d] == 0) {
            turn += index % p->lead_shape[d] * count;
            count *= p->lead_shape[d];
        }
        index /= p->lead_shape[d];
    }
    return turn;
}

static int64_t count_places(const struct run *run) {
    const struct cattn_attention_params *p = &run->params->forward;
    if (!run->shares_bias || run->n_key_blocks == 0)
        return run->n_units * run->n_key_blocks;
    const struct step last = {.lead = p->n_batch - 1, .head = p->num_heads - 1, .block = run->blocks_per_head - 1};
    return place_of_bias(run, &last, run->n_key_blocks - 1) + 1;
}

static bool wait_at(const struct run *run, int64_t place, int64_t turn, struct cattn_worker *worker) {
    return !run->turns || cattn_turns_wait(run->turns, place, turn, worker);
}

static void pass_at(const struct run *run, int64_t place) {
    if (run->turns)
        cattn_turns_pass(run->turns, place);
}

/* ---- steps ---- */

/* One block of keys. A step that sees none of it takes its turns all the same. False: asked to stop. */
static bool pass_block(const struct run *run, const struct step *step, struct cattn_backward *b,
                       struct cattn_range keys, int64_t key_block, struct cattn_worker *worker) {
    const int64_t k0 = key_block * CATTN_BLOCK_KEYS, n_keys = b->scores.n_keys;
    const int64_t k1 = k0 + CATTN_BLOCK_KEYS < n_keys ? k0 + CATTN_BLOCK_KEYS : n_keys;
    const bool sees = keys.lo < k1 && k0 < keys.hi;
    if (sees)
        run->kernels->backward_scores(b, k0, k1);
    if (run->params->grad_bias.data) {
        const int64_t place = run->shares_bias ? place_of_bias(run, step, key_block) : 0;
        if (run->shares_bias && !wait_at(run, place, bias_turn(run, step), worker))
            return false;
        if (sees)
            run->kernels->backward_bias(b, k0, k1);
        if (run->shares_bias)
            pass_at(run, place);
    }
    if (sees)
        run->kernels->backward_query(b, k0, k1);
    const int64_t place = place_of_keys(run, step, key_block);
    if (!wait_at(run, place, step->index, worker))
        return false;
    if (sees)
        run->kernels->backward_keys(b, k0, k1);
    pass_at(run, place);
    return true;
}

/* turn: among the steps that draw bits from a serial stream. False: asked to stop. */
static bool pass_step(const struct run *run, const struct step *step, int64_t turn, struct cattn_worker *worker) {
    const struct cattn_attention_params *p = &run->params->forward;
    struct cattn_backward *b = set_up(run, step, cattn_worker_scratch(worker));
    if (run->drawn && !cattn_drawn_take(run->drawn, turn, b->scores.n_rows, p->seqlen_k, b->scores.kept[0], worker))
        return false;
    run->kernels->backward_begin(b);
    const struct cattn_range keys = cattn_rows_keys(&b->scores);
    for (int64_t key_block = 0; key_block < run->n_key_blocks; key_block++)
        if (cattn_should_stop(worker) || !pass_block(run, step, b, keys, key_block, worker))
            return false;
    if (run->sinks)
        run->sinks[(step->lead * p->num_heads + step->head) * run->blocks_per_head + step->block] =
            run->kernels->backward_sink(b);
    run->kernels->backward_finish(b);
    return true;
}

/* Units are plenty: each is one thread's, and nobody waits. */
static void unit_task(void *context, int64_t unit, struct cattn_worker *worker) {
    const struct run *run = context;
    for (int64_t index = 0; index < run->steps_per_unit; index++) {
        const struct step step = find_step(run, unit, index);
        if (!pass_step(run, &step, unit * run->steps_per_unit + index, worker))
            return;
    }
}

/* The steps of all units, in turn: the other units' steps are what a thread has to do while one unit's are late. */
static void step_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct run *run = context;
    const struct step step = find_step(run, task % run->n_units, task / run->n_units);
    pass_step(run, &step, 0, worker);
}

/* The same in the order of (lead, head, block), which serial bits and a shared bias want. */
static void ordered_step_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct run *run = context;
    const struct step step = find_step(run, task / run->steps_per_unit, task % run->steps_per_unit);
    pass_step(run, &step, task, worker);
}

/* The blocks of each head, in order. */
static void finish_sinks(const struct run *run) {
    const struct cattn_attention_params *p = &run->params->forward;
    const struct cattn_tensor *to = &run->params->grad_sinks;
    const unsigned mode = cattn_fp_enter();
    for (int64_t lead = 0; lead < p->n_batch; lead++)
        for (int64_t head = 0; head < p->num_heads; head++) {
            double sum = 0;
            for (int64_t block = 0; block < run->blocks_per_head; block++)
                sum += run->sinks[(lead * p->num_heads + head) * run->blocks_per_head + block];
            sum = sum == sum ? 0 - sum : (double)NAN;
            void *place = cattn_tensor_at(p, to, cattn_lead_start(p, to, lead) + head * to->head);
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
    for (int d = 0; d < p->n_lead; d++)
        shares |= bias->lead[d] == 0 && p->lead_shape[d] > 1;
    return shares;
}

static struct run plan(const struct cattn_backward_params *params) {
    const struct cattn_attention_params *p = &params->forward;
    struct run run = {.params = params, .kernels = cattn_kernels_for(p->dtype), .num_threads = p->num_threads};
    run.units_per_lead = p->num_heads / p->group_size;
    run.n_units = p->n_batch * run.units_per_lead;
    run.blocks_per_head = p->seqlen_q / CATTN_TILE_ROWS + (p->seqlen_q % CATTN_TILE_ROWS != 0);
    run.steps_per_unit = run.blocks_per_head * p->group_size;
    run.n_key_blocks = p->seqlen_k / CATTN_BLOCK_KEYS + (p->seqlen_k % CATTN_BLOCK_KEYS != 0);
    run.shares_bias = shares_bias(params);
    if (cattn_attention_work(p) < POOL_WORK || run.num_threads < 1)
        run.num_threads = 1;
    return run;
}

static enum cattn_status run_steps(struct run *run) {
    const struct cattn_attention_params *p = &run->params->forward;
    struct cattn_arena count = cattn_arena(NULL, 0, false);
    struct cattn_backward unused;
    cattn_carve(&count, sizeof unused);
    lay_out(run, &unused, &count);
    run->scratch_size = count.used;
    if (run->num_threads == 1 || (!run->shares_bias && !run->drawn && run->n_units >= PLENTY * run->num_threads))
        return cattn_parallel_for(run->n_units, run->num_threads, run->scratch_size, unit_task, run, &p->poll);
    cattn_task_fn *const task = run->shares_bias || run->drawn ? ordered_step_task : step_task;
    const int64_t n_steps = run->n_units * run->steps_per_unit;
    struct cattn_turns turns;
    if (!cattn_turns_begin(&turns, count_places(run)))
        return CATTN_NO_MEMORY;
    run->turns = &turns;
    const enum cattn_status status =
        cattn_parallel_for(n_steps, run->num_threads, run->scratch_size, task, run, &p->poll);
    cattn_turns_end(&turns);
    return status;
}

enum cattn_status cattn_attention_backward(const struct cattn_backward_params *params) {
    const struct cattn_attention_params *p = &params->forward;
    struct run run = plan(params);
    if (run.n_units * run.steps_per_unit == 0)
        return CATTN_OK;
    if (params->grad_sinks.data) {
        run.sinks = calloc((size_t)(p->n_batch * p->num_heads * run.blocks_per_head), sizeof *run.sinks);
        if (!run.sinks)
            return CATTN_NO_MEMORY;
    }
    struct cattn_drawn drawn;
    if (p->dropout.enabled && p->dropout.torch && p->seqlen_k > 0) {
        cattn_drawn_begin(&drawn, p->dropout.torch, p->dropout.keep_probability);
        run.drawn = &drawn;
    }
    const enum cattn_status status = run_steps(&run);
    if (run.drawn)
        cattn_drawn_end(&drawn, status == CATTN_OK ? p->dropout.torch : NULL);
    if (run.sinks && status == CATTN_OK)
        finish_sinks(&run);
    free(run.sinks);
    return status;
}
