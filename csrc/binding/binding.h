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

#include "call/functions.h"

/* The public functions that C implements, and the table of the arguments of each, as in call/functions.h: of attention
 * in attention_call.h. signature.c binds the arguments by them. */
#define ENTRY_POINTS(E)                                                                                                \
    E(scaled_dot_product_attention, ATTENTION_ARGUMENTS)                                                               \
    E(causal_attention, ATTENTION_ARGUMENTS)                                                                           \
    E(attention_weights, WEIGHTS_ARGUMENTS)                                                                            \
    E(varlen_attention, VARLEN_ARGUMENTS)                                                                              \
    E(attention_backward, BACKWARD_ARGUMENTS)                                                                          \
    E(attention_jvp, JVP_ARGUMENTS)                                                                                    \
    E(attention_jvp_backward, JVP_BACKWARD_ARGUMENTS)                                                                  \
    E(varlen_attention_backward, VARLEN_BACKWARD_ARGUMENTS)                                                            \
    E(attention_statistics, STATISTICS_ARGUMENTS)                                                                      \
    E(varlen_attention_statistics, VARLEN_STATISTICS_ARGUMENTS)                                                        \
    E(choose_keys, CHOICE_ARGUMENTS)                                                                                   \
    E(explain, ATTENTION_ARGUMENTS)                                                                                    \
    E(causal_mask, CAUSAL_MASK_ARGUMENTS)                                                                              \
    FUNCTIONS(E)

#define ENTRY_POINT_INDEX(name, ...) ENTRY_##name,
enum { ENTRY_POINTS(ENTRY_POINT_INDEX) CATTN_N_ENTRY_POINTS };

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
    H(read_key_indices)                                                                                                \
    H(as_positions)                                                                                                    \
    H(dequantized)                                                                                                     \
    H(quantized_class)                                                                                                 \
    H(block_mask_class)                                                                                                \
    H(cast)                                                                                                            \
    H(rounded)                                                                                                         \
    H(shares_memory)                                                                                                   \
    H(warn_of_memory)                                                                                                  \
    H(refuse_masked)                                                                                                   \
    H(draw_seed)                                                                                                       \
    H(as_rope_scaling)                                                                                                 \
    /* cattn._input.types */                                                                                           \
    H(attention_output)                                                                                                \
    H(attention_gradients)                                                                                             \
    H(attention_tangents)                                                                                              \
    H(linear_attention_output)                                                                                         \
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
    O(bits)                                                                                                            \
    O(scale)                                                                                                           \
    O(blocks)                                                                                                          \
    O(size)                                                                                                            \
    O(exchange_api)                                                                                                    \
    O(untyped_storage)                                                                                                 \
    O(storage_offset)                                                                                                  \
    O(silu)

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
#define ENTRY_POINT_BODY(name, ...) cattn_body cattn_body_##name;
ENTRY_POINTS(ENTRY_POINT_BODY)

/* PyMethodDef entries. The cast by way of void(*)(void) is the documented one for METH_FASTCALL. */
#define CATTN_FASTCALL(name, function) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL}

/* The `_cattn._name` functions: a row of the method table each. */
typedef PyObject *cattn_method(PyObject *module, PyObject *argument);
typedef PyObject *cattn_fast_method(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
#define PRIVATE_METHOD(name, ...) cattn_fast_method cattn_py_##name;
PRIVATE_FUNCTIONS(PRIVATE_METHOD)
cattn_fast_method cattn_py_store, cattn_py_tensor_of_array;
cattn_method cattn_py_array_of_tensor, cattn_py_are_scales, cattn_py_default_scale, cattn_py_probability,
    cattn_py_shown, cattn_py_in_default_mode, cattn_py_get_num_threads, cattn_py_set_num_threads,
    cattn_py_override_num_threads, cattn_py_isa_list, cattn_py_set_isa, cattn_py_get_isa, cattn_py_set_path,
    cattn_py_has_tiles, cattn_py_block_keys, cattn_py_chunk_keys, cattn_py_build_info, cattn_py_release,
    cattn_py_register, cattn_py_arguments, cattn_py_functions, cattn_py_operands, cattn_py_numbers;

/* Reads CATTN_ISA and CATTN_NUM_THREADS. ImportError: a wrong setting must not be a surprise later. */
bool cattn_read_environment(void);
/* Releases all but the text, to which a builtin may still point. */
void cattn_signature_clear(struct cattn_signature *signature);

#endif
