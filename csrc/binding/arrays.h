/* arrays.h -- arguments that are arrays, and their strides in elements as the core takes them.
 *
 * Exact ndarrays of the right type are used as they are; all else goes through cattn._input.arrays once. `name` is the
 * argument's name in messages. Arrays returned are new references.
 */
#ifndef CATTN_ARRAYS_H
#define CATTN_ARRAYS_H

#include "binding.h"

/* float16, bfloat16, float32 or float64, native, aligned, strides in whole elements. */
PyArrayObject *cattn_arg_floats(struct binding_state *state, PyObject *object, const char *name);
/* The type that NumPy promotes all arrays of the list to, except NULLs; or -1. `names` is what messages call them. */
int cattn_arg_common_type(const struct binding_state *state, PyArrayObject *const *arrays, int n, const char *names);
/* Converts them to that type and returns it, or -1. */
int cattn_arg_promote(struct binding_state *state, PyArrayObject **arrays, int n, const char *names);
/* ValueError unless an array still has this type and a layout that kernels can read. Arrays are checked again where
 * Python code may have run since they were taken, right before their shapes and strides are read; `names` as above. */
bool cattn_arg_unchanged(PyArrayObject *array, int type, const char *names);
/* helper(object, name, "f"), a function of the package whose result must be an array that kernels can read. */
PyArrayObject *cattn_arg_helped(PyObject *helper, PyObject *object, const char *name);
/* Replaces such an array by one of a wider type. */
bool cattn_arg_widen(struct binding_state *state, PyArrayObject **array, int type);
/* TypeError for an array of a type that is not converted; `wanted_by` says who has the other one. */
void cattn_arg_wrong_type(PyArrayObject *array, PyObject *given, const char *name, const char *wanted_by, int wanted);
/* A size, counted from the last axis, which is 1; 1 if the array has no such axis. */
static inline npy_intp cattn_size_from_end(PyArrayObject *array, int back) {
    const int nd = PyArray_NDIM(array);
    return back <= nd ? PyArray_DIM(array, nd - back) : 1;
}
/* Copies the sizes. An array without axes may have no list of them, and memcpy takes no NULL. */
static inline void cattn_take_dims(npy_intp *dims, PyArrayObject *array) {
    for (int axis = 0; axis < PyArray_NDIM(array); axis++)
        dims[axis] = PyArray_DIM(array, axis);
}
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
/* A mask or bias that broadcasts to dims. Its type is NPY_BOOL or `type`. */
PyArrayObject *cattn_arg_mask(struct binding_state *state, PyObject *object, const char *name,
                              enum cattn_mask_kind kind, int type, int nd, const npy_intp *dims);
/* A boolean mask that broadcasts to dims; `meaning` explains the dims. */
PyArrayObject *cattn_arg_bool_mask(struct binding_state *state, PyObject *object, const char *name, int nd,
                                   const npy_intp *dims, const char *meaning);
/* UserWarning if a float mask holds nothing but 0 and 1, and at least one 1. */
bool cattn_arg_warn_binary(PyArrayObject *mask, const char *name);
/* ValueError unless the array has this shape, the shape of `whose`. */
bool cattn_check_shape(PyArrayObject *array, const char *name, const char *whose, int nd, const npy_intp *dims);
/* ValueError unless array broadcasts to dims; `meaning` explains the dims, and `hint` ends the message. */
bool cattn_arg_broadcasts(PyArrayObject *array, const char *name, int nd, const npy_intp *dims, const char *meaning,
                          const char *hint);

/* A walk over the elements of an array, in runs of n elements `stride` bytes apart. Elements that a broadcast axis
 * repeats are seen once. An empty array has one empty run. */
struct cattn_walk {
    const char *run;
    npy_intp n, stride;
    int nd; /* of the axes that are left, the last axis of the array first */
    npy_intp dims[NPY_MAXDIMS], strides[NPY_MAXDIMS], index[NPY_MAXDIMS];
};
void cattn_walk_begin(struct cattn_walk *walk, PyArrayObject *array);
/* False after the last run. */
bool cattn_walk_next(struct cattn_walk *walk);

/* ---- strides in elements ---- */
enum { CATTN_AXIS_COL = 1, CATTN_AXIS_ROW = 2, CATTN_AXIS_HEAD = 4 };
/* The last axes of `array` are (batch..., head, row, col), as far as `axes` names them. An axis that is missing or has
 * size 1 gets stride 0. */
void cattn_tensor_from(struct cattn_tensor *tensor, PyArrayObject *array, int n_batch_dims, int axes);
/* For arrays that broadcast to nd dimensions: `col_axis` becomes col, all others are batch axes. nd >= 1. */
void cattn_tensor_rows(struct cattn_tensor *tensor, PyArrayObject *array, int nd, int col_axis);

#endif
