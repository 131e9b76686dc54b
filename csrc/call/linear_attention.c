/* linear_attention.c -- the laws of linear attention's arrays: tokens, heads, batch, and their views. See check.h. */
#include "check.h"

#include <inttypes.h>
#include <string.h>

static void swap_axes(struct cattn_array *array, int a, int b) {
    const int64_t dim = array->dims[array->nd - a], stride = array->strides[array->nd - a];
    array->dims[array->nd - a] = array->dims[array->nd - b];
    array->strides[array->nd - a] = array->strides[array->nd - b];
    array->dims[array->nd - b] = dim;
    array->strides[array->nd - b] = stride;
}

/* Puts the heads before the tokens. An array of one number for each token has an axis less than `nd`. */
static void heads_first(struct cattn_array *array, int nd, bool one_number) {
    if (one_number && array->nd == 1 && nd > 2) { /* a number for each head, and no axis of tokens */
        array->dims[1] = 1;
        array->strides[1] = 0;
        array->nd = 2;
    } else if (one_number && array->nd >= 2) {
        swap_axes(array, 1, 2);
    } else if (!one_number && array->nd >= 3) {
        swap_axes(array, 2, 3);
    }
}

void cattn_linear_view(const struct cattn_linear_shape *shape, struct cattn_array *array, struct cattn_tensor *view) {
    view->batch[0] = 0;
    if (shape->tokens_first)
        heads_first(array, shape->nd, false);
    cattn_view(view, array, shape->n_batch_dims, shape->axes);
}

/* The number of axes of the call, and the arrays with their heads before their tokens. */
static bool settle_axes(const struct cattn_door *door, struct cattn_array *const *inputs,
                        struct cattn_linear_shape *shape, struct cattn_linear_attention_params *params) {
    const bool packed = shape->n_sequences >= 0;
    const int least = shape->tokens_first ? 3 : 2;
    shape->nd = 0;
    for (int i = LINEAR_QUERY; i <= LINEAR_VALUE; i++) {
        const char *const width = i == LINEAR_VALUE ? "d_v" : "d_k";
        const int nd = inputs[i]->nd;
        if (nd < least)
            return cattn_fail(door, CATTN_WRONG_VALUE, "%s must have at least %d dimensions (..., T, %s%s)%s, got %d",
                              inputs[i]->name, least, shape->tokens_first ? "heads, " : "", width,
                              shape->tokens_first ? " for layout='bthd'" : "", nd);
        if (packed && nd > 3)
            return cattn_fail(
                door, CATTN_WRONG_VALUE,
                "%s must have the shape of packed sequences, %s, got %s: without cu_seqlens, leading axes "
                "are a batch",
                inputs[i]->name, shape->tokens_first ? "(total, heads, width)" : "(heads, total, width)",
                cattn_show_shape(nd, inputs[i]->dims).text);
        shape->nd = nd > shape->nd ? nd : shape->nd;
    }
    const int state_nd = inputs[LINEAR_STATE] != NULL ? inputs[LINEAR_STATE]->nd - packed : 0;
    shape->nd = state_nd > shape->nd && !packed ? state_nd : shape->nd;
    const bool has_heads = shape->nd > 3 || (shape->nd == 3 && (shape->tokens_first || packed));
    shape->n_batch_dims = shape->nd - 2 - has_heads;
    shape->state_nd = shape->nd + packed;
    shape->axes = CATTN_AXIS_COL | CATTN_AXIS_ROW | (has_heads ? CATTN_AXIS_HEAD : 0);
    params->decay_by_row = inputs[LINEAR_DECAY] != NULL && inputs[LINEAR_DECAY]->nd == shape->nd;
    for (int i = LINEAR_QUERY; i < LINEAR_STATE && shape->tokens_first; i++)
        if (inputs[i] != NULL)
            heads_first(inputs[i], shape->nd, i > LINEAR_VALUE && !(i == LINEAR_DECAY && params->decay_by_row));
    return true;
}

static bool fail_sizes(const struct cattn_door *door, const struct cattn_array *a, int64_t size_a,
                       const struct cattn_array *b, int64_t size_b, const char *what) {
    return cattn_fail(door, CATTN_WRONG_VALUE, "%s has %s %" PRId64 ", %s has %" PRId64, a->name, what, size_a, b->name,
                      size_b);
}

static bool check_tokens(const struct cattn_door *door, struct cattn_array *const *inputs,
                         struct cattn_linear_attention_params *params) {
    const struct cattn_array *query = inputs[LINEAR_QUERY], *key = inputs[LINEAR_KEY];
    params->length = params->seqlen = cattn_size_of(query, 2);
    params->d_k = cattn_size_of(query, 1);
    params->d_v = cattn_size_of(inputs[LINEAR_VALUE], 1);
    if (cattn_size_of(key, 1) != params->d_k)
        return fail_sizes(door, key, cattn_size_of(key, 1), query, params->d_k, "d_k");
    for (int i = LINEAR_KEY; i <= LINEAR_VALUE; i++)
        if (cattn_size_of(inputs[i], 2) != params->seqlen)
            return fail_sizes(door, inputs[i], cattn_size_of(inputs[i], 2), query, params->seqlen, "T");
    return true;
}

/* Whether a number of heads is a multiple of another: no heads go with no heads only. */
static bool divides(int64_t part, int64_t whole) { return part > 0 && whole > 0 ? whole % part == 0 : part == whole; }

static bool check_heads(const struct cattn_door *door, struct cattn_array *const *inputs,
                        const struct cattn_linear_shape *shape, struct cattn_linear_attention_params *params) {
    const bool has_heads = shape->axes & CATTN_AXIS_HEAD;
    const int64_t query = has_heads ? cattn_size_of(inputs[LINEAR_QUERY], 3) : 1;
    const int64_t key = has_heads ? cattn_size_of(inputs[LINEAR_KEY], 3) : 1;
    const int64_t value = has_heads ? cattn_size_of(inputs[LINEAR_VALUE], 3) : 1;
    const int64_t states = key > value ? key : value;
    params->query_heads = query;
    params->key_heads = key;
    params->value_heads = value;
    params->n_states = states;
    const char *const axis = shape->tokens_first ? "axis -2" : "axis -3";
    if (!divides(key < value ? key : value, states))
        return cattn_fail(door, CATTN_WRONG_VALUE,
                          "key has %" PRId64 " heads (%s), value has %" PRId64 ": one must be a multiple of the other",
                          key, axis, value);
    if (!divides(query, states) && !divides(states, query))
        return cattn_fail(door, CATTN_WRONG_VALUE,
                          "query has %" PRId64 " heads (%s), the states have %" PRId64
                          ": one must be a multiple of the other",
                          query, axis, states);
    return true;
}

/* The batch is what query, key, value and state broadcast to, or the packed sequences. */
static bool check_batch(const struct cattn_door *door, struct cattn_array *const *inputs,
                        struct cattn_linear_shape *shape, struct cattn_linear_attention_params *params) {
    const struct cattn_array *const arrays[] = {inputs[LINEAR_QUERY], inputs[LINEAR_KEY], inputs[LINEAR_VALUE],
                                                inputs[LINEAR_STATE]};
    const bool packed = shape->n_sequences >= 0;
    if (!cattn_check_batch(door, arrays, inputs[LINEAR_STATE] != NULL ? 4 : 3, shape->nd, shape->n_batch_dims,
                           params->batch_shape))
        return false;
    params->n_batch_dims = packed ? 1 : shape->n_batch_dims;
    if (packed)
        params->batch_shape[0] = shape->n_sequences;
    params->n_batch = cattn_count(params->n_batch_dims, params->batch_shape);
    const int64_t states[] = {params->n_batch, params->n_states};
    return (params->n_batch >= 0 && cattn_count(2, states) >= 0) ||
           cattn_fail(door, CATTN_WRONG_VALUE, "query, key, value and state broadcast to a batch that is too large");
}

static void set_dims(struct cattn_linear_shape *shape, const struct cattn_linear_attention_params *params) {
    const bool packed = shape->n_sequences >= 0;
    const int nd = shape->nd, state_nd = shape->state_nd;
    memcpy(shape->dims, params->batch_shape, (size_t)shape->n_batch_dims * sizeof *shape->dims);
    memcpy(shape->state_dims, params->batch_shape, (size_t)(shape->n_batch_dims + packed) * sizeof *shape->state_dims);
    if (shape->axes & CATTN_AXIS_HEAD) {
        shape->dims[nd - 3] = params->query_heads > params->n_states ? params->query_heads : params->n_states;
        shape->state_dims[state_nd - 3] = params->n_states;
    }
    shape->dims[nd - 2] = params->seqlen;
    shape->dims[nd - 1] = params->d_v;
    shape->state_dims[state_nd - 2] = params->d_k;
    shape->state_dims[state_nd - 1] = params->d_v;
}

/* Decay and beta broadcast to the tokens of the states, and the state to all states. */
static bool check_options(const struct cattn_door *door, struct cattn_array *const *inputs,
                          const struct cattn_linear_shape *shape, const struct cattn_linear_attention_params *params) {
    int64_t dims[CATTN_MAX_AXES];
    memcpy(dims, shape->dims, (size_t)shape->nd * sizeof *dims);
    if (shape->axes & CATTN_AXIS_HEAD)
        dims[shape->nd - 3] = params->n_states;
    dims[shape->nd - 1] = params->d_k;
    const char *const tokens = shape->axes & CATTN_AXIS_HEAD ? "(..., heads, T)" : "(..., T)";
    const char *const rows = shape->axes & CATTN_AXIS_HEAD ? "(..., heads, T, d_k)" : "(..., T, d_k)";
    const char *const hint = shape->tokens_first ? ", whose heads and tokens are swapped by layout='bthd'" : "";
    for (int i = LINEAR_DECAY; i <= LINEAR_BETA; i++) {
        const bool by_row = i == LINEAR_DECAY && params->decay_by_row;
        if (inputs[i] != NULL &&
            !cattn_check_broadcast(door, inputs[i], shape->nd - !by_row, dims, by_row ? rows : tokens, hint))
            return false;
    }
    return inputs[LINEAR_STATE] == NULL || cattn_check_broadcast(door, inputs[LINEAR_STATE], shape->state_nd,
                                                                 shape->state_dims, "the states' shape", "");
}

bool cattn_check_linear_sizes(const struct cattn_door *door, struct cattn_array *const *inputs,
                              struct cattn_linear_shape *shape, struct cattn_linear_attention_params *params) {
    struct cattn_tensor *const views[N_LINEAR_INPUTS] = {&params->query, &params->key,  &params->value,
                                                         &params->decay, &params->beta, &params->state};
    if (!settle_axes(door, inputs, shape, params) || !check_tokens(door, inputs, params) ||
        !check_heads(door, inputs, shape, params) || !check_batch(door, inputs, shape, params))
        return false;
    set_dims(shape, params);
    if (!check_options(door, inputs, shape, params))
        return false;
    const bool packed = shape->n_sequences >= 0;
    for (int i = LINEAR_QUERY; i < N_LINEAR_INPUTS; i++) {
        const bool one_number = i == LINEAR_BETA || (i == LINEAR_DECAY && !params->decay_by_row);
        const bool is_state = i == LINEAR_STATE;
        if (inputs[i] == NULL)
            continue;
        views[i]->batch[0] = 0;
        cattn_view(views[i], inputs[i], is_state && packed ? 1 : shape->n_batch_dims,
                   one_number ? shape->axes & ~CATTN_AXIS_COL : shape->axes);
    }
    return true;
}
