/* varlen_attention.c -- varlen_attention(...), its gradients and its statistics: sequences of different lengths, packed
 * into the same arrays. See packed.h.
 */
#include "attention.h"

PyObject *cattn_body_varlen_attention(struct binding_state *state, PyObject **args) {
    struct cattn_packed packed = {.args = args + N_ATTENTION_ARGS};
    return cattn_attend(state, args, CATTN_STAGE_OUT, &packed);
}

PyObject *cattn_body_varlen_attention_backward(struct binding_state *state, PyObject **args) {
    struct cattn_packed packed = {.args = args + N_BACKWARD_ARGS};
    return cattn_differentiate(state, args, &packed);
}

PyObject *cattn_body_varlen_attention_statistics(struct binding_state *state, PyObject **args) {
    struct cattn_packed packed = {.args = args + N_STATISTICS_ARGS};
    return cattn_statistics(state, args, &packed);
}
