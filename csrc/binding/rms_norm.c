/* rms_norm.c -- rms_norm(...) and its gradients: parse, check, allocate, run, return. */
#include "arrays.h"
#include "error.h"
#include "gil.h"
#include "numbers.h"
#include "outputs.h"
#include "rowwise_args.h"

enum { X, WEIGHT, GRAD, N_INPUTS };

struct call {
    struct binding_state *state;
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    int type, nd;                    /* of x and the result; nd is at least 1 */
    npy_intp dims[NPY_MAXDIMS];
    double eps;
};

static bool parse_eps(PyObject *object, double *eps) {
    if (!cattn_arg_real(object, "eps", eps))
        return false;
    if (*eps >= 0.0)
        return true;
    return cattn_error_value(object, "eps must not be negative");
}

static bool check_weight(const struct call *call) {
    PyArrayObject *weight = call->inputs[WEIGHT];
    const npy_intp n_cols = call->dims[call->nd - 1];
    if (weight == NULL || (PyArray_NDIM(weight) == 1 && PyArray_DIM(weight, 0) == n_cols))
        return true;
    PyObject *shape = cattn_shape_tuple(PyArray_NDIM(weight), PyArray_DIMS(weight));
    if (shape != NULL)
        PyErr_Format(PyExc_ValueError, "weight must have one number for each column of x, shape (%zd,), got shape %R",
                     (Py_ssize_t)n_cols, shape);
    Py_XDECREF(shape);
    return false;
}

/* The arrays are in their common dtype afterwards; the weight in that of the computation. */
static bool parse_arrays(struct call *call, PyObject *x, PyObject *weight, PyObject *grad) {
    PyObject *const given[N_INPUTS] = {x, weight, grad};
    static const char *const names[N_INPUTS] = {"x", "weight", "grad_out"};
    for (int i = 0; i < N_INPUTS; i++)
        if (given[i] != NULL && (i != WEIGHT || weight != Py_None) &&
            (call->inputs[i] = cattn_arg_floats(call->state, given[i], names[i])) == NULL)
            return false;
    call->type = cattn_arg_promote(call->state, call->inputs, N_INPUTS,
                                   grad != NULL ? "grad_out, x and weight" : "x and weight");
    if (call->type < 0)
        return false;
    if (call->inputs[WEIGHT] != NULL &&
        !cattn_arg_widen(call->state, &call->inputs[WEIGHT], cattn_arg_compute_type(call->type)))
        return false;
    if (!cattn_arg_unchanged(call->inputs[X], call->type, "x") ||
        !cattn_arg_unchanged(call->inputs[GRAD], call->type, "grad_out"))
        return false;
    call->nd = PyArray_NDIM(call->inputs[X]);
    if (call->nd == 0) {
        PyErr_SetString(PyExc_ValueError, "x must have at least 1 dimension (..., D), got 0");
        return false;
    }
    memcpy(call->dims, PyArray_DIMS(call->inputs[X]), (size_t)call->nd * sizeof *call->dims);
    return check_weight(call) &&
           (call->inputs[GRAD] == NULL || cattn_check_shape(call->inputs[GRAD], "grad_out", "x", call->nd, call->dims));
}

static void release(struct call *call) {
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)call->inputs[i]);
}

/* The batch dimensions. Returns the number of rows; 0 if an axis has size 0, beside which their product may overflow.
 */
static int64_t take_rows(const struct call *call, int64_t *batch_shape) {
    int64_t n_rows = PyArray_SIZE(call->inputs[X]) > 0 ? 1 : 0;
    for (int axis = 0; axis < call->nd - 1; axis++) {
        batch_shape[axis] = call->dims[axis];
        if (n_rows > 0)
            n_rows *= call->dims[axis];
    }
    return n_rows;
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

static bool make_output(struct call *call, struct cattn_rms_norm_params *params, PyObject *out,
                        struct cattn_output *output) {
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = call->type,
                                           .nd = call->nd,
                                           .dims = call->dims,
                                           .inputs = call->inputs,
                                           .n_inputs = N_INPUTS,
                                           .in_place = call->inputs[X]};
    /* first: making the output may run Python code, which might change the arrays */
    cattn_clear_rms_norm(params);
    params->dtype = cattn_arg_dtype(call->type);
    params->storage = cattn_arg_storage(call->type);
    params->n_batch_dims = call->nd - 1;
    params->n_rows = take_rows(call, params->batch_shape);
    params->n_cols = call->dims[call->nd - 1];
    take_tensor(call, &params->x, call->inputs[X]);
    if (call->inputs[WEIGHT] != NULL)
        take_tensor(call, &params->weight, call->inputs[WEIGHT]);
    if (!cattn_arg_output(call->state, out, &spec, output))
        return false;
    take_tensor(call, &params->out, output->array);
    params->eps = call->eps;
    return true;
}

static enum cattn_status compute(const void *params) { return cattn_rms_norm(params); }

static bool run(struct cattn_rms_norm_params *params, PyArrayObject *result) {
    params->num_threads = cattn_get_num_threads();
    const bool brief = PyArray_SIZE(result) <= CATTN_GIL_ELEMENTS;
    return cattn_error_status(cattn_compute(brief, &params->poll, compute, params));
}

PyObject *cattn_body_rms_norm(struct binding_state *state, PyObject **args) {
    struct cattn_rms_norm_params params;
    struct call call = {.state = state};
    struct cattn_output output = {NULL, NULL};
    PyObject *result = NULL;
    if (parse_eps(args[RMS_NORM_eps], &call.eps) &&
        parse_arrays(&call, args[RMS_NORM_x], args[RMS_NORM_weight], NULL) &&
        make_output(&call, &params, args[RMS_NORM_out], &output) && run(&params, output.array) &&
        cattn_output_finish(&output))
        result = cattn_output_result(&output);
    release(&call);
    cattn_output_clear(&output);
    return result;
}

/* ---- gradients ---- */

static bool make_gradients(struct call *call, struct cattn_rms_norm_backward_params *params,
                           struct cattn_output outputs[2]) {
    struct cattn_output_spec spec = {.name = "the gradient", .type = call->type, .nd = call->nd, .dims = call->dims};
    cattn_clear_rms_norm_backward(params);
    params->dtype = cattn_arg_dtype(call->type);
    params->n_batch_dims = call->nd - 1;
    params->n_rows = take_rows(call, params->batch_shape);
    params->n_cols = call->dims[call->nd - 1];
    params->eps = call->eps;
    take_tensor(call, &params->grad, call->inputs[GRAD]);
    take_tensor(call, &params->x, call->inputs[X]);
    if (!cattn_arg_output(call->state, NULL, &spec, &outputs[0]))
        return false;
    take_tensor(call, &params->grad_x, outputs[0].array);
    if (call->inputs[WEIGHT] == NULL)
        return true;
    take_tensor(call, &params->weight, call->inputs[WEIGHT]);
    spec.nd = 1;
    spec.dims = &call->dims[call->nd - 1];
    if (!cattn_arg_output(call->state, NULL, &spec, &outputs[1]))
        return false;
    take_tensor(call, &params->grad_weight, outputs[1].array);
    return true;
}

static enum cattn_status compute_backward(const void *params) { return cattn_rms_norm_backward(params); }

static bool run_backward(struct cattn_rms_norm_backward_params *params, PyArrayObject *result) {
    params->num_threads = cattn_get_num_threads();
    const bool brief = PyArray_SIZE(result) <= CATTN_GIL_ELEMENTS;
    return cattn_error_status(cattn_compute(brief, &params->poll, compute_backward, params));
}

/* rms_norm_backward(grad_out, x, weight, eps): (grad_x, grad_weight or None) */
PyObject *cattn_py_rms_norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_rms_norm_backward_params params;
    struct call call = {.state = cattn_state(module)};
    struct cattn_output outputs[2] = {{NULL, NULL}, {NULL, NULL}};
    PyObject *result = NULL;
    if (!cattn_error_count("rms_norm_backward", n_args, 4) || !cattn_ready(call.state))
        return NULL;
    if (!parse_eps(args[3], &call.eps) || !parse_arrays(&call, args[1], args[2], args[0]))
        goto done;
    if (call.type != cattn_arg_compute_type(call.type)) {
        PyErr_SetString(PyExc_TypeError, "x must be float32 or float64: cattn.rms_norm_backward widens halves");
        goto done;
    }
    if (make_gradients(&call, &params, outputs) && run_backward(&params, outputs[0].array))
        result = PyTuple_Pack(2, (PyObject *)outputs[0].array,
                              outputs[1].array != NULL ? (PyObject *)outputs[1].array : Py_None);
done:
    release(&call);
    for (int i = 0; i < 2; i++)
        cattn_output_clear(&outputs[i]);
    return result;
}
