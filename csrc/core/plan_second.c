/* plan_second.c -- the plans of second passes: gradients, statistics and derivatives in a direction; see plan.h. */
#include <assert.h>

#include "plan.h"
#include "random.h"
#include "scratch.h"

/* Below this many multiply-adds of the forward pass, other threads would wake up too late to help. */
#define POOL_WORK 800000.0
/* With at least this many units a thread, whole units are tasks: the last one to finish costs little, and nobody waits
 * for a ticket. */
#define PLENTY 4

int cattn_plan_second_threads(const struct cattn_attention_params *params) {
    return cattn_attention_work(params) < POOL_WORK || params->num_threads < 1 ? 1 : params->num_threads;
}

bool cattn_plan_whole_units(int64_t n_units, int num_threads, bool ordered) {
    return num_threads == 1 || (!ordered && n_units >= PLENTY * num_threads);
}

static void carve_lse(struct cattn_split_lse *lse, struct cattn_arena *arena, cattn_size element) {
    lse->value = cattn_carve(arena, CATTN_TILE_ROWS * element);
    lse->residual = cattn_carve(arena, CATTN_TILE_ROWS * element);
    lse->factor = cattn_carve(arena, CATTN_TILE_ROWS * element);
}

/* Whether the kernels copy rows of the tangents of keys or values. */
static bool copies_tangents(const struct cattn_attention_params *p, const struct cattn_tangents *tangents) {
    return (tangents->key.data && cattn_plan_copies(p, &tangents->key, CATTN_STORED_PLAIN)) ||
           (tangents->value.data && cattn_plan_copies(p, &tangents->value, CATTN_STORED_PLAIN));
}

/* The scratch of the tangents of scores; `scratch` has what their views share with the scores. */
static void carve_tangents(struct cattn_score_tangents *s, const struct cattn_attention_params *p,
                           const struct cattn_tangents *tangents, const struct cattn_row_scratch *scratch,
                           struct cattn_arena *arena) {
    const cattn_size size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS;
    s->tangent = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    s->query.scratch = s->key.scratch = *scratch;
    s->query.scratch.score = s->key.scratch.score = s->tangent;
    s->query.scratch.cap_derivative = s->key.scratch.cap_derivative = NULL;
    s->query.scratch.cap_curvature = s->key.scratch.cap_curvature = NULL;
    if (tangents->query.data)
        s->query.scratch.packed_query = cattn_carve(arena, rows * (cattn_size)p->head_dim * size);
}

/* ---- the derivative in the direction of tangents ---- */

/* Sets the memory of `j`, or measures it. */
static void lay_out_jvp(const struct cattn_jvp_params *params, const struct cattn_kernels *kernels, struct cattn_jvp *j,
                        struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &params->forward;
    const cattn_size size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS;
    const cattn_size depth = (cattn_size)(p->head_dim > p->d_v ? p->head_dim : p->d_v);
    const cattn_size panel = (cattn_size)kernels->lanes * (cattn_size)kernels->nr,
                     plane = rows * CATTN_BLOCK_KEYS * size;
    const bool copies = cattn_plan_copies(p, &p->key, p->quantized_key) ||
                        cattn_plan_copies(p, &p->value, p->quantized_value) || copies_tangents(p, &params->tangents);
    struct cattn_row_scratch *s = &j->scores.scratch;
    j->scores.per_row = j->values.per_row = j->value_tangents.per_row = cattn_plan_carve_per_row(arena, rows);
    j->tangents.query.per_row = j->tangents.key.per_row = j->scores.per_row;
    s->drop_bits = NULL;
    s->packed_query = cattn_carve(arena, rows * (cattn_size)p->head_dim * size);
    s->score = cattn_carve(arena, plane);
    s->cap_derivative = p->score_options.softcap > 0 ? cattn_carve(arena, plane) : NULL;
    s->cap_curvature = NULL;
    s->key_copy = cattn_carve(arena, (cattn_size)kernels->mr * depth * size);
    s->block_copy = cattn_carve(arena, copies ? CATTN_BLOCK_KEYS * depth * size : 0);
    s->block_max = cattn_carve(arena, rows * size);
    s->value_panel = cattn_carve(arena, CATTN_BLOCK_KEYS * panel * size);
    s->alpha = cattn_carve(arena, rows * size);
    s->acc = cattn_carve(arena, rows * (cattn_size)cattn_plan_acc_cols(p) * size);
    carve_tangents(&j->tangents, p, &params->tangents, s, arena);
    j->values.scratch = j->value_tangents.scratch = *s;
    j->value_tangents.scratch.score = j->tangents.tangent;
    carve_lse(&j->lse, arena, size);
    j->mean = cattn_carve(arena, rows * size);
}

struct cattn_jvp *cattn_jvp_lay_out(const struct cattn_jvp_plan *plan, const struct cattn_jvp_params *params,
                                    const struct cattn_kernels *kernels, void *memory) {
    struct cattn_arena arena = cattn_arena(memory, plan->scratch_size, true);
    struct cattn_jvp *j = cattn_carve(&arena, sizeof *j);
    assert(j); /* for the analyzer: a task always has scratch */
    lay_out_jvp(params, kernels, j, &arena);
    j->scores.query = j->values.query = j->value_tangents.query = j->tangents.key.query = j->scores.per_row->query;
    j->tangents.query.query = j->tangents.query_rows;
    return j;
}

struct cattn_jvp_plan cattn_jvp_plan(const struct cattn_jvp_params *params, const struct cattn_kernels *kernels) {
    const struct cattn_attention_params *p = &params->forward;
    struct cattn_jvp_plan plan = {.num_threads = cattn_plan_second_threads(p)};
    plan.blocks_per_head = cattn_ceil_div(p->seqlen_q, CATTN_TILE_ROWS);
    plan.n_tasks = p->n_batch * p->num_heads * plan.blocks_per_head;
    plan.n_key_blocks = cattn_ceil_div(p->seqlen_k, CATTN_BLOCK_KEYS);
    struct cattn_arena count = cattn_arena(NULL, 0, false);
    struct cattn_jvp unused;
    cattn_carve(&count, sizeof unused);
    lay_out_jvp(params, kernels, &unused, &count);
    plan.scratch_size = count.used;
    return plan;
}

/* ---- statistics ---- */

/* Sets the memory of `s`. As for the other plans, it is called without memory to measure it, and with memory to cut it.
 */
static void lay_out_statistics(const struct cattn_statistics_params *params, const struct cattn_kernels *kernels,
                               struct cattn_statistics *s, struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &params->forward;
    const cattn_size size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS, depth = (cattn_size)p->head_dim;
    struct cattn_row_scratch *scratch = &s->rows.scratch;
    s->rows.per_row = cattn_plan_carve_per_row(arena, rows);
    scratch->drop_bits = NULL;
    scratch->cap_derivative = scratch->cap_curvature = NULL;
    scratch->packed_query = cattn_carve(arena, rows * depth * size);
    scratch->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    scratch->key_copy = cattn_carve(arena, (cattn_size)kernels->mr * depth * size);
    const bool copies = cattn_plan_copies(p, &p->key, p->quantized_key);
    scratch->block_copy = cattn_carve(arena, copies ? CATTN_BLOCK_KEYS * depth * size : 0);
    scratch->block_max = cattn_carve(arena, rows * size);
    carve_lse(&s->lse, arena, size);
    s->log_sum = cattn_carve(arena, rows * size);
    s->distance = cattn_carve(arena, rows * size);
    s->max_score = cattn_carve(arena, rows * size);
    s->top_root = cattn_carve(arena, rows * size);
    s->undefined = cattn_carve(arena, rows * sizeof *s->undefined);
    s->column_sum = cattn_carve(arena, CATTN_BLOCK_KEYS * size);
    s->column_max = cattn_carve(arena, CATTN_BLOCK_KEYS * size);
}

struct cattn_statistics *cattn_statistics_lay_out(const struct cattn_statistics_plan *plan,
                                                  const struct cattn_statistics_params *params,
                                                  const struct cattn_kernels *kernels, void *memory) {
    struct cattn_arena arena = cattn_arena(memory, plan->scratch_size, true);
    struct cattn_statistics *s = cattn_carve(&arena, sizeof *s);
    assert(s); /* for the analyzer: a task always has scratch */
    lay_out_statistics(params, kernels, s, &arena);
    s->rows.query = s->rows.per_row->query;
    return s;
}

struct cattn_statistics_plan cattn_statistics_plan(const struct cattn_statistics_params *params,
                                                   const struct cattn_kernels *kernels) {
    const struct cattn_attention_params *p = &params->forward;
    struct cattn_statistics_plan plan = {.num_threads = cattn_plan_second_threads(p)};
    plan.n_units = p->n_batch * p->num_heads;
    plan.blocks_per_unit = cattn_ceil_div(p->seqlen_q, CATTN_TILE_ROWS);
    plan.n_key_blocks = cattn_ceil_div(p->seqlen_k, CATTN_BLOCK_KEYS);
    plan.adds_columns = params->received.data || params->received_max.data;
    plan.whole_units = cattn_plan_whole_units(plan.n_units, plan.num_threads, false);
    struct cattn_arena count = cattn_arena(NULL, 0, false);
    struct cattn_statistics unused;
    cattn_carve(&count, sizeof unused);
    lay_out_statistics(params, kernels, &unused, &count);
    plan.scratch_size = count.used;
    return plan;
}

/* ---- the gradients: steps, and the scratch of a step ---- */

/* Sets the memory of `b` and its views. It is the only description of the layout: called without memory to
 * measure it, and with memory to cut it. */
static void lay_out_backward(const struct cattn_backward_plan *plan, const struct cattn_backward_params *params,
                             const struct cattn_kernels *kernels, struct cattn_backward *b, struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &params->forward;
    const cattn_size size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS;
    const cattn_size depth = (cattn_size)(p->head_dim > p->d_v ? p->head_dim : p->d_v);
    /* keys and values are copied one after the other, so one buffer of the larger depth is enough */
    const bool copies = cattn_plan_copies(p, &p->key, p->quantized_key) ||
                        cattn_plan_copies(p, &p->value, p->quantized_value) || copies_tangents(p, &params->tangents);
    const cattn_size panel = (cattn_size)kernels->lanes * (cattn_size)kernels->nr;
    struct cattn_row_scratch *s = &b->scores.scratch, *g = &b->grads.scratch, *k = &b->keys.scratch;
    b->scores.per_row = b->grads.per_row = b->keys.per_row = cattn_plan_carve_per_row(arena, rows);
    b->query_cols = cattn_round_up(p->head_dim, CATTN_PAD);
    b->grad_cols = cattn_round_up(p->d_v, CATTN_PAD);
    s->drop_bits = plan->uses_stream ? cattn_carve(arena, rows * cattn_dropout_stream_row_bytes(p->seqlen_k)) : NULL;
    s->packed_query = cattn_carve(arena, rows * (cattn_size)p->head_dim * size);
    g->packed_query = cattn_carve(arena, rows * (cattn_size)p->d_v * size);
    b->query_rows = cattn_carve(arena, rows * (cattn_size)b->query_cols * size);
    b->grad_rows = cattn_carve(arena, rows * (cattn_size)b->grad_cols * size);
    s->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    g->score = k->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    s->cap_derivative = p->score_options.softcap > 0 ? cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size) : NULL;
    g->drop_bits = k->drop_bits = NULL;
    s->cap_curvature = NULL;
    g->cap_derivative = g->cap_curvature = NULL;
    s->key_copy = g->key_copy = cattn_carve(arena, (cattn_size)kernels->mr * depth * size);
    s->block_copy = g->block_copy = k->block_copy = cattn_carve(arena, copies ? CATTN_BLOCK_KEYS * depth * size : 0);
    s->block_max = g->block_max = cattn_carve(arena, rows * size);
    k->value_panel = cattn_carve(arena, CATTN_BLOCK_KEYS * panel * size);
    k->alpha = cattn_carve(arena, rows * size);
    k->acc = cattn_carve(arena, rows * (cattn_size)b->query_cols * size);
    carve_lse(&b->lse, arena, size);
    b->delta = cattn_carve(arena, rows * size);
    b->bias_sum = cattn_carve(arena, rows * size);
    b->bias_part = cattn_carve(arena, CATTN_BLOCK_KEYS * size);
}

/* The rest of the memory for gradients of a derivative. */
static void lay_out_tangents(const struct cattn_backward_params *params, struct cattn_jvp_backward *j,
                             struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &params->forward;
    const cattn_size size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS,
                     plane = rows * CATTN_BLOCK_KEYS * size;
    struct cattn_row_scratch *s = &j->backward.scores.scratch;
    if (p->score_options.softcap > 0)
        s->cap_curvature = cattn_carve(arena, plane);
    carve_tangents(&j->tangents, p, &params->tangents, s, arena);
    j->tangents.query.per_row = j->tangents.key.per_row = j->grads.per_row = j->keys.per_row =
        j->backward.scores.per_row;
    j->grads.scratch = j->backward.grads.scratch;
    j->grads.scratch.score = params->tangents.value.data ? cattn_carve(arena, plane) : NULL;
    j->keys.scratch = j->backward.keys.scratch;
    j->keys.scratch.score = j->tangents.tangent;
    if (params->tangents.query.data)
        j->query_rows = cattn_carve(arena, rows * (cattn_size)j->backward.query_cols * size);
    j->delta = cattn_carve(arena, rows * size);
    j->mean = cattn_carve(arena, rows * size);
}

static size_t size_of_struct(const struct cattn_backward_params *params) {
    return params->of_tangents ? sizeof(struct cattn_jvp_backward) : sizeof(struct cattn_backward);
}

struct cattn_backward *cattn_backward_lay_out(const struct cattn_backward_plan *plan,
                                              const struct cattn_backward_params *params,
                                              const struct cattn_kernels *kernels, void *memory) {
    struct cattn_arena arena = cattn_arena(memory, plan->scratch_size, true);
    struct cattn_backward *b = cattn_carve(&arena, size_of_struct(params));
    assert(b); /* for the analyzer: a step always has scratch */
    lay_out_backward(plan, params, kernels, b, &arena);
    if (params->of_tangents) {
        struct cattn_jvp_backward *j = (struct cattn_jvp_backward *)b;
        lay_out_tangents(params, j, &arena);
        j->tangents.query.query = j->tangents.query_rows;
        j->tangents.key.query = b->scores.per_row->query;
        j->grads.query = b->grad_out;
    }
    b->scores.query = b->scores.per_row->query;
    b->grads.query = b->grad_out;
    return b;
}

/* Whether another pair of batch entry and head adds to the same gradient of the bias. */
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

struct cattn_backward_plan cattn_backward_plan(const struct cattn_backward_params *params,
                                               const struct cattn_kernels *kernels) {
    const struct cattn_attention_params *p = &params->forward;
    struct cattn_backward_plan plan = {.num_threads = cattn_plan_second_threads(p)};
    plan.units_per_batch = p->num_heads / p->group_size;
    plan.n_units = p->n_batch * plan.units_per_batch;
    plan.blocks_per_head = cattn_ceil_div(p->seqlen_q, CATTN_TILE_ROWS);
    plan.steps_per_unit = plan.blocks_per_head * p->group_size;
    plan.n_key_blocks = cattn_ceil_div(p->seqlen_k, CATTN_BLOCK_KEYS);
    plan.shares_bias = shares_bias(params);
    plan.uses_stream = cattn_plan_uses_stream(p);
    /* a shared bias and a serial stream fix the order of steps across units */
    plan.whole_units = cattn_plan_whole_units(plan.n_units, plan.num_threads, plan.shares_bias || plan.uses_stream);
    struct cattn_arena count = cattn_arena(NULL, 0, false);
    struct cattn_jvp_backward unused;
    cattn_carve(&count, size_of_struct(params));
    lay_out_backward(&plan, params, kernels, &unused.backward, &count);
    if (params->of_tangents)
        lay_out_tangents(params, &unused, &count);
    plan.scratch_size = count.used;
    return plan;
}
