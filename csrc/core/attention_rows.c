/* attention_rows.c -- points a struct cattn_rows at its queries, keys, masks and outputs; see attention_rows.h. */
#include "attention_rows.h"

#include "dropout.h"
#include "dropout_stream.h"
#include "plan.h"
#include "strides.h"

void *cattn_tensor_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset) {
    return (char *)tensor->data + offset * (int64_t)cattn_element_size(p->dtype);
}

void *cattn_stored_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset) {
    return (char *)tensor->data + offset * (int64_t)cattn_stored_size(p->dtype, p->storage);
}

int64_t cattn_batch_start(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t index) {
    return tensor->data && index ? cattn_batch_offset(tensor, p->n_batch_dims, p->batch_shape, index) : 0;
}

/* Written in place: as a value that is returned it would be built elsewhere and copied, which small calls would feel.
 */
void cattn_batch(const struct cattn_attention_params *p, int64_t index, struct cattn_batch *batch) {
    batch->index = index;
    cattn_batch_range(&p->ranges, p->n_batch_dims, p->batch_shape, index, &batch->batch_range);
    batch->query = cattn_batch_start(p, &p->query, index);
    batch->key = cattn_batch_start(p, &p->key, index);
    batch->value = cattn_batch_start(p, &p->value, index);
    batch->attn_mask = cattn_batch_start(p, &p->attn_mask, index);
    batch->slopes = cattn_batch_start(p, &p->slopes, index);
    batch->sinks = cattn_batch_start(p, &p->sinks, index);
    batch->out = cattn_batch_start(p, &p->out, index);
    batch->weights = cattn_batch_start(p, &p->weights, index);
    batch->lse = cattn_batch_start(p, &p->lse, index);
    for (int b = 0; b < p->n_bias; b++)
        batch->bias[b] = cattn_batch_start(p, &p->bias[b], index);
    if (p->query_starts.data) {
        const int64_t query = cattn_batch_number(&p->query_starts, 0, p->n_batch_dims, p->batch_shape, index);
        const int64_t key = cattn_batch_number(&p->key_starts, 0, p->n_batch_dims, p->batch_shape, index);
        batch->query += query * p->query.row;
        batch->out += query * p->out.row;
        batch->lse += p->lse.data ? query * p->lse.row : 0;
        batch->key += key * p->key.row;
        batch->value += key * p->value.row;
    }
}

void cattn_rows_common(struct cattn_rows *rows, const struct cattn_attention_params *p, const struct cattn_batch *batch,
                       int64_t kv_head) {
    const struct cattn_dropout_spec *dropout = &p->dropout;
    rows->fully_ranged = !p->attn_mask.data && p->n_bias == 0;
    rows->head_dim = p->head_dim;
    rows->d_v = p->d_v;
    rows->acc_cols = cattn_plan_acc_cols(p);
    rows->seqlen_k = p->seqlen_k;
    rows->n_keys = batch->batch_range.n_keys;
    rows->scale = p->scale;
    rows->keep_scale = dropout->enabled ? dropout->keep_scale : 1;
    rows->softcap = p->softcap;
    rows->has_slopes = p->slopes.data;
    rows->has_sinks = p->sinks.data;
    rows->has_mask = p->attn_mask.data;
    rows->has_out = p->out.data;
    rows->has_lse = p->lse.data;
    rows->double_lse = p->double_lse;
    rows->has_weights = p->weights.data;
    rows->store_scores = p->store_scores;
    rows->storage = p->storage;
    rows->key = cattn_stored_at(p, &p->key, batch->key + kv_head * p->key.head);
    rows->key_row = p->key.row;
    rows->key_col = p->key.col;
    rows->value = NULL;
    if (p->value.data) {
        rows->value = cattn_stored_at(p, &p->value, batch->value + kv_head * p->value.head);
        rows->value_row = p->value.row;
        rows->value_col = p->value.col;
    }
    rows->query_col = p->query.col;
    rows->mask_col = p->attn_mask.data ? p->attn_mask.col : 0;
    rows->out_col = p->out.data ? p->out.col : 0;
    rows->weights_out_col = p->weights.data ? p->weights.col : 0;
    rows->weights_col = p->storage == CATTN_STORED_PLAIN ? rows->weights_out_col : 1;
    rows->n_bias = p->n_bias;
    for (int b = 0; b < p->n_bias; b++)
        rows->bias_col[b] = p->bias[b].col;
    cattn_drop(dropout, batch->index, &rows->drop);
}

/* A number of each head, in the call's own dtype. */
static double number_at(const struct cattn_attention_params *p, const struct cattn_tensor *numbers, int64_t offset) {
    const void *number = cattn_tensor_at(p, numbers, offset);
    return p->dtype == CATTN_F32 ? (double)*(const float *)number : *(const double *)number;
}

/* Points n rows at theirs of an output, the first of which is at `first`; behind those that are `ours`, at nothing. */
static void point_rows(void **rows, int n, int ours, char *first, int64_t bytes) {
    for (int k = 0; k < ours; k++)
        rows[k] = first + k * bytes;
    for (int k = ours; k < n; k++)
        rows[k] = NULL;
}

void cattn_rows_of_head(struct cattn_rows *rows, const struct cattn_attention_params *p,
                        const struct cattn_batch *batch, int r, int n, int64_t head, int64_t i) {
    const int64_t element = (int64_t)cattn_element_size(p->dtype);
    const int64_t stored = (int64_t)cattn_stored_size(p->dtype, p->storage);
    /* packed sequences: behind the last query lies another one's, not ours to touch */
    int ours = n;
    if (p->query_starts.data && i + n > batch->batch_range.n_queries)
        ours = i < batch->batch_range.n_queries ? (int)(batch->batch_range.n_queries - i) : 0;

    cattn_visible_ranges(&batch->batch_range, i, n, rows->lo + r, rows->hi + r);
    rows->ascending = n == rows->n_rows && i + n <= batch->batch_range.n_queries;
    for (int k = 0; k < n && p->slopes.data; k++)
        rows->position[r + k] = i + k + batch->batch_range.offset;
    for (int k = 0; k < n && p->dropout.enabled; k++) {
        rows->drop_position[r + k] = (uint32_t)(i + k + batch->batch_range.offset);
        rows->drop_head[r + k] = (uint32_t)head;
    }
    const char *query = cattn_stored_at(p, &p->query, batch->query + head * p->query.head + i * p->query.row);
    for (int k = 0; k < ours; k++)
        rows->query[r + k] = query + k * p->query.row * stored;
    for (int k = ours; k < n; k++)
        rows->query[r + k] = p->query.data;
    if (p->attn_mask.data) {
        const uint8_t *mask =
            (const uint8_t *)p->attn_mask.data + batch->attn_mask + head * p->attn_mask.head + i * p->attn_mask.row;
        for (int k = 0; k < n; k++)
            rows->mask[r + k] = mask + k * p->attn_mask.row;
    }
    for (int b = 0; b < p->n_bias; b++) {
        const struct cattn_tensor *tensor = &p->bias[b];
        const char *bias = cattn_tensor_at(p, tensor, batch->bias[b] + head * tensor->head + i * tensor->row);
        for (int k = 0; k < n; k++)
            rows->bias[b][r + k] = bias + k * tensor->row * element;
    }
    for (int k = 0; k < n && p->slopes.data; k++)
        rows->slope[r + k] = number_at(p, &p->slopes, batch->slopes + head * p->slopes.head);
    for (int k = 0; k < n && p->sinks.data; k++)
        rows->sink[r + k] = number_at(p, &p->sinks, batch->sinks + head * p->sinks.head);

    if (p->out.data)
        point_rows(rows->out + r, n, ours,
                   cattn_stored_at(p, &p->out, batch->out + head * p->out.head + i * p->out.row), p->out.row * stored);
    if (p->lse.data) {
        const int64_t bytes = p->double_lse ? (int64_t)sizeof(double) : element;
        const int64_t first = batch->lse + head * p->lse.head + i * p->lse.row;
        point_rows(rows->lse + r, n, ours, (char *)p->lse.data + first * bytes, p->lse.row * bytes);
    }
    if (p->weights.data) {
        char *weights = cattn_stored_at(p, &p->weights, batch->weights + head * p->weights.head + i * p->weights.row);
        float *scratch = rows->weight_rows;
        for (int k = 0; k < n; k++) {
            rows->weights_out[r + k] = weights + k * p->weights.row * stored;
            rows->weights[r + k] =
                p->storage == CATTN_STORED_PLAIN ? rows->weights_out[r + k] : scratch + (r + k) * p->seqlen_k;
        }
    }
}

void cattn_rows_drop_bits(struct cattn_rows *rows) {
    for (int r = 1; r < rows->n_rows && rows->drop_bits[0]; r++)
        rows->drop_bits[r] = rows->drop_bits[0] + (size_t)r * cattn_dropout_stream_row_bytes(rows->seqlen_k);
}

struct cattn_range cattn_rows_keys(const struct cattn_rows *rows) {
    struct cattn_range all = {INT64_MAX, 0};
    if (rows->ascending)
        all = (struct cattn_range){rows->lo[0], rows->hi[rows->n_rows - 1]};
    else
        for (int r = 0; r < rows->n_rows; r++)
            if (rows->lo[r] < rows->hi[r]) {
                all.lo = rows->lo[r] < all.lo ? rows->lo[r] : all.lo;
                all.hi = rows->hi[r] > all.hi ? rows->hi[r] : all.hi;
            }
    return all.lo < all.hi ? all : (struct cattn_range){0, 0};
}
