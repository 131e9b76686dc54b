/* attention.h -- the problems of attention in bits.c: all options, gradients, statistics. Included once. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <fenv.h>

#include "problem.h"
#include "torch_random.h"

/* ---- attention ---- */

/* Sizes around micro-tiles, vectors, tiles, chains, counters of Philox, blocks, and at last chunks of keys. */
static const int ROWS[] = {1, 2, 3, 5, 7, 8, 9, 12, 13, 16, 17, 31, 33, 63, 65, 95, 96, 97, 130};
static const int KEYS[] = {0, 1, 2, 7, 8, 9, 15, 17, 33, 63, 64, 65, 95, 96, 97, 128, 191, 192, 193, 289, 385, 577};
static const int LONG_KEYS[] = {1535, 1536, 1537, 1729, 3073, 4700};
static const int DEPTHS[] = {0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64, 65, 96, 128};

struct attention {
    const struct type *type, *wide; /* of the storage, of the computation */
    const struct type *key_type, *value_type;
    struct cattn_backward_params params;
    struct shape shape; /* batch dimensions and query heads */
    int64_t n_kv_heads;
    bool stage, packed;                      /* scores or weights are the only result; packed sequences */
    struct cattn_torch_random random, fresh; /* of the call, before the call */
    struct cattn_tensor key, value;          /* in float32, if they are quantized */
};

static void begin_attention(struct attention *a, const char *kind, int64_t index) {
    begin(kind, index);
    memset(a, 0, sizeof *a);
    a->type = &TYPES[index % 4];
    a->wide = &TYPES[a->type->dtype];
    a->params.forward.dtype = a->type->dtype;
    a->params.forward.storage = a->type->storage;
    a->params.forward.score_options.scale = number() / 8;
}

static struct shape sized(const struct attention *a, int64_t heads, int64_t rows, int64_t cols) {
    struct shape shape = a->shape;
    shape.heads = heads;
    shape.rows = rows;
    shape.cols = cols;
    return shape;
}

static void draw_sizes(struct attention *a) {
    struct cattn_attention_params *p = &a->params.forward;
    const bool is_long = !a->packed && chance(12);
    p->seqlen_q = is_long ? between(1, 9) : PICK(ROWS);
    p->seqlen_k = is_long ? PICK(LONG_KEYS) : PICK(KEYS);
    p->head_dim = PICK(DEPTHS);
    p->d_v = a->stage ? 0 : PICK(DEPTHS);
    a->shape.n_batch_dims = a->packed ? 1 : (int)between(0, 2);
    for (int d = 0; d < a->shape.n_batch_dims; d++)
        a->shape.batch[d] = a->packed ? 3 : between(1, 2);
    a->n_kv_heads = between(1, 2);
    p->group_size = between(1, 3);
    p->n_batch_dims = a->shape.n_batch_dims;
    p->n_batch = 1;
    for (int d = 0; d < p->n_batch_dims; d++)
        p->n_batch *= p->batch_shape[d] = a->shape.batch[d];
    p->num_heads = a->n_kv_heads * p->group_size;
    if (cattn_attention_work(p) > 2e6) { /* emulators are slow */
        p->head_dim = p->head_dim < 17 ? p->head_dim : 17;
        p->d_v = p->d_v < 9 ? p->d_v : 9;
    }
    if (cattn_attention_work(p) > 2e6)
        p->num_heads = p->group_size = a->n_kv_heads = 1;
    say(" %s, %" PRId64 " of %" PRId64 "/%" PRId64 " heads", a->type->name, p->n_batch, p->num_heads, a->n_kv_heads);
    say(", %" PRId64 "x%" PRId64 ", %" PRId64 ",%" PRId64, p->seqlen_q, p->seqlen_k, p->head_dim, p->d_v);
}

/* The shape of an array by tokens: packed sequences have one row axis for the whole batch. */
static struct shape by_tokens(const struct attention *a, int64_t heads, int64_t tokens, int64_t cols) {
    struct shape shape = sized(a, heads, a->packed ? a->params.forward.n_batch * tokens : tokens, cols);
    if (a->packed)
        shape.batch[0] = 1;
    return shape;
}

/* Half of the float32 problems have quantized keys, half have quantized values. */
static void draw_types(struct attention *a) {
    struct cattn_attention_params *p = &a->params.forward;
    a->key_type = a->value_type = a->type;
    if (a->type != &TYPES[CATTN_F32])
        return;
    if (chance(50))
        a->key_type = &PICK(QUANTIZED);
    if (!a->stage && chance(50))
        a->value_type = &PICK(QUANTIZED);
    p->quantized_key = a->key_type->storage;
    p->quantized_value = a->value_type->storage;
    say("%s%s", p->quantized_key ? " key " : "", p->quantized_key ? a->key_type->name : "");
    say("%s%s", p->quantized_value ? " value " : "", p->quantized_value ? a->value_type->name : "");
}

static struct block draw_quantized(struct cattn_tensor *tensor, const struct type *type, struct cattn_tensor *scale,
                                   struct shape shape) {
    const struct block block = quantized_input(tensor, type, thinned(shape, true));
    scales(scale, thinned(shape, true));
    return block;
}

static void draw_inputs(struct attention *a) {
    struct cattn_attention_params *p = &a->params.forward;
    const struct shape query = by_tokens(a, p->num_heads, p->seqlen_q, p->head_dim);
    const struct shape key = by_tokens(a, a->n_kv_heads, p->seqlen_k, p->head_dim);
    const struct shape value = by_tokens(a, a->n_kv_heads, p->seqlen_k, p->d_v);
    draw_types(a);
    const struct type *const types[] = {a->type, a->key_type, a->value_type};
    struct block made[3] = {input(&p->query, a->type, thinned(query, true))};
    made[1] = p->quantized_key ? draw_quantized(&p->key, a->key_type, &p->key_scale, key)
                               : input(&p->key, a->type, thinned(key, true));
    if (!a->stage)
        made[2] = p->quantized_value ? draw_quantized(&p->value, a->value_type, &p->value_scale, value)
                                     : input(&p->value, a->type, thinned(value, true));
    if (chance(15)) {
        const int64_t i = between(0, a->stage ? 1 : 2);
        spoil(types[i], &made[i]);
        say(" spoilt");
    }
    if (p->quantized_key)
        a->key = dequantized(&p->key, p->quantized_key, &p->key_scale, key);
    if (p->quantized_value)
        a->value = dequantized(&p->value, p->quantized_value, &p->value_scale, value);
}

/* Puts the float32 numbers in the place of quantized keys and values: every result must be the same. Returns whether
 * there are any. */
static bool dequantize(const struct attention *a, struct cattn_attention_params *p) {
    const bool any = p->quantized_key || p->quantized_value;
    p->key = p->quantized_key ? a->key : p->key;
    p->value = p->quantized_value ? a->value : p->value;
    p->quantized_key = p->quantized_value = CATTN_STORED_PLAIN;
    return any;
}

static void draw_masks(struct attention *a) {
    struct cattn_attention_params *p = &a->params.forward;
    const struct shape scores = sized(a, p->num_heads, p->seqlen_q, p->seqlen_k);
    if (chance(30)) {
        mask(&p->attn_mask, thinned(scores, true));
        say(" mask");
    }
    if (!a->packed && chance(30)) {
        p->block_size = PICK(((const int64_t[]){1, 7, 16, 50, 64, 192}));
        mask(&p->block_mask, thinned(sized(a, p->num_heads, (p->seqlen_q + p->block_size - 1) / p->block_size,
                                           (p->seqlen_k + p->block_size - 1) / p->block_size),
                                     true));
        say(" blocks of %" PRId64, p->block_size);
    }
    p->n_bias = chance(60) ? 0 : (int)between(1, CATTN_MAX_BIAS);
    for (int b = 0; b < p->n_bias; b++) {
        const struct block bias = input(&p->bias[b], a->wide, thinned(scores, true));
        for (size_t i = 0; b == 0 && i < bias.n; i++)
            if (chance(10))
                put(a->wide, bias.data, i, -(double)INFINITY);
        say(" bias");
    }
    if (chance(25)) {
        p->score_options.softcap = fabs(number());
        say(" softcap");
    }
    if (chance(25)) {
        const struct block slopes = input(&p->slopes, a->wide, sized(a, p->num_heads, 1, 1));
        for (size_t i = 0; i < slopes.n; i++)
            put(a->wide, slopes.data, i, fabs(number()) / 8);
        say(" slopes");
    }
    if (chance(25)) {
        input(&p->sinks, a->wide, sized(a, p->num_heads, 1, 1));
        say(" sinks");
    }
}

static void draw_ranges(struct attention *a) {
    struct cattn_attention_params *p = &a->params.forward;
    struct cattn_ranges *r = &p->ranges;
    const struct shape numbers = thinned(sized(a, 1, 1, 1), false);
    *r = (struct cattn_ranges){.left = CATTN_UNBOUNDED,
                               .right = CATTN_UNBOUNDED,
                               .seqlen_k = p->seqlen_k,
                               .query_length = p->seqlen_q,
                               .key_length = p->seqlen_k};
    if (chance(40))
        r->right = 0;
    if (chance(20))
        r->left = between(0, 150);
    r->lower_right = chance(30);
    if (!r->lower_right && chance(30))
        r->offset = between(-p->seqlen_q, p->seqlen_k);
    else if (!r->lower_right && chance(20))
        integers(&r->offsets, numbers, -p->seqlen_q, p->seqlen_k);
    if (a->packed || chance(20)) {
        const struct shape all = a->packed ? sized(a, 1, 1, 1) : numbers;
        integers(&r->query_lengths, all, 0, p->seqlen_q);
        integers(&r->key_lengths, all, 0, p->seqlen_k);
    }
    if (!a->packed && chance(20))
        integers(&r->first_keys, numbers, 0, p->seqlen_k);
    say("%s%s%s%s", r->right == 0 ? " causal" : "", r->left != CATTN_UNBOUNDED ? " window" : "",
        r->query_lengths.data ? " lengths" : "", r->first_keys.data ? " first keys" : "");
    if (a->packed) { /* gaps only where a length is less than the longest */
        integers(&p->query_starts, sized(a, 1, 1, 1), 0, 0);
        integers(&p->key_starts, sized(a, 1, 1, 1), 0, 0);
        for (int64_t i = 0; i < p->n_batch; i++) {
            ((int64_t *)p->query_starts.data)[i] = i * p->seqlen_q;
            ((int64_t *)p->key_starts.data)[i] = i * p->seqlen_k;
        }
        say(" packed");
    }
}

/* Philox by position, or PyTorch's generator where the elements have an order. */
static void draw_dropout(struct cattn_dropout_spec *spec, struct cattn_torch_random *random) {
    const int kind = chance(50) ? 0 : (int)between(1, random ? 4 : 2);
    const double p = PICK(((const double[]){0.1, 0.5, 0.9}));
    *spec = (struct cattn_dropout_spec){.enabled = kind > 0, .keep_probability = 1 - p, .seed = draw()};
    spec->threshold = (uint64_t)((1 - p) * 0x1p32 + 0.5);
    spec->keep_scale = 1 / (1 - p);
    if (kind > 2) {
        random->stream = kind == 3 ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL;
        cattn_torch_seed(random, draw());
        spec->torch = random;
    }
    say("%s", kind == 0 ? "" : kind < 3 ? " philox" : kind == 3 ? " aten" : " mkl");
}

static void draw_results(struct attention *a) {
    struct cattn_attention_params *p = &a->params.forward;
    struct shape rows = by_tokens(a, p->num_heads, p->seqlen_q, p->d_v);
    if (!a->stage)
        output(&p->out, a->type, rows, false);
    rows.cols = 1;
    p->double_lse = chance(30);
    output(&p->lse, p->double_lse ? &TYPES[CATTN_F64] : a->wide, rows, true);
    const struct shape scores = sized(a, p->num_heads, p->seqlen_q, p->seqlen_k);
    p->store_scores = a->stage && chance(50);
    if (a->stage || (!a->packed && chance(40))) {
        output(&p->weights, a->type, scores, false);
        say(" %s", p->store_scores ? "scores" : "weights");
    }
    if (!a->packed && p->dropout.enabled && chance(50))
        output(&p->dropout_mask, &BYTES, scores, false);
}

/* The caller's rounding direction must not change a bit, and must be the same afterwards. */
static void attend(struct attention *a, enum cattn_path path, int num_threads, int direction) {
    static const char *const names[] = {"auto", "tile", "rows", "split", "tiny"};
    a->params.forward.path = path;
    a->params.forward.num_threads = num_threads;
    if (!cattn_attention_path_fits(&a->params.forward))
        return;
    clear_outputs();
    a->random = a->fresh;
    fesetround(direction);
    const enum cattn_status status = cattn_attention(&a->params.forward);
    if (fegetround() != direction) {
        fprintf(stderr, "%s: left another rounding direction\n", what);
        agree = false;
    }
    fesetround(FE_TONEAREST);
    compare(status, names[path], num_threads);
}

/* From the output and log-sum-exp of the previous call. */
static void gradients(struct attention *a) {
    struct cattn_backward_params *b = &a->params;
    struct cattn_attention_params *p = &b->forward;
    n_outputs = 0;
    p->weights.data = p->dropout_mask.data = NULL;
    input(&b->grad_out, a->type, by_tokens(a, p->num_heads, p->seqlen_q, p->d_v));
    if (chance(30)) {
        input(&b->grad_lse, &TYPES[CATTN_F64], by_tokens(a, p->num_heads, p->seqlen_q, 1));
        say(" grad_lse");
    }
    output(&b->grad_query, a->wide, by_tokens(a, p->num_heads, p->seqlen_q, p->head_dim), true);
    output(&b->grad_key, a->wide, by_tokens(a, a->n_kv_heads, p->seqlen_k, p->head_dim), true);
    output(&b->grad_value, a->wide, by_tokens(a, a->n_kv_heads, p->seqlen_k, p->d_v), true);
    const struct shape scores = sized(a, p->num_heads, p->seqlen_q, p->seqlen_k);
    if (p->n_bias > 0) {
        b->bias_sum = (enum cattn_bias_sum)between(0, 2);
        struct shape summed = b->bias_sum == CATTN_BIAS_NO_SUM ? thinned(scores, true) : scores;
        if (b->bias_sum == CATTN_BIAS_SUM_ROWS)
            summed.rows = 1;
        else if (b->bias_sum == CATTN_BIAS_SUM_COLS)
            summed.cols = 1;
        output(&b->grad_bias, a->wide, summed, true);
    }
    if (p->sinks.data)
        output(&b->grad_sinks, a->wide, sized(a, p->num_heads, 1, 1), true);
    say(", gradients");
    has_hash = false;
    p->path = CATTN_PATH_TILE;
    for (p->num_threads = 1; p->num_threads <= 3; p->num_threads += 2) {
        clear_outputs();
        a->random = a->fresh;
        compare(cattn_attention_backward(b), "gradients", p->num_threads);
    }
    if (dequantize(a, p)) {
        clear_outputs();
        a->random = a->fresh;
        compare(cattn_attention_backward(b), "gradients in float32", p->num_threads);
    }
    end_line();
}

static void draw_attention(struct attention *a) {
    a->stage = chance(15);
    a->packed = !a->stage && chance(15);
    draw_sizes(a);
    draw_inputs(a);
    if (!a->packed)
        draw_masks(a);
    draw_ranges(a);
    draw_dropout(&a->params.forward.dropout, a->packed ? NULL : &a->random);
    a->fresh = a->random;
    draw_results(a);
}

static void attend_every_way(struct attention *a) {
    attend(a, CATTN_PATH_ROWS, 1, FE_TONEAREST);
    attend(a, CATTN_PATH_TILE, 1, FE_UPWARD);
    attend(a, CATTN_PATH_TILE, 3, FE_TONEAREST);
    attend(a, CATTN_PATH_SPLIT, 3, FE_DOWNWARD);
    attend(a, CATTN_PATH_TINY, 1, FE_TOWARDZERO);
    const struct cattn_attention_params quantized = a->params.forward;
    if (dequantize(a, &a->params.forward))
        attend(a, CATTN_PATH_AUTO, 1, FE_TONEAREST); /* in float32 */
    a->params.forward = quantized;
    end_line();
}

/* Products of bfloat16, of float32 or bfloat16. */
static void bf16_products(int64_t index) {
    static struct attention a;
    begin_attention(&a, "bf16_products", index % 2 ? index / 2 * 4 : index / 2 * 4 + 3);
    a.params.forward.bf16_products = true;
    draw_attention(&a);
    attend_every_way(&a);
    forget();
}

static void attention(int64_t index) {
    static struct attention a;
    begin_attention(&a, "attention", index);
    draw_attention(&a);
    attend_every_way(&a);
    if (!a.stage)
        gradients(&a);
    forget();
}

/* ---- statistics of attention weights ---- */

static void draw_statistics(struct cattn_statistics_params *s, const struct attention *a) {
    const struct cattn_attention_params *p = &s->forward;
    struct shape rows = sized(a, p->num_heads, p->seqlen_q, 1), cols = sized(a, p->num_heads, 1, p->seqlen_k);
    if (a->packed) { /* one row axis for the whole batch */
        rows.batch[0] = cols.batch[0] = 1;
        rows.rows *= p->n_batch;
        cols.cols *= p->n_batch;
    }
    output(&s->forward.lse, &TYPES[CATTN_F64], rows, true);
    for (int i = 0; i < CATTN_N_ROW_STATISTICS; i++)
        if (chance(80))
            output(&s->rows[i], a->wide, rows, true);
    if (chance(60))
        output(&s->received, a->wide, cols, true);
    if (chance(60))
        output(&s->received_max, a->wide, cols, true);
    s->observation_window = chance(30) ? between(1, 150) : CATTN_UNBOUNDED;
    s->top_k = chance(50) ? cattn_min(between(1, 40), p->seqlen_k) : 0;
    rows.cols = s->top_k;
    if (s->top_k > 0) {
        output(&s->top_weights, a->wide, rows, true);
        output(&s->top_keys, &INTEGERS, rows, true);
    }
    say(", top %" PRId64, s->top_k);
}

static void statistics(int64_t index) {
    static struct attention a;
    static struct cattn_statistics_params s;
    begin_attention(&a, "statistics", index);
    memset(&s, 0, sizeof s);
    a.stage = true; /* there are no values */
    a.packed = chance(20);
    draw_sizes(&a);
    draw_inputs(&a);
    if (!a.packed)
        draw_masks(&a);
    draw_ranges(&a);
    s.forward = a.params.forward;
    s.forward.double_lse = true;
    draw_statistics(&s, &a);
    for (s.forward.num_threads = 1; s.forward.num_threads <= 3; s.forward.num_threads += 2) {
        clear_outputs();
        compare(cattn_attention_statistics(&s), "statistics", s.forward.num_threads);
    }
    if (dequantize(&a, &s.forward)) {
        clear_outputs();
        compare(cattn_attention_statistics(&s), "statistics in float32", s.forward.num_threads);
    }
    end_line();
    forget();
}

#endif
