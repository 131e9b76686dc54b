/* check.h -- the laws of attention's arguments in plain C, for every way into the core: NumPy's, XLA's and explain's.
 *
 * Arrays come as struct cattn_array, copied at one moment from the object or buffer that has them: nobody changes these
 * copies, whatever runs between two checks. Functions that return bool return false after they have called `fail`.
 */
#ifndef CATTN_CHECK_H
#define CATTN_CHECK_H

#include "operands.h"

/* ---- errors ---- */

enum cattn_fault { CATTN_WRONG_TYPE, CATTN_WRONG_VALUE };

/* Who asks for a check. */
struct cattn_door {
    void *context;
    void (*fail)(void *context, enum cattn_fault fault, const char *text);
    /* Looks for signals, now and then in long loops: false ends the check, and the error is set. Or NULL. */
    bool (*goes_on)(void *context);
};
/* Always false. */
bool cattn_fail(const struct cattn_door *door, enum cattn_fault fault, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- arrays ---- */

/* XLA has four axes after the batch dimensions. */
#define CATTN_MAX_AXES (CATTN_MAX_BATCH_DIMS + 4)

struct cattn_array {
    const char *name; /* of the argument, in messages */
    char *data;       /* not NULL, even of an empty array */
    char kind;        /* 'b' bool, 'i' and 'u' integers, 'f' real numbers; other letters for other types */
    bool is_swapped;
    int size; /* bytes of an element */
    int nd;
    int64_t dims[CATTN_MAX_AXES], strides[CATTN_MAX_AXES]; /* strides in bytes */
};

/* A shape as Python shows it. */
struct cattn_shape_text {
    char text[CATTN_MAX_AXES * 22 + 4];
};
struct cattn_shape_text cattn_show_shape(int nd, const int64_t *dims);

/* A number of at most so many digits, as printf's %g shows it; or by as few digits as Python shows. Both have a point,
 * whatever decimal sign the program's locale has. */
struct cattn_number_text {
    char text[64];
};
struct cattn_number_text cattn_show_number(double x, int digits);
struct cattn_number_text cattn_show_real(double x, bool is_single);

bool cattn_broadcasts(const struct cattn_array *array, int nd, const int64_t *dims);
/* The array must broadcast to dims; `meaning` explains the dims, and `hint` ends the message. */
bool cattn_check_broadcast(const struct cattn_door *door, const struct cattn_array *array, int nd, const int64_t *dims,
                           const char *meaning, const char *hint);

/* The array must have this shape, the shape of `whose`. */
bool cattn_check_shape(const struct cattn_door *door, const struct cattn_array *array, const char *whose, int nd,
                       const int64_t *dims);
/* A size, counted from the end: 1 if the array has no data, or no such axis. */
static inline int64_t cattn_size_of(const struct cattn_array *array, int back) {
    return array->data != NULL && back <= array->nd ? array->dims[array->nd - back] : 1;
}
/* Fills in the first n_axes sizes of a call of nd axes, to which the sizes of the arrays broadcast. */
bool cattn_check_batch(const struct cattn_door *door, const struct cattn_array *const *arrays, int n_arrays, int nd,
                       int n_axes, int64_t *sizes);
/* The product of sizes; -1: it is too large. */
int64_t cattn_count(int nd, const int64_t *dims);

/* A walk over the elements of an array in C order, in runs of n elements `stride` bytes apart. Elements that a
 * broadcast axis repeats are seen once, unless it is `repeated`. An empty array has one empty run. */
struct cattn_walk {
    char *run;
    int64_t n, stride;
    int nd; /* of the axes that are left, the last axis of the array first */
    int64_t dims[CATTN_MAX_AXES], strides[CATTN_MAX_AXES], index[CATTN_MAX_AXES];
};
void cattn_walk_begin(struct cattn_walk *walk, const struct cattn_array *array, bool repeated);
/* False after the last run. */
bool cattn_walk_next(struct cattn_walk *walk);

/* A view whose last axes are (batch..., head, row, col), as far as `axes` names them. An axis that is missing or has
 * size 1 gets stride 0. */
enum { CATTN_AXIS_COL = 1, CATTN_AXIS_ROW = 2, CATTN_AXIS_HEAD = 4 };
void cattn_view(struct cattn_tensor *tensor, const struct cattn_array *array, int n_batch_dims, int axes);
/* A view of an array that broadcasts to nd dimensions: `col_axis` becomes col, all others are batch axes. nd >= 1. */
void cattn_view_rows(struct cattn_tensor *tensor, const struct cattn_array *array, int nd, int col_axis);

/* Whether all axes but the last one are one axis of rows. Sets its stride in elements, 0 for one row. */
bool cattn_rows_are_even(const struct cattn_array *array, int64_t *row);

/* ---- sizes ---- */

enum cattn_grouping { CATTN_GROUPS_INFERRED, CATTN_GROUPS_FORBIDDEN, CATTN_GROUPS_FORCED };
/* The axes of a call and their sizes. */
struct cattn_shape {
    /* given */
    bool tokens_first; /* arrays of query, key, value and output have (*batch, rows, H, width) */
    bool is_packed;    /* the arrays have (rows, H, width), and are parsed as one batch entry */
    enum cattn_grouping grouping;
    /* found */
    bool has_heads; /* axis -3 of the call is heads */
    int n_batch_dims, nd;
    int64_t kv_heads; /* of key and value, 1 without heads */
    int64_t listed;   /* keys of a row of weights: T_k, or the length of a list of key_indices */
    int64_t n_top;    /* given by the caller: top keys of each query */
    int64_t *dims;    /* memory of the caller; (*batch, [H], T_q, T_k); of packed sequences (1, H, total_q, total_k) */
};
/* For errors about heads and tokens that the arrays would not have with these two axes swapped. */
#define CATTN_LAYOUT_HINT                                                                                              \
    "if the arrays are (..., tokens, heads, head_dim), pass query.swapaxes(-3, -2) and so on, or layout='bthd'"
/* inputs: query, key and value, whose data is NULL if there is none. */
bool cattn_check_sizes(const struct cattn_door *door, const struct cattn_array *inputs, struct cattn_shape *shape,
                       struct cattn_attention_params *params);
/* The core must be able to count rows, elements and bytes, and a dropout its batch entries. */
bool cattn_check_counts(const struct cattn_door *door, const struct cattn_attention_params *params);
bool cattn_check_dropout_batch(const struct cattn_door *door, const struct cattn_attention_params *params);
/* Larger blocks are the same as one block; the core multiplies sizes by numbers of blocks. */
void cattn_set_block_size(struct cattn_attention_params *params, int64_t size);

/* ---- axes ---- */

/* The shape of an array with these axes, in the letters of operands.h, as the caller sees it: with the rows before the
 * heads if tokens_first, and without the batch if the sequences are packed. Returns its number of axes. */
int cattn_axes_shape(const struct cattn_shape *shape, const struct cattn_attention_params *params, const char *axes,
                     int64_t *dims);
/* The view of such an array. One that fits EXACTLY may have a column of its own, which kernels read in place. */
void cattn_axes_view(const struct cattn_shape *shape, const char *axes, enum cattn_fits fits,
                     const struct cattn_array *array, struct cattn_tensor *tensor);

/* ---- linear attention ---- */

enum cattn_linear_input {
    LINEAR_QUERY,
    LINEAR_KEY,
    LINEAR_VALUE,
    LINEAR_DECAY,
    LINEAR_BETA,
    LINEAR_STATE,
    N_LINEAR_INPUTS
};
/* The axes of a call of linear attention, (*batch, [H], T, width), and the shapes of its results. */
struct cattn_linear_shape {
    /* given */
    bool tokens_first;   /* tokens lie before heads, in the results, too */
    int64_t n_sequences; /* packed sequences, which the batch of the states is; -1: they are not packed */
    /* found */
    int nd, n_batch_dims; /* n_batch_dims: of the arrays with tokens */
    int axes;             /* of query, for cattn_view */
    int state_nd;
    int64_t dims[CATTN_MAX_AXES];       /* of the output, with its heads before its tokens */
    int64_t state_dims[CATTN_MAX_AXES]; /* of the states */
};
/* The view of an array with the axes of query, in the order that the caller has. */
void cattn_linear_view(const struct cattn_linear_shape *shape, struct cattn_array *array, struct cattn_tensor *view);
/* inputs: NULL where there is none. Fills in the sizes, heads, batch and views of `params`, which is cleared, but for
 * out and state_out. */
bool cattn_check_linear_sizes(const struct cattn_door *door, struct cattn_array *const *inputs,
                              struct cattn_linear_shape *shape, struct cattn_linear_attention_params *params);

/* ---- numbers ---- */

/* What is wrong with a number of a computation in this type, after its name; or NULL. `kind` is of enum
 * cattn_number_kind, or of functions.h. */
const char *cattn_number_fault(int kind, double number, enum cattn_dtype dtype);
/* The factor of scores, or of linear attention's output, that nobody gave, whatever rounding the caller has set. */
void cattn_default_scale(const int64_t *width, double *scale);

/* ---- integers ---- */

enum cattn_beyond { CATTN_REFUSED, CATTN_CLIPPED };
/* Copies integers of any type, in the order of a walk, and checks the copies: `beyond` says what happens to a number
 * outside least .. most. */
bool cattn_read_integers(const struct cattn_door *door, const struct cattn_array *array, int64_t least, int64_t most,
                         enum cattn_beyond beyond, int64_t *to);
/* The same of key_indices, each -1 .. n_keys - 1. */
bool cattn_read_key_indices(const struct cattn_door *door, const struct cattn_array *array, int64_t n_keys,
                            int64_t *to);

/* ---- numbers of heads, and scales ---- */

/* Checks slopes or sinks, of float32 or float64, and copies all of them in the type of the computation, in C order:
 * finite numbers stay finite. `to` may be NULL. */
bool cattn_check_heads(const struct cattn_door *door, const struct cattn_array *array, enum cattn_operand_kind kind,
                       enum cattn_dtype dtype, void *to);
/* Whether an array of float32 holds scales only; else *wrong is one that is none. */
bool cattn_are_scales(const struct cattn_array *array, float *wrong);

#endif
