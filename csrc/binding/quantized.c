/* quantized.c -- arguments that may be a cattn.Quantized. */
#include "args.h"

#include <assert.h>

static bool all_are_scales(PyArrayObject *array) {
    struct cattn_array frozen;
    float wrong;
    cattn_freeze(array, "scale", &frozen);
    return cattn_are_scales(&frozen, &wrong);
}

PyObject *cattn_py_are_scales(PyObject *Py_UNUSED(module), PyObject *object) {
    if (!PyArray_CheckExact(object) || !cattn_arg_unchanged((PyArrayObject *)object, NPY_FLOAT, "scale"))
        return PyErr_Occurred() != NULL ? NULL : PyErr_Format(PyExc_TypeError, "_are_scales() takes an array");
    return PyBool_FromLong(all_are_scales((PyArrayObject *)object));
}

/* Whether the scale has one number for each row of the array, but lacks the last axis. */
static bool lacks_last_axis(const struct cattn_array *scale, const struct cattn_array *array) {
    bool lacks = scale->nd > 0 && scale->nd == array->nd - 1;
    for (int axis = 0; lacks && axis < scale->nd; axis++)
        lacks = scale->dims[axis] == 1 || scale->dims[axis] == array->dims[axis];
    return lacks;
}

bool cattn_check_scale_shape(const struct cattn_array *scale, const struct cattn_array *array) {
    char meaning[32], hint[64] = "";
    if (cattn_broadcasts(scale, array->nd, array->dims))
        return true;
    PyOS_snprintf(meaning, sizeof meaning, "the shape of %s", array->name);
    if (lacks_last_axis(scale, array))
        PyOS_snprintf(hint, sizeof hint, ": for a scale of each token pass %s[..., None]", scale->name);
    return cattn_check_broadcast(cattn_python, scale, array->nd, array->dims, meaning, hint);
}

bool cattn_arg_dequantize(struct binding_state *state, PyArrayObject **array, const char *name, PyArrayObject *scale,
                          const char *scale_name) {
    struct cattn_array frozen, frozen_scale;
    cattn_freeze(*array, name, &frozen);
    cattn_freeze(scale, scale_name, &frozen_scale);
    if (!cattn_check_scale_shape(&frozen_scale, &frozen))
        return false;
    PyObject *wide = PyObject_CallFunctionObjArgs(state->dequantized, (PyObject *)*array, (PyObject *)scale, NULL);
    if (wide == NULL)
        return false;
    Py_DECREF((PyObject *)*array);
    *array = (PyArrayObject *)wide;
    return true;
}

/* ---- cattn.Quantized ---- */

/* Takes the arrays of a checked object. *array stays NULL, without an exception, if the object was not checked. */
static bool take_pair(const struct binding_state *state, PyObject *object, PyArrayObject **array,
                      PyArrayObject **scale) {
    PyObject *bits = PyObject_GetAttr(object, state->bits);
    PyObject *factors = bits != NULL ? PyObject_GetAttr(object, state->scale) : NULL;
    const bool found = factors != NULL, checked = found && PyArray_CheckExact(bits) && PyArray_CheckExact(factors);
    *array = checked ? (PyArrayObject *)Py_NewRef(bits) : NULL;
    *scale = checked ? (PyArrayObject *)Py_NewRef(factors) : NULL;
    Py_XDECREF(bits);
    Py_XDECREF(factors);
    return found;
}

/* An object that another library made, of its own arrays: its two members, checked. */
static bool take_unchecked(const struct binding_state *state, PyObject *object, PyArrayObject **array,
                           PyArrayObject **scale) {
    PyObject *pair = PySequence_Tuple(object), *made = NULL;
    if (pair != NULL)
        made = PyObject_CallObject(state->quantized_class, pair);
    Py_XDECREF(pair);
    const bool taken = made != NULL && take_pair(state, made, array, scale);
    Py_XDECREF(made);
    return taken;
}

bool cattn_arg_is_quantized(const struct binding_state *state, PyObject *object) {
    return (PyObject *)Py_TYPE(object) == state->quantized_class;
}

bool cattn_arg_take_quantized(const struct binding_state *state, PyObject *object, const char *name,
                              PyArrayObject **array, PyArrayObject **scale, enum cattn_storage *storage) {
    if (!take_pair(state, object, array, scale) || (*array == NULL && !take_unchecked(state, object, array, scale)))
        return false;
    const int type = PyArray_TYPE(*array);
    *storage = type == NPY_BYTE ? CATTN_STORED_I8 : CATTN_STORED_F8;
    /* The constructor has looked at every scale. Only the array objects may have been given other shapes and dtypes. */
    if (!cattn_arg_unchanged(*array, type == NPY_BYTE ? NPY_BYTE : NPY_UBYTE, name) ||
        !cattn_arg_unchanged(*scale, NPY_FLOAT, name))
        return false;
    assert(all_are_scales(*scale));
    return true;
}
