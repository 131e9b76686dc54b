/* module.c -- the module cattn._cattn: its definition and its state.
 *
 * Multi-phase initialisation. The public functions are not listed here: `_register` makes them (see signature.c), and
 * `_register_helpers` hands over the Python functions that they call.
 */
#define CATTN_IMPORT_NUMPY
#include "engine.h"
#include "xla/call.h"

/* ---- state ---- */

static bool make_own_objects(struct binding_state *state, PyObject *module) {
    PyObject *os = PyImport_ImportModule("os");
    state->urandom = os != NULL ? PyObject_GetAttrString(os, "urandom") : NULL;
    Py_XDECREF(os);
    return state->urandom != NULL && (state->eight = PyLong_FromLong(8)) != NULL &&
           (state->upper_left = PyUnicode_InternFromString("upper_left")) != NULL &&
           (state->lower_right = PyUnicode_InternFromString("lower_right")) != NULL &&
           (state->heads_first = PyUnicode_InternFromString("bhtd")) != NULL &&
           (state->tokens_first = PyUnicode_InternFromString("bthd")) != NULL &&
           /* not interned: no caller can pass it */
           (state->unnamed_corner = PyUnicode_FromString("lower right, unnamed")) != NULL &&
           (state->bits = PyUnicode_InternFromString("_bits")) != NULL &&
           (state->scale = PyUnicode_InternFromString("scale")) != NULL &&
           (state->blocks = PyUnicode_InternFromString("blocks")) != NULL &&
           (state->size = PyUnicode_InternFromString("size")) != NULL &&
           (state->exchange_api = PyUnicode_InternFromString("__dlpack_c_exchange_api__")) != NULL &&
           (state->untyped_storage = PyUnicode_InternFromString("untyped_storage")) != NULL &&
           (state->storage_offset = PyUnicode_InternFromString("storage_offset")) != NULL &&
           (state->silu = PyUnicode_InternFromString("silu")) != NULL &&
           (state->torch_stream = cattn_torch_type(module)) != NULL;
}

static bool set_helper(PyObject *helpers, const char *name, PyObject **field) {
    PyObject *helper = PyDict_GetItemString(helpers, name);
    if (helper == NULL)
        return cattn_raise(PyExc_TypeError, "_register_helpers() lacks %s", name);
    PyObject *old = *field;
    *field = Py_NewRef(helper);
    Py_XDECREF(old);
    return true;
}

/* _register_helpers(**helpers): exactly the names of HELPERS. Until then the entry points raise RuntimeError. */
static PyObject *register_helpers(PyObject *module, PyObject *args, PyObject *helpers) {
    struct binding_state *state = cattn_state(module);
    Py_ssize_t n = 0;
#define COUNT(name) n++;
    HELPERS(COUNT)
#undef COUNT
    if (PyTuple_Size(args) != 0 || helpers == NULL || PyDict_Size(helpers) > n) {
        PyErr_Format(PyExc_TypeError, "_register_helpers() takes %zd helpers by their names", n);
        return NULL;
    }
#define SET(name)                                                                                                      \
    if (!set_helper(helpers, #name, &state->name))                                                                     \
        return NULL;
    HELPERS(SET)
#undef SET
    state->ready = true;
    Py_RETURN_NONE;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    const struct binding_state *state = cattn_state(module);
#define VISIT(name) Py_VISIT(state->name);
    HELPERS(VISIT)
    OWN_OBJECTS(VISIT)
#undef VISIT
    for (int i = 0; i < CATTN_N_ENTRY_POINTS; i++) {
        Py_VISIT(state->signatures[i].function);
        Py_VISIT(state->signatures[i].names);
        Py_VISIT(state->signatures[i].defaults);
    }
    return 0;
}

static int module_clear(PyObject *module) {
    struct binding_state *state = cattn_state(module);
    state->ready = false;
#define CLEAR(name) Py_CLEAR(state->name);
    HELPERS(CLEAR)
    OWN_OBJECTS(CLEAR)
#undef CLEAR
    for (int i = 0; i < CATTN_N_ENTRY_POINTS; i++)
        cattn_signature_clear(&state->signatures[i]);
    return 0;
}

static void module_free(void *module) {
    module_clear((PyObject *)module);
    /* only now: builtins point to the text, and they keep the module alive */
    for (int i = 0; i < CATTN_N_ENTRY_POINTS; i++)
        Py_CLEAR(cattn_state(module)->signatures[i].text);
}

/* ---- initialisation ---- */

/* NumPy's table, the thread pool and the settings belong to the process: its first interpreter to import cattn owns
 * them. */
static bool claim_process(void) {
    static _Atomic int64_t claimed = -1;
    int64_t owner = -1;
    const int64_t self = PyInterpreterState_GetID(PyInterpreterState_Get());
    if (self >= 0 && (atomic_compare_exchange_strong(&claimed, &owner, self) || owner == self))
        return true;
    return self >= 0 && cattn_raise(PyExc_ImportError, "cattn is in use in another interpreter of this process");
}

static int module_exec(PyObject *module) {
    struct binding_state *state = cattn_state(module);
    state->bfloat16 = -1;
    state->path = CATTN_PATH_AUTO;
    if (!claim_process() || PyArray_ImportNumPyAPI() < 0 || !cattn_read_environment())
        return -1;
    return cattn_prepare_functions() && make_own_objects(state, module) ? 0 : -1;
}

/* ---- the functions that XLA calls, for Python to register ---- */

static bool add_target(PyObject *targets, const char *name, struct xla_error *(*handler)(struct xla_frame *)) {
    PyObject *capsule = PyCapsule_New((void *)handler, NULL, NULL);
    const bool added = capsule != NULL && PyDict_SetItemString(targets, name, capsule) == 0;
    Py_XDECREF(capsule);
    return added;
}

static PyObject *xla_targets(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
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

static PyObject *xla_operands(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return Py_BuildValue("(NN)", names(0, XLA_N_ARGUMENTS), names(XLA_N_ARGUMENTS, XLA_N_OPERANDS));
}

static PyObject *xla_is_known(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyBool_FromLong(cattn_xla_is_known());
}

/* ---- the definition ---- */

#define PRIVATE_ENTRY(name, ...) CATTN_FASTCALL("_" #name, cattn_py_##name),
static PyMethodDef methods[] = {
    {"_register", cattn_py_register, METH_VARARGS, NULL},
    {"_arguments", cattn_py_arguments, METH_O, NULL},
    {"_functions", cattn_py_functions, METH_NOARGS, NULL},
    {"_operands", cattn_py_operands, METH_NOARGS, NULL},
    {"_numbers", cattn_py_numbers, METH_NOARGS, NULL},
    {"_register_helpers", (PyCFunction)(void (*)(void))register_helpers, METH_VARARGS | METH_KEYWORDS, NULL},
    CATTN_FASTCALL("_store", cattn_py_store),
    CATTN_FASTCALL("_tensor_of_array", cattn_py_tensor_of_array),
    {"_array_of_tensor", cattn_py_array_of_tensor, METH_O, NULL},
    {"_are_scales", cattn_py_are_scales, METH_O, NULL},
    {"_default_scale", cattn_py_default_scale, METH_O, NULL},
    {"_probability", cattn_py_probability, METH_VARARGS, NULL},
    {"_shown", cattn_py_shown, METH_O, NULL},
    {"_in_default_mode", cattn_py_in_default_mode, METH_VARARGS, NULL},
    {"get_num_threads", cattn_py_get_num_threads, METH_NOARGS, NULL},
    {"set_num_threads", cattn_py_set_num_threads, METH_O, NULL},
    {"_override_num_threads", cattn_py_override_num_threads, METH_O, NULL},
    {"_isa_list", cattn_py_isa_list, METH_NOARGS, NULL},
    {"_set_isa", cattn_py_set_isa, METH_O, NULL},
    {"_get_isa", cattn_py_get_isa, METH_NOARGS, NULL},
    {"_set_path", cattn_py_set_path, METH_O, NULL},
    {"_has_tiles", cattn_py_has_tiles, METH_NOARGS, NULL},
    {"_block_keys", cattn_py_block_keys, METH_NOARGS, NULL},
    {"_chunk_keys", cattn_py_chunk_keys, METH_NOARGS, NULL},
    {"_build_info", cattn_py_build_info, METH_NOARGS, NULL},
    {"_release", cattn_py_release, METH_NOARGS, NULL},
    {"_xla_targets", xla_targets, METH_NOARGS, NULL},
    {"_xla_operands", xla_operands, METH_NOARGS, NULL},
    {"_xla_is_known", xla_is_known, METH_NOARGS, NULL},
    PRIVATE_FUNCTIONS(PRIVATE_ENTRY){NULL, NULL, 0, NULL},
};

/* The stable ABI of 3.11 has no name for the later slots: they exist only in builds for one Python. Without a GIL the
 * module is safe: the state is written at import, but for two atomic numbers; one thread at a time draws from a
 * TorchStream; the core knows no Python. */
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
