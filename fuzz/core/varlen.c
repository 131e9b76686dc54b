/* varlen.c -- fuzz target: attention of packed sequences, and its gradients, have the bits of each sequence alone. */
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "targets.h"

enum { MOST = 4, BUDGET = 40000 /* multiply-adds of a sequence */ };

struct sequences {
    int64_t n, starts[MOST], lengths[MOST], total, longest;
};

static struct sequences choose_sequences(struct input *in, int64_t n) {
    static const int64_t lengths[] = {0, 1, 2, 5, 6, 7, 12, 13, 17, 33, 95, 97, 193, 200};
    struct sequences s = {.n = n};
    for (int64_t b = 0; b < n; b++)
        s.lengths[b] = TAKE_FROM(in, lengths);
    return s;
}

static void lay_end_to_end(struct sequences *s) {
    for (int64_t b = 0; b < s->n; b++) {
        s->starts[b] = s->total;
        s->total += s->lengths[b];
        s->longest = s->lengths[b] > s->longest ? s->lengths[b] : s->longest;
    }
}

static void bound_work(struct sequences *q, const struct sequences *k, const struct cattn_attention_params *p) {
    const int64_t depth = p->num_heads * (p->head_dim + p->d_v + 8);
    for (int64_t b = 0; b < q->n; b++)
        while (q->lengths[b] * k->lengths[b] * depth > BUDGET && q->lengths[b] > 1)
            q->lengths[b] /= 2;
}

/* Returns lengths or starts as an array. */
static struct array int64_array(struct input *in, const int64_t *numbers, int64_t n) {
    struct noise noise = {0};
    struct array array = make_input(in, INT64, 1, &n, 0, &noise, PLAIN);
    for (struct cursor c = walk(&array); c.more; step(&c))
        memcpy(array.memory + (array.low + c.offset) * (int64_t)sizeof *numbers, &numbers[c.index[0]], sizeof *numbers);
    renew_sum(&array);
    return array;
}

/* Returns the tensor (rows from `start` on, heads, col), without batch dimensions. */
static struct cattn_tensor rows_from(const struct array *array, int64_t start) {
    static uint64_t nothing;
    struct cattn_tensor tensor = {.data = &nothing, .row = array->stride[0], .head = array->stride[1]};
    tensor.col = array->n_axes < 3 ? 0 : array->dim[2] == 1 ? 1 : array->stride[2];
    if (array->span)
        tensor.data = array->memory + (array->low + start * array->stride[0]) * (int64_t)element_size(array->element);
    return tensor;
}

static struct cattn_tensor numbers(const struct array *array) {
    return (struct cattn_tensor){.data = array->memory + array->low * (int64_t)sizeof(int64_t),
                                 .batch = {array->stride[0]}};
}

struct packed {
    struct cattn_attention_params params;
    struct sequences q, k;
    struct array inputs[3], starts[4], out, lse; /* starts: starts and lengths of queries, then of keys */
    struct array scales[3];                      /* of quantized keys and values */
};

/* The same call for sequence b alone. */
static struct cattn_attention_params sequence_alone(const struct packed *packed, int64_t b) {
    struct cattn_attention_params one = packed->params;
    const int64_t query = packed->q.starts[b], key = packed->k.starts[b];
    one.n_batch_dims = 0;
    one.n_batch = 1;
    one.query_starts.data = one.key_starts.data = NULL;
    one.ranges.query_lengths.data = one.ranges.key_lengths.data = NULL;
    one.seqlen_q = one.ranges.query_length = packed->q.lengths[b];
    one.seqlen_k = one.ranges.seqlen_k = one.ranges.key_length = packed->k.lengths[b];
    one.query = rows_from(&packed->inputs[0], query);
    one.key = rows_from(&packed->inputs[1], key);
    one.value = rows_from(&packed->inputs[2], key);
    one.key_scale = rows_from(&packed->scales[1], key);
    one.value_scale = rows_from(&packed->scales[2], key);
    one.out = rows_from(&packed->out, query);
    one.lse = rows_from(&packed->lse, query);
    one.path = CATTN_PATH_AUTO;
    return one;
}

/* Gradients of the rows from `query` and `key` on. */
static void differentiate(struct cattn_backward_params *back, const struct array *grad_out,
                          const struct array *grad_lse, const struct array *gradients, int64_t query, int64_t key) {
    back->grad_out = rows_from(grad_out, query);
    if (grad_lse)
        back->grad_lse = rows_from(grad_lse, query);
    back->grad_query = rows_from(&gradients[0], query);
    back->grad_key = rows_from(&gradients[1], key);
    back->grad_value = rows_from(&gradients[2], key);
    if (cattn_attention_backward(back) != CATTN_OK)
        finding("the gradients of packed sequences failed");
}

/* Takes the output and log-sum-exp of the forward pass. */
static void check_gradients(struct input *in, struct packed *packed, struct noise *noise, enum content content) {
    static const char *const names[] = {"grad_query of a packed sequence differs",
                                        "grad_key of a packed sequence differs",
                                        "grad_value of a packed sequence differs"};
    struct cattn_backward_params back = {.forward = packed->params};
    struct cattn_attention_params *p = &back.forward;
    const struct array grad_out = make_input(in, packed->out.element, 3, packed->out.dim, 0, noise, content);
    const bool has_grad_lse = take_chance(in, 2);
    const struct array grad_lse = make_input(in, F64, 2, packed->lse.dim, 0, noise, content);
    struct array whole[3], alone[3];
    for (int i = 0; i < 3; i++) {
        whole[i] = make_zeros(computed_element(p->dtype), 3, packed->inputs[i].dim, 0);
        alone[i] = make_zeros(computed_element(p->dtype), 3, packed->inputs[i].dim, 0);
    }
    p->out = rows_from(&packed->out, 0);
    p->lse = rows_from(&packed->lse, 0);
    p->path = CATTN_PATH_TILE;
    p->num_threads = choose_threads(in);
    choose_table(in);
    differentiate(&back, &grad_out, has_grad_lse ? &grad_lse : NULL, whole, 0, 0);
    check_untouched(&grad_out, "grad_out was changed");
    check_untouched(&grad_lse, "grad_lse was changed");
    choose_table(in);
    for (int64_t b = 0; b < packed->q.n; b++) {
        *p = sequence_alone(packed, b);
        differentiate(&back, &grad_out, has_grad_lse ? &grad_lse : NULL, alone, packed->q.starts[b],
                      packed->k.starts[b]);
    }
    for (int i = 0; i < 3; i++) {
        void *const expected = gathered(&whole[i]);
        check_same(&alone[i], expected, names[i]);
        free(expected);
    }
}

static void choose_options(struct input *in, struct cattn_attention_params *p) {
    static const int64_t sides[] = {CATTN_UNBOUNDED, CATTN_UNBOUNDED, 0, 3, 40};
    static const double caps[] = {0, 0, 3};
    const uint8_t type = take_byte(in);
    p->dtype = (type & 3) == 1 ? CATTN_F64 : CATTN_F32;
    p->storage = (type & 3) == 2 ? CATTN_STORED_F16 : (type & 3) == 3 ? CATTN_STORED_BF16 : CATTN_STORED_PLAIN;
    p->group_size = 1 + take_below(in, 3);
    p->num_heads = p->group_size * (1 + take_below(in, 2));
    p->head_dim = take_below(in, 20);
    p->d_v = take_below(in, 20);
    p->score_options.scale = 0.3;
    p->score_options.softcap = TAKE_FROM(in, caps);
    p->ranges.left = TAKE_FROM(in, sides);
    p->ranges.right = take_chance(in, 2) ? 0 : TAKE_FROM(in, sides);
    p->ranges.lower_right = take_chance(in, 2);
}

static void make_arrays(struct input *in, struct packed *packed, struct noise *noise, enum content content) {
    struct cattn_attention_params *p = &packed->params;
    struct sequences *const q = &packed->q, *const k = &packed->k;
    const enum element stored = stored_element(p->dtype, p->storage);
    const int64_t kv_heads = p->num_heads / p->group_size;
    const int64_t dims[][3] = {{q->total, p->num_heads, p->head_dim},
                               {k->total, kv_heads, p->head_dim},
                               {k->total, kv_heads, p->d_v},
                               {q->total, p->num_heads, p->d_v}};
    for (int i = 0; i < 3; i++)
        packed->inputs[i] = make_input(in, stored, 3, dims[i], 0, noise, content);
    packed->out = make_output(in, stored, 3, dims[3]);
    packed->lse = make_output(in, computed_element(p->dtype), 2, dims[3]);
    const int64_t *const lists[] = {q->starts, q->lengths, k->starts, k->lengths};
    for (int i = 0; i < 4; i++)
        packed->starts[i] = int64_array(in, lists[i], q->n);
    p->n_batch_dims = 1;
    p->batch_shape[0] = p->n_batch = q->n;
    p->seqlen_q = q->longest;
    p->seqlen_k = p->ranges.seqlen_k = k->longest;
    p->query = rows_from(&packed->inputs[0], 0);
    p->key = rows_from(&packed->inputs[1], 0);
    p->value = rows_from(&packed->inputs[2], 0);
    p->out = rows_from(&packed->out, 0);
    p->lse = rows_from(&packed->lse, 0);
    p->query_starts = numbers(&packed->starts[0]);
    p->ranges.query_lengths = numbers(&packed->starts[1]);
    p->key_starts = numbers(&packed->starts[2]);
    p->ranges.key_lengths = numbers(&packed->starts[3]);
}

/* The call of all sequences, then a call for each of them. */
static void check_sequences(struct input *in, struct packed *packed, struct noise *noise, enum content content) {
    struct cattn_attention_params *p = &packed->params;
    choose_table(in);
    p->num_threads = choose_threads(in);
    p->path = take_chance(in, 2) ? CATTN_PATH_AUTO : CATTN_PATH_TILE;
    if (cattn_attention(p) != CATTN_OK)
        finding("varlen attention failed");
    for (int i = 0; i < 3; i++) {
        check_untouched(&packed->inputs[i], "a packed input was changed");
        check_untouched(&packed->scales[i], "the scales of a packed input were changed");
    }
    check_untouched(&packed->out, "written between the elements of out");
    check_untouched(&packed->lse, "written between the elements of lse");
    void *const packed_out = gathered(&packed->out), *const packed_lse = gathered(&packed->lse);

    choose_table(in);
    move_array(&packed->out, false);
    move_array(&packed->lse, false);
    for (int64_t b = 0; b < packed->q.n; b++) {
        const struct cattn_attention_params one = sequence_alone(packed, b);
        if (cattn_attention(&one) != CATTN_OK)
            finding("attention of one sequence failed");
    }
    check_same(&packed->out, packed_out, "out of a packed sequence differs");
    check_same(&packed->lse, packed_lse, "lse of a packed sequence differs");
    free(packed_out);
    free(packed_lse);
    check_gradients(in, packed, noise, content);
}

/* Makes keys or values quantized, with one scale for each element, token, column, or all of them. */
static enum cattn_storage quantize(struct input *in, struct packed *packed, int which, struct noise *noise,
                                   enum content content) {
    const struct array plain = packed->inputs[which];
    const enum element element = take_chance(in, 2) ? F8 : INT8;
    packed->inputs[which] = make_quantized(in, element, 3, plain.dim, 0, noise, content);
    packed->scales[which] = make_scales(in, 3, plain.dim, (unsigned)take_below(in, 8), noise, content);
    return element == F8 ? CATTN_STORED_F8 : CATTN_STORED_I8;
}

/* The same sequences with quantized keys and values. Chosen last, so that older inputs keep their meaning. */
static void check_quantized(struct input *in, struct packed *packed, struct noise *noise, enum content content) {
    struct cattn_attention_params *p = &packed->params;
    const int64_t kind = take_below(in, 4);
    if (kind == 0 || p->dtype != CATTN_F32 || p->storage != CATTN_STORED_PLAIN)
        return;
    if (kind & 1)
        p->quantized_key = quantize(in, packed, 1, noise, content);
    if (kind & 2)
        p->quantized_value = quantize(in, packed, 2, noise, content);
    p->key = rows_from(&packed->inputs[1], 0);
    p->value = rows_from(&packed->inputs[2], 0);
    p->key_scale = rows_from(&packed->scales[1], 0);
    p->value_scale = rows_from(&packed->scales[2], 0);
    move_array(&packed->out, false);
    move_array(&packed->lse, false);
    p->out = rows_from(&packed->out, 0);
    p->lse = rows_from(&packed->lse, 0);
    check_sequences(in, packed, noise, content);
}

void fuzz_varlen(struct input *in) {
    struct packed packed = {0};
    struct cattn_attention_params *p = &packed.params;
    choose_options(in, p);
    const int64_t n = 1 + take_below(in, MOST);
    packed.q = choose_sequences(in, n);
    packed.k = choose_sequences(in, n);
    bound_work(&packed.q, &packed.k, p);
    lay_end_to_end(&packed.q);
    lay_end_to_end(&packed.k);
    struct noise noise = {take_byte(in)};
    const enum content content = take_chance(in, 4) ? EXTREME : PLAIN;
    make_arrays(in, &packed, &noise, content);
    check_sequences(in, &packed, &noise, content);
    check_quantized(in, &packed, &noise, content);
}
