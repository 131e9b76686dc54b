/* signature.c -- public functions that are builtins: they bind arguments by the signature of their Python function.
 *
 * Python takes a quarter of a call over six tokens to look up the defaults of fifteen keyword-only arguments. So a
 * public function whose work is done in C is written in Python with a docstring for its body, and `_register` replaces
 * it by a builtin that knows its parameters and defaults. If the arguments do not bind, it calls the Python function,
 * which raises the TypeError.
 */
#include "attention_call.h"

/* ---- a call ---- */

/* The index of a parameter, at least `first`, or -1. `guess` is where to begin. */
static int find_parameter(const struct cattn_signature *signature, PyObject *name, int first, int guess) {
    /* Names in a program's text are interned, and so are the parameters' names: nearly always the pointers match. Most
     * calls name them in the order of the signature. */
    for (int i = guess; i < signature->n_parameters; i++)
        if (signature->name[i] == name)
            return i;
    for (int i = first; i < guess; i++)
        if (signature->name[i] == name)
            return i;
    for (int i = first; i < signature->n_parameters; i++)
        if (PyUnicode_Compare(signature->name[i], name) == 0)
            return i;
    return -1;
}

/* False: the arguments do not bind. No exception is set. */
static bool bind(const struct cattn_signature *signature, PyObject *const *args, Py_ssize_t n_args, PyObject *keywords,
                 PyObject **bound) {
    const Py_ssize_t n_keywords = keywords != NULL ? PyTuple_Size(keywords) : 0;
    if (n_args > signature->n_positional)
        return false;
    memcpy(bound, signature->initial, sizeof signature->initial); /* whole: a constant size is fastest */
    for (Py_ssize_t i = 0; i < n_args; i++)
        bound[signature->slot[i]] = args[i];
    for (int k = 0, i = (int)n_args - 1; k < n_keywords; k++) {
        /* A name that was given by position already is not found: Python reports it. */
        i = find_parameter(signature, PyTuple_GetItem(keywords, k), (int)n_args, i + 1);
        if (i < 0)
            return false;
        bound[signature->slot[i]] = args[n_args + k];
    }
    for (int i = (int)n_args; i < signature->n_required; i++)
        if (bound[signature->slot[i]] == NULL)
            return false;
    return true;
}

/* Calls the Python function for the TypeError that it raises. Always NULL. */
static PyObject *refuse(PyObject *function, PyObject *const *args, Py_ssize_t n_args, PyObject *keywords) {
    PyObject *positional = PyTuple_New(n_args), *named = PyDict_New(), *result = NULL;
    bool packed = positional != NULL && named != NULL;
    for (Py_ssize_t i = 0; packed && i < n_args; i++)
        packed = PyTuple_SetItem(positional, i, Py_NewRef(args[i])) == 0;
    const Py_ssize_t n_keywords = keywords != NULL ? PyTuple_Size(keywords) : 0;
    for (Py_ssize_t k = 0; packed && k < n_keywords; k++)
        packed = PyDict_SetItem(named, PyTuple_GetItem(keywords, k), args[n_args + k]) == 0;
    if (packed)
        result = PyObject_Call(function, positional, named);
    Py_XDECREF(positional);
    Py_XDECREF(named);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "arguments bind in Python, but not in C");
    }
    return NULL;
}

static PyObject *call(PyObject *module, int which, cattn_body *body, PyObject *const *args, Py_ssize_t n_args,
                      PyObject *keywords) {
    struct binding_state *state = cattn_state(module);
    const struct cattn_signature *signature = &state->signatures[which];
    PyObject *bound[CATTN_MOST_SLOTS];
    if (!state->ready && !cattn_ready(state))
        return NULL;
    if (!bind(signature, args, n_args, keywords, bound))
        return refuse(signature->function, args, n_args, keywords);
    return body(state, bound);
}

/* A builtin receives the module, but not itself: each needs its own C function to know which it is. */
#define BUILTIN(name, ...)                                                                                             \
    static PyObject *name##_builtin(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *keywords) {  \
        return call(module, ENTRY_##name, cattn_body_##name, args, n_args, keywords);                                  \
    }
ENTRY_POINTS(BUILTIN)

/* ---- registration ---- */

/* What a table knows of an argument. */
struct argument {
    const char *name, *role, *kind, *axes, *fits; /* NULL where there is no such thing */
};
#define ARRAY_ROW(name, axes, kind, fits, ...) {#name, "ARRAY", #kind, axes, #fits},
#define NUMBER_ROW(...) NUMBER_ROW_OF(__VA_ARGS__, ) /* an option of attention has no place here */
#define NUMBER_ROW_OF(name, kind, ...) {#name, "NUMBER", #kind, NULL, NULL},
#define WORD_ROW(name, words, ...) {#name, "WORD", NULL, words, NULL},
#define WISH_ROW(name) {#name, "WISH", NULL, NULL, NULL},
#define RESULT_ROW(name, axes, kind, where, ...) {#name, "RESULT", #kind, axes, #where},
#define RETURNS_ROW(name, axes, kind, ...) {#name, "RETURNS", #kind, axes, NULL},
#define ARGUMENTS(...) ARGUMENTS_OF(__VA_ARGS__, )
#define ARGUMENTS_OF(name, TABLE, ...)                                                                                 \
    static const struct argument name##_arguments[] = {                                                                \
        TABLE(ARRAY_ROW, NUMBER_ROW, WORD_ROW, WISH_ROW, RESULT_ROW, NO_SLOT)};                                        \
    /* what is no argument, and an empty row, because most tables have none */                                         \
    static const struct argument name##_returned[] = {                                                                 \
        TABLE(NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, RETURNS_ROW){0}};                                           \
    _Static_assert(sizeof name##_arguments / sizeof *name##_arguments <= CATTN_MOST_SLOTS,                             \
                   "enough room for each table");
ENTRY_POINTS(ARGUMENTS)

/* The cast by way of void(*)(void) is the documented one. */
#define ENTRY_POINT(name, ...)                                                                                         \
    {{#name, (PyCFunction)(void (*)(void))name##_builtin, METH_FASTCALL | METH_KEYWORDS, NULL},                        \
     name##_arguments,                                                                                                 \
     sizeof name##_arguments / sizeof *name##_arguments,                                                               \
     name##_returned},
static const struct {
    PyMethodDef method;
    const struct argument *arguments;
    int n_slots;
    const struct argument *returned; /* up to a row without a name */
} KNOWN[CATTN_N_ENTRY_POINTS] = {ENTRY_POINTS(ENTRY_POINT)};

/* The index in KNOWN, or -1 with an exception. */
static int find_known(PyObject *name) {
    if (PyUnicode_Check(name))
        for (int i = 0; i < CATTN_N_ENTRY_POINTS; i++)
            if (PyUnicode_CompareWithASCIIString(name, KNOWN[i].method.ml_name) == 0)
                return i;
    PyErr_Format(PyExc_ValueError, "there is no body in C for a function %S", name);
    return -1;
}

/* _arguments(name): the names in the table of a function, in the order of their slots. */
PyObject *cattn_py_arguments(PyObject *Py_UNUSED(module), PyObject *name) {
    const int which = find_known(name);
    PyObject *names = which >= 0 ? PyTuple_New(KNOWN[which].n_slots) : NULL;
    for (int i = 0; names != NULL && i < KNOWN[which].n_slots; i++) {
        PyObject *slot = PyUnicode_FromString(KNOWN[which].arguments[i].name);
        if (slot == NULL || PyTuple_SetItem(names, i, slot) < 0)
            Py_CLEAR(names);
    }
    return names;
}

/* Appends an object to a list and releases it. False with an exception. */
static bool append(PyObject *list, PyObject *object) {
    const bool appended = object != NULL && PyList_Append(list, object) == 0;
    Py_XDECREF(object);
    return appended;
}

static bool append_row(PyObject *rows, const struct argument *row) {
    return append(rows, Py_BuildValue("(sszzz)", row->name, row->role, row->kind, row->axes, row->fits));
}

/* The rows of a function: (name, role, kind, axes, fits) of each argument, and of each result that is none. */
static PyObject *rows_of(int which) {
    PyObject *rows = PyList_New(0);
    for (int i = 0; rows != NULL && i < KNOWN[which].n_slots; i++)
        if (!append_row(rows, &KNOWN[which].arguments[i]))
            Py_CLEAR(rows);
    for (const struct argument *row = KNOWN[which].returned; rows != NULL && row->name != NULL; row++)
        if (!append_row(rows, row))
            Py_CLEAR(rows);
    return rows;
}

/* _functions(): the public functions that C implements, and the rows of the arguments of each. */
PyObject *cattn_py_functions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    PyObject *functions = PyDict_New();
    for (int i = 0; functions != NULL && i < CATTN_N_ENTRY_POINTS; i++) {
        PyObject *rows = rows_of(i);
        if (rows == NULL || PyDict_SetItemString(functions, KNOWN[i].method.ml_name, rows) < 0)
            Py_CLEAR(functions);
        Py_XDECREF(rows);
    }
    return functions;
}

/* The names of the calls whose bits are set. */
static PyObject *calls_of(const struct cattn_operand_row *row) {
    PyObject *calls = PyList_New(0);
    for (int i = 0; calls != NULL && i < N_CALL_KINDS; i++)
        if ((row->calls >> i & 1) && !append(calls, PyUnicode_FromString(cattn_call_kinds[i])))
            Py_CLEAR(calls);
    return calls;
}

/* _operands(): the rows of call/operands.h, (name, axes, kind, fits, calls). */
PyObject *cattn_py_operands(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    PyObject *rows = PyList_New(0);
    for (int i = 0; rows != NULL && i < N_ATTENTION_OPERANDS; i++) {
        const struct cattn_operand_row *row = &cattn_operands[i];
        if (!append(rows, Py_BuildValue("(ssssN)", row->name, row->axes, cattn_operand_kinds[row->kind],
                                        row->fits == EXACTLY ? "EXACTLY" : "BROADCASTS", calls_of(row))))
            Py_CLEAR(rows);
    }
    return rows;
}

/* _numbers(): (name, kind) of each number. */
PyObject *cattn_py_numbers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    PyObject *rows = PyList_New(0);
    for (int i = 0; rows != NULL && i < N_ATTENTION_NUMBERS; i++) {
        const struct cattn_number_row *row = &cattn_numbers[i];
        if (!append(rows, Py_BuildValue("(ss)", row->name, cattn_number_kinds[row->kind])))
            Py_CLEAR(rows);
    }
    return rows;
}

/* The slot of a parameter, or -1 with an exception. */
static int find_slot(int which, PyObject *name) {
    if (!PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "names must be str");
        return -1;
    }
    for (int i = 0; i < KNOWN[which].n_slots; i++)
        if (PyUnicode_CompareWithASCIIString(name, KNOWN[which].arguments[i].name) == 0)
            return i;
    PyErr_Format(PyExc_ValueError, "%s has a parameter %U that its table in C lacks", KNOWN[which].method.ml_name,
                 name);
    return -1;
}

static void release(struct cattn_signature *signature) {
    cattn_signature_clear(signature);
    Py_CLEAR(signature->text);
}

/* Returns false with an exception. All references in it are borrowed until the caller takes its own. */
static bool read_signature(int which, PyObject *names, PyObject *defaults, struct cattn_signature *signature) {
    const Py_ssize_t n = PyTuple_Size(names), n_defaults = PyTuple_Size(defaults);
    const int n_positional = signature->n_positional;
    if (n > CATTN_MOST_SLOTS || n_defaults > n || n_positional < n - n_defaults || n_positional > n)
        return cattn_raise(PyExc_ValueError, "%s: %zd parameters do not fit %zd defaults and %d positional parameters",
                           KNOWN[which].method.ml_name, n, n_defaults, n_positional);
    signature->n_parameters = (int)n;
    signature->n_required = (int)(n - n_defaults);
    for (int slot = 0; slot < CATTN_MOST_SLOTS; slot++)
        signature->initial[slot] = Py_None; /* every option reads None as "not given" */
    for (int i = 0; i < n; i++) {
        const int slot = find_slot(which, PyTuple_GetItem(names, i));
        if (slot < 0)
            return false;
        signature->slot[i] = (unsigned char)slot;
        signature->name[i] = PyTuple_GetItem(names, i);
        signature->initial[slot] =
            i < signature->n_required ? NULL : PyTuple_GetItem(defaults, i - (Py_ssize_t)signature->n_required);
    }
    return true;
}

void cattn_signature_clear(struct cattn_signature *signature) {
    Py_CLEAR(signature->function);
    Py_CLEAR(signature->names);
    Py_CLEAR(signature->defaults);
}

/* _register(function, text, names, defaults, n_positional): the builtin in place of `function`. text: signature and
 * documentation, as in a PyMethodDef; names: of all parameters; defaults: of the last parameters. */
PyObject *cattn_py_register(PyObject *module, PyObject *args) {
    PyObject *function, *text, *names, *defaults;
    int n_positional;
    if (!PyArg_ParseTuple(args, "OUO!O!i:_register", &function, &text, &PyTuple_Type, &names, &PyTuple_Type, &defaults,
                          &n_positional))
        return NULL;
    const char *doc = PyUnicode_AsUTF8AndSize(text, NULL);
    PyObject *name = doc != NULL ? PyObject_GetAttrString(function, "__name__") : NULL;
    PyObject *module_name = name != NULL ? PyObject_GetAttrString(function, "__module__") : NULL, *result = NULL;
    const int which = module_name != NULL ? find_known(name) : -1;
    struct cattn_signature made = {.n_positional = n_positional};
    if (which >= 0 && read_signature(which, names, defaults, &made)) {
        made.method = KNOWN[which].method;
        made.method.ml_doc = doc;
        made.function = Py_NewRef(function);
        made.text = Py_NewRef(text);
        made.names = Py_NewRef(names);
        made.defaults = Py_NewRef(defaults);
        struct cattn_signature *signature = &cattn_state(module)->signatures[which];
        struct cattn_signature old = *signature;
        *signature = made;
        release(&old);
        result = PyCFunction_NewEx(&signature->method, module, module_name);
    }
    Py_XDECREF(name);
    Py_XDECREF(module_name);
    return result;
}
