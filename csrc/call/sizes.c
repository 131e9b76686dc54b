/* sizes.c -- what the sizes of query, key and value say: tokens, heads and groups, batch. See check.h. */
#include "check.h"

#include <inttypes.h>
#include <string.h>

static const char *const NAMES[] = {"query", "key", "value"};
enum { QUERY, KEY, VALUE, N_INPUTS };

/* cattn_size_of in the order of the call's axes. */
static int64_t size_of(const struct cattn_array *array, const struct cattn_shape *shape, int back) {
    const int axis = !shape->tokens_first || back == 1 || back > 3 ? back : 5 - back;
    return cattn_size_of(array, axis);
}

static bool fail_sizes(const struct cattn_door *door, int a, int64_t size_a, int b, int64_t size_b, const char *what) {
    return cattn_fail(door, CATTN_WRONG_VALUE, "%s has %s %" PRId64 ", %s has %" PRId64, NAMES[a], what, size_a,
                      NAMES[b], size_b);
}

static bool check_axes(const struct cattn_door *door, const struct cattn_array *inputs, struct cattn_shape *shape) {
    static const char *const rows[] = {"T_q", "T_k", "T_k"}, *const widths[] = {"head_dim", "head_dim", "d_v"};
    const int least = shape->tokens_first ? 3 : 2;
    for (int i = QUERY; i < N_INPUTS; i++) {
        const int nd = inputs[i].nd;
        if (inputs[i].data == NULL)
            continue;
        if (shape->is_packed && nd != 3)
            return cattn_fail(door, CATTN_WRONG_VALUE, "%s must have shape (total, heads, %s), got %s", NAMES[i],
                              widths[i], cattn_show_shape(nd, inputs[i].dims).text);
        if (nd < least)
            return cattn_fail(door, CATTN_WRONG_VALUE, "%s must have at least %d dimensions (..., %s, %s%s)%s, got %d",
                              NAMES[i], least, rows[i], shape->tokens_first ? "heads, " : "", widths[i],
                              shape->tokens_first ? " for layout='bthd'" : "", nd);
        shape->nd = nd > shape->nd ? nd : shape->nd;
    }
    shape->nd += shape->is_packed; /* one batch entry */
    return true;
}

static bool check_tokens(const struct cattn_door *door, const struct cattn_array *inputs, struct cattn_shape *shape,
                         struct cattn_attention_params *params) {
    const bool has_value = inputs[VALUE].data != NULL;
    const int64_t key_dim = size_of(&inputs[KEY], shape, 1), value_rows = size_of(&inputs[VALUE], shape, 2);
    params->seqlen_q = shape->dims[shape->nd - 2] = size_of(&inputs[QUERY], shape, 2);
    params->seqlen_k = shape->dims[shape->nd - 1] = size_of(&inputs[KEY], shape, 2);
    shape->listed = params->seqlen_k;
    params->head_dim = size_of(&inputs[QUERY], shape, 1);
    params->d_v = has_value ? size_of(&inputs[VALUE], shape, 1) : 0;
    if (key_dim != params->head_dim)
        return fail_sizes(door, KEY, key_dim, QUERY, params->head_dim, "head_dim");
    return !has_value || value_rows == params->seqlen_k ||
           fail_sizes(door, VALUE, value_rows, KEY, params->seqlen_k, "T_k");
}

static bool check_heads(const struct cattn_door *door, const struct cattn_array *inputs, struct cattn_shape *shape,
                        struct cattn_attention_params *params) {
    const int nd = shape->nd;
    shape->has_heads = nd > 3 || ((shape->grouping == CATTN_GROUPS_FORCED || shape->tokens_first) && nd == 3);
    shape->n_batch_dims = nd - 2 - shape->has_heads;
    params->num_heads = params->group_size = shape->kv_heads = 1;
    if (!shape->has_heads)
        return true;
    const int64_t query = size_of(&inputs[QUERY], shape, 3), key = size_of(&inputs[KEY], shape, 3);
    const int64_t value = inputs[VALUE].data != NULL ? size_of(&inputs[VALUE], shape, 3) : key;
    if (key != value && key != 1 && value != 1)
        return fail_sizes(door, VALUE, value, KEY, key, shape->tokens_first ? "heads (axis -2):" : "heads (axis -3):");
    const int64_t kv_heads = shape->kv_heads = key == 1 ? value : key;
    const bool broadcasts = query == 1 || kv_heads == 1 || query == kv_heads; /* as NumPy does */
    const bool fits = broadcasts || (kv_heads != 0 && query % kv_heads == 0);
    if (!fits || (!broadcasts && shape->grouping == CATTN_GROUPS_FORBIDDEN))
        return cattn_fail(
            door, CATTN_WRONG_VALUE, "query has %" PRId64 " heads (axis %d), key and value have %" PRId64 "%s%s", query,
            shape->tokens_first ? -2 : -3, kv_heads,
            fits ? ", and enable_gqa=False forbids grouped heads" : ": they must be equal, or query's a multiple",
            !fits && params->seqlen_q == params->seqlen_k && !shape->tokens_first ? "; " CATTN_LAYOUT_HINT : "");
    params->num_heads = query == 1 ? kv_heads : query;
    if (kv_heads > 0 && params->num_heads > 0)
        params->group_size = params->num_heads / kv_heads;
    shape->dims[nd - 3] = params->num_heads;
    return true;
}

static bool check_batch(const struct cattn_door *door, const struct cattn_array *inputs, struct cattn_shape *shape,
                        struct cattn_attention_params *params) {
    params->n_batch_dims = shape->n_batch_dims;
    const struct cattn_array *const arrays[] = {&inputs[QUERY], &inputs[KEY], &inputs[VALUE]};
    if (!cattn_check_batch(door, arrays, N_INPUTS, shape->nd, shape->n_batch_dims, params->batch_shape))
        return false;
    memcpy(shape->dims, params->batch_shape, (size_t)shape->n_batch_dims * sizeof *shape->dims);
    params->n_batch = cattn_count(shape->n_batch_dims, shape->dims);
    if (params->n_batch < 0)
        return cattn_fail(door, CATTN_WRONG_VALUE, "query, key and value broadcast to a batch that is too large");
    return cattn_check_counts(door, params);
}

bool cattn_check_counts(const struct cattn_door *door, const struct cattn_attention_params *p) {
    return cattn_attention_counts_fit(p) ||
           cattn_fail(door, CATTN_WRONG_VALUE,
                      "a batch of %" PRId64 " with %" PRId64 " heads, T_q %" PRId64 ", T_k %" PRId64
                      ", head_dim %" PRId64 " and d_v %" PRId64 " is too large",
                      p->n_batch, p->num_heads, p->seqlen_q, p->seqlen_k, p->head_dim, p->d_v);
}

bool cattn_check_dropout_batch(const struct cattn_door *door, const struct cattn_attention_params *params) {
    return !params->dropout.enabled || params->n_batch <= (int64_t)1 << 31 ||
           cattn_fail(door, CATTN_WRONG_VALUE, "dropout_p: the batch is too large for dropout (more than 2**31)");
}

void cattn_set_block_size(struct cattn_attention_params *params, int64_t size) {
    const int64_t longest = params->seqlen_q > params->seqlen_k ? params->seqlen_q : params->seqlen_k;
    params->block_size = size <= longest ? size : longest > 0 ? longest : 1;
}

bool cattn_check_sizes(const struct cattn_door *door, const struct cattn_array *inputs, struct cattn_shape *shape,
                       struct cattn_attention_params *params) {
    return check_axes(door, inputs, shape) && check_tokens(door, inputs, shape, params) &&
           check_heads(door, inputs, shape, params) && check_batch(door, inputs, shape, params);
}
