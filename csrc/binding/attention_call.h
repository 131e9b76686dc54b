/* attention_call.h -- one call of attention on its way from Python's arguments to the core: the slots of the arguments,
 * what the call holds, and query, key and value with all that follows from them: dtypes, layout, sizes, heads, batch.
 */
#ifndef CATTN_ATTENTION_CALL_H
#define CATTN_ATTENTION_CALL_H

#include "call/operands.h"
#include "key_ranges.h"
#include "outputs.h"
#include "packed.h"

/* The options of call/operands.h, each with a slot. */
#define ATTENTION_ARGUMENTS(A) ATTENTION_OPTIONS(A, A, A)

/* Arguments of single functions; packed.h has the arguments of packed sequences. `out` of attention_backward is the
 * result of the forward pass. */
#define WEIGHTS_EXTRA(A) A(stage)
#define BACKWARD_EXTRA(A) A(grad_out) A(lse) A(grad_lse) A(merged)
#define TANGENTS_EXTRA(A) A(query_tangent) A(key_tangent) A(value_tangent) A(bias_tangent) A(sinks_tangent)
#define JVP_BACKWARD_EXTRA(A) A(grad_out_tangent) A(grad_lse_tangent) A(out_tangent) A(lse_tangent)
#define STATISTICS_EXTRA(A) A(statistics) A(top_k) A(observation_window)

#define WEIGHTS_ARGUMENTS(A) ATTENTION_ARGUMENTS(A) WEIGHTS_EXTRA(A)
#define VARLEN_ARGUMENTS(A) ATTENTION_ARGUMENTS(A) VARLEN_EXTRA(A)
#define BACKWARD_ARGUMENTS(A) ATTENTION_ARGUMENTS(A) BACKWARD_EXTRA(A)
#define VARLEN_BACKWARD_ARGUMENTS(A) BACKWARD_ARGUMENTS(A) VARLEN_EXTRA(A)
#define JVP_ARGUMENTS(A) ATTENTION_ARGUMENTS(A) TANGENTS_EXTRA(A) A(lse)
#define JVP_BACKWARD_ARGUMENTS(A) JVP_ARGUMENTS(A) JVP_BACKWARD_EXTRA(A)
#define STATISTICS_ARGUMENTS(A) ATTENTION_ARGUMENTS(A) STATISTICS_EXTRA(A)
#define VARLEN_STATISTICS_ARGUMENTS(A) STATISTICS_ARGUMENTS(A) VARLEN_EXTRA(A)

/* The extras take the slots after the shared ones. A row may have a name alone, and C11 wants an argument for the dots:
 * hence the empty one. */
#define ARG_SLOT(...) ARG_SLOT_NAMED(__VA_ARGS__, )
#define ARG_SLOT_NAMED(name, ...) ARG_##name,
enum { ATTENTION_ARGUMENTS(ARG_SLOT) N_ATTENTION_ARGS };
enum { BEFORE_WEIGHTS_EXTRA = N_ATTENTION_ARGS - 1, WEIGHTS_EXTRA(ARG_SLOT) };
enum { BEFORE_BACKWARD_EXTRA = N_ATTENTION_ARGS - 1, BACKWARD_EXTRA(ARG_SLOT) N_BACKWARD_ARGS };
enum {
    BEFORE_TANGENTS_EXTRA = N_ATTENTION_ARGS - 1,
    TANGENTS_EXTRA(ARG_SLOT) ARG_jvp_lse,
    JVP_BACKWARD_EXTRA(ARG_SLOT)
};
enum { BEFORE_STATISTICS_EXTRA = N_ATTENTION_ARGS - 1, STATISTICS_EXTRA(ARG_SLOT) N_STATISTICS_ARGS };

enum { OUT, WEIGHTS, LSE, DROPOUT_MASK, N_OUTPUTS };

/* One call of attention on its way from Python's arguments to the core. */
struct cattn_call {
    struct binding_state *state;
    struct cattn_attention_params *params;
    /* owned, or NULL; numbers of batch entries are in `ranges` */
    PyArrayObject *inputs[N_ATTENTION_OPERANDS];
    struct cattn_range_args ranges;
    struct cattn_output outputs[N_OUTPUTS];
    bool wants[N_OUTPUTS];
    bool as_tuple;      /* the result is an AttentionOutput */
    int lse_type;       /* the dtype that return_lse names; NPY_BOOL (0): none */
    bool has_seed;      /* dropout_seed draws the same mask again */
    bool has_heads;     /* axis -3 of the call is heads */
    bool tokens_first;  /* arrays of query, key, value and output have (*batch, rows, H, width) */
    int axes;           /* of query, key, value and masks, for cattn_tensor_from */
    int compute_type;   /* NumPy's type number of the computation */
    int stored_type;    /* the same of query, key, value, out and weights */
    bool rounds_inputs; /* gradients: compute_dtype rounds query, key and value before the call */
    bool widens;        /* halves are computed as float32, and the caller rounds the result */
    int half_type;      /* of the inputs that were widened; NPY_BOOL (0): none */
    int n_batch_dims;
    struct cattn_packed *packed; /* not owned; cleared with the call. NULL: the sequences are not packed */
    npy_intp kv_heads;           /* of key and value, 1 without heads */
    int nd;                      /* of dims */
    npy_intp *dims;              /* (*batch, [H], T_q, T_k); of packed sequences (1, H, total_q, total_k) */
    npy_intp weight_cols;        /* of a row of weights: T_k, or the length of the lists of key_indices */
    npy_intp *bias_dims; /* receives the shape of the bias that has a gradient; NULL if there are no gradients */
    int bias_nd;         /* of the bias, else of an additive attn_mask; -1 without either */
};

/* Parses query, key, value, compute_dtype, layout and enable_gqa, and fills in the views, sizes, heads and batch. */
bool cattn_call_parse_shapes(struct cattn_call *call, PyObject *const *args);
/* The view of an array with the axes (*batch, [H], rows, width), or (*batch, rows, H, width) if tokens_first. */
void cattn_call_view(const struct cattn_call *call, PyArrayObject *array, struct cattn_tensor *tensor);
/* Turns the shape of an output, (*batch, [H], rows, width), or of a number for each row, (*batch, [H], rows), into the
 * shape that the caller sees: with the rows before the heads if tokens_first, and without the batch if the sequences
 * are packed. Returns its number of axes. */
int cattn_call_shape(const struct cattn_call *call, int nd, npy_intp *dims);
/* ValueError for sizes whose products the core cannot count. */
bool cattn_call_counts_fit(const struct cattn_attention_params *params);

#endif
