/* operands.h -- the table of attention's options: what a call reads from arrays, the numbers, and what it returns.
 *
 * Both ways into the core follow it, Python's and XLA's, and so do the integrations, by `_cattn._operands`. The order
 * follows the parameters of scaled_dot_product_attention. To add an option, see
 * docs/architecture.md.
 */
#ifndef CATTN_OPERANDS_H
#define CATTN_OPERANDS_H

#include "../cattn.h"

/* OPERAND(name, axes, kind, fits, calls, view): an array. The batch dimensions come before the axes and always
 * broadcast. Every letter is an axis:
 * N query head, K key-value head, T query, S key, H head_dim, D d_v, X a block of queries, Y a block of keys, L a place
 * in a list of keys. `view` is its tensor in struct cattn_attention_params; an attn_mask of floats is
 * stored as bias[0], and `bias` as bias[1] then.
 *
 * NUMBER(name, kind, place, stage): one value for the whole call; its place in the params, if that is a real number,
 * and the stage that is the first one to have it. WISH(name): which results, and where. */
#define ATTENTION_OPTIONS(OPERAND, NUMBER, WISH)                                                                       \
    OPERAND(query, "NTH", STORED, EXACTLY, IN_ALL, query)                                                              \
    OPERAND(key, "KSH", KEYS, EXACTLY, IN_ALL, key)                                                                    \
    OPERAND(value, "KSD", VALUES, EXACTLY, IN_ALL & ~IN_STATISTICS, value)                                             \
    OPERAND(attn_mask, "NTS", MASK, BROADCASTS, IN_ALL & ~IN_PACKED, attn_mask)                                        \
    NUMBER(dropout_p, PROBABILITY, NO_PLACE, QK)                                                                       \
    NUMBER(is_causal, ALIGNMENT, NO_PLACE, QK)                                                                         \
    NUMBER(scale, REAL, IN_PARAMS(score_options.scale), QK)                                                            \
    NUMBER(enable_gqa, CHOICE, NO_PLACE, QK)                                                                           \
    NUMBER(layout, LAYOUT, NO_PLACE, QK)                                                                               \
    OPERAND(bias, "NTS", COMPUTED, BROADCASTS, IN_ALL & ~IN_PACKED, bias[0])                                           \
    OPERAND(query_offset, "", OFFSETS, BROADCASTS, IN_ALL & ~IN_PACKED, ranges.offsets)                                \
    OPERAND(query_seq_lengths, "", QUERY_COUNTS, BROADCASTS, IN_ALL & ~IN_PACKED, ranges.query_lengths)                \
    OPERAND(key_value_seq_lengths, "", KEY_COUNTS, BROADCASTS, IN_ALL & ~IN_PACKED, ranges.key_lengths)                \
    OPERAND(key_value_seq_starts, "", KEY_COUNTS, BROADCASTS, IN_ALL & ~IN_PACKED, ranges.first_keys)                  \
    NUMBER(window_size, WINDOW, NO_PLACE, QK)                                                                          \
    NUMBER(softcap, BOUND, IN_PARAMS(score_options.softcap), SOFTCAP)                                                  \
    OPERAND(alibi_slopes, "N", SLOPES, BROADCASTS, IN_ALL, slopes)                                                     \
    OPERAND(sinks, "N", LOGITS, BROADCASTS, IN_ALL, sinks)                                                             \
    OPERAND(block_mask, "NXY", BLOCKS, BROADCASTS, IN_ALL & ~IN_PACKED, block_mask)                                    \
    OPERAND(key_indices, "NTL", LISTS, BROADCASTS, IN_DENSE, key_indices)                                              \
    OPERAND(gate, "NTD", GATES, BROADCASTS, IN_ALL & ~IN_STATISTICS, gate)                                             \
    NUMBER(compute_dtype, PRODUCTS, NO_PLACE, QK)                                                                      \
    NUMBER(rng, SEED, NO_PLACE, QK)                                                                                    \
    WISH(return_weights)                                                                                               \
    WISH(return_lse)                                                                                                   \
    WISH(return_dropout_mask)                                                                                          \
    WISH(out)

/* Operands that Python passes inside an object: the scale of a cattn.Quantized, the size of a cattn.BlockMask. */
#define ATTENTION_PARTS(OPERAND, NUMBER)                                                                               \
    OPERAND(key_scale, "KSH", SCALES, BROADCASTS, IN_ALL, key_scale)                                                   \
    OPERAND(value_scale, "KSD", SCALES, BROADCASTS, IN_ALL & ~IN_STATISTICS, value_scale)                              \
    NUMBER(block_size, COUNT, NO_PLACE, QK)

/* One of the lists alone, with its parts. */
#define NO_OPTION(...)
#define IN_PARAMS(member) offsetof(struct cattn_attention_params, member)
#define NO_PLACE SIZE_MAX
#define ATTENTION_OPERANDS(O) ATTENTION_OPTIONS(O, NO_OPTION, NO_OPTION) ATTENTION_PARTS(O, NO_OPTION)
#define ATTENTION_NUMBERS(N) ATTENTION_OPTIONS(NO_OPTION, N, NO_OPTION) ATTENTION_PARTS(NO_OPTION, N)
#define ATTENTION_WISHES(W) ATTENTION_OPTIONS(NO_OPTION, NO_OPTION, W)

/* What an array holds. STORED and GATES, and KEYS and VALUES unless they are quantized, have the storage of the call;
 * COMPUTED, SLOPES and LOGITS the type of the computation. */
#define OPERAND_KINDS(K)                                                                                               \
    K(STORED)                                                                                                          \
    K(KEYS)                                                                                                            \
    K(VALUES)                                                                                                          \
    K(MASK) /* bool; or numbers as COMPUTED, for NumPy's functions */                                                  \
    K(COMPUTED)                                                                                                        \
    K(OFFSETS)      /* int64 */                                                                                        \
    K(QUERY_COUNTS) /* int64, 0 .. T */                                                                                \
    K(KEY_COUNTS)   /* int64, 0 .. S */                                                                                \
    K(SLOPES)       /* finite and not negative */                                                                      \
    K(LOGITS)       /* finite, or -inf for none */                                                                     \
    K(SCALES)       /* float32, see cattn_is_scale */                                                                  \
    K(BLOCKS)       /* bool */                                                                                         \
    K(LISTS)        /* int64, -1 .. S - 1 */                                                                           \
    K(GATES)        /* of the output, which weights, statistics and derivatives in a direction do not have */          \
    K(WIDENED)      /* XLA: COMPUTED that the core takes in float64 */                                                 \
    K(WORDS)        /* XLA: 64 bits as two words, the axis W, where JAX lacks the type */
#define NUMBER_KINDS(K)                                                                                                \
    K(PROBABILITY) /* a real number in [0, 1] */                                                                       \
    K(ALIGNMENT)   /* a bool or a word */                                                                              \
    K(REAL)        /* a real number or None */                                                                         \
    K(BOUND)       /* a positive number; None or 0 for none */                                                         \
    K(CHOICE)      /* a bool or None */                                                                                \
    K(LAYOUT)      /* the order of tokens and heads, a word */                                                         \
    K(WINDOW)      /* two numbers of keys, each or both of which may be None */                                        \
    K(COUNT)       /* a positive int or None */                                                                        \
    K(PRODUCTS)    /* the word "bfloat16" or None */                                                                   \
    K(SEED)        /* random bits */

#define ENUMERATOR(name) name,
enum cattn_operand_kind { OPERAND_KINDS(ENUMERATOR) N_OPERAND_KINDS };
enum cattn_number_kind { NUMBER_KINDS(ENUMERATOR) N_NUMBER_KINDS };
enum cattn_fits { EXACTLY, BROADCASTS };
enum cattn_need { REQUIRED, OPTIONAL };
/* Which calls take an operand. */
#define CALL_KINDS(K)                                                                                                  \
    K(DENSE)      /* attention, weights and gradients of arrays */                                                     \
    K(PACKED)     /* packed sequences */                                                                               \
    K(STATISTICS) /* statistics of the weights */                                                                      \
    K(XLA)        /* attention and gradients that XLA calls */
#define CALL_INDEX(name) CALL_##name,
enum { CALL_KINDS(CALL_INDEX) N_CALL_KINDS };
#define CALL_BIT(name) IN_##name = 1 << CALL_##name,
enum { CALL_KINDS(CALL_BIT) IN_ALL = (1 << N_CALL_KINDS) - 1 };

#define OPERAND_INDEX(name, ...) OPERAND_##name,
enum { ATTENTION_OPERANDS(OPERAND_INDEX) N_ATTENTION_OPERANDS };
#define NUMBER_INDEX(name, ...) NUMBER_##name,
enum { ATTENTION_NUMBERS(NUMBER_INDEX) N_ATTENTION_NUMBERS };

/* The steps of attention, in order: attention_weights and the live page show each of them. */
enum cattn_stage {
    CATTN_STAGE_QK,
    CATTN_STAGE_SOFTCAP,
    CATTN_STAGE_BIAS,
    CATTN_STAGE_MASK,
    CATTN_STAGE_SOFTMAX,
    CATTN_STAGE_DROPOUT,
    CATTN_STAGE_OUT
};
struct cattn_operand_row {
    const char *name, *axes;
    enum cattn_operand_kind kind;
    enum cattn_fits fits;
    unsigned calls;
    size_t view; /* offset of its tensor in struct cattn_attention_params */
};
struct cattn_number_row {
    const char *name;
    enum cattn_number_kind kind;
    size_t place; /* offset of a double in struct cattn_attention_params, or NO_PLACE */
    enum cattn_stage stage;
};
extern const struct cattn_operand_row cattn_operands[N_ATTENTION_OPERANDS];
extern const struct cattn_number_row cattn_numbers[N_ATTENTION_NUMBERS];
extern const char *const cattn_operand_kinds[N_OPERAND_KINDS];
extern const char *const cattn_number_kinds[N_NUMBER_KINDS];
extern const char *const cattn_call_kinds[N_CALL_KINDS];

/* The tensor of an operand in the params. */
struct cattn_tensor *cattn_operand_view(struct cattn_attention_params *params, int operand);
/* The place of a number in the params; NULL if it has none. */
double *cattn_number_place(struct cattn_attention_params *params, int number);

/* Removes the steps after the stage from the params. */
void cattn_stop_at(struct cattn_attention_params *params, enum cattn_stage stage);

#endif
