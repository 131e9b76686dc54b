/* functions.h -- the arguments of the functions that are not attention: a table for each, from which all else follows.
 *
 * A table is an X-macro, TABLE(ARRAY, NUMBER, WISH, RESULT). Its rows are the slots of a call, in the order of the
 * signature:
 *
 * ARRAY(name, axes, kind, fits, need): an array. Every letter is an axis, `*` all axes before the others. T tokens,
 *   C columns or channels; of `linear` K columns and N rows of the weight; of linear attention the letters of
 * operands.h and the heads V of value and G of the states; of causal_conv J places of the weight and W rows of the
 * state. NUMBER(name, kind): one value for the whole call, a number or a word. WISH(name): which results there are.
 * RESULT(name, axes, kind): takes a result, or is None.
 */
#ifndef CATTN_FUNCTIONS_H
#define CATTN_FUNCTIONS_H

#include "operands.h"

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
    K(FLAG)         /* a bool */                                                                                       \
    K(WORD)         /* one of a few words */                                                                           \
    K(AXES)         /* an int, a tuple of ints or None */                                                              \
    K(SCALING)      /* a dict of a model's config */                                                                   \
    K(RESULT_NAMES) /* names of results */

#define SOFTMAX_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                                 \
    ARRAY(x, "*C", STORED, EXACTLY, REQUIRED)                                                                          \
    NUMBER(axis, AXES)                                                                                                 \
    ARRAY(where, "*C", BOOLS, BROADCASTS, OPTIONAL)                                                                    \
    NUMBER(scale, REAL)                                                                                                \
    RESULT(out, "*C", STORED)
#define MASKED_SOFTMAX_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                          \
    ARRAY(scores, "*TC", STORED, EXACTLY, REQUIRED)                                                                    \
    ARRAY(mask, "*TC", BOOLS, BROADCASTS, OPTIONAL)                                                                    \
    NUMBER(axis, AXES)                                                                                                 \
    NUMBER(is_causal, ALIGNMENT)                                                                                       \
    ARRAY(query_offset, "*", OFFSETS, BROADCASTS, OPTIONAL)                                                            \
    NUMBER(scale, REAL)                                                                                                \
    NUMBER(method, WORD)                                                                                               \
    RESULT(out, "*TC", STORED)
#define DROPOUT_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                                 \
    ARRAY(x, "*C", STORED, EXACTLY, REQUIRED)                                                                          \
    NUMBER(p, PROBABILITY)                                                                                             \
    NUMBER(training, FLAG)                                                                                             \
    NUMBER(rng, SEED)                                                                                                  \
    WISH(return_mask)                                                                                                  \
    RESULT(out, "*C", STORED)
#define CAUSAL_MASK_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                             \
    NUMBER(T_q, COUNT)                                                                                                 \
    NUMBER(T_k, COUNT)                                                                                                 \
    NUMBER(is_causal, ALIGNMENT)                                                                                       \
    ARRAY(query_offset, "", OFFSETS, BROADCASTS, OPTIONAL)                                                             \
    NUMBER(window_size, WINDOW)
#define ROPE_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                                    \
    ARRAY(x, "*TC", STORED, EXACTLY, REQUIRED)                                                                         \
    ARRAY(positions, "*T", POSITIONS, BROADCASTS, OPTIONAL)                                                            \
    NUMBER(theta, BASE)                                                                                                \
    NUMBER(rotary_dim, COUNT)                                                                                          \
    NUMBER(interleaved, FLAG)                                                                                          \
    NUMBER(scaling, SCALING)                                                                                           \
    NUMBER(inverse, FLAG)                                                                                              \
    RESULT(out, "*TC", STORED)
#define RMS_NORM_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                                \
    ARRAY(x, "*C", STORED, EXACTLY, REQUIRED)                                                                          \
    ARRAY(weight, "C", PROMOTED, EXACTLY, OPTIONAL)                                                                    \
    NUMBER(eps, NOT_NEGATIVE)                                                                                          \
    RESULT(out, "*C", STORED)
#define LAYER_NORM_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                              \
    ARRAY(x, "*C", STORED, EXACTLY, REQUIRED)                                                                          \
    ARRAY(weight, "C", PROMOTED, EXACTLY, OPTIONAL)                                                                    \
    ARRAY(bias, "C", PROMOTED, EXACTLY, OPTIONAL)                                                                      \
    NUMBER(eps, NOT_NEGATIVE)                                                                                          \
    RESULT(out, "*C", STORED)
#define GELU_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                                    \
    ARRAY(x, "*C", STORED, EXACTLY, REQUIRED)                                                                          \
    NUMBER(approximate, WORD)                                                                                          \
    RESULT(out, "*C", STORED)
#define GELU_BACKWARD_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                           \
    ARRAY(grad_out, "*C", STORED, EXACTLY, REQUIRED)                                                                   \
    GELU_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)
#define SILU_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                                    \
    ARRAY(x, "*C", STORED, EXACTLY, REQUIRED)                                                                          \
    RESULT(out, "*C", STORED)
#define SILU_BACKWARD_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                           \
    ARRAY(grad_out, "*C", STORED, EXACTLY, REQUIRED)                                                                   \
    SILU_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)
#define LINEAR_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                                  \
    ARRAY(x, "*K", FACTOR, EXACTLY, REQUIRED)                                                                          \
    ARRAY(weight, "NK", FACTOR, EXACTLY, REQUIRED)                                                                     \
    ARRAY(bias, "N", PROMOTED, EXACTLY, OPTIONAL)                                                                      \
    NUMBER(compute_dtype, PRODUCTS)                                                                                    \
    RESULT(out, "*N", STORED)
#define LINEAR_ATTENTION_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                        \
    ARRAY(query, "*NTH", STORED, EXACTLY, REQUIRED)                                                                    \
    ARRAY(key, "*KTH", STORED, EXACTLY, REQUIRED)                                                                      \
    ARRAY(value, "*VTD", STORED, EXACTLY, REQUIRED)                                                                    \
    ARRAY(decay, "*GTH", COMPUTED, BROADCASTS, OPTIONAL)                                                               \
    ARRAY(beta, "*GT", COMPUTED, BROADCASTS, OPTIONAL)                                                                 \
    ARRAY(state, "*GHD", COMPUTED, BROADCASTS, OPTIONAL)                                                               \
    NUMBER(scale, REAL)                                                                                                \
    ARRAY(seq_lengths, "*", QUERY_COUNTS, BROADCASTS, OPTIONAL)                                                        \
    ARRAY(cu_seqlens, "", EDGES, EXACTLY, OPTIONAL)                                                                    \
    NUMBER(layout, LAYOUT)                                                                                             \
    WISH(return_state)                                                                                                 \
    RESULT(state_out, "*GHD", COMPUTED)                                                                                \
    RESULT(out, "*NTD", STORED)
#define CAUSAL_CONV_ARGUMENTS(ARRAY, NUMBER, WISH, RESULT)                                                             \
    ARRAY(x, "*TC", STORED, EXACTLY, REQUIRED)                                                                         \
    ARRAY(weight, "CJ", PROMOTED, EXACTLY, REQUIRED)                                                                   \
    ARRAY(bias, "C", PROMOTED, EXACTLY, OPTIONAL)                                                                      \
    ARRAY(state, "*WC", STORED, BROADCASTS, OPTIONAL)                                                                  \
    NUMBER(activation, WORD)                                                                                           \
    ARRAY(seq_lengths, "*", QUERY_COUNTS, BROADCASTS, OPTIONAL)                                                        \
    ARRAY(cu_seqlens, "", EDGES, EXACTLY, OPTIONAL)                                                                    \
    WISH(return_state)                                                                                                 \
    RESULT(state_out, "*WC", STORED)                                                                                   \
    RESULT(out, "*TC", STORED)

#endif
