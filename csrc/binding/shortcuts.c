/* shortcuts.c -- public functions whose work is C's alone, each in two forms: with all arguments by position, for the
 * Python function that documents it; and as that function itself, without its frame (see cattn._shortcut).
 *
 * Looking up the defaults of fifteen keyword-only arguments takes Python a quarter of a call over six tokens. A
 * shortcut knows the names and defaults of its Python function. It takes what binds at once; anything else, an error as
 * a rule, goes to the Python function, which binds as Python does.
 */
#include "attention_call.h"
#include "error.h"

/* Which, the body in C, the Python function's name and the number of its parameters. */
#define SHORTCUTS(DO)                                                                                                  \
    DO(CATTN_ATTENTION, attention, "scaled_dot_product_attention", N_ARGS)                                             \
    DO(CATTN_CAUSAL_ATTENTION, causal_attention, "causal_attention", N_ARGS - 1)                                       \
    DO(CATTN_MASKED_SOFTMAX, masked_softmax, "masked_softmax", 7)                                                      \
    DO(CATTN_DROPOUT, dropout, "dropout", 6)
_Static_assert(N_ARGS <= CATTN_MOST_PARAMETERS, "none has more");

/* ---- the two forms ---- */

/* False: these are not arguments that bind at once. Names are compared by address: both are interned, as a rule. */
static bool bind(const struct cattn_shortcut *shortcut, PyObject *const *args, Py_ssize_t n_args, PyObject *keywords,
                 PyObject **bound) {
    const Py_ssize_t n_keywords = keywords != NULL ? PyTuple_Size(keywords) : 0;
    if (n_args > shortcut->n_positional)
        return false;
    memcpy(bound, shortcut->fallback, sizeof shortcut->fallback);
    for (Py_ssize_t i = 0; i < n_args; i++)
        bound[i] = args[i];
    for (Py_ssize_t k = 0; k < n_keywords; k++) {
        PyObject *name = PyTuple_GetItem(keywords, k);
        int i = (int)n_args;
        while (i < shortcut->n_parameters && shortcut->name[i] != name)
            i++;
        if (i == shortcut->n_parameters)
            return false;
        bound[i] = args[n_args + k];
    }
    for (int i = (int)n_args; i < shortcut->n_required; i++)
        if (bound[i] == NULL)
            return false;
    return true;
}

static PyObject *call_python(PyObject *function, PyObject *const *args, Py_ssize_t n_args, PyObject *keywords) {
    if (function == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "cattn is called after its end");
        return NULL;
    }
    PyObject *positional = PyTuple_New(n_args), *named = PyDict_New(), *result = NULL;
    bool packed = positional != NULL && named != NULL;
    for (Py_ssize_t i = 0; packed && i < n_args; i++) {
        Py_INCREF(args[i]);
        packed = PyTuple_SetItem(positional, i, args[i]) == 0;
    }
    for (Py_ssize_t k = 0; packed && keywords != NULL && k < PyTuple_Size(keywords); k++)
        packed = PyDict_SetItem(named, PyTuple_GetItem(keywords, k), args[n_args + k]) == 0;
    if (packed)
        result = PyObject_Call(function, positional, named);
    Py_XDECREF(positional);
    Py_XDECREF(named);
    return result;
}

static PyObject *call_shortcut(const struct cattn_shortcut *shortcut, cattn_body *body, PyObject *module,
                               PyObject *const *args, Py_ssize_t n_args, PyObject *keywords) {
    PyObject *bound[CATTN_MOST_PARAMETERS];
    if (!bind(shortcut, args, n_args, keywords, bound))
        return call_python(shortcut->function, args, n_args, keywords);
    return body(module, bound, CATTN_IN_PLACE_OF_PYTHON);
}

#define BOTH_FORMS(which, body, public_name, n_parameters)                                                             \
    PyObject *cattn_py_##body(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {                            \
        if (!cattn_error_count(public_name, n_args, n_parameters))                                                     \
            return NULL;                                                                                               \
        return cattn_##body##_body(module, args, CATTN_BEHIND_PYTHON);                                                 \
    }                                                                                                                  \
    static PyObject *body##_shortcut(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *keywords) { \
        return call_shortcut(&cattn_state(module)->shortcuts[which], cattn_##body##_body, module, args, n_args,        \
                             keywords);                                                                                \
    }
SHORTCUTS(BOTH_FORMS)

/* ---- making one ---- */

void cattn_shortcut_clear(struct cattn_shortcut *shortcut) {
    shortcut->n_positional = -1; /* nothing binds */
    Py_CLEAR(shortcut->function);
    Py_CLEAR(shortcut->names);
    Py_CLEAR(shortcut->defaults);
}

/* The cast by way of void(*)(void) is the documented one. */
#define METHOD(which, body, public_name, n_parameters)                                                                 \
    [which] = {{public_name, (PyCFunction)(void (*)(void))body##_shortcut, METH_FASTCALL | METH_KEYWORDS, NULL},       \
               n_parameters},
static const struct {
    PyMethodDef method;
    int n_parameters;
} KNOWN[CATTN_N_SHORTCUTS] = {SHORTCUTS(METHOD)};

/* The index in KNOWN of a Python function of this name, or -1. */
static int find_known(const char *name, Py_ssize_t n_parameters) {
    for (int i = 0; i < CATTN_N_SHORTCUTS; i++)
        if (strcmp(KNOWN[i].method.ml_name, name) == 0 && KNOWN[i].n_parameters == n_parameters)
            return i;
    PyErr_Format(PyExc_ValueError, "there is no body in C for a function %s of %zd parameters", name, n_parameters);
    return -1;
}

/* _shortcut(function, text, names, defaults, n_positional): the builtin in place of `function`. text: signature and
 * documentation, as in a PyMethodDef; defaults: those of the last parameters. */
PyObject *cattn_py_shortcut(PyObject *module, PyObject *args) {
    PyObject *function, *text, *names, *defaults;
    int n_positional;
    if (!PyArg_ParseTuple(args, "OUO!O!i:_shortcut", &function, &text, &PyTuple_Type, &names, &PyTuple_Type, &defaults,
                          &n_positional))
        return NULL;
    const char *doc = PyUnicode_AsUTF8AndSize(text, NULL);
    const Py_ssize_t n = PyTuple_Size(names), n_defaults = PyTuple_Size(defaults);
    PyObject *name = PyObject_GetAttrString(function, "__name__"), *result = NULL;
    PyObject *home = name != NULL ? PyObject_GetAttrString(function, "__module__") : NULL;
    const char *own = home != NULL && doc != NULL ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    const int which = own != NULL ? find_known(own, n) : -1;
    if (which < 0)
        goto done;
    if (n_defaults > n || n_positional < n - n_defaults || n_positional > n) {
        PyErr_Format(PyExc_ValueError, "%s has %zd parameters, not %zd defaults and %d by position", own, n, n_defaults,
                     n_positional);
        goto done;
    }
    struct cattn_shortcut *shortcut = &cattn_state(module)->shortcuts[which];
    PyObject *old_text = shortcut->text;
    cattn_shortcut_clear(shortcut);
    shortcut->function = Py_NewRef(function);
    shortcut->text = Py_NewRef(text);
    shortcut->names = Py_NewRef(names);
    shortcut->defaults = Py_NewRef(defaults);
    shortcut->n_parameters = (int)n;
    shortcut->n_required = (int)(n - n_defaults);
    shortcut->n_positional = n_positional;
    for (int i = 0; i < n; i++) {
        shortcut->name[i] = PyTuple_GetItem(names, i);
        shortcut->fallback[i] =
            i < shortcut->n_required ? NULL : PyTuple_GetItem(defaults, i - (Py_ssize_t)shortcut->n_required);
    }
    shortcut->method = KNOWN[which].method;
    shortcut->method.ml_doc = doc;
    Py_XDECREF(old_text);
    result = PyCFunction_NewEx(&shortcut->method, module, home);
done:
    Py_XDECREF(name);
    Py_XDECREF(home);
    return result;
}
