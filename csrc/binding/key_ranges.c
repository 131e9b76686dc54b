/* key_ranges.c -- which keys a query sees: alignment, offset, window, lengths and first keys. See key_ranges.h. */
#include "key_ranges.h"
#include "arrays.h"
#include "error.h"
#include "numbers.h"

/* An int or an int64 array, with all numbers between two bounds. */
static bool parse_integers(struct binding_state *state, PyObject *object, const char *name, int64_t least, int64_t most,
                           int64_t *number, PyArrayObject **numbers) {
    PyObject *found =
        PyObject_CallFunction(state->as_integers, "OsLL", object, name, (long long)least, (long long)most);
    if (found == NULL)
        return false;
    if (PyArray_CheckExact(found)) {
        *numbers = (PyArrayObject *)found;
        return true;
    }
    *number = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return *number != -1 || !PyErr_Occurred();
}

static bool parse_alignment(struct binding_state *state, PyObject *is_causal, struct cattn_range_args *args) {
    if (is_causal == Py_False || is_causal == Py_True) {
        args->is_causal = args->bare = is_causal == Py_True;
    } else if (cattn_arg_is(is_causal, state->upper_left)) {
        args->is_causal = true;
    } else if (cattn_arg_is(is_causal, state->lower_right)) {
        args->is_causal = args->lower_right = true;
    } else if (PyArray_IsScalar(is_causal, Bool)) {
        args->is_causal = args->bare = PyObject_IsTrue(is_causal) > 0;
    } else {
        PyErr_Format(PyExc_ValueError, "is_causal must be False, True, 'upper_left' or 'lower_right', got %R",
                     is_causal);
        return false;
    }
    return true;
}

/* One side of a window: a number of keys. None and -1 mean no bound. */
static bool parse_side(PyObject *object, int64_t *side) {
    if (object == Py_None)
        return true;
    int64_t number;
    if (!cattn_arg_count(object, "window_size", -1, NPY_MAX_INTP, &number))
        return false;
    if (number >= 0)
        *side = number;
    return true;
}

static bool parse_window(PyObject *window_size, struct cattn_range_args *args) {
    args->left = args->right = CATTN_UNBOUNDED;
    if (window_size == Py_None)
        return true;
    if (!PyTuple_Check(window_size) && !PyList_Check(window_size))
        return cattn_error_type("window_size", "(left, right), the keys seen before and after a query's own",
                                window_size);
    PyObject *sides = PySequence_Tuple(window_size);
    if (sides == NULL)
        return false;
    bool parsed = PyTuple_Size(sides) == 2;
    if (!parsed)
        PyErr_Format(PyExc_ValueError, "window_size must be (left, right), got %zd numbers", PyTuple_Size(sides));
    else
        parsed =
            parse_side(PyTuple_GetItem(sides, 0), &args->left) && parse_side(PyTuple_GetItem(sides, 1), &args->right);
    Py_DECREF(sides);
    return parsed;
}

static bool is_window(const struct cattn_range_args *args) {
    return args->left != CATTN_UNBOUNDED || args->right != CATTN_UNBOUNDED;
}

bool cattn_arg_ranges(struct binding_state *state, PyObject *is_causal, PyObject *query_offset, PyObject *window_size,
                      struct cattn_range_args *args) {
    *args = (struct cattn_range_args){0};
    if (!parse_alignment(state, is_causal, args) || !parse_window(window_size, args))
        return false;
    if (query_offset == Py_None) {
        args->bare = args->bare || (!args->is_causal && is_window(args));
        return true;
    }
    args->bare = false;
    if (args->lower_right) {
        PyErr_SetString(PyExc_ValueError, "is_causal='lower_right' sets the offset itself (T_k - T_q); with "
                                          "query_offset use is_causal='upper_left'");
        return false;
    }
    return parse_integers(state, query_offset, "query_offset", -CATTN_MAX_OFFSET, CATTN_MAX_OFFSET, &args->offset,
                          &args->offsets);
}

void cattn_ranges_clear(struct cattn_range_args *args) {
    Py_CLEAR(args->offsets);
    Py_CLEAR(args->query_lengths);
    Py_CLEAR(args->key_lengths);
    Py_CLEAR(args->first_keys);
}

/* The alignment is ambiguous if T_q and T_k differ and no argument gives the position of a query. */
static bool warn_alignment(struct binding_state *state, const struct cattn_range_args *args, npy_intp seqlen_q,
                           npy_intp seqlen_k) {
    if (!args->bare || seqlen_q == seqlen_k)
        return true;
    if (!args->is_causal)
        return PyErr_WarnFormat(state->causal_alignment_warning, 1,
                                "window_size with %zd queries and %zd keys is counted from key i of query i; give "
                                "query_offset=%zd if the last query belongs to the last key, or 0 to silence this "
                                "warning",
                                (Py_ssize_t)seqlen_q, (Py_ssize_t)seqlen_k, (Py_ssize_t)(seqlen_k - seqlen_q)) == 0;
    return PyErr_WarnFormat(state->causal_alignment_warning, 1,
                            "is_causal=True with %zd queries and %zd keys means 'upper_left' (query i sees keys "
                            "j <= i); for 'lower_right' (the last query sees every key) name it; naming either "
                            "silences this warning",
                            (Py_ssize_t)seqlen_q, (Py_ssize_t)seqlen_k) == 0;
}

/* One number for each batch entry, if the argument is an array. */
static bool set_numbers(struct cattn_tensor *tensor, PyArrayObject *numbers, const char *name, int n_batch_dims,
                        const npy_intp *dims) {
    if (numbers == NULL)
        return true;
    if (!cattn_arg_broadcasts(numbers, name, n_batch_dims, dims, "the leading dimensions", ""))
        return false;
    cattn_tensor_from(tensor, numbers, n_batch_dims, 0);
    return true;
}

/* Numbers of queries or keys, 0 .. most. `number` keeps its value if the argument is None. */
static bool parse_counts(struct binding_state *state, PyObject *object, const char *name, npy_intp most,
                         int64_t *number, PyArrayObject **numbers) {
    return object == Py_None || parse_integers(state, object, name, 0, most, number, numbers);
}

bool cattn_ranges_settle(struct binding_state *state, struct cattn_range_args *args,
                         const struct cattn_range_sizes *sizes, struct cattn_ranges *ranges) {
    static const char *const query_name = "query_seq_lengths", *const key_name = "key_value_seq_lengths",
                             *const first_name = "key_value_seq_starts";
    ranges->left = args->left;
    ranges->right = args->is_causal ? 0 : args->right;
    ranges->lower_right = args->lower_right;
    ranges->seqlen_k = sizes->seqlen_k;
    ranges->offset = args->offset;
    ranges->query_length = sizes->seqlen_q;
    ranges->key_length = sizes->seqlen_k;
    ranges->first_key = 0;
    return parse_counts(state, sizes->query_lengths, query_name, sizes->seqlen_q, &ranges->query_length,
                        &args->query_lengths) &&
           parse_counts(state, sizes->key_lengths, key_name, sizes->seqlen_k, &ranges->key_length,
                        &args->key_lengths) &&
           parse_counts(state, sizes->first_keys, first_name, sizes->seqlen_k, &ranges->first_key, &args->first_keys) &&
           set_numbers(&ranges->offsets, args->offsets, "query_offset", sizes->n_batch_dims, sizes->batch) &&
           set_numbers(&ranges->query_lengths, args->query_lengths, query_name, sizes->n_batch_dims, sizes->batch) &&
           set_numbers(&ranges->key_lengths, args->key_lengths, key_name, sizes->n_batch_dims, sizes->batch) &&
           set_numbers(&ranges->first_keys, args->first_keys, first_name, sizes->n_batch_dims, sizes->batch) &&
           warn_alignment(state, args, sizes->seqlen_q, sizes->seqlen_k);
}
