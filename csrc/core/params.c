/* params.c -- params structs of cattn.h: places of batch entries, structs without options, checks of the contract. */
#include "params.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* ---- batch entries ---- */

int64_t cattn_batch_offset(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                           int64_t index) {
    int64_t offset = 0;
    for (int d = n_batch_dims - 1; d >= 0 && index; d--) {
        offset += index % batch_shape[d] * tensor->batch[d];
        index /= batch_shape[d];
    }
    return offset;
}

int64_t cattn_batch_number(const struct cattn_tensor *numbers, int64_t common, int n_batch_dims,
                           const int64_t *batch_shape, int64_t index) {
    return numbers->data
               ? ((const int64_t *)numbers->data)[cattn_batch_offset(numbers, n_batch_dims, batch_shape, index)]
               : common;
}

struct cattn_token_span cattn_token_span(const int64_t *edges, const struct cattn_tensor *lengths, int64_t length,
                                         int n_batch_dims, const int64_t *batch_shape, int64_t index) {
    if (edges)
        return (struct cattn_token_span){edges[index], edges[index + 1] - edges[index]};
    return (struct cattn_token_span){0, cattn_batch_number(lengths, length, n_batch_dims, batch_shape, index)};
}

/* ---- structs without options ---- */

/* A struct is up to 10 KB, nearly all of it strides that few calls use: clearing it whole would cost more than a tiny
 * attention. So it has its scalars first, then its tensors without a gap, then arrays that are read up to n_batch_dims
 * only. CLEAR(params, first tensor, member after the last) depends on this order, which is asserted below.
 */

/* The scalars end where the tensors begin. Not inline: with constant sizes GCC clears by `rep stos`, whose start takes
 * longer than these few bytes. */
static __attribute__((noinline)) void clear(void *params, size_t tensors, size_t end) {
    memset(params, 0, tensors);
    for (size_t at = tensors; at < end; at += sizeof(struct cattn_tensor))
        memset((char *)params + at, 0, offsetof(struct cattn_tensor, batch));
}

#define CLEAR(params, tensors, end)                                                                                    \
    clear(params, (size_t)((char *)&(params)->tensors - (char *)(params)),                                             \
          (size_t)((char *)&(params)->end - (char *)(params)))

void cattn_clear_attention(struct cattn_attention_params *params) { CLEAR(params, ranges.offsets, batch_shape); }

void cattn_clear_jvp(struct cattn_jvp_params *params) {
    CLEAR(params, tangents.query, forward);
    cattn_clear_attention(&params->forward);
}

void cattn_clear_backward(struct cattn_backward_params *params) {
    CLEAR(params, grad_out, forward);
    cattn_clear_attention(&params->forward);
}

void cattn_clear_statistics(struct cattn_statistics_params *params) {
    CLEAR(params, rows, forward);
    cattn_clear_attention(&params->forward);
}

void cattn_clear_choice(struct cattn_choice_params *params) {
    CLEAR(params, weights, forward);
    cattn_clear_attention(&params->forward);
}

void cattn_clear_softmax(struct cattn_softmax_params *params) { CLEAR(params, ranges.offsets, batch_shape); }

void cattn_clear_softmax_backward(struct cattn_softmax_backward_params *params) { CLEAR(params, grad, batch_shape); }

void cattn_clear_dropout(struct cattn_dropout_params *params) { CLEAR(params, x, batch_shape); }

void cattn_clear_rope(struct cattn_rope_params *params) { CLEAR(params, x, batch_shape); }

void cattn_clear_norm(struct cattn_norm_params *params) { CLEAR(params, x, batch_shape); }

void cattn_clear_norm_backward(struct cattn_norm_backward_params *params) { CLEAR(params, grad, batch_shape); }

void cattn_clear_activation(struct cattn_activation_params *params) { CLEAR(params, x, batch_shape); }

void cattn_clear_linear_attention(struct cattn_linear_attention_params *params) { CLEAR(params, query, batch_shape); }

void cattn_clear_linear_attention_backward(struct cattn_linear_attention_backward_params *params) {
    CLEAR(params, grad_out, forward);
    cattn_clear_linear_attention(&params->forward);
}

void cattn_clear_conv(struct cattn_conv_params *params) { CLEAR(params, x, batch_shape); }

void cattn_clear_product(struct cattn_product_params *params) { clear(params, sizeof *params, sizeof *params); }

/* ---- the contract; release builds keep the static assertions ---- */

/* cattn_clear_... walk from the first tensor to the member after the last one. */
#define WHOLE_TENSORS(type, first, end)                                                                                \
    _Static_assert((offsetof(struct type, end) - offsetof(struct type, first)) % sizeof(struct cattn_tensor) == 0,     \
                   #type " has no gap between its tensors")
WHOLE_TENSORS(cattn_attention_params, ranges.offsets, batch_shape);
WHOLE_TENSORS(cattn_backward_params, grad_out, forward);
WHOLE_TENSORS(cattn_jvp_params, tangents.query, forward);
WHOLE_TENSORS(cattn_statistics_params, rows, forward);
WHOLE_TENSORS(cattn_choice_params, weights, forward);
WHOLE_TENSORS(cattn_softmax_params, ranges.offsets, batch_shape);
WHOLE_TENSORS(cattn_softmax_backward_params, grad, batch_shape);
WHOLE_TENSORS(cattn_dropout_params, x, batch_shape);
WHOLE_TENSORS(cattn_rope_params, x, batch_shape);
WHOLE_TENSORS(cattn_norm_params, x, batch_shape);
WHOLE_TENSORS(cattn_norm_backward_params, grad, batch_shape);
WHOLE_TENSORS(cattn_activation_params, x, batch_shape);
WHOLE_TENSORS(cattn_linear_attention_params, query, batch_shape);
WHOLE_TENSORS(cattn_linear_attention_backward_params, grad_out, forward);

WHOLE_TENSORS(cattn_conv_params, x, batch_shape);

#ifndef NDEBUG

/* Batch entries whose lengths and offsets are looked at: a broadcast batch may be of any size. */
#define MOST_ENTRIES 1000

/* Every size is >= 0, and `count` is their product. */
static void check_batch(int n_batch_dims, const int64_t *batch_shape, int64_t count) {
    uint64_t product = 1; /* unsigned: beside a size of 0 the others may be so large that their product wraps */
    assert(0 <= n_batch_dims && n_batch_dims <= CATTN_MAX_BATCH_DIMS);
    for (int d = 0; d < n_batch_dims; d++) {
        assert(batch_shape[d] >= 0);
        product *= (uint64_t)batch_shape[d];
    }
    assert(product == (uint64_t)count);
}

static void check_type(enum cattn_dtype dtype, enum cattn_storage storage) {
    assert(dtype == CATTN_F32 || dtype == CATTN_F64);
    assert(storage == CATTN_STORED_PLAIN || dtype == CATTN_F32);
    assert(CATTN_STORED_PLAIN <= storage && storage <= CATTN_STORED_BF16);
}

/* An element's address is a multiple of its size. */
static void check_aligned(const struct cattn_tensor *tensor, size_t element) {
    assert((uintptr_t)tensor->data % element == 0);
}

static void check_present(const struct cattn_tensor *tensor, size_t element) {
    assert(tensor->data);
    check_aligned(tensor, element);
}

/* The sizes and types of independent rows. Beside columns of length 0, the number of rows means nothing. */
static void check_rows(enum cattn_dtype dtype, enum cattn_storage storage, int n_batch_dims, const int64_t *batch_shape,
                       int64_t n_rows, int64_t n_cols) {
    check_type(dtype, storage);
    assert(n_cols >= 0);
    if (n_cols > 0)
        check_batch(n_batch_dims, batch_shape, n_rows);
}

static void check_number(const struct cattn_tensor *numbers, int64_t common, int n_batch_dims,
                         const int64_t *batch_shape, int64_t count, int64_t least, int64_t most) {
    check_aligned(numbers, sizeof(int64_t));
    for (int64_t index = 0; index < count && index < MOST_ENTRIES; index++) {
        const int64_t number = cattn_batch_number(numbers, common, n_batch_dims, batch_shape, index);
        assert(least <= number && number <= most);
        if (!numbers->data)
            return;
    }
}

static void check_ranges(const struct cattn_ranges *r, int n_batch_dims, const int64_t *batch_shape, int64_t count,
                         int64_t seqlen_q, int64_t seqlen_k) {
    assert(r->left >= 0 && r->right >= 0);
    if (!r->lower_right)
        check_number(&r->offsets, r->offset, n_batch_dims, batch_shape, count, -CATTN_MAX_OFFSET, CATTN_MAX_OFFSET);
    assert(!r->all_visible || r->seqlen_k == seqlen_k);
    if (r->all_visible)
        return;
    check_number(&r->query_lengths, r->query_length, n_batch_dims, batch_shape, count, 0, seqlen_q);
    check_number(&r->key_lengths, r->key_length, n_batch_dims, batch_shape, count, 0, seqlen_k);
    check_number(&r->first_keys, r->first_key, n_batch_dims, batch_shape, count, 0, seqlen_k);
}

static void check_dropout_spec(const struct cattn_dropout_spec *spec) {
    if (!spec->enabled)
        return;
    assert(spec->threshold <= (uint64_t)1 << 32);
    assert(0 <= spec->keep_probability && spec->keep_probability <= 1 && spec->keep_scale >= 0);
    assert(!spec->torch || spec->keep_probability > 0); /* PyTorch draws nothing where all is dropped */
}

static void check_keys_or_values(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                                 const struct cattn_tensor *scale, enum cattn_storage quantized) {
    assert(!quantized || (cattn_is_quantized(quantized) && p->dtype == CATTN_F32 && p->storage == CATTN_STORED_PLAIN));
    assert(quantized <= CATTN_STORED_F8);
    check_aligned(tensor, cattn_stored_size(p->dtype, quantized ? quantized : p->storage));
    if (quantized && tensor->data)
        check_present(scale, sizeof(float));
}

void cattn_check_attention(const struct cattn_attention_params *p) {
    const size_t element = cattn_element_size(p->dtype), stored = cattn_stored_size(p->dtype, p->storage);
    check_type(p->dtype, p->storage);
    check_batch(p->n_batch_dims, p->batch_shape, p->n_batch);
    assert(p->num_heads >= 0 && p->group_size >= 0 && (p->group_size == 0 || p->num_heads % p->group_size == 0));
    assert(p->seqlen_q >= 0 && p->seqlen_k >= 0 && p->head_dim >= 0 && p->d_v >= 0);
    assert(cattn_attention_counts_fit(p));
    assert(CATTN_PATH_AUTO <= p->path && p->path <= CATTN_PATH_TINY && cattn_attention_path_fits(p));
    assert(isfinite(p->score_options.scale) && p->score_options.softcap >= 0);
    check_ranges(&p->ranges, p->n_batch_dims, p->batch_shape, p->n_batch, p->seqlen_q, p->seqlen_k);
    check_present(&p->query, stored);
    check_keys_or_values(p, &p->key, &p->key_scale, p->quantized_key);
    assert(p->key.data);
    check_keys_or_values(p, &p->value, &p->value_scale, p->quantized_value);
    assert(p->value.data || (p->d_v == 0 && !p->out.data));
    assert(!p->block_mask.data || (p->block_size >= 1 && !p->query_starts.data));
    assert(0 <= p->n_bias && p->n_bias <= CATTN_MAX_BIAS);
    for (int b = 0; b < p->n_bias; b++)
        check_present(&p->bias[b], element);
    assert(!p->query_starts.data || p->key_starts.data);
    assert(!p->query_starts.data || !p->dropout.torch);
    check_aligned(&p->slopes, element);
    check_aligned(&p->sinks, element);
    check_aligned(&p->gate, stored);
    assert(!p->gate.data || p->out.data);
    check_dropout_spec(&p->dropout);
    check_aligned(&p->key_indices, sizeof(int64_t));
    assert(!p->key_indices.data || (p->n_indices >= 0 && !p->query_starts.data));
    assert(!p->key_indices.data || (!p->slopes.data && !p->dropout.enabled && !p->dropout_mask.data));
    assert(!p->key_list || (p->n_batch == 1 && p->num_heads == p->group_size));
    check_aligned(&p->out, stored);
    check_aligned(&p->weights, stored);
    assert(!p->store_scores || p->weights.data);
    check_aligned(&p->lse, p->double_lse ? sizeof(double) : element);
}

/* A gradient of `cols` columns: it has the dtype of the computation and unit column strides. */
static void check_gradient(const struct cattn_tensor *tensor, size_t element, int64_t cols) {
    check_present(tensor, element);
    assert(tensor->col == 1 || cols <= 1); /* NumPy gives an axis of one element any stride */
}

/* The tangents and their results; lse_present: the tangent of the lse must be there. */
static void check_tangents(const struct cattn_attention_params *p, const struct cattn_tangents *t, bool lse_present) {
    const size_t element = cattn_element_size(p->dtype), stored = cattn_stored_size(p->dtype, p->storage);
    assert(!p->quantized_key && !p->quantized_value && !p->key_indices.data && !p->query_starts.data);
    assert(!p->gate.data && !p->dropout.torch && p->out.data && p->lse.data);
    check_aligned(&t->query, stored);
    check_aligned(&t->key, stored);
    check_aligned(&t->value, stored);
    check_aligned(&t->bias, element);
    check_aligned(&t->sinks, element);
    check_present(&t->out, stored);
    check_aligned(&t->lse, element);
    assert(!t->bias.data || p->n_bias > 0);
    assert(!t->sinks.data || p->sinks.data);
    assert(t->lse.data || !lse_present);
}

void cattn_check_jvp(const struct cattn_jvp_params *params) {
    cattn_check_attention(&params->forward);
    check_tangents(&params->forward, &params->tangents, false);
}

void cattn_check_backward(const struct cattn_backward_params *params) {
    const struct cattn_attention_params *p = &params->forward;
    const size_t element = cattn_element_size(p->dtype);
    cattn_check_attention(p);
    if (params->plain_out)
        check_aligned(&p->out, element);
    assert(p->out.data && p->lse.data && !p->weights.data && !p->dropout_mask.data);
    assert(!p->query_starts.data || !params->grad_bias.data);
    check_present(&params->grad_out, cattn_stored_size(p->dtype, p->storage));
    if (params->of_tangents)
        check_tangents(p, &params->tangents, true);
    check_aligned(&params->grad_lse, sizeof(double));
    if (p->n_batch * p->num_heads * p->seqlen_q * p->seqlen_k == 0)
        return; /* strides of empty arrays mean nothing */
    check_gradient(&params->grad_query, element, p->head_dim);
    check_gradient(&params->grad_key, element, p->head_dim);
    check_gradient(&params->grad_value, element, p->d_v);
    if (params->grad_bias.data)
        check_gradient(&params->grad_bias, element, params->bias_sum == CATTN_BIAS_SUM_COLS ? 1 : p->seqlen_k);
    assert(!params->grad_bias.data || p->n_bias > 0);
    assert(!params->grad_sinks.data || p->sinks.data);
    assert(!params->grad_gate.data == !p->gate.data);
    if (p->gate.data)
        check_gradient(&params->grad_gate, element, p->d_v);
}

/* A result of a statistic, whose last axis has n elements. */
static void check_statistic(const struct cattn_tensor *tensor, size_t element, int64_t stride, int64_t n) {
    check_aligned(tensor, element);
    assert(!tensor->data || stride == 1 || n <= 1);
}

void cattn_check_statistics(const struct cattn_statistics_params *params) {
    const struct cattn_attention_params *p = &params->forward;
    const size_t element = cattn_element_size(p->dtype);
    cattn_check_attention(p);
    assert(p->lse.data && p->double_lse && p->d_v == 0 && !p->out.data && !p->weights.data);
    assert(!p->dropout.enabled && params->observation_window >= 0 && params->top_k >= 0);
    assert(params->top_k == 0 || (params->top_keys.data && params->top_weights.data));
    if (p->n_batch * p->num_heads * p->seqlen_q * p->seqlen_k == 0)
        return; /* strides of empty arrays mean nothing */
    for (int i = 0; i < CATTN_N_ROW_STATISTICS; i++)
        check_statistic(&params->rows[i], element, params->rows[i].row, p->seqlen_q);
    check_statistic(&params->top_weights, element, params->top_weights.col, params->top_k);
    check_statistic(&params->top_keys, sizeof(int64_t), params->top_keys.col, params->top_k);
    check_statistic(&params->received, element, params->received.col, p->seqlen_k);
    check_statistic(&params->received_max, element, params->received_max.col, p->seqlen_k);
}

void cattn_check_choice(const struct cattn_choice_params *params) {
    const struct cattn_attention_params *p = &params->forward;
    const size_t element = cattn_element_size(p->dtype);
    cattn_check_attention(p);
    assert(p->d_v == 0 && !p->out.data && !p->weights.data && !p->lse.data && !p->dropout.enabled);
    assert(!p->slopes.data && !p->sinks.data && !p->block_mask.data && !p->key_indices.data && !p->query_starts.data);
    assert(p->seqlen_k <= INT32_MAX && params->count >= 1 && params->block_size >= 1 && params->n_columns >= 0);
    assert(p->num_heads > 0 && params->first >= 0 && params->last >= 0);
    check_aligned(&params->weights, element);
    check_present(&params->indices, sizeof(int32_t));
    check_aligned(&params->scores, element);
}

void cattn_check_softmax(const struct cattn_softmax_params *p) {
    const size_t stored = cattn_stored_size(p->dtype, p->storage);
    check_rows(p->dtype, p->storage, p->n_batch_dims, p->batch_shape, p->n_rows, p->n_cols);
    assert(p->method == CATTN_SOFTMAX_PLAIN || p->method == CATTN_SOFTMAX_RENORMALIZE);
    assert(isfinite(p->scale));
    check_present(&p->x, stored);
    check_present(&p->out, stored);
    if (!p->is_causal || p->n_cols == 0)
        return;
    assert(p->n_batch_dims > 0);
    check_ranges(&p->ranges, p->n_batch_dims, p->batch_shape, p->n_rows, p->batch_shape[p->n_batch_dims - 1],
                 p->n_cols);
}

void cattn_check_softmax_backward(const struct cattn_softmax_backward_params *p) {
    const size_t element = cattn_element_size(p->dtype);
    check_rows(p->dtype, CATTN_STORED_PLAIN, p->n_batch_dims, p->batch_shape, p->n_rows, p->n_cols);
    assert(isfinite(p->scale));
    check_present(&p->grad, element);
    check_present(&p->weights, element);
    check_present(&p->out, element);
}

void cattn_check_dropout(const struct cattn_dropout_params *p) {
    const size_t stored = cattn_stored_size(p->dtype, p->storage);
    check_rows(p->dtype, p->storage, p->n_batch_dims, p->batch_shape, p->n_rows, p->n_cols);
    check_dropout_spec(&p->dropout);
    check_present(&p->x, stored);
    check_present(&p->out, stored);
}

static void check_scaling(const struct cattn_rope_params *p) {
    const struct cattn_rope_scaling *s = &p->scaling;
    assert(CATTN_ROPE_DEFAULT <= s->type && s->type <= CATTN_ROPE_LLAMA3);
    assert(s->type == CATTN_ROPE_DEFAULT || s->factor >= 1);
    assert(s->type <= CATTN_ROPE_LINEAR || s->original_length > 0);
    assert(s->type != CATTN_ROPE_DYNAMIC || p->rotary_dim >= 4);
    assert(s->type != CATTN_ROPE_LLAMA3 || (0 < s->low_freq_factor && s->low_freq_factor < s->high_freq_factor));
    if (s->type == CATTN_ROPE_YARN)
        assert(p->theta > 1 && s->beta_fast > 0 && s->beta_slow > 0 && s->attention_factor >= 0);
}

void cattn_check_rope(const struct cattn_rope_params *p) {
    const size_t stored = cattn_stored_size(p->dtype, p->storage);
    check_type(p->dtype, p->storage);
    if (p->n_batch > 0)
        check_batch(p->n_batch_dims, p->batch_shape, p->n_batch);
    assert(p->seqlen >= 0 && 0 <= p->rotary_dim && p->rotary_dim <= p->n_cols && p->rotary_dim % 2 == 0);
    assert(p->theta >= 1 && isfinite(p->theta));
    check_scaling(p);
    check_present(&p->x, stored);
    check_present(&p->out, stored);
    check_aligned(&p->positions, sizeof(double));
}

void cattn_check_norm(const struct cattn_norm_params *p) {
    const size_t stored = cattn_stored_size(p->dtype, p->storage);
    check_rows(p->dtype, p->storage, p->n_batch_dims, p->batch_shape, p->n_rows, p->n_cols);
    assert(p->eps >= 0 && isfinite(p->eps));
    check_present(&p->x, stored);
    check_present(&p->out, stored);
    check_aligned(&p->weight, cattn_element_size(p->dtype));
    check_aligned(&p->bias, cattn_element_size(p->dtype));
}

void cattn_check_norm_backward(const struct cattn_norm_backward_params *p) {
    const size_t element = cattn_element_size(p->dtype);
    check_rows(p->dtype, CATTN_STORED_PLAIN, p->n_batch_dims, p->batch_shape, p->n_rows, p->n_cols);
    assert(p->eps >= 0 && isfinite(p->eps));
    check_present(&p->grad, element);
    check_present(&p->x, element);
    check_present(&p->grad_x, element);
    check_aligned(&p->weight, element);
    check_aligned(&p->grad_weight, element);
    check_aligned(&p->grad_bias, element);
    assert(p->weight.data || !p->grad_weight.data);
}

void cattn_check_activation(const struct cattn_activation_params *p) {
    const size_t stored = cattn_stored_size(p->dtype, p->storage);
    check_rows(p->dtype, p->storage, p->n_batch_dims, p->batch_shape, p->n_rows, p->n_cols);
    assert(CATTN_GELU <= p->which && p->which <= CATTN_SILU);
    check_present(&p->x, stored);
    check_present(&p->out, stored);
    check_aligned(&p->grad, stored);
}

static void check_operand(const struct cattn_operand *operand, enum cattn_dtype dtype) {
    assert(CATTN_STORED_PLAIN <= operand->storage && operand->storage <= CATTN_STORED_F8);
    assert(operand->storage == CATTN_STORED_PLAIN || dtype == CATTN_F32);
    assert((uintptr_t)operand->data % cattn_stored_size(dtype, operand->storage) == 0);
    assert(!cattn_is_quantized(operand->storage) || operand->scale);
}

void cattn_check_product(const struct cattn_product_params *p) {
    assert(p->dtype == CATTN_F32 || (p->dtype == CATTN_F64 && !p->bf16_products));
    assert(p->n_batch >= 0 && p->n_a >= 0 && p->n_b >= 0 && p->depth >= 0);
    assert(p->out_storage == CATTN_STORED_PLAIN || p->dtype == CATTN_F32);
    assert(CATTN_STORED_PLAIN <= p->out_storage && p->out_storage <= CATTN_STORED_BF16);
    check_operand(&p->a, p->dtype);
    check_operand(&p->b, p->dtype);
    assert(p->out && (uintptr_t)p->out % cattn_stored_size(p->dtype, p->out_storage) == 0);
    assert((uintptr_t)p->bias % cattn_element_size(p->dtype) == 0);
    assert(!p->bias || p->bias_a == 0 || p->bias_b == 0);
}

void cattn_check_linear_attention(const struct cattn_linear_attention_params *p) {
    const size_t element = cattn_element_size(p->dtype), stored = cattn_stored_size(p->dtype, p->storage);
    check_type(p->dtype, p->storage);
    check_batch(p->n_batch_dims, p->batch_shape, p->n_batch);
    assert(p->n_states >= 0 && p->seqlen >= 0 && p->d_k >= 0 && p->d_v >= 0 && isfinite(p->scale));
    check_number(&p->lengths, p->length, p->n_batch_dims, p->batch_shape, p->n_batch, 0, p->seqlen);
    check_present(&p->query, stored);
    check_present(&p->key, stored);
    check_present(&p->value, stored);
    check_aligned(&p->out, stored);
    check_aligned(&p->decay, element);
    check_aligned(&p->beta, element);
    check_aligned(&p->state, element);
    check_aligned(&p->state_out, element);
    check_aligned(&p->lengths, sizeof(int64_t));
    assert(!p->decay_by_row || p->decay.data);
    assert(!p->edges || (!p->lengths.data && p->n_batch_dims == 1));
    if (p->n_states == 0)
        return;
    assert(p->query_heads > 0 && p->key_heads > 0 && p->value_heads > 0);
    assert(p->n_states % p->key_heads == 0 && p->n_states % p->value_heads == 0);
    assert(p->query_heads % p->n_states == 0 || p->n_states % p->query_heads == 0);
}

void cattn_check_linear_attention_backward(const struct cattn_linear_attention_backward_params *params) {
    const struct cattn_linear_attention_params *p = &params->forward;
    const size_t element = cattn_element_size(p->dtype);
    cattn_check_linear_attention(p);
    check_present(&params->grad_out, cattn_stored_size(p->dtype, p->storage));
    check_aligned(&params->grad_final, element);
    check_aligned(&params->grad_state, element);
    assert(!params->grad_decay.data == !p->decay.data && !params->grad_beta.data == !p->beta.data);
    if (p->n_batch * p->n_states * p->seqlen * p->d_k * p->d_v == 0)
        return; /* strides of empty arrays mean nothing */
    check_gradient(&params->grad_query, element, p->d_k);
    check_gradient(&params->grad_key, element, p->d_k);
    check_gradient(&params->grad_value, element, p->d_v);
    if (p->decay_by_row)
        check_gradient(&params->grad_decay, element, p->d_k);
}

void cattn_check_conv(const struct cattn_conv_params *p) {
    const size_t element = cattn_element_size(p->dtype), stored = cattn_stored_size(p->dtype, p->storage);
    check_type(p->dtype, p->storage);
    check_batch(p->n_batch_dims, p->batch_shape, p->n_batch);
    assert(p->seqlen >= 0 && p->n_channels >= 0 && p->width >= 1);
    check_number(&p->lengths, p->length, p->n_batch_dims, p->batch_shape, p->n_batch, 0, p->seqlen);
    check_present(&p->x, stored);
    check_present(&p->out, stored);
    check_present(&p->weight, element);
    check_aligned(&p->bias, element);
    check_aligned(&p->state, stored);
    check_aligned(&p->state_out, stored);
    check_aligned(&p->lengths, sizeof(int64_t));
    assert(!p->edges || (!p->lengths.data && p->n_batch_dims == 1));
}

void cattn_check_mask(const struct cattn_mask_params *p) {
    assert(p->seqlen_q >= 0 && p->seqlen_k >= 0 && p->mask);
    assert(!p->ranges.offsets.data && !p->ranges.query_lengths.data && !p->ranges.key_lengths.data);
    assert(!p->ranges.first_keys.data && p->ranges.first_key == 0); /* ranges count from the first valid key */
    check_ranges(&p->ranges, 0, NULL, 1, p->seqlen_q, p->seqlen_k);
}

#endif
