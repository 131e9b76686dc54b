/* attention_rows.c -- points a struct cattn_rows at its queries, keys, masks and outputs; see attention_rows.h. */
#include "attention_rows.h"

#include "dropout.h"
#include "plan.h"

void *cattn_tensor_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset) {
    return (char *)tensor->data + offset * (int64_t)cattn_element_size(p->dtype);
}

void *cattn_stored_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset) {
    return (char *)tensor->data + offset * (int64_t)cattn_stored_size(p->dtype, p->storage);
}

int64_t cattn_lead_start(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t index) {
    return tensor->data ? cattn_lead_offset(tensor, p->n_lead, p->lead_shape, index) : 0;
}

struct cattn_lead cattn_lead(const struct cattn_attention_params *p, int64_t index) {
    struct cattn_lead lead = {
        .index = index,
        .sight = cattn_sight(&p->ranges, p->n_lead, p->lead_shape, index),
        .query = cattn_lead_start(p, &p->query, index),
        .key = cattn_lead_start(p, &p->key, index),
        .value = cattn_lead_start(p, &p->value, index),
        .attn_mask = cattn_lead_start(p, &p->attn_mask, index),
        .slopes = cattn_lead_start(p, &p->slopes, index),
        .sinks = cattn_lead_start(p, &p->sinks, index),
        .out = cattn_lead_start(p, &p->out, index),
        .weights = cattn_lead_start(p, &p->weights, index),
        .lse = cattn_lead_start(p, &p->lse, index),
    };
    for (int b = 0; b < p->n_bias; b++)
        lead.bias[b] = cattn_lead_start(p, &p->bias[b], index);
    if (p->query_starts.data) {
        const int64_t query = cattn_lead_number(&p->query_starts, 0, p->n_lead, p->lead_shape, index);
        const int64_t key = cattn_lead_number(&p->key_starts, 0, p->n_lead, p->lead_shape, index);
        lead.query += query * p->query.row;
        lead.out += query * p->out.row;
        lead.lse += p->lse.data ? query * p->lse.row : 0;
        lead.key += key * p->key.row;
        lead.value += key * p->value.row;
    }
    return lead;
}

void cattn_rows_common(struct cattn_rows *rows, const struct cattn_attention_params *p, const struct cattn_lead *lead,
                       int64_t kv_head) {
    const struct cattn_dropout_spec *dropout = &p->dropout;
    rows->fully_ranged = !p->attn_mask.data && p->n_bias == 0;
    rows->head_dim = p->head_dim;
    rows->d_v = p->d_v;
    rows->acc_cols = cattn_plan_acc_cols(p);
    rows->seqlen_k = p->seqlen_k;
    rows->n_keys = lead->sight.n_keys;
    rows->scale = p->scale;
    rows->keep_scale = dropout->enabled ? dropout->keep_scale : 1;
    rows->softcap = p->softcap;
    rows->has_slopes = p->slopes.data;
    rows->has_sinks = p->sinks.data;
    rows->raw_weights = p->raw_weights;
    rows->storage = p->storage;
    rows->key = cattn_stored_at(p, &p->key, lead->key + kv_head * p->key.head);
    rows->key_row = p->key.row;
    rows->key_col = p->key.col;
    rows->value = NULL;
    if (p->value.data) {
        rows->value = cattn_stored_at(p, &p->value, lead->value + kv_head * p->value.head);
        rows->value_row = p->value.row;
        rows->value_col = p->value.col;
    }
    rows->query_col = p->query.col;
    rows->keep_col = p->attn_mask.data ? p->attn_mask.col : 0;
    rows->out_col = p->out.data ? p->out.col : 0;
    rows->weights_out_col = p->weights.data ? p->weights.col : 0;
    rows->weights_col = p->storage == CATTN_STORED_PLAIN ? rows->weights_out_col : 1;
    rows->n_bias = p->n_bias;
    for (int b = 0; b < p->n_bias; b++)
        rows->bias_col[b] = p->bias[b].col;
    rows->drop = cattn_drop(dropout, lead->index);
}

/* A number of each head, in the call's own dtype. */
static double number_at(const struct cattn_attention_params *p, const struct cattn_tensor *numbers, int64_t offset) {
    const void *number = cattn_tensor_at(p, numbers, offset);
    return p->dtype == CATTN_F32 ? (double)*(const float *)number : *(const double *)number;
}

void cattn_rows_row(struct cattn_rows *rows, const struct cattn_attention_params *p, const struct cattn_lead *lead,
                    int r, int64_t head, int64_t i) {
    const struct cattn_range visible = cattn_visible_keys(&lead->sight, i);
    rows->lo[r] = visible.lo;
    rows->hi[r] = visible.hi;
    rows->query[r] = cattn_stored_at(p, &p->query, lead->query + head * p->query.head + i * p->query.row);
    rows->keep[r] = NULL;
    if (p->attn_mask.data)
        rows->keep[r] =
            (const uint8_t *)p->attn_mask.data + lead->attn_mask + head * p->attn_mask.head + i * p->attn_mask.row;
    for (int b = 0; b < p->n_bias; b++)
        rows->bias[b][r] = cattn_tensor_at(p, &p->bias[b], lead->bias[b] + head * p->bias[b].head + i * p->bias[b].row);
    rows->position[r] = i + lead->sight.offset;
    if (p->slopes.data)
        rows->slope[r] = number_at(p, &p->slopes, lead->slopes + head * p->slopes.head);
    if (p->sinks.data)
        rows->sink[r] = number_at(p, &p->sinks, lead->sinks + head * p->sinks.head);
    rows->drop_position[r] = (uint32_t)rows->position[r];
    rows->drop_head[r] = (uint32_t)head;
    rows->out[r] = rows->weights[r] = rows->lse[r] = NULL;
    if (p->query_starts.data && i >= lead->sight.n_queries) { /* where another sequence lies: not ours to touch */
        rows->query[r] = p->query.data;
        return;
    }
    if (p->out.data)
        rows->out[r] = cattn_stored_at(p, &p->out, lead->out + head * p->out.head + i * p->out.row);
    if (p->weights.data) {
        const int64_t start = lead->weights + head * p->weights.head + i * p->weights.row;
        rows->weights_out[r] = cattn_stored_at(p, &p->weights, start);
        rows->weights[r] =
            p->storage == CATTN_STORED_PLAIN ? rows->weights_out[r] : (float *)rows->weight_rows + r * p->seqlen_k;
    }
    if (p->lse.data)
        rows->lse[r] = cattn_tensor_at(p, &p->lse, lead->lse + head * p->lse.head + i * p->lse.row);
}

struct cattn_range cattn_rows_keys(const struct cattn_rows *rows) {
    struct cattn_range all = {INT64_MAX, 0};
    for (int r = 0; r < rows->n_rows; r++)
        if (rows->lo[r] < rows->hi[r]) {
            all.lo = rows->lo[r] < all.lo ? rows->lo[r] : all.lo;
            all.hi = rows->hi[r] > all.hi ? rows->hi[r] : all.hi;
        }
    return all.lo < all.hi ? all : (struct cattn_range){0, 0};
}
