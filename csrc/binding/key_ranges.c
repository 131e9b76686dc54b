/* key_ranges.c -- which keys a query sees: alignment, offset, window, lengths and first keys.
 *
 * The arguments are checked before the sizes of the call are known, so it has two steps: parse, then settle.
 */
#include "attention_call.h"
#include "engine.h"

/* An int between two bounds, or an array of integers of any type, whose elements are not looked at: it may be of any
 * size, and its shape is checked first. */
static bool take_integers(struct binding_state *state, PyObject *object, const char *name, int64_t least, int64_t most,
                          int64_t *number, PyArrayObject **numbers) {
    const bool plain = PyLong_CheckExact(object) || cattn_arg_is_integers(object);
    PyObject *found = plain ? Py_NewRef(object) : PyObject_CallFunction(state->read_integers, "Os", object, name);
    if (found == NULL)
        return false;
    if (PyArray_CheckExact(found)) {
        *numbers = (PyArrayObject *)found;
        return true;
    }
    int overflow;
    const long long n = PyLong_AsLongLongAndOverflow(found, &overflow);
    const bool failed = n == -1 && PyErr_Occurred() != NULL, fits = !failed && !overflow && n >= least && n <= most;
    if (fits)
        *number = n;
    else if (!failed)
        cattn_error_value(found, "%s must be between %lld and %lld", name, (long long)least, (long long)most);
    Py_DECREF(found);
    return fits;
}

/* One number for each batch entry, if there is an array: replaces it by an int64 array that nobody else changes, with
 * all numbers between two bounds. */
static bool settle_numbers(PyArrayObject **numbers, const char *name, int64_t least, int64_t most, int n_batch_dims,
                           const int64_t *batch, struct cattn_tensor *tensor) {
    struct cattn_array given;
    if (*numbers == NULL)
        return true;
    cattn_freeze(*numbers, name, &given);
    if (!cattn_check_broadcast(cattn_python, &given, n_batch_dims, batch, "the leading dimensions", ""))
        return false;
    PyArrayObject *own = cattn_new_integers(&given);
    if (own == NULL || !cattn_read_integers(cattn_python, &given, least, most, CATTN_REFUSED, PyArray_DATA(own))) {
        Py_XDECREF((PyObject *)own);
        return false;
    }
    Py_DECREF((PyObject *)*numbers);
    *numbers = own;
    cattn_tensor_from(tensor, own, n_batch_dims, 0);
    return true;
}

/* The corner that a wrong word means, or NULL. */
static const char *corner_of(PyObject *word) {
    PyObject *lower = PyUnicode_Check(word) ? PyObject_CallMethod(word, "lower", NULL) : NULL;
    const char *text = lower != NULL ? PyUnicode_AsUTF8AndSize(lower, NULL) : NULL;
    const char *corner = NULL;
    if (text != NULL && (strstr(text, "right") != NULL) != (strstr(text, "left") != NULL))
        corner = strstr(text, "right") != NULL ? "lower_right" : "upper_left";
    Py_XDECREF(lower);
    PyErr_Clear();
    return corner;
}

static bool error_corner(PyObject *word) {
    const char *corner = corner_of(word);
    if (corner == NULL)
        return cattn_error_value(word, "is_causal must be False, True, 'upper_left' or 'lower_right'");
    return cattn_raise(PyExc_ValueError,
                       "is_causal must be False, True, 'upper_left' or 'lower_right', got %R: did you mean '%s'?", word,
                       corner);
}

static bool parse_alignment(struct binding_state *state, PyObject *is_causal, struct cattn_range_args *args) {
    if (is_causal == Py_False || is_causal == Py_True) {
        args->is_causal = args->bare = is_causal == Py_True;
    } else if (is_causal == state->unnamed_corner) { /* of causal_attention */
        args->is_causal = args->lower_right = args->bare = true;
    } else if (cattn_arg_is(is_causal, state->upper_left)) {
        args->is_causal = true;
    } else if (cattn_arg_is(is_causal, state->lower_right)) {
        args->is_causal = args->lower_right = true;
    } else if (PyArray_IsScalar(is_causal, Bool)) {
        args->is_causal = args->bare = PyObject_IsTrue(is_causal) > 0;
    } else {
        return error_corner(is_causal);
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
    const bool is_number = PyLong_Check(window_size) && !PyBool_Check(window_size);
    const long long keys = is_number ? PyLong_AsLongLong(window_size) : 0;
    PyErr_Clear(); /* a number beyond all others */
    if (keys > 0)
        return cattn_raise(PyExc_TypeError,
                           "window_size must be (left, right), the keys seen before and after a query's own, got int: "
                           "pass (%lld, 0), or cattn.sliding_window(%lld)",
                           keys - 1, keys);
    if (!PyTuple_Check(window_size) && !PyList_Check(window_size))
        return cattn_error_type("window_size",
                                "(left, right), the keys seen before and after a query's own: (n - 1, 0) for n keys "
                                "up to the query's own",
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
    if (args->lower_right)
        return cattn_raise(PyExc_ValueError, "is_causal='lower_right' sets the offset itself (T_k - T_q); with "
                                             "query_offset use is_causal='upper_left'");
    return take_integers(state, query_offset, "query_offset", -CATTN_MAX_OFFSET, CATTN_MAX_OFFSET, &args->offset,
                         &args->offsets);
}

void cattn_ranges_clear(struct cattn_range_args *args) {
    Py_CLEAR(args->offsets);
    Py_CLEAR(args->query_lengths);
    Py_CLEAR(args->key_lengths);
    Py_CLEAR(args->first_keys);
}

/* The alignment is ambiguous if T_q and T_k differ and no argument gives the position of a query. causal_attention,
 * whose last query sees every key, leaves the first queries without keys if there are more of them. */
static bool warn_alignment(struct binding_state *state, const struct cattn_range_args *args,
                           const struct cattn_range_sizes *sizes) {
    const int64_t seqlen_q = sizes->seqlen_q, seqlen_k = sizes->seqlen_k;
    if (!args->bare || seqlen_q == seqlen_k)
        return true;
    if (args->lower_right) {
        if (seqlen_q < seqlen_k || sizes->query_lengths != Py_None || sizes->key_lengths != Py_None)
            return true;
        if (seqlen_k == 0)
            return PyErr_WarnFormat(state->causal_alignment_warning, 1,
                                    "there are %zd queries and no keys: their rows are 0. Append the keys and values "
                                    "of the queries to a cattn.KVCache first; give query_offset=0 to silence this "
                                    "warning",
                                    (Py_ssize_t)seqlen_q) == 0;
        return PyErr_WarnFormat(state->causal_alignment_warning, 1,
                                "with %zd queries and %zd keys the last query stands at the last key, and the first "
                                "%zd queries see no key: their rows are 0. Are query and key swapped? Give "
                                "query_offset=%zd to silence this warning",
                                (Py_ssize_t)seqlen_q, (Py_ssize_t)seqlen_k, (Py_ssize_t)(seqlen_q - seqlen_k),
                                (Py_ssize_t)(seqlen_k - seqlen_q)) == 0;
    }
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

bool cattn_arg_counts(struct binding_state *state, PyObject *object, const char *name, int64_t most, int n_batch_dims,
                      const int64_t *batch, int64_t *number, PyArrayObject **numbers, struct cattn_tensor *tensor) {
    return object == Py_None || (take_integers(state, object, name, 0, most, number, numbers) &&
                                 settle_numbers(numbers, name, 0, most, n_batch_dims, batch, tensor));
}

/* The counts of one side of attention. */
static bool parse_counts(struct binding_state *state, PyObject *object, const char *name, int64_t most,
                         const struct cattn_range_sizes *sizes, int64_t *number, PyArrayObject **numbers,
                         struct cattn_tensor *tensor) {
    return cattn_arg_counts(state, object, name, most, sizes->n_batch_dims, sizes->batch, number, numbers, tensor);
}

bool cattn_ranges_settle(struct binding_state *state, struct cattn_range_args *args,
                         const struct cattn_range_sizes *sizes, struct cattn_ranges *ranges) {
    ranges->left = args->left;
    ranges->right = args->is_causal ? 0 : args->right;
    ranges->lower_right = args->lower_right;
    ranges->seqlen_k = sizes->seqlen_k;
    ranges->offset = args->offset;
    ranges->query_length = sizes->seqlen_q;
    ranges->key_length = sizes->seqlen_k;
    ranges->first_key = 0;
    return parse_counts(state, sizes->query_lengths, "query_seq_lengths", sizes->seqlen_q, sizes, &ranges->query_length,
                        &args->query_lengths, &ranges->query_lengths) &&
           parse_counts(state, sizes->key_lengths, "key_value_seq_lengths", sizes->seqlen_k, sizes, &ranges->key_length,
                        &args->key_lengths, &ranges->key_lengths) &&
           parse_counts(state, sizes->first_keys, "key_value_seq_starts", sizes->seqlen_k, sizes, &ranges->first_key,
                        &args->first_keys, &ranges->first_keys) &&
           settle_numbers(&args->offsets, "query_offset", -CATTN_MAX_OFFSET, CATTN_MAX_OFFSET, sizes->n_batch_dims,
                          sizes->batch, &ranges->offsets) &&
           warn_alignment(state, args, sizes);
}

/* ---- masked_softmax ---- */

/* The queries are on the last axis but the one of the keys, and all axes before these two are batch dimensions. */
static bool settle(struct cattn_function_call *call, struct cattn_range_args *ranges) {
    struct cattn_softmax_params *params = call->params;
    const struct cattn_array *scores = call->main;
    int64_t batch[NPY_MAXDIMS];
    int n_batch_dims = 0;
    params->is_causal = ranges->is_causal;
    if (call->own_nd < (ranges->is_causal ? 2 : 1))
        return cattn_raise(PyExc_ValueError, "scores must have at least %s (..., T_q, T_k)%s, got %d",
                           call->own_nd > 0 ? "2 dimensions" : "1 dimension", call->own_nd > 0 ? " with is_causal" : "",
                           call->own_nd);
    if (call->own_nd < 2)
        return true;
    const int query_axis = call->axis == scores->nd - 1 ? scores->nd - 2 : scores->nd - 1;
    for (int axis = 0; axis < query_axis; axis++)
        if (axis != call->axis)
            batch[n_batch_dims++] = scores->dims[axis];
    const struct cattn_range_sizes sizes = {.seqlen_q = scores->dims[query_axis],
                                            .seqlen_k = scores->dims[call->axis],
                                            .n_batch_dims = n_batch_dims,
                                            .batch = batch,
                                            .query_lengths = Py_None,
                                            .key_lengths = Py_None,
                                            .first_keys = Py_None};
    params->ranges.offsets.batch[n_batch_dims] = 0; /* the query axis */
    return cattn_ranges_settle(call->state, ranges, &sizes, &params->ranges);
}

bool cattn_settle_masked_softmax(struct cattn_function_call *call) {
    PyObject *const is_causal = call->args[MASKED_SOFTMAX_is_causal];
    struct cattn_range_args ranges;
    if (is_causal == Py_False && call->args[MASKED_SOFTMAX_query_offset] == Py_None && call->own_nd > 0)
        return true;
    const bool settled =
        cattn_arg_ranges(call->state, is_causal, call->args[MASKED_SOFTMAX_query_offset], Py_None, &ranges) &&
        settle(call, &ranges);
    call->kept = (PyObject *)ranges.offsets; /* there are no other arrays */
    return settled;
}

/* ---- causal_mask ---- */

static enum cattn_status compute_mask(const void *params) { return cattn_mask(params); }

PyObject *cattn_body_causal_mask(struct binding_state *state, PyObject **args) {
    struct cattn_range_args parsed = {0};
    struct cattn_mask_params params = {.mask = NULL};
    struct cattn_output output = {NULL, NULL};
    bool computed = false;
    PyObject *T_k = args[CAUSAL_MASK_T_k] == Py_None ? args[CAUSAL_MASK_T_q] : args[CAUSAL_MASK_T_k];
    PyObject *is_causal = args[CAUSAL_MASK_is_causal];
    /* lower_right is the default: an offset overrides it */
    if (args[CAUSAL_MASK_query_offset] != Py_None && cattn_arg_is(is_causal, state->lower_right))
        is_causal = state->upper_left;
    if (!cattn_arg_count(args[CAUSAL_MASK_T_q], "T_q", 0, NPY_MAX_INTP, &params.seqlen_q) ||
        !cattn_arg_count(T_k, "T_k", 0, NPY_MAX_INTP, &params.seqlen_k) ||
        !cattn_arg_ranges(state, is_causal, args[CAUSAL_MASK_query_offset], args[CAUSAL_MASK_window_size], &parsed))
        goto done;
    if (parsed.offsets != NULL) {
        cattn_error_type("query_offset", "an int", args[CAUSAL_MASK_query_offset]);
        goto done;
    }
    const int64_t dims[2] = {params.seqlen_q, params.seqlen_k};
    const struct cattn_range_sizes sizes = {.seqlen_q = dims[0],
                                            .seqlen_k = dims[1],
                                            .query_lengths = Py_None,
                                            .key_lengths = Py_None,
                                            .first_keys = Py_None};
    const struct cattn_output_spec spec = {.name = "the mask", .type = NPY_BOOL, .nd = 2, .dims = dims};
    if (!cattn_ranges_settle(state, &parsed, &sizes, &params.ranges) || !cattn_arg_output(state, NULL, &spec, &output))
        goto done;
    params.mask = (uint8_t *)PyArray_BYTES(output.array);
    params.num_threads = cattn_get_num_threads();
    const bool brief = PyArray_SIZE(output.array) <= CATTN_GIL_ELEMENTS;
    computed = cattn_error_status(cattn_compute(brief, &params.poll, compute_mask, &params));
done:
    cattn_ranges_clear(&parsed);
    return cattn_output_end(computed, &output, NULL, 0);
}
