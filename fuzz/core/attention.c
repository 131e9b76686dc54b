/* attention.c -- fuzz target: any attention, forwards and back, computed in two ways.
 *
 * The second time on another table, path and number of threads, with the arrays elsewhere in memory, and with NaN in
 * all that no query sees: every output must have the same bits.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

#include "core/torch_random.h"

/* Multiply-adds of a call. */
static const int64_t BUDGETS[] = {2000, 2000, 5000, 5000, 10000, 10000, 30000, 600000};

enum { QUERY, KEY, VALUE, MASK, BIAS_0, BIAS_1, SLOPES, SINKS, OFFSETS, QUERY_LENGTHS, KEY_LENGTHS, N_INPUTS };
enum { OUT, WEIGHTS, LSE, DROPOUT_MASK, N_OUTPUTS };
enum { GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS, GRAD_SINKS, N_GRADIENTS };
static const char *const INPUT_NAMES[] = {
    "query was changed",          "key was changed",         "value was changed",
    "attn_mask was changed",      "bias was changed",        "second bias was changed",
    "slopes were changed",        "sinks were changed",      "offsets were changed",
    "query lengths were changed", "key lengths were changed"};
static const char *const OUTPUT_NAMES[] = {"out differs", "weights differ", "lse differs", "dropout_mask differs"};
static const char *const GRADIENT_NAMES[] = {"grad_query differs", "grad_key differs", "grad_value differs",
                                             "grad_bias differs", "grad_sinks differ"};

struct problem {
    struct cattn_backward_params back;
    struct array inputs[N_INPUTS], outputs[N_OUTPUTS], gradients[N_GRADIENTS], grad_out;
    bool has_input[N_INPUTS], has_output[N_OUTPUTS], has_gradient[N_GRADIENTS];
    unsigned bias_broadcast; /* axes of the bias whose gradient is asked for */
    bool backward, is_tame;
    struct cattn_torch_random torch;
};

/* ---- sizes ---- */

/* Around a vector, a micro-tile, a tile; the chains of a sum; a block and a chunk. */
static const int64_t ROWS[] = {1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 31, 32, 33, 64, 95, 96, 97, 193};
static const int64_t KEYS[] = {0,  1,  2,  3,  5,   7,   8,   9,   13,  16,  17,  31,   32,   33,
                               63, 65, 95, 97, 127, 128, 191, 192, 193, 385, 577, 1535, 1537, 3073};
static const int64_t DEPTHS[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128};

static double work_of(const struct cattn_attention_params *p) {
    return cattn_attention_work(p) + (double)(p->n_batch * p->num_heads * p->seqlen_q);
}

static void choose_sizes(struct input *in, struct cattn_attention_params *p) {
    const double budget = (double)TAKE_FROM(in, BUDGETS);
    p->n_lead = (int)take_below(in, 4);
    p->n_batch = 1;
    for (int d = 0; d < p->n_lead; d++) {
        p->lead_shape[d] = take_chance(in, 32) ? 0 : 1 + take_below(in, 3);
        p->n_batch *= p->lead_shape[d];
    }
    p->group_size = 1 + take_below(in, 4);
    p->num_heads = p->group_size * (1 + take_below(in, 3));
    p->seqlen_q = TAKE_FROM(in, ROWS);
    p->seqlen_k = TAKE_FROM(in, KEYS);
    p->head_dim = TAKE_FROM(in, DEPTHS);
    p->d_v = TAKE_FROM(in, DEPTHS);
    for (int d = 0; d < p->n_lead && work_of(p) > budget; d++)
        if (p->lead_shape[d] > 1) {
            p->n_batch /= p->lead_shape[d];
            p->lead_shape[d] = 1;
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

static int64_t axes_of(const struct cattn_attention_params *p, int64_t row, int64_t col, int64_t *dims) {
    memcpy(dims, p->lead_shape, (size_t)p->n_lead * sizeof *dims);
    dims[p->n_lead] = p->num_heads;
    dims[p->n_lead + 1] = row;
    dims[p->n_lead + 2] = col;
    return p->n_lead + 3;
}

static void add_input(struct input *in, struct problem *problem, int which, enum element element, int n_axes,
                      const int64_t *dims, struct noise *noise, enum content content) {
    /* a bit for each axis, most of them 0 */
    const unsigned broadcast = (unsigned)(take_byte(in) & take_byte(in)) >> 1 & ((1u << n_axes) - 1);
    problem->inputs[which] = make_input(in, element, n_axes, dims, broadcast, noise, content);
    problem->has_input[which] = true;
    if (which == BIAS_0 || which == BIAS_1)
        problem->bias_broadcast = broadcast;
}

/* Every number of `array` becomes one of those from `least` to `most`. */
static void set_integers(struct array *array, struct noise *noise, int64_t least, int64_t most) {
    for (int64_t i = 0; i < array->span; i++) {
        const int64_t number = least + (int64_t)(noise_word(noise) % (uint64_t)(most - least + 1));
        memcpy(array->memory + i * (int64_t)sizeof number, &number, sizeof number);
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
    r->offset = take_chance(in, 16)  ? ((int64_t)1 << 62) * (take_chance(in, 2) ? 1 : -1)
                : take_chance(in, 2) ? 0
                                     : take_below(in, p->seqlen_q + p->seqlen_k + 1) - p->seqlen_q;
    r->query_length = p->seqlen_q;
    r->key_length = p->seqlen_k;
    const int n = p->n_lead;
    if (!r->lower_right && take_chance(in, 6)) {
        add_input(in, problem, OFFSETS, INT64, n, p->lead_shape, noise, PLAIN);
        set_integers(&problem->inputs[OFFSETS], noise, -p->seqlen_q, p->seqlen_k);
    }
    if (take_chance(in, 5)) {
        add_input(in, problem, QUERY_LENGTHS, INT64, n, p->lead_shape, noise, PLAIN);
        set_integers(&problem->inputs[QUERY_LENGTHS], noise, 0, p->seqlen_q);
    }
    if (take_chance(in, 5)) {
        add_input(in, problem, KEY_LENGTHS, INT64, n, p->lead_shape, noise, PLAIN);
        set_integers(&problem->inputs[KEY_LENGTHS], noise, 0, p->seqlen_k);
    }
}

/* -inf here and there. */
static void hide_some(struct array *bias, struct noise *noise, uint64_t one_in) {
    const size_t size = element_size(bias->element);
    for (int64_t i = 0; i < bias->span; i++)
        if (noise_word(noise) % one_in == 0) {
            const float single = -INFINITY;
            const double number = (double)-INFINITY;
            memcpy(bias->memory + (size_t)i * size, bias->element == F32 ? (const void *)&single : &number, size);
        }
    renew_sum(bias);
}

static void choose_shapers(struct input *in, struct problem *problem, struct noise *noise, enum content content) {
    static const double caps[] = {0, 0, 0, 0.7, 5, 50, 1e-30};
    struct cattn_attention_params *p = &problem->back.forward;
    const enum element element = computed_element(p->dtype);
    int64_t dims[MAX_AXES];
    p->softcap = TAKE_FROM(in, caps);
    axes_of(p, 0, 0, dims);
    if (take_chance(in, 4)) {
        add_input(in, problem, SLOPES, element, p->n_lead + 1, dims, noise, TIES);
        struct array *slopes = &problem->inputs[SLOPES];
        for (int64_t i = 0; i < slopes->span; i++) { /* above 0 */
            const double number = (double)(1 + noise_word(noise) % 64) / 64;
            const float single = (float)number;
            const size_t size = element_size(element);
            memcpy(slopes->memory + (size_t)i * size, element == F32 ? (const void *)&single : &number, size);
        }
        renew_sum(slopes);
    }
    if (take_chance(in, 4)) {
        add_input(in, problem, SINKS, element, p->n_lead + 1, dims, noise, content);
        if (take_chance(in, 3))
            hide_some(&problem->inputs[SINKS], noise, 2);
    }
}

static void choose_masks(struct input *in, struct problem *problem, struct noise *noise, enum content content) {
    struct cattn_attention_params *p = &problem->back.forward;
    int64_t dims[MAX_AXES];
    const int n_axes = (int)axes_of(p, p->seqlen_q, p->seqlen_k, dims);
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

/* ---- arrays to parameters ---- */

enum { HEAD = 1, ROW = 2, COL = 4 };

/* As the binding fills a tensor in. */
static void to_tensor(struct cattn_tensor *tensor, const struct array *array, bool present, int n_lead, int axes) {
    static uint64_t nothing;
    tensor->data = NULL;
    if (!present)
        return;
    int axis = array->n_axes;
    tensor->data = array->span ? array->memory + array->low * (int64_t)element_size(array->element) : (void *)&nothing;
    tensor->col = axes & COL ? array->stride[--axis] : 0;
    if (axes & COL && array->dim[axis] == 1)
        tensor->col = 1;
    tensor->row = axes & ROW ? array->stride[--axis] : 0;
    tensor->head = axes & HEAD ? array->stride[--axis] : 0;
    for (int d = n_lead - 1; d >= 0; d--)
        tensor->lead[d] = array->stride[--axis];
}

static void fill_params(struct problem *problem) {
    struct cattn_backward_params *back = &problem->back;
    struct cattn_attention_params *p = &back->forward;
    const int n = p->n_lead;
    const struct {
        struct cattn_tensor *tensor;
        int axes;
    } inputs[] = {{&p->query, HEAD | ROW | COL},
                  {&p->key, HEAD | ROW | COL},
                  {&p->value, HEAD | ROW | COL},
                  {&p->attn_mask, HEAD | ROW | COL},
                  {&p->bias[0], HEAD | ROW | COL},
                  {&p->bias[1], HEAD | ROW | COL},
                  {&p->slopes, HEAD},
                  {&p->sinks, HEAD},
                  {&p->ranges.offsets, 0},
                  {&p->ranges.query_lengths, 0},
                  {&p->ranges.key_lengths, 0}},
      outputs[] = {{&p->out, HEAD | ROW | COL},
                   {&p->weights, HEAD | ROW | COL},
                   {&p->lse, HEAD | ROW},
                   {&p->dropout_mask, HEAD | ROW | COL}},
      gradients[] = {{&back->grad_query, HEAD | ROW | COL},
                     {&back->grad_key, HEAD | ROW | COL},
                     {&back->grad_value, HEAD | ROW | COL},
                     {&back->grad_bias, HEAD | ROW | COL},
                     {&back->grad_sinks, HEAD}};
    for (int i = 0; i < N_INPUTS; i++)
        to_tensor(inputs[i].tensor, &problem->inputs[i], problem->has_input[i], n, inputs[i].axes);
    for (int i = 0; i < N_OUTPUTS; i++)
        to_tensor(outputs[i].tensor, &problem->outputs[i], problem->has_output[i], n, outputs[i].axes);
    for (int i = 0; i < N_GRADIENTS; i++)
        to_tensor(gradients[i].tensor, &problem->gradients[i], problem->has_gradient[i], n, gradients[i].axes);
    to_tensor(&back->grad_out, &problem->grad_out, problem->backward, n, HEAD | ROW | COL);
    p->query_starts.data = p->key_starts.data = NULL;
}

/* ---- who sees whom ---- */

static int64_t number_of(const struct problem *problem, int which, const int64_t *lead, int64_t common) {
    const struct array *numbers = &problem->inputs[which];
    return problem->has_input[which] ? (int64_t)number_at(numbers, offset_of(numbers, lead)) : common;
}

/* index: of a score, its lead, head, row and column. As reference.py says it, not as mask.c does. */
static bool sees(const struct problem *problem, const int64_t *index) {
    const struct cattn_attention_params *p = &problem->back.forward;
    const struct cattn_ranges *r = &p->ranges;
    const int64_t i = index[p->n_lead + 1], k = index[p->n_lead + 2];
    if (!r->all_visible) {
        const int64_t n_queries = number_of(problem, QUERY_LENGTHS, index, r->query_length);
        const int64_t n_keys = number_of(problem, KEY_LENGTHS, index, r->key_length);
        const int64_t offset = r->lower_right ? n_keys - n_queries : number_of(problem, OFFSETS, index, r->offset);
        const double before = (double)i + (double)offset - (double)k; /* keys between this one and its own */
        if (i >= n_queries || k >= n_keys || (r->left != CATTN_UNBOUNDED && before > (double)r->left) ||
            (r->right != CATTN_UNBOUNDED && -before > (double)r->right))
            return false;
    }
    if (problem->has_input[MASK] && number_at(&problem->inputs[MASK], offset_of(&problem->inputs[MASK], index)) == 0)
        return false;
    for (int b = 0; b < p->n_bias; b++)
        if (number_at(&problem->inputs[BIAS_0 + b], offset_of(&problem->inputs[BIAS_0 + b], index)) ==
            (double)-INFINITY)
            return false;
    return true;
}

/* The head of keys and values, in place of the query's. */
static void mark(const struct array *array, uint8_t *seen, const int64_t *index, int axis, int64_t head, int64_t row) {
    int64_t at[MAX_AXES];
    memcpy(at, index, (size_t)axis * sizeof *at);
    at[axis] = head;
    at[axis + 1] = row;
    for (at[axis + 2] = 0; at[axis + 2] < array->dim[axis + 2]; at[axis + 2]++)
        seen[array->low + offset_of(array, at)] = 1;
}

/* NaN wherever it must not matter: in keys and values that nobody sees, in queries that see nothing, and in a bias
 * where something else hides the key. */
static void poison_hidden(struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    static const int poisoned[] = {QUERY, KEY, VALUE, BIAS_0, BIAS_1};
    uint8_t *seen[N_INPUTS] = {NULL};
    for (size_t i = 0; i < sizeof poisoned / sizeof *poisoned; i++)
        seen[poisoned[i]] = calloc(1, (size_t)problem->inputs[poisoned[i]].span + 1);
    struct array scores = {.n_axes = p->n_lead + 3}; /* for its shape */
    axes_of(p, p->seqlen_q, p->seqlen_k, scores.dim);
    scores.span = p->n_batch * p->num_heads * p->seqlen_q * p->seqlen_k;
    for (struct cursor c = walk(&scores); c.more; step(&c)) {
        if (!sees(problem, c.index))
            continue;
        const int64_t head = c.index[p->n_lead], i = c.index[p->n_lead + 1], k = c.index[p->n_lead + 2];
        mark(&problem->inputs[QUERY], seen[QUERY], c.index, p->n_lead, head, i);
        mark(&problem->inputs[KEY], seen[KEY], c.index, p->n_lead, head / p->group_size, k);
        if (problem->has_input[VALUE])
            mark(&problem->inputs[VALUE], seen[VALUE], c.index, p->n_lead, head / p->group_size, k);
        for (int b = 0; b < p->n_bias; b++)
            seen[BIAS_0 + b][problem->inputs[BIAS_0 + b].low + offset_of(&problem->inputs[BIAS_0 + b], c.index)] = 1;
    }
    for (int b = BIAS_0; b < BIAS_0 + p->n_bias; b++) /* what hides must go on hiding */
        for (int64_t i = 0; i < problem->inputs[b].span; i++)
            seen[b][i] |= number_at(&problem->inputs[b], i - problem->inputs[b].low) == (double)-INFINITY;
    for (size_t i = 0; i < sizeof poisoned / sizeof *poisoned; i++) {
        if (problem->has_input[poisoned[i]])
            poison(&problem->inputs[poisoned[i]], seen[poisoned[i]]);
        free(seen[poisoned[i]]);
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
    p->raw_weights = !has[OUT] && wanted & 8;
    p->ranges.all_visible = p->raw_weights && wanted & 0x40;
    if (p->raw_weights) {
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
        const int n_axes = (int)axes_of(p, p->seqlen_q, i == OUT ? p->d_v : p->seqlen_k, dims) - (i == LSE);
        problem->outputs[i] = make_output(in,
                                          i == LSE            ? computed_element(p->dtype)
                                          : i == DROPOUT_MASK ? BYTE
                                                              : stored,
                                          n_axes, dims);
    }
}

static void add_gradient(struct problem *problem, int which, int n_axes, const int64_t *dims, unsigned broadcast) {
    problem->gradients[which] = make_zeros(computed_element(problem->back.forward.dtype), n_axes, dims, broadcast);
    problem->has_gradient[which] = true;
}

/* As py_backward.c makes them: the bias's in its own shape, or summed over rows or columns. */
static void make_gradients(struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    int64_t dims[MAX_AXES];
    int n_axes = (int)axes_of(p, p->seqlen_q, p->head_dim, dims);
    add_gradient(problem, GRAD_QUERY, n_axes, dims, 0);
    axes_of(p, p->seqlen_k, p->head_dim, dims);
    dims[p->n_lead] = p->num_heads / p->group_size;
    add_gradient(problem, GRAD_KEY, n_axes, dims, 0);
    dims[p->n_lead + 2] = p->d_v;
    add_gradient(problem, GRAD_VALUE, n_axes, dims, 0);
    axes_of(p, p->seqlen_q, p->seqlen_k, dims);
    if (problem->has_input[SINKS])
        add_gradient(problem, GRAD_SINKS, p->n_lead + 1, dims, 0);
    problem->back.bias_sum = CATTN_BIAS_NO_SUM;
    if (p->n_bias == 0)
        return;
    const unsigned row = 1u << (p->n_lead + 1), col = 1u << (p->n_lead + 2);
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

static void choose_problem(struct input *in, struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    static const double scales[] = {1, 0.25, -0.5, 0, 0.125};
    static const enum content contents[] = {PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, TIES, TIES, EXTREME};
    int64_t dims[MAX_AXES];
    choose_sizes(in, p);
    const uint8_t type = take_byte(in);
    p->dtype = (type & 3) == 1 ? CATTN_F64 : CATTN_F32;
    p->storage = (type & 3) == 2 ? CATTN_STORED_F16 : (type & 3) == 3 ? CATTN_STORED_BF16 : CATTN_STORED_PLAIN;
    p->scale = TAKE_FROM(in, scales);
    const enum content content = TAKE_FROM(in, contents);
    struct noise noise = {take_byte(in)};
    choose_dropout(in, problem);
    choose_outputs(in, problem);
    choose_ranges(in, problem, &noise);
    choose_masks(in, problem, &noise, content);
    choose_shapers(in, problem, &noise, content);
    if (p->raw_weights && take_chance(in, 2)) { /* stages before the softmax leave out what comes later */
        problem->has_input[MASK] = false;
        problem->has_input[SINKS] = false;
    }
    const enum element stored = stored_element(p->dtype, p->storage);
    const int n_axes = (int)axes_of(p, p->seqlen_q, p->head_dim, dims);
    add_input(in, problem, QUERY, stored, n_axes, dims, &noise, content);
    axes_of(p, p->seqlen_k, p->head_dim, dims);
    dims[p->n_lead] = p->num_heads / p->group_size;
    add_input(in, problem, KEY, stored, n_axes, dims, &noise, content);
    dims[p->n_lead + 2] = p->d_v;
    if (problem->has_output[OUT])
        add_input(in, problem, VALUE, stored, n_axes, dims, &noise, content);
    axes_of(p, p->seqlen_q, p->d_v, dims);
    if (problem->backward) {
        problem->grad_out = make_input(in, stored, n_axes, dims, 0, &noise, content);
        make_gradients(problem);
    }
    problem->is_tame = content != EXTREME;
}

/* ---- computing ---- */

static void choose_way(struct input way, struct cattn_attention_params *p) {
    static const enum cattn_path paths[] = {CATTN_PATH_AUTO, CATTN_PATH_TILE,  CATTN_PATH_TILE,
                                            CATTN_PATH_ROWS, CATTN_PATH_SPLIT, CATTN_PATH_TINY};
    choose_table(&way);
    p->num_threads = choose_threads(&way);
    p->path = TAKE_FROM(&way, paths);
}

static void compute(struct problem *problem, const struct cattn_torch_random *torch) {
    struct cattn_attention_params *p = &problem->back.forward;
    problem->torch = *torch;
    fill_params(problem);
    if (!cattn_attention_path_fits(p)) /* which depends on strides and outputs */
        p->path = CATTN_PATH_AUTO;
    if (cattn_attention(p) != CATTN_OK)
        finding("attention failed");
    if (!problem->backward)
        return;
    problem->torch = *torch;
    p->path = CATTN_PATH_TILE;
    if (cattn_attention_backward(&problem->back) != CATTN_OK)
        finding("attention_backward failed");
}

/* Numbers of moderate size give finite results. */
static void check_tame(const struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    for (int i = OUT; i <= WEIGHTS; i++)
        for (struct cursor c = walk(&problem->outputs[i]); problem->has_output[i] && c.more; step(&c)) {
            const double x = number_at(&problem->outputs[i], c.offset);
            if (!(isfinite(x) || (i == WEIGHTS && p->raw_weights && x == (double)-INFINITY)))
                finding(i == OUT ? "out is not finite" : "weights are not finite");
            if (i == WEIGHTS && !p->raw_weights && !(x >= 0 && x <= 1.001))
                finding("a weight is no probability");
        }
    for (int i = 0; i < N_GRADIENTS; i++)
        for (struct cursor c = walk(&problem->gradients[i]); problem->has_gradient[i] && c.more; step(&c))
            if (!isfinite(number_at(&problem->gradients[i], c.offset)))
                finding("a gradient is not finite");
}

static void check_memory(const struct problem *problem) {
    for (int i = 0; i < N_INPUTS; i++)
        if (problem->has_input[i])
            check_untouched(&problem->inputs[i], INPUT_NAMES[i]);
    for (int i = 0; i < N_OUTPUTS; i++)
        if (problem->has_output[i])
            check_untouched(&problem->outputs[i], "written between the elements of an output");
    if (problem->backward)
        check_untouched(&problem->grad_out, "grad_out was changed");
}

/* What explain counts is what there is. */
static void check_explanation(const struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    if (problem->has_input[MASK] || p->n_bias > 0)
        return;
    struct cattn_explanation told;
    if (cattn_attention_explain(p, &told) != CATTN_OK)
        finding("explain was interrupted");
    struct array scores = {.n_axes = p->n_lead + 3};
    axes_of(p, p->seqlen_q, p->seqlen_k, scores.dim);
    scores.span = p->n_batch * p->num_heads * p->seqlen_q * p->seqlen_k;
    int64_t n = 0;
    for (struct cursor c = walk(&scores); c.more; step(&c))
        n += sees(problem, c.index);
    if (n != told.n_keys)
        finding("explain counts other keys");
}

/* What it was, for whoever reads a finding: CATTN_FUZZ_SAY=1 in the environment. */
static void say(const struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    const struct cattn_ranges *r = &p->ranges;
    if (!getenv("CATTN_FUZZ_SAY"))
        return;
    fprintf(stderr, "%s, table %s, path %d, threads %d, dtype %d, storage %d\n",
            problem->backward ? "backward" : "forward", cattn_isa_info(cattn_isa_current()).name, p->path,
            p->num_threads, p->dtype, p->storage);
    fprintf(stderr, "batch %lld, heads %lld / %lld, T_q %lld, T_k %lld, D %lld, D_v %lld, scale %g, softcap %g\n",
            (long long)p->n_batch, (long long)p->num_heads, (long long)p->group_size, (long long)p->seqlen_q,
            (long long)p->seqlen_k, (long long)p->head_dim, (long long)p->d_v, p->scale, p->softcap);
    fprintf(stderr, "left %lld, right %lld, offset %lld%s, dropout %d, bias_sum %d, outputs of bias axes %x, inputs",
            (long long)r->left, (long long)r->right, (long long)r->offset, r->lower_right ? " lower right" : "",
            p->dropout.enabled, problem->back.bias_sum, problem->bias_broadcast);
    for (int i = 0; i < N_INPUTS; i++)
        if (problem->has_input[i])
            fprintf(stderr, " %.*s", (int)strcspn(INPUT_NAMES[i], " "), INPUT_NAMES[i]);
    fprintf(stderr, "%s\n", problem->is_tame ? "" : ", extreme numbers");
}

void fuzz_attention(struct input *in) {
    struct problem problem = {0};
    const struct input ways[] = {cut_off(in, 3), cut_off(in, 3)}; /* first, so that short inputs have them too */
    const bool contiguous = take_chance(in, 3);
    choose_problem(in, &problem);
    const struct cattn_torch_random torch = problem.torch;
    choose_way(ways[0], &problem.back.forward);
    say(&problem);
    compute(&problem, &torch);
    check_memory(&problem);
    if (problem.is_tame)
        check_tame(&problem);
    check_explanation(&problem);
    void *outputs[N_OUTPUTS] = {NULL}, *gradients[N_GRADIENTS] = {NULL};
    for (int i = 0; i < N_OUTPUTS; i++)
        outputs[i] = problem.has_output[i] ? gathered(&problem.outputs[i]) : NULL;
    for (int i = 0; i < N_GRADIENTS; i++)
        gradients[i] = problem.has_gradient[i] ? gathered(&problem.gradients[i]) : NULL;
    uint8_t after[CATTN_TORCH_STATE_BYTES], again[CATTN_TORCH_STATE_BYTES];
    cattn_torch_export(&problem.torch, after);

    for (int i = 0; i < N_INPUTS; i++)
        if (problem.has_input[i])
            move_array(&problem.inputs[i], contiguous);
    for (int i = 0; i < N_OUTPUTS; i++)
        if (problem.has_output[i])
            move_array(&problem.outputs[i], contiguous);
    if (problem.backward)
        move_array(&problem.grad_out, contiguous);
    for (int i = 0; i < N_GRADIENTS; i++)
        if (problem.has_gradient[i])
            memset(problem.gradients[i].memory, 0,
                   (size_t)problem.gradients[i].span * element_size(problem.gradients[i].element));
    if (!problem.back.forward.raw_weights && !problem.back.forward.ranges.all_visible)
        poison_hidden(&problem);
    choose_way(ways[1], &problem.back.forward);
    say(&problem);
    compute(&problem, &torch);
    check_memory(&problem);
    for (int i = 0; i < N_OUTPUTS; i++)
        if (outputs[i])
            check_same(&problem.outputs[i], outputs[i], OUTPUT_NAMES[i]);
    for (int i = 0; i < N_GRADIENTS; i++)
        if (gradients[i])
            check_same(&problem.gradients[i], gradients[i], GRADIENT_NAMES[i]);
    cattn_torch_export(&problem.torch, again);
    if (memcmp(after, again, sizeof after) != 0)
        finding("the generator stands elsewhere");
    for (int i = 0; i < N_OUTPUTS; i++)
        free(outputs[i]);
    for (int i = 0; i < N_GRADIENTS; i++)
        free(gradients[i]);
}
