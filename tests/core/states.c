/* states.c -- problems of linear attention and its gradients. See problem.h. */
#include <math.h>
#include <string.h>

#include "problem.h"

enum { Q, K, V, DECAYS, BETAS, STATE, LENGTHS, FIRST_RESULT };

struct sizes {
    int n_batch_dims; /* of arrays with tokens; packed sequences have none */
    int64_t batch[2], heads, rows, cols;
};

/* Adds an array (batch..., heads, rows, cols), or without the last axis if cols is -1. */
static struct array *add(struct source *s, struct problem *problem, int which, const char *name,
                         struct cattn_tensor *tensor, enum role role, enum element element, struct sizes size,
                         enum content content) {
    int64_t dims[5];
    const int n_batch = size.n_batch_dims, n_axes = n_batch + (size.cols < 0 ? 2 : 3);
    memcpy(dims, size.batch, sizeof size.batch);
    dims[n_batch] = size.heads;
    dims[n_batch + 1] = size.rows;
    if (size.cols >= 0)
        dims[n_batch + 2] = size.cols;
    /* heads do not broadcast here: the call knows their numbers */
    const unsigned broadcast = role == INPUT ? choose_broadcast(s, n_axes) & ~(1u << n_batch) : 0;
    struct array array = make_array(s, role, element, n_axes, dims, broadcast);
    if (role == INPUT)
        fill_numbers(s, &array, content);
    if (role == INPUT && which > V)
        say(problem, " %s", name);
    return &add_part(problem, which, name, size.cols < 0 ? "NT" : "NTS", tensor, array)->array;
}

/* The factors of a state must not grow it without bound: at most 0, where the numbers are ordinary. */
static void make_negative(struct array *array) {
    for (struct cursor c = walk(array); c.more; step(&c))
        set_number(array, c.offset, -fabs(number_at(array, c.offset)));
    array->sum = sum_of(array);
}

static void choose_tokens(struct source *s, struct problem *problem, struct cattn_linear_attention_params *p,
                          const int64_t *batch) {
    if (one_in(s, 4)) {
        p->n_batch_dims = 1;
        p->n_batch = p->batch_shape[0] = between(s, 0, 3);
        problem->edges[0] = 0;
        for (int64_t b = 0; b < p->n_batch; b++)
            problem->edges[b + 1] = b + 1 == p->n_batch ? p->seqlen : between(s, problem->edges[b], p->seqlen);
        if (p->n_batch == 0)
            p->seqlen = 0;
        p->edges = problem->edges;
        say(problem, " packed");
    } else if (one_in(s, 3)) {
        struct array lengths =
            make_array(s, INPUT, INT64, p->n_batch_dims, batch, choose_broadcast(s, p->n_batch_dims));
        fill_integers(s, &lengths, 0, p->seqlen);
        add_part(problem, LENGTHS, "lengths", "", &p->lengths, lengths);
        say(problem, " lengths");
    }
}

static struct sizes choose_sizes(struct source *s, struct problem *problem, struct cattn_linear_attention_params *p) {
    static const int64_t widths[] = {1, 2, 5, 15, 16, 17, 32, 33, 64, 65, 100, 129, 0};
    static const int64_t tokens[] = {1, 2, 15, 16, 17, 33, 50, 0};
    struct sizes size = {.n_batch_dims = (int)choose(s, 3)};
    p->n_batch = 1;
    p->n_batch_dims = size.n_batch_dims;
    for (int d = 0; d < size.n_batch_dims; d++)
        p->n_batch *= p->batch_shape[d] = size.batch[d] = between(s, 1, 2);
    const int64_t few = between(s, 1, 2), many = few * between(s, 1, 3);
    p->key_heads = one_in(s, 2) ? few : many;
    p->value_heads = p->key_heads == few ? many : few;
    p->n_states = many;
    p->query_heads = one_in(s, 3) ? many * between(s, 2, 3) : one_in(s, 2) ? few : many;
    p->seqlen = CHOOSE_FROM(s, tokens);
    p->d_k = CHOOSE_FROM(s, widths);
    p->d_v = CHOOSE_FROM(s, widths);
    while ((double)(p->n_batch * many * (p->seqlen + 1)) * (double)p->d_k * (double)p->d_v * 8 > s->budget) {
        p->d_k = p->d_k > p->d_v ? p->d_k / 2 : p->d_k;
        p->d_v = cattn_ceil_div(p->d_v, 2);
        p->seqlen = p->d_v > 1 ? p->seqlen : p->seqlen / 2;
    }
    p->scale = one_in(s, 2) ? 0.25 : 1;
    say(problem, " %d of %d/%d/%d heads, %dx%dx%d", (int)p->n_batch, (int)p->query_heads, (int)p->key_heads,
        (int)p->value_heads, (int)p->seqlen, (int)p->d_k, (int)p->d_v);
    choose_tokens(s, problem, p, size.batch);
    if (p->edges)
        size.n_batch_dims = 0;
    p->length = one_in(s, 3) ? between(s, 0, p->seqlen) : p->seqlen;
    return size;
}

static struct sizes sized(struct sizes size, int64_t heads, int64_t rows, int64_t cols) {
    size.heads = heads;
    size.rows = rows;
    size.cols = cols;
    return size;
}

/* The states of packed sequences have their batch. */
static struct sizes size_of_states(const struct cattn_linear_attention_params *p, struct sizes size) {
    if (p->edges) {
        size.n_batch_dims = 1;
        size.batch[0] = p->n_batch;
    }
    return sized(size, p->n_states, p->d_k, p->d_v);
}

static struct sizes choose_inputs(struct source *s, struct problem *problem, struct cattn_linear_attention_params *p,
                                  enum element *element, enum content *content) {
    *element = choose_type(s, problem, true, &p->dtype, &p->storage);
    const struct sizes size = choose_sizes(s, problem, p);
    const enum element computed = computed_element(p->dtype);
    *content = choose_content(s, problem);
    add(s, problem, Q, "query", &p->query, INPUT, *element, sized(size, p->query_heads, p->seqlen, p->d_k), *content);
    add(s, problem, K, "key", &p->key, INPUT, *element, sized(size, p->key_heads, p->seqlen, p->d_k), *content);
    add(s, problem, V, "value", &p->value, INPUT, *element, sized(size, p->value_heads, p->seqlen, p->d_v), *content);
    if (!one_in(s, 3)) {
        p->decay_by_row = one_in(s, 2);
        const int64_t cols = p->decay_by_row ? p->d_k : -1;
        struct array *decay = add(s, problem, DECAYS, p->decay_by_row ? "decay by row" : "decay", &p->decay, INPUT,
                                  computed, sized(size, p->n_states, p->seqlen, cols), *content);
        if (!one_in(s, 4))
            make_negative(decay);
    }
    if (!one_in(s, 3))
        add(s, problem, BETAS, "beta", &p->beta, INPUT, computed, sized(size, p->n_states, p->seqlen, -1), *content);
    if (one_in(s, 2))
        add(s, problem, STATE, "state", &p->state, INPUT, computed, size_of_states(p, size), *content);
    problem->result = -1;
    problem->shareable[0] = problem->shareable[1] = -1;
    return size;
}

static enum cattn_status run_linear_attention(struct source *s, struct problem *problem, const struct way *way) {
    (void)s;
    problem->of.linear_attention.num_threads = way->num_threads;
    return cattn_linear_attention(&problem->of.linear_attention);
}

static enum cattn_status run_linear_backward(struct source *s, struct problem *problem, const struct way *way) {
    (void)s;
    problem->of.linear_backward.forward.num_threads = way->num_threads;
    return cattn_linear_attention_backward(&problem->of.linear_backward);
}

static int64_t output_heads(const struct cattn_linear_attention_params *p) {
    return p->query_heads > p->n_states ? p->query_heads : p->n_states;
}

static void choose_linear_backward(struct source *s, struct problem *problem) {
    struct cattn_linear_attention_backward_params *b = &problem->of.linear_backward;
    struct cattn_linear_attention_params *p = &b->forward;
    enum element element;
    enum content content;
    const struct sizes size = choose_inputs(s, problem, p, &element, &content);
    const enum element computed = computed_element(p->dtype);
    const struct sizes states = size_of_states(p, size);
    int which = FIRST_RESULT;
    problem->run = run_linear_backward;
    add(s, problem, which++, "grad_out", &b->grad_out, INPUT, element, sized(size, output_heads(p), p->seqlen, p->d_v),
        content);
    if (one_in(s, 2))
        add(s, problem, which++, "grad_final", &b->grad_final, INPUT, computed, states, content);
    add(s, problem, which++, "grad_query", &b->grad_query, RESULT, computed,
        sized(size, output_heads(p), p->seqlen, p->d_k), content);
    add(s, problem, which++, "grad_key", &b->grad_key, RESULT, computed, sized(size, p->n_states, p->seqlen, p->d_k),
        content);
    add(s, problem, which++, "grad_value", &b->grad_value, RESULT, computed,
        sized(size, p->n_states, p->seqlen, p->d_v), content);
    if (p->decay.data || problem->parts[DECAYS].present)
        add(s, problem, which++, "grad_decay", &b->grad_decay, RESULT, computed,
            sized(size, p->n_states, p->seqlen, p->decay_by_row ? p->d_k : -1), content);
    if (problem->parts[BETAS].present)
        add(s, problem, which++, "grad_beta", &b->grad_beta, RESULT, computed, sized(size, p->n_states, p->seqlen, -1),
            content);
    if (one_in(s, 2))
        add(s, problem, which++, "grad_state", &b->grad_state, RESULT, computed, states, content);
}

void choose_linear_attention(struct source *s, struct problem *problem) {
    struct cattn_linear_attention_params *p = &problem->of.linear_attention;
    enum element element;
    enum content content;
    if (one_in(s, 3)) {
        say(problem, " backward");
        choose_linear_backward(s, problem);
        return;
    }
    const struct sizes size = choose_inputs(s, problem, p, &element, &content);
    problem->run = run_linear_attention;
    add(s, problem, FIRST_RESULT, "out", &p->out, OUTPUT, element, sized(size, output_heads(p), p->seqlen, p->d_v),
        content);
    if (one_in(s, 2))
        add(s, problem, FIRST_RESULT + 1, "state_out", &p->state_out, OUTPUT, computed_element(p->dtype),
            size_of_states(p, size), content);
}
