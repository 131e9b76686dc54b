/* varlen_attention.c -- varlen_attention(...): sequences of different lengths, packed into the same arrays. */
#include "arrays.h"
#include "attention.h"
#include "numbers.h"

/* What cattn.functional's pack_sequences returns, in this order. */
enum {
    PACKED_QUERY,
    PACKED_KEY,
    PACKED_VALUE,
    PACKED_IS_CAUSAL,
    PACKED_QUERY_OFFSET,
    PACKED_OUT,   /* a view of RESULT_OUT */
    QUERY_STARTS, /* int64 arrays, checked: one number a sequence */
    QUERY_LENGTHS,
    KEY_STARTS,
    KEY_LENGTHS,
    LONGEST_QUERY,
    LONGEST_KEY,
    RESULT_OUT,
    N_PACKED
};

static bool unpack(struct cattn_call *call, PyObject *packed) {
    struct cattn_attention_params *params = call->params;
    struct cattn_ranges *ranges = &params->ranges;
    struct cattn_tensor *const tensors[] = {&params->query_starts, &ranges->query_lengths, &params->key_starts,
                                            &ranges->key_lengths};
    for (int i = 0; i < 4; i++)
        cattn_tensor_from(tensors[i], (PyArrayObject *)PyTuple_GetItem(packed, QUERY_STARTS + i), 1, 0);
    params->batch_shape[0] = params->n_batch = PyArray_DIM((PyArrayObject *)PyTuple_GetItem(packed, QUERY_STARTS), 0);
    return cattn_arg_count(PyTuple_GetItem(packed, LONGEST_QUERY), "max_seqlen_q", 0, params->seqlen_q,
                           &params->seqlen_q) &&
           cattn_arg_count(PyTuple_GetItem(packed, LONGEST_KEY), "max_seqlen_k", 0, params->seqlen_k,
                           &params->seqlen_k) &&
           cattn_call_counts_fit(params);
}

PyObject *cattn_body_varlen_attention(struct binding_state *state, PyObject **args) {
    PyObject *final = NULL;
    PyObject *packed = PyObject_CallFunctionObjArgs(state->pack_sequences, args[ARG_query], args[ARG_key],
                                                    args[ARG_value], args[ARG_cu_seqlens_q], args[ARG_cu_seqlens_k],
                                                    args[ARG_max_seqlen_q], args[ARG_max_seqlen_k], args[ARG_is_causal],
                                                    args[ARG_window_size], args[ARG_rng], args[ARG_out], NULL);
    if (packed == NULL)
        return NULL;
    args[ARG_query] = PyTuple_GetItem(packed, PACKED_QUERY);
    args[ARG_key] = PyTuple_GetItem(packed, PACKED_KEY);
    args[ARG_value] = PyTuple_GetItem(packed, PACKED_VALUE);
    args[ARG_is_causal] = PyTuple_GetItem(packed, PACKED_IS_CAUSAL);
    args[ARG_query_offset] = PyTuple_GetItem(packed, PACKED_QUERY_OFFSET);
    args[ARG_out] = PyTuple_GetItem(packed, PACKED_OUT);
    const struct cattn_variant variant = {.stage = CATTN_STAGE_OUT, .unpack = unpack, .context = packed};
    PyObject *result = cattn_attend(state, args, &variant);
    if (result != NULL)
        final =
            PyObject_CallFunctionObjArgs(state->unpack_sequences, result, PyTuple_GetItem(packed, RESULT_OUT), NULL);
    Py_XDECREF(result);
    Py_DECREF(packed);
    return final;
}
