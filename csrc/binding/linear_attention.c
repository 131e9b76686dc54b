/* linear_attention.c -- linear_attention(...) and its gradients: take the arguments, freeze, check, allocate, run. */
#include "args.h"

/* The inputs of gradients follow the inputs of linear attention. */
enum { GRAD_OUT = N_LINEAR_INPUTS, GRAD_STATE, N_INPUTS };

struct call {
    struct binding_state *state;
    struct cattn_linear_attention_params *params;
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    PyArrayObject *lengths;          /* owned, or NULL */
    struct cattn_edges edges;
    struct cattn_linear_shape shape;
    int type; /* of query, key, value and the result */
    struct cattn_output out, state_out;
};

static const char *const NAMES[N_INPUTS] = {"query", "key",   "value",    "decay",
                                            "beta",  "state", "grad_out", "grad_state"};

/* ---- take ---- */

/* Whether an input is stored as the result is; the others have the dtype of the computation. */
static bool is_stored(int input) { return input <= LINEAR_VALUE || input == GRAD_OUT; }

/* given: of the inputs, or None. Query, key, value and grad_out are converted to their common dtype. */
static bool take_arrays(struct call *call, PyObject *const given[N_INPUTS], const char *stored_names) {
    for (int i = 0; i < N_INPUTS; i++)
        if ((given[i] != Py_None || i <= LINEAR_VALUE) &&
            (call->inputs[i] = cattn_arg_floats(call->state, given[i], NAMES[i])) == NULL)
            return false;
    PyArrayObject *const stored[] = {call->inputs[LINEAR_QUERY], call->inputs[LINEAR_KEY], call->inputs[LINEAR_VALUE],
                                     call->inputs[GRAD_OUT]};
    call->type = cattn_arg_common_type(call->state, stored, 4, stored_names);
    for (int i = 0; i < N_INPUTS && call->type >= 0; i++)
        if (call->inputs[i] != NULL && !cattn_arg_widen(call->state, &call->inputs[i],
                                                        is_stored(i) ? call->type : cattn_arg_compute_type(call->type)))
            return false;
    return call->type >= 0;
}

static bool take_layout(struct call *call, PyObject *layout) {
    call->shape.tokens_first = cattn_arg_is(layout, call->state->tokens_first);
    return call->shape.tokens_first || layout == Py_None || cattn_arg_is(layout, call->state->heads_first) ||
           cattn_error_value(layout, "layout must be 'bhtd' or 'bthd'");
}

/* ---- freeze and check ---- */

static bool freeze(struct call *call, struct cattn_array *frozen) {
    for (int i = 0; i < N_INPUTS; i++) {
        const int type = is_stored(i) ? call->type : cattn_arg_compute_type(call->type);
        if (!cattn_freeze_unchanged(call->inputs[i], type, NAMES[i], NAMES[i], &frozen[i]))
            return false;
    }
    return true;
}

/* The rows of packed arrays, before the sizes are checked. */
static int64_t total_of(const struct call *call) {
    const int nd = PyArray_NDIM(call->inputs[LINEAR_QUERY]), axis = call->shape.tokens_first ? nd - 3 : nd - 2;
    return axis >= 0 ? PyArray_DIM(call->inputs[LINEAR_QUERY], axis) : 0;
}

static bool take_edges(struct call *call, PyObject *cu_seqlens, PyObject *seq_lengths) {
    if (!cattn_arg_sequences(call->state, cu_seqlens, seq_lengths, total_of(call), &call->edges))
        return false;
    call->shape.n_sequences = cu_seqlens == Py_None ? -1 : call->edges.n_sequences;
    call->params->edges = call->edges.edges;
    return true;
}

/* args: of linear_attention; `frozen` receives all inputs. `params` is cleared. */
static bool parse(struct call *call, PyObject *const *args, PyObject *grad_out, PyObject *grad_state,
                  const char *stored_names, struct cattn_array frozen[N_INPUTS]) {
    struct cattn_linear_attention_params *params = call->params;
    PyObject *const given[N_INPUTS] = {args[LINEAR_ATTENTION_query],
                                       args[LINEAR_ATTENTION_key],
                                       args[LINEAR_ATTENTION_value],
                                       args[LINEAR_ATTENTION_decay],
                                       args[LINEAR_ATTENTION_beta],
                                       args[LINEAR_ATTENTION_state],
                                       grad_out,
                                       grad_state};
    if (!take_layout(call, args[LINEAR_ATTENTION_layout]) || !take_arrays(call, given, stored_names) ||
        !take_edges(call, args[LINEAR_ATTENTION_cu_seqlens], args[LINEAR_ATTENTION_seq_lengths]) ||
        !freeze(call, frozen) || !cattn_check_linear_sizes(cattn_python, frozen, &call->shape, params))
        return false;
    if (params->edges != NULL && params->edges[call->edges.n_sequences] != params->seqlen)
        return cattn_raise(PyExc_ValueError, "query: the array changed while the call read cu_seqlens");
    params->dtype = cattn_arg_dtype(call->type);
    params->storage = cattn_arg_storage(call->type);
    cattn_default_scale(&params->d_k, &params->scale);
    PyObject *scale = args[LINEAR_ATTENTION_scale];
    return (scale == Py_None || cattn_arg_scale(scale, call->type, &params->scale)) &&
           cattn_arg_counts(call->state, args[LINEAR_ATTENTION_seq_lengths], "seq_lengths", params->seqlen,
                            call->shape.n_batch_dims, params->batch_shape, &params->length, &call->lengths,
                            &params->lengths);
}

/* ---- results ---- */

/* The shape of the output in the caller's order. */
static void out_dims(const struct cattn_linear_shape *shape, int64_t dims[CATTN_MAX_AXES]) {
    memcpy(dims, shape->dims, (size_t)shape->nd * sizeof *dims);
    if (shape->tokens_first) {
        dims[shape->nd - 3] = shape->dims[shape->nd - 2];
        dims[shape->nd - 2] = shape->dims[shape->nd - 3];
    }
}

static bool make_out(struct call *call, PyObject *out) {
    const struct cattn_linear_shape *shape = &call->shape;
    int64_t dims[CATTN_MAX_AXES];
    struct cattn_array frozen;
    out_dims(shape, dims);
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = call->type,
                                           .nd = shape->nd,
                                           .dims = dims,
                                           .inputs = call->inputs,
                                           .n_inputs = N_LINEAR_INPUTS};
    if (!cattn_arg_output(call->state, out, &spec, &call->out))
        return false;
    cattn_freeze(call->out.array, "out", &frozen);
    cattn_linear_view(shape, &frozen, &call->params->out);
    return true;
}

static bool make_state_out(struct call *call, PyObject *state_out, bool wanted) {
    const struct cattn_output_spec spec = {.name = "state_out",
                                           .type = cattn_arg_compute_type(call->type),
                                           .nd = call->shape.state_nd,
                                           .dims = call->shape.state_dims,
                                           .inputs = call->inputs,
                                           .n_inputs = N_LINEAR_INPUTS,
                                           .in_place = call->inputs[LINEAR_STATE]};
    if (!wanted && state_out == Py_None)
        return true;
    if (!cattn_arg_state_out(call->state, state_out, &spec, &call->state_out) ||
        !cattn_arg_outputs_apart(call->state, &call->out, "out", &call->state_out, "state_out"))
        return false;
    cattn_tensor_from(&call->params->state_out, call->state_out.array, call->params->n_batch_dims, call->shape.axes);
    return true;
}

/* ---- the core ---- */

static enum cattn_status compute(const void *params) { return cattn_linear_attention(params); }
static enum cattn_status compute_backward(const void *params) { return cattn_linear_attention_backward(params); }

/* params: forward itself, or what contains it. */
static bool run(struct cattn_linear_attention_params *forward, enum cattn_status (*of)(const void *),
                const void *params) {
    const int64_t heads = forward->query_heads > forward->n_states ? forward->query_heads : forward->n_states;
    const double elements = (double)forward->n_batch * (double)heads * (double)forward->d_k * (double)forward->d_v;
    const bool brief = elements * ((double)forward->seqlen + 1) <= CATTN_GIL_WORK;
    forward->num_threads = cattn_get_num_threads();
    return cattn_error_status(cattn_compute(brief, &forward->poll, of, params));
}

static void release(struct call *call) {
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)call->inputs[i]);
    Py_XDECREF((PyObject *)call->lengths);
    PyMem_Free(call->edges.edges);
    cattn_output_clear(&call->out);
    cattn_output_clear(&call->state_out);
}

PyObject *cattn_body_linear_attention(struct binding_state *state, PyObject **args) {
    struct cattn_linear_attention_params params;
    struct call call = {.state = state, .params = &params};
    struct cattn_array frozen[N_INPUTS];
    PyObject *result = NULL;
    bool wants_state;
    cattn_clear_linear_attention(&params);
    if (parse(&call, args, Py_None, Py_None, "query, key and value", frozen) &&
        cattn_arg_flag(args[LINEAR_ATTENTION_return_state], "return_state", &wants_state) &&
        make_out(&call, args[LINEAR_ATTENTION_out]) &&
        make_state_out(&call, args[LINEAR_ATTENTION_state_out], wants_state) && run(&params, compute, &params))
        result = cattn_outputs_with_state(state, &call.out, &call.state_out, wants_state);
    release(&call);
    return result;
}

/* ---- gradients ---- */

/* A gradient with the axes of heads before tokens, and the heads of the states unless it is of queries. */
static PyArrayObject *make_gradient(const struct call *call, int64_t heads, int64_t width, struct cattn_tensor *view) {
    const struct cattn_linear_shape *shape = &call->shape;
    const bool one_number = width < 0;
    int64_t dims[CATTN_MAX_AXES];
    memcpy(dims, shape->dims, (size_t)shape->nd * sizeof *dims);
    if (shape->axes & CATTN_AXIS_HEAD)
        dims[shape->nd - 3] = heads;
    dims[shape->nd - 1] = width;
    PyArrayObject *array = cattn_new_array(shape->nd - one_number, dims, cattn_arg_compute_type(call->type));
    if (array == NULL)
        return NULL;
    view->batch[0] = 0;
    cattn_tensor_from(view, array, shape->n_batch_dims, one_number ? shape->axes & ~CATTN_AXIS_COL : shape->axes);
    return array;
}

/* The gradients of the six inputs; NULL where there is no input. False with an exception. */
static bool make_gradients(const struct call *call, struct cattn_linear_attention_backward_params *params,
                           PyArrayObject *gradients[N_LINEAR_INPUTS]) {
    const struct cattn_linear_attention_params *p = call->params;
    const int64_t queries = p->query_heads > p->n_states ? p->query_heads : p->n_states;
    struct cattn_tensor *const views[] = {&params->grad_query, &params->grad_key,  &params->grad_value,
                                          &params->grad_decay, &params->grad_beta, &params->grad_state};
    const int64_t widths[] = {p->d_k, p->d_k, p->d_v, p->decay_by_row ? p->d_k : -1, -1};
    for (int i = 0; i < LINEAR_STATE; i++)
        if (call->inputs[i] != NULL && (gradients[i] = make_gradient(call, i == LINEAR_QUERY ? queries : p->n_states,
                                                                     widths[i], views[i])) == NULL)
            return false;
    if (call->inputs[LINEAR_STATE] == NULL)
        return true;
    gradients[LINEAR_STATE] =
        cattn_new_array(call->shape.state_nd, call->shape.state_dims, cattn_arg_compute_type(call->type));
    if (gradients[LINEAR_STATE] != NULL)
        cattn_tensor_from(&params->grad_state, gradients[LINEAR_STATE], p->n_batch_dims, call->shape.axes);
    return gradients[LINEAR_STATE] != NULL;
}

static bool view_grads(const struct call *call, struct cattn_array *frozen,
                       struct cattn_linear_attention_backward_params *params) {
    int64_t dims[CATTN_MAX_AXES];
    out_dims(&call->shape, dims);
    if (!cattn_check_shape(cattn_python, &frozen[GRAD_OUT], "the result", call->shape.nd, dims))
        return false;
    cattn_linear_view(&call->shape, &frozen[GRAD_OUT], &params->grad_out);
    if (call->inputs[GRAD_STATE] == NULL)
        return true;
    if (!cattn_check_shape(cattn_python, &frozen[GRAD_STATE], "the state", call->shape.state_nd,
                           call->shape.state_dims))
        return false;
    cattn_view(&params->grad_final, &frozen[GRAD_STATE], call->params->n_batch_dims, call->shape.axes);
    return true;
}

/* linear_attention_backward(grad_out, grad_state, query, key, value, decay, beta, state, scale, seq_lengths,
 * cu_seqlens, layout): the six gradients or None, in the dtype of the computation, with heads before tokens and with
 * all heads and batch entries of the call. */
PyObject *cattn_py_linear_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    enum {
        FIRST = 2,
        LAST = LINEAR_ATTENTION_layout
    }; /* from args[FIRST] on: arguments of linear_attention, up to LAST */
    struct cattn_linear_attention_backward_params params;
    struct call call = {.state = cattn_state(module), .params = &params.forward};
    struct cattn_array frozen[N_INPUTS];
    PyArrayObject *gradients[N_LINEAR_INPUTS] = {NULL};
    PyObject *result = NULL;
    if (!cattn_error_count("linear_attention_backward", n_args, FIRST + LAST + 1) || !cattn_ready(call.state))
        return NULL;
    cattn_clear_linear_attention_backward(&params);
    if (parse(&call, args + FIRST, args[0], args[1], "grad_out, query, key and value", frozen) &&
        view_grads(&call, frozen, &params) && make_gradients(&call, &params, gradients) &&
        run(&params.forward, compute_backward, &params))
        result = PyTuple_New(N_LINEAR_INPUTS);
    for (int i = 0; i < N_LINEAR_INPUTS; i++) {
        PyObject *gradient = gradients[i] != NULL ? (PyObject *)gradients[i] : Py_NewRef(Py_None);
        if (result == NULL)
            Py_DECREF(gradient);
        else if (PyTuple_SetItem(result, i, gradient) < 0)
            Py_CLEAR(result);
    }
    release(&call);
    return result;
}
