/* shortcuts.h -- the bodies of public functions whose work is C's alone, and what the module keeps of their Python
 * functions. See shortcuts.c.
 */
#ifndef CATTN_SHORTCUTS_H
#define CATTN_SHORTCUTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum cattn_shortcut_name {
    CATTN_ATTENTION,
    CATTN_CAUSAL_ATTENTION,
    CATTN_MASKED_SOFTMAX,
    CATTN_DROPOUT,
    CATTN_N_SHORTCUTS
};

/* The stacklevel, that of warnings.warn, of the caller of a public function. */
enum { CATTN_IN_PLACE_OF_PYTHON = 1, CATTN_BEHIND_PYTHON = 2 };

/* All arguments, in the order of the Python function's parameters. */
typedef PyObject *cattn_body(PyObject *module, PyObject *const *args, int stacklevel);
cattn_body cattn_attention_body, cattn_causal_attention_body, cattn_masked_softmax_body, cattn_dropout_body;

#define CATTN_MOST_PARAMETERS 21
struct cattn_shortcut {
    PyMethodDef method;
    PyObject *function, *text, *names, *defaults; /* owned; NULL before the shortcut is made */
    int n_parameters, n_required, n_positional;
    PyObject *name[CATTN_MOST_PARAMETERS];     /* of names */
    PyObject *fallback[CATTN_MOST_PARAMETERS]; /* of defaults; NULL where an argument is required */
};
/* All but the text. */
void cattn_shortcut_clear(struct cattn_shortcut *shortcut);

PyObject *cattn_py_shortcut(PyObject *module, PyObject *args);

#endif
