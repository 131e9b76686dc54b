/* packed.c -- sequences of different lengths, packed into the same arrays: edges, alignment, batch.
 *
 * The arrays have the axes (total, heads, width), and the call is parsed as one batch entry of `total` queries and
 * keys, whose rows lie before its heads. When its results are allocated, cattn_packed_fill makes a batch of
 * sequences of it.
 */
#include "attention_call.h"

/* ---- edges ---- */

/* The ValueError for numbers that are no edges. Always false. */
static bool error_edges(const struct cattn_edges *side, const char *name, int64_t total) {
    const int64_t n = side->n_sequences + 1;
    PyObject *shown = PyList_New(n);
    for (int64_t i = 0; shown != NULL && i < n; i++) {
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
    const int64_t n = side->n_sequences;
    bool falls = false;
    for (int64_t i = 0; i < n; i++)
        falls |= side->edges[i + 1] < side->edges[i];
    if (falls || side->edges[0] != 0 || side->edges[n] != total)
        return error_edges(side, name, total);
    for (int64_t i = 0; i < n; i++) {
        side->lengths[i] = side->edges[i + 1] - side->edges[i];
        side->longest = side->lengths[i] > side->longest ? side->lengths[i] : side->longest;
    }
    return true;
}

bool cattn_arg_edges(struct binding_state *state, PyObject *object, const char *name, int64_t total,
                     struct cattn_edges *side) {
    struct cattn_array given = {.name = name};
    PyObject *found = cattn_arg_is_integers(object) ? Py_NewRef(object)
                                                    : PyObject_CallFunction(state->read_integers, "Os", object, name);
    if (found == NULL)
        return false;
    if (PyArray_CheckExact(found)) /* else an int */
        cattn_freeze((PyArrayObject *)found, name, &given);
    bool fits = given.nd == 1 && given.dims[0] > 0;
    if (!fits)
        PyErr_Format(PyExc_ValueError, "%s must have shape (B + 1,), got %s", name,
                     cattn_show_shape(given.nd, given.dims).text);
    else if ((side->edges = PyMem_Malloc(2 * (size_t)given.dims[0] * sizeof *side->edges)) == NULL)
        fits = PyErr_NoMemory() != NULL;
    if (fits) {
        side->n_sequences = given.dims[0] - 1;
        side->lengths = side->edges + given.dims[0];
        fits = cattn_read_integers(cattn_python, &given, 0, total, CATTN_REFUSED, side->edges) &&
               check_edges(side, name, total);
    }
    Py_DECREF(found);
    return fits;
}

bool cattn_arg_sequences(struct binding_state *state, PyObject *cu_seqlens, PyObject *seq_lengths, int64_t total,
                         struct cattn_edges *edges) {
    if (cu_seqlens != Py_None && seq_lengths != Py_None)
        return cattn_raise(PyExc_ValueError, "seq_lengths and cu_seqlens exclude each other: packed sequences have no "
                                             "padding");
    return cu_seqlens == Py_None || cattn_arg_edges(state, cu_seqlens, "cu_seqlens", total, edges);
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
    return cattn_raise(PyExc_ValueError, "%s must be at least %lld, the longest of %s, got %lld", name,
                       (long long)side->longest, edges, (long long)longest);
}

bool cattn_packed_parse(struct binding_state *state, struct cattn_packed *packed, int64_t total_q, int64_t total_k,
                        PyObject *rng) {
    struct cattn_edges *queries = &packed->queries, *keys = &packed->keys;
    PyObject *const *args = packed->args;
    if (!cattn_arg_edges(state, args[VARLEN_cu_seqlens_q], "cu_seqlens_q", total_q, queries) ||
        !check_longest(args[VARLEN_max_seqlen_q], "max_seqlen_q", queries, "cu_seqlens_q") ||
        !cattn_arg_edges(state, args[VARLEN_cu_seqlens_k], "cu_seqlens_k", total_k, keys) ||
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
        if (names_corner && ranges->lower_right != lower_right)
            return cattn_raise(PyExc_ValueError, "alignment='%s' contradicts is_causal='%s': give one of them",
                               lower_right ? "lower_right" : "upper_left", lower_right ? "upper_left" : "lower_right");
        ranges->lower_right = lower_right;
    }
    ranges->bare = false;
    return true;
}

/* ---- the batch ---- */

static void fill(struct cattn_tensor *tensor, int64_t *numbers, int64_t n) {
    tensor->data = numbers;
    tensor->head = tensor->row = tensor->col = 0;
    tensor->batch[0] = n != 1;
}

void cattn_packed_fill(const struct cattn_packed *packed, struct cattn_attention_params *params) {
    const struct cattn_edges *queries = &packed->queries, *keys = &packed->keys;
    const int64_t n = queries->n_sequences;
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
