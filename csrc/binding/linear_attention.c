/* linear_attention.c -- what the rows of linear_attention and its gradients do not say: layout, sequences, results. */
#include "engine.h"

/* ---- arguments ---- */

static bool settle_layout(struct cattn_function_call *call, PyObject *layout) {
    call->shape->tokens_first = cattn_arg_is(layout, call->state->tokens_first);
    return call->shape->tokens_first || layout == Py_None || cattn_arg_is(layout, call->state->heads_first) ||
           cattn_error_value(layout, "layout must be 'bhtd' or 'bthd'");
}

/* `first` is the slot of query: the arguments after it have one order in the forward pass and in the gradients. */
static bool settle(struct cattn_function_call *call, int first, struct cattn_linear_attention_params *params) {
    PyObject *const *args = call->args + first;
    PyObject *const seq_lengths = args[LINEAR_ATTENTION_seq_lengths], *const scale = args[LINEAR_ATTENTION_scale];
    PyObject *const cu_seqlens = args[LINEAR_ATTENTION_cu_seqlens];
    struct cattn_linear_shape *shape = call->shape = &((struct cattn_linear_memory *)call->params)->shape;
    struct cattn_array *inputs[N_LINEAR_INPUTS];
    for (int i = 0; i < N_LINEAR_INPUTS; i++)
        inputs[i] = cattn_frozen(call, first + i);
    if (!settle_layout(call, args[LINEAR_ATTENTION_layout]))
        return false;
    const struct cattn_array *query = inputs[LINEAR_QUERY];
    const int back = shape->tokens_first ? 3 : 2; /* the axis of the tokens, before the number of axes is checked */
    if (!cattn_settle_edges(call, cu_seqlens, seq_lengths, query->nd >= back ? cattn_size_of(query, back) : 0))
        return false;
    shape->n_sequences = cu_seqlens == Py_None ? -1 : call->edges.n_sequences;
    params->edges = call->edges.edges;
    if (!cattn_check_linear_sizes(cattn_python, inputs, shape, params))
        return false;
    cattn_default_scale(&params->d_k, &params->scale);
    return (scale == Py_None || cattn_arg_scale(scale, call->type, &params->scale)) &&
           cattn_settle_lengths(call, seq_lengths, params->seqlen, shape->n_batch_dims, params->batch_shape,
                                &params->length, &params->lengths);
}

/* ---- the forward pass ---- */

bool cattn_settle_linear_attention(struct cattn_function_call *call) {
    return settle(call, LINEAR_ATTENTION_query, call->params);
}

/* The shape of the output in the caller's order. */
static void out_dims(const struct cattn_linear_shape *shape, int64_t dims[CATTN_MAX_AXES]) {
    memcpy(dims, shape->dims, (size_t)shape->nd * sizeof *dims);
    if (shape->tokens_first) {
        dims[shape->nd - 3] = shape->dims[shape->nd - 2];
        dims[shape->nd - 2] = shape->dims[shape->nd - 3];
    }
}

static bool returns_state(const struct cattn_function_call *call) {
    return (call->wishes >> LINEAR_ATTENTION_return_state & 1) != 0;
}

bool cattn_make_linear_attention(struct cattn_function_call *call) {
    struct cattn_linear_attention_params *params = call->params;
    const struct cattn_linear_shape *shape = call->shape;
    int64_t dims[CATTN_MAX_AXES];
    struct cattn_array frozen;
    out_dims(shape, dims);
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = call->type,
                                           .nd = shape->nd,
                                           .dims = dims,
                                           .inputs = call->arrays,
                                           .n_inputs = call->n_arrays};
    if (!cattn_arg_output(call->state, call->args[LINEAR_ATTENTION_out], &spec, &call->results[1]))
        return false;
    cattn_freeze(call->results[1].array, "out", &frozen);
    cattn_linear_view(shape, &frozen, &params->out);
    return cattn_make_state(call, returns_state(call), shape->state_nd, shape->state_dims, LINEAR_ATTENTION_state,
                            params->n_batch_dims, shape->axes, &params->state_out);
}

double cattn_work_of_linear_attention(const void *params) {
    const struct cattn_linear_attention_params *p = params;
    const int64_t heads = p->query_heads > p->n_states ? p->query_heads : p->n_states;
    return (double)p->n_batch * (double)heads * (double)p->d_k * (double)p->d_v * ((double)p->seqlen + 1);
}

PyObject *cattn_build_linear_attention(struct cattn_function_call *call) {
    return cattn_build_with_state(call, returns_state(call));
}

/* ---- gradients ---- */

bool cattn_settle_linear_gradients(struct cattn_function_call *call) {
    struct cattn_linear_attention_backward_params *params = call->params;
    struct cattn_array *grad_out = cattn_frozen(call, LINEAR_GRADIENTS_grad_out);
    struct cattn_array *grad_state = cattn_frozen(call, LINEAR_GRADIENTS_grad_state);
    int64_t dims[CATTN_MAX_AXES];
    if (!settle(call, LINEAR_GRADIENTS_query, &params->forward))
        return false;
    const struct cattn_linear_shape *shape = call->shape;
    out_dims(shape, dims);
    if (!cattn_check_shape(cattn_python, grad_out, "the result", shape->nd, dims))
        return false;
    cattn_linear_view(shape, grad_out, &params->grad_out);
    if (grad_state == NULL)
        return true;
    if (!cattn_check_shape(cattn_python, grad_state, "the state", shape->state_nd, shape->state_dims))
        return false;
    cattn_view(&params->grad_final, grad_state, params->forward.n_batch_dims, shape->axes);
    return true;
}

/* The gradients of the inputs that there are, with heads before tokens and with all heads and batch entries of the
 * call: the heads of the states unless it is of queries. */
bool cattn_make_linear_gradients(struct cattn_function_call *call) {
    const struct cattn_linear_attention_backward_params *params = call->params;
    const struct cattn_linear_attention_params *p = &params->forward;
    const struct cattn_linear_shape *shape = call->shape;
    const int type = cattn_arg_compute_type(call->type);
    const int64_t queries = p->query_heads > p->n_states ? p->query_heads : p->n_states;
    const int64_t widths[] = {p->d_k, p->d_k, p->d_v, p->decay_by_row ? p->d_k : -1, -1};
    for (int i = 0; i < N_LINEAR_INPUTS; i++) {
        const struct cattn_argument *row = call->function->results[i].row;
        const int condition = call->function->results[i].condition;
        struct cattn_tensor *view = &CATTN_AT(struct cattn_tensor, call->params, row->place);
        const bool is_state = i == LINEAR_STATE, one_number = !is_state && widths[i] < 0;
        int64_t dims[CATTN_MAX_AXES];
        if (condition >= 0 && call->args[condition] == Py_None)
            continue;
        const int nd = is_state ? shape->state_nd : shape->nd;
        memcpy(dims, is_state ? shape->state_dims : shape->dims, (size_t)nd * sizeof *dims);
        if (!is_state && (shape->axes & CATTN_AXIS_HEAD))
            dims[nd - 3] = i == LINEAR_QUERY ? queries : p->n_states;
        if (!is_state)
            dims[nd - 1] = widths[i];
        PyArrayObject *gradient = cattn_new_array(nd - one_number, dims, type);
        if (gradient == NULL)
            return false;
        call->results[i].array = gradient;
        view->batch[0] = 0;
        cattn_tensor_from(view, gradient, is_state ? p->n_batch_dims : shape->n_batch_dims,
                          one_number ? shape->axes & ~CATTN_AXIS_COL : shape->axes);
    }
    return true;
}

double cattn_work_of_linear_gradients(const void *params) {
    return cattn_work_of_linear_attention(&((const struct cattn_linear_attention_backward_params *)params)->forward);
}
