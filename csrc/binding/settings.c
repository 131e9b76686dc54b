/* settings.c -- threads, instruction set and path, facts about the build, and the environment's settings. See
 * settings.h.
 */
#include "args.h"

#include <stdlib.h>

/* ---- threads ---- */

PyObject *cattn_py_get_num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyLong_FromLong(cattn_get_num_threads());
}

PyObject *cattn_py_set_num_threads(PyObject *Py_UNUSED(module), PyObject *count) {
    int64_t n = 0;
    if (count != Py_None && !cattn_arg_count(count, "n", 1, INT32_MAX, &n))
        return NULL;
    cattn_set_num_threads((int)n);
    Py_RETURN_NONE;
}

PyObject *cattn_py_override_num_threads(PyObject *Py_UNUSED(module), PyObject *count) {
    int64_t n;
    if (!cattn_arg_count(count, "n", 0, INT32_MAX, &n))
        return NULL;
    return PyLong_FromLong(cattn_override_num_threads((int)n));
}

/* ---- the build, and hooks for tests ---- */

PyObject *cattn_py_isa_list(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < cattn_isa_count(); i++) {
        const struct cattn_isa_info info = cattn_isa_info(i);
        PyObject *entry = Py_BuildValue("{s:s, s:O, s:O, s:O, s:O, s:i, s:i, s:i, s:i}", "name", info.name, "usable",
                                        info.usable ? Py_True : Py_False, "has_fma", info.has_fma ? Py_True : Py_False,
                                        "keeps_arithmetic", cattn_isa_keeps_arithmetic(i) ? Py_True : Py_False,
                                        "test_only", info.test_only ? Py_True : Py_False, "lanes_f32", info.lanes_f32,
                                        "mr", info.mr, "nr", info.nr, "br", info.br);
        if (entry == NULL || PyList_Append(list, entry) < 0)
            Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

/* "scalar, avx2": the names of the tables that this CPU can run, or cannot. */
static PyObject *table_names(bool usable) {
    PyObject *names = PyUnicode_FromString("");
    for (int i = 0; names != NULL && i < cattn_isa_count(); i++) {
        const struct cattn_isa_info info = cattn_isa_info(i);
        if (info.usable != usable)
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
    PyObject *names = table_names(name != NULL);
    if (names != NULL && name != NULL)
        PyErr_Format(exception, "%s is '%s', which this machine or this build cannot run; usable: %U", argument, name,
                     names);
    else if (names != NULL)
        PyErr_Format(exception,
                     "cattn was compiled for a processor that has %U, which this one lacks: compile it here, by `pip "
                     "install --force-reinstall --no-deps --no-cache-dir .` in a clone, or there for every processor, "
                     "with CATTN_TABLES=all before the command",
                     names);
    Py_XDECREF(names);
    return false;
}

PyObject *cattn_py_set_isa(PyObject *Py_UNUSED(module), PyObject *name) {
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

PyObject *cattn_py_get_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyUnicode_FromString(cattn_isa_info(cattn_isa_current()).name);
}

PyObject *cattn_py_set_path(PyObject *module, PyObject *name) {
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

PyObject *cattn_py_has_tiles(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyBool_FromLong(cattn_isa_has_tiles());
}

PyObject *cattn_py_block_keys(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyLong_FromLongLong(cattn_block_keys());
}

PyObject *cattn_py_chunk_keys(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyLong_FromLongLong(cattn_chunk_keys());
}

PyObject *cattn_py_release(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyBool_FromLong(cattn_release());
}

#if defined(__apple_build_version__)
#define COMPILER "Apple Clang " __clang_version__
#elif defined(__clang__)
#define COMPILER "Clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "GCC " __VERSION__
#else
#define COMPILER "unknown"
#endif

PyObject *cattn_py_build_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
#ifdef Py_LIMITED_API
    PyObject *limited = Py_True;
#else
    PyObject *limited = Py_False;
#endif
#ifdef Py_GIL_DISABLED
    PyObject *free_threaded = Py_True;
#else
    PyObject *free_threaded = Py_False;
#endif
#ifdef NDEBUG
    PyObject *assertions = Py_False;
#else
    PyObject *assertions = Py_True;
#endif
    return Py_BuildValue("{s:s, s:s, s:O, s:O, s:O}", "compiler", COMPILER, "python_headers", PY_VERSION, "limited_api",
                         limited, "free_threaded", free_threaded, "assertions", assertions);
}

/* ---- environment ---- */

/* Exact arithmetic is what setup.py asks for and arithmetic.inc.h checks. False: the warning is an error. */
static bool warn_of_arithmetic(void) {
    if (cattn_isa_keeps_arithmetic(cattn_isa_current()))
        return true;
    return PyErr_WarnFormat(
               PyExc_RuntimeWarning, 1,
               "the kernel table '%s' was compiled with flags that change arithmetic, such as -ffast-math: "
               "results may be wrong, and their bits are not those of other builds; build cattn without "
               "such flags",
               cattn_isa_info(cattn_isa_current()).name) == 0;
}

/* Such a table is right on an old processor only. Elsewhere somebody chose it, or the build lacks a better one, and
 * nothing else would show that results differ from other machines. False: the warning is an error. */
static bool warn_of_isa(bool is_chosen) {
    if (!cattn_isa_wastes_fma())
        return true;
    PyObject *names = table_names(true);
    if (names == NULL)
        return false;
    const char *cause = is_chosen ? "CATTN_ISA selects it" : "this build has no better one for this processor";
    const int failed = PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                                        "the kernel table '%s' is in use because %s (usable: %U). It rounds products "
                                        "and sums separately, although this "
                                        "processor has fused multiply-add: it is slower, and the last bits of its "
                                        "results are not those of other tables",
                                        cattn_isa_info(cattn_isa_current()).name, cause, names);
    Py_DECREF(names);
    return failed == 0;
}

bool cattn_read_environment(void) {
    const char *isa = getenv("CATTN_ISA");
    const bool is_chosen = isa != NULL && *isa != '\0';
    if (!select_isa(is_chosen ? isa : NULL, PyExc_ImportError, "CATTN_ISA") || !warn_of_isa(is_chosen) ||
        !warn_of_arithmetic())
        return false;
    const char *threads = getenv("CATTN_NUM_THREADS");
    if (threads == NULL || *threads == '\0' || cattn_is_thread_count(threads))
        return true;
    return cattn_raise(PyExc_ImportError, "CATTN_NUM_THREADS must be a positive integer, got '%s'", threads);
}
