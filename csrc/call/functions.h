/* functions.h -- the functions that are not attention: a row for each, and a table of its arguments, from which all
 * else follows. See docs/architecture.md for how to add one.
 *
 * A table is an X-macro of the slots of a call, in the order of the signature:
 *
 * ARRAY(name, axes, kind, fits, need, view): an array. Every letter is an axis, `*` all axes before it, and `*` alone
 *   any shape. The docstrings use the same letters. `view` is its tensor in the params.
 * NUMBER(name, kind, place): one value for the whole call.
 * WORD(name, words, place): one of some words, of which the params get the index.
 * WISH(name): whether there is a result.
 * RESULT(name, axes, kind, where, view): an array that takes a result, or None. IN_PLACE: an array with the same axes
 *   may be overwritten by it.
 * RETURNS(name, axes, kind, condition, view): no argument, but a new array: ALWAYS, or if that argument is given.
 *
 * The engine (binding/engine.c) reads every number that has a place in the params, and every array whose shape follows
 * from the main array. The function's own code reads the others.
 */
#ifndef CATTN_FUNCTIONS_H
#define CATTN_FUNCTIONS_H

#include "check.h"

/* The kinds of operands.h, and these. */
#define ARRAY_KINDS(K)                                                                                                 \
    K(BOOLS)     /* bool */                                                                                            \
    K(PROMOTED)  /* as COMPUTED, and counts where NumPy promotes the STORED arrays */                                  \
    K(FACTOR)    /* counts, too, and keeps its own storage */                                                          \
    K(WEIGHT)    /* a FACTOR, or a cattn.Quantized, which does not count */                                            \
    K(POSITIONS) /* float64 */                                                                                         \
    K(EDGES)     /* int64: the first rows of packed sequences, and the end of the last one */
#define SETTING_KINDS(K)                                                                                               \
    K(NOT_NEGATIVE) /* a real number */                                                                                \
    K(BASE)         /* a real number, at least 1 */                                                                    \
    K(FLAG)         /* True or False, and no other object */                                                           \
    K(TRUTH)        /* the truth of any object */                                                                      \
    K(AXIS)         /* an int: the columns */                                                                          \
    K(AXES)         /* an int, a tuple of ints or None */                                                              \
    K(SCALING)      /* a dict of a model's config */                                                                   \
    K(RESULT_NAMES) /* names of results */
enum { BEFORE_ARRAY_KINDS = N_OPERAND_KINDS - 1, ARRAY_KINDS(ENUMERATOR) };
enum { BEFORE_SETTING_KINDS = N_NUMBER_KINDS - 1, SETTING_KINDS(ENUMERATOR) };

/* ---- rows ---- */

enum cattn_role { ARRAY_ROLE, NUMBER_ROLE, WORD_ROLE, WISH_ROLE, RESULT_ROLE };
enum cattn_where { APART, IN_PLACE };
#define NOWHERE SIZE_MAX
/* The place of a member of params. */
#define IN(params, member) offsetof(struct cattn_##params##_params, member)

struct cattn_argument {
    const char *name;
    enum cattn_role role;
    const char *axes; /* or words, with | between them */
    int kind;
    int fits; /* enum cattn_fits; of a result enum cattn_where */
    int need; /* enum cattn_need */
    size_t place;
    const char *condition; /* of what is returned: the name of an argument, or "ALWAYS" */
};

#define ARRAY_ARGUMENT(name, axes, kind, fits, need, view) {#name, ARRAY_ROLE, axes, kind, fits, need, view, NULL},
#define NUMBER_ARGUMENT(name, kind, place) {#name, NUMBER_ROLE, NULL, kind, 0, 0, place, NULL},
#define WORD_ARGUMENT(name, words, place) {#name, WORD_ROLE, words, 0, 0, 0, place, NULL},
#define WISH_ARGUMENT(name) {#name, WISH_ROLE, NULL, 0, 0, 0, NOWHERE, NULL},
#define RESULT_ARGUMENT(name, axes, kind, where, view) {#name, RESULT_ROLE, axes, kind, where, 0, view, NULL},
#define RETURNED(name, axes, kind, condition, view) {#name, RESULT_ROLE, axes, kind, APART, 0, view, #condition},
/* name_arguments and name_returned: the latter with an empty row at its end, because most tables return nothing else.
 */
#define ARGUMENT_ROWS(name, TABLE)                                                                                     \
    static const struct cattn_argument name##_arguments[] = {                                                          \
        TABLE(ARRAY_ARGUMENT, NUMBER_ARGUMENT, WORD_ARGUMENT, WISH_ARGUMENT, RESULT_ARGUMENT, NO_SLOT)};               \
    static const struct cattn_argument name##_returned[] = {                                                           \
        TABLE(NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, RETURNED){0}};
#define COUNT_OF(rows) ((int)(sizeof(rows) / sizeof *(rows)))

/* Where the params of a function have what all of them have; NOWHERE if they lack it. */
struct cattn_places {
    size_t dtype, storage, num_threads, poll, n_batch_dims, batch_shape;
    size_t count; /* product of the batch */
    size_t rows, cols;
    size_t is_new; /* whether the memory of the result was never written */
};
#define PLACES(params, ...)                                                                                            \
    {.dtype = IN(params, dtype),                                                                                       \
     .num_threads = IN(params, num_threads),                                                                           \
     .poll = IN(params, poll),                                                                                         \
     .n_batch_dims = IN(params, n_batch_dims),                                                                         \
     .batch_shape = IN(params, batch_shape),                                                                           \
     __VA_ARGS__}
/* Independent rows: all axes but the columns are the batch. */
#define ROWS(params, storage_place, is_new_place)                                                                      \
    PLACES(params, .storage = storage_place, .count = IN(params, n_rows), .rows = NOWHERE, .cols = IN(params, n_cols), \
           .is_new = is_new_place)
/* Matrices with a row for each token. */
#define TOKENS(params, n_cols)                                                                                         \
    PLACES(params, .storage = IN(params, storage), .count = IN(params, n_batch), .rows = IN(params, seqlen),           \
           .cols = IN(params, n_cols), .is_new = NOWHERE)

#define SOFTMAX_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                  \
    ARRAY(x, "*", STORED, EXACTLY, REQUIRED, IN(softmax, x))                                                           \
    NUMBER(axis, AXES, NOWHERE)                                                                                        \
    ARRAY(where, "*", BOOLS, BROADCASTS, OPTIONAL, IN(softmax, mask))                                                  \
    NUMBER(scale, REAL, IN(softmax, scale))                                                                            \
    RESULT(out, "*", STORED, IN_PLACE, IN(softmax, out))
#define MASKED_SOFTMAX_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                           \
    ARRAY(scores, "*", STORED, EXACTLY, REQUIRED, IN(softmax, x))                                                      \
    ARRAY(mask, "*", BOOLS, BROADCASTS, OPTIONAL, IN(softmax, mask))                                                   \
    NUMBER(axis, AXES, NOWHERE)                                                                                        \
    NUMBER(is_causal, ALIGNMENT, NOWHERE)                                                                              \
    ARRAY(query_offset, "*", OFFSETS, BROADCASTS, OPTIONAL, NOWHERE)                                                   \
    NUMBER(scale, REAL, IN(softmax, scale))                                                                            \
    WORD(method, "neg_inf|renormalize", IN(softmax, method))                                                           \
    RESULT(out, "*", STORED, IN_PLACE, IN(softmax, out))
#define SOFTMAX_BACKWARD_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                         \
    ARRAY(grad_out, "*D", STORED, EXACTLY, REQUIRED, IN(softmax_backward, grad))                                       \
    ARRAY(weights, "*D", STORED, EXACTLY, REQUIRED, IN(softmax_backward, weights))                                     \
    NUMBER(axis, AXIS, NOWHERE)                                                                                        \
    NUMBER(scale, REAL, IN(softmax_backward, scale))                                                                   \
    RESULT(out, "*D", STORED, IN_PLACE, IN(softmax_backward, out))
#define DROPOUT_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                  \
    ARRAY(x, "*", STORED, EXACTLY, REQUIRED, IN(dropout, x))                                                           \
    NUMBER(p, PROBABILITY, NOWHERE)                                                                                    \
    NUMBER(training, TRUTH, NOWHERE)                                                                                   \
    NUMBER(rng, SEED, NOWHERE)                                                                                         \
    WISH(return_mask)                                                                                                  \
    RESULT(out, "*", STORED, IN_PLACE, IN(dropout, out))                                                               \
    RETURNS(mask, "*", BOOLS, return_mask, IN(dropout, mask))
#define CAUSAL_MASK_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                              \
    NUMBER(T_q, COUNT, NOWHERE)                                                                                        \
    NUMBER(T_k, COUNT, NOWHERE)                                                                                        \
    NUMBER(is_causal, ALIGNMENT, NOWHERE)                                                                              \
    ARRAY(query_offset, "", OFFSETS, BROADCASTS, OPTIONAL, NOWHERE)                                                    \
    NUMBER(window_size, WINDOW, NOWHERE)
#define ROPE_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                     \
    ARRAY(x, "*TD", STORED, EXACTLY, REQUIRED, IN(rope, x))                                                            \
    ARRAY(positions, "*T", POSITIONS, BROADCASTS, OPTIONAL, IN(rope, positions))                                       \
    NUMBER(theta, BASE, IN(rope, theta))                                                                               \
    NUMBER(rotary_dim, COUNT, NOWHERE)                                                                                 \
    NUMBER(interleaved, FLAG, IN(rope, interleaved))                                                                   \
    NUMBER(scaling, SCALING, NOWHERE)                                                                                  \
    NUMBER(inverse, FLAG, IN(rope, inverse))                                                                           \
    RESULT(out, "*TD", STORED, IN_PLACE, IN(rope, out))
#define RMS_NORM_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                 \
    ARRAY(x, "*D", STORED, EXACTLY, REQUIRED, IN(norm, x))                                                             \
    ARRAY(weight, "D", PROMOTED, EXACTLY, OPTIONAL, IN(norm, weight))                                                  \
    NUMBER(eps, NOT_NEGATIVE, IN(norm, eps))                                                                           \
    RESULT(out, "*D", STORED, IN_PLACE, IN(norm, out))
#define LAYER_NORM_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                               \
    ARRAY(x, "*D", STORED, EXACTLY, REQUIRED, IN(norm, x))                                                             \
    ARRAY(weight, "D", PROMOTED, EXACTLY, OPTIONAL, IN(norm, weight))                                                  \
    ARRAY(bias, "D", PROMOTED, EXACTLY, OPTIONAL, IN(norm, bias))                                                      \
    NUMBER(eps, NOT_NEGATIVE, IN(norm, eps))                                                                           \
    RESULT(out, "*D", STORED, IN_PLACE, IN(norm, out))
#define RMS_NORM_BACKWARD_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                        \
    ARRAY(grad_out, "*D", STORED, EXACTLY, REQUIRED, IN(norm_backward, grad))                                          \
    ARRAY(x, "*D", STORED, EXACTLY, REQUIRED, IN(norm_backward, x))                                                    \
    ARRAY(weight, "D", PROMOTED, EXACTLY, OPTIONAL, IN(norm_backward, weight))                                         \
    NUMBER(eps, NOT_NEGATIVE, IN(norm_backward, eps))                                                                  \
    RETURNS(grad_x, "*D", STORED, ALWAYS, IN(norm_backward, grad_x))                                                   \
    RETURNS(grad_weight, "D", COMPUTED, weight, IN(norm_backward, grad_weight))
#define LAYER_NORM_BACKWARD_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                      \
    RMS_NORM_BACKWARD_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                            \
    RETURNS(grad_bias, "D", COMPUTED, ALWAYS, IN(norm_backward, grad_bias))
#define GELU_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                     \
    ARRAY(x, "*", STORED, EXACTLY, REQUIRED, IN(activation, x))                                                        \
    WORD(approximate, "none|tanh", IN(activation, which))                                                              \
    RESULT(out, "*", STORED, IN_PLACE, IN(activation, out))
#define GELU_BACKWARD_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                            \
    ARRAY(grad_out, "*", STORED, EXACTLY, REQUIRED, IN(activation, grad))                                              \
    GELU_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)
#define SILU_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                     \
    ARRAY(x, "*", STORED, EXACTLY, REQUIRED, IN(activation, x))                                                        \
    RESULT(out, "*", STORED, IN_PLACE, IN(activation, out))
#define SILU_BACKWARD_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                            \
    ARRAY(grad_out, "*", STORED, EXACTLY, REQUIRED, IN(activation, grad))                                              \
    SILU_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)
#define LINEAR_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                   \
    ARRAY(x, "*K", FACTOR, EXACTLY, REQUIRED, NOWHERE)                                                                 \
    ARRAY(weight, "NK", WEIGHT, EXACTLY, REQUIRED, NOWHERE)                                                            \
    ARRAY(bias, "N", PROMOTED, EXACTLY, OPTIONAL, NOWHERE)                                                             \
    NUMBER(compute_dtype, PRODUCTS, IN(product, bf16_products))                                                        \
    RESULT(out, "*N", STORED, APART, NOWHERE)
/* Private: a @ b.mT, of matrices or of batches of them. In a gradient the products are of float32 whatever
 * compute_dtype is, but b is a factor of the forward pass and is rounded as it was there. */
#define PRODUCT_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                  \
    ARRAY(a, "*TK", FACTOR, EXACTLY, REQUIRED, NOWHERE)                                                                \
    ARRAY(b, "*NK", FACTOR, EXACTLY, REQUIRED, NOWHERE)                                                                \
    NUMBER(compute_dtype, PRODUCTS, IN(product, bf16_products))                                                        \
    NUMBER(is_gradient, FLAG, NOWHERE)                                                                                 \
    RETURNS(out, "*TN", STORED, ALWAYS, NOWHERE)
#define LINEAR_INPUTS(ARRAY, NUMBER)                                                                                   \
    ARRAY(query, "*NTH", STORED, EXACTLY, REQUIRED, NOWHERE)                                                           \
    ARRAY(key, "*KTH", STORED, EXACTLY, REQUIRED, NOWHERE)                                                             \
    ARRAY(value, "*VTD", STORED, EXACTLY, REQUIRED, NOWHERE)                                                           \
    ARRAY(decay, "*GTH", COMPUTED, BROADCASTS, OPTIONAL, NOWHERE)                                                      \
    ARRAY(beta, "*GT", COMPUTED, BROADCASTS, OPTIONAL, NOWHERE)                                                        \
    ARRAY(state, "*GHD", COMPUTED, BROADCASTS, OPTIONAL, NOWHERE)                                                      \
    NUMBER(scale, REAL, NOWHERE)                                                                                       \
    ARRAY(seq_lengths, "*", QUERY_COUNTS, BROADCASTS, OPTIONAL, NOWHERE)                                               \
    ARRAY(cu_seqlens, "", EDGES, EXACTLY, OPTIONAL, NOWHERE)                                                           \
    NUMBER(layout, LAYOUT, NOWHERE)
#define LINEAR_ATTENTION_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                         \
    LINEAR_INPUTS(ARRAY, NUMBER)                                                                                       \
    WISH(return_state)                                                                                                 \
    RESULT(state_out, "*GHD", COMPUTED, IN_PLACE, NOWHERE)                                                             \
    RESULT(out, "*NTD", STORED, APART, NOWHERE)
/* Private: the arguments of the public function are read in Python, which sums over repeated heads. */
#define LINEAR_GRADIENTS_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                         \
    ARRAY(grad_out, "*NTD", STORED, EXACTLY, REQUIRED, NOWHERE)                                                        \
    ARRAY(grad_state, "*GHD", COMPUTED, EXACTLY, OPTIONAL, NOWHERE)                                                    \
    LINEAR_INPUTS(ARRAY, NUMBER)                                                                                       \
    RETURNS(grad_query, "*NTH", COMPUTED, ALWAYS, IN(linear_attention_backward, grad_query))                           \
    RETURNS(grad_key, "*GTH", COMPUTED, ALWAYS, IN(linear_attention_backward, grad_key))                               \
    RETURNS(grad_value, "*GTD", COMPUTED, ALWAYS, IN(linear_attention_backward, grad_value))                           \
    RETURNS(grad_decay, "*GTH", COMPUTED, decay, IN(linear_attention_backward, grad_decay))                            \
    RETURNS(grad_beta, "*GT", COMPUTED, beta, IN(linear_attention_backward, grad_beta))                                \
    RETURNS(grad_state, "*GHD", COMPUTED, state, IN(linear_attention_backward, grad_state))
#define CAUSAL_CONV_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                              \
    ARRAY(x, "*TC", STORED, EXACTLY, REQUIRED, IN(conv, x))                                                            \
    ARRAY(weight, "CK", PROMOTED, EXACTLY, REQUIRED, IN(conv, weight))                                                 \
    ARRAY(bias, "C", PROMOTED, EXACTLY, OPTIONAL, IN(conv, bias))                                                      \
    ARRAY(state, "*SC", STORED, BROADCASTS, OPTIONAL, IN(conv, state))                                                 \
    WORD(activation, "silu", NOWHERE)                                                                                  \
    ARRAY(seq_lengths, "*", QUERY_COUNTS, BROADCASTS, OPTIONAL, IN(conv, lengths))                                     \
    ARRAY(cu_seqlens, "", EDGES, EXACTLY, OPTIONAL, NOWHERE)                                                           \
    WISH(return_state)                                                                                                 \
    RESULT(state_out, "*SC", STORED, IN_PLACE, IN(conv, state_out))                                                    \
    RESULT(out, "*TC", STORED, APART, IN(conv, out))

/* The slots of tables whose functions have code of their own: ROPE_positions and so on. A row may have a name alone,
 * and C11 wants an argument for the dots: hence the empty one. */
#define NO_SLOT(...)
#define SLOT_NAMED(table, name, ...) table##_##name,
#define MASKED_SOFTMAX_SLOT(...) SLOT_NAMED(MASKED_SOFTMAX, __VA_ARGS__, )
#define DROPOUT_SLOT(...) SLOT_NAMED(DROPOUT, __VA_ARGS__, )
#define CAUSAL_MASK_SLOT(...) SLOT_NAMED(CAUSAL_MASK, __VA_ARGS__, )
#define ROPE_SLOT(...) SLOT_NAMED(ROPE, __VA_ARGS__, )
#define LINEAR_SLOT(...) SLOT_NAMED(LINEAR, __VA_ARGS__, )
#define PRODUCT_SLOT(...) SLOT_NAMED(PRODUCT, __VA_ARGS__, )
#define LINEAR_ATTENTION_SLOT(...) SLOT_NAMED(LINEAR_ATTENTION, __VA_ARGS__, )
#define LINEAR_GRADIENTS_SLOT(...) SLOT_NAMED(LINEAR_GRADIENTS, __VA_ARGS__, )
#define CAUSAL_CONV_SLOT(...) SLOT_NAMED(CAUSAL_CONV, __VA_ARGS__, )
#define SLOTS(TABLE)                                                                                                   \
    enum {                                                                                                             \
        TABLE##_ARGUMENTS(TABLE##_SLOT, TABLE##_SLOT, TABLE##_SLOT, TABLE##_SLOT, TABLE##_SLOT, NO_SLOT)               \
            N_##TABLE##_ARGS                                                                                           \
    };
SLOTS(MASKED_SOFTMAX)
SLOTS(DROPOUT)
SLOTS(CAUSAL_MASK)
SLOTS(ROPE)
SLOTS(LINEAR)
SLOTS(PRODUCT)
SLOTS(LINEAR_ATTENTION)
SLOTS(LINEAR_GRADIENTS)
SLOTS(CAUSAL_CONV)

/* ---- laws ---- */

/* How the axes of an array follow from the axes of the main array. */
enum cattn_relation {
    CATTN_ALIKE,  /* the same */
    CATTN_SPREAD, /* broadcast to them */
    CATTN_COLUMN, /* the last one */
    CATTN_OTHER   /* the function's own code knows */
};

/* The main array must have the axes that its letters name. One without axes is one element in a row afterwards. */
bool cattn_check_main(const struct cattn_door *door, const struct cattn_argument *row, struct cattn_array *array);
/* Another array must fit the main one, which has own_nd axes. */
bool cattn_check_relation(const struct cattn_door *door, enum cattn_relation relation, const struct cattn_array *array,
                          const struct cattn_array *main, int own_nd);
/* What lies at a place of the params. */
#define CATTN_AT(type, params, place) (*(type *)(void *)((char *)(params) + (place)))
/* Fills in the sizes of a call; `axis` is the axis of columns. This function and the next one are inline because small
 * calls notice the time. */
static inline void cattn_fill_sizes(const struct cattn_places *places, const struct cattn_array *main, int axis,
                                    void *params) {
    const bool has_rows = places->rows != NOWHERE;
    const int row_axis = has_rows ? main->nd - 2 : -1;
    int64_t *batch = &CATTN_AT(int64_t, params, places->batch_shape);
    uint64_t count = 1; /* unsigned: beside a size of 0 the others may be so large that their product wraps */
    bool is_empty = false;
    for (int i = 0; i < main->nd; i++) {
        const int64_t n = main->dims[i];
        is_empty |= n == 0;
        if (i == axis || i == row_axis)
            continue;
        *batch++ = n;
        count *= (uint64_t)n;
    }
    CATTN_AT(int, params, places->n_batch_dims) = main->nd - 1 - has_rows;
    CATTN_AT(int64_t, params, places->count) = is_empty ? 0 : (int64_t)count;
    CATTN_AT(int64_t, params, places->cols) = main->dims[axis];
    if (has_rows)
        CATTN_AT(int64_t, params, places->rows) = main->dims[row_axis];
}
/* The view of an array or a result. */
static inline void cattn_view_related(const struct cattn_places *places, enum cattn_relation relation,
                                      const struct cattn_array *main, int axis, const struct cattn_array *array,
                                      struct cattn_tensor *view) {
    if (relation == CATTN_COLUMN)
        cattn_view(view, array, 0, CATTN_AXIS_COL);
    else if (places->rows == NOWHERE)
        cattn_view_rows(view, array, main->nd, axis);
    else
        cattn_view(view, array, main->nd - 2, CATTN_AXIS_COL | CATTN_AXIS_ROW);
    if (main->dims[axis] == 1 && relation != CATTN_SPREAD)
        view->col = 1; /* an axis of one element has any stride; with 1 kernels read it in place */
}

/* ---- functions ---- */

/* F(name, TABLE, main, params, compute, set, places, ...): the main array, whose axes the call has, or NO_MAIN; the
 * function of the core with its params; a statement that sets what is no argument; the struct cattn_places of the
 * params; and members of struct cattn_function. */
#define NORM_PLACES ROWS(norm, IN(norm, storage), NOWHERE)
#define NORM_BACKWARD_PLACES ROWS(norm_backward, NOWHERE, NOWHERE)
#define ACTIVATION_PLACES ROWS(activation, IN(activation, storage), NOWHERE)
#define SOFTMAX_PLACES ROWS(softmax, IN(softmax, storage), IN(softmax, out_is_new))
#define PRODUCT_PLACES                                                                                                 \
    {.dtype = IN(product, dtype),                                                                                      \
     .storage = IN(product, out_storage),                                                                              \
     .num_threads = IN(product, num_threads),                                                                          \
     .poll = IN(product, poll),                                                                                        \
     .is_new = NOWHERE}
#define LINEAR_GRADIENTS_PLACES                                                                                        \
    {.dtype = IN(linear_attention_backward, forward.dtype),                                                            \
     .storage = IN(linear_attention_backward, forward.storage),                                                        \
     .num_threads = IN(linear_attention_backward, forward.num_threads),                                                \
     .poll = IN(linear_attention_backward, forward.poll),                                                              \
     .is_new = NOWHERE}
#define FUNCTIONS(F)                                                                                                   \
    F(softmax, SOFTMAX_ARGUMENTS, x, softmax, cattn_softmax, (void)p, SOFTMAX_PLACES,                                  \
      .over_axes = HELPER(softmax_axes))                                                                               \
    F(masked_softmax, MASKED_SOFTMAX_ARGUMENTS, scores, softmax, cattn_softmax, (void)p, SOFTMAX_PLACES,               \
      .settle = cattn_settle_masked_softmax, .over_axes = HELPER(masked_softmax_axes))                                 \
    F(softmax_backward, SOFTMAX_BACKWARD_ARGUMENTS, weights, softmax_backward, cattn_softmax_backward, (void)p,        \
      ROWS(softmax_backward, NOWHERE, NOWHERE), .widens = true)                                                        \
    F(dropout, DROPOUT_ARGUMENTS, x, dropout, cattn_dropout, (void)p, ROWS(dropout, IN(dropout, storage), NOWHERE),    \
      .settle = cattn_settle_dropout, .run = cattn_run_dropout)                                                        \
    F(rms_norm, RMS_NORM_ARGUMENTS, x, norm, cattn_norm, (void)p, NORM_PLACES, .settle = NULL)                         \
    F(layer_norm, LAYER_NORM_ARGUMENTS, x, norm, cattn_norm, p->centred = true, NORM_PLACES, .settle = NULL)           \
    F(rms_norm_backward, RMS_NORM_BACKWARD_ARGUMENTS, x, norm_backward, cattn_norm_backward, (void)p,                  \
      NORM_BACKWARD_PLACES, .widens = true)                                                                            \
    F(layer_norm_backward, LAYER_NORM_BACKWARD_ARGUMENTS, x, norm_backward, cattn_norm_backward, p->centred = true,    \
      NORM_BACKWARD_PLACES, .widens = true)                                                                            \
    F(gelu, GELU_ARGUMENTS, x, activation, cattn_activate, (void)p, ACTIVATION_PLACES, .settle = NULL)                 \
    F(gelu_backward, GELU_BACKWARD_ARGUMENTS, x, activation, cattn_activate, (void)p, ACTIVATION_PLACES,               \
      .settle = NULL)                                                                                                  \
    F(silu, SILU_ARGUMENTS, x, activation, cattn_activate, p->which = CATTN_SILU, ACTIVATION_PLACES, .settle = NULL)   \
    F(silu_backward, SILU_BACKWARD_ARGUMENTS, x, activation, cattn_activate, p->which = CATTN_SILU, ACTIVATION_PLACES, \
      .settle = NULL)                                                                                                  \
    F(linear, LINEAR_ARGUMENTS, NO_MAIN, product, cattn_product, p->n_batch = 1, PRODUCT_PLACES,                       \
      .take = cattn_take_weight, .settle = cattn_settle_linear, .make = cattn_make_linear,                             \
      .work = cattn_work_of_product)                                                                                   \
    F(rope, ROPE_ARGUMENTS, x, rope, cattn_rope, (void)p, TOKENS(rope, n_cols), .settle = cattn_settle_rope)           \
    F(causal_conv, CAUSAL_CONV_ARGUMENTS, x, conv, cattn_causal_conv, (void)p, TOKENS(conv, n_channels),               \
      .settle = cattn_settle_conv, .make = cattn_make_conv, .work = cattn_work_of_conv, .build = cattn_build_conv)     \
    F(linear_attention, LINEAR_ATTENTION_ARGUMENTS, NO_MAIN, linear_attention, cattn_linear_attention, (void)p,        \
      TOKENS(linear_attention, d_v), .settle = cattn_settle_linear_attention, .make = cattn_make_linear_attention,     \
      .work = cattn_work_of_linear_attention, .build = cattn_build_linear_attention)
/* Functions for Python code of the package alone. */
#define PRIVATE_FUNCTIONS(F)                                                                                           \
    F(product, PRODUCT_ARGUMENTS, NO_MAIN, product, cattn_product, (void)p, PRODUCT_PLACES,                            \
      .settle = cattn_settle_product, .make = cattn_make_product, .work = cattn_work_of_product)                       \
    F(linear_gradients, LINEAR_GRADIENTS_ARGUMENTS, NO_MAIN, linear_attention_backward,                                \
      cattn_linear_attention_backward, (void)p, LINEAR_GRADIENTS_PLACES, .settle = cattn_settle_linear_gradients,      \
      .make = cattn_make_linear_gradients, .work = cattn_work_of_linear_gradients)

#define FUNCTION_INDEX(name, ...) FUNCTION_##name,
enum { FUNCTIONS(FUNCTION_INDEX) PRIVATE_FUNCTIONS(FUNCTION_INDEX) N_FUNCTIONS };

#endif
