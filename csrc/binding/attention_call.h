/* attention_call.h -- what one call of attention owns on its way from Python's arguments to the core. Parsed by
 * attention_call.c, run by py_attention.c.
 */
#ifndef CATTN_ATTENTION_CALL_H
#define CATTN_ATTENTION_CALL_H

#include "args.h"
#include "ranges.h"

/* The order of the positional arguments of _cattn.attention. */
enum {
    ARG_QUERY,
    ARG_KEY,
    ARG_VALUE,
    ARG_ATTN_MASK,
    ARG_DROPOUT_P,
    ARG_IS_CAUSAL,
    ARG_SCALE,
    ARG_ENABLE_GQA,
    ARG_BIAS,
    ARG_QUERY_OFFSET,
    ARG_QUERY_LENGTHS,
    ARG_KEY_LENGTHS,
    ARG_WINDOW_SIZE,
    ARG_SOFTCAP,
    ARG_ALIBI_SLOPES,
    ARG_SINKS,
    ARG_RNG,
    ARG_NEED_WEIGHTS,
    ARG_RETURN_LSE,
    ARG_RETURN_DROPOUT_MASK,
    ARG_OUT,
    N_ARGS
};

enum { QUERY, KEY, VALUE, ATTN_MASK, BIAS, SLOPES, SINKS, N_INPUTS };
/* The steps of attention, in order. */
enum stage { STAGE_QK, STAGE_SOFTCAP, STAGE_BIAS, STAGE_MASK, STAGE_SOFTMAX, STAGE_DROPOUT, STAGE_OUT };
enum { OUT, WEIGHTS, LSE, DROPOUT_MASK, N_OUTPUTS };

struct cattn_call {
    struct binding_state *state;
    struct cattn_attention_params *params;
    int stacklevel;                  /* of warnings: 1 where the caller's frame is the innermost one of Python */
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    struct cattn_range_args ranges;
    struct cattn_output outputs[N_OUTPUTS];
    bool wants[N_OUTPUTS];
    bool as_tuple; /* the result is an AttentionOutput */
    bool has_seed; /* dropout_seed draws the same mask again */
    bool heads;    /* axis -3 of the call is heads */
    int type;      /* NumPy's number, of what is computed in */
    int stored;    /* the same of query, key, value, out and weights */
    int n_batch_dims;
    npy_intp kv_heads;   /* of key and value, 1 without heads */
    int nd;              /* of dims */
    npy_intp *dims;      /* (*lead, [H], T_q, T_k) */
    npy_intp *bias_dims; /* room for the shape of what a gradient may be asked of, or NULL */
    int bias_nd;         /* of the bias, else of an additive attn_mask; -1 without either */
};

/* Arrays, sizes, masks, ranges and numbers into params; outputs and rng are not looked at. */
bool cattn_call_parse(struct cattn_call *call, PyObject *const *args);
/* ValueError for sizes that the core cannot count with. */
bool cattn_call_counts_fit(const struct cattn_attention_params *params);
/* Everything is checked and allocated: draws dropout's seed, or from the stream, and computes; without the GIL if
 * `work`, in multiply-adds, is long enough. */
bool cattn_call_run(struct cattn_call *call, PyObject *rng, double work, enum cattn_status (*compute)(const void *),
                    const void *context);

#endif
