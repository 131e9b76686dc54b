/* bits.c -- csrc/core without Python: prints hashes that must be equal for all tables and on all machines.
 *
 *   bits                    the tables of this build: name, usable on this CPU, inside the bit contract
 *   bits TABLE BEGIN END    problems BEGIN .. END-1 of each kind with that table, one line each: description and hash
 *
 * Shapes, options, strides and numbers of a problem follow from its index, and hashes take the values of words, not
 * their bytes, so lines can be compared across machines. Each problem is computed in several ways (paths, threads,
 * rounding directions of the caller, float32 in the place of quantized arrays) that must give the same hash; the exit
 * code is 1 if one did not. tools/machines builds and runs this program.
 *
 * Left out: PyTorch's normal numbers in float64. Their logarithm, sine and cosine come from the C library.
 */
#include <fenv.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/mt19937.h"
#include "inputs.h"
#include "torch_random.h"

/* ---- the description of a problem, and the hash on which all ways must agree ---- */

static char what[512];

static __attribute__((format(printf, 1, 2))) void say(const char *format, ...) {
    const size_t used = strlen(what);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what + used, sizeof what - used, format, arguments);
    va_end(arguments);
}

static uint64_t first_hash;
static bool has_hash, agree = true;

/* Compares the outputs of one more way with the outputs of the first. */
static void compare(enum cattn_status status, const char *way, int num_threads) {
    const uint64_t hash = status == CATTN_OK ? hash_of_outputs() : 0;
    if (status != CATTN_OK || (has_hash && hash != first_hash)) {
        fprintf(stderr, "%s: %s with %d threads gave %016" PRIx64 " (status %d), not %016" PRIx64 "\n", what, way,
                num_threads, hash, (int)status, first_hash);
        agree = false;
    }
    if (!has_hash)
        first_hash = hash;
    has_hash = true;
}

static void begin(const char *kind, int64_t index) {
    source = (uint64_t)index * 8;
    for (const char *c = kind; *c; c++)
        source = source * 31 + (uint64_t)*c;
    snprintf(what, sizeof what, "%s %" PRId64, kind, index);
    has_hash = false;
}

static void end_line(void) { printf("%s: %016" PRIx64 "\n", what, first_hash); }

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

/* ---- softmax and dropout ---- */

static const int COLUMNS[] = {1, 2, 5, 7, 8, 9, 16, 31, 64, 65, 127, 500, 511, 512, 513, 1025, 2000};

/* Rows of a softmax or a dropout. */
static struct shape draw_rows(int64_t *batch_shape, int *n_batch_dims, int64_t *n_rows, int64_t *n_cols) {
    struct shape shape = {.n_batch_dims = 2, .heads = 1, .rows = 1};
    *n_batch_dims = 2;
    *n_rows = 1;
    for (int d = 0; d < 2; d++)
        *n_rows *= batch_shape[d] = shape.batch[d] = between(1, d == 0 ? 3 : 40);
    shape.cols = *n_cols = PICK(COLUMNS);
    say(" %" PRId64 "x%" PRId64, *n_rows, *n_cols);
    return shape;
}

static void softmax(int64_t index) {
    const struct type *type = &TYPES[index % 4];
    struct cattn_softmax_params p = {.dtype = type->dtype, .storage = type->storage};
    begin("softmax", index);
    p.scale = number();
    say(" %s", type->name);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    const struct block x = input(&p.x, type, shape);
    if (chance(20))
        spoil(type, &x);
    if (chance(50))
        mask(&p.mask, shape);
    p.is_causal = chance(40);
    p.ranges = (struct cattn_ranges){.left = CATTN_UNBOUNDED,
                                     .lower_right = chance(50),
                                     .seqlen_k = p.n_cols,
                                     .query_length = shape.batch[1],
                                     .key_length = p.n_cols};
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_softmax(&p), "softmax", p.num_threads);
    }
    end_line();
    forget();
}

static void softmax_gradient(int64_t index) {
    const struct type *type = &TYPES[index % 2];
    struct cattn_softmax_backward_params p = {.dtype = type->dtype};
    begin("softmax_backward", index);
    p.scale = number();
    say(" %s", type->name);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    input(&p.grad, type, shape);
    input(&p.weights, type, shape);
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_softmax_backward(&p), "softmax_backward", p.num_threads);
    }
    end_line();
    forget();
}

static void dropout(int64_t index) {
    const struct type *type = &TYPES[index % 4];
    struct cattn_dropout_params p = {.dtype = type->dtype, .storage = type->storage};
    struct cattn_torch_random random = {0};
    begin("dropout", index);
    say(" %s", type->name);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    draw_dropout(&p.dropout, &random);
    const struct cattn_torch_random fresh = random;
    input(&p.x, type, shape);
    output(&p.out, type, shape, false);
    output(&p.mask, &BYTES, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        random = fresh;
        compare(cattn_dropout(&p), "dropout", p.num_threads);
    }
    end_line();
    forget();
}

/* ---- rotary positions and RMS norm ---- */

/* One statement for each number: C does not fix the order in which initialisers and arguments are evaluated. */
static struct cattn_rope_scaling draw_scaling(void) {
    struct cattn_rope_scaling s;
    s.type = (enum cattn_rope_type)between(0, CATTN_ROPE_LLAMA3);
    s.truncate = chance(50);
    s.factor = 1 + fabs(number());
    s.original_length = 1 + 64 * fabs(number());
    s.low_freq_factor = fabs(number());
    s.high_freq_factor = s.low_freq_factor + fabs(number());
    s.beta_slow = fabs(number());
    s.beta_fast = s.beta_slow + 8 * fabs(number());
    s.attention_factor = chance(30) ? fabs(number()) : 0;
    s.mscale = chance(50) ? fabs(number()) : 0;
    s.mscale_all_dim = fabs(number());
    return s;
}

/* Near and far ones, whole and between: up to 2^51. */
static void draw_positions(struct cattn_rope_params *p, struct shape shape) {
    shape = thinned(shape, false);
    shape.cols = 1;
    const struct block positions = input(&p->positions, &TYPES[CATTN_F64], shape);
    for (size_t i = 0; i < positions.n; i++) {
        const int exponent = (int)between(0, 49);
        const double position = ldexp(number(), exponent);
        put(&TYPES[CATTN_F64], positions.data, i, chance(70) ? nearbyint(position) : position);
        p->length = fmax(p->length, ((const double *)positions.data)[i] + 1);
    }
    say(" positions");
}

static void rope(int64_t index) {
    static const int WIDTHS[] = {4, 5, 8, 16, 22, 34, 64, 66, 128, 129};
    const struct type *type = &TYPES[index % 4];
    struct cattn_rope_params p = {.dtype = type->dtype, .storage = type->storage, .n_batch_dims = 2, .n_batch = 1};
    struct shape shape = {.n_batch_dims = 2, .heads = 1};
    begin("rope", index);
    for (int d = 0; d < 2; d++)
        p.n_batch *= p.batch_shape[d] = shape.batch[d] = between(1, d == 0 ? 3 : 9);
    shape.rows = p.seqlen = between(1, 90);
    shape.cols = p.n_cols = PICK(WIDTHS);
    p.rotary_dim = chance(50) ? p.n_cols / 2 * 2 : 2 * between(2, p.n_cols / 2);
    p.interleaved = chance(50);
    p.inverse = chance(30);
    const int exponent = (int)between(-9, 40);
    p.theta = chance(50) ? 10000 : 1 + ldexp(fabs(number()), exponent);
    p.scaling = draw_scaling();
    p.length = (double)p.seqlen;
    say(" %s, %" PRId64 " of %" PRId64 "x%" PRId64 ", %" PRId64 " rotated, scaling %d", type->name, p.n_batch, p.seqlen,
        p.n_cols, p.rotary_dim, (int)p.scaling.type);
    const struct block x = input(&p.x, type, shape);
    if (chance(20))
        spoil(type, &x);
    if (chance(60))
        draw_positions(&p, shape);
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        fesetround(p.num_threads == 1 ? FE_TONEAREST : FE_UPWARD);
        const enum cattn_status status = cattn_rope(&p);
        fesetround(FE_TONEAREST);
        compare(status, "rope", p.num_threads);
    }
    end_line();
    forget();
}

static void norm(int64_t index) {
    const struct type *type = &TYPES[index % 4], *wide = &TYPES[type->dtype];
    struct cattn_norm_params p = {.dtype = type->dtype, .storage = type->storage};
    begin("norm", index);
    say(" %s", type->name);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    const struct block x = input(&p.x, type, shape);
    p.eps = fabs(number());
    if (chance(20))
        spoil(type, &x);
    if (chance(70))
        input(&p.weight, wide, (struct shape){.heads = 1, .rows = 1, .cols = p.n_cols});
    p.centred = chance(50);
    if (chance(50))
        input(&p.bias, wide, (struct shape){.heads = 1, .rows = 1, .cols = p.n_cols});
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_norm(&p), "norm", p.num_threads);
    }
    end_line();
    forget();
}

static void norm_gradient(int64_t index) {
    const struct type *type = &TYPES[index % 2];
    const struct shape columns = {.heads = 1, .rows = 1};
    struct cattn_norm_backward_params p = {.dtype = type->dtype};
    struct shape shape, weight = columns;
    begin("norm_backward", index);
    say(" %s", type->name);
    shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    weight.cols = p.n_cols;
    p.eps = fabs(number());
    input(&p.grad, type, shape);
    input(&p.x, type, shape);
    output(&p.grad_x, type, shape, false);
    if (chance(70)) {
        input(&p.weight, type, weight);
        output(&p.grad_weight, type, weight, false);
    }
    p.centred = chance(50);
    if (p.centred)
        output(&p.grad_bias, type, weight, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_norm_backward(&p), "norm_backward", p.num_threads);
    }
    end_line();
    forget();
}

static void activation(int64_t index) {
    const struct type *type = &TYPES[index % 4];
    struct cattn_activation_params p = {.dtype = type->dtype, .storage = type->storage};
    begin("activation", index);
    p.which = (enum cattn_activation)between(CATTN_GELU, CATTN_SILU);
    say(" %s, function %d", type->name, (int)p.which);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    const struct block x = input(&p.x, type, shape);
    if (chance(20))
        spoil(type, &x);
    if (chance(50))
        input(&p.grad, type, shape);
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_activate(&p), "activation", p.num_threads);
    }
    end_line();
    forget();
}

/* ---- products of matrices ---- */

/* Around vectors, 8 rows, blocks of rows, chains and slabs, of elements and of pairs. */
static const int PRODUCT_ROWS[] = {1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 95, 97, 193, 230};
static const int TERMS[] = {0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 64, 100, 511, 512, 513, 700, 1023, 1025, 1600};

static struct cattn_operand operand_of(const struct cattn_tensor *tensor, const struct type *type) {
    return (struct cattn_operand){.storage = type->storage,
                                  .data = tensor->data,
                                  .batch = tensor->batch[0],
                                  .row = tensor->row,
                                  .col = tensor->col};
}

/* A matrix by rows or by columns, of this type or quantized, which then also is `plain` in float32. */
static struct cattn_operand draw_operand(const struct type *type, struct shape shape, struct cattn_operand *plain) {
    const bool quantize = type->dtype == CATTN_F32 && chance(25), by_columns = chance(30);
    struct cattn_tensor tensor, scale, wide;
    struct shape laid = shape;
    if (by_columns) {
        laid.rows = shape.cols;
        laid.cols = shape.rows;
    }
    type = quantize ? &QUANTIZED[between(0, 1)] : type;
    const struct block block = quantize ? quantized_input(&tensor, type, laid) : input(&tensor, type, laid);
    if (quantize) {
        laid.n_batch_dims = 0; /* scales have no batch */
        scales(&scale, laid);
        laid.n_batch_dims = 1;
        wide = dequantized(&tensor, type->storage, &scale, laid);
    }
    if (chance(20) && !quantize)
        spoil(type, &block);
    struct cattn_operand operand = operand_of(&tensor, type);
    *plain = quantize ? operand_of(&wide, &TYPES[CATTN_F32]) : operand;
    if (quantize) {
        operand.scale = scale.data;
        operand.scale_row = by_columns ? scale.col : scale.row;
        operand.scale_col = by_columns ? scale.row : scale.col;
    }
    for (int i = 0; i < 2 && by_columns; i++) {
        struct cattn_operand *turned = i == 0 ? &operand : plain;
        const int64_t row = turned->row;
        turned->row = turned->col;
        turned->col = row;
    }
    say(" %s%s", type->name, by_columns ? " by columns" : "");
    return operand;
}

static void multiply(struct cattn_product_params *p, const char *way, int num_threads, int direction) {
    p->num_threads = num_threads;
    clear_outputs();
    fesetround(direction);
    const enum cattn_status status = cattn_product(p);
    fesetround(FE_TONEAREST);
    compare(status, way, num_threads);
}

static void product(int64_t index) {
    const struct type *type = &TYPES[index % 4], *wide = &TYPES[type->dtype];
    struct cattn_product_params p = {.dtype = type->dtype, .out_storage = type->storage};
    struct shape shape = {.n_batch_dims = 1, .heads = 1};
    struct cattn_operand plain_a, plain_b;
    struct cattn_tensor out, bias;
    begin("product", index);
    p.bf16_products = type->dtype == CATTN_F32 && chance(50);
    p.n_batch = shape.batch[0] = between(1, 2);
    p.n_a = PICK(PRODUCT_ROWS);
    p.n_b = PICK(PRODUCT_ROWS);
    p.depth = PICK(TERMS);
    while ((double)p.n_batch * (double)p.n_a * (double)p.n_b * (double)p.depth > 1e6) { /* emulators are slow */
        p.n_a = cattn_ceil_div(p.n_a, 2);
        p.n_b = cattn_ceil_div(p.n_b, 2);
    }
    say(" %s%s, %" PRId64 " of %" PRId64 "x%" PRId64 "x%" PRId64, type->name, p.bf16_products ? " by pairs" : "",
        p.n_batch, p.n_a, p.n_b, p.depth);
    shape.cols = p.depth;
    shape.rows = p.n_a;
    p.a = draw_operand(type, shape, &plain_a);
    shape.rows = p.n_b;
    p.b = draw_operand(type, shape, &plain_b);
    shape.rows = p.n_a;
    shape.cols = p.n_b;
    output(&out, type, shape, false);
    p.out = out.data;
    p.out_batch = out.batch[0];
    p.out_a = out.row;
    p.out_b = out.col;
    if (chance(50)) {
        input(&bias, wide, (struct shape){.heads = 1, .rows = 1, .cols = p.n_b});
        p.bias = bias.data;
        p.bias_b = bias.col;
    }
    multiply(&p, "product", 1, FE_TONEAREST);
    multiply(&p, "product", 3, FE_UPWARD);
    p.a = plain_a;
    p.b = plain_b;
    multiply(&p, "in float32", 1, FE_DOWNWARD);
    end_line();
    forget();
}

/* ---- PyTorch's random numbers ---- */

static const char *const DISTRIBUTIONS[] = {"uniform", "normal", "integer", "bernoulli", "keep"};

/* Numbers of one distribution, then words of another generator that has imported the state. */
static void torch(int64_t index) {
    struct cattn_torch_random random = {.stream = index % 3 ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL}, other = {0};
    struct cattn_torch_fill fill = {.distribution = (enum cattn_torch_distribution)(index % 5)};
    struct shape shape = {.heads = 1, .rows = 1, .cols = 700};
    struct cattn_tensor out, words;
    uint8_t state[CATTN_TORCH_STATE_BYTES];
    begin("torch", index);
    say(" %s", DISTRIBUTIONS[fill.distribution]);
    output(&words, &TYPES[CATTN_F32], shape, true);
    if (fill.distribution != CATTN_TORCH_NORMAL)
        fill.dtype = (enum cattn_dtype)between(0, 1);
    fill.n = between(16, 3000);
    fill.low = chance(50) ? number() : 0;
    fill.high = 5;
    fill.range = draw();
    fill.range = fill.range >> between(0, 62) | 1;
    fill.base = between(-9, 9);
    fill.skip = between(0, 99);
    fill.probability = 0.3;
    shape.cols = fill.n;
    output(&out,
           fill.distribution == CATTN_TORCH_DROPOUT_MASK ? &BYTES
           : fill.distribution == CATTN_TORCH_INTEGER    ? &INTEGERS
                                                         : &TYPES[fill.dtype],
           shape, true);
    fill.out = out.data;
    clear_outputs();
    cattn_torch_seed(&random, draw());
    enum cattn_status status = cattn_torch_fill(&random, &fill);
    cattn_torch_export(&random, state);
    if (!cattn_torch_import(&other, state))
        status = CATTN_NO_MEMORY;
    cattn_mt19937_draw(&other.mt, 700, words.data);
    compare(status, "torch", 1);
    end_line();
    forget();
}

/* ---- main ---- */

int main(int argc, char **argv) {
    if (argc == 1) {
        for (int i = 0; i < cattn_isa_count(); i++) {
            const struct cattn_isa_info info = cattn_isa_info(i);
            printf("%s %d %d\n", info.name, info.usable, info.has_fma);
        }
        return 0;
    }
    if (argc != 4 || !cattn_isa_select(argv[1])) {
        fprintf(stderr, "usage: %s TABLE BEGIN END, with a table that this CPU can run\n", argv[0]);
        return 2;
    }
    for (int64_t i = atoll(argv[2]); i < atoll(argv[3]); i++) {
        attention(i);
        bf16_products(i);
        statistics(i);
        softmax(i);
        softmax_gradient(i);
        dropout(i);
        rope(i);
        norm(i);
        norm_gradient(i);
        activation(i);
        product(i);
        torch(i);
    }
    return agree ? 0 : 1;
}
