/* py_dropout.c -- dropout(...): parse, check, allocate, run, return. */
#include "args.h"
#include "error.h"

#include "../torch_random.h"

struct call {
    struct binding_state *state;
    struct cattn_dropout_params *params;
    PyArrayObject *x;
    struct cattn_output output, mask;
    int own_nd;     /* of x */
    int nd;         /* at least 1: a 0-d array is one element in a row */
    npy_intp *dims; /* of x, nd of them */
};

/* At once: what runs Python code comes later, and might change the array. */
static void take_x(struct call *call) {
    struct cattn_dropout_params *params = call->params;
    int nd = call->own_nd = PyArray_NDIM(call->x);
    params->n_cols = 1;
    for (int axis = 0; axis < nd; axis++) {
        call->dims[axis] = params->n_cols = PyArray_DIM(call->x, axis);
        if (axis < nd - 1)
            params->batch_shape[axis] = call->dims[axis];
    }
    if (nd == 0)
        call->dims[nd++] = 1;
    call->nd = nd;
    params->dtype = cattn_arg_dtype(PyArray_TYPE(call->x));
    params->storage = cattn_arg_storage(PyArray_TYPE(call->x));
    params->n_batch_dims = nd - 1;
    params->n_rows = PyArray_SIZE(call->x);
    if (params->n_cols > 0)
        params->n_rows /= params->n_cols;
    cattn_tensor_rows(&params->x, call->x, nd, nd - 1);
    if (params->n_cols == 1)
        params->x.col = 1;
}

/* As take_x. */
static void take_output(const struct call *call, const struct cattn_output *output, struct cattn_tensor *tensor) {
    cattn_tensor_rows(tensor, output->array, call->nd, call->nd - 1);
    if (call->params->n_cols == 1)
        tensor->col = 1;
}

static bool make_outputs(struct call *call, PyObject *out, bool return_mask) {
    struct cattn_output_spec spec = {.name = "out",
                                     .type = PyArray_TYPE(call->x),
                                     .nd = call->own_nd,
                                     .dims = call->dims,
                                     .inputs = &call->x,
                                     .n_inputs = 1,
                                     .in_place = call->x};
    if (!cattn_arg_output(call->state, out, &spec, &call->output))
        return false;
    take_output(call, &call->output, &call->params->out);
    call->params->mask.data = NULL;
    if (!return_mask)
        return true;
    spec.name = "mask";
    spec.type = NPY_BOOL;
    if (!cattn_arg_output(call->state, NULL, &spec, &call->mask))
        return false;
    take_output(call, &call->mask, &call->params->mask);
    return true;
}

/* Nothing is dropped: the result is a copy, the mask all True. */
static bool copy(struct call *call) {
    PyArrayObject *out = call->output.given != NULL ? call->output.given : call->output.array;
    if (PyArray_CopyInto(out, call->x) < 0)
        return false;
    if (call->mask.array != NULL)
        memset(PyArray_DATA(call->mask.array), 1, (size_t)PyArray_SIZE(call->mask.array));
    return true;
}

static enum cattn_status compute(const void *params) { return cattn_dropout(params); }

static bool run(struct call *call) {
    struct cattn_dropout_params *params = call->params;
    params->num_threads = cattn_get_num_threads();
    const bool brief = params->n_rows * params->n_cols <= CATTN_GIL_ELEMENTS;
    const enum cattn_status status = cattn_compute(brief, &params->poll, compute, params);
    return cattn_error_status(status) && cattn_output_finish(&call->output);
}

static bool draw_and_run(struct call *call, PyObject *rng) {
    struct cattn_dropout_spec *spec = &call->params->dropout;
    if (!cattn_torch_check(call->state, rng))
        return cattn_rng_seed(call->state, rng, &spec->seed) && run(call);
    if (spec->keep_probability == 0.0) /* all is dropped: PyTorch draws nothing */
        return run(call);
    struct cattn_torch_random random;
    if (!cattn_torch_begin(rng, &random))
        return false;
    spec->torch = &random;
    const bool done = run(call);
    cattn_torch_end(rng, done ? &random : NULL);
    return done;
}

/* dropout(x, p, training, rng, return_mask, out) */
PyObject *cattn_dropout_body(PyObject *module, PyObject *const *args, int Py_UNUSED(stacklevel)) {
    struct cattn_dropout_params params;
    npy_intp dims[NPY_MAXDIMS];
    struct call call = {.state = cattn_state(module), .params = &params, .dims = dims};
    bool training, return_mask;
    PyObject *result = NULL;
    call.x = cattn_arg_floats(call.state, args[0], "x");
    if (call.x == NULL)
        return NULL;
    take_x(&call);
    if (!cattn_dropout_spec_from(args[1], "p", &params.dropout) || !cattn_arg_flag(args[2], "training", &training) ||
        !cattn_rng_check(args[3]) || !cattn_arg_flag(args[4], "return_mask", &return_mask) ||
        !make_outputs(&call, args[5], return_mask))
        goto done;
    if (!training || !params.dropout.enabled) {
        if (!copy(&call))
            goto done;
    } else if (!draw_and_run(&call, args[3])) {
        goto done;
    }
    result = cattn_output_result(&call.output);
    if (return_mask) {
        PyObject *out = result;
        result = PyTuple_Pack(2, out, (PyObject *)call.mask.array);
        Py_DECREF(out);
    }
done:
    Py_XDECREF((PyObject *)call.x);
    cattn_output_clear(&call.output);
    cattn_output_clear(&call.mask);
    return result;
}
