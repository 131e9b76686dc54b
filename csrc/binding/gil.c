/* gil.c -- how the binding runs the core: with or without the GIL, watching signals, in the default floating mode. */
#include "args.h"
#include "fp_mode.h"

/* Handlers run on the C stack, on top of the call that polls. A handler may call cattn, which polls again: a periodic
 * handler that is slower than its timer would nest until the stack ends (about 40 KB a level). Deeper than this,
 * signals stay pending; the interpreter runs them later. */
#define MOST_NESTED 16

bool cattn_check_signals(void) {
    static _Thread_local int depth;
    if (depth >= MOST_NESTED)
        return true;
    depth++;
    const bool passed = PyErr_CheckSignals() == 0;
    depth--;
    return passed;
}

static bool poll_signals(void *context) {
    PyThreadState **thread = context;
    PyEval_RestoreThread(*thread);
    const bool stop = !cattn_check_signals();
    *thread = PyEval_SaveThread();
    return stop;
}

void cattn_gil_release(struct cattn_poll *poll, PyThreadState **thread) {
    poll->stop = poll_signals;
    poll->context = thread;
    *thread = PyEval_SaveThread();
}

enum cattn_status cattn_compute(bool brief, struct cattn_poll *poll, enum cattn_status (*compute)(const void *),
                                const void *params) {
    poll->stop = NULL;
    poll->context = NULL;
    if (brief)
        return compute(params);
    PyThreadState *thread;
    cattn_gil_release(poll, &thread);
    const enum cattn_status status = compute(params);
    PyEval_RestoreThread(thread);
    return status;
}

/* _in_default_mode(function, args, kwargs): the call, where NumPy rounds as the kernels do */
PyObject *cattn_py_in_default_mode(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *function, *positional, *keywords;
    if (!PyArg_ParseTuple(args, "OO!O!:_in_default_mode", &function, &PyTuple_Type, &positional, &PyDict_Type,
                          &keywords))
        return NULL;
    const unsigned mode = cattn_fp_enter();
    PyObject *result = PyObject_Call(function, positional, keywords);
    cattn_fp_leave(mode);
    return result;
}
