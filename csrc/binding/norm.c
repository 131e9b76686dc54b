/* norm.c -- rms_norm(...), layer_norm(...) and their gradients: parse, check, allocate, run, return. */
#include "args.h"

enum { X, WEIGHT, BIAS, GRAD, N_INPUTS };

struct call {
    struct binding_state *state;
    bool centred;                    /* layer norm */
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    struct cattn_array *frozen;      /* N_INPUTS of them */
    int type, nd;                    /* of x and the result; nd is at least 1 */
    double eps;
};

static bool parse_eps(PyObject *object, double *eps) {
    if (!cattn_arg_real(object, "eps", eps))
        return false;
    if (*eps >= 0.0)
        return true;
    return cattn_error_value(object, "eps must not be negative");
}

/* Weight or bias. */
static bool check_columns(const struct call *call, const struct cattn_array *numbers) {
    const int64_t n_cols = call->frozen[X].dims[call->nd - 1];
    if (numbers->data == NULL || (numbers->nd == 1 && numbers->dims[0] == n_cols))
        return true;
    return cattn_raise(PyExc_ValueError, "%s must have one number for each column of x, shape %s, got shape %s",
                       numbers->name, cattn_show_shape(1, &n_cols).text,
                       cattn_show_shape(numbers->nd, numbers->dims).text);
}

/* given: by the slots of inputs; NULL where the function has no such argument. The arrays are in their common dtype
 * afterwards; weight and bias have the dtype of the computation. */
static bool parse_arrays(struct call *call, PyObject *const given[N_INPUTS], const char *all_names) {
    static const char *const names[N_INPUTS] = {"x", "weight", "bias", "grad_out"};
    for (int i = 0; i < N_INPUTS; i++) {
        const bool optional = i == WEIGHT || i == BIAS;
        if (given[i] != NULL && !(optional && given[i] == Py_None) &&
            (call->inputs[i] = cattn_arg_floats(call->state, given[i], names[i])) == NULL)
            return false;
    }
    call->type = cattn_arg_promote(call->state, call->inputs, N_INPUTS, all_names);
    if (call->type < 0)
        return false;
    for (int i = WEIGHT; i <= BIAS; i++)
        if (call->inputs[i] != NULL &&
            !cattn_arg_widen(call->state, &call->inputs[i], cattn_arg_compute_type(call->type)))
            return false;
    for (int i = 0; i < N_INPUTS; i++) {
        const int type = i == WEIGHT || i == BIAS ? cattn_arg_compute_type(call->type) : call->type;
        if (!cattn_freeze_unchanged(call->inputs[i], type, names[i], names[i], &call->frozen[i]))
            return false;
    }
    const struct cattn_array *x = &call->frozen[X], *grad = &call->frozen[GRAD];
    call->nd = x->nd;
    if (call->nd == 0)
        return cattn_raise(PyExc_ValueError, "x must have at least 1 dimension (..., D), got 0");
    return check_columns(call, &call->frozen[WEIGHT]) && check_columns(call, &call->frozen[BIAS]) &&
           (grad->data == NULL || cattn_check_shape(cattn_python, grad, "x", x->nd, x->dims));
}

/* An array with the axes of x, or with its last one; or absent. An axis of one element has any stride. */
static void view(const struct call *call, struct cattn_tensor *tensor, const struct cattn_array *array) {
    if (array->data == NULL)
        return;
    if (array->nd < call->nd)
        cattn_view(tensor, array, 0, CATTN_AXIS_COL);
    else
        cattn_view_rows(tensor, array, array->nd, array->nd - 1);
    if (call->frozen[X].dims[call->nd - 1] == 1)
        tensor->col = 1;
}

static void view_new(const struct call *call, struct cattn_tensor *tensor, PyArrayObject *array) {
    struct cattn_array frozen;
    cattn_freeze(array, "the result", &frozen);
    view(call, tensor, &frozen);
}

/* ---- forward ---- */

static bool make_output(struct call *call, struct cattn_norm_params *params, PyObject *out,
                        struct cattn_output *output) {
    const struct cattn_output_spec spec = {"out",        call->type, call->nd,       call->frozen[X].dims,
                                           call->inputs, N_INPUTS,   call->inputs[X]};
    if (!cattn_arg_output(call->state, out, &spec, output))
        return false;
    cattn_clear_norm(params);
    CATTN_FILL_ROWS(params, &call->frozen[X], call->type, call->nd - 1);
    params->storage = cattn_arg_storage(call->type);
    params->centred = call->centred;
    params->eps = call->eps;
    view(call, &params->x, &call->frozen[X]);
    view(call, &params->weight, &call->frozen[WEIGHT]);
    view(call, &params->bias, &call->frozen[BIAS]);
    view_new(call, &params->out, output->array);
    return true;
}

CATTN_DEFINE_RUN(run, cattn_norm, cattn_norm_params)

static PyObject *norm(struct call *call, PyObject *const given[N_INPUTS], const char *all_names, PyObject *eps,
                      PyObject *out) {
    struct cattn_norm_params params;
    struct cattn_output output = {NULL, NULL};
    const bool computed = parse_eps(eps, &call->eps) && parse_arrays(call, given, all_names) &&
                          make_output(call, &params, out, &output) && run(&params, output.array);
    return cattn_output_end(computed, &output, call->inputs, N_INPUTS);
}

PyObject *cattn_body_rms_norm(struct binding_state *state, PyObject **args) {
    struct cattn_array frozen[N_INPUTS];
    struct call call = {.state = state, .frozen = frozen};
    PyObject *const given[N_INPUTS] = {[X] = args[RMS_NORM_x], [WEIGHT] = args[RMS_NORM_weight]};
    return norm(&call, given, "x and weight", args[RMS_NORM_eps], args[RMS_NORM_out]);
}

PyObject *cattn_body_layer_norm(struct binding_state *state, PyObject **args) {
    struct cattn_array frozen[N_INPUTS];
    struct call call = {.state = state, .frozen = frozen, .centred = true};
    PyObject *const given[N_INPUTS] = {
        [X] = args[LAYER_NORM_x], [WEIGHT] = args[LAYER_NORM_weight], [BIAS] = args[LAYER_NORM_bias]};
    return norm(&call, given, "x, weight and bias", args[LAYER_NORM_eps], args[LAYER_NORM_out]);
}

/* ---- gradients ---- */

/* Of x, of the weight if there is one, and in a layer norm of the bias. */
enum { GRAD_X, GRAD_WEIGHT, GRAD_BIAS, N_GRADIENTS };

static bool make_gradients(struct call *call, struct cattn_norm_backward_params *params,
                           struct cattn_output outputs[N_GRADIENTS]) {
    struct cattn_output_spec spec = {"the gradient", call->type, call->nd, call->frozen[X].dims, NULL, 0, NULL};
    struct cattn_tensor *const columns[N_GRADIENTS] = {[GRAD_WEIGHT] =
                                                           call->inputs[WEIGHT] != NULL ? &params->grad_weight : NULL,
                                                       [GRAD_BIAS] = call->centred ? &params->grad_bias : NULL};
    cattn_clear_norm_backward(params);
    CATTN_FILL_ROWS(params, &call->frozen[X], call->type, call->nd - 1);
    params->centred = call->centred;
    params->eps = call->eps;
    view(call, &params->grad, &call->frozen[GRAD]);
    view(call, &params->x, &call->frozen[X]);
    view(call, &params->weight, &call->frozen[WEIGHT]);
    if (!cattn_arg_output(call->state, NULL, &spec, &outputs[GRAD_X]))
        return false;
    view_new(call, &params->grad_x, outputs[GRAD_X].array);
    spec.nd = 1;
    spec.dims = &call->frozen[X].dims[call->nd - 1];
    for (int i = GRAD_WEIGHT; i < N_GRADIENTS; i++) {
        if (columns[i] == NULL)
            continue;
        if (!cattn_arg_output(call->state, NULL, &spec, &outputs[i]))
            return false;
        view_new(call, columns[i], outputs[i].array);
    }
    return true;
}

CATTN_DEFINE_RUN(run_backward, cattn_norm_backward, cattn_norm_backward_params)

/* args: grad_out, x, weight, eps. The gradients, with None for one that there is not; an RMS norm has no bias. */
static PyObject *norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args, const char *name,
                               bool centred) {
    struct cattn_norm_backward_params params;
    struct cattn_array frozen[N_INPUTS];
    struct call call = {.state = cattn_state(module), .frozen = frozen, .centred = centred};
    struct cattn_output outputs[N_GRADIENTS] = {{NULL, NULL}, {NULL, NULL}, {NULL, NULL}};
    PyObject *result = NULL;
    if (!cattn_error_count(name, n_args, 4) || !cattn_ready(call.state))
        return NULL;
    PyObject *const given[N_INPUTS] = {[X] = args[1], [WEIGHT] = args[2], [GRAD] = args[0]};
    if (!parse_eps(args[3], &call.eps) || !parse_arrays(&call, given, "grad_out, x and weight"))
        goto done;
    if (call.type != cattn_arg_compute_type(call.type)) {
        PyErr_Format(PyExc_TypeError, "x must be float32 or float64: cattn.%s widens halves", name);
        goto done;
    }
    if (make_gradients(&call, &params, outputs) && run_backward(&params, outputs[GRAD_X].array)) {
        PyObject *weight = outputs[GRAD_WEIGHT].array != NULL ? (PyObject *)outputs[GRAD_WEIGHT].array : Py_None;
        result = PyTuple_Pack(centred ? 3 : 2, (PyObject *)outputs[GRAD_X].array, weight,
                              (PyObject *)outputs[GRAD_BIAS].array);
    }
done:
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)call.inputs[i]);
    for (int i = 0; i < N_GRADIENTS; i++)
        cattn_output_clear(&outputs[i]);
    return result;
}

/* rms_norm_backward(grad_out, x, weight, eps): (grad_x, grad_weight or None) */
PyObject *cattn_py_rms_norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    return norm_backward(module, args, n_args, "rms_norm_backward", false);
}

/* layer_norm_backward(grad_out, x, weight, eps): (grad_x, grad_weight or None, grad_bias) */
PyObject *cattn_py_layer_norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    return norm_backward(module, args, n_args, "layer_norm_backward", true);
}
