/* functions.h -- the functions that are not attention: a row for each, and a table of its arguments, from which all
 * else follows. See docs/architecture.md for how to add one.
 *
 * A table is an X-macro of the slots of a call, in the order of the signature:
 *
 * ARRAY(name, axes, kind, fits, need, view): an array. Every letter is an axis, `*` all axes before it, and `*` alone
 *   any shape; the letters are those of the documentation. `view` is its tensor in the params.
 * NUMBER(name, kind, place): one value for the whole call.
 * WORD(name, words, place): one of some words, of which the params get the index.
 * WISH(name): whether there is a result.
 * RESULT(name, axes, kind, where, view): an array that takes a result, or None. IN_PLACE: an array with the same axes
 *   may be overwritten by it.
 * RETURNS(name, axes, kind, condition, view): no argument, but a new array, if the argument in that slot is given.
 *
 * The engine (binding/engine.c) reads what has a place in the params, and arrays whose axes are among those of the main
 * one. The function's own code reads the others.
 */
#ifndef CATTN_FUNCTIONS_H
#define CATTN_FUNCTIONS_H

#include "check.h"

/* The kinds of operands.h, and these. */
#define ARRAY_KINDS(K)                                                                                                 \
    K(BOOLS)     /* bool */                                                                                            \
    K(PROMOTED)  /* as COMPUTED, and counts where NumPy promotes the STORED arrays */                                  \
    K(FACTOR)    /* counts, too, and keeps its own storage; a weight may be quantized */                               \
    K(POSITIONS) /* float64 */                                                                                         \
    K(EDGES)     /* int64: the first rows of packed sequences, and the end of the last one */
#define SETTING_KINDS(K)                                                                                               \
    K(NOT_NEGATIVE) /* a real number */                                                                                \
    K(BASE)         /* a real number, at least 1 */                                                                    \
    K(FLAG)         /* True or False, and no other object */                                                           \
    K(TRUTH)        /* the truth of any object */                                                                      \
    K(AXES)         /* an int, a tuple of ints or None */                                                              \
    K(SCALING)      /* a dict of a model's config */                                                                   \
    K(RESULT_NAMES) /* names of results */
enum { BEFORE_ARRAY_KINDS = N_OPERAND_KINDS - 1, ARRAY_KINDS(ENUMERATOR) };
enum { BEFORE_SETTING_KINDS = N_NUMBER_KINDS - 1, SETTING_KINDS(ENUMERATOR) };

/* ---- rows ---- */

enum cattn_role { ARRAY_ROLE, NUMBER_ROLE, WORD_ROLE, WISH_ROLE, RESULT_ROLE };
enum cattn_where { APART, IN_PLACE };
#define ALWAYS (-1)
#define NOWHERE SIZE_MAX
/* The place of a member of params. */
#define IN(params, member) offsetof(struct cattn_##params##_params, member)

struct cattn_argument {
    const char *name;
    enum cattn_role role;
    const char *axes; /* or words, with | between them */
    int kind;
    int fits; /* enum cattn_fits; of a result enum cattn_where */
    int need; /* enum cattn_need; of what is returned the slot of its condition, or ALWAYS */
    size_t place;
};

/* Where the params of a function of rows have what all of them have. */
struct cattn_places {
    size_t dtype, storage, num_threads, poll, n_batch_dims, batch_shape;
    size_t count; /* product of the batch */
    size_t rows, cols;
};
/* Functions whose rows are independent: all axes but the columns are the batch. `storage` may be absent. */
#define ROWS(params, storage)                                                                                          \
    {IN(params, dtype),        storage,                                                                                \
     IN(params, num_threads),  IN(params, poll),                                                                       \
     IN(params, n_batch_dims), IN(params, batch_shape),                                                                \
     IN(params, n_rows),       NOWHERE,                                                                                \
     IN(params, n_cols)}
/* Functions of matrices with a row for each token. */
#define TOKENS(params, count, rows, cols)                                                                              \
    {                                                                                                                  \
        IN(params, dtype), IN(params, storage),      IN(params, num_threads),                                          \
        IN(params, poll),  IN(params, n_batch_dims), IN(params, batch_shape),                                          \
        IN(params, count), IN(params, rows),         IN(params, cols)}

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
#define DROPOUT_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                                  \
    ARRAY(x, "*", STORED, EXACTLY, REQUIRED, IN(dropout, x))                                                           \
    NUMBER(p, PROBABILITY, NOWHERE)                                                                                    \
    NUMBER(training, TRUTH, NOWHERE)                                                                                   \
    NUMBER(rng, SEED, NOWHERE)                                                                                         \
    WISH(return_mask)                                                                                                  \
    RESULT(out, "*", STORED, IN_PLACE, IN(dropout, out))                                                               \
    RETURNS(mask, "*", BOOLS, DROPOUT_return_mask, IN(dropout, mask))
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
    RETURNS(grad_weight, "D", COMPUTED, RMS_NORM_BACKWARD_weight, IN(norm_backward, grad_weight))
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
    ARRAY(weight, "NK", FACTOR, EXACTLY, REQUIRED, NOWHERE)                                                            \
    ARRAY(bias, "N", PROMOTED, EXACTLY, OPTIONAL, NOWHERE)                                                             \
    NUMBER(compute_dtype, PRODUCTS, NOWHERE)                                                                           \
    RESULT(out, "*N", STORED, APART, NOWHERE)
#define LINEAR_ATTENTION_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, RESULT, RETURNS)                                         \
    ARRAY(query, "*NTH", STORED, EXACTLY, REQUIRED, IN(linear_attention, query))                                       \
    ARRAY(key, "*KTH", STORED, EXACTLY, REQUIRED, IN(linear_attention, key))                                           \
    ARRAY(value, "*VTD", STORED, EXACTLY, REQUIRED, IN(linear_attention, value))                                       \
    ARRAY(decay, "*GTH", COMPUTED, BROADCASTS, OPTIONAL, IN(linear_attention, decay))                                  \
    ARRAY(beta, "*GT", COMPUTED, BROADCASTS, OPTIONAL, IN(linear_attention, beta))                                     \
    ARRAY(state, "*GHD", COMPUTED, BROADCASTS, OPTIONAL, IN(linear_attention, state))                                  \
    NUMBER(scale, REAL, NOWHERE)                                                                                       \
    ARRAY(seq_lengths, "*", QUERY_COUNTS, BROADCASTS, OPTIONAL, IN(linear_attention, lengths))                         \
    ARRAY(cu_seqlens, "", EDGES, EXACTLY, OPTIONAL, NOWHERE)                                                           \
    NUMBER(layout, LAYOUT, NOWHERE)                                                                                    \
    WISH(return_state)                                                                                                 \
    RESULT(state_out, "*GHD", COMPUTED, IN_PLACE, IN(linear_attention, state_out))                                     \
    RESULT(out, "*NTD", STORED, APART, IN(linear_attention, out))
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

/* The slots of each table. */
#define NO_SLOT(...)
#define SOFTMAX_SLOT(name, ...) SOFTMAX_##name,
#define MASKED_SOFTMAX_SLOT(name, ...) MASKED_SOFTMAX_##name,
#define DROPOUT_SLOT(name, ...) DROPOUT_##name,
#define CAUSAL_MASK_SLOT(name, ...) CAUSAL_MASK_##name,
#define ROPE_SLOT(name, ...) ROPE_##name,
#define RMS_NORM_SLOT(name, ...) RMS_NORM_##name,
#define LAYER_NORM_SLOT(name, ...) LAYER_NORM_##name,
#define RMS_NORM_BACKWARD_SLOT(name, ...) RMS_NORM_BACKWARD_##name,
#define LAYER_NORM_BACKWARD_SLOT(name, ...) LAYER_NORM_BACKWARD_##name,
#define GELU_SLOT(name, ...) GELU_##name,
#define GELU_BACKWARD_SLOT(name, ...) GELU_BACKWARD_##name,
#define SILU_SLOT(name, ...) SILU_##name,
#define SILU_BACKWARD_SLOT(name, ...) SILU_BACKWARD_##name,
#define LINEAR_SLOT(name, ...) LINEAR_##name,
#define LINEAR_ATTENTION_SLOT(name, ...) LINEAR_ATTENTION_##name,
#define CAUSAL_CONV_SLOT(name, ...) CAUSAL_CONV_##name,
enum {
    SOFTMAX_ARGUMENTS(SOFTMAX_SLOT, SOFTMAX_SLOT, SOFTMAX_SLOT, SOFTMAX_SLOT, SOFTMAX_SLOT, NO_SLOT) N_SOFTMAX_ARGS
};
enum {
    MASKED_SOFTMAX_ARGUMENTS(MASKED_SOFTMAX_SLOT, MASKED_SOFTMAX_SLOT, MASKED_SOFTMAX_SLOT, MASKED_SOFTMAX_SLOT,
                             MASKED_SOFTMAX_SLOT, NO_SLOT) N_MASKED_SOFTMAX_ARGS
};
enum {
    DROPOUT_ARGUMENTS(DROPOUT_SLOT, DROPOUT_SLOT, DROPOUT_SLOT, DROPOUT_SLOT, DROPOUT_SLOT, NO_SLOT) N_DROPOUT_ARGS
};
enum {
    CAUSAL_MASK_ARGUMENTS(CAUSAL_MASK_SLOT, CAUSAL_MASK_SLOT, CAUSAL_MASK_SLOT, CAUSAL_MASK_SLOT, CAUSAL_MASK_SLOT,
                          NO_SLOT) N_CAUSAL_MASK_ARGS
};
enum { ROPE_ARGUMENTS(ROPE_SLOT, ROPE_SLOT, ROPE_SLOT, ROPE_SLOT, ROPE_SLOT, NO_SLOT) N_ROPE_ARGS };
enum {
    RMS_NORM_ARGUMENTS(RMS_NORM_SLOT, RMS_NORM_SLOT, RMS_NORM_SLOT, RMS_NORM_SLOT, RMS_NORM_SLOT, NO_SLOT)
        N_RMS_NORM_ARGS
};
enum {
    LAYER_NORM_ARGUMENTS(LAYER_NORM_SLOT, LAYER_NORM_SLOT, LAYER_NORM_SLOT, LAYER_NORM_SLOT, LAYER_NORM_SLOT, NO_SLOT)
        N_LAYER_NORM_ARGS
};
enum {
    RMS_NORM_BACKWARD_ARGUMENTS(RMS_NORM_BACKWARD_SLOT, RMS_NORM_BACKWARD_SLOT, RMS_NORM_BACKWARD_SLOT,
                                RMS_NORM_BACKWARD_SLOT, RMS_NORM_BACKWARD_SLOT, NO_SLOT) N_RMS_NORM_BACKWARD_ARGS
};
enum {
    LAYER_NORM_BACKWARD_ARGUMENTS(LAYER_NORM_BACKWARD_SLOT, LAYER_NORM_BACKWARD_SLOT, LAYER_NORM_BACKWARD_SLOT,
                                  LAYER_NORM_BACKWARD_SLOT, LAYER_NORM_BACKWARD_SLOT, NO_SLOT)
        N_LAYER_NORM_BACKWARD_ARGS
};
enum { GELU_ARGUMENTS(GELU_SLOT, GELU_SLOT, GELU_SLOT, GELU_SLOT, GELU_SLOT, NO_SLOT) N_GELU_ARGS };
enum {
    GELU_BACKWARD_ARGUMENTS(GELU_BACKWARD_SLOT, GELU_BACKWARD_SLOT, GELU_BACKWARD_SLOT, GELU_BACKWARD_SLOT,
                            GELU_BACKWARD_SLOT, NO_SLOT) N_GELU_BACKWARD_ARGS
};
enum { SILU_ARGUMENTS(SILU_SLOT, SILU_SLOT, SILU_SLOT, SILU_SLOT, SILU_SLOT, NO_SLOT) N_SILU_ARGS };
enum {
    SILU_BACKWARD_ARGUMENTS(SILU_BACKWARD_SLOT, SILU_BACKWARD_SLOT, SILU_BACKWARD_SLOT, SILU_BACKWARD_SLOT,
                            SILU_BACKWARD_SLOT, NO_SLOT) N_SILU_BACKWARD_ARGS
};
enum { LINEAR_ARGUMENTS(LINEAR_SLOT, LINEAR_SLOT, LINEAR_SLOT, LINEAR_SLOT, LINEAR_SLOT, NO_SLOT) N_LINEAR_ARGS };
enum {
    LINEAR_ATTENTION_ARGUMENTS(LINEAR_ATTENTION_SLOT, LINEAR_ATTENTION_SLOT, LINEAR_ATTENTION_SLOT,
                               LINEAR_ATTENTION_SLOT, LINEAR_ATTENTION_SLOT, NO_SLOT) N_LINEAR_ATTENTION_ARGS
};
enum {
    CAUSAL_CONV_ARGUMENTS(CAUSAL_CONV_SLOT, CAUSAL_CONV_SLOT, CAUSAL_CONV_SLOT, CAUSAL_CONV_SLOT, CAUSAL_CONV_SLOT,
                          NO_SLOT) N_CAUSAL_CONV_ARGS
};

/* ---- laws ---- */

/* How the axes of an array follow from those of the main array of a call. */
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
/* Fills in the sizes of a call; `axis` is that of the columns. */
void cattn_fill_sizes(const struct cattn_places *places, const struct cattn_array *main, int axis, void *params);
/* The view of an array or a result. */
void cattn_view_related(const struct cattn_places *places, enum cattn_relation relation, const struct cattn_array *main,
                        int axis, const struct cattn_array *array, void *tensor);

/* ---- functions ---- */

/* FUNCTION(name, TABLE, params, compute, set, ...): the function of the core with its params, a statement that sets
 * what is no argument, and members of struct cattn_function. */
#define FUNCTIONS(F)                                                                                                   \
    F(rms_norm, RMS_NORM_ARGUMENTS, norm, cattn_norm, (void)p, .main = RMS_NORM_x,                                     \
      .places = ROWS(norm, IN(norm, storage)))                                                                         \
    F(layer_norm, LAYER_NORM_ARGUMENTS, norm, cattn_norm, p->centred = true, .main = LAYER_NORM_x,                     \
      .places = ROWS(norm, IN(norm, storage)))                                                                         \
    F(rms_norm_backward, RMS_NORM_BACKWARD_ARGUMENTS, norm_backward, cattn_norm_backward, (void)p,                     \
      .main = RMS_NORM_BACKWARD_x, .places = ROWS(norm_backward, NOWHERE), .widens = true)                             \
    F(layer_norm_backward, LAYER_NORM_BACKWARD_ARGUMENTS, norm_backward, cattn_norm_backward, p->centred = true,       \
      .main = LAYER_NORM_BACKWARD_x, .places = ROWS(norm_backward, NOWHERE), .widens = true)                           \
    F(gelu, GELU_ARGUMENTS, activation, cattn_activate, (void)p, .main = GELU_x,                                       \
      .places = ROWS(activation, IN(activation, storage)))                                                             \
    F(gelu_backward, GELU_BACKWARD_ARGUMENTS, activation, cattn_activate, (void)p, .main = GELU_BACKWARD_x,            \
      .places = ROWS(activation, IN(activation, storage)))                                                             \
    F(silu, SILU_ARGUMENTS, activation, cattn_activate, p->which = CATTN_SILU, .main = SILU_x,                         \
      .places = ROWS(activation, IN(activation, storage)))                                                             \
    F(silu_backward, SILU_BACKWARD_ARGUMENTS, activation, cattn_activate, p->which = CATTN_SILU,                       \
      .main = SILU_BACKWARD_x, .places = ROWS(activation, IN(activation, storage)))                                    \
    F(rope, ROPE_ARGUMENTS, rope, cattn_rope, (void)p, .main = ROPE_x, .settle = cattn_settle_rope,                    \
      .places = TOKENS(rope, n_batch, seqlen, n_cols))

#define FUNCTION_INDEX(name, ...) FUNCTION_##name,
enum { FUNCTIONS(FUNCTION_INDEX) N_FUNCTIONS };

#endif
