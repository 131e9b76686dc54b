/* binding.h -- what the files of the binding share: Python, NumPy, the core's C API and the state of the module.
 *
 * This directory is the only one that knows Python. Everything here holds the GIL unless it says otherwise. Functions
 * that return bool or a pointer return false or NULL with an exception set.
 */
#ifndef CATTN_BINDING_H
#define CATTN_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_ARRAY_UNIQUE_SYMBOL cattn_numpy_api
#ifndef CATTN_IMPORT_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <stdatomic.h>
#include <string.h>

#include "cattn.h"
#include "shortcuts.h"

struct binding_state {
    /* functions of cattn._input.arrays, for everything that the fast path in C does not take as it is */
    PyObject *as_array, *as_mask, *as_bias, *as_bool, *as_integers, *as_head_numbers, *cast, *shares_memory,
        *refuse_masked, *draw_seed;
    /* classes of cattn._input.types */
    PyObject *attention_output, *causal_alignment_warning;
    PyObject *urandom;      /* os.urandom */
    PyObject *eight;        /* the number of bytes it is asked for */
    PyObject *torch_stream; /* the type TorchStream of py_torch_random.c */
    /* interned names that arguments are compared with */
    PyObject *upper_left, *lower_right, *neg_inf, *renormalize;
    /* without a GIL any thread may write these while others read */
    atomic_int bfloat16; /* type number of ml_dtypes.bfloat16, -1 before the first such array */
    atomic_int path;     /* a test hook: CATTN_PATH_AUTO unless a test forces one */
    struct cattn_shortcut shortcuts[CATTN_N_SHORTCUTS];
};

static inline struct binding_state *cattn_state(PyObject *module) {
    return (struct binding_state *)PyModule_GetState(module);
}

/* Below this many multiply-adds, or elements of a softmax or dropout, a call keeps the GIL (a few microseconds). */
#define CATTN_GIL_WORK 2e5
#define CATTN_GIL_ELEMENTS 20000

/* Release the GIL and let `poll` look for signals; `thread` must outlive the call into the core. */
void cattn_gil_release(struct cattn_poll *poll, PyThreadState **thread);
/* Calls into the core, with the GIL if that is `brief`, else without it; `poll` is that of `params`. */
enum cattn_status cattn_compute(bool brief, struct cattn_poll *poll, enum cattn_status (*compute)(const void *),
                                const void *params);

PyObject *cattn_py_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_causal_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_explain(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_varlen_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_attention_weights(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_causal_mask(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_softmax(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_masked_softmax(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_softmax_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_dropout(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_check_out(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_store(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* py_random.c: what `rng` says. check: without drawing; seed: the 64-bit key, drawn where one has to be. */
bool cattn_rng_check(PyObject *rng);
bool cattn_rng_seed(struct binding_state *state, PyObject *rng, uint64_t *seed);
/* p in [0, 1] -> spec, but for the seed or the torch stream */
bool cattn_dropout_spec_from(PyObject *p, const char *name, struct cattn_dropout_spec *spec);

/* py_torch_random.c: the type TorchStream, and how a call draws from one. begin: waits until no other thread draws, and
 * hands out a copy; end: takes the copy back, or with NULL stays as it was before begin. The GIL may be released in
 * between; begin fails if this thread is drawing already (a signal handler can try). */
PyObject *cattn_torch_type(PyObject *module);
bool cattn_torch_check(const struct binding_state *state, PyObject *rng);
bool cattn_torch_begin(PyObject *stream, struct cattn_torch_random *random);
void cattn_torch_end(PyObject *stream, const struct cattn_torch_random *random);

#endif
