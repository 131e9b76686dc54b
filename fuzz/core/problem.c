/* problem.c -- turns bytes into a problem of attention: sizes around every boundary, options, arrays. */
#include <math.h>
#include <string.h>

#include "problem.h"

/* Limits of the multiply-adds of a call. */
static const int64_t BUDGETS[] = {2000, 2000, 5000, 5000, 10000, 10000, 30000, 30000};
enum { LARGE_BUDGET = 250000 }; /* several blocks of queries and keys; rare, because it takes so long */

/* ---- sizes ---- */

/* Sizes around those of a vector, a micro-tile, a tile, the chains of a sum, a block and a chunk. */
static const int64_t ROWS[] = {1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 31, 32, 33, 64, 95, 96, 97, 193};
static const int64_t KEYS[] = {0,  1,  2,  3,  5,   7,   8,   9,   13,  16,  17,  31,   32,   33,
                               63, 65, 95, 97, 127, 128, 191, 192, 193, 385, 577, 1535, 1537, 3073};
static const int64_t DEPTHS[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128};

static double work_of(const struct cattn_attention_params *p) {
    return cattn_attention_work(p) + (double)(p->n_batch * p->num_heads * p->seqlen_q);
}

static void choose_sizes(struct input *in, struct cattn_attention_params *p) {
    const uint8_t size = take_byte(in);
    const double budget = size % 32 == 31 ? LARGE_BUDGET : (double)BUDGETS[size % 8];
    bool is_empty[3] = {false};
    p->n_batch_dims = (int)take_below(in, 4);
    p->n_batch = 1;
    for (int d = 0; d < p->n_batch_dims; d++) {
        is_empty[d] = take_chance(in, 32);
        p->batch_shape[d] = is_empty[d] ? 1 : 1 + take_below(in, 3);
        p->n_batch *= p->batch_shape[d];
    }
    p->group_size = 1 + take_below(in, 4);
    p->num_heads = p->group_size * (1 + take_below(in, 3));
    p->seqlen_q = TAKE_FROM(in, ROWS);
    p->seqlen_k = TAKE_FROM(in, KEYS);
    p->head_dim = TAKE_FROM(in, DEPTHS);
    p->d_v = TAKE_FROM(in, DEPTHS);
    for (int d = 0; d < p->n_batch_dims && work_of(p) > budget; d++)
        if (p->batch_shape[d] > 1) {
            p->n_batch /= p->batch_shape[d];
            p->batch_shape[d] = 1;
        }
    if (work_of(p) > budget)
        p->num_heads = p->group_size;
    while (work_of(p) > budget && p->head_dim + p->d_v > 8) {
        p->head_dim /= 2;
        p->d_v /= 2;
    }
    while (work_of(p) > budget && p->seqlen_q > 3)
        p->seqlen_q = p->seqlen_q * 2 / 3;
    while (work_of(p) > budget && p->seqlen_k > 1)
        p->seqlen_k = p->seqlen_k * 2 / 3;
    for (int d = 0; d < p->n_batch_dims; d++)
        if (is_empty[d])
            p->batch_shape[d] = p->n_batch = 0;
}

/* ---- options ---- */

static void choose_dropout(struct input *in, struct problem *problem) {
    static const double probabilities[] = {0.5, 0.1, 0.9, 1.0, 0x1p-33, 0.3};
    struct cattn_dropout_spec *spec = &problem->back.forward.dropout;
    spec->enabled = take_chance(in, 3);
    const double p = TAKE_FROM(in, probabilities);
    spec->keep_probability = 1 - p;
    spec->threshold = (uint64_t)llround((1 - p) * 0x1p32);
    spec->keep_scale = p < 1 ? 1 / (1 - p) : 0;
    const bool serial = take_chance(in, 3);
    spec->seed = take_word(in);
    if (!spec->enabled || !serial || p == 1)
        return;
    cattn_torch_seed(&problem->torch, spec->seed);
    problem->torch.stream = take_chance(in, 2) ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL;
    spec->torch = &problem->torch;
}

int axes_of(const struct cattn_attention_params *p, int64_t row, int64_t col, int64_t *dims) {
    memcpy(dims, p->batch_shape, (size_t)p->n_batch_dims * sizeof *dims);
    dims[p->n_batch_dims] = p->num_heads;
    dims[p->n_batch_dims + 1] = row;
    dims[p->n_batch_dims + 2] = col;
    return p->n_batch_dims + 3;
}

/* Returns one bit for each axis; most bits are 0. */
static unsigned choose_broadcast(struct input *in, int n_axes) {
    return (unsigned)(take_byte(in) & take_byte(in)) >> 1 & ((1u << n_axes) - 1);
}

static void add_input(struct input *in, struct problem *problem, int which, enum element element, int n_axes,
                      const int64_t *dims, struct noise *noise, enum content content) {
    const unsigned broadcast = choose_broadcast(in, n_axes);
    problem->inputs[which] = make_input(in, element, n_axes, dims, broadcast, noise, content);
    problem->has_input[which] = true;
    if (which == BIAS_0 || which == BIAS_1)
        problem->bias_broadcast = broadcast;
}

/* Fills the array with integers from `least` to `most`. */
static void set_integers(struct array *array, struct noise *noise, int64_t least, int64_t most) {
    for (int64_t i = 0; i < array->span; i++) {
        const int64_t number = least + (int64_t)(noise_word(noise) % (uint64_t)(most - least + 1));
        set_number(array, i - array->low, (double)number);
    }
    renew_sum(array);
}

static void choose_ranges(struct input *in, struct problem *problem, struct noise *noise) {
    struct cattn_attention_params *p = &problem->back.forward;
    struct cattn_ranges *r = &p->ranges;
    const int64_t sides[] = {CATTN_UNBOUNDED, CATTN_UNBOUNDED, 0, 1, 5, 30, 150, INT64_MAX - 1};
    r->left = TAKE_FROM(in, sides);
    r->right = take_chance(in, 2) ? 0 : TAKE_FROM(in, sides);
    r->lower_right = take_chance(in, 3);
    r->seqlen_k = p->seqlen_k;
    r->offset = take_chance(in, 16)  ? CATTN_MAX_OFFSET * (take_chance(in, 2) ? 1 : -1)
                : take_chance(in, 2) ? 0
                                     : take_below(in, p->seqlen_q + p->seqlen_k + 1) - p->seqlen_q;
    r->query_length = p->seqlen_q;
    r->key_length = p->seqlen_k;
    const int n = p->n_batch_dims;
    if (!r->lower_right && take_chance(in, 6)) {
        add_input(in, problem, OFFSETS, INT64, n, p->batch_shape, noise, PLAIN);
        set_integers(&problem->inputs[OFFSETS], noise, -p->seqlen_q, p->seqlen_k);
    }
    if (take_chance(in, 5)) {
        add_input(in, problem, QUERY_LENGTHS, INT64, n, p->batch_shape, noise, PLAIN);
        set_integers(&problem->inputs[QUERY_LENGTHS], noise, 0, p->seqlen_q);
    }
    if (take_chance(in, 5)) {
        add_input(in, problem, KEY_LENGTHS, INT64, n, p->batch_shape, noise, PLAIN);
        set_integers(&problem->inputs[KEY_LENGTHS], noise, 0, p->seqlen_k);
    }
}

/* Padding on the left. Chosen last, so that older inputs keep their meaning. */
static void choose_first_keys(struct input *in, struct problem *problem, struct noise *noise) {
    struct cattn_attention_params *p = &problem->back.forward;
    if (!take_chance(in, 4))
        return;
    p->ranges.first_key = take_below(in, p->seqlen_k + 1);
    if (take_chance(in, 2)) {
        add_input(in, problem, FIRST_KEYS, INT64, p->n_batch_dims, p->batch_shape, noise, PLAIN);
        set_integers(&problem->inputs[FIRST_KEYS], noise, 0, p->seqlen_k);
    }
}

/* Makes key or value quantized, with one scale for each element, token, column, or matrix. */
static enum cattn_storage quantize(struct input *in, struct problem *problem, int which, int scale, struct noise *noise,
                                   enum content content) {
    const struct array plain = problem->inputs[which];
    const enum element element = take_chance(in, 2) ? F8 : INT8;
    unsigned broadcast = choose_broadcast(in, plain.n_axes);
    problem->inputs[which] = make_quantized(in, element, plain.n_axes, plain.dim, broadcast, noise, content);
    broadcast = choose_broadcast(in, plain.n_axes) | (unsigned)take_below(in, 4) << (plain.n_axes - 2);
    problem->inputs[scale] = make_scales(in, plain.n_axes, plain.dim, broadcast, noise, content);
    problem->has_input[scale] = true;
    return element == F8 ? CATTN_STORED_F8 : CATTN_STORED_I8;
}

/* Chosen after the first keys, for the same reason. */
static void choose_quantized(struct input *in, struct problem *problem, struct noise *noise, enum content content) {
    struct cattn_attention_params *p = &problem->back.forward;
    const int64_t kind = take_below(in, 6);
    if (p->dtype != CATTN_F32 || p->storage != CATTN_STORED_PLAIN)
        return;
    if (kind & 1)
        p->quantized_key = quantize(in, problem, KEY, KEY_SCALE, noise, content);
    if (kind >= 3 && problem->has_input[VALUE])
        p->quantized_value = quantize(in, problem, VALUE, VALUE_SCALE, noise, content);
    problem->dequantizes = take_chance(in, 2);
}

void dequantize(struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    if (p->quantized_key)
        problem->inputs[KEY] = dequantized(&problem->inputs[KEY], &problem->inputs[KEY_SCALE]);
    if (p->quantized_value)
        problem->inputs[VALUE] = dequantized(&problem->inputs[VALUE], &problem->inputs[VALUE_SCALE]);
    p->quantized_key = p->quantized_value = CATTN_STORED_PLAIN;
    problem->has_input[KEY_SCALE] = problem->has_input[VALUE_SCALE] = false;
}

/* Sets one number in `one_in` to -inf. */
static void hide_some(struct array *bias, struct noise *noise, uint64_t one_in) {
    for (int64_t i = 0; i < bias->span; i++)
        if (noise_word(noise) % one_in == 0)
            set_number(bias, i - bias->low, (double)-INFINITY);
    renew_sum(bias);
}

static void choose_score_options(struct input *in, struct problem *problem, struct noise *noise, enum content content) {
    static const double caps[] = {0, 0, 0, 0.7, 5, 50, 1e-30};
    struct cattn_attention_params *p = &problem->back.forward;
    const enum element element = computed_element(p->dtype);
    int64_t dims[MAX_AXES];
    p->score_options.softcap = TAKE_FROM(in, caps);
    axes_of(p, 0, 0, dims);
    if (take_chance(in, 4)) {
        add_input(in, problem, SLOPES, element, p->n_batch_dims + 1, dims, noise, TIES);
        struct array *slopes = &problem->inputs[SLOPES];
        for (int64_t i = 0; i < slopes->span; i++) /* slopes are positive */
            set_number(slopes, i - slopes->low, (double)(1 + noise_word(noise) % 64) / 64);
        renew_sum(slopes);
    }
    if (take_chance(in, 4)) {
        add_input(in, problem, SINKS, element, p->n_batch_dims + 1, dims, noise, content);
        if (take_chance(in, 3))
            hide_some(&problem->inputs[SINKS], noise, 2);
    }
}

static void choose_masks(struct input *in, struct problem *problem, struct noise *noise, enum content content) {
    struct cattn_attention_params *p = &problem->back.forward;
    int64_t dims[MAX_AXES];
    const int n_axes = axes_of(p, p->seqlen_q, p->seqlen_k, dims);
    const uint8_t kind = take_byte(in);
    if (kind & 1) {
        add_input(in, problem, MASK, BYTE, n_axes, dims, noise, PLAIN);
        struct array *mask = &problem->inputs[MASK];
        static const uint64_t densities[] = {16, 2, 1};
        const uint64_t one_in = TAKE_FROM(in, densities);
        for (int64_t i = 0; i < mask->span; i++)
            mask->memory[i] = noise_word(noise) % 16 < one_in ? 0 : 1;
        renew_sum(mask);
    }
    p->n_bias = kind >> 1 & 1 ? 1 : kind >> 2 & kind >> 3 & 1 ? 2 : 0;
    for (int b = 0; b < p->n_bias; b++) {
        add_input(in, problem, BIAS_0 + b, computed_element(p->dtype), n_axes, dims, noise, content);
        if (take_chance(in, 2))
            hide_some(&problem->inputs[BIAS_0 + b], noise, 1 + (uint64_t)take_below(in, 6));
    }
}

/* ---- the problem ---- */

static void choose_outputs(struct input *in, struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    const uint8_t wanted = take_byte(in);
    bool *has = problem->has_output;
    has[OUT] = (wanted & 0x30) != 0x30;
    problem->backward = has[OUT] && wanted >> 7;
    has[WEIGHTS] = !has[OUT] || (!problem->backward && wanted & 1);
    has[LSE] = problem->backward || (has[OUT] && wanted & 2);
    has[DROPOUT_MASK] = !problem->backward && wanted & 4;
    p->store_scores = !has[OUT] && wanted & 8;
    p->ranges.all_visible = p->store_scores && wanted & 0x40;
    if (p->store_scores) {
        p->dropout.enabled = false;
        p->dropout.torch = NULL;
    }
    if (!has[OUT])
        p->d_v = 0;
    const enum element stored = stored_element(p->dtype, p->storage);
    int64_t dims[MAX_AXES];
    for (int i = 0; i < N_OUTPUTS; i++) {
        if (!has[i])
            continue;
        const int n_axes = axes_of(p, p->seqlen_q, i == OUT ? p->d_v : p->seqlen_k, dims) - (i == LSE);
        problem->outputs[i] = make_output(in,
                                          i == LSE            ? computed_element(p->double_lse ? CATTN_F64 : p->dtype)
                                          : i == DROPOUT_MASK ? BYTE
                                                              : stored,
                                          n_axes, dims);
    }
}

static void add_gradient(struct problem *problem, int which, int n_axes, const int64_t *dims, unsigned broadcast) {
    problem->gradients[which] = make_zeros(computed_element(problem->back.forward.dtype), n_axes, dims, broadcast);
    problem->has_gradient[which] = true;
}

/* Makes the gradients as the binding does: the bias's in its own shape, or summed over rows or columns. */
static void make_gradients(struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    int64_t dims[MAX_AXES];
    int n_axes = axes_of(p, p->seqlen_q, p->head_dim, dims);
    add_gradient(problem, GRAD_QUERY, n_axes, dims, 0);
    axes_of(p, p->seqlen_k, p->head_dim, dims);
    dims[p->n_batch_dims] = p->num_heads / p->group_size;
    add_gradient(problem, GRAD_KEY, n_axes, dims, 0);
    dims[p->n_batch_dims + 2] = p->d_v;
    add_gradient(problem, GRAD_VALUE, n_axes, dims, 0);
    axes_of(p, p->seqlen_q, p->seqlen_k, dims);
    if (problem->has_input[SINKS])
        add_gradient(problem, GRAD_SINKS, p->n_batch_dims + 1, dims, 0);
    problem->back.bias_sum = CATTN_BIAS_NO_SUM;
    if (p->n_bias == 0)
        return;
    const unsigned row = 1u << (p->n_batch_dims + 1), col = 1u << (p->n_batch_dims + 2);
    if (problem->bias_broadcast & row && p->seqlen_q != 1) {
        problem->back.bias_sum = CATTN_BIAS_SUM_ROWS;
        add_gradient(problem, GRAD_BIAS, n_axes, dims, row);
    } else if (problem->bias_broadcast & col && p->seqlen_k != 1) {
        problem->back.bias_sum = CATTN_BIAS_SUM_COLS;
        add_gradient(problem, GRAD_BIAS, n_axes, dims, col);
    } else {
        add_gradient(problem, GRAD_BIAS, n_axes, dims, problem->bias_broadcast);
    }
}

void choose_problem(struct input *in, struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    static const double scales[] = {1, 0.25, -0.5, 0, 0.125};
    static const enum content contents[] = {PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, TIES, TIES, EXTREME};
    int64_t dims[MAX_AXES];
    choose_sizes(in, p);
    const uint8_t type = take_byte(in);
    p->dtype = (type & 3) == 1 ? CATTN_F64 : CATTN_F32;
    p->double_lse = type & 4;
    p->storage = (type & 3) == 2 ? CATTN_STORED_F16 : (type & 3) == 3 ? CATTN_STORED_BF16 : CATTN_STORED_PLAIN;
    p->score_options.scale = TAKE_FROM(in, scales);
    const enum content content = TAKE_FROM(in, contents);
    struct noise noise = {take_byte(in)};
    choose_dropout(in, problem);
    choose_outputs(in, problem);
    choose_ranges(in, problem, &noise);
    choose_masks(in, problem, &noise, content);
    choose_score_options(in, problem, &noise, content);
    if (p->store_scores && take_chance(in, 2)) { /* stages before the softmax have no mask or sinks */
        problem->has_input[MASK] = false;
        problem->has_input[SINKS] = false;
    }
    const enum element stored = stored_element(p->dtype, p->storage);
    const int n_axes = axes_of(p, p->seqlen_q, p->head_dim, dims);
    add_input(in, problem, QUERY, stored, n_axes, dims, &noise, content);
    axes_of(p, p->seqlen_k, p->head_dim, dims);
    dims[p->n_batch_dims] = p->num_heads / p->group_size;
    add_input(in, problem, KEY, stored, n_axes, dims, &noise, content);
    dims[p->n_batch_dims + 2] = p->d_v;
    if (problem->has_output[OUT])
        add_input(in, problem, VALUE, stored, n_axes, dims, &noise, content);
    axes_of(p, p->seqlen_q, p->d_v, dims);
    if (problem->backward) {
        problem->grad_out = make_input(in, stored, n_axes, dims, 0, &noise, content);
        make_gradients(problem);
        problem->has_grad_lse = take_chance(in, 2);
    }
    if (problem->has_grad_lse)
        problem->grad_lse = make_input(in, computed_element(CATTN_F64), n_axes - 1, dims, 0, &noise, content);
    choose_first_keys(in, problem, &noise);
    choose_quantized(in, problem, &noise, content);
    problem->is_tame = content != EXTREME;
}
