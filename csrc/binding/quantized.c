/* quantized.c -- arguments of quantized keys and values; see quantized.h. */
#include "quantized.h"

PyArrayObject *cattn_arg_quantized(struct binding_state *state, PyObject *object, const char *name,
                                   enum cattn_storage *storage) {
    if (PyArray_CheckExact(object) && PyArray_TYPE((PyArrayObject *)object) == NPY_BYTE) {
        *storage = CATTN_STORED_I8;
        Py_INCREF(object);
        return (PyArrayObject *)object;
    }
    /* int8, or the bits of float8_e4m3fn as uint8 */
    PyArrayObject *array = cattn_arg_helped(state->as_quantized, object, name);
    if (array != NULL)
        *storage = PyArray_TYPE(array) == NPY_BYTE ? CATTN_STORED_I8 : CATTN_STORED_F8;
    return array;
}

/* Whether n numbers, `stride` bytes apart, may be scales. */
static bool are_scales(const char *data, npy_intp n, npy_intp stride) {
    int bad = 0;
    if (stride == (npy_intp)sizeof(float)) /* a loop of its own becomes vector code */
        for (npy_intp i = 0; i < n; i++)
            bad |= !cattn_is_scale(((const float *)(const void *)data)[i]);
    else
        for (npy_intp i = 0; i < n; i++, data += stride)
            bad |= !cattn_is_scale(*(const float *)(const void *)data);
    return !bad;
}

static bool all_are_scales(PyArrayObject *array) {
    struct cattn_walk walk;
    cattn_walk_begin(&walk, array);
    do {
        if (!are_scales(walk.run, walk.n, walk.stride))
            return false;
    } while (cattn_walk_next(&walk));
    return true;
}

PyArrayObject *cattn_arg_scale_array(struct binding_state *state, PyObject *object, const char *name) {
    const bool ready = PyArray_CheckExact(object) && PyArray_TYPE((PyArrayObject *)object) == NPY_FLOAT;
    PyArrayObject *scale =
        ready ? cattn_arg_floats(state, object, name) : cattn_arg_helped(state->as_scale, object, name);
    if (scale == NULL || all_are_scales(scale))
        return scale;
    PyObject *unused = PyObject_CallFunction(state->refuse_scale, "Os", (PyObject *)scale, name);
    if (unused != NULL) /* another thread has changed the array meanwhile */
        PyErr_Format(PyExc_ValueError, "%s must be between 2**-100 and 2**100", name);
    Py_XDECREF(unused);
    Py_DECREF((PyObject *)scale);
    return NULL;
}

/* Whether the scale has one number for each row of the array, but lacks the last axis. */
static bool lacks_last_axis(PyArrayObject *scale, PyArrayObject *array) {
    const int nd = PyArray_NDIM(scale);
    bool lacks = nd > 0 && nd == PyArray_NDIM(array) - 1;
    for (int axis = 0; lacks && axis < nd; axis++)
        lacks = PyArray_DIM(scale, axis) == 1 || PyArray_DIM(scale, axis) == PyArray_DIM(array, axis);
    return lacks;
}

bool cattn_arg_scale_fits(PyArrayObject *scale, const char *name, PyArrayObject *array, const char *whose) {
    char meaning[32], hint[64] = "";
    PyOS_snprintf(meaning, sizeof meaning, "the shape of %s", whose);
    if (lacks_last_axis(scale, array))
        PyOS_snprintf(hint, sizeof hint, ": for a scale of each token pass %s[..., None]", name);
    return cattn_arg_broadcasts(scale, name, PyArray_NDIM(array), PyArray_DIMS(array), meaning, hint);
}

bool cattn_arg_dequantize(struct binding_state *state, PyArrayObject **array, const char *name, PyArrayObject *scale,
                          const char *scale_name) {
    if (!cattn_arg_scale_fits(scale, scale_name, *array, name))
        return false;
    PyObject *wide = PyObject_CallFunctionObjArgs(state->dequantized, (PyObject *)*array, (PyObject *)scale, NULL);
    if (wide == NULL)
        return false;
    Py_DECREF((PyObject *)*array);
    *array = (PyArrayObject *)wide;
    return true;
}
