/* norm.c -- rms_norm(...), layer_norm(...) and their gradients: parse, check, allocate, run, return. */
#include "args.h"

enum { X, WEIGHT, BIAS, GRAD, N_INPUTS };

struct call {
    struct binding_state *state;
    bool centred;                    /* layer norm */
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    int type, nd;                    /* of x and the result; nd is at least 1 */
    int64_t dims[NPY_MAXDIMS];
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
static bool check_columns(const struct call *call, PyArrayObject *numbers, const char *name) {
    const int64_t n_cols = call->dims[call->nd - 1];
    if (numbers == NULL || (PyArray_NDIM(numbers) == 1 && PyArray_DIM(numbers, 0) == n_cols))
        return true;
    return cattn_raise(PyExc_ValueError, "%s must have one number for each column of x, shape %s, got shape %s", name,
                       cattn_show_shape(1, &n_cols).text, cattn_shape_of(numbers).text);
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
    if (!cattn_arg_unchanged(call->inputs[X], call->type, "x") ||
        !cattn_arg_unchanged(call->inputs[GRAD], call->type, "grad_out"))
        return false;
    call->nd = PyArray_NDIM(call->inputs[X]);
    if (call->nd == 0)
        return cattn_raise(PyExc_ValueError, "x must have at least 1 dimension (..., D), got 0");
    cattn_take_dims(call->dims, call->inputs[X]);
    return check_columns(call, call->inputs[WEIGHT], "weight") && check_columns(call, call->inputs[BIAS], "bias") &&
           (call->inputs[GRAD] == NULL ||
            cattn_arg_has_shape(call->inputs[GRAD], "grad_out", "x", call->nd, call->dims));
}

static void release(struct call *call) {
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)call->inputs[i]);
}

/* The strides of an array with the axes of x, or of its last one. An axis of one element has any stride. */
static void take_tensor(const struct call *call, struct cattn_tensor *tensor, PyArrayObject *array) {
    const int nd = PyArray_NDIM(array);
    if (nd < call->nd)
        cattn_tensor_from(tensor, array, 0, CATTN_AXIS_COL);
    else
        cattn_tensor_rows(tensor, array, nd, nd - 1);
    if (call->dims[call->nd - 1] == 1)
        tensor->col = 1;
}

/* ---- forward ---- */

static bool make_output(struct call *call, struct cattn_norm_params *params, PyObject *out,
                        struct cattn_output *output) {
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = call->type,
                                           .nd = call->nd,
                                           .dims = call->dims,
                                           .inputs = call->inputs,
                                           .n_inputs = N_INPUTS,
                                           .in_place = call->inputs[X]};
    /* first: making the output may run Python code, which might change the arrays */
    cattn_clear_norm(params);
    params->dtype = cattn_arg_dtype(call->type);
    params->storage = cattn_arg_storage(call->type);
    params->centred = call->centred;
    params->n_batch_dims = call->nd - 1;
    params->n_rows = cattn_take_rows(call->nd, call->dims, call->nd - 1, params->batch_shape);
    params->n_cols = call->dims[call->nd - 1];
    take_tensor(call, &params->x, call->inputs[X]);
    if (call->inputs[WEIGHT] != NULL)
        take_tensor(call, &params->weight, call->inputs[WEIGHT]);
    if (call->inputs[BIAS] != NULL)
        take_tensor(call, &params->bias, call->inputs[BIAS]);
    if (!cattn_arg_output(call->state, out, &spec, output))
        return false;
    take_tensor(call, &params->out, output->array);
    params->eps = call->eps;
    return true;
}

CATTN_DEFINE_RUN(run, cattn_norm, cattn_norm_params)

static PyObject *norm(struct call *call, PyObject *const given[N_INPUTS], const char *all_names, PyObject *eps,
                      PyObject *out) {
    struct cattn_norm_params params;
    struct cattn_output output = {NULL, NULL};
    PyObject *result = NULL;
    if (parse_eps(eps, &call->eps) && parse_arrays(call, given, all_names) &&
        make_output(call, &params, out, &output) && run(&params, output.array) && cattn_output_finish(&output))
        result = cattn_output_result(&output);
    release(call);
    cattn_output_clear(&output);
    return result;
}

PyObject *cattn_body_rms_norm(struct binding_state *state, PyObject **args) {
    struct call call = {.state = state};
    PyObject *const given[N_INPUTS] = {[X] = args[RMS_NORM_x], [WEIGHT] = args[RMS_NORM_weight]};
    return norm(&call, given, "x and weight", args[RMS_NORM_eps], args[RMS_NORM_out]);
}

PyObject *cattn_body_layer_norm(struct binding_state *state, PyObject **args) {
    struct call call = {.state = state, .centred = true};
    PyObject *const given[N_INPUTS] = {
        [X] = args[LAYER_NORM_x], [WEIGHT] = args[LAYER_NORM_weight], [BIAS] = args[LAYER_NORM_bias]};
    return norm(&call, given, "x, weight and bias", args[LAYER_NORM_eps], args[LAYER_NORM_out]);
}

/* ---- gradients ---- */

/* Of x, of the weight if there is one, and in a layer norm of the bias. */
enum { GRAD_X, GRAD_WEIGHT, GRAD_BIAS, N_GRADIENTS };

static bool make_gradients(struct call *call, struct cattn_norm_backward_params *params,
                           struct cattn_output outputs[N_GRADIENTS]) {
    struct cattn_output_spec spec = {.name = "the gradient", .type = call->type, .nd = call->nd, .dims = call->dims};
    struct cattn_tensor *const columns[N_GRADIENTS] = {[GRAD_WEIGHT] =
                                                           call->inputs[WEIGHT] != NULL ? &params->grad_weight : NULL,
                                                       [GRAD_BIAS] = call->centred ? &params->grad_bias : NULL};
    cattn_clear_norm_backward(params);
    params->dtype = cattn_arg_dtype(call->type);
    params->centred = call->centred;
    params->n_batch_dims = call->nd - 1;
    params->n_rows = cattn_take_rows(call->nd, call->dims, call->nd - 1, params->batch_shape);
    params->n_cols = call->dims[call->nd - 1];
    params->eps = call->eps;
    take_tensor(call, &params->grad, call->inputs[GRAD]);
    take_tensor(call, &params->x, call->inputs[X]);
    if (call->inputs[WEIGHT] != NULL)
        take_tensor(call, &params->weight, call->inputs[WEIGHT]);
    if (!cattn_arg_output(call->state, NULL, &spec, &outputs[GRAD_X]))
        return false;
    take_tensor(call, &params->grad_x, outputs[GRAD_X].array);
    spec.nd = 1;
    spec.dims = &call->dims[call->nd - 1];
    for (int i = GRAD_WEIGHT; i < N_GRADIENTS; i++) {
        if (columns[i] == NULL)
            continue;
        if (!cattn_arg_output(call->state, NULL, &spec, &outputs[i]))
            return false;
        take_tensor(call, columns[i], outputs[i].array);
    }
    return true;
}

CATTN_DEFINE_RUN(run_backward, cattn_norm_backward, cattn_norm_backward_params)

/* args: grad_out, x, weight, eps. The gradients, with None for one that there is not; an RMS norm has no bias. */
static PyObject *norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args, const char *name,
                               bool centred) {
    struct cattn_norm_backward_params params;
    struct call call = {.state = cattn_state(module), .centred = centred};
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
    release(&call);
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
