/* module.c -- the module cattn._cattn: its functions, its state, threads and test hooks, and what the environment asks.
 *
 * Multi-phase initialisation. Public functions with defaults and docstrings live in Python; the ones here take a fixed
 * number of positional arguments. Some become public functions themselves: see shortcuts.c.
 */
#define CATTN_IMPORT_NUMPY
#include "args.h"
#include "error.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "../core/cpu_features.h"

/* ---- the GIL ---- */

static bool poll_signals(void *context) {
    PyThreadState **thread = context;
    PyEval_RestoreThread(*thread);
    const bool stop = PyErr_CheckSignals() < 0;
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

/* ---- for what Python computes ---- */

/* _probability(object, name): a float in [0, 1], by the rule of every dropout */
static PyObject *probability(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *object;
    const char *name;
    double p;
    if (!PyArg_ParseTuple(args, "Os:_probability", &object, &name) || !cattn_arg_probability(object, name, &p))
        return NULL;
    return PyFloat_FromDouble(p);
}

/* _in_default_mode(function, args, kwargs): the call, where NumPy rounds as the kernels do */
static PyObject *in_default_mode(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *function, *positional, *keywords;
    if (!PyArg_ParseTuple(args, "OO!O!:_in_default_mode", &function, &PyTuple_Type, &positional, &PyDict_Type,
                          &keywords))
        return NULL;
    const unsigned mode = cattn_fp_enter();
    PyObject *result = PyObject_Call(function, positional, keywords);
    cattn_fp_leave(mode);
    return result;
}

/* ---- threads ---- */

static PyObject *get_num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyLong_FromLong(cattn_get_num_threads());
}

static PyObject *set_num_threads(PyObject *Py_UNUSED(module), PyObject *count) {
    int64_t n = 0;
    if (count != Py_None && !cattn_arg_count(count, "n", 1, INT32_MAX, &n))
        return NULL;
    cattn_set_num_threads((int)n);
    Py_RETURN_NONE;
}

static PyObject *override_num_threads(PyObject *Py_UNUSED(module), PyObject *count) {
    int64_t n;
    if (!cattn_arg_count(count, "n", 0, INT32_MAX, &n))
        return NULL;
    return PyLong_FromLong(cattn_override_num_threads((int)n));
}

/* ---- what was built, and hooks for tests ---- */

static PyObject *isa_list(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < cattn_isa_count(); i++) {
        const struct cattn_isa_info info = cattn_isa_info(i);
        PyObject *entry = Py_BuildValue("{s:s, s:O, s:O, s:O, s:i, s:i, s:i, s:i}", "name", info.name, "usable",
                                        info.usable ? Py_True : Py_False, "has_fma", info.has_fma ? Py_True : Py_False,
                                        "test_only", info.test_only ? Py_True : Py_False, "lanes_f32", info.lanes_f32,
                                        "mr", info.mr, "nr", info.nr, "br", info.br);
        if (entry == NULL || PyList_Append(list, entry) < 0)
            Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

/* "avx2, scalar": the names of the tables that this CPU can run. */
static PyObject *usable_names(void) {
    PyObject *names = PyUnicode_FromString("");
    for (int i = 0; names != NULL && i < cattn_isa_count(); i++) {
        const struct cattn_isa_info info = cattn_isa_info(i);
        if (!info.usable)
            continue;
        PyObject *longer = PyUnicode_FromFormat("%U%s%s", names, PyUnicode_GetLength(names) > 0 ? ", " : "", info.name);
        Py_DECREF(names);
        names = longer;
    }
    return names;
}

static bool select_isa(const char *name, PyObject *exception, const char *argument) {
    if (cattn_isa_select(name))
        return true;
    PyObject *names = usable_names();
    if (names != NULL)
        PyErr_Format(exception, "%s is '%s', which this machine or this build cannot run; usable: %U", argument,
                     name != NULL ? name : "", names);
    Py_XDECREF(names);
    return false;
}

static PyObject *set_isa(PyObject *Py_UNUSED(module), PyObject *name) {
    const char *text = NULL;
    if (name != Py_None) {
        if (!PyUnicode_Check(name)) {
            cattn_error_type("name", "a str or None", name);
            return NULL;
        }
        text = PyUnicode_AsUTF8AndSize(name, NULL);
        if (text == NULL)
            return NULL;
    }
    if (!select_isa(text, PyExc_ValueError, "name"))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *get_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyUnicode_FromString(cattn_isa_info(cattn_isa_current()).name);
}

static PyObject *set_path(PyObject *module, PyObject *name) {
    static const char *const names[] = {"auto", "tile", "rows", "split", "tiny"};
    static const enum cattn_path paths[] = {CATTN_PATH_AUTO, CATTN_PATH_TILE, CATTN_PATH_ROWS, CATTN_PATH_SPLIT,
                                            CATTN_PATH_TINY};
    for (size_t i = 0; PyUnicode_Check(name) && i < sizeof paths / sizeof *paths; i++) {
        if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0) {
            cattn_state(module)->path = paths[i];
            Py_RETURN_NONE;
        }
    }
    PyErr_Format(PyExc_ValueError, "path must be 'auto', 'tile', 'rows', 'split' or 'tiny', got %R", name);
    return NULL;
}

static PyObject *block_keys(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyLong_FromLongLong(cattn_block_keys());
}

static PyObject *chunk_keys(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyLong_FromLongLong(cattn_chunk_keys());
}

static PyObject *release(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyBool_FromLong(cattn_release());
}

#if defined(__clang__)
#define COMPILER "Clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "GCC " __VERSION__
#elif defined(_MSC_VER)
#define COMPILER "MSVC"
#else
#define COMPILER "unknown"
#endif

static PyObject *build_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
#ifdef Py_LIMITED_API
    PyObject *limited = Py_True;
#else
    PyObject *limited = Py_False;
#endif
    return Py_BuildValue("{s:s, s:O}", "compiler", COMPILER, "limited_api", limited);
}

/* ---- initialisation ---- */

static bool import_names(struct binding_state *state) {
    const struct {
        PyObject **slot;
        const char *module, *name;
    } wanted[] = {
        {&state->as_array, "cattn._input.arrays", "as_array"},
        {&state->as_mask, "cattn._input.arrays", "as_mask"},
        {&state->as_bias, "cattn._input.arrays", "as_bias"},
        {&state->as_bool, "cattn._input.arrays", "as_bool"},
        {&state->as_integers, "cattn._input.arrays", "as_integers"},
        {&state->as_head_numbers, "cattn._input.arrays", "as_head_numbers"},
        {&state->cast, "cattn._input.arrays", "cast"},
        {&state->shares_memory, "cattn._input.arrays", "shares_memory"},
        {&state->refuse_masked, "cattn._input.arrays", "refuse_masked"},
        {&state->draw_seed, "cattn._input.rng", "draw_seed"},
        {&state->attention_output, "cattn._input.types", "AttentionOutput"},
        {&state->causal_alignment_warning, "cattn._input.types", "CausalAlignmentWarning"},
        {&state->urandom, "os", "urandom"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        PyObject *module = PyImport_ImportModule(wanted[i].module);
        if (module == NULL)
            return false;
        *wanted[i].slot = PyObject_GetAttrString(module, wanted[i].name);
        Py_DECREF(module);
        if (*wanted[i].slot == NULL)
            return false;
    }
    return (state->eight = PyLong_FromLong(8)) != NULL &&
           (state->upper_left = PyUnicode_InternFromString("upper_left")) != NULL &&
           (state->lower_right = PyUnicode_InternFromString("lower_right")) != NULL &&
           (state->neg_inf = PyUnicode_InternFromString("neg_inf")) != NULL &&
           (state->renormalize = PyUnicode_InternFromString("renormalize")) != NULL;
}

/* A wrong setting is an error at import, not a surprise later. */
static bool read_environment(void) {
    const char *isa = getenv("CATTN_ISA");
    if (!select_isa(isa != NULL && *isa != '\0' ? isa : NULL, PyExc_ImportError, "CATTN_ISA"))
        return false;
    const char *threads = getenv("CATTN_NUM_THREADS");
    if (threads == NULL || *threads == '\0' || cattn_is_thread_count(threads))
        return true;
    PyErr_Format(PyExc_ImportError, "CATTN_NUM_THREADS must be a positive integer, got '%s'", threads);
    return false;
}

/* NumPy's table, the thread pool and the settings are the process's: the first interpreter that comes has them. */
static bool claim_process(void) {
    static _Atomic int64_t claimed = -1;
    int64_t owner = -1;
    const int64_t self = PyInterpreterState_GetID(PyInterpreterState_Get());
    if (self >= 0 && (atomic_compare_exchange_strong(&claimed, &owner, self) || owner == self))
        return true;
    if (self >= 0)
        PyErr_SetString(PyExc_ImportError, "cattn is in use in another interpreter of this process");
    return false;
}

static int module_exec(PyObject *module) {
    struct binding_state *state = cattn_state(module);
    if (!claim_process() || PyArray_ImportNumPyAPI() < 0 || !read_environment())
        return -1;
    state->bfloat16 = -1;
    state->path = CATTN_PATH_AUTO;
    state->torch_stream = cattn_torch_type(module);
    return state->torch_stream != NULL && import_names(state) ? 0 : -1; /* the names' modules derive from the type */
}

/* Every object of the state, for traverse and clear. */
#define STATE_OBJECTS(DO)                                                                                              \
    DO(as_array)                                                                                                       \
    DO(as_mask)                                                                                                        \
    DO(as_bias)                                                                                                        \
    DO(as_bool)                                                                                                        \
    DO(as_integers)                                                                                                    \
    DO(as_head_numbers)                                                                                                \
    DO(cast)                                                                                                           \
    DO(shares_memory)                                                                                                  \
    DO(refuse_masked)                                                                                                  \
    DO(draw_seed)                                                                                                      \
    DO(attention_output)                                                                                               \
    DO(causal_alignment_warning)                                                                                       \
    DO(urandom)                                                                                                        \
    DO(eight)                                                                                                          \
    DO(torch_stream)                                                                                                   \
    DO(upper_left)                                                                                                     \
    DO(lower_right)                                                                                                    \
    DO(neg_inf)                                                                                                        \
    DO(renormalize)

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    const struct binding_state *state = cattn_state(module);
#define VISIT(name) Py_VISIT(state->name);
    STATE_OBJECTS(VISIT)
#undef VISIT
    for (int i = 0; i < CATTN_N_SHORTCUTS; i++) {
        Py_VISIT(state->shortcuts[i].function);
        Py_VISIT(state->shortcuts[i].names);
        Py_VISIT(state->shortcuts[i].defaults);
    }
    return 0;
}

static int module_clear(PyObject *module) {
    struct binding_state *state = cattn_state(module);
#define CLEAR(name) Py_CLEAR(state->name);
    STATE_OBJECTS(CLEAR)
#undef CLEAR
    for (int i = 0; i < CATTN_N_SHORTCUTS; i++)
        cattn_shortcut_clear(&state->shortcuts[i]);
    return 0;
}

static void module_free(void *module) {
    module_clear((PyObject *)module);
    for (int i = 0; i < CATTN_N_SHORTCUTS; i++)
        Py_CLEAR(cattn_state(module)->shortcuts[i].text); /* what shortcuts point to, and they hold the module */
}

/* The cast by way of void(*)(void) is the documented one for METH_FASTCALL. */
#define FASTCALL(name, function) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FASTCALL("scaled_dot_product_attention", cattn_py_attention),
    FASTCALL("causal_attention", cattn_py_causal_attention),
    FASTCALL("attention_weights", cattn_py_attention_weights),
    FASTCALL("varlen_attention", cattn_py_varlen_attention),
    FASTCALL("attention_backward", cattn_py_attention_backward),
    FASTCALL("softmax_backward", cattn_py_softmax_backward),
    FASTCALL("explain", cattn_py_explain),
    FASTCALL("causal_mask", cattn_py_causal_mask),
    FASTCALL("softmax", cattn_py_softmax),
    FASTCALL("masked_softmax", cattn_py_masked_softmax),
    FASTCALL("dropout", cattn_py_dropout),
    FASTCALL("_check_out", cattn_py_check_out),
    FASTCALL("_store", cattn_py_store),
    {"_shortcut", cattn_py_shortcut, METH_VARARGS, NULL},
    {"_probability", probability, METH_VARARGS, NULL},
    {"_in_default_mode", in_default_mode, METH_VARARGS, NULL},
    {"get_num_threads", get_num_threads, METH_NOARGS, NULL},
    {"set_num_threads", set_num_threads, METH_O, NULL},
    {"_override_num_threads", override_num_threads, METH_O, NULL},
    {"_isa_list", isa_list, METH_NOARGS, NULL},
    {"_set_isa", set_isa, METH_O, NULL},
    {"_get_isa", get_isa, METH_NOARGS, NULL},
    {"_set_path", set_path, METH_O, NULL},
    {"_block_keys", block_keys, METH_NOARGS, NULL},
    {"_chunk_keys", chunk_keys, METH_NOARGS, NULL},
    {"_build_info", build_info, METH_NOARGS, NULL},
    {"_release", release, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* The stable ABI of 3.11 has no name for the later slots: they exist only in builds for one Python. Without a GIL: the
 * state is written at import, but for two atomic numbers; a TorchStream has its lock; the core knows no Python. */
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#if defined(Py_mod_multiple_interpreters)
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if defined(Py_mod_gil)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "cattn._cattn",
    .m_doc = "The C part of cattn. Private: the public functions are in cattn.",
    .m_size = sizeof(struct binding_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__cattn(void) { return PyModuleDef_Init(&definition); }
