/* args.h -- from Python's arguments to what cattn.h wants: arrays, numbers, masks, outputs, strides.
 *
 * Exact ndarrays of the right type are used as they are; all else goes through cattn._input.arrays once. `name` is the
 * argument's name in messages. Arrays returned are new references.
 */
#ifndef CATTN_ARGS_H
#define CATTN_ARGS_H

#include "binding.h"

/* ---- numbers and flags ---- */
/* A finite real number that is not a bool. */
bool cattn_arg_real(PyObject *object, const char *name, double *value);
/* The argument `scale`, finite in the type that arrays of `type` are computed in. */
bool cattn_arg_scale(PyObject *object, int type, double *value);
/* A number in [0, 1]. */
bool cattn_arg_probability(PyObject *object, const char *name, double *p);
/* An int, a new reference; TypeError for a bool and for what is no integer. */
PyObject *cattn_arg_index(PyObject *object, const char *name);
/* Truth, quick for True and False. */
bool cattn_arg_flag(PyObject *object, const char *name, bool *value);
/* An int (no bool) between two bounds. */
bool cattn_arg_count(PyObject *object, const char *name, int64_t least, int64_t most, int64_t *value);
/* Is `object` the str `interned`? */
bool cattn_arg_is(PyObject *object, PyObject *interned);

/* ---- arrays ---- */
/* float16, bfloat16, float32 or float64, native, aligned, strides in whole elements. */
PyArrayObject *cattn_arg_floats(struct binding_state *state, PyObject *object, const char *name);
/* Bring every array of the list that is not NULL to one type, as NumPy promotes. Returns the type, or -1. */
int cattn_arg_promote(struct binding_state *state, PyArrayObject **arrays, int n);
/* What NumPy's type number of such arrays means to the core. */
enum cattn_dtype cattn_arg_dtype(int type);
enum cattn_storage cattn_arg_storage(int type);
/* NPY_FLOAT or NPY_DOUBLE: what is computed in, and the type of masks, numbers of each head and LSE. */
int cattn_arg_compute_type(int type);

enum cattn_mask_kind {
    CATTN_MASK_ANY,  /* bool, or float in the compute type */
    CATTN_MASK_BIAS, /* float only */
    CATTN_MASK_BOOL  /* bool only */
};
/* A mask or bias that broadcasts to dims; NPY_BOOL, or `type`. */
PyArrayObject *cattn_arg_mask(struct binding_state *state, PyObject *object, const char *name,
                              enum cattn_mask_kind kind, int type, int nd, const npy_intp *dims);
/* UserWarning if a float mask holds nothing but 0 and 1, and at least one 1; stacklevel as that of warnings.warn. */
bool cattn_arg_warn_binary(PyArrayObject *mask, const char *name, int stacklevel);
/* ValueError unless array broadcasts to dims; `meaning` explains the dims. */
bool cattn_arg_broadcasts(PyArrayObject *array, const char *name, int nd, const npy_intp *dims, const char *meaning);

/* ---- outputs ---- */
struct cattn_output {
    PyArrayObject *given; /* the caller's array, or NULL */
    PyArrayObject *array; /* what the core writes: the caller's, a temporary for it, or the new result */
};
struct cattn_output_spec {
    const char *name;
    int type, nd;
    const npy_intp *dims;
    PyArrayObject *const *inputs; /* what the output must not overlap, or goes through a temporary; NULLs are skipped */
    int n_inputs;
    PyArrayObject *in_place; /* the input of this shape and type that may be overwritten, if the strides are the same;
                                or NULL */
};
/* given: None or NULL allocates. */
bool cattn_arg_output(struct binding_state *state, PyObject *given, const struct cattn_output_spec *spec,
                      struct cattn_output *output);
/* ValueError if two of the caller's arrays share memory. */
bool cattn_arg_outputs_apart(struct binding_state *state, const struct cattn_output *a, const char *name_a,
                             const struct cattn_output *b, const char *name_b);
/* Copy a temporary into the caller's array. */
bool cattn_output_finish(struct cattn_output *output);
/* The array that the user gets, a new reference. */
PyObject *cattn_output_result(const struct cattn_output *output);
void cattn_output_clear(struct cattn_output *output);
PyObject *cattn_shape_tuple(int nd, const npy_intp *dims);

/* ---- strides in elements ---- */
enum { CATTN_AXIS_COL = 1, CATTN_AXIS_ROW = 2, CATTN_AXIS_HEAD = 4 };
/* The last axes of `array` are (lead..., head, row, col), as far as `axes` names them. Missing or 1: stride 0. */
void cattn_tensor_from(struct cattn_tensor *tensor, PyArrayObject *array, int n_batch_dims, int axes);
/* For arrays that broadcast to nd dimensions: `col_axis` becomes col, all others lead. nd >= 1. */
void cattn_tensor_rows(struct cattn_tensor *tensor, PyArrayObject *array, int nd, int col_axis);

#endif
