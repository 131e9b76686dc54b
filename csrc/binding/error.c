/* error.c -- exceptions: from the core's status, and messages that several files need. */
#include "args.h"

#include <stdarg.h>

static void fail(void *Py_UNUSED(context), enum cattn_fault fault, const char *text) {
    PyErr_SetString(fault == CATTN_WRONG_TYPE ? PyExc_TypeError : PyExc_ValueError, text);
}

static bool goes_on(void *Py_UNUSED(context)) { return cattn_check_signals(); }

const struct cattn_door *const cattn_python = &(const struct cattn_door){.fail = fail, .goes_on = goes_on};

bool cattn_error_status(enum cattn_status status) {
    switch (status) {
    case CATTN_OK:
        return true;
    case CATTN_NO_MEMORY:
        PyErr_NoMemory();
        return false;
    case CATTN_INTERRUPTED: /* the signal handler set its exception while the core polled */
        if (!PyErr_Occurred())
            PyErr_SetNone(PyExc_KeyboardInterrupt);
        return false;
    }
    return cattn_raise(PyExc_SystemError, "unknown status %d", (int)status);
}

bool cattn_error_type(const char *name, const char *wanted, PyObject *got) {
    PyObject *type = PyType_GetQualName(Py_TYPE(got));
    if (type != NULL)
        PyErr_Format(PyExc_TypeError, "%s must be %s, got %U", name, wanted, type);
    Py_XDECREF(type);
    return false;
}

/* ---- objects in messages ---- */

/* Whether the exception is one that an object's own method raises because of what it is. */
static bool is_about_object(void) {
    return PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError) &&
           !PyErr_ExceptionMatches(PyExc_RecursionError);
}

#define MOST_BITS 256    /* of an int: the decimal digits of a giant one take minutes, or are refused */
#define MOST_ITEMS 100   /* of a str, bytes or container */
#define MOST_LETTERS 500 /* of a repr */

/* Ints, strings and containers that are too long to be shown; NULL, perhaps with an exception, for all others. */
static PyObject *shown_by_size(PyObject *object) {
    PyObject *shown = NULL, *type = PyType_GetQualName(Py_TYPE(object));
    if (type != NULL && PyLong_Check(object)) {
        /* the method of int itself: a subclass may have another */
        PyObject *bits = PyObject_CallMethod((PyObject *)&PyLong_Type, "bit_length", "(O)", object);
        const long n = bits != NULL ? PyLong_AsLong(bits) : -1;
        if (n > MOST_BITS)
            shown = PyUnicode_FromFormat("an int of %ld bits", n);
        Py_XDECREF(bits);
    } else if (type != NULL && (PyUnicode_Check(object) || PyBytes_Check(object) || PyByteArray_Check(object) ||
                                PyTuple_Check(object) || PyList_Check(object) || PyDict_Check(object))) {
        const Py_ssize_t n = PyObject_Size(object);
        if (n > MOST_ITEMS)
            shown = PyUnicode_FromFormat("a %U of length %zd", type, n);
    }
    Py_XDECREF(type);
    return shown;
}

PyObject *cattn_shown(PyObject *object) {
    PyObject *shown = shown_by_size(object), *type;
    if (shown == NULL && !PyErr_Occurred())
        shown = PyObject_Repr(object);
    if (shown != NULL && PyUnicode_GetLength(shown) <= MOST_LETTERS)
        return shown;
    if (shown == NULL && (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)))
        return NULL;
    PyErr_Clear();
    Py_XDECREF(shown);
    type = PyType_GetQualName(Py_TYPE(object));
    shown = type != NULL ? PyUnicode_FromFormat("an object of type %U", type) : NULL;
    Py_XDECREF(type);
    return shown;
}

bool cattn_error_value(PyObject *got, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyObject *text = PyUnicode_FromFormatV(format, arguments), *shown = text != NULL ? cattn_shown(got) : NULL;
    va_end(arguments);
    if (shown != NULL)
        PyErr_Format(PyExc_ValueError, "%U, got %U", text, shown);
    Py_XDECREF(text);
    Py_XDECREF(shown);
    return false;
}

/* _shown(object): the object as an error shows it */
PyObject *cattn_py_shown(PyObject *Py_UNUSED(module), PyObject *object) { return cattn_shown(object); }

bool cattn_error_named(const char *name, const char *wanted, PyObject *got) {
    if (!is_about_object())
        return false;
    PyObject *type, *cause, *traceback, *error;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(cause, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    cattn_error_type(name, wanted, got);
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyException_SetCause(error, cause); /* takes the reference */
    PyErr_Restore(type, error, traceback);
    return false;
}

bool cattn_error_count(const char *function, Py_ssize_t got, Py_ssize_t wanted) {
    if (got == wanted)
        return true;
    return cattn_raise(PyExc_TypeError, "%s takes exactly %zd positional arguments, got %zd", function, wanted, got);
}

PyObject *cattn_shape_tuple(int nd, const int64_t *dims) {
    PyObject *tuple = PyTuple_New(nd);
    for (int axis = 0; tuple != NULL && axis < nd; axis++) {
        PyObject *size = PyLong_FromSsize_t((Py_ssize_t)dims[axis]);
        if (size == NULL || PyTuple_SetItem(tuple, axis, size) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

bool cattn_ready(const struct binding_state *state) {
    if (state->ready)
        return true;
    return cattn_raise(PyExc_RuntimeError, "cattn is called before its import is complete, or after its end");
}
