/* packed.c -- sequences of different lengths, packed into the same arrays: edges, alignment, batch.
 *
 * The arrays have the axes (total, heads, width), and the call is parsed as one batch entry of `total` queries and
 * keys, whose rows lie before its heads. When its results are allocated, cattn_packed_fill makes a batch of
 * sequences of it.
 */
#include "attention_call.h"

/* ---- edges ---- */

static bool error_shape(const char *name, int nd, const npy_intp *dims) {
    PyObject *shape = cattn_shape_tuple(nd, dims);
    if (shape != NULL)
        PyErr_Format(PyExc_ValueError, "%s must have shape (B + 1,), got %R", name, shape);
    Py_XDECREF(shape);
    return false;
}

static bool check_shape(PyArrayObject *array, const char *name) {
    return (PyArray_NDIM(array) == 1 && PyArray_DIM(array, 0) > 0) ||
           error_shape(name, PyArray_NDIM(array), PyArray_DIMS(array));
}

static bool is_signed(PyArrayObject *array, size_t size) {
    return PyTypeNum_ISSIGNED(PyArray_TYPE(array)) && (size_t)PyArray_ITEMSIZE(array) == size;
}

/* An array of one axis, of aligned int32 or int64: a new reference, or NULL with an exception. */
static PyArrayObject *integers_from(struct binding_state *state, PyObject *object, const char *name, int64_t total) {
    PyObject *found = PyArray_CheckExact(object) && PyArray_NDIM((PyArrayObject *)object) > 0 &&
                              PyTypeNum_ISINTEGER(PyArray_TYPE((PyArrayObject *)object))
                          ? Py_NewRef(object)
                          : PyObject_CallFunction(state->read_integers, "Os", object, name);
    if (found == NULL)
        return NULL;
    PyArrayObject *array = (PyArrayObject *)found;
    if (!PyArray_CheckExact(found)) /* an int */
        error_shape(name, 0, NULL);
    else if (check_shape(array, name) && (is_signed(array, 4) || is_signed(array, 8)) && PyArray_ISBEHAVED_RO(array))
        return array;
    PyObject *checked =
        PyErr_Occurred() ? NULL : PyObject_CallFunction(state->as_integers, "OsLL", found, name, 0LL, (long long)total);
    Py_DECREF(found);
    if (checked == NULL || check_shape((PyArrayObject *)checked, name)) /* other threads may have changed the array */
        return (PyArrayObject *)checked;
    Py_DECREF(checked);
    return NULL;
}

/* The ValueError for numbers that are no edges. Always false. */
static bool error_edges(const struct cattn_edges *side, const char *name, int64_t total) {
    const npy_intp n = side->n_sequences + 1;
    PyObject *shown = PyList_New(n);
    for (npy_intp i = 0; shown != NULL && i < n; i++) {
        PyObject *edge = PyLong_FromLongLong(side->edges[i]);
        if (edge == NULL || PyList_SetItem(shown, i, edge) < 0)
            Py_CLEAR(shown);
    }
    if (shown != NULL)
        cattn_error_value(shown, "%s must start with 0, never fall and end with %lld", name, (long long)total);
    Py_XDECREF(shown);
    return false;
}

static bool check_edges(struct cattn_edges *side, const char *name, int64_t total) {
    const npy_intp n = side->n_sequences;
    int64_t low = side->edges[0], high = side->edges[0];
    bool falls = false;
    for (npy_intp i = 0; i < n; i++) {
        const int64_t edge = side->edges[i + 1];
        low = edge < low ? edge : low;
        high = edge > high ? edge : high;
        falls |= edge < side->edges[i];
    }
    if (low < 0 || high > total) {
        PyErr_Format(PyExc_ValueError, "%s must be between 0 and %lld, got %lld", name, (long long)total,
                     (long long)(low < 0 ? low : high));
        return false;
    }
    if (falls || side->edges[0] != 0 || side->edges[n] != total)
        return error_edges(side, name, total);
    for (npy_intp i = 0; i < n; i++) {
        side->lengths[i] = side->edges[i + 1] - side->edges[i];
        side->longest = side->lengths[i] > side->longest ? side->lengths[i] : side->longest;
    }
    return true;
}

/* Copies the edges, so that nobody else changes them. */
static bool read_edges(struct binding_state *state, PyObject *object, const char *name, int64_t total,
                       struct cattn_edges *side) {
    PyArrayObject *array = integers_from(state, object, name, total);
    if (array == NULL)
        return false;
    const npy_intp n = PyArray_DIM(array, 0), stride = PyArray_STRIDE(array, 0);
    const bool narrow = is_signed(array, 4);
    const char *data = PyArray_BYTES(array);
    side->n_sequences = n - 1;
    side->edges = PyMem_Malloc(2 * (size_t)n * sizeof *side->edges);
    for (npy_intp i = 0; side->edges != NULL && i < n; i++, data += stride)
        side->edges[i] = narrow ? *(const int32_t *)(const void *)data : *(const int64_t *)(const void *)data;
    Py_DECREF((PyObject *)array);
    if (side->edges == NULL) {
        PyErr_NoMemory();
        return false;
    }
    side->lengths = side->edges + n;
    return check_edges(side, name, total);
}

/* max_seqlen_q and max_seqlen_k are not needed, but must be bounds. */
static bool check_longest(PyObject *object, const char *name, const struct cattn_edges *side, const char *edges) {
    int64_t longest;
    if (object == Py_None)
        return true;
    if (!cattn_arg_count(object, name, 0, NPY_MAX_INTP, &longest))
        return false;
    if (longest >= side->longest)
        return true;
    PyErr_Format(PyExc_ValueError, "%s must be at least %lld, the longest of %s, got %lld", name,
                 (long long)side->longest, edges, (long long)longest);
    return false;
}

bool cattn_packed_parse(struct binding_state *state, struct cattn_packed *packed, int64_t total_q, int64_t total_k,
                        PyObject *rng) {
    struct cattn_edges *queries = &packed->queries, *keys = &packed->keys;
    PyObject *const *args = packed->args;
    if (!read_edges(state, args[VARLEN_cu_seqlens_q], "cu_seqlens_q", total_q, queries) ||
        !check_longest(args[VARLEN_max_seqlen_q], "max_seqlen_q", queries, "cu_seqlens_q") ||
        !read_edges(state, args[VARLEN_cu_seqlens_k], "cu_seqlens_k", total_k, keys) ||
        !check_longest(args[VARLEN_max_seqlen_k], "max_seqlen_k", keys, "cu_seqlens_k"))
        return false;
    if (queries->n_sequences != keys->n_sequences)
        PyErr_Format(PyExc_ValueError, "cu_seqlens_q has %zd sequences, cu_seqlens_k has %zd",
                     (Py_ssize_t)queries->n_sequences, (Py_ssize_t)keys->n_sequences);
    else if (cattn_torch_check(state, rng))
        PyErr_SetString(PyExc_TypeError,
                        "rng must be None, an int or what numpy.random.default_rng takes, got TorchGenerator");
    return PyErr_Occurred() == NULL;
}

/* ---- alignment ---- */

static bool warn_alignment(struct binding_state *state, const struct cattn_packed *packed,
                           const struct cattn_range_args *ranges) {
    const struct cattn_edges *queries = &packed->queries, *keys = &packed->keys;
    if (!ranges->bare ||
        memcmp(queries->lengths, keys->lengths, (size_t)keys->n_sequences * sizeof *keys->lengths) == 0)
        return true;
    return PyErr_WarnEx(state->causal_alignment_warning,
                        "queries and keys of a sequence differ in number, and query i stands at key i: name is_causal "
                        "'upper_left' for that, 'lower_right' if the last query belongs to the last key",
                        1) == 0;
}

bool cattn_packed_align(struct binding_state *state, const struct cattn_packed *packed,
                        struct cattn_range_args *ranges) {
    PyObject *alignment = packed->args[VARLEN_alignment];
    if (alignment == Py_None) {
        if (!warn_alignment(state, packed, ranges))
            return false;
    } else {
        const bool lower_right = cattn_arg_is(alignment, state->lower_right);
        if (!lower_right && !cattn_arg_is(alignment, state->upper_left))
            return cattn_error_value(alignment, "alignment must be None, 'upper_left' or 'lower_right'");
        const bool names_corner = ranges->is_causal && !ranges->bare;
        if (names_corner && ranges->lower_right != lower_right) {
            PyErr_Format(PyExc_ValueError, "alignment='%s' contradicts is_causal='%s': give one of them",
                         lower_right ? "lower_right" : "upper_left", lower_right ? "upper_left" : "lower_right");
            return false;
        }
        ranges->lower_right = lower_right;
    }
    ranges->bare = false;
    return true;
}

/* ---- the batch ---- */

static void fill(struct cattn_tensor *tensor, int64_t *numbers, npy_intp n) {
    tensor->data = numbers;
    tensor->head = tensor->row = tensor->col = 0;
    tensor->batch[0] = n != 1;
}

void cattn_packed_fill(const struct cattn_packed *packed, struct cattn_attention_params *params) {
    const struct cattn_edges *queries = &packed->queries, *keys = &packed->keys;
    const npy_intp n = queries->n_sequences;
    fill(&params->query_starts, queries->edges, n);
    fill(&params->ranges.query_lengths, queries->lengths, n);
    fill(&params->key_starts, keys->edges, n);
    fill(&params->ranges.key_lengths, keys->lengths, n);
    params->batch_shape[0] = params->n_batch = n;
    params->seqlen_q = queries->longest;
    params->seqlen_k = keys->longest;
}

void cattn_packed_clear(struct cattn_packed *packed) {
    if (packed != NULL) {
        PyMem_Free(packed->queries.edges);
        PyMem_Free(packed->keys.edges);
    }
}
