/* xla_targets.c -- the functions that XLA calls, for Python to register. See xla_targets.h. */
#include "xla_targets.h"
#include "xla/call.h"
#include "xla/handlers.h"
#include "xla/metadata.h"

static bool add_target(PyObject *targets, const char *name, cattn_xla_handler *handler) {
    PyObject *capsule = PyCapsule_New((void *)handler, NULL, NULL);
    const bool added = capsule != NULL && PyDict_SetItemString(targets, name, capsule) == 0;
    Py_XDECREF(capsule);
    return added;
}

PyObject *cattn_py_xla_targets(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    PyObject *targets = PyDict_New();
    if (targets != NULL &&
        (!add_target(targets, "forward", cattn_xla_forward) || !add_target(targets, "backward", cattn_xla_backward) ||
         !add_target(targets, "jvp", cattn_xla_jvp) || !add_target(targets, "jvp_backward", cattn_xla_jvp_backward)))
        Py_CLEAR(targets);
    return targets;
}

static PyObject *names(int first, int end) {
    PyObject *list = PyList_New(end - first);
    for (int i = first; list != NULL && i < end; i++) {
        PyObject *name = PyUnicode_FromString(cattn_xla_operands[i]);
        if (name == NULL || PyList_SetItem(list, i - first, name) < 0)
            Py_CLEAR(list);
    }
    return list;
}

PyObject *cattn_py_xla_operands(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return Py_BuildValue("(NN)", names(0, XLA_N_ARGUMENTS), names(XLA_N_ARGUMENTS, XLA_N_OPERANDS));
}

PyObject *cattn_py_xla_is_known(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyBool_FromLong(cattn_xla_is_known());
}
