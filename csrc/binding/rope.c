/* rope.c -- what the rows of rope do not say: positions, the columns that are rotated, and scaling. */
#include "engine.h"

#include <math.h>

/* ---- positions ---- */

/* Always false. */
static bool error_positions(const struct cattn_function_call *call, const struct cattn_array *positions) {
    const struct cattn_array *x = call->main;
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
static bool view_positions(const struct cattn_function_call *call, PyArrayObject *array, struct cattn_tensor *tensor) {
    const struct cattn_array *x = call->main;
    const int n_batch_dims = x->nd - 2;
    struct cattn_array positions;
    cattn_freeze(array, "positions", &positions);
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

static bool settle_positions(struct cattn_function_call *call, PyObject *object) {
    struct cattn_rope_params *params = call->params;
    params->length = (double)params->seqlen;
    if (object == Py_None)
        return true;
    PyArrayObject *array = copy_positions(object);
    if (array == NULL && !PyErr_Occurred())
        array = (PyArrayObject *)PyObject_CallFunction(call->state->as_positions, "Os", object, "positions");
    call->kept = (PyObject *)array;
    if (array == NULL)
        return false;
    if (!PyArray_CheckExact(call->kept) || PyArray_TYPE(array) != NPY_DOUBLE || !PyArray_ISCARRAY(array))
        return cattn_raise(PyExc_SystemError, "positions was converted to something unexpected");
    if (!view_positions(call, array, &params->positions))
        return false;
    const double *positions = PyArray_DATA(array);
    params->length = 0;
    for (int64_t i = 0; i < PyArray_SIZE(array); i++)
        if (positions[i] + 1 > params->length)
            params->length = positions[i] + 1;
    return true;
}

/* ---- the angles ---- */

static bool settle_rotary_dim(struct cattn_rope_params *params, PyObject *object) {
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

static bool settle_scaling(const struct cattn_function_call *call, PyObject *object) {
    struct cattn_rope_params *params = call->params;
    struct cattn_rope_scaling *s = &params->scaling;
    int type = CATTN_ROPE_DEFAULT, truncate = 0;
    if (object == Py_None)
        return true;
    PyObject *numbers = PyObject_CallFunction(call->state->as_rope_scaling, "OdLL", object, params->theta,
                                              (long long)params->rotary_dim, (long long)params->n_cols);
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

bool cattn_settle_rope(struct cattn_function_call *call) {
    return settle_positions(call, call->args[ROPE_positions]) &&
           settle_rotary_dim(call->params, call->args[ROPE_rotary_dim]) &&
           settle_scaling(call, call->args[ROPE_scaling]);
}
