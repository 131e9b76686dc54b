/* py_softmax.c -- softmax(...), masked_softmax(...) and causal_mask(...): parse, check, allocate, run, return. */
#include "args.h"
#include "error.h"
#include "ranges.h"

enum { X, MASK, N_INPUTS };

struct call {
    struct binding_state *state;
    struct cattn_softmax_params *params;
    int stacklevel;                  /* of warnings */
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    struct cattn_range_args ranges;
    struct cattn_output output;
    int type, axis;
    int own_nd;     /* of x */
    int nd;         /* at least 1: a 0-d array is one element in a row */
    npy_intp *dims; /* of x, nd of them */
};

static bool parse_x(struct call *call, PyObject *object, const char *name) {
    PyArrayObject *x = cattn_arg_floats(call->state, object, name);
    call->inputs[X] = x;
    if (x == NULL)
        return false;
    call->type = PyArray_TYPE(x);
    call->nd = call->own_nd = PyArray_NDIM(x);
    for (int axis = 0; axis < call->nd; axis++)
        call->dims[axis] = PyArray_DIM(x, axis);
    if (call->nd == 0)
        call->dims[call->nd++] = 1;
    return true;
}

/* At once after the shape: what runs Python code comes later, and might change the array. */
static void take_axis(struct call *call, int axis) {
    call->axis = axis;
    cattn_tensor_rows(&call->params->x, call->inputs[X], call->nd, axis);
}

static bool parse_axis(struct call *call, PyObject *object, const char *name) {
    const Py_ssize_t axis = PyLong_Check(object) ? PyLong_AsSsize_t(object) : -2;
    if (!PyLong_Check(object))
        return cattn_error_type("axis", "an int, a tuple of ints or None", object);
    if (axis == -1 && PyErr_Occurred())
        PyErr_Clear(); /* far out of bounds: -1 is not what was meant */
    else if (axis >= -call->nd && axis < call->nd) {
        take_axis(call, (int)(axis < 0 ? axis + call->nd : axis));
        return true;
    }
    PyErr_Format(PyExc_ValueError, "axis %R is out of bounds for %s with %d dimensions", object, name, call->own_nd);
    return false;
}

static bool parse_mask(struct call *call, PyObject *object, const char *name) {
    call->params->mask.data = NULL;
    if (object == Py_None)
        return true;
    PyArrayObject *mask = cattn_arg_mask(call->state, object, name, CATTN_MASK_BOOL, call->type, call->nd, call->dims);
    call->inputs[MASK] = mask;
    if (mask != NULL)
        cattn_tensor_rows(&call->params->mask, mask, call->nd, call->axis);
    return mask != NULL;
}

static bool parse_positions(struct call *call, PyObject *is_causal, PyObject *query_offset) {
    struct cattn_softmax_params *params = call->params;
    if (!cattn_arg_ranges(call->state, is_causal, query_offset, Py_None, &call->ranges))
        return false;
    params->is_causal = call->ranges.is_causal;
    if (call->nd < 2) {
        if (params->is_causal)
            PyErr_Format(PyExc_ValueError,
                         "scores must have at least 2 dimensions (..., T_q, T_k) with is_causal, got %d", call->own_nd);
        return !params->is_causal;
    }
    const struct cattn_range_sizes sizes = {.seqlen_q = call->dims[call->nd - 2],
                                            .seqlen_k = call->dims[call->nd - 1],
                                            .n_batch_dims = call->nd - 2,
                                            .batch = call->dims,
                                            .query_lengths = Py_None,
                                            .key_lengths = Py_None};
    params->ranges.offsets.batch[sizes.n_batch_dims] = 0; /* the query axis */
    return cattn_ranges_settle(call->state, &call->ranges, &sizes, call->stacklevel, &params->ranges);
}

static bool make_output(struct call *call, PyObject *out) {
    struct cattn_softmax_params *params = call->params;
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = call->type,
                                           .nd = call->own_nd,
                                           .dims = call->dims,
                                           .inputs = call->inputs,
                                           .n_inputs = N_INPUTS,
                                           .in_place = call->inputs[X]};
    if (!cattn_arg_output(call->state, out, &spec, &call->output))
        return false;
    params->dtype = cattn_arg_dtype(call->type);
    params->storage = cattn_arg_storage(call->type);
    params->n_batch_dims = call->nd - 1;
    params->n_cols = call->dims[call->axis];
    params->n_rows = 1;
    for (int axis = 0, batch = 0; axis < call->nd; axis++) {
        if (axis != call->axis)
            params->batch_shape[batch++] = call->dims[axis];
    }
    params->out_is_new = call->output.array != call->output.given;
    params->n_rows = PyArray_SIZE(call->output.array);
    if (params->n_cols > 0)
        params->n_rows /= params->n_cols;
    cattn_tensor_rows(&params->out, call->output.array, call->nd, call->axis);
    if (params->n_cols == 1)
        params->x.col = params->out.col = 1;
    return true;
}

static enum cattn_status compute(const void *params) { return cattn_softmax(params); }

static bool run(struct call *call) {
    struct cattn_softmax_params *params = call->params;
    params->num_threads = cattn_get_num_threads();
    const bool brief = PyArray_SIZE(call->output.array) <= CATTN_GIL_ELEMENTS;
    return cattn_error_status(cattn_compute(brief, &params->poll, compute, params));
}

/* The common end: compute, copy a temporary out, let go of everything. `parsed` false: an exception is set. */
static PyObject *finish(struct call *call, bool parsed) {
    PyObject *result = NULL;
    if (parsed && run(call) && cattn_output_finish(&call->output))
        result = cattn_output_result(&call->output);
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)call->inputs[i]);
    cattn_ranges_clear(&call->ranges);
    cattn_output_clear(&call->output);
    return result;
}

/* softmax(x, axis, where, scale, out); axis is an int here. */
PyObject *cattn_py_softmax(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_softmax_params params;
    npy_intp dims[NPY_MAXDIMS];
    struct call call = {.state = cattn_state(module), .params = &params, .dims = dims};
    if (!cattn_error_count("softmax", n_args, 5))
        return NULL;
    params.method = CATTN_SOFTMAX_PLAIN;
    params.is_causal = false;
    return finish(&call, parse_x(&call, args[0], "x") && parse_axis(&call, args[1], "x") &&
                             parse_mask(&call, args[2], "where") &&
                             cattn_arg_scale(args[3], call.type, &params.scale) && make_output(&call, args[4]));
}

static bool parse_method(struct binding_state *state, PyObject *object, enum cattn_softmax_method *method) {
    if (cattn_arg_is(object, state->neg_inf)) {
        *method = CATTN_SOFTMAX_PLAIN;
    } else if (cattn_arg_is(object, state->renormalize)) {
        *method = CATTN_SOFTMAX_RENORMALIZE;
    } else {
        PyErr_Format(PyExc_ValueError, "method must be 'neg_inf' or 'renormalize', got %R", object);
        return false;
    }
    return true;
}

/* masked_softmax(scores, mask, is_causal, query_offset, scale, method, out) */
PyObject *cattn_masked_softmax_body(PyObject *module, PyObject *const *args, int stacklevel) {
    struct cattn_softmax_params params;
    npy_intp dims[NPY_MAXDIMS];
    struct call call = {.state = cattn_state(module), .params = &params, .stacklevel = stacklevel, .dims = dims};
    bool parsed = parse_x(&call, args[0], "scores");
    if (parsed && call.own_nd == 0) {
        PyErr_SetString(PyExc_ValueError, "scores must have at least 1 dimension (..., T_q, T_k), got 0");
        parsed = false;
    }
    if (parsed)
        take_axis(&call, call.nd - 1);
    return finish(&call, parsed && parse_mask(&call, args[1], "mask") && parse_positions(&call, args[2], args[3]) &&
                             cattn_arg_scale(args[4], call.type, &params.scale) &&
                             parse_method(call.state, args[5], &params.method) && make_output(&call, args[6]));
}

/* ---- causal_mask ---- */

static enum cattn_status compute_mask(const void *params) { return cattn_mask(params); }

/* causal_mask(T_q, T_k, is_causal, query_offset, window_size) */
PyObject *cattn_py_causal_mask(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    struct binding_state *state = cattn_state(module);
    struct cattn_range_args parsed = {0};
    struct cattn_ranges ranges;
    struct cattn_output output = {NULL, NULL};
    int64_t seqlen_q, seqlen_k;
    PyObject *result = NULL;
    if (!cattn_error_count("causal_mask", n_args, 5) || !cattn_arg_count(args[0], "T_q", 0, NPY_MAX_INTP, &seqlen_q) ||
        !cattn_arg_count(args[1] == Py_None ? args[0] : args[1], "T_k", 0, NPY_MAX_INTP, &seqlen_k) ||
        !cattn_arg_ranges(state, args[2], args[3], args[4], &parsed))
        goto done;
    if (parsed.offsets != NULL) {
        cattn_error_type("query_offset", "an int", args[3]);
        goto done;
    }
    const npy_intp dims[2] = {(npy_intp)seqlen_q, (npy_intp)seqlen_k};
    const struct cattn_range_sizes sizes = {
        .seqlen_q = dims[0], .seqlen_k = dims[1], .query_lengths = Py_None, .key_lengths = Py_None};
    if (!cattn_ranges_settle(state, &parsed, &sizes, CATTN_BEHIND_PYTHON, &ranges))
        goto done;
    const struct cattn_output_spec spec = {.name = "the mask", .type = NPY_BOOL, .nd = 2, .dims = dims};
    if (!cattn_arg_output(state, NULL, &spec, &output))
        goto done;
    struct cattn_mask_params params = {.seqlen_q = seqlen_q,
                                       .seqlen_k = seqlen_k,
                                       .ranges = ranges,
                                       .mask = (uint8_t *)PyArray_BYTES(output.array),
                                       .num_threads = cattn_get_num_threads()};
    const bool brief = PyArray_SIZE(output.array) <= CATTN_GIL_ELEMENTS;
    if (cattn_error_status(cattn_compute(brief, &params.poll, compute_mask, &params)))
        result = cattn_output_result(&output);
done:
    cattn_ranges_clear(&parsed);
    cattn_output_clear(&output);
    return result;
}
