/* softmax_backward.c -- softmax_backward(...) over the last axis: parse, check, allocate, run, return. */
#include "arrays.h"
#include "error.h"
#include "gil.h"
#include "numbers.h"
#include "outputs.h"

static enum cattn_status compute(const void *params) { return cattn_softmax_backward(params); }

static bool run(struct cattn_softmax_backward_params *params, PyArrayObject *out) {
    params->num_threads = cattn_get_num_threads();
    const bool brief = PyArray_SIZE(out) <= CATTN_GIL_ELEMENTS;
    return cattn_error_status(cattn_compute(brief, &params->poll, compute, params));
}

/* Called right after the check of the shapes: what follows may run Python code, which might change the arrays. */
static void take_inputs(struct cattn_softmax_backward_params *params, PyArrayObject *const *inputs, int nd,
                        const npy_intp *dims) {
    cattn_clear_softmax_backward(params);
    params->dtype = PyArray_TYPE(inputs[1]) == NPY_FLOAT ? CATTN_F32 : CATTN_F64;
    params->n_batch_dims = nd - 1;
    params->n_rows = 1;
    for (int axis = 0; axis < nd - 1; axis++) {
        params->batch_shape[axis] = dims[axis];
        params->n_rows *= dims[axis];
    }
    params->n_cols = dims[nd - 1];
    cattn_tensor_rows(&params->grad, inputs[0], nd, nd - 1);
    cattn_tensor_rows(&params->weights, inputs[1], nd, nd - 1);
}

/* softmax_backward(grad_out, weights, scale, out) over the last axis; at least one dimension */
PyObject *cattn_py_softmax_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    static const char *const names[] = {"grad_out", "weights"};
    struct binding_state *state = cattn_state(module);
    struct cattn_softmax_backward_params params;
    PyArrayObject *inputs[2] = {NULL, NULL};
    struct cattn_output output = {NULL, NULL};
    PyObject *result = NULL;
    if (!cattn_error_count("softmax_backward", n_args, 4) || !cattn_ready(state))
        return NULL;
    for (int i = 0; i < 2; i++) {
        inputs[i] = cattn_arg_floats(state, args[i], names[i]);
        if (inputs[i] == NULL)
            goto done;
    }
    const int type = cattn_arg_promote(state, inputs, 2, "grad_out and weights"), nd = PyArray_NDIM(inputs[1]);
    npy_intp dims[NPY_MAXDIMS];
    if (type < 0 || !cattn_check_shape(inputs[0], "grad_out", "weights", nd, PyArray_DIMS(inputs[1])))
        goto done;
    if (type != cattn_arg_compute_type(type)) {
        PyErr_SetString(PyExc_TypeError, "weights must be float32 or float64: cattn.softmax_backward widens halves");
        goto done;
    }
    if (nd == 0) {
        PyErr_SetString(PyExc_ValueError, "weights must have at least 1 dimension, got 0");
        goto done;
    }
    cattn_take_dims(dims, inputs[1]);
    take_inputs(&params, inputs, nd, dims);
    if (!cattn_arg_scale(args[2], type, &params.scale))
        goto done;
    const bool first = args[3] == (PyObject *)inputs[0]; /* in place of one or the other */
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = type,
                                           .nd = nd,
                                           .dims = dims,
                                           .inputs = inputs,
                                           .n_inputs = 2,
                                           .in_place = inputs[first ? 0 : 1]};
    if (!cattn_arg_output(state, args[3], &spec, &output))
        goto done;
    cattn_tensor_rows(&params.out, output.array, nd, nd - 1);
    if (params.n_cols == 1)
        params.grad.col = params.weights.col = params.out.col = 1;
    if (run(&params, output.array) && cattn_output_finish(&output))
        result = cattn_output_result(&output);
done:
    Py_XDECREF((PyObject *)inputs[0]);
    Py_XDECREF((PyObject *)inputs[1]);
    cattn_output_clear(&output);
    return result;
}
