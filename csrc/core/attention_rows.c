/* attention_rows.c -- fills a struct cattn_rows with pointers to its queries, keys, masks, tangents and outputs. */
#include "attention.h"

#include "params.h"
#include "plan.h"
#include "random.h"

void *cattn_tensor_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset) {
    return (char *)tensor->data + offset * (int64_t)cattn_element_size(p->dtype);
}

void *cattn_stored_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset) {
    return (char *)tensor->data + offset * (int64_t)cattn_stored_size(p->dtype, p->storage);
}

int64_t cattn_batch_start(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t index) {
    return tensor->data && index ? cattn_batch_offset(tensor, p->n_batch_dims, p->batch_shape, index) : 0;
}

/* Moves the starts past the first n rows of keys and values. */
static void skip_keys(const struct cattn_attention_params *p, int64_t n, struct cattn_batch *batch) {
    batch->key += n * p->key.row;
    batch->value += p->value.data ? n * p->value.row : 0;
    batch->key_scale += cattn_is_quantized(p->quantized_key) ? n * p->key_scale.row : 0;
    batch->value_scale += cattn_is_quantized(p->quantized_value) && p->value.data ? n * p->value_scale.row : 0;
}

/* Moves the starts past the keys before the first valid one. The block mask stays, since its blocks are cut from the
 * array's key 0; and so do the weights, which are written before the first valid key, too. */
static void skip_padding(const struct cattn_attention_params *p, struct cattn_batch *batch) {
    const int64_t n = batch->batch_range.first_key;
    skip_keys(p, n, batch);
    batch->attn_mask += p->attn_mask.data ? n * p->attn_mask.col : 0;
    for (int b = 0; b < p->n_bias; b++)
        batch->bias[b] += n * p->bias[b].col;
}

/* Fills *batch in place: returning the struct would copy it, which is measurable in small calls. */
void cattn_batch_fill(const struct cattn_attention_params *p, int64_t index, struct cattn_batch *batch) {
    batch->index = index;
    cattn_batch_range(&p->ranges, p->n_batch_dims, p->batch_shape, index, &batch->batch_range);
    batch->query = cattn_batch_start(p, &p->query, index);
    batch->key = cattn_batch_start(p, &p->key, index);
    batch->value = cattn_batch_start(p, &p->value, index);
    batch->key_scale = cattn_batch_start(p, &p->key_scale, index);
    batch->value_scale = cattn_batch_start(p, &p->value_scale, index);
    batch->attn_mask = cattn_batch_start(p, &p->attn_mask, index);
    batch->block_mask = cattn_batch_start(p, &p->block_mask, index);
    batch->slopes = cattn_batch_start(p, &p->slopes, index);
    batch->sinks = cattn_batch_start(p, &p->sinks, index);
    batch->gate = cattn_batch_start(p, &p->gate, index);
    batch->out = cattn_batch_start(p, &p->out, index);
    batch->weights = cattn_batch_start(p, &p->weights, index);
    batch->lse = cattn_batch_start(p, &p->lse, index);
    for (int b = 0; b < p->n_bias; b++)
        batch->bias[b] = cattn_batch_start(p, &p->bias[b], index);
    if (p->query_starts.data) { /* packed sequences share one row axis */
        const int64_t query = cattn_batch_number(&p->query_starts, 0, p->n_batch_dims, p->batch_shape, index);
        const int64_t key = cattn_batch_number(&p->key_starts, 0, p->n_batch_dims, p->batch_shape, index);
        batch->query += query * p->query.row;
        batch->gate += p->gate.data ? query * p->gate.row : 0;
        batch->out += query * p->out.row;
        batch->lse += p->lse.data ? query * p->lse.row : 0;
        skip_keys(p, key, batch);
    }
    if (batch->batch_range.first_key > 0 && batch->batch_range.n_keys > 0)
        skip_padding(p, batch);
}

/* Flags are set from the tensors that are present: kernels test a flag, never a pointer. */
void cattn_call_shape_fill(const struct cattn_attention_params *p, struct cattn_call_shape *call) {
    call->head_dim = p->head_dim;
    call->d_v = p->d_v;
    call->acc_cols = cattn_plan_acc_cols(p);
    call->seqlen_k = p->seqlen_k;
    call->score_options = p->score_options;
    call->keep_scale = p->dropout.enabled ? p->dropout.keep_scale : 1;
    call->fully_ranged = !p->attn_mask.data && p->n_bias == 0;
    call->has_slopes = call->has_positions = p->slopes.data;
    call->has_sinks = p->sinks.data;
    call->has_gate = p->gate.data;
    call->has_mask = p->attn_mask.data;
    call->has_block_mask = p->block_mask.data;
    call->has_out = p->out.data;
    call->has_lse = p->lse.data;
    call->has_weights = p->weights.data;
    call->packed_keys = p->packed_keys;
    call->packed_block = false;
    call->double_lse = p->double_lse;
    call->store_scores = p->store_scores;
    call->storage = p->storage;
    call->n_bias = p->n_bias;
    _Static_assert(sizeof call->bias_col / sizeof *call->bias_col == CATTN_MAX_BIAS, "kernels.h has as many");
    for (int b = 0; b < p->n_bias; b++)
        call->bias_col[b] = p->bias[b].col;
    call->query_col = p->query.col;
    /* an absent tensor has uninitialised strides */
    call->mask_col = p->attn_mask.data ? p->attn_mask.col : 0;
    call->block_mask_col = p->block_mask.data ? p->block_mask.col : 0;
    call->block_size = p->block_size;
    call->gate_col = p->gate.data ? p->gate.col : 0;
    call->out_col = p->out.data ? p->out.col : 0;
    call->weights_out_col = p->weights.data ? p->weights.col : 0;
    /* halves: kernels write rows of scratch with unit stride, which `finish` narrows */
    call->weights_col = p->storage == CATTN_STORED_PLAIN ? call->weights_out_col : 1;
}

/* The keys or values of one head, from the offsets of the batch entry. An absent tensor has no `first`. Kernels read
 * the scale of a row without columns, too, and the array of scales may be as empty as the rows. */
static struct cattn_matrix matrix_of(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                                     int64_t n_cols, int64_t start, const struct cattn_tensor *scale,
                                     int64_t scale_start, enum cattn_storage quantized, int64_t kv_head) {
    static const float one = 1;
    struct cattn_matrix matrix = {.storage = quantized ? quantized : p->storage};
    if (!tensor->data)
        return matrix;
    const int64_t element = (int64_t)cattn_stored_size(p->dtype, matrix.storage);
    matrix.first = (const char *)tensor->data + (start + kv_head * tensor->head) * element;
    matrix.row = tensor->row;
    matrix.col = tensor->col;
    if (cattn_is_quantized(matrix.storage) && n_cols == 0) {
        matrix.scale = &one;
    } else if (cattn_is_quantized(matrix.storage)) {
        matrix.scale = (const float *)scale->data + scale_start + kv_head * scale->head;
        matrix.scale_row = scale->row;
        matrix.scale_col = scale->col;
    }
    return matrix;
}

void cattn_keys_of_head(const struct cattn_attention_params *p, const struct cattn_batch *batch, int64_t kv_head,
                        struct cattn_matrix *key, struct cattn_matrix *value) {
    *key = matrix_of(p, &p->key, p->head_dim, batch->key, &p->key_scale, batch->key_scale, p->quantized_key, kv_head);
    *value =
        matrix_of(p, &p->value, p->d_v, batch->value, &p->value_scale, batch->value_scale, p->quantized_value, kv_head);
}

void cattn_rows_of_batch(struct cattn_rows *rows, const struct cattn_attention_params *p,
                         const struct cattn_batch *batch, int64_t kv_head) {
    rows->first_key = batch->batch_range.first_key;
    rows->n_keys = batch->batch_range.n_keys;
    cattn_keys_of_head(p, batch, kv_head, &rows->key, &rows->value);
    cattn_drop_fill(&p->dropout, batch->index, &rows->drop);
    /* kernels draw for whole vectors of rows: the lanes after the last row must not be uninitialised */
    const int64_t n_lanes = p->dropout.enabled ? cattn_round_up(rows->n_rows, CATTN_PAD) : 0;
    for (int64_t r = rows->n_rows; r < n_lanes; r++)
        rows->per_row->drop_position[r] = rows->per_row->drop_head[r] = 0;
    if (rows->scratch.drop_bits)
        for (int r = 0; r < rows->n_rows; r++)
            rows->per_row->drop_bits[r] =
                rows->scratch.drop_bits + (cattn_size)r * cattn_dropout_stream_row_bytes(p->seqlen_k);
}

/* Reads the number of a head (slopes, sinks). */
static double number_at(const struct cattn_attention_params *p, const struct cattn_tensor *numbers, int64_t offset) {
    return cattn_number_at(p->dtype, cattn_tensor_at(p, numbers, offset), 0);
}

/* Sets n row pointers into an output, `bytes` apart from `first`. Rows past `valid` are NULL. */
static void point_rows(void **rows, int n, int valid, char *first, int64_t bytes) {
    for (int k = 0; k < valid; k++)
        rows[k] = first + k * bytes;
    for (int k = valid; k < n; k++)
        rows[k] = NULL;
}

void cattn_block_masks_of_head(struct cattn_per_row *per_row, const struct cattn_attention_params *p,
                               const struct cattn_batch *batch, int r, int n, int64_t head, int64_t i) {
    const uint8_t *mask = (const uint8_t *)p->block_mask.data + batch->block_mask + head * p->block_mask.head;
    for (int k = 0; k < n; k++)
        per_row->block_mask[r + k] = mask + (i + k) / p->block_size * p->block_mask.row;
}

void cattn_rows_of_head(struct cattn_rows *rows, const struct cattn_attention_params *p,
                        const struct cattn_batch *batch, int r, int n, int64_t head, int64_t i) {
    struct cattn_per_row *at = rows->per_row;
    const int64_t element = (int64_t)cattn_element_size(p->dtype);
    const int64_t stored = (int64_t)cattn_stored_size(p->dtype, p->storage);
    /* packed sequences: the next sequence follows the last query, and must not be read or written */
    int valid = n;
    if (p->query_starts.data && i + n > batch->batch_range.n_queries)
        valid = i < batch->batch_range.n_queries ? (int)(batch->batch_range.n_queries - i) : 0;

    /* a row past the end of its sequence gets an empty range, which would break the order of lo and hi */
    cattn_visible_ranges(&batch->batch_range, i, n, at->lo + r, at->hi + r);
    rows->ascending = n == rows->n_rows && i + n <= batch->batch_range.n_queries;
    /* positions count from the first valid key of the batch entry, so they include the offset of the queries */
    if (rows->call.has_positions)
        for (int k = 0; k < n; k++)
            at->position[r + k] = i + k + batch->batch_range.offset;
    if (p->slopes.data)
        for (int k = 0; k < n; k++)
            at->slope[r + k] = number_at(p, &p->slopes, batch->slopes + head * p->slopes.head);
    if (p->dropout.enabled)
        for (int k = 0; k < n; k++) {
            at->drop_position[r + k] = (uint32_t)(i + k + batch->batch_range.offset);
            at->drop_head[r + k] = (uint32_t)head;
        }
    /* addresses are in bytes from here on, because the element type is known at run time only */
    const char *query = cattn_stored_at(p, &p->query, batch->query + head * p->query.head + i * p->query.row);
    const void **queries = at->query + r; /* a local copy, or the compiler reloads at->query after each store */
    for (int k = 0; k < valid; k++)
        queries[k] = query + k * p->query.row * stored;
    for (int k = valid; k < n; k++)
        queries[k] = p->query.data; /* any row that may be read: its scores are all hidden */
    if (p->attn_mask.data) {
        const uint8_t *mask =
            (const uint8_t *)p->attn_mask.data + batch->attn_mask + head * p->attn_mask.head + i * p->attn_mask.row;
        for (int k = 0; k < n; k++)
            at->mask[r + k] = mask + k * p->attn_mask.row;
    }
    if (p->block_mask.data)
        cattn_block_masks_of_head(at, p, batch, r, n, head, i);
    for (int b = 0; b < p->n_bias; b++) {
        const struct cattn_tensor *tensor = &p->bias[b];
        const char *bias = cattn_tensor_at(p, tensor, batch->bias[b] + head * tensor->head + i * tensor->row);
        for (int k = 0; k < n; k++)
            at->bias[b][r + k] = bias + k * tensor->row * element;
    }
    if (p->sinks.data)
        for (int k = 0; k < n; k++)
            at->sink[r + k] = number_at(p, &p->sinks, batch->sinks + head * p->sinks.head);

    if (p->gate.data) {
        const char *gate = cattn_stored_at(p, &p->gate, batch->gate + head * p->gate.head + i * p->gate.row);
        for (int k = 0; k < valid; k++)
            at->gate[r + k] = gate + k * p->gate.row * stored;
    }
    if (p->out.data)
        point_rows(at->out + r, n, valid, cattn_stored_at(p, &p->out, batch->out + head * p->out.head + i * p->out.row),
                   p->out.row * stored);
    if (p->lse.data) {
        const int64_t bytes = p->double_lse ? (int64_t)sizeof(double) : element;
        const int64_t first = batch->lse + head * p->lse.head + i * p->lse.row;
        point_rows(at->lse + r, n, valid, (char *)p->lse.data + first * bytes, p->lse.row * bytes);
    }
    if (p->weights.data) {
        char *weights = cattn_stored_at(p, &p->weights, batch->weights + head * p->weights.head + i * p->weights.row);
        float *scratch = rows->scratch.weight_rows; /* halves are computed in float32 */
        const int64_t first_key = batch->batch_range.first_key;
        for (int k = 0; k < n; k++) {
            at->weights_out[r + k] = weights + k * p->weights.row * stored;
            at->weights[r + k] = p->storage == CATTN_STORED_PLAIN
                                     ? (char *)at->weights_out[r + k] + first_key * p->weights.col * stored
                                     : (char *)(scratch + (r + k) * p->seqlen_k + first_key);
        }
    }
}

int64_t cattn_head_start(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t batch,
                         int64_t head) {
    return cattn_batch_start(p, tensor, batch) + head * tensor->head;
}

int64_t cattn_sequence_start(const struct cattn_attention_params *p, const struct cattn_tensor *starts, int64_t batch) {
    return cattn_batch_number(starts, 0, p->n_batch_dims, p->batch_shape, batch);
}

int64_t cattn_rows_of_block(struct cattn_rows *rows, const struct cattn_attention_params *p,
                            const struct cattn_call_shape *call, int64_t batch, int64_t head, int64_t block) {
    struct cattn_batch at;
    cattn_batch_fill(p, batch, &at);
    /* packed sequences share the row axes, and the next one follows the last query */
    const int64_t n_queries = p->query_starts.data ? at.batch_range.n_queries : p->seqlen_q;
    const int64_t first = block * CATTN_TILE_ROWS;
    rows->call = *call;
    rows->n_rows = (int)cattn_min(n_queries - first, CATTN_TILE_ROWS);
    if (rows->n_rows <= 0) {
        rows->n_rows = 0;
        rows->first_key = rows->n_keys = 0;
        return 0;
    }
    cattn_rows_of_batch(rows, p, &at, head / p->group_size);
    cattn_rows_of_head(rows, p, &at, 0, rows->n_rows, head, first);
    return first + cattn_sequence_start(p, &p->query_starts, batch);
}

struct cattn_call_shape cattn_call_of_products(const struct cattn_call_shape *scores) {
    struct cattn_call_shape call = *scores;
    call.score_options = (struct cattn_score_options){.scale = scores->score_options.scale};
    call.has_slopes = call.has_block_mask = false;
    call.fully_ranged = true;
    return call;
}

void cattn_rows_view(struct cattn_rows *view, const struct cattn_call_shape *call, const struct cattn_rows *rows,
                     const struct cattn_matrix *key, const struct cattn_matrix *value) {
    view->call = *call;
    view->n_rows = rows->n_rows;
    view->ascending = rows->ascending;
    view->first_key = rows->first_key;
    view->n_keys = rows->n_keys;
    if (key)
        view->key = *key;
    if (value)
        view->value = *value;
}

struct cattn_range cattn_rows_keys(const struct cattn_rows *rows) {
    const int64_t *lo = rows->per_row->lo, *hi = rows->per_row->hi;
    struct cattn_range all = {0, 0};
    if (rows->ascending) /* the first row has the smallest lo, the last row the largest hi */
        return cattn_range_union(all, (struct cattn_range){lo[0], hi[rows->n_rows - 1]});
    for (int r = 0; r < rows->n_rows; r++)
        all = cattn_range_union(all, (struct cattn_range){lo[r], hi[r]});
    return all;
}

int64_t cattn_rows_next_block(const struct cattn_rows *rows, int64_t k0, int64_t hi) {
    if (!rows->call.has_block_mask)
        return k0;
    const int64_t size = rows->call.block_size, col = rows->call.block_mask_col, before = rows->first_key;
    const uint8_t *const *mask = rows->per_row->block_mask;
    int64_t first = hi; /* of the visible keys */
    for (int r = 0; r < rows->n_rows; r++) {
        int64_t block = (before + k0) / size;
        if (r > 0 && mask[r] == mask[r - 1])
            continue;
        while (block * size - before < first && !mask[r][block * col])
            block++;
        first = cattn_min(first, block * size - before);
    }
    return first < k0 ? k0 : first < hi ? first / CATTN_BLOCK_KEYS * CATTN_BLOCK_KEYS : hi;
}

bool cattn_rows_see_block(const struct cattn_rows *rows, struct cattn_range keys, int64_t k0, int64_t k1) {
    return keys.lo < k1 && k0 < keys.hi && cattn_rows_next_block(rows, k0, k1) < k1;
}

/* ---- tangents ---- */

void cattn_tangent_calls_fill(const struct cattn_call_shape *scores, const struct cattn_tangents *tangents,
                              struct cattn_tangent_calls *calls) {
    calls->query = calls->key = cattn_call_of_products(scores);
    calls->query.query_col = tangents->query.data ? tangents->query.col : 0;
}

void *cattn_tangent_row(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                        const struct cattn_place *place, int r, bool may_be_half) {
    if (!tensor->data)
        return NULL;
    const int64_t at = cattn_head_start(p, tensor, place->batch, place->head) + (place->first_row + r) * tensor->row;
    return may_be_half ? cattn_stored_at(p, tensor, at) : cattn_tensor_at(p, tensor, at);
}

struct cattn_matrix cattn_tangent_matrix(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                                         const struct cattn_rows *rows, const struct cattn_place *place) {
    struct cattn_matrix matrix = {.storage = p->storage};
    if (!tensor->data)
        return matrix;
    const int64_t start = cattn_head_start(p, tensor, place->batch, place->head / p->group_size);
    matrix.first = cattn_stored_at(p, tensor, start + rows->first_key * tensor->row);
    matrix.row = tensor->row;
    matrix.col = tensor->col;
    return matrix;
}

static double sink_tangent(const struct cattn_attention_params *p, const struct cattn_tensor *sinks,
                           const struct cattn_place *place) {
    return number_at(p, sinks, cattn_head_start(p, sinks, place->batch, place->head));
}

void cattn_score_tangents_fill(struct cattn_score_tangents *s, const struct cattn_attention_params *p,
                               const struct cattn_tangents *tangents, const struct cattn_tangent_calls *calls,
                               const struct cattn_rows *rows, const struct cattn_place *place) {
    const struct cattn_matrix key = cattn_tangent_matrix(p, &tangents->key, rows, place);
    s->has_query = tangents->query.data;
    s->has_key = tangents->key.data;
    s->has_bias = tangents->bias.data;
    s->has_sink = tangents->sinks.data;
    s->bias_col = s->has_bias ? tangents->bias.col : 0;
    cattn_rows_view(&s->query, &calls->query, rows, &rows->key, NULL);
    cattn_rows_view(&s->key, &calls->key, rows, &key, NULL);
    for (int r = 0; r < rows->n_rows; r++) {
        s->query_rows[r] = cattn_tangent_row(p, &tangents->query, place, r, true);
        if (s->has_bias) /* a tensor without this axis has stride 0 */
            s->bias[r] = (const char *)cattn_tangent_row(p, &tangents->bias, place, r, false) +
                         rows->first_key * s->bias_col * (int64_t)cattn_element_size(p->dtype);
        if (s->has_sink)
            s->sink[r] = sink_tangent(p, &tangents->sinks, place);
    }
}
