/* softmax.c -- softmax(...) and masked_softmax(...): parse, check, allocate, run, return. */
#include "attention_call.h"

enum { X, WHERE, N_INPUTS };

struct call {
    struct binding_state *state;
    struct cattn_softmax_params *params;
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    struct cattn_range_args ranges;
    struct cattn_output output;
    int type, axis;
    int own_nd;            /* of x */
    struct cattn_array *x; /* frozen */
};

static bool parse_x(struct call *call, PyObject *object, const char *name) {
    cattn_clear_softmax(call->params);
    PyArrayObject *x = cattn_arg_floats(call->state, object, name);
    call->inputs[X] = x;
    if (x == NULL)
        return false;
    call->type = PyArray_TYPE(x);
    call->own_nd = cattn_freeze_rows(x, name, call->x);
    return true;
}

/* `object` is an int. */
static bool parse_axis(struct call *call, PyObject *object, const char *name) {
    const Py_ssize_t axis = PyLong_AsSsize_t(object);
    if (axis == -1 && PyErr_Occurred())
        PyErr_Clear(); /* it does not fit a Py_ssize_t: far out of bounds */
    else if (axis >= -call->x->nd && axis < call->x->nd) {
        call->axis = (int)(axis < 0 ? axis + call->x->nd : axis);
        return true;
    }
    PyObject *shown = cattn_shown(object);
    if (shown != NULL)
        PyErr_Format(PyExc_ValueError, "axis %U is out of bounds for %s with %d dimensions", shown, name, call->own_nd);
    Py_XDECREF(shown);
    return false;
}

static bool parse_mask(struct call *call, PyObject *object, const char *name) {
    if (object == Py_None)
        return true;
    PyArrayObject *mask =
        cattn_arg_mask(call->state, object, name, CATTN_MASK_BOOL, call->type, call->x->nd, call->x->dims);
    call->inputs[WHERE] = mask;
    if (mask != NULL)
        cattn_tensor_rows(&call->params->mask, mask, call->x->nd, call->axis);
    return mask != NULL;
}

/* The queries are on the last axis but the one of the keys, and all axes before these two are batch dimensions. */
static bool parse_positions(struct call *call, PyObject *is_causal, PyObject *query_offset) {
    struct cattn_softmax_params *params = call->params;
    int64_t batch[NPY_MAXDIMS];
    int n_batch_dims = 0;
    if (!cattn_arg_ranges(call->state, is_causal, query_offset, Py_None, &call->ranges))
        return false;
    params->is_causal = call->ranges.is_causal;
    if (call->x->nd < 2) {
        if (params->is_causal)
            PyErr_Format(PyExc_ValueError,
                         "scores must have at least 2 dimensions (..., T_q, T_k) with is_causal, got %d", call->own_nd);
        return !params->is_causal;
    }
    const int query_axis = call->axis == call->x->nd - 1 ? call->x->nd - 2 : call->x->nd - 1;
    for (int axis = 0; axis < query_axis; axis++) {
        if (axis != call->axis)
            batch[n_batch_dims++] = call->x->dims[axis];
    }
    const struct cattn_range_sizes sizes = {.seqlen_q = call->x->dims[query_axis],
                                            .seqlen_k = call->x->dims[call->axis],
                                            .n_batch_dims = n_batch_dims,
                                            .batch = batch,
                                            .query_lengths = Py_None,
                                            .key_lengths = Py_None,
                                            .first_keys = Py_None};
    params->ranges.offsets.batch[sizes.n_batch_dims] = 0; /* the query axis */
    return cattn_ranges_settle(call->state, &call->ranges, &sizes, &params->ranges);
}

static bool make_output(struct call *call, PyObject *out) {
    struct cattn_softmax_params *params = call->params;
    const struct cattn_output_spec spec = {"out",        call->type, call->own_nd,   call->x->dims,
                                           call->inputs, N_INPUTS,   call->inputs[X]};
    if (!cattn_arg_output(call->state, out, &spec, &call->output))
        return false;
    CATTN_FILL_ROWS(params, call->x, call->type, call->axis);
    params->storage = cattn_arg_storage(call->type);
    cattn_view_rows(&params->x, call->x, call->x->nd, call->axis);
    params->out_is_new = call->output.array != call->output.given;
    cattn_tensor_rows(&params->out, call->output.array, call->x->nd, call->axis);
    if (params->n_cols == 1)
        params->x.col = params->out.col = 1;
    return true;
}

CATTN_DEFINE_RUN(run, cattn_softmax, cattn_softmax_params)

/* The common end. `parsed` false: an exception is set. */
static PyObject *finish(struct call *call, bool parsed) {
    const bool computed = parsed && run(call->params, call->output.array);
    cattn_ranges_clear(&call->ranges);
    return cattn_output_end(computed, &call->output, call->inputs, N_INPUTS);
}

PyObject *cattn_body_softmax(struct binding_state *state, PyObject **args) {
    struct cattn_softmax_params params;
    struct cattn_array x;
    struct call call = {.state = state, .params = &params, .x = &x};
    if (!PyLong_CheckExact(args[SOFTMAX_axis])) /* the helper merges the axes into one, and calls softmax */
        return PyObject_CallFunctionObjArgs(state->softmax_axes, args[SOFTMAX_x], args[SOFTMAX_axis],
                                            args[SOFTMAX_where], args[SOFTMAX_scale], args[SOFTMAX_out], NULL);
    return finish(&call, parse_x(&call, args[SOFTMAX_x], "x") && parse_axis(&call, args[SOFTMAX_axis], "x") &&
                             parse_mask(&call, args[SOFTMAX_where], "where") &&
                             cattn_arg_scale(args[SOFTMAX_scale], call.type, &params.scale) &&
                             make_output(&call, args[SOFTMAX_out]));
}

static bool parse_method(struct binding_state *state, PyObject *object, enum cattn_softmax_method *method) {
    if (cattn_arg_is(object, state->neg_inf)) {
        *method = CATTN_SOFTMAX_PLAIN;
    } else if (cattn_arg_is(object, state->renormalize)) {
        *method = CATTN_SOFTMAX_RENORMALIZE;
    } else {
        return cattn_error_value(object, "method must be 'neg_inf' or 'renormalize'");
    }
    return true;
}

PyObject *cattn_body_masked_softmax(struct binding_state *state, PyObject **args) {
    struct cattn_softmax_params params;
    struct cattn_array x;
    struct call call = {.state = state, .params = &params, .x = &x};
    if (!PyLong_CheckExact(args[MASKED_SOFTMAX_axis])) /* as softmax */
        return PyObject_CallFunctionObjArgs(
            state->masked_softmax_axes, args[MASKED_SOFTMAX_scores], args[MASKED_SOFTMAX_axis],
            args[MASKED_SOFTMAX_mask], args[MASKED_SOFTMAX_is_causal], args[MASKED_SOFTMAX_query_offset],
            args[MASKED_SOFTMAX_scale], args[MASKED_SOFTMAX_method], args[MASKED_SOFTMAX_out], NULL);
    bool parsed = parse_x(&call, args[MASKED_SOFTMAX_scores], "scores");
    if (parsed && call.own_nd == 0) {
        PyErr_SetString(PyExc_ValueError, "scores must have at least 1 dimension (..., T_q, T_k), got 0");
        parsed = false;
    }
    return finish(&call,
                  parsed && parse_axis(&call, args[MASKED_SOFTMAX_axis], "scores") &&
                      parse_mask(&call, args[MASKED_SOFTMAX_mask], "mask") &&
                      parse_positions(&call, args[MASKED_SOFTMAX_is_causal], args[MASKED_SOFTMAX_query_offset]) &&
                      cattn_arg_scale(args[MASKED_SOFTMAX_scale], call.type, &params.scale) &&
                      parse_method(state, args[MASKED_SOFTMAX_method], &params.method) &&
                      make_output(&call, args[MASKED_SOFTMAX_out]));
}

/* ---- softmax_backward ---- */

CATTN_DEFINE_RUN(run_backward, cattn_softmax_backward, cattn_softmax_backward_params)

/* softmax_backward(grad_out, weights, scale, out) over the last axis; at least one dimension */
PyObject *cattn_py_softmax_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    static const char *const names[] = {"grad_out", "weights"};
    struct binding_state *state = cattn_state(module);
    struct cattn_softmax_backward_params params;
    struct cattn_array grad, weights;
    PyArrayObject *inputs[2] = {NULL, NULL};
    struct cattn_output output = {NULL, NULL};
    bool computed = false;
    if (!cattn_error_count("softmax_backward", n_args, 4) || !cattn_ready(state))
        return NULL;
    for (int i = 0; i < 2; i++) {
        inputs[i] = cattn_arg_floats(state, args[i], names[i]);
        if (inputs[i] == NULL)
            goto done;
    }
    const int type = cattn_arg_promote(state, inputs, 2, "grad_out and weights");
    cattn_freeze(inputs[0], "grad_out", &grad);
    cattn_freeze(inputs[1], "weights", &weights);
    const int nd = weights.nd;
    if (type < 0 || !cattn_check_shape(cattn_python, &grad, "weights", nd, weights.dims))
        goto done;
    if (type != cattn_arg_compute_type(type)) {
        PyErr_SetString(PyExc_TypeError, "weights must be float32 or float64: cattn.softmax_backward widens halves");
        goto done;
    }
    if (nd == 0) {
        PyErr_SetString(PyExc_ValueError, "weights must have at least 1 dimension, got 0");
        goto done;
    }
    cattn_clear_softmax_backward(&params);
    CATTN_FILL_ROWS(&params, &weights, type, nd - 1);
    cattn_view_rows(&params.grad, &grad, nd, nd - 1);
    cattn_view_rows(&params.weights, &weights, nd, nd - 1);
    if (!cattn_arg_scale(args[2], type, &params.scale))
        goto done;
    const bool first = args[3] == (PyObject *)inputs[0]; /* in place of one or the other */
    const struct cattn_output_spec spec = {"out", type, nd, weights.dims, inputs, 2, inputs[first ? 0 : 1]};
    if (!cattn_arg_output(state, args[3], &spec, &output))
        goto done;
    cattn_tensor_rows(&params.out, output.array, nd, nd - 1);
    if (params.n_cols == 1)
        params.grad.col = params.weights.col = params.out.col = 1;
    computed = run_backward(&params, output.array);
done:
    return cattn_output_end(computed, &output, inputs, 2);
}

/* ---- causal_mask ---- */

CATTN_DEFINE_RUN(run_mask, cattn_mask, cattn_mask_params)

PyObject *cattn_body_causal_mask(struct binding_state *state, PyObject **args) {
    struct cattn_range_args parsed = {0};
    struct cattn_mask_params params = {.mask = NULL};
    struct cattn_output output = {NULL, NULL};
    bool computed = false;
    PyObject *T_k = args[CAUSAL_MASK_T_k] == Py_None ? args[CAUSAL_MASK_T_q] : args[CAUSAL_MASK_T_k];
    PyObject *is_causal = args[CAUSAL_MASK_is_causal];
    /* lower_right is the default: an offset overrides it */
    if (args[CAUSAL_MASK_query_offset] != Py_None && cattn_arg_is(is_causal, state->lower_right))
        is_causal = state->upper_left;
    if (!cattn_arg_count(args[CAUSAL_MASK_T_q], "T_q", 0, NPY_MAX_INTP, &params.seqlen_q) ||
        !cattn_arg_count(T_k, "T_k", 0, NPY_MAX_INTP, &params.seqlen_k) ||
        !cattn_arg_ranges(state, is_causal, args[CAUSAL_MASK_query_offset], args[CAUSAL_MASK_window_size], &parsed))
        goto done;
    if (parsed.offsets != NULL) {
        cattn_error_type("query_offset", "an int", args[CAUSAL_MASK_query_offset]);
        goto done;
    }
    const int64_t dims[2] = {params.seqlen_q, params.seqlen_k};
    const struct cattn_range_sizes sizes = {.seqlen_q = dims[0],
                                            .seqlen_k = dims[1],
                                            .query_lengths = Py_None,
                                            .key_lengths = Py_None,
                                            .first_keys = Py_None};
    const struct cattn_output_spec spec = {"the mask", NPY_BOOL, 2, dims, NULL, 0, NULL};
    if (!cattn_ranges_settle(state, &parsed, &sizes, &params.ranges) || !cattn_arg_output(state, NULL, &spec, &output))
        goto done;
    params.mask = (uint8_t *)PyArray_BYTES(output.array);
    computed = run_mask(&params, output.array);
done:
    cattn_ranges_clear(&parsed);
    return cattn_output_end(computed, &output, NULL, 0);
}
