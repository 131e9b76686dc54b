/* functions.c -- problems of the functions of rows and elements, products of matrices, masks and PyTorch's random
 * numbers; and the list of all kinds of problems. See problem.h.
 */
#include <math.h>
#include <string.h>

#include "problem.h"

/* ---- rows ---- */

static const int64_t COLUMNS[] = {0,  1,  2,  5,   7,   8,   9,   15,  16,  17,   31,   33,
                                  64, 65, 66, 127, 129, 500, 511, 512, 513, 1023, 1025, 2050};

/* The rows of an array: its last axis is the columns. */
struct rows {
    enum cattn_dtype dtype;
    enum cattn_storage storage;
    enum element element;
    enum content content;
    int n_axes;
    int64_t dims[MAX_AXES], n_rows, n_cols;
};

static struct rows choose_rows(struct source *s, struct problem *problem, bool halves) {
    static const int64_t sizes[] = {1, 2, 3, 5, 17, 33, 40, 0};
    struct rows rows = {.n_rows = 1, .storage = CATTN_STORED_PLAIN};
    const double most = fmin(s->budget / 4 + 2000, 60000);
    rows.element = choose_type(s, problem, halves, &rows.dtype, halves ? &rows.storage : NULL);
    rows.n_axes = 1 + (int)choose(s, 4);
    rows.n_cols = CHOOSE_FROM(s, COLUMNS);
    for (int axis = 0; axis < rows.n_axes - 1; axis++) {
        rows.dims[axis] = CHOOSE_FROM(s, sizes);
        if ((double)(rows.n_rows * rows.dims[axis] * (rows.n_cols + 1)) > most)
            rows.dims[axis] = 1;
        rows.n_rows *= rows.dims[axis];
    }
    rows.dims[rows.n_axes - 1] = rows.n_cols;
    say(problem, " %dx%d", (int)rows.n_rows, (int)rows.n_cols);
    rows.content = choose_content(s, problem);
    return rows;
}

/* The members that all params of rows have. */
#define SET_ROWS(params, rows)                                                                                         \
    do {                                                                                                               \
        (params)->dtype = (rows)->dtype;                                                                               \
        (params)->n_batch_dims = (rows)->n_axes - 1;                                                                   \
        memcpy((params)->batch_shape, (rows)->dims, sizeof(rows)->dims);                                               \
        (params)->n_rows = (rows)->n_rows;                                                                             \
        (params)->n_cols = (rows)->n_cols;                                                                             \
    } while (0)

static struct part *add(struct source *s, struct problem *problem, const char *name, struct cattn_tensor *tensor,
                        enum role role, enum element element, const struct rows *rows) {
    const unsigned broadcast = role == INPUT ? choose_broadcast(s, rows->n_axes) : 0;
    struct array array = make_array(s, role, element, rows->n_axes, rows->dims, broadcast);
    if (role == INPUT)
        fill_numbers(s, &array, rows->content);
    return add_part(problem, problem->n_parts, name, "C", tensor, array);
}

/* One number for each column: a weight, a bias or its gradient. */
static void add_columns(struct source *s, struct problem *problem, const char *name, struct cattn_tensor *tensor,
                        enum role role, const struct rows *rows) {
    struct rows columns = {.n_axes = 1, .dims = {rows->n_cols}};
    add(s, problem, name, tensor, role, computed_element(rows->dtype), &columns);
}

static struct part *add_mask(struct source *s, struct problem *problem, struct cattn_tensor *tensor,
                             const struct rows *rows) {
    static const uint64_t hidden[] = {16, 2, 1};
    struct part *mask = add(s, problem, "mask", tensor, INPUT, BYTE, rows);
    fill_integers(s, &mask->array, 1, 1);
    set_some(s, &mask->array, CHOOSE_FROM(s, hidden), 0);
    say(problem, " mask");
    return mask;
}

/* The last part is the result; it may lie in the memory of the first `n` parts. */
static void may_share(struct problem *problem, int n) {
    problem->result = problem->n_parts - 1;
    problem->shareable[0] = n > 0 ? 0 : -1;
    problem->shareable[1] = n > 1 ? 1 : -1;
}

#define RUN(name, function)                                                                                            \
    static enum cattn_status run_##name(struct source *s, struct problem *problem, const struct way *way) {            \
        (void)s;                                                                                                       \
        problem->of.name.num_threads = way->num_threads;                                                               \
        return function(&problem->of.name);                                                                            \
    }
RUN(softmax, cattn_softmax)
RUN(softmax_backward, cattn_softmax_backward)
RUN(dropout, cattn_dropout)
RUN(rope, cattn_rope)
RUN(norm, cattn_norm)
RUN(norm_backward, cattn_norm_backward)
RUN(activation, cattn_activate)

static void choose_softmax_backward(struct source *s, struct problem *problem) {
    struct cattn_softmax_backward_params *p = &problem->of.softmax_backward;
    const struct rows rows = choose_rows(s, problem, false);
    SET_ROWS(p, &rows);
    p->scale = 0.5;
    problem->run = run_softmax_backward;
    add(s, problem, "grad", &p->grad, INPUT, rows.element, &rows);
    add(s, problem, "weights", &p->weights, INPUT, rows.element, &rows);
    add(s, problem, "out", &p->out, OUTPUT, rows.element, &rows);
    may_share(problem, 2);
}

static void choose_softmax(struct source *s, struct problem *problem) {
    static const double scales[] = {1, 0.5, -1, 0, 30};
    struct cattn_softmax_params *p = &problem->of.softmax;
    if (one_in(s, 3)) {
        say(problem, " backward");
        choose_softmax_backward(s, problem);
        return;
    }
    const struct rows rows = choose_rows(s, problem, true);
    SET_ROWS(p, &rows);
    p->storage = rows.storage;
    p->scale = CHOOSE_FROM(s, scales);
    p->method = s->has_bytes && one_in(s, 4) ? CATTN_SOFTMAX_RENORMALIZE : CATTN_SOFTMAX_PLAIN;
    p->is_causal = rows.n_axes > 1 && one_in(s, 3);
    if (p->is_causal)
        choose_ranges(s, problem, &p->ranges, rows.dims[rows.n_axes - 2], rows.n_cols);
    problem->run = run_softmax;
    problem->checks = WEIGHTS_OF_SOFTMAX;
    problem->is_renormalized = p->method == CATTN_SOFTMAX_RENORMALIZE;
    add(s, problem, "x", &p->x, INPUT, rows.element, &rows);
    if (one_in(s, 2))
        add_mask(s, problem, &p->mask, &rows);
    add(s, problem, "out", &p->out, OUTPUT, rows.element, &rows);
    may_share(problem, 1);
}

static void choose_dropout_of_rows(struct source *s, struct problem *problem) {
    struct cattn_dropout_params *p = &problem->of.dropout;
    const struct rows rows = choose_rows(s, problem, true);
    SET_ROWS(p, &rows);
    p->storage = rows.storage;
    choose_dropout(s, problem, &p->dropout, true);
    problem->run = run_dropout;
    problem->checks = DROPPED;
    add(s, problem, "x", &p->x, INPUT, rows.element, &rows);
    if (!one_in(s, 3))
        add(s, problem, "mask", &p->mask, OUTPUT, BYTE, &rows);
    add(s, problem, "out", &p->out, OUTPUT, rows.element, &rows);
    may_share(problem, 1);
}

/* ---- rotary positions ---- */

/* One statement for each number: C does not fix the order in which initialisers are evaluated. */
static void choose_scaling(struct source *s, struct cattn_rope_scaling *scaling) {
    scaling->type = (enum cattn_rope_type)choose(s, CATTN_ROPE_LLAMA3 + 1);
    scaling->truncate = one_in(s, 2);
    scaling->factor = 1 + (double)choose(s, 64) / 8;
    scaling->original_length = 1 + (double)choose(s, 900);
    scaling->low_freq_factor = (double)(1 + choose(s, 16)) / 4;
    scaling->high_freq_factor = scaling->low_freq_factor + (double)(1 + choose(s, 16)) / 4;
    scaling->beta_slow = (double)(1 + choose(s, 16)) / 4;
    scaling->beta_fast = scaling->beta_slow + (double)choose(s, 32);
    scaling->attention_factor = one_in(s, 3) ? 1.25 : 0;
    scaling->mscale = one_in(s, 2) ? 0.75 : 0;
    scaling->mscale_all_dim = one_in(s, 2) ? 1.5 : 0;
}

/* Positions of all tokens, or of fewer that broadcast: near and far ones, whole and between, below 2^53. */
static void choose_positions(struct source *s, struct problem *problem, const struct rows *rows) {
    struct cattn_rope_params *p = &problem->of.rope;
    const int n = rows->n_axes - 1;
    struct array array = make_array(s, INPUT, F64, n, rows->dims, choose_broadcast(s, n) & ((1u << (n - 1)) - 1));
    for (int64_t i = 0; i < array.span; i++) {
        const uint64_t word = split_mix(&s->noise);
        const double position = ldexp((double)(int64_t)(word >> 8 & 0xfff) - 2048, (int)(word % 42) - 2);
        set_number(&array, i - array.low, word >> 62 ? nearbyint(position) : position);
        p->length = fmax(p->length, number_at(&array, i - array.low) + 1);
    }
    array.sum = sum_of(&array);
    add_part(problem, problem->n_parts, "positions", "R", &p->positions, array);
    say(problem, " positions");
}

static void choose_rope(struct source *s, struct problem *problem) {
    static const double thetas[] = {10000, 1.5, 500000, 1e300};
    struct cattn_rope_params *p = &problem->of.rope;
    struct rows rows = choose_rows(s, problem, true);
    if (rows.n_axes == 1) { /* a matrix of one row */
        rows.dims[1] = rows.n_cols;
        rows.dims[0] = 1;
        rows.n_axes = 2;
    }
    p->dtype = rows.dtype;
    p->storage = rows.storage;
    p->n_batch_dims = rows.n_axes - 2;
    memcpy(p->batch_shape, rows.dims, sizeof rows.dims);
    p->seqlen = rows.dims[rows.n_axes - 2];
    p->n_batch = 1;
    for (int d = 0; d < p->n_batch_dims; d++)
        p->n_batch *= p->batch_shape[d];
    p->n_cols = rows.n_cols;
    p->rotary_dim = one_in(s, 2) ? rows.n_cols / 2 * 2 : between(s, 0, rows.n_cols / 2) * 2;
    p->interleaved = one_in(s, 2);
    p->inverse = one_in(s, 2);
    p->theta = CHOOSE_FROM(s, thetas);
    choose_scaling(s, &p->scaling);
    if (p->scaling.type == CATTN_ROPE_DYNAMIC && p->rotary_dim < 4)
        p->scaling.type = CATTN_ROPE_DEFAULT;
    p->length = (double)p->seqlen;
    say(problem, " %d rotated, scaling %d", (int)p->rotary_dim, (int)p->scaling.type);
    problem->run = run_rope;
    add(s, problem, "x", &p->x, INPUT, rows.element, &rows)->letters = "RC";
    if (one_in(s, 2))
        choose_positions(s, problem, &rows);
    add(s, problem, "out", &p->out, OUTPUT, rows.element, &rows)->letters = "RC";
    may_share(problem, 1);
}

/* ---- norms and activations ---- */

static void choose_norm_backward(struct source *s, struct problem *problem) {
    struct cattn_norm_backward_params *p = &problem->of.norm_backward;
    const struct rows rows = choose_rows(s, problem, false);
    SET_ROWS(p, &rows);
    p->eps = 1e-3;
    p->centred = one_in(s, 2);
    problem->run = run_norm_backward;
    add(s, problem, "grad", &p->grad, INPUT, rows.element, &rows);
    add(s, problem, "x", &p->x, INPUT, rows.element, &rows);
    if (one_in(s, 2)) {
        add_columns(s, problem, "weight", &p->weight, INPUT, &rows);
        add_columns(s, problem, "grad_weight", &p->grad_weight, OUTPUT, &rows);
    }
    if (p->centred)
        add_columns(s, problem, "grad_bias", &p->grad_bias, OUTPUT, &rows);
    add(s, problem, "grad_x", &p->grad_x, OUTPUT, rows.element, &rows);
    may_share(problem, 2);
    say(problem, p->centred ? " centred" : "");
}

static void choose_norm(struct source *s, struct problem *problem) {
    struct cattn_norm_params *p = &problem->of.norm;
    if (one_in(s, 2)) {
        say(problem, " backward");
        choose_norm_backward(s, problem);
        return;
    }
    const struct rows rows = choose_rows(s, problem, true);
    SET_ROWS(p, &rows);
    p->storage = rows.storage;
    p->eps = one_in(s, 2) ? 1e-6 : 0;
    p->centred = one_in(s, 2);
    problem->run = run_norm;
    add(s, problem, "x", &p->x, INPUT, rows.element, &rows);
    if (one_in(s, 2))
        add_columns(s, problem, "weight", &p->weight, INPUT, &rows);
    if (one_in(s, 2))
        add_columns(s, problem, "bias", &p->bias, INPUT, &rows);
    add(s, problem, "out", &p->out, OUTPUT, rows.element, &rows);
    may_share(problem, 1);
    say(problem, p->centred ? " centred" : "");
}

static void choose_activation(struct source *s, struct problem *problem) {
    struct cattn_activation_params *p = &problem->of.activation;
    const struct rows rows = choose_rows(s, problem, true);
    SET_ROWS(p, &rows);
    p->storage = rows.storage;
    p->which = (enum cattn_activation)choose(s, CATTN_SILU + 1);
    const bool has_grad = one_in(s, 2);
    problem->run = run_activation;
    add(s, problem, "x", &p->x, INPUT, rows.element, &rows);
    if (has_grad)
        add(s, problem, "grad", &p->grad, INPUT, rows.element, &rows);
    add(s, problem, "out", &p->out, OUTPUT, rows.element, &rows);
    may_share(problem, has_grad ? 2 : 1);
    say(problem, " function %d%s", (int)p->which, has_grad ? " backward" : "");
}

/* ---- products of matrices ---- */

enum { A, B, PRODUCT_BIAS, PRODUCT, A_SCALE, B_SCALE };

static struct cattn_operand operand_of(const struct problem *problem, enum cattn_storage storage, int which) {
    const struct part *part = &problem->parts[which], *scale = &problem->parts[which == A ? A_SCALE : B_SCALE];
    const struct cattn_tensor *tensor = part->tensor, *scales = &problem->tensors[which == A ? A_SCALE : B_SCALE];
    struct cattn_operand operand = {.storage = is_quantized(&part->array)   ? quantized_storage(part->array.element)
                                               : part->array.element == F32 ? CATTN_STORED_PLAIN
                                                                            : storage,
                                    .data = tensor->data,
                                    .batch = tensor->head,
                                    .row = tensor->row,
                                    .col = tensor->col};
    if (scale->present) {
        operand.scale = scales->data;
        operand.scale_batch = scales->head;
        operand.scale_row = scales->row;
        operand.scale_col = scales->col;
    }
    return operand;
}

static enum cattn_status run_product(struct source *s, struct problem *problem, const struct way *way) {
    struct cattn_product_params *p = &problem->of.product;
    const struct cattn_tensor *out = &problem->tensors[PRODUCT], *bias = &problem->tensors[PRODUCT_BIAS];
    (void)s;
    p->num_threads = way->num_threads;
    p->a = operand_of(problem, p->out_storage, A);
    p->b = operand_of(problem, p->out_storage, B);
    p->out = out->data;
    p->out_batch = out->head;
    p->out_a = out->row;
    p->out_b = out->col;
    p->bias = problem->parts[PRODUCT_BIAS].present ? bias->data : NULL;
    p->bias_batch = bias->head;
    p->bias_a = bias->row;
    p->bias_b = bias->col;
    return cattn_product(p);
}

static void choose_product(struct source *s, struct problem *problem) {
    static const char *const BF16_WORDS[] = {"", " compute_dtype bfloat16,", " compute_dtype bfloat16_tiles,"};
    /* around vectors, 8 rows, blocks of rows, chains and slabs, of elements and of pairs */
    static const int64_t counts[] = {0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 95, 97, 193, 230};
    static const int64_t terms[] = {0,  1,  2,  5,   15,  16,  17,  31,  32,   33,
                                    64, 65, 96, 100, 511, 512, 513, 700, 1023, 1025};
    struct cattn_product_params *p = &problem->of.product;
    const enum element element = choose_type(s, problem, true, &p->dtype, &p->out_storage);
    if (p->dtype == CATTN_F32 && one_in(s, 2))
        p->bf16_products = one_in(s, 2) ? CATTN_BF16_TILES : CATTN_BF16_PAIRS;
    p->n_batch = between(s, 1, 3);
    p->n_a = CHOOSE_FROM(s, counts);
    p->n_b = CHOOSE_FROM(s, counts);
    p->depth = CHOOSE_FROM(s, terms);
    while ((double)p->n_batch * (double)p->n_a * (double)p->n_b * (double)p->depth > s->budget) {
        p->n_a = cattn_ceil_div(p->n_a, 2);
        p->n_b = cattn_ceil_div(p->n_b, 2);
        p->depth = p->n_a + p->n_b > 2 ? p->depth : p->depth / 2;
    }
    say(problem, "%s %d of %dx%dx%d", BF16_WORDS[p->bf16_products], (int)p->n_batch, (int)p->n_a, (int)p->n_b,
        (int)p->depth);
    const enum content content = choose_content(s, problem);
    const int64_t dims[][3] = {
        {p->n_batch, p->n_a, p->depth}, {p->n_batch, p->n_b, p->depth}, {p->n_batch, p->n_a, p->n_b}};
    for (int i = A; i <= B; i++) {
        struct array array = make_array(s, INPUT, element, 3, dims[i], choose_broadcast(s, 3));
        fill_numbers(s, &array, content);
        add_part(problem, i, i == A ? "a" : "b", "NTS", &problem->tensors[i], array);
        if (element == F32 && one_in(s, 4))
            quantize(s, problem, i, i == A ? A_SCALE : B_SCALE, i == A ? "scale of a" : "scale of b", "NTS",
                     &problem->tensors[i == A ? A_SCALE : B_SCALE], content);
    }
    if (one_in(s, 2)) { /* a number for each column of the product, or for each row */
        const bool by_columns = !one_in(s, 3);
        const int64_t sizes[] = {p->n_batch, by_columns ? p->n_b : p->n_a};
        struct array bias = make_array(s, INPUT, computed_element(p->dtype), 2, sizes, choose_broadcast(s, 2));
        fill_numbers(s, &bias, content);
        add_part(problem, PRODUCT_BIAS, "bias", by_columns ? "NC" : "NR", &problem->tensors[PRODUCT_BIAS], bias);
    }
    problem->run = run_product;
    add_part(problem, PRODUCT, "product", "NTS", &problem->tensors[PRODUCT],
             make_array(s, OUTPUT, element, 3, dims[2], 0));
    problem->result = PRODUCT;
    problem->shareable[0] = problem->shareable[1] = -1;
}

/* ---- masks ---- */

static enum cattn_status run_mask(struct source *s, struct problem *problem, const struct way *way) {
    struct cattn_mask_params *p = &problem->of.mask;
    (void)s;
    p->num_threads = way->num_threads;
    p->mask = problem->parts[0].array.memory;
    return cattn_mask(p);
}

static void choose_mask(struct source *s, struct problem *problem) {
    static const int64_t sizes[] = {0, 1, 2, 7, 8, 33, 64, 97, 200};
    struct cattn_mask_params *p = &problem->of.mask;
    p->seqlen_q = CHOOSE_FROM(s, sizes);
    p->seqlen_k = CHOOSE_FROM(s, sizes);
    choose_ranges(s, problem, &p->ranges, p->seqlen_q, p->seqlen_k);
    if (one_in(s, 2)) {
        p->ranges.query_length = between(s, 0, p->seqlen_q);
        p->ranges.key_length = between(s, 0, p->seqlen_k);
    }
    const int64_t dims[] = {p->seqlen_q, p->seqlen_k};
    say(problem, " %dx%d", (int)p->seqlen_q, (int)p->seqlen_k);
    problem->run = run_mask;
    problem->checks = VISIBLE;
    add_part(problem, 0, "mask", "RC", NULL, make_array(s, RESULT, BYTE, 2, dims, 0));
    may_share(problem, 0);
}

/* ---- PyTorch's random numbers ---- */

/* The numbers, then words that show the state. */
static enum cattn_status run_stream(struct source *s, struct problem *problem, const struct way *way) {
    struct cattn_torch_fill *fill = &problem->stream, words = {.distribution = CATTN_TORCH_INTEGER, .range = 1u << 31};
    uint8_t state[CATTN_TORCH_STATE_BYTES];
    (void)s;
    cattn_torch_export(&problem->torch, state);
    if (way->reimports && !cattn_torch_import(&problem->torch, state))
        return CATTN_NO_MEMORY;
    fill->out = problem->parts[0].array.memory;
    fill->probabilities = problem->parts[2].present ? problem->parts[2].array.memory : NULL;
    const enum cattn_status status = cattn_torch_fill(&problem->torch, fill);
    words.out = problem->parts[1].array.memory;
    words.n = problem->parts[1].array.span;
    return status == CATTN_OK ? cattn_torch_fill(&problem->torch, &words) : status;
}

static void choose_stream(struct source *s, struct problem *problem) {
    static const char *const names[] = {"uniform", "normal", "integer", "bernoulli", "keep"};
    static const double lows[] = {0, -1, 0.25, -3e38}, probabilities[] = {0.5, 0, 1, 0.1};
    struct cattn_torch_fill *fill = &problem->stream;
    cattn_torch_seed(&problem->fresh, choose(s, 0));
    problem->fresh.stream = one_in(s, 2) ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL;
    fill->distribution = (enum cattn_torch_distribution)choose(s, 5);
    fill->dtype = one_in(s, 2) ? CATTN_F64 : CATTN_F32;
    if (!s->has_bytes && fill->distribution == CATTN_TORCH_NORMAL)
        fill->dtype = CATTN_F32; /* logarithm, sine and cosine in float64 come from the C library */
    const int64_t several = between(s, 1, 60);
    fill->n = between(s, 0, 39) * several;
    fill->low = CHOOSE_FROM(s, lows);
    fill->high = fill->low < -4 ? 0 : fill->low + (double)choose(s, 3);
    fill->range = one_in(s, 2) ? choose(s, 0) | 1 : 1 + choose(s, 256);
    fill->base = -(int64_t)choose(s, 256);
    fill->probability = CHOOSE_FROM(s, probabilities);
    const bool is_mask = fill->distribution == CATTN_TORCH_DROPOUT_MASK;
    if (is_mask) {
        fill->skip = between(s, 0, 5000);
        fill->probability = fill->probability > 0 && fill->probability < 1 ? fill->probability : 0.5;
    }
    const enum element element = is_mask                                     ? BYTE
                                 : fill->distribution == CATTN_TORCH_INTEGER ? INT64
                                                                             : computed_element(fill->dtype);
    const int64_t n_words = 700;
    say(problem, " %s %d", names[fill->distribution], (int)fill->n);
    problem->run = run_stream;
    problem->checks = RANDOM;
    add_part(problem, 0, "numbers", "", NULL, make_array(s, RESULT, element, 1, &fill->n, 0));
    add_part(problem, 1, "words", "", NULL, make_array(s, RESULT, INT64, 1, &n_words, 0));
    if (fill->distribution == CATTN_TORCH_BERNOULLI && one_in(s, 2)) {
        struct array chances = make_array(s, RESULT, computed_element(fill->dtype), 1, &fill->n, 0);
        chances.role = INPUT;
        for (int64_t i = 0; i < chances.span; i++)
            set_number(&chances, i, (double)(split_mix(&s->noise) % 5) / 4);
        chances.sum = sum_of(&chances);
        add_part(problem, 2, "probabilities", "", NULL, chances);
    }
    problem->shareable[0] = problem->shareable[1] = -1;
}

/* ---- all of them ---- */

const struct kind kinds[N_KINDS] = {
    {"attention", choose_attention},
    {"gathered", choose_gathered},
    {"packed", choose_packed},
    {"bf16_products", choose_bf16_products},
    {"backward", choose_backward},
    {"jvp", choose_jvp},
    {"jvp_backward", choose_jvp_backward},
    {"statistics", choose_statistics},
    {"choose_keys", choose_keys},
    {"softmax", choose_softmax},
    {"dropout", choose_dropout_of_rows},
    {"rope", choose_rope},
    {"norm", choose_norm},
    {"activation", choose_activation},
    {"product", choose_product},
    {"mask", choose_mask},
    {"stream", choose_stream},
    {"linear_attention", choose_linear_attention},
    {"causal_conv", choose_causal_conv},
};

void choose_problem(struct source *s, struct problem *problem, const struct kind *kind) {
    memset(problem, 0, sizeof *problem);
    problem->kind = kind;
    problem->result = -1;
    kind->choose(s, problem);
}
