/* rounded_keys.c -- copies of keys and values as bfloat16; see attention.h. */
#include "attention.h"

#include <stdlib.h>

#include "dispatch.h"
#include "parallel.h"
#include "plan.h"

/* Queries that read a key, from which on the copies pay. */
#define LEAST_QUERIES 240
/* Rows of a task. */
#define PIECE_ROWS 512
/* Columns beside which a look at a stop costs nothing. */
#define LONG_ROW 4096
/* Elements below which the copies are made by the calling thread alone. */
#define ALONE ((int64_t)1 << 17)

static bool is_shared(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int d) {
    return tensor->batch[d] == 0 && p->batch_shape[d] > 1 && !p->query_starts.data;
}

/* Batch entries that share keys share a copy, of the keys of the first of them: their ranges must be the same. */
static bool shares_differ(const struct cattn_attention_params *p) {
    const struct cattn_ranges *r = &p->ranges;
    bool shared = false;
    for (int d = 0; d < p->n_batch_dims; d++)
        shared |= is_shared(p, &p->key, d) || is_shared(p, &p->value, d);
    return shared && !r->all_visible && (r->key_lengths.data || r->first_keys.data);
}

bool cattn_rounds_keys(const struct cattn_attention_params *p) {
    const bool tiles = p->bf16_products == CATTN_BF16_TILES;
    if (!p->bf16_products || (p->storage != CATTN_STORED_PLAIN && !tiles) || !p->key.data || !p->value.data ||
        p->path == CATTN_PATH_TINY || p->key_list)
        return false;
    /* packed copies serve the tile path only */
    if (tiles && cattn_plan(p, cattn_attention_kernels(p).tiles).path != CATTN_PATH_TILE)
        return false;
    return (double)p->seqlen_q * (double)p->group_size * (double)cattn_plan_most_keys(p) >=
               LEAST_QUERIES * (double)p->seqlen_k &&
           p->seqlen_k > 0 && p->n_batch > 0 && !shares_differ(p);
}

/* The rows that a head has: in packed sequences, of all of them. */
static int64_t count_rows(const struct cattn_attention_params *p) {
    int64_t rows = p->seqlen_k;
    for (int64_t b = 0; p->query_starts.data && b < p->n_batch; b++) {
        struct cattn_batch batch;
        cattn_batch_fill(p, b, &batch);
        const int64_t end = cattn_sequence_start(p, &p->key_starts, b) + batch.batch_range.n_keys;
        rows = end > rows ? end : rows;
    }
    return rows;
}

/* Places packed sequences one after the other in a copy in the order of tiles, each in whole groups, and returns the
 * number of rows. */
static int64_t place_sequences(const struct cattn_attention_params *p, int64_t *starts) {
    int64_t rows = 0;
    for (int64_t b = 0; b < p->n_batch; b++) {
        struct cattn_batch batch;
        cattn_batch_fill(p, b, &batch);
        if (starts)
            starts[b] = rows;
        rows += batch.batch_range.first_key + cattn_round_up(batch.batch_range.n_keys, CATTN_GROUP_TERMS);
    }
    return rows;
}

/* The strides of one number for each batch entry. */
static struct cattn_tensor numbers_of_entries(const struct cattn_attention_params *p, const int64_t *numbers) {
    struct cattn_tensor tensor = {.data = (void *)(uintptr_t)numbers};
    int64_t stride = 1;
    for (int d = p->n_batch_dims - 1; d >= 0; stride *= p->batch_shape[d--])
        tensor.batch[d] = stride;
    return tensor;
}

/* The strides of a copy. Returns its number of elements, in double against overflow. */
static double lay_out(const struct cattn_attention_params *p, int64_t kv_heads, int64_t n_rows, int64_t n_cols,
                      const struct cattn_tensor *from, struct cattn_tensor *to) {
    double size = (double)kv_heads * (double)n_rows * (double)n_cols;
    for (int d = 0; d < p->n_batch_dims && !p->query_starts.data; d++)
        size *= is_shared(p, from, d) ? 1 : (double)p->batch_shape[d];
    if (size > 0x1p44)
        return size;
    to->col = 1;
    to->row = n_cols;
    to->head = n_rows * n_cols;
    int64_t stride = kv_heads * to->head;
    for (int d = p->n_batch_dims - 1; d >= 0; d--) {
        to->batch[d] = is_shared(p, from, d) || p->query_starts.data ? 0 : stride;
        stride *= to->batch[d] ? p->batch_shape[d] : 1;
    }
    return size;
}

/* Whether another batch entry, which comes before this one, has the same part of a tensor. */
static bool is_repeated(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t index) {
    for (int d = p->n_batch_dims - 1; d >= 0; d--) {
        if (is_shared(p, tensor, d) && index % p->batch_shape[d] != 0)
            return true;
        index /= p->batch_shape[d];
    }
    return false;
}

/* Packs rows by one of the kernels, a group at a time if they are long. */
static void pack_rows(void (*pack)(const struct cattn_matrix *, int64_t, int64_t, int64_t, uint16_t *),
                      const struct cattn_matrix *from, const struct cattn_matrix *to, int64_t begin, int64_t end,
                      int64_t n_cols, struct cattn_worker *worker) {
    const int64_t step = n_cols > LONG_ROW ? CATTN_GROUP_TERMS : PIECE_ROWS;
    for (int64_t r = begin; r < end && !cattn_should_stop(worker); r += step)
        pack(from, r, cattn_min(r + step, end), n_cols, (uint16_t *)(uintptr_t)to->first);
}

static void round_piece(void *context, int64_t task, struct cattn_worker *worker) {
    const struct cattn_rounded_keys *rounded = context;
    const struct cattn_attention_params *from = rounded->from, *to = &rounded->params;
    const int64_t begin = task % rounded->n_pieces * PIECE_ROWS, head = task / rounded->n_pieces % rounded->kv_heads;
    const int64_t index = task / rounded->n_pieces / rounded->kv_heads;
    if (cattn_should_stop(worker))
        return;
    struct cattn_batch batch, copied;
    cattn_batch_fill(from, index, &batch);
    cattn_batch_fill(to, index, &copied);
    const int64_t end = cattn_min(begin + PIECE_ROWS, batch.batch_range.n_keys);
    struct cattn_matrix key, value, key_copy, value_copy;
    cattn_keys_of_head(from, &batch, head, &key, &value);
    cattn_keys_of_head(to, &copied, head, &key_copy, &value_copy);
    if (!is_repeated(from, &from->key, index))
        pack_rows(rounded->kernels->pack_keys, &key, &key_copy, begin, end, from->head_dim, worker);
    if (!is_repeated(from, &from->value, index))
        pack_rows(rounded->kernels->pack_values, &value, &value_copy, begin, end, from->d_v, worker);
}

enum cattn_status cattn_round_keys(const struct cattn_attention_params *p, struct cattn_rounded_keys **rounded) {
    struct cattn_tensor key = {0}, value = {0};
    const int64_t kv_heads = p->num_heads / p->group_size;
    const bool tiles = p->bf16_products == CATTN_BF16_TILES, moves = tiles && p->query_starts.data;
    const int64_t counted = count_rows(p), placed = moves ? place_sequences(p, NULL) : counted;
    /* whole groups of rows of a packed copy are read */
    const int64_t n_rows = placed + (tiles ? CATTN_GROUP_TERMS : 0);
    const double n_key =
        lay_out(p, kv_heads, n_rows, cattn_packed_key_cols(p->bf16_products, p->head_dim), &p->key, &key);
    const double n_value =
        lay_out(p, kv_heads, n_rows, cattn_packed_value_cols(p->bf16_products, p->d_v), &p->value, &value);
    *rounded = NULL;
    /* sequences that share keys have no copies of their own */
    if (n_key + n_value > 0x1p44 || placed > counted + p->n_batch * CATTN_GROUP_TERMS)
        return CATTN_OK;
    const cattn_size starts_size = moves ? (cattn_size)p->n_batch * sizeof(int64_t) : 0;
    const cattn_size head_size = (sizeof **rounded + starts_size + 63) / 64 * 64,
                     key_size = ((cattn_size)n_key + 31) / 32 * 32;
    char *memory = cattn_allocate(head_size + 2 * (key_size + (cattn_size)n_value) + 64);
    if (!memory)
        return CATTN_OK;
    struct cattn_rounded_keys *r = *rounded = (struct cattn_rounded_keys *)memory;
    uint16_t *copies = (uint16_t *)(void *)(memory + head_size + (64 - (uintptr_t)memory % 64) % 64);
    r->params = *p;
    r->params.key = key;
    r->params.value = value;
    r->params.key.data = copies;
    r->params.value.data = copies + key_size;
    r->params.quantized_key = r->params.quantized_value = CATTN_STORED_BF16;
    r->params.packed_keys = tiles;
    if (moves) {
        int64_t *starts = (int64_t *)(void *)(r + 1);
        place_sequences(p, starts);
        r->params.key_starts = numbers_of_entries(p, starts);
    }
    r->kernels = cattn_bf16_kernels(p->bf16_products).few;
    r->from = p;
    r->kv_heads = kv_heads;
    r->n_pieces = cattn_ceil_div(p->seqlen_k, PIECE_ROWS);
    const int num_threads = n_key + n_value < (double)ALONE ? 1 : p->num_threads;
    return cattn_parallel_for(p->n_batch * kv_heads * r->n_pieces, num_threads, 0, round_piece, r, &p->poll);
}
