/* causal_conv.c -- causal_conv(...): take the arguments, freeze, check, allocate, run, return. */
#include "args.h"

enum { X, WEIGHT, BIAS, STATE, N_INPUTS };

struct call {
    struct binding_state *state;
    struct cattn_conv_params params;
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    PyArrayObject *lengths;          /* owned, or NULL */
    struct cattn_edges edges;
    int type, nd, state_nd;
    int64_t dims[NPY_MAXDIMS + 1], state_dims[NPY_MAXDIMS + 1];
    struct cattn_output out, state_out;
};

static const char *const NAMES[N_INPUTS] = {"x", "weight", "bias", "state"};

/* x and state are converted to the common dtype of all arrays, weight and bias to the dtype of the computation. */
static bool take_arrays(struct call *call, PyObject *const *args) {
    static const int slots[N_INPUTS] = {CAUSAL_CONV_x, CAUSAL_CONV_weight, CAUSAL_CONV_bias, CAUSAL_CONV_state};
    for (int i = 0; i < N_INPUTS; i++)
        if ((args[slots[i]] != Py_None || i <= WEIGHT) &&
            (call->inputs[i] = cattn_arg_floats(call->state, args[slots[i]], NAMES[i])) == NULL)
            return false;
    call->type = cattn_arg_common_type(call->state, call->inputs, N_INPUTS, "x, weight, bias and state");
    for (int i = 0; i < N_INPUTS && call->type >= 0; i++) {
        const bool stored = i == X || i == STATE;
        if (call->inputs[i] != NULL &&
            !cattn_arg_widen(call->state, &call->inputs[i], stored ? call->type : cattn_arg_compute_type(call->type)))
            return false;
    }
    return call->type >= 0;
}

static bool take_activation(struct call *call, PyObject *activation) {
    call->params.silu = cattn_arg_is(activation, call->state->silu);
    return call->params.silu || activation == Py_None ||
           cattn_error_value(activation, "activation must be None or 'silu'");
}

static bool take_edges(struct call *call, PyObject *cu_seqlens, PyObject *seq_lengths) {
    const int nd = PyArray_NDIM(call->inputs[X]);
    const int64_t total = nd >= 2 ? PyArray_DIM(call->inputs[X], nd - 2) : 0;
    if (!cattn_arg_sequences(call->state, cu_seqlens, seq_lengths, total, &call->edges))
        return false;
    call->params.edges = call->edges.edges;
    call->params.longest = call->edges.longest;
    return true;
}

/* Fills in sizes and views; Python code no longer runs. */
static bool check(struct call *call) {
    struct cattn_conv_params *p = &call->params;
    struct cattn_array frozen[N_INPUTS];
    for (int i = 0; i < N_INPUTS; i++) {
        const int type = i == X || i == STATE ? call->type : cattn_arg_compute_type(call->type);
        if (!cattn_freeze_unchanged(call->inputs[i], type, NAMES[i], NAMES[i], &frozen[i]))
            return false;
    }
    const bool packed = call->edges.edges != NULL;
    const int nd = call->nd = frozen[X].nd;
    if (nd < 2 || (packed && nd != 2))
        return cattn_raise(PyExc_ValueError, "x must have %s, got shape %s",
                           packed ? "the shape (total, C) with cu_seqlens" : "at least 2 dimensions (..., T, C)",
                           cattn_show_shape(nd, frozen[X].dims).text);
    memcpy(call->dims, frozen[X].dims, (size_t)nd * sizeof *call->dims);
    p->length = p->seqlen = call->dims[nd - 2];
    p->n_channels = call->dims[nd - 1];
    if (frozen[WEIGHT].nd != 2 || frozen[WEIGHT].dims[0] != p->n_channels || frozen[WEIGHT].dims[1] < 1)
        return cattn_raise(PyExc_ValueError,
                           "weight must have shape (C, K) with C = %lld channels of x and K > 0, got %s",
                           (long long)p->n_channels, cattn_show_shape(frozen[WEIGHT].nd, frozen[WEIGHT].dims).text);
    p->width = frozen[WEIGHT].dims[1];
    if (call->inputs[BIAS] != NULL &&
        !cattn_check_shape(cattn_python, &frozen[BIAS], "the channels", 1, &p->n_channels))
        return false;
    p->n_batch_dims = packed ? 1 : nd - 2;
    memcpy(p->batch_shape, call->dims, (size_t)(nd - 2) * sizeof *call->dims);
    if (packed)
        p->batch_shape[0] = call->edges.n_sequences;
    p->n_batch = cattn_count(p->n_batch_dims, p->batch_shape);
    if (p->n_batch < 0)
        return cattn_raise(PyExc_ValueError, "x has a batch that is too large");
    if (packed && p->edges[call->edges.n_sequences] != p->seqlen)
        return cattn_raise(PyExc_ValueError, "x: the array changed while the call read cu_seqlens");
    call->state_nd = p->n_batch_dims + 2;
    memcpy(call->state_dims, p->batch_shape, (size_t)p->n_batch_dims * sizeof *call->state_dims);
    call->state_dims[call->state_nd - 2] = p->width - 1;
    call->state_dims[call->state_nd - 1] = p->n_channels;
    if (call->inputs[STATE] != NULL && !cattn_check_broadcast(cattn_python, &frozen[STATE], call->state_nd,
                                                              call->state_dims, "(..., K - 1, C), the shape", ""))
        return false;
    p->dtype = cattn_arg_dtype(call->type);
    p->storage = cattn_arg_storage(call->type);
    const int rows = CATTN_AXIS_COL | CATTN_AXIS_ROW;
    p->x.batch[0] = 0;
    cattn_view(&p->x, &frozen[X], nd - 2, rows);
    cattn_view(&p->weight, &frozen[WEIGHT], 0, rows);
    if (call->inputs[BIAS] != NULL)
        cattn_view(&p->bias, &frozen[BIAS], 0, CATTN_AXIS_COL);
    if (call->inputs[STATE] != NULL)
        cattn_view(&p->state, &frozen[STATE], p->n_batch_dims, rows);
    return true;
}

static bool make_results(struct call *call, PyObject *out, PyObject *state_out, bool wants_state) {
    struct cattn_conv_params *p = &call->params;
    const int rows = CATTN_AXIS_COL | CATTN_AXIS_ROW;
    struct cattn_output_spec spec = {.name = "out",
                                     .type = call->type,
                                     .nd = call->nd,
                                     .dims = call->dims,
                                     .inputs = call->inputs,
                                     .n_inputs = N_INPUTS};
    if (!cattn_arg_output(call->state, out, &spec, &call->out))
        return false;
    p->out.batch[0] = 0;
    cattn_tensor_from(&p->out, call->out.array, call->nd - 2, rows);
    if (!wants_state && state_out == Py_None)
        return true;
    spec.name = "state_out";
    spec.nd = call->state_nd;
    spec.dims = call->state_dims;
    spec.in_place = call->inputs[STATE];
    if (!cattn_arg_state_out(call->state, state_out, &spec, &call->state_out) ||
        !cattn_arg_outputs_apart(call->state, &call->out, "out", &call->state_out, "state_out"))
        return false;
    cattn_tensor_from(&p->state_out, call->state_out.array, p->n_batch_dims, rows);
    return true;
}

static enum cattn_status compute(const void *params) { return cattn_causal_conv(params); }

static bool run(struct cattn_conv_params *p) {
    const double rows = (double)p->n_batch * (double)p->seqlen + 1; /* one more for the weight, which may be copied */
    const bool brief = rows * (double)p->n_channels * (double)p->width <= CATTN_GIL_WORK;
    p->num_threads = cattn_get_num_threads();
    return cattn_error_status(cattn_compute(brief, &p->poll, compute, p));
}

PyObject *cattn_body_causal_conv(struct binding_state *state, PyObject **args) {
    struct call call = {.state = state};
    PyObject *result = NULL, *const seq_lengths = args[CAUSAL_CONV_seq_lengths];
    bool wants_state;
    cattn_clear_conv(&call.params);
    if (take_activation(&call, args[CAUSAL_CONV_activation]) && take_arrays(&call, args) &&
        take_edges(&call, args[CAUSAL_CONV_cu_seqlens], seq_lengths) &&
        cattn_arg_flag(args[CAUSAL_CONV_return_state], "return_state", &wants_state) && check(&call) &&
        cattn_arg_counts(state, seq_lengths, "seq_lengths", call.params.seqlen, call.nd - 2, call.params.batch_shape,
                         &call.params.length, &call.lengths, &call.params.lengths) &&
        make_results(&call, args[CAUSAL_CONV_out], args[CAUSAL_CONV_state_out], wants_state) && run(&call.params))
        result = cattn_outputs_with_state(state, &call.out, &call.state_out, wants_state);
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)call.inputs[i]);
    Py_XDECREF((PyObject *)call.lengths);
    PyMem_Free(call.edges.edges);
    cattn_output_clear(&call.out);
    cattn_output_clear(&call.state_out);
    return result;
}
