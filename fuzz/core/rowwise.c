/* rowwise.c -- fuzz targets: softmax, RMS norm, their gradients, dropout and rotary positions over the rows of any
 * array, computed in two ways.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "targets.h"
#include "torch_random.h"

static const int64_t COLS[] = {0, 1, 2, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 127, 129, 511, 512, 513, 1023, 1025, 2050};

/* The rows of an array: its last axis is the columns. */
struct rows {
    enum cattn_dtype dtype;
    enum cattn_storage storage;
    int n_axes;
    int64_t dims[MAX_AXES], n_rows, n_cols;
    struct noise noise;
    enum content content;
};

static struct rows choose_rows(struct input *in, bool halves) {
    static const int64_t sizes[] = {1, 2, 3, 5, 17, 33, 0};
    static const enum content contents[] = {PLAIN, PLAIN, TIES, EXTREME};
    struct rows rows = {.n_rows = 1};
    const uint8_t type = take_byte(in);
    rows.dtype = (type & 3) == 1 ? CATTN_F64 : CATTN_F32;
    if (halves && (type & 3) > 1)
        rows.storage = (type & 3) == 2 ? CATTN_STORED_F16 : CATTN_STORED_BF16;
    rows.n_axes = 1 + (int)take_below(in, 4);
    rows.n_cols = TAKE_FROM(in, COLS);
    for (int axis = 0; axis < rows.n_axes - 1; axis++) {
        rows.dims[axis] = TAKE_FROM(in, sizes);
        if (rows.n_rows * rows.dims[axis] * (rows.n_cols + 1) > 6000)
            rows.dims[axis] = 1;
        rows.n_rows *= rows.dims[axis];
    }
    rows.dims[rows.n_axes - 1] = rows.n_cols;
    rows.content = TAKE_FROM(in, contents);
    rows.noise.state = take_byte(in);
    return rows;
}

/* Returns a tensor as the binding makes it. */
static struct cattn_tensor to_tensor(const struct array *array) {
    struct cattn_tensor tensor = {.data = array->memory + array->low * (int64_t)element_size(array->element)};
    const int last = array->n_axes - 1;
    for (int axis = 0; axis < last; axis++)
        tensor.batch[axis] = array->stride[axis];
    tensor.col = array->dim[last] == 1 ? 1 : array->stride[last];
    return tensor;
}

static unsigned few_axes(struct input *in, int n_axes) {
    return (unsigned)(take_byte(in) & take_byte(in)) & ((1u << n_axes) - 1);
}

/* Calls a function of the core with any table and number of threads. */
#define COMPUTE(in, function, params, failure)                                                                         \
    do {                                                                                                               \
        choose_table(in);                                                                                              \
        (params).num_threads = choose_threads(in);                                                                     \
        if (function(&(params)) != CATTN_OK)                                                                           \
            finding(failure);                                                                                          \
    } while (0)

/* ---- softmax ---- */

static void choose_softmax(struct input *in, const struct rows *rows, struct cattn_softmax_params *p) {
    static const double scales[] = {1, 0.5, -1, 0, 30};
    p->dtype = rows->dtype;
    p->storage = rows->storage;
    p->n_batch_dims = rows->n_axes - 1;
    memcpy(p->batch_shape, rows->dims, sizeof rows->dims);
    p->n_rows = rows->n_rows;
    p->n_cols = rows->n_cols;
    p->scale = TAKE_FROM(in, scales);
    p->method = take_chance(in, 4) ? CATTN_SOFTMAX_RENORMALIZE : CATTN_SOFTMAX_PLAIN;
    p->is_causal = take_chance(in, 3) && p->n_batch_dims > 0;
    const int64_t offset = take_below(in, rows->n_cols + 40) - 20;
    if (p->is_causal) {
        struct cattn_ranges *r = &p->ranges;
        r->left = CATTN_UNBOUNDED;
        r->lower_right = take_chance(in, 2);
        r->seqlen_k = r->key_length = rows->n_cols;
        r->query_length = rows->dims[p->n_batch_dims - 1];
        r->offset = offset;
    }
}

static void check_weights(const struct array *out, const struct cattn_softmax_params *p) {
    for (struct cursor c = walk(out); c.more; step(&c)) {
        const double x = number_at(out, c.offset);
        if (!(x >= 0 && x <= 1.001))
            finding(p->method == CATTN_SOFTMAX_PLAIN ? "a weight is no probability" : "a renormalized weight is none");
    }
}

void fuzz_softmax(struct input *in) {
    struct rows rows = choose_rows(in, true);
    struct cattn_softmax_params p = {0};
    choose_softmax(in, &rows, &p);
    const enum element element = stored_element(p.dtype, p.storage);
    struct array x =
        make_input(in, element, rows.n_axes, rows.dims, few_axes(in, rows.n_axes), &rows.noise, rows.content);
    const bool has_mask = take_chance(in, 2);
    struct array mask = make_input(in, BYTE, rows.n_axes, rows.dims, few_axes(in, rows.n_axes), &rows.noise, TIES);
    struct array out = make_output(in, element, rows.n_axes, rows.dims);
    p.x = to_tensor(&x);
    p.out = to_tensor(&out);
    if (has_mask)
        p.mask = to_tensor(&mask);
    COMPUTE(in, cattn_softmax, p, "softmax failed");
    check_untouched(&x, "x was changed");
    check_untouched(&mask, "mask was changed");
    check_untouched(&out, "written between the elements of out");
    if (rows.content != EXTREME && p.method == CATTN_SOFTMAX_PLAIN)
        check_weights(&out, &p);
    if (p.method != CATTN_SOFTMAX_PLAIN) /* the bit contract leaves out its sums */
        return;
    void *const right = gathered(&out);
    move_array(&x, true);
    move_array(&mask, take_chance(in, 2));
    move_array(&out, take_chance(in, 2));
    const bool in_place = take_chance(in, 2);
    p.x = to_tensor(&x);
    p.out = to_tensor(in_place ? &x : &out);
    p.mask = has_mask ? to_tensor(&mask) : p.mask;
    COMPUTE(in, cattn_softmax, p, "softmax failed the second time");
    check_same(in_place ? &x : &out, right, "softmax differs");
    free(right);
}

void fuzz_softmax_backward(struct input *in) {
    struct rows rows = choose_rows(in, false);
    struct cattn_softmax_backward_params p = {.dtype = rows.dtype,
                                              .n_batch_dims = rows.n_axes - 1,
                                              .n_rows = rows.n_rows,
                                              .n_cols = rows.n_cols,
                                              .scale = 0.5};
    memcpy(p.batch_shape, rows.dims, sizeof rows.dims);
    const enum element element = computed_element(p.dtype);
    struct array arrays[2];
    for (int i = 0; i < 2; i++)
        arrays[i] =
            make_input(in, element, rows.n_axes, rows.dims, few_axes(in, rows.n_axes), &rows.noise, rows.content);
    struct array out = make_output(in, element, rows.n_axes, rows.dims);
    p.grad = to_tensor(&arrays[0]);
    p.weights = to_tensor(&arrays[1]);
    p.out = to_tensor(&out);
    COMPUTE(in, cattn_softmax_backward, p, "softmax_backward failed");
    for (int i = 0; i < 2; i++)
        check_untouched(&arrays[i], i ? "weights were changed" : "grad was changed");
    check_untouched(&out, "written between the elements of out");
    void *const right = gathered(&out);
    for (int i = 0; i < 2; i++)
        move_array(&arrays[i], true);
    move_array(&out, false);
    const int place = (int)take_below(in, 3); /* out is the first array, the second, or neither */
    p.grad = to_tensor(&arrays[0]);
    p.weights = to_tensor(&arrays[1]);
    p.out = to_tensor(place < 2 ? &arrays[place] : &out);
    COMPUTE(in, cattn_softmax_backward, p, "softmax_backward failed the second time");
    check_same(place < 2 ? &arrays[place] : &out, right, "softmax_backward differs");
    free(right);
}

/* ---- dropout ---- */

static void choose_dropout(struct input *in, struct cattn_dropout_spec *spec, struct cattn_torch_random *torch) {
    static const double probabilities[] = {0.5, 0.1, 0.9, 1.0, 0x1p-33};
    const double p = TAKE_FROM(in, probabilities);
    spec->enabled = true;
    spec->keep_probability = 1 - p;
    spec->threshold = (uint64_t)llround((1 - p) * 0x1p32);
    spec->keep_scale = p < 1 ? 1 / (1 - p) : 0;
    spec->seed = take_word(in);
    const bool serial = take_chance(in, 2) && p < 1;
    cattn_torch_seed(torch, spec->seed);
    torch->stream = take_chance(in, 2) ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL;
    spec->torch = serial ? torch : NULL;
}

/* Dropped elements must be +0, also NaN and negative ones. */
static void check_dropped(const struct array *out, const struct array *mask) {
    for (struct cursor c = walk(out); c.more; step(&c)) {
        const double kept = number_at(mask, offset_of(mask, c.index)), x = number_at(out, c.offset);
        if (kept != 0 && kept != 1)
            finding("the mask is neither 0 nor 1");
        if (kept == 0 && !(x == 0 && !signbit(x)))
            finding("a dropped element is not +0");
    }
}

void fuzz_dropout(struct input *in) {
    struct rows rows = choose_rows(in, true);
    struct cattn_dropout_params p = {.dtype = rows.dtype,
                                     .storage = rows.storage,
                                     .n_batch_dims = rows.n_axes - 1,
                                     .n_rows = rows.n_rows,
                                     .n_cols = rows.n_cols};
    struct cattn_torch_random torch;
    memcpy(p.batch_shape, rows.dims, sizeof rows.dims);
    choose_dropout(in, &p.dropout, &torch);
    const struct cattn_torch_random before = torch;
    const enum element element = stored_element(p.dtype, p.storage);
    struct array x =
        make_input(in, element, rows.n_axes, rows.dims, few_axes(in, rows.n_axes), &rows.noise, rows.content);
    struct array out = make_output(in, element, rows.n_axes, rows.dims);
    struct array mask = make_output(in, BYTE, rows.n_axes, rows.dims);
    p.x = to_tensor(&x);
    p.out = to_tensor(&out);
    p.mask = to_tensor(&mask);
    COMPUTE(in, cattn_dropout, p, "dropout failed");
    check_untouched(&x, "x was changed");
    check_untouched(&out, "written between the elements of out");
    check_untouched(&mask, "written between the elements of mask");
    check_dropped(&out, &mask);
    void *const right = gathered(&out);
    move_array(&x, true);
    move_array(&out, false);
    const bool in_place = take_chance(in, 2);
    torch = before;
    p.x = to_tensor(&x);
    p.out = to_tensor(in_place ? &x : &out);
    p.mask.data = NULL;
    COMPUTE(in, cattn_dropout, p, "dropout failed the second time");
    check_same(in_place ? &x : &out, right, "dropout differs");
    free(right);
}

/* ---- rotary positions ---- */

static void choose_rope(struct input *in, const struct rows *rows, struct cattn_rope_params *p) {
    static const double thetas[] = {10000, 1.5, 500000, 1e300};
    p->dtype = rows->dtype;
    p->storage = rows->storage;
    p->n_batch_dims = rows->n_axes - 2;
    memcpy(p->batch_shape, rows->dims, sizeof rows->dims);
    p->seqlen = rows->dims[rows->n_axes - 2];
    p->n_batch = 1;
    for (int d = 0; d < p->n_batch_dims; d++)
        p->n_batch *= p->batch_shape[d];
    p->n_cols = rows->n_cols;
    p->rotary_dim = take_below(in, rows->n_cols / 2 + 1) * 2;
    p->interleaved = take_chance(in, 2);
    p->inverse = take_chance(in, 2);
    p->theta = TAKE_FROM(in, thetas);
    /* one statement for each choice: C does not fix the order of initialisers */
    struct cattn_rope_scaling *s = &p->scaling;
    s->type = (enum cattn_rope_type)take_below(in, CATTN_ROPE_LLAMA3 + 1);
    s->truncate = take_chance(in, 2);
    s->factor = 1 + (double)take_below(in, 9);
    s->original_length = 1 + (double)take_below(in, 900);
    s->low_freq_factor = s->beta_slow = 1;
    s->high_freq_factor = 4;
    s->beta_fast = 32;
    s->attention_factor = take_chance(in, 2) ? 1.25 : 0;
    if (p->scaling.type == CATTN_ROPE_DYNAMIC && p->rotary_dim < 4)
        p->scaling.type = CATTN_ROPE_DEFAULT;
    p->length = (double)p->seqlen;
}

/* Strides of a tensor whose last two axes are rows and columns. */
static struct cattn_tensor to_matrix(const struct array *array) {
    struct cattn_tensor tensor = to_tensor(array);
    const int row = array->n_axes - 2;
    tensor.row = array->stride[row];
    tensor.batch[row] = 0;
    return tensor;
}

/* Positions of all tokens, or of fewer that broadcast; some are far. */
static struct array choose_positions(struct input *in, struct rows *rows) {
    const int n_axes = rows->n_axes - 1;
    struct array positions =
        make_input(in, F64, n_axes, rows->dims, few_axes(in, n_axes) & ((1u << (n_axes - 1)) - 1), &rows->noise, PLAIN);
    for (struct cursor c = walk(&positions); c.more; step(&c)) {
        const double whole = (double)(take_below(in, 255) - 127);
        set_number(&positions, c.offset, ldexp(whole, (int)(take_byte(in) % 46))); /* below 2^53 */
    }
    renew_sum(&positions);
    return positions;
}

void fuzz_rope(struct input *in) {
    struct rows rows = choose_rows(in, true);
    struct cattn_rope_params p = {0};
    if (rows.n_axes < 2)
        return;
    choose_rope(in, &rows, &p);
    const enum element element = stored_element(p.dtype, p.storage);
    struct array x = make_input(in, element, rows.n_axes, rows.dims, 0, &rows.noise, rows.content);
    struct array out = make_output(in, element, rows.n_axes, rows.dims);
    struct array positions = choose_positions(in, &rows);
    p.x = to_matrix(&x);
    p.out = to_matrix(&out);
    if (take_chance(in, 2)) {
        p.positions = to_tensor(&positions);
        p.positions.row = p.positions.col;
    }
    COMPUTE(in, cattn_rope, p, "rope failed");
    check_untouched(&x, "x was changed");
    check_untouched(&positions, "positions were changed");
    check_untouched(&out, "written between the elements of out");
    void *const right = gathered(&out);
    move_array(&x, true);
    move_array(&out, false);
    const bool in_place = take_chance(in, 2);
    p.x = to_matrix(&x);
    p.out = to_matrix(in_place ? &x : &out);
    COMPUTE(in, cattn_rope, p, "rope failed the second time");
    check_same(in_place ? &x : &out, right, "rope differs");
    free(right);
}

/* ---- norms ---- */

/* One number for each column: a weight or a bias. */
static struct array choose_weight(struct input *in, struct rows *rows) {
    return make_input(in, computed_element(rows->dtype), 1, &rows->dims[rows->n_axes - 1], 0, &rows->noise, PLAIN);
}

void fuzz_norm(struct input *in) {
    struct rows rows = choose_rows(in, true);
    struct cattn_norm_params p = {.dtype = rows.dtype,
                                  .storage = rows.storage,
                                  .n_batch_dims = rows.n_axes - 1,
                                  .n_rows = rows.n_rows,
                                  .n_cols = rows.n_cols,
                                  .eps = take_chance(in, 2) ? 1e-6 : 0};
    memcpy(p.batch_shape, rows.dims, sizeof rows.dims);
    const enum element element = stored_element(p.dtype, p.storage);
    struct array x =
        make_input(in, element, rows.n_axes, rows.dims, few_axes(in, rows.n_axes), &rows.noise, rows.content);
    struct array weight = choose_weight(in, &rows);
    struct array out = make_output(in, element, rows.n_axes, rows.dims);
    p.x = to_tensor(&x);
    p.out = to_tensor(&out);
    if (take_chance(in, 2))
        p.weight = to_tensor(&weight);
    p.centred = take_chance(in, 2);
    struct array bias = choose_weight(in, &rows);
    if (take_chance(in, 2))
        p.bias = to_tensor(&bias);
    COMPUTE(in, cattn_norm, p, "norm failed");
    check_untouched(&x, "x was changed");
    check_untouched(&weight, "weight was changed");
    check_untouched(&bias, "bias was changed");
    check_untouched(&out, "written between the elements of out");
    void *const right = gathered(&out);
    move_array(&x, true);
    move_array(&out, false);
    const bool in_place = take_chance(in, 2);
    p.x = to_tensor(&x);
    p.out = to_tensor(in_place ? &x : &out);
    COMPUTE(in, cattn_norm, p, "norm failed the second time");
    check_same(in_place ? &x : &out, right, "norm differs");
    free(right);
}

void fuzz_norm_backward(struct input *in) {
    struct rows rows = choose_rows(in, false);
    struct cattn_norm_backward_params p = {.dtype = rows.dtype,
                                           .n_batch_dims = rows.n_axes - 1,
                                           .n_rows = rows.n_rows,
                                           .n_cols = rows.n_cols,
                                           .eps = 1e-3};
    memcpy(p.batch_shape, rows.dims, sizeof rows.dims);
    const enum element element = computed_element(p.dtype);
    struct array arrays[2];
    for (int i = 0; i < 2; i++)
        arrays[i] =
            make_input(in, element, rows.n_axes, rows.dims, few_axes(in, rows.n_axes), &rows.noise, rows.content);
    struct array weight = choose_weight(in, &rows), grad_x = make_output(in, element, rows.n_axes, rows.dims);
    struct array grad_weight = make_output(in, element, 1, &rows.dims[rows.n_axes - 1]);
    p.grad = to_tensor(&arrays[0]);
    p.x = to_tensor(&arrays[1]);
    p.grad_x = to_tensor(&grad_x);
    if (take_chance(in, 2)) {
        p.weight = to_tensor(&weight);
        p.grad_weight = to_tensor(&grad_weight);
    }
    p.centred = take_chance(in, 2);
    struct array grad_bias = make_output(in, element, 1, &rows.dims[rows.n_axes - 1]);
    if (p.centred)
        p.grad_bias = to_tensor(&grad_bias);
    COMPUTE(in, cattn_norm_backward, p, "norm_backward failed");
    for (int i = 0; i < 2; i++)
        check_untouched(&arrays[i], i ? "x was changed" : "grad was changed");
    check_untouched(&grad_x, "written between the elements of grad_x");
    check_untouched(&grad_weight, "written between the elements of grad_weight");
    check_untouched(&grad_bias, "written between the elements of grad_bias");
    void *const right_x = gathered(&grad_x), *const right_weight = gathered(&grad_weight);
    void *const right_bias = gathered(&grad_bias);
    for (int i = 0; i < 2; i++)
        move_array(&arrays[i], true);
    const int place = (int)take_below(in, 3); /* grad_x is the first array, the second, or neither */
    p.grad = to_tensor(&arrays[0]);
    p.x = to_tensor(&arrays[1]);
    p.grad_x = to_tensor(place < 2 ? &arrays[place] : &grad_x);
    COMPUTE(in, cattn_norm_backward, p, "norm_backward failed the second time");
    check_same(place < 2 ? &arrays[place] : &grad_x, right_x, "norm_backward differs");
    check_same(&grad_weight, right_weight, "the gradient of the weight differs");
    check_same(&grad_bias, right_bias, "the gradient of the bias differs");
    free(right_x);
    free(right_weight);
    free(right_bias);
}

/* ---- activations ---- */

void fuzz_activation(struct input *in) {
    struct rows rows = choose_rows(in, true);
    struct cattn_activation_params p = {.which = (enum cattn_activation)take_below(in, CATTN_SILU + 1),
                                        .dtype = rows.dtype,
                                        .storage = rows.storage,
                                        .n_batch_dims = rows.n_axes - 1,
                                        .n_rows = rows.n_rows,
                                        .n_cols = rows.n_cols};
    memcpy(p.batch_shape, rows.dims, sizeof rows.dims);
    const enum element element = stored_element(p.dtype, p.storage);
    const bool backward = take_chance(in, 2);
    struct array arrays[2];
    for (int i = 0; i < 2; i++)
        arrays[i] =
            make_input(in, element, rows.n_axes, rows.dims, few_axes(in, rows.n_axes), &rows.noise, rows.content);
    struct array out = make_output(in, element, rows.n_axes, rows.dims);
    p.x = to_tensor(&arrays[0]);
    p.out = to_tensor(&out);
    if (backward)
        p.grad = to_tensor(&arrays[1]);
    COMPUTE(in, cattn_activate, p, "activation failed");
    for (int i = 0; i < 2; i++)
        check_untouched(&arrays[i], i ? "grad was changed" : "x was changed");
    check_untouched(&out, "written between the elements of out");
    void *const right = gathered(&out);
    for (int i = 0; i < 2; i++)
        move_array(&arrays[i], true);
    move_array(&out, false);
    const int place = (int)take_below(in, backward ? 3 : 2); /* out, x or grad */
    struct array *const result = place ? &arrays[place - 1] : &out;
    p.x = to_tensor(&arrays[0]);
    p.out = to_tensor(result);
    if (backward)
        p.grad = to_tensor(&arrays[1]);
    COMPUTE(in, cattn_activate, p, "activation failed the second time");
    check_same(result, right, "activation differs");
    free(right);
}
