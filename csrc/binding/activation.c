/* activation.c -- gelu(...), silu(...) and their gradients: parse, check, allocate, run, return. */
#include "args.h"

enum { X, GRAD, N_INPUTS };

struct call {
    struct binding_state *state;
    struct cattn_activation_params *params;
    PyArrayObject *inputs[N_INPUTS]; /* owned; GRAD may be NULL */
    struct cattn_array *x;           /* frozen */
    int type, own_nd;                /* of x and the result */
    struct cattn_output output;
};

static bool parse_approximate(struct binding_state *state, PyObject *object, enum cattn_activation *which) {
    if (cattn_arg_is(object, state->none)) {
        *which = CATTN_GELU;
    } else if (cattn_arg_is(object, state->tanh)) {
        *which = CATTN_GELU_TANH;
    } else
        return cattn_raise(PyExc_ValueError, "approximate must be 'none' or 'tanh', got %R", object);
    return true;
}

/* An axis of one element has any stride. */
static void view(const struct call *call, struct cattn_tensor *tensor, const struct cattn_array *array) {
    cattn_view_rows(tensor, array, call->x->nd, call->x->nd - 1);
    if (call->params->n_cols == 1)
        tensor->col = 1;
}

/* grad: NULL in the forward pass */
static bool parse_inputs(struct call *call, PyObject *x, PyObject *grad) {
    if (grad != NULL && (call->inputs[GRAD] = cattn_arg_floats(call->state, grad, "grad_out")) == NULL)
        return false;
    if ((call->inputs[X] = cattn_arg_floats(call->state, x, "x")) == NULL)
        return false;
    call->type = cattn_arg_promote(call->state, call->inputs, N_INPUTS, "grad_out and x");
    if (call->type < 0)
        return false;
    struct cattn_activation_params *params = call->params;
    cattn_clear_activation(params);
    call->own_nd = cattn_freeze_rows(call->inputs[X], "x", call->x);
    CATTN_FILL_ROWS(params, call->x, call->type, call->x->nd - 1);
    params->storage = cattn_arg_storage(call->type);
    view(call, &params->x, call->x);
    if (grad == NULL)
        return true;
    struct cattn_array frozen;
    cattn_freeze(call->inputs[GRAD], "grad_out", &frozen);
    if (!cattn_check_shape(cattn_python, &frozen, "x", call->own_nd, call->x->dims))
        return false;
    view(call, &params->grad, &frozen);
    return true;
}

static bool make_output(struct call *call, PyObject *out) {
    const bool in_gradient = call->inputs[GRAD] != NULL && out == (PyObject *)call->inputs[GRAD];
    const struct cattn_output_spec spec = {
        "out", call->type, call->own_nd, call->x->dims, call->inputs, N_INPUTS, call->inputs[in_gradient ? GRAD : X]};
    if (!cattn_arg_output(call->state, out, &spec, &call->output))
        return false;
    struct cattn_array frozen;
    cattn_freeze(call->output.array, "out", &frozen);
    view(call, &call->params->out, &frozen);
    return true;
}

CATTN_DEFINE_RUN(run, cattn_activate, cattn_activation_params)

/* grad: NULL in the forward pass */
static PyObject *activate(struct binding_state *state, enum cattn_activation which, PyObject *grad, PyObject *x,
                          PyObject *out) {
    struct cattn_activation_params params;
    struct cattn_array frozen;
    struct call call = {.state = state, .params = &params, .x = &frozen};
    bool computed = parse_inputs(&call, x, grad) && make_output(&call, out);
    params.which = which;
    computed = computed && run(&params, call.output.array);
    return cattn_output_end(computed, &call.output, call.inputs, N_INPUTS);
}

PyObject *cattn_body_gelu(struct binding_state *state, PyObject **args) {
    enum cattn_activation which;
    if (!parse_approximate(state, args[GELU_approximate], &which))
        return NULL;
    return activate(state, which, NULL, args[GELU_x], args[GELU_out]);
}

PyObject *cattn_body_gelu_backward(struct binding_state *state, PyObject **args) {
    enum cattn_activation which;
    if (!parse_approximate(state, args[GELU_BACKWARD_approximate], &which))
        return NULL;
    return activate(state, which, args[GELU_BACKWARD_grad_out], args[GELU_BACKWARD_x], args[GELU_BACKWARD_out]);
}

PyObject *cattn_body_silu(struct binding_state *state, PyObject **args) {
    return activate(state, CATTN_SILU, NULL, args[SILU_x], args[SILU_out]);
}

PyObject *cattn_body_silu_backward(struct binding_state *state, PyObject **args) {
    return activate(state, CATTN_SILU, args[SILU_BACKWARD_grad_out], args[SILU_BACKWARD_x], args[SILU_BACKWARD_out]);
}
