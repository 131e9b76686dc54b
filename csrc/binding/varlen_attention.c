/* varlen_attention.c -- varlen_attention(...), its gradients and its statistics: sequences of different lengths, packed
 * into the same arrays.
 */
#include "arrays.h"
#include "attention.h"
#include "numbers.h"

/* What cattn.functional's pack_sequences and pack_gradients return, in this order. */
enum {
    PACKED_QUERY,
    PACKED_KEY,
    PACKED_VALUE,
    PACKED_KEY_SCALE,
    PACKED_VALUE_SCALE,
    PACKED_IS_CAUSAL,
    PACKED_QUERY_OFFSET,
    LOWER_RIGHT,
    QUERY_STARTS, /* int64 arrays, checked: one number a sequence */
    QUERY_LENGTHS,
    KEY_STARTS,
    KEY_LENGTHS,
    LONGEST_QUERY,
    LONGEST_KEY,
    N_PACKED
};
enum { PACKED_OUT = N_PACKED, RESULT_OUT }; /* pack_sequences: the first is a view of the second */
enum { PACKED_GRAD_OUT = N_PACKED, PACKED_FORWARD_OUT, PACKED_LSE, PACKED_GRAD_LSE }; /* pack_gradients */

static bool unpack(struct cattn_call *call, PyObject *packed) {
    struct cattn_attention_params *params = call->params;
    struct cattn_ranges *ranges = &params->ranges;
    struct cattn_tensor *const tensors[] = {&params->query_starts, &ranges->query_lengths, &params->key_starts,
                                            &ranges->key_lengths};
    for (int i = 0; i < 4; i++)
        cattn_tensor_from(tensors[i], (PyArrayObject *)PyTuple_GetItem(packed, QUERY_STARTS + i), 1, 0);
    ranges->lower_right = PyTuple_GetItem(packed, LOWER_RIGHT) == Py_True;
    params->batch_shape[0] = params->n_batch = *call->n_sequences;
    return cattn_arg_count(PyTuple_GetItem(packed, LONGEST_QUERY), "max_seqlen_q", 0, params->seqlen_q,
                           &params->seqlen_q) &&
           cattn_arg_count(PyTuple_GetItem(packed, LONGEST_KEY), "max_seqlen_k", 0, params->seqlen_k,
                           &params->seqlen_k) &&
           cattn_call_counts_fit(params);
}

/* Replaces the arguments by packed ones, and returns their number of sequences. */
static npy_intp take_packed(PyObject **args, PyObject *packed) {
    args[ARG_query] = PyTuple_GetItem(packed, PACKED_QUERY);
    args[ARG_key] = PyTuple_GetItem(packed, PACKED_KEY);
    args[ARG_value] = PyTuple_GetItem(packed, PACKED_VALUE);
    args[ARG_key_scale] = PyTuple_GetItem(packed, PACKED_KEY_SCALE);
    args[ARG_value_scale] = PyTuple_GetItem(packed, PACKED_VALUE_SCALE);
    args[ARG_is_causal] = PyTuple_GetItem(packed, PACKED_IS_CAUSAL);
    args[ARG_query_offset] = PyTuple_GetItem(packed, PACKED_QUERY_OFFSET);
    return PyArray_DIM((PyArrayObject *)PyTuple_GetItem(packed, QUERY_STARTS), 0);
}

PyObject *cattn_body_varlen_attention(struct binding_state *state, PyObject **args) {
    PyObject *final = NULL, *const *varlen = args + N_ATTENTION_ARGS;
    PyObject *packed = PyObject_CallFunctionObjArgs(
        state->pack_sequences, args[ARG_query], args[ARG_key], args[ARG_value], args[ARG_key_scale],
        args[ARG_value_scale], varlen[VARLEN_cu_seqlens_q], varlen[VARLEN_cu_seqlens_k], varlen[VARLEN_max_seqlen_q],
        varlen[VARLEN_max_seqlen_k], args[ARG_is_causal], varlen[VARLEN_alignment], args[ARG_window_size],
        args[ARG_rng], args[ARG_out], NULL);
    if (packed == NULL)
        return NULL;
    const npy_intp n_sequences = take_packed(args, packed);
    args[ARG_out] = PyTuple_GetItem(packed, PACKED_OUT);
    const struct cattn_variant variant = {
        .stage = CATTN_STAGE_OUT, .unpack = unpack, .n_sequences = &n_sequences, .context = packed};
    PyObject *result = cattn_attend(state, args, &variant);
    if (result != NULL)
        final =
            PyObject_CallFunctionObjArgs(state->unpack_sequences, result, PyTuple_GetItem(packed, RESULT_OUT), NULL);
    Py_XDECREF(result);
    Py_DECREF(packed);
    return final;
}

PyObject *cattn_body_varlen_attention_backward(struct binding_state *state, PyObject **args) {
    PyObject *final = NULL, *const *varlen = args + N_BACKWARD_ARGS;
    PyObject *packed = PyObject_CallFunctionObjArgs(
        state->pack_gradients, args[ARG_query], args[ARG_key], args[ARG_value], args[ARG_key_scale],
        args[ARG_value_scale], varlen[VARLEN_cu_seqlens_q], varlen[VARLEN_cu_seqlens_k], varlen[VARLEN_max_seqlen_q],
        varlen[VARLEN_max_seqlen_k], args[ARG_is_causal], varlen[VARLEN_alignment], args[ARG_window_size],
        args[ARG_rng], args[ARG_grad_out], args[ARG_out], args[ARG_lse], args[ARG_grad_lse], NULL);
    if (packed == NULL)
        return NULL;
    const npy_intp n_sequences = take_packed(args, packed);
    args[ARG_grad_out] = PyTuple_GetItem(packed, PACKED_GRAD_OUT);
    args[ARG_out] = PyTuple_GetItem(packed, PACKED_FORWARD_OUT);
    args[ARG_lse] = PyTuple_GetItem(packed, PACKED_LSE);
    args[ARG_grad_lse] = PyTuple_GetItem(packed, PACKED_GRAD_LSE);
    const struct cattn_variant variant = {
        .stage = CATTN_STAGE_OUT, .unpack = unpack, .n_sequences = &n_sequences, .context = packed};
    PyObject *result = cattn_differentiate(state, args, &variant);
    if (result != NULL)
        final = PyObject_CallFunctionObjArgs(state->unpack_gradients, result, NULL);
    Py_XDECREF(result);
    Py_DECREF(packed);
    return final;
}

PyObject *cattn_body_varlen_attention_statistics(struct binding_state *state, PyObject **args) {
    PyObject *final = NULL, *const *varlen = args + N_STATISTICS_ARGS;
    PyObject *packed = PyObject_CallFunctionObjArgs(
        state->pack_statistics, args[ARG_query], args[ARG_key], args[ARG_key_scale], varlen[VARLEN_cu_seqlens_q],
        varlen[VARLEN_cu_seqlens_k], varlen[VARLEN_max_seqlen_q], varlen[VARLEN_max_seqlen_k], args[ARG_is_causal],
        varlen[VARLEN_alignment], args[ARG_window_size], NULL);
    if (packed == NULL)
        return NULL;
    const npy_intp n_sequences = take_packed(args, packed);
    const struct cattn_variant variant = {
        .stage = CATTN_STAGE_SOFTMAX, .unpack = unpack, .n_sequences = &n_sequences, .context = packed};
    PyObject *result = cattn_statistics(state, args, &variant);
    if (result != NULL)
        final = PyObject_CallFunctionObjArgs(state->unpack_statistics, result, NULL);
    Py_XDECREF(result);
    Py_DECREF(packed);
    return final;
}
