/* binding.h -- shared by all files of the binding: Python, NumPy, the core's C API and the state of the module.
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

/* The public functions that C implements. signature.c binds their arguments by the tables of attention_args.h and
 * rowwise_args.h: a table of arguments is an X-macro, TABLE(A): A(name) A(name) ... */
enum cattn_entry_point {
    CATTN_SCALED_DOT_PRODUCT_ATTENTION,
    CATTN_CAUSAL_ATTENTION,
    CATTN_ATTENTION_WEIGHTS,
    CATTN_VARLEN_ATTENTION,
    CATTN_ATTENTION_BACKWARD,
    CATTN_ATTENTION_JVP,
    CATTN_ATTENTION_JVP_BACKWARD,
    CATTN_VARLEN_ATTENTION_BACKWARD,
    CATTN_ATTENTION_STATISTICS,
    CATTN_VARLEN_ATTENTION_STATISTICS,
    CATTN_EXPLAIN,
    CATTN_SOFTMAX,
    CATTN_MASKED_SOFTMAX,
    CATTN_DROPOUT,
    CATTN_CAUSAL_MASK,
    CATTN_ROPE,
    CATTN_RMS_NORM,
    CATTN_LINEAR,
    CATTN_LAYER_NORM,
    CATTN_GELU_FORWARD,
    CATTN_GELU_BACKWARD,
    CATTN_SILU_FORWARD,
    CATTN_SILU_BACKWARD,
    CATTN_N_ENTRY_POINTS
};

/* Room for the longest table, and for new options. */
#define CATTN_MOST_SLOTS 40

struct cattn_signature {
    PyMethodDef method;
    PyObject *function, *text, *names, *defaults; /* owned; NULL before the function is registered */
    int n_parameters, n_required, n_positional;
    PyObject *name[CATTN_MOST_SLOTS];     /* of each parameter, from names */
    unsigned char slot[CATTN_MOST_SLOTS]; /* of each parameter, in the table */
    PyObject *initial[CATTN_MOST_SLOTS];  /* of each slot: the default, None, or NULL where an argument is required */
};

/* Functions and classes of the package that C calls. C imports none of them: the package passes them to
 * `_register_helpers` by these names. */
#define HELPERS(H)                                                                                                     \
    /* cattn._input.arrays: for arguments that the fast path in C cannot use as they are */                            \
    H(as_array)                                                                                                        \
    H(as_mask)                                                                                                         \
    H(as_bias)                                                                                                         \
    H(as_bool)                                                                                                         \
    H(read_integers)                                                                                                   \
    H(as_integers)                                                                                                     \
    H(as_key_indices)                                                                                                  \
    H(as_head_numbers)                                                                                                 \
    H(as_positions)                                                                                                    \
    H(dequantized)                                                                                                     \
    H(quantized_class)                                                                                                 \
    H(block_mask_class)                                                                                                \
    H(cast)                                                                                                            \
    H(shares_memory)                                                                                                   \
    H(refuse_masked)                                                                                                   \
    H(draw_seed)                                                                                                       \
    H(as_rope_scaling)                                                                                                 \
    /* cattn._input.types */                                                                                           \
    H(attention_output)                                                                                                \
    H(attention_gradients)                                                                                             \
    H(attention_tangents)                                                                                              \
    H(make_statistics)                                                                                                 \
    H(causal_alignment_warning)                                                                                        \
    /* cattn.functional: the steps of an entry point before and after its call of the core */                          \
    H(softmax_axes)                                                                                                    \
    H(masked_softmax_axes)                                                                                             \
    H(sum_gradients)                                                                                                   \
    H(make_explanation)

/* Objects of the state that C makes itself: os.urandom and its argument, the type of torch_stream.c, and interned
 * strings: words that arguments are compared with, and names of attributes. */
#define OWN_OBJECTS(O)                                                                                                 \
    O(urandom)                                                                                                         \
    O(eight)                                                                                                           \
    O(torch_stream)                                                                                                    \
    O(upper_left)                                                                                                      \
    O(lower_right)                                                                                                     \
    O(heads_first)                                                                                                     \
    O(tokens_first)                                                                                                    \
    O(unnamed_corner)                                                                                                  \
    O(neg_inf)                                                                                                         \
    O(renormalize)                                                                                                     \
    O(none)                                                                                                            \
    O(bits)                                                                                                            \
    O(scale)                                                                                                           \
    O(blocks)                                                                                                          \
    O(size)                                                                                                            \
    O(tanh)

struct binding_state {
#define FIELD(name) PyObject *name;
    HELPERS(FIELD)
    OWN_OBJECTS(FIELD)
#undef FIELD
    bool ready; /* the helpers are registered, and the module is not cleared yet */
    /* without a GIL any thread may write these while others read */
    atomic_int bfloat16; /* type number of ml_dtypes.bfloat16, -1 before the first such array */
    atomic_int path;     /* a test hook: CATTN_PATH_AUTO unless a test forces one */
    struct cattn_signature signatures[CATTN_N_ENTRY_POINTS];
};

static inline struct binding_state *cattn_state(PyObject *module) {
    return (struct binding_state *)PyModule_GetState(module);
}

/* The bodies of the public functions. args has one object for each slot of the function's table, borrowed: the
 * argument, its default, or None where the public function has no such parameter. A body may put other objects there.
 */
typedef PyObject *cattn_body(struct binding_state *state, PyObject **args);
cattn_body cattn_body_scaled_dot_product_attention, cattn_body_causal_attention, cattn_body_attention_weights,
    cattn_body_varlen_attention, cattn_body_attention_backward, cattn_body_attention_jvp,
    cattn_body_attention_jvp_backward, cattn_body_varlen_attention_backward, cattn_body_attention_statistics,
    cattn_body_varlen_attention_statistics, cattn_body_explain, cattn_body_softmax, cattn_body_masked_softmax,
    cattn_body_dropout, cattn_body_causal_mask, cattn_body_rope, cattn_body_rms_norm, cattn_body_layer_norm,
    cattn_body_gelu, cattn_body_gelu_backward, cattn_body_silu, cattn_body_silu_backward, cattn_body_linear;

/* PyMethodDef entries. The cast by way of void(*)(void) is the documented one for METH_FASTCALL. */
#define CATTN_FASTCALL(name, function) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL}

/* Functions of the module that belong to the files of the same subject. */
PyObject *cattn_py_softmax_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_rms_norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_product(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_layer_norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_store(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
PyObject *cattn_py_are_scales(PyObject *module, PyObject *object);
PyObject *cattn_py_probability(PyObject *module, PyObject *args);
PyObject *cattn_py_shown(PyObject *module, PyObject *object);
PyObject *cattn_py_in_default_mode(PyObject *module, PyObject *args);

#endif
