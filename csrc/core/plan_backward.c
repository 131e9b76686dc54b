/* plan_backward.c -- how the gradients are cut into steps, and the scratch of a step; see plan.h. */
#include <assert.h>

#include "arena.h"
#include "dropout_stream.h"
#include "plan.h"

/* Sets the memory of `b` and its views. It is the only description of the layout: called without memory to
 * measure it, and with memory to cut it. */
static void lay_out(const struct cattn_backward_plan *plan, const struct cattn_backward_params *params,
                    const struct cattn_kernels *kernels, struct cattn_backward *b, struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &params->forward;
    const size_t size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS;
    const size_t depth = (size_t)(p->head_dim > p->d_v ? p->head_dim : p->d_v);
    /* keys and values are copied one after the other, so one buffer of the larger depth is enough */
    const bool copies = cattn_plan_copies(p, &p->key, p->quantized_key) ||
                        cattn_plan_copies(p, &p->value, p->quantized_value) ||
                        cattn_plan_copies_tangents(p, &params->tangents);
    const size_t panel = (size_t)kernels->lanes * (size_t)kernels->nr;
    struct cattn_row_scratch *s = &b->scores.scratch, *g = &b->grads.scratch, *k = &b->keys.scratch;
    b->scores.per_row = b->grads.per_row = b->keys.per_row = cattn_plan_carve_per_row(arena, rows);
    b->query_cols = cattn_round_up(p->head_dim, CATTN_PAD);
    b->grad_cols = cattn_round_up(p->d_v, CATTN_PAD);
    s->drop_bits = plan->uses_stream ? cattn_carve(arena, rows * cattn_dropout_stream_row_bytes(p->seqlen_k)) : NULL;
    s->packed_query = cattn_carve(arena, rows * (size_t)p->head_dim * size);
    g->packed_query = cattn_carve(arena, rows * (size_t)p->d_v * size);
    b->query_rows = cattn_carve(arena, rows * (size_t)b->query_cols * size);
    b->grad_rows = cattn_carve(arena, rows * (size_t)b->grad_cols * size);
    s->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    g->score = k->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    s->cap_derivative = p->score_options.softcap > 0 ? cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size) : NULL;
    g->drop_bits = k->drop_bits = NULL;
    s->cap_curvature = NULL;
    g->cap_derivative = g->cap_curvature = NULL;
    s->key_copy = g->key_copy = cattn_carve(arena, (size_t)kernels->mr * depth * size);
    s->block_copy = g->block_copy = k->block_copy = cattn_carve(arena, copies ? CATTN_BLOCK_KEYS * depth * size : 0);
    s->block_max = g->block_max = cattn_carve(arena, rows * size);
    k->value_panel = cattn_carve(arena, CATTN_BLOCK_KEYS * panel * size);
    k->alpha = cattn_carve(arena, rows * size);
    k->acc = cattn_carve(arena, rows * (size_t)b->query_cols * size);
    cattn_plan_carve_lse(&b->lse, arena, size);
    b->delta = cattn_carve(arena, rows * size);
    b->bias_sum = cattn_carve(arena, rows * size);
    b->bias_part = cattn_carve(arena, CATTN_BLOCK_KEYS * size);
}

/* The rest of the memory for gradients of a derivative. */
static void lay_out_tangents(const struct cattn_backward_params *params, struct cattn_jvp_backward *j,
                             struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &params->forward;
    const size_t size = cattn_element_size(p->dtype), rows = CATTN_TILE_ROWS, plane = rows * CATTN_BLOCK_KEYS * size;
    struct cattn_row_scratch *s = &j->backward.scores.scratch;
    if (p->score_options.softcap > 0)
        s->cap_curvature = cattn_carve(arena, plane);
    cattn_plan_carve_tangents(&j->tangents, p, &params->tangents, s, arena);
    j->tangents.query.per_row = j->tangents.key.per_row = j->grads.per_row = j->keys.per_row =
        j->backward.scores.per_row;
    j->grads.scratch = j->backward.grads.scratch;
    j->grads.scratch.score = params->tangents.value.data ? cattn_carve(arena, plane) : NULL;
    j->keys.scratch = j->backward.keys.scratch;
    j->keys.scratch.score = j->tangents.tangent;
    if (params->tangents.query.data)
        j->query_rows = cattn_carve(arena, rows * (size_t)j->backward.query_cols * size);
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
    lay_out(plan, params, kernels, b, &arena);
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
    lay_out(&plan, params, kernels, &unused.backward, &count);
    if (params->of_tangents)
        lay_out_tangents(params, &unused, &count);
    plan.scratch_size = count.used;
    return plan;
}
