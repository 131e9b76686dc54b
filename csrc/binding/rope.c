/* rope.c -- rope(...): parse, check, allocate, run, return. */
#include "args.h"

#include <math.h>

struct call {
    struct binding_state *state;
    struct cattn_rope_params *params;
    PyArrayObject *x, *positions; /* owned; positions may be NULL, else float64 and contiguous */
    struct cattn_output output;
    int type;                   /* of x */
    struct cattn_array *frozen; /* x, with two axes or more */
};

static bool parse_x(struct call *call, PyObject *object) {
    struct cattn_rope_params *params = call->params;
    cattn_clear_rope(params);
    call->x = cattn_arg_floats(call->state, object, "x");
    if (call->x == NULL)
        return false;
    const struct cattn_array *x = call->frozen;
    cattn_freeze(call->x, "x", call->frozen);
    const int nd = x->nd;
    if (nd < 2)
        return cattn_raise(PyExc_ValueError, "x must have at least 2 dimensions (..., T, D), got %d", nd);
    call->type = PyArray_TYPE(call->x);
    params->dtype = cattn_arg_dtype(call->type);
    params->storage = cattn_arg_storage(call->type);
    params->n_batch_dims = nd - 2;
    memcpy(params->batch_shape, x->dims, (size_t)(nd - 2) * sizeof *x->dims);
    params->n_batch = cattn_count(nd, x->dims) > 0 ? cattn_count(nd - 2, x->dims) : 0;
    params->seqlen = x->dims[nd - 2];
    params->n_cols = x->dims[nd - 1];
    cattn_view(&params->x, x, nd - 2, CATTN_AXIS_COL | CATTN_AXIS_ROW);
    return true;
}

/* ---- positions ---- */

/* Always false. */
static bool error_positions(const struct call *call, const struct cattn_array *positions) {
    const struct cattn_array *x = call->frozen;
    const int64_t tokens = x->dims[x->nd - 2];
    const int64_t last = positions->nd > 0 ? positions->dims[positions->nd - 1] : tokens;
    const bool swapped = x->nd > 2 && last != tokens && last == x->dims[x->nd - 3];
    return cattn_raise(PyExc_ValueError,
                       "positions has shape %s, which does not fit x's %s: pass one for each of the %lld tokens, shape "
                       "%s, or (*lead, %lld) with the leading axes of x, with or without its axis -3 (heads)%s",
                       cattn_show_shape(positions->nd, positions->dims).text, cattn_show_shape(x->nd, x->dims).text,
                       (long long)tokens, cattn_show_shape(1, &tokens).text, (long long)tokens,
                       swapped ? "; if x is (..., tokens, heads, head_dim), pass x.swapaxes(-3, -2)" : "");
}

/* Positions are (T,), or have the leading axes of x, with or without the heads; an axis of 1 is shared. */
static bool take_positions(struct call *call) {
    struct cattn_tensor *tensor = &call->params->positions;
    const struct cattn_array *x = call->frozen;
    const int n_batch_dims = x->nd - 2;
    struct cattn_array positions;
    cattn_freeze(call->positions, "positions", &positions);
    const int own = positions.nd;
    if (own < 1 || positions.dims[own - 1] != x->dims[x->nd - 2] ||
        (own > 1 && own - 1 != n_batch_dims && own - 1 != n_batch_dims - 1))
        return error_positions(call, &positions);
    for (int axis = 0; axis < own - 1; axis++)
        if (positions.dims[axis] != 1 && positions.dims[axis] != x->dims[axis])
            return error_positions(call, &positions);
    tensor->data = positions.data;
    tensor->row = 1;
    for (int axis = 0; axis < n_batch_dims; axis++)
        tensor->batch[axis] = 0;
    int64_t stride = positions.dims[own - 1];
    for (int axis = own - 2; axis >= 0; axis--) {
        tensor->batch[axis] = positions.dims[axis] == 1 ? 0 : stride;
        stride *= positions.dims[axis];
    }
    return true;
}

/* A copy of positions that need no conversion: int64 or float64, contiguous, each within bounds. NULL for all others;
 * an exception is set only if there is no memory. */
static PyArrayObject *copy_positions(PyObject *object) {
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_CheckExact(object) || !PyArray_ISCARRAY_RO(array) || PyArray_NDIM(array) == 0 ||
        (PyArray_TYPE(array) != NPY_INT64 && PyArray_TYPE(array) != NPY_DOUBLE))
        return NULL;
    PyArrayObject *copy = (PyArrayObject *)PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array), NPY_DOUBLE);
    if (copy == NULL)
        return NULL;
    const bool whole = PyArray_TYPE(array) == NPY_INT64;
    const int64_t most = (int64_t)CATTN_MAX_POSITION;
    double *to = PyArray_DATA(copy);
    for (int64_t i = 0; i < PyArray_SIZE(copy); i++) {
        const int64_t n = whole ? ((const int64_t *)PyArray_DATA(array))[i] : 0;
        to[i] = whole ? (double)n : ((const double *)PyArray_DATA(array))[i];
        if (n < -most || n > most || !(fabs(to[i]) <= CATTN_MAX_POSITION)) {
            Py_DECREF((PyObject *)copy);
            return NULL;
        }
    }
    return copy;
}

static bool parse_positions(struct call *call, PyObject *object) {
    struct cattn_rope_params *params = call->params;
    params->length = (double)params->seqlen;
    if (object == Py_None)
        return true;
    call->positions = copy_positions(object);
    if (call->positions == NULL && PyErr_Occurred())
        return false;
    if (call->positions == NULL)
        call->positions = (PyArrayObject *)PyObject_CallFunction(call->state->as_positions, "Os", object, "positions");
    if (call->positions == NULL)
        return false;
    if (!PyArray_CheckExact((PyObject *)call->positions) || PyArray_TYPE(call->positions) != NPY_DOUBLE ||
        !PyArray_ISCARRAY(call->positions))
        return cattn_raise(PyExc_SystemError, "positions was converted to something unexpected");
    if (!take_positions(call))
        return false;
    const double *positions = PyArray_DATA(call->positions);
    params->length = 0;
    for (int64_t i = 0; i < PyArray_SIZE(call->positions); i++)
        if (positions[i] + 1 > params->length)
            params->length = positions[i] + 1;
    return true;
}

/* ---- the angles ---- */

static bool parse_theta(struct call *call, PyObject *object) {
    double *theta = &call->params->theta;
    if (!cattn_arg_real(object, "theta", theta))
        return false;
    if (*theta >= 1.0)
        return true;
    return cattn_error_value(object, "theta must be at least 1");
}

static bool parse_rotary_dim(struct call *call, PyObject *object) {
    struct cattn_rope_params *params = call->params;
    params->rotary_dim = params->n_cols;
    if (object != Py_None && !cattn_arg_count(object, "rotary_dim", 0, params->n_cols, &params->rotary_dim))
        return false;
    if (params->rotary_dim % 2 == 0)
        return true;
    if (object != Py_None)
        return cattn_raise(PyExc_ValueError, "rotary_dim must be even, because columns are rotated in pairs, got %lld",
                           (long long)params->rotary_dim);
    return cattn_raise(PyExc_ValueError,
                       "x has %lld columns, but they are rotated in pairs: pass an even rotary_dim, for example %lld",
                       (long long)params->n_cols, (long long)params->n_cols - 1);
}

static bool parse_scaling(struct call *call, PyObject *object) {
    struct cattn_rope_scaling *s = &call->params->scaling;
    int type = CATTN_ROPE_DEFAULT, truncate = 0;
    if (object == Py_None)
        return true;
    PyObject *numbers = PyObject_CallFunction(call->state->as_rope_scaling, "OdLL", object, call->params->theta,
                                              (long long)call->params->rotary_dim, (long long)call->params->n_cols);
    const bool parsed =
        numbers != NULL && PyArg_ParseTuple(numbers, "ipddddddddd", &type, &truncate, &s->factor, &s->original_length,
                                            &s->low_freq_factor, &s->high_freq_factor, &s->beta_fast, &s->beta_slow,
                                            &s->attention_factor, &s->mscale, &s->mscale_all_dim);
    Py_XDECREF(numbers);
    if (parsed) {
        s->type = (enum cattn_rope_type)type;
        s->truncate = truncate != 0;
    }
    return parsed;
}

/* ---- the result ---- */

static bool make_output(struct call *call, PyObject *out) {
    struct cattn_rope_params *params = call->params;
    const struct cattn_output_spec spec = {"out",    call->type, call->frozen->nd, call->frozen->dims,
                                           &call->x, 1,          call->x};
    if (!cattn_arg_output(call->state, out, &spec, &call->output))
        return false;
    cattn_tensor_from(&params->out, call->output.array, call->frozen->nd - 2, CATTN_AXIS_COL | CATTN_AXIS_ROW);
    if (params->n_cols == 1)
        params->x.col = params->out.col = 1;
    return true;
}

CATTN_DEFINE_RUN(run, cattn_rope, cattn_rope_params)

PyObject *cattn_body_rope(struct binding_state *state, PyObject **args) {
    struct cattn_rope_params params;
    struct cattn_array frozen;
    struct call call = {.state = state, .params = &params, .frozen = &frozen};
    const bool computed = parse_x(&call, args[ROPE_x]) && parse_positions(&call, args[ROPE_positions]) &&
                          parse_theta(&call, args[ROPE_theta]) && parse_rotary_dim(&call, args[ROPE_rotary_dim]) &&
                          cattn_arg_bool(args[ROPE_interleaved], "interleaved", &params.interleaved) &&
                          parse_scaling(&call, args[ROPE_scaling]) &&
                          cattn_arg_bool(args[ROPE_inverse], "inverse", &params.inverse) &&
                          make_output(&call, args[ROPE_out]) && run(&params, call.output.array);
    PyArrayObject *const inputs[] = {call.x, call.positions};
    return cattn_output_end(computed, &call.output, inputs, 2);
}
