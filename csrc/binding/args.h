/* args.h -- how arguments are read and results made: errors, numbers, arrays, `rng`, outputs, and running the core.
 *
 * `name` is the argument's name in messages. Arrays returned are new references. Exact ndarrays of the right type are
 * used as they are; all else goes through cattn._input.arrays once.
 */
#ifndef CATTN_ARGS_H
#define CATTN_ARGS_H

#include "binding.h"
#include "torch_random.h"

/* ---- errors ---- */

/* The errors of call/ as exceptions. */
extern const struct cattn_door *const cattn_python;
/* An exception, as PyErr_Format sets it. Always false. */
#define cattn_raise(...) ((void)PyErr_Format(__VA_ARGS__), false)
/* True for CATTN_OK; every other status becomes an exception here and nowhere else. */
bool cattn_error_status(enum cattn_status status);
/* TypeError "<name> must be <wanted>, got <type of got>". Always false. */
bool cattn_error_type(const char *name, const char *wanted, PyObject *got);
/* ValueError "<format>, got <the object>". Always false. */
bool cattn_error_value(PyObject *got, const char *format, ...);
/* An object as an error shows it, a new reference: its repr, or for what is long, or fails to show itself, a few words
 * about it. */
PyObject *cattn_shown(PyObject *object);
/* Replaces an exception raised by the argument's own method with a TypeError that names the argument; the old one
 * becomes its cause. Exceptions of signals, exits, memory and recursion are not about the object, and stay. Always
 * false. */
bool cattn_error_named(const char *name, const char *wanted, PyObject *got);
/* TypeError unless a C entry point got as many arguments as it is declared with. */
bool cattn_error_count(const char *function, Py_ssize_t got, Py_ssize_t wanted);
/* RuntimeError unless the helpers of the package are registered and can be called. */
bool cattn_ready(const struct binding_state *state);
/* A shape as Python shows it, a new reference. */
PyObject *cattn_shape_tuple(int nd, const int64_t *dims);

/* ---- numbers, flags and words ---- */

/* A finite real number that is not a bool. */
bool cattn_arg_real(PyObject *object, const char *name, double *value);
/* The argument `scale`, which must be finite in the compute type of arrays of `type`. */
bool cattn_arg_scale(PyObject *object, int type, double *value);
/* A number in [0, 1]. */
bool cattn_arg_probability(PyObject *object, const char *name, double *p);
/* An int, a new reference. TypeError for a bool, and for anything else that is no integer. */
PyObject *cattn_arg_index(PyObject *object, const char *name);
/* The truth of any object, as Python defines it. */
bool cattn_arg_truth(PyObject *object, const char *name, bool *value);
/* The same, inline for the objects that nearly all calls have: a call of attention has four flags. */
static inline bool cattn_arg_flag(PyObject *object, const char *name, bool *value) {
    *value = object == Py_True;
    return *value || object == Py_False || object == Py_None || cattn_arg_truth(object, name, value);
}
/* True or False, and no other object. */
bool cattn_arg_bool(PyObject *object, const char *name, bool *value);
/* An int (no bool) between two bounds. */
bool cattn_arg_count(PyObject *object, const char *name, int64_t least, int64_t most, int64_t *value);
/* Is it an ndarray with axes that holds integers, in any byte order and layout? */
bool cattn_arg_is_integers(PyObject *object);
/* Is `object` the str `interned`? */
bool cattn_arg_is(PyObject *object, PyObject *interned);

/* ---- arrays ---- */

/* float16, bfloat16, float32 or float64, native, aligned, strides in whole elements. */
PyArrayObject *cattn_arg_floats(struct binding_state *state, PyObject *object, const char *name);
/* Copies all that the checks of call/ read. */
void cattn_freeze(PyArrayObject *array, const char *name, struct cattn_array *frozen);
/* A new array, not cleared or with zeros. */
PyArrayObject *cattn_new_array(int nd, const int64_t *dims, int type);
PyArrayObject *cattn_new_zeros(int nd, const int64_t *dims, int type);
/* A new array that begins at a cache line, in the memory of another one: for states, which are read and written again
 * for every token. The size in bytes plus one cache line fits into Py_ssize_t. */
enum { CATTN_LINE = 64 };
PyArrayObject *cattn_new_at_line(int nd, const int64_t *dims, int type);
/* A new array of int64 for the integers of another one, in the order of a walk: an axis that repeats has size 1. */
PyArrayObject *cattn_new_integers(const struct cattn_array *array);
/* The type that NumPy promotes all arrays of the list to, except NULLs; or -1. `names` is what messages call them. */
int cattn_arg_common_type(const struct binding_state *state, PyArrayObject *const *arrays, int n, const char *names);
/* Converts them to that type and returns it, or -1. */
int cattn_arg_promote(struct binding_state *state, PyArrayObject **arrays, int n, const char *names);
/* ValueError unless an array still has this type and a layout that kernels can read, where Python code may have run
 * since it was taken; `names` as above. */
bool cattn_arg_unchanged(PyArrayObject *array, int type, const char *names);
/* cattn_freeze of such an array; of NULL, the copy has no data. */
bool cattn_freeze_unchanged(PyArrayObject *array, int type, const char *names, const char *name,
                            struct cattn_array *frozen);
/* Replaces such an array by one of a wider type. */
bool cattn_arg_widen(struct binding_state *state, PyArrayObject **array, int type);
/* The array in any other type of attention, also a narrower one; a new reference. */
PyArrayObject *cattn_arg_cast(struct binding_state *state, PyArrayObject *array, const char *name, int type);
/* TypeError for an array of a type that is not converted; `wanted_by` says who has the other one. */
void cattn_arg_wrong_type(PyArrayObject *array, PyObject *given, const char *name, const char *wanted_by, int wanted);
/* Copies the elements of an array to another one of the same shape, piece by piece: signals are handled between two
 * pieces. The two share no memory, or are the same elements. */
bool cattn_copy_into(PyArrayObject *to, PyArrayObject *from);
/* From NumPy's type number of such arrays to the core's types. */
enum cattn_dtype cattn_arg_dtype(int type);
enum cattn_storage cattn_arg_storage(int type);
/* NPY_FLOAT or NPY_DOUBLE: the type of the computation, of masks, of numbers of each head and of lse. */
int cattn_arg_compute_type(int type);

enum cattn_mask_kind {
    CATTN_MASK_ANY,  /* bool, or float in the compute type */
    CATTN_MASK_BIAS, /* float only */
    CATTN_MASK_BOOL  /* bool only */
};
/* A boolean mask of any shape. */
PyArrayObject *cattn_arg_bools(struct binding_state *state, PyObject *object, const char *name);
/* It must broadcast to the shape of the scores. */
bool cattn_arg_mask_fits(const struct cattn_array *mask, enum cattn_mask_kind kind, int nd, const int64_t *dims);
/* A mask or bias that broadcasts to dims. Its type is NPY_BOOL or `type`. */
PyArrayObject *cattn_arg_mask(struct binding_state *state, PyObject *object, const char *name,
                              enum cattn_mask_kind kind, int type, int nd, const int64_t *dims);
/* A boolean mask that broadcasts to dims; `meaning` explains the dims. */
PyArrayObject *cattn_arg_bool_mask(struct binding_state *state, PyObject *object, const char *name, int nd,
                                   const int64_t *dims, const char *meaning);
/* UserWarning if a float mask holds nothing but 0 and 1, and at least one 1. */
bool cattn_arg_warn_binary(PyArrayObject *mask, const char *name);

/* ---- strides in elements ---- */
/* cattn_view of an array. */
void cattn_tensor_from(struct cattn_tensor *tensor, PyArrayObject *array, int n_batch_dims, int axes);

/* ---- lengths and packed sequences ---- */

/* None, an int or an array of ints, 0 .. most, with the axes of the batch. `number` keeps its value if it is None.
 * `numbers` is an own copy that must outlive the call of the core, or NULL. */
bool cattn_arg_counts(struct binding_state *state, PyObject *object, const char *name, int64_t most, int n_batch_dims,
                      const int64_t *batch, int64_t *number, PyArrayObject **numbers, struct cattn_tensor *tensor);

/* The rows of packed sequences. */
struct cattn_edges {
    int64_t *edges;   /* PyMem, or NULL: sequence b has the rows edges[b] .. edges[b + 1] - 1 */
    int64_t *lengths; /* after the edges, in the same memory */
    int64_t n_sequences;
    int64_t longest;
};
/* Copies cumulated lengths of `total` rows, so that nobody else changes them. After an error the caller still owns the
 * memory. */
bool cattn_arg_edges(struct binding_state *state, PyObject *object, const char *name, int64_t total,
                     struct cattn_edges *side);
/* The same of cu_seqlens, which may be None, and which seq_lengths excludes. */
bool cattn_arg_sequences(struct binding_state *state, PyObject *cu_seqlens, PyObject *seq_lengths, int64_t total,
                         struct cattn_edges *edges);

/* ---- quantized arrays ---- */

/* Is it a cattn.Quantized? */
bool cattn_arg_is_quantized(const struct binding_state *state, PyObject *object);
/* Its arrays, new references: one byte an element, of int8 or float8_e4m3fn (which one, `storage` receives), and the
 * scales. Its constructor has checked them. After an error the caller still owns what `array` and `scale` got. */
bool cattn_arg_take_quantized(const struct binding_state *state, PyObject *object, const char *name,
                              PyArrayObject **array, PyArrayObject **scale, enum cattn_storage *storage);
/* ValueError unless a scale broadcasts to the shape of its array. */
bool cattn_check_scale_shape(const struct cattn_array *scale, const struct cattn_array *array);
/* Replaces such an array by its elements times their scales, rounded to float32, as float64. */
bool cattn_arg_dequantize(struct binding_state *state, PyArrayObject **array, const char *name, PyArrayObject *scale,
                          const char *scale_name);

/* ---- compute_dtype ---- */

/* None, bfloat16 as a word or a dtype, or the word bfloat16_tiles. Python code may run, so it comes before the arrays.
 */
bool cattn_arg_compute_dtype(PyObject *object, enum cattn_bf16_products *products);
/* The word for products of bfloat16. */
const char *cattn_compute_dtype_word(enum cattn_bf16_products products);
/* TypeError for products of bfloat16 of arrays of another dtype; `names` is what messages call them. Always false. */
bool cattn_error_not_bfloat16(enum cattn_bf16_products products, const char *names, const char *dtype);
/* Replaces an array of float32 by a copy that is rounded to bfloat16, to nearest even; subnormal numbers become zeros.
 */
bool cattn_arg_round_to_bfloat16(PyArrayObject **array);

/* ---- TorchGenerator ----
 *
 * begin waits until no other thread draws, and hands out a copy of the generator; commit puts the copy back, abort
 * leaves the generator where it was. The GIL may be released in between. begin fails if this thread is drawing already
 * (a signal handler can try), or if the process was forked while another thread was drawing.
 */

PyObject *cattn_torch_type(PyObject *module);
bool cattn_torch_check(const struct binding_state *state, PyObject *rng);
bool cattn_torch_begin(PyObject *stream, struct cattn_torch_random *random);
/* False, and as abort, if a signal handler raises: the call raises then. */
bool cattn_torch_commit(PyObject *stream, const struct cattn_torch_random *random);
void cattn_torch_abort(PyObject *stream);

/* ---- rng and dropout ---- */

/* Checks rng without drawing. */
bool cattn_rng_check(PyObject *rng);
/* A dropout probability, p in [0, 1], to all of `spec` but the seed or the generator. */
bool cattn_dropout_spec_from(PyObject *p, const char *name, struct cattn_dropout_spec *spec);

/* A draw lasts from the last check of a call until its result is complete, so that a call that raises leaves a
 * TorchGenerator where it was: clear it first, begin it where there is dropout, end it in any case. */
struct cattn_draw {
    bool is_torch;    /* bits come from a TorchGenerator; spec->seed is unused */
    PyObject *stream; /* the generator to end, borrowed; or NULL */
    struct cattn_torch_random random;
};
static inline void cattn_draw_clear(struct cattn_draw *draw) {
    draw->is_torch = false;
    draw->stream = NULL;
}
/* Draws the seed, or begins a draw from the TorchGenerator, and puts it into `spec`. */
bool cattn_draw_begin(struct binding_state *state, PyObject *rng, struct cattn_dropout_spec *spec,
                      struct cattn_draw *draw);
/* Advances the TorchGenerator if there is a result. Returns it, or NULL if a signal handler raises now. */
PyObject *cattn_draw_end(struct cattn_draw *draw, PyObject *result);

/* ---- outputs ---- */

struct cattn_output {
    PyArrayObject *given; /* the caller's array, or NULL */
    PyArrayObject *array; /* written by the core: the caller's array, a temporary for it, or a new one */
};
struct cattn_output_spec {
    const char *name;
    int type, nd;
    const int64_t *dims;
    PyArrayObject *const *inputs; /* an output that overlaps one is computed in a temporary; NULLs are skipped */
    int n_inputs;
    PyArrayObject *in_place; /* the input of this shape and type that may be overwritten, if the strides are the same;
                                or NULL */
    bool even_rows;          /* all axes but the last one must be one axis of rows */
};
/* given: None or NULL allocates. */
bool cattn_arg_output(struct binding_state *state, PyObject *given, const struct cattn_output_spec *spec,
                      struct cattn_output *output);
/* The same for a state: a new one begins at a cache line. */
bool cattn_arg_state_out(struct binding_state *state, PyObject *given, const struct cattn_output_spec *spec,
                         struct cattn_output *output);
/* ValueError if two of the caller's arrays share memory. */
bool cattn_arg_outputs_apart(struct binding_state *state, const struct cattn_output *a, const char *name_a,
                             const struct cattn_output *b, const char *name_b);
/* Copies a temporary, if there is one, into the caller's array. */
bool cattn_output_finish(struct cattn_output *output);
/* The array that the user gets, a new reference. */
PyObject *cattn_output_result(const struct cattn_output *output);
void cattn_output_clear(struct cattn_output *output);
/* Copies a finished result into the caller's array, with the checks of every out=; a new reference to it. */
PyObject *cattn_output_store(struct binding_state *state, PyObject *result, PyObject *out);
/* The end of a function with one output: returns it if it is computed, else NULL, and releases all arrays. */
PyObject *cattn_output_end(bool computed, struct cattn_output *output, PyArrayObject *const *inputs, int n_inputs);

/* ---- running the core ---- */

/* Below this many multiply-adds, or elements of a softmax or dropout, a call keeps the GIL (a few microseconds). */
#define CATTN_GIL_WORK 2e5
#define CATTN_GIL_ELEMENTS 20000

/* Runs pending signal handlers, as PyErr_CheckSignals does. False with the exception that one of them raised. */
bool cattn_check_signals(void);
/* Releases the GIL and lets `poll` look for signals; `thread` must outlive the call into the core. */
void cattn_gil_release(struct cattn_poll *poll, PyThreadState **thread);
/* Calls into the core, with the GIL if the call is `brief`, else without it; `poll` is the member of `params`. */
enum cattn_status cattn_compute(bool brief, struct cattn_poll *poll, enum cattn_status (*compute)(const void *),
                                const void *params);

#endif
