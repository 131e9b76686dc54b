/* states.c -- what functions with a state have in common: sequences of different lengths, and the state that they
 * return. */
#include "engine.h"

bool cattn_settle_edges(struct cattn_function_call *call, PyObject *cu_seqlens, PyObject *seq_lengths, int64_t total) {
    call->edges = (struct cattn_edges){.edges = NULL};
    return cattn_arg_sequences(call->state, cu_seqlens, seq_lengths, total, &call->edges);
}

bool cattn_settle_lengths(struct cattn_function_call *call, PyObject *seq_lengths, int64_t seqlen, int n_batch_dims,
                          const int64_t *batch, int64_t *length, struct cattn_tensor *lengths) {
    PyArrayObject *numbers = NULL;
    *length = seqlen;
    const bool settled = cattn_arg_counts(call->state, seq_lengths, "seq_lengths", seqlen, n_batch_dims, batch, length,
                                          &numbers, lengths);
    call->kept = (PyObject *)numbers;
    return settled;
}

bool cattn_make_state(struct cattn_function_call *call, bool is_wanted, int nd, const int64_t *dims, int slot_of_state,
                      int n_batch_dims, int axes, struct cattn_tensor *view) {
    struct cattn_output *const state_out = &call->results[0];
    const struct cattn_slot *slot = &call->function->results[0];
    PyObject *given = call->args[slot->slot];
    struct cattn_output_spec spec = {.name = slot->row->name,
                                     .type =
                                         slot->row->kind == STORED ? call->type : cattn_arg_compute_type(call->type),
                                     .nd = nd,
                                     .dims = dims,
                                     .inputs = call->arrays,
                                     .n_inputs = call->n_arrays};
    if (!is_wanted && given == Py_None)
        return true;
    for (int i = 0; i < call->n_arrays; i++)
        if (call->slots[i]->slot == slot_of_state)
            spec.in_place = call->arrays[i];
    if (!cattn_arg_state_out(call->state, given, &spec, state_out) ||
        !cattn_arg_outputs_apart(call->state, &call->results[1], "out", state_out, "state_out"))
        return false;
    cattn_tensor_from(view, state_out->array, n_batch_dims, axes);
    return true;
}

PyObject *cattn_build_with_state(struct cattn_function_call *call, bool returns_state) {
    struct cattn_output *const state_out = &call->results[0], *const out = &call->results[1];
    if (!cattn_output_finish(out) || (state_out->array != NULL && !cattn_output_finish(state_out)))
        return NULL;
    PyObject *first = cattn_output_result(out);
    if (!returns_state)
        return first;
    PyObject *second = cattn_output_result(state_out);
    PyObject *result = PyObject_CallFunctionObjArgs(call->state->linear_attention_output, first, second, NULL);
    Py_DECREF(first);
    Py_DECREF(second);
    return result;
}
