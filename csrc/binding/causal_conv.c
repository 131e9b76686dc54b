/* causal_conv.c -- what the rows of causal_conv do not say: sequences, the weight, and the state. */
#include "engine.h"

enum { ROWS_AND_COLUMNS = CATTN_AXIS_COL | CATTN_AXIS_ROW };

static bool settle_activation(const struct cattn_function_call *call, struct cattn_conv_params *p) {
    PyObject *activation = call->args[CAUSAL_CONV_activation];
    p->silu = cattn_arg_is(activation, call->state->silu);
    return p->silu || activation == Py_None || cattn_error_value(activation, "activation must be None or 'silu'");
}

/* The batch, which packed sequences make one of. */
static bool settle_batch(const struct cattn_function_call *call, struct cattn_conv_params *p) {
    const bool packed = call->edges.edges != NULL;
    if (packed && call->own_nd != 2)
        return cattn_raise(PyExc_ValueError, "x must have the shape (total, C) with cu_seqlens, got shape %s",
                           cattn_show_shape(call->own_nd, call->main->dims).text);
    if (packed) {
        p->n_batch_dims = 1;
        p->batch_shape[0] = call->edges.n_sequences;
        p->x.batch[0] = p->out.batch[0] = 0;
    }
    p->edges = call->edges.edges;
    p->longest = call->edges.longest;
    p->n_batch = cattn_count(p->n_batch_dims, p->batch_shape);
    return p->n_batch >= 0 || cattn_raise(PyExc_ValueError, "x has a batch that is too large");
}

static bool settle_weight(const struct cattn_function_call *call, struct cattn_conv_params *p) {
    const struct cattn_array *weight = cattn_frozen(call, CAUSAL_CONV_weight);
    if (weight->nd != 2 || weight->dims[0] != p->n_channels || weight->dims[1] < 1)
        return cattn_raise(PyExc_ValueError,
                           "weight must have shape (C, K) with C = %lld channels of x and K > 0, got %s",
                           (long long)p->n_channels, cattn_show_shape(weight->nd, weight->dims).text);
    p->width = weight->dims[1];
    cattn_view(&p->weight, weight, 0, ROWS_AND_COLUMNS);
    return true;
}

/* The axes of the states. */
static int state_shape(const struct cattn_conv_params *p, int64_t *dims) {
    const int nd = p->n_batch_dims;
    memcpy(dims, p->batch_shape, (size_t)nd * sizeof *dims);
    dims[nd] = p->width - 1;
    dims[nd + 1] = p->n_channels;
    return nd + 2;
}

bool cattn_settle_conv(struct cattn_function_call *call) {
    struct cattn_conv_params *p = call->params;
    PyObject *const cu_seqlens = call->args[CAUSAL_CONV_cu_seqlens];
    PyObject *const seq_lengths = call->args[CAUSAL_CONV_seq_lengths];
    const struct cattn_array *state = cattn_frozen(call, CAUSAL_CONV_state);
    int64_t dims[NPY_MAXDIMS + 1];
    if (!settle_activation(call, p) || !cattn_settle_edges(call, cu_seqlens, seq_lengths, p->seqlen) ||
        !settle_batch(call, p) || !settle_weight(call, p))
        return false;
    const int nd = state_shape(p, dims);
    if (state != NULL && !cattn_check_broadcast(cattn_python, state, nd, dims, "(..., K - 1, C), the shape", ""))
        return false;
    if (state != NULL)
        cattn_view(&p->state, state, p->n_batch_dims, ROWS_AND_COLUMNS);
    return cattn_settle_lengths(call, seq_lengths, p->seqlen, call->own_nd - 2, p->batch_shape, &p->length,
                                &p->lengths);
}

static bool returns_state(const struct cattn_function_call *call) {
    return (call->wishes >> CAUSAL_CONV_return_state & 1) != 0;
}

bool cattn_make_conv(struct cattn_function_call *call) {
    struct cattn_conv_params *p = call->params;
    int64_t dims[NPY_MAXDIMS + 1];
    const int nd = state_shape(p, dims);
    return cattn_make_state(call, returns_state(call), nd, dims, CAUSAL_CONV_state, p->n_batch_dims, ROWS_AND_COLUMNS,
                            &p->state_out);
}

double cattn_work_of_conv(const void *params) {
    const struct cattn_conv_params *p = params;
    const double rows = (double)p->n_batch * (double)p->seqlen + 1; /* one more for the weight, which may be copied */
    return rows * (double)p->n_channels * (double)p->width;
}

PyObject *cattn_build_conv(struct cattn_function_call *call) {
    return cattn_build_with_state(call, returns_state(call));
}
