/* attention_call.h -- one call of attention: its arguments, packed sequences, and its way to the core. */
#ifndef CATTN_ATTENTION_CALL_H
#define CATTN_ATTENTION_CALL_H

#include "args.h"
#include "call/operands.h"

/* ---- which keys a query sees ---- */

struct cattn_range_args {
    bool is_causal, lower_right;
    bool bare;           /* no argument says how queries and keys are aligned */
    int64_t left, right; /* of the window */
    int64_t offset;      /* of every query; unused if there are offsets */
    /* owned, or NULL; int64 once they are settled: until then only their dtype was looked at */
    PyArrayObject *offsets, *query_lengths, *key_lengths, *first_keys;
};
bool cattn_arg_ranges(struct binding_state *state, PyObject *is_causal, PyObject *query_offset, PyObject *window_size,
                      struct cattn_range_args *args);

struct cattn_range_sizes {
    int64_t seqlen_q, seqlen_k;
    int n_batch_dims;
    const int64_t *batch;
    PyObject *query_lengths, *key_lengths, *first_keys; /* the arguments, or None */
};
/* Fills in `ranges`, which is cleared. Lengths and first keys are checked against the sizes; warns if the alignment is
 * ambiguous. */
bool cattn_ranges_settle(struct binding_state *state, struct cattn_range_args *args,
                         const struct cattn_range_sizes *sizes, struct cattn_ranges *ranges);
void cattn_ranges_clear(struct cattn_range_args *args);

/* ---- packed sequences ---- */

/* Several functions have these arguments, in different slots: the index counts from the first of them. */
#define VARLEN_EXTRA(ARRAY, NUMBER)                                                                                    \
    ARRAY(cu_seqlens_q, "", EDGES, EXACTLY, REQUIRED)                                                                  \
    ARRAY(cu_seqlens_k, "", EDGES, EXACTLY, REQUIRED)                                                                  \
    NUMBER(max_seqlen_q, COUNT)                                                                                        \
    NUMBER(max_seqlen_k, COUNT)                                                                                        \
    NUMBER(alignment, ALIGNMENT)
#define VARLEN_SLOT(name, ...) VARLEN_##name,
enum { VARLEN_EXTRA(VARLEN_SLOT, VARLEN_SLOT) N_VARLEN_EXTRA };

struct cattn_packed {
    PyObject *const *args; /* of VARLEN_EXTRA */
    struct cattn_edges queries, keys;
};

/* Reads the edges of arrays with these numbers of rows, and refuses an rng that packed sequences cannot have. */
bool cattn_packed_parse(struct binding_state *state, struct cattn_packed *packed, int64_t total_q, int64_t total_k,
                        PyObject *rng);
/* Reads `alignment`, and warns if the alignment of a sequence is ambiguous. Comes between the two steps of
 * the ranges. */
bool cattn_packed_align(struct binding_state *state, const struct cattn_packed *packed,
                        struct cattn_range_args *ranges);
void cattn_packed_fill(const struct cattn_packed *packed, struct cattn_attention_params *params);
/* packed may be NULL. */
void cattn_packed_clear(struct cattn_packed *packed);

/* ---- the call ---- */

/* The options of call/operands.h, each with a slot. */
#define ATTENTION_ARGUMENTS(ARRAY, NUMBER, WORD, WISH, ...) ATTENTION_OPTIONS(ARRAY, NUMBER, WISH)

/* Arguments of single functions. `out` of attention_backward is the result of the forward pass. */
#define WEIGHTS_EXTRA(WORD) WORD(stage, "qk|softcap|bias|mask|softmax|dropout", NOWHERE)
#define BACKWARD_EXTRA(ARRAY, NUMBER)                                                                                  \
    ARRAY(grad_out, "NTD", STORED, EXACTLY, REQUIRED)                                                                  \
    ARRAY(lse, "NT", COMPUTED, EXACTLY, REQUIRED)                                                                      \
    ARRAY(grad_lse, "NT", COMPUTED, EXACTLY, OPTIONAL)                                                                 \
    NUMBER(merged, FLAG)
#define TANGENTS_EXTRA(ARRAY, NUMBER)                                                                                  \
    ARRAY(query_tangent, "NTH", STORED, EXACTLY, OPTIONAL)                                                             \
    ARRAY(key_tangent, "KSH", STORED, EXACTLY, OPTIONAL)                                                               \
    ARRAY(value_tangent, "KSD", STORED, EXACTLY, OPTIONAL)                                                             \
    ARRAY(bias_tangent, "NTS", COMPUTED, BROADCASTS, OPTIONAL)                                                         \
    ARRAY(sinks_tangent, "N", COMPUTED, BROADCASTS, OPTIONAL)
#define JVP_EXTRA(ARRAY, NUMBER) TANGENTS_EXTRA(ARRAY, NUMBER) ARRAY(lse, "NT", COMPUTED, EXACTLY, OPTIONAL)
#define JVP_BACKWARD_EXTRA(ARRAY, NUMBER)                                                                              \
    ARRAY(grad_out_tangent, "NTD", STORED, EXACTLY, REQUIRED)                                                          \
    ARRAY(grad_lse_tangent, "NT", COMPUTED, EXACTLY, OPTIONAL)                                                         \
    ARRAY(out_tangent, "NTD", STORED, EXACTLY, REQUIRED)                                                               \
    ARRAY(lse_tangent, "NT", COMPUTED, EXACTLY, REQUIRED)
#define STATISTICS_EXTRA(ARRAY, NUMBER)                                                                                \
    NUMBER(statistics, RESULT_NAMES)                                                                                   \
    NUMBER(top_k, COUNT)                                                                                               \
    NUMBER(observation_window, COUNT)
#define CHOICE_EXTRA(ARRAY, NUMBER, WORD, WISH)                                                                        \
    NUMBER(count, COUNT)                                                                                               \
    ARRAY(weights, "NT", COMPUTED, BROADCASTS, OPTIONAL)                                                               \
    WORD(activation, "relu", NOWHERE)                                                                                  \
    NUMBER(block_size, COUNT)                                                                                          \
    NUMBER(pooled, FLAG)                                                                                               \
    NUMBER(first, COUNT)                                                                                               \
    NUMBER(last, COUNT)                                                                                                \
    WISH(return_scores)

/* The tables. */
#define WEIGHTS_ARGUMENTS(A, N, O, W, ...) ATTENTION_ARGUMENTS(A, N, O, W, __VA_ARGS__) WEIGHTS_EXTRA(O)
#define VARLEN_ARGUMENTS(A, N, O, W, ...) ATTENTION_ARGUMENTS(A, N, O, W, __VA_ARGS__) VARLEN_EXTRA(A, N)
#define BACKWARD_ARGUMENTS(A, N, O, W, ...) ATTENTION_ARGUMENTS(A, N, O, W, __VA_ARGS__) BACKWARD_EXTRA(A, N)
#define VARLEN_BACKWARD_ARGUMENTS(A, N, O, W, ...) BACKWARD_ARGUMENTS(A, N, O, W, __VA_ARGS__) VARLEN_EXTRA(A, N)
#define JVP_ARGUMENTS(A, N, O, W, ...) ATTENTION_ARGUMENTS(A, N, O, W, __VA_ARGS__) JVP_EXTRA(A, N)
#define JVP_BACKWARD_ARGUMENTS(A, N, O, W, ...) JVP_ARGUMENTS(A, N, O, W, __VA_ARGS__) JVP_BACKWARD_EXTRA(A, N)
#define STATISTICS_ARGUMENTS(A, N, O, W, ...) ATTENTION_ARGUMENTS(A, N, O, W, __VA_ARGS__) STATISTICS_EXTRA(A, N)
#define CHOICE_ARGUMENTS(A, N, O, W, ...) ATTENTION_ARGUMENTS(A, N, O, W, __VA_ARGS__) CHOICE_EXTRA(A, N, O, W)
#define VARLEN_STATISTICS_ARGUMENTS(A, N, O, W, ...) STATISTICS_ARGUMENTS(A, N, O, W, __VA_ARGS__) VARLEN_EXTRA(A, N)

/* The extras take the slots after the shared ones. A row may have a name alone, and C11 wants an argument for the dots:
 * hence the empty one. */
#define ARG_SLOT(...) ARG_SLOT_NAMED(__VA_ARGS__, )
#define ARG_SLOT_NAMED(name, ...) ARG_##name,
#define JVP_SLOT(name, ...) ARG_jvp_##name,
enum { ATTENTION_OPTIONS(ARG_SLOT, ARG_SLOT, ARG_SLOT) N_ATTENTION_ARGS };
enum { BEFORE_WEIGHTS_EXTRA = N_ATTENTION_ARGS - 1, WEIGHTS_EXTRA(ARG_SLOT) };
enum { BEFORE_BACKWARD_EXTRA = N_ATTENTION_ARGS - 1, BACKWARD_EXTRA(ARG_SLOT, ARG_SLOT) N_BACKWARD_ARGS };
enum { BEFORE_JVP_EXTRA = N_ATTENTION_ARGS - 1, JVP_EXTRA(JVP_SLOT, JVP_SLOT) JVP_BACKWARD_EXTRA(JVP_SLOT, JVP_SLOT) };
enum { BEFORE_STATISTICS_EXTRA = N_ATTENTION_ARGS - 1, STATISTICS_EXTRA(ARG_SLOT, ARG_SLOT) N_STATISTICS_ARGS };
enum { BEFORE_CHOICE_EXTRA = N_ATTENTION_ARGS - 1, CHOICE_EXTRA(ARG_SLOT, ARG_SLOT, ARG_SLOT, ARG_SLOT) };

enum { OUT, WEIGHTS, LSE, DROPOUT_MASK, N_OUTPUTS };

/* A result: its axes in the letters of operands.h, where L is a key, or a place in a list of keys if there are lists,
 * and P a place among the top keys. */
struct cattn_result_row {
    const char *name, *axes;
    enum cattn_operand_kind kind;
};

/* What a call keeps outside of struct cattn_call, which is cleared whole: the arrays whose shapes results and tangents
 * have, as they were when they were read. Without data there is none. */
struct cattn_frozen {
    struct cattn_array inputs[OPERAND_value + 1]; /* query, key and value */
    struct cattn_array bias;                      /* or else an additive attn_mask */
    struct cattn_array gate;
    int64_t dims[CATTN_MAX_AXES]; /* of the call */
};

/* One call of attention on its way from Python's arguments to the core. */
struct cattn_call {
    struct binding_state *state;
    struct cattn_attention_params *params;
    /* owned, or NULL; numbers of batch entries are in `ranges` */
    PyArrayObject *inputs[N_ATTENTION_OPERANDS];
    struct cattn_range_args ranges;
    struct cattn_output outputs[N_OUTPUTS];
    bool wants[N_OUTPUTS];
    bool as_tuple;               /* the result is an AttentionOutput */
    int lse_type;                /* the dtype that return_lse names; NPY_BOOL (0): none */
    bool has_seed;               /* dropout_seed draws the same mask again */
    int compute_type;            /* NumPy's type number of the computation */
    int stored_type;             /* the same of query, key, value, out and weights */
    bool rounds_inputs;          /* gradients: compute_dtype rounds query, key and value before the call */
    bool widens;                 /* halves are computed as float32, and the caller rounds the result */
    int half_type;               /* of the inputs that were widened; NPY_BOOL (0): none */
    int64_t pooled;              /* tokens of a row of key, if more than one */
    struct cattn_packed *packed; /* not owned; cleared with the call. NULL: the sequences are not packed */
    struct cattn_shape shape;
    struct cattn_frozen *frozen;
};

/* A new array for a result with these axes, in letters, and its tensor; of zeros where the core adds to it. */
PyArrayObject *cattn_call_new(const struct cattn_call *call, const char *axes, int type, bool zeros,
                              struct cattn_tensor *tensor);
/* Clears params and fills in all inputs. rng, the outputs and the three flags of extras are left to the caller. */
bool cattn_call_parse(struct cattn_call *call, PyObject *const *args);
/* Comes after the allocation of the results: makes a batch of packed sequences. */
bool cattn_call_begin(struct cattn_call *call);

/* ---- running ---- */

/* Comes after all checks and allocations: draws a seed, or from a TorchGenerator, and computes; without the GIL if
 * `work`, in multiply-adds, is long enough. The caller ends `draw` in any case. */
bool cattn_call_run(struct cattn_call *call, PyObject *rng, double work, enum cattn_status (*compute)(const void *),
                    const void *params, struct cattn_draw *draw);
/* return_lse: whether the log-sum-exp is wanted, or its dtype. */
bool cattn_call_parse_return_lse(struct cattn_call *call, PyObject *object);
/* Releases the objects that the call owns. */
void cattn_call_clear(struct cattn_call *call);

/* ---- results and tangents as arguments ---- */

enum {
    CATTN_GRAD_OUT,
    CATTN_GRAD_LSE,
    CATTN_FORWARD_OUT,
    CATTN_FORWARD_LSE,
    CATTN_OUT_TANGENT, /* comes after the output, whose type it has */
    CATTN_LSE_TANGENT,
    CATTN_N_RESULTS
};

struct cattn_results {
    PyArrayObject *arrays[CATTN_N_RESULTS]; /* owned, or NULL */
    bool plain_out;                         /* out has the type of the computation though the inputs are halves */
};

/* Checks and converts one of them, after cattn_call_parse; fills in its tensor. */
bool cattn_results_take(struct cattn_results *results, struct cattn_call *call, int which, PyObject *object,
                        const char *name, struct cattn_tensor *tensor);
void cattn_results_clear(struct cattn_results *results);

/* In the order of TANGENTS_EXTRA. */
enum { QUERY_TANGENT, KEY_TANGENT, VALUE_TANGENT, BIAS_TANGENT, SINKS_TANGENT, CATTN_N_TANGENTS };

/* Checks and converts them, after cattn_call_parse, and fills in their tensors. None is no tangent. */
bool cattn_tangents_take(struct cattn_call *call, PyObject *const *objects, PyArrayObject **arrays,
                         struct cattn_tangents *tangents);
void cattn_tangents_clear(PyArrayObject **arrays);
/* An error for arguments that have no derivatives here: quantized keys and values, and a dropout mask that is not
 * drawn again from an int. */
bool cattn_tangents_refuse(const struct cattn_call *call, PyObject *const *args);

#endif
