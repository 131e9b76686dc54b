/* error.c -- exceptions: from the core's status, and messages that several files need. See error.h. */
#include "error.h"

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
    PyErr_Format(PyExc_SystemError, "unknown status %d", (int)status);
    return false;
}

bool cattn_error_type(const char *name, const char *wanted, PyObject *got) {
    PyObject *type = PyType_GetQualName(Py_TYPE(got));
    if (type != NULL)
        PyErr_Format(PyExc_TypeError, "%s must be %s, got %U", name, wanted, type);
    Py_XDECREF(type);
    return false;
}

bool cattn_error_count(const char *function, Py_ssize_t got, Py_ssize_t wanted) {
    if (got == wanted)
        return true;
    PyErr_Format(PyExc_TypeError, "%s takes exactly %zd positional arguments, got %zd", function, wanted, got);
    return false;
}

PyObject *cattn_shape_tuple(int nd, const npy_intp *dims) {
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
    PyErr_SetString(PyExc_RuntimeError, "cattn is called before its import is complete, or after its end");
    return false;
}
