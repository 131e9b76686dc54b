/* clear_params.c -- empties the params structs of cattn.h.
 *
 * A struct is up to 10 KB, nearly all of it strides that few calls use: clearing it whole would cost more than a tiny
 * attention. So it has its scalars first, then its tensors without a gap, then arrays that are read up to n_batch_dims
 * only. CLEAR(params, first tensor, member after the last) depends on this order; check_params.c asserts it.
 */
#include <string.h>

#include "../cattn.h"

/* The scalars end where the tensors begin. Not inline: with constant sizes GCC clears by `rep stos`, whose start takes
 * longer than these few bytes. */
static __attribute__((noinline)) void clear(void *params, size_t tensors, size_t end) {
    memset(params, 0, tensors);
    for (size_t at = tensors; at < end; at += sizeof(struct cattn_tensor))
        memset((char *)params + at, 0, offsetof(struct cattn_tensor, batch));
}

#define CLEAR(params, tensors, end)                                                                                    \
    clear(params, (size_t)((char *)&(params)->tensors - (char *)(params)),                                             \
          (size_t)((char *)&(params)->end - (char *)(params)))

void cattn_clear_attention(struct cattn_attention_params *params) { CLEAR(params, ranges.offsets, batch_shape); }

void cattn_clear_jvp(struct cattn_jvp_params *params) {
    CLEAR(params, tangents.query, forward);
    cattn_clear_attention(&params->forward);
}

void cattn_clear_backward(struct cattn_backward_params *params) {
    CLEAR(params, grad_out, forward);
    cattn_clear_attention(&params->forward);
}

void cattn_clear_statistics(struct cattn_statistics_params *params) {
    CLEAR(params, rows, forward);
    cattn_clear_attention(&params->forward);
}

void cattn_clear_softmax(struct cattn_softmax_params *params) { CLEAR(params, ranges.offsets, batch_shape); }

void cattn_clear_softmax_backward(struct cattn_softmax_backward_params *params) { CLEAR(params, grad, batch_shape); }

void cattn_clear_dropout(struct cattn_dropout_params *params) { CLEAR(params, x, batch_shape); }

void cattn_clear_rope(struct cattn_rope_params *params) { CLEAR(params, x, batch_shape); }

void cattn_clear_norm(struct cattn_norm_params *params) { CLEAR(params, x, batch_shape); }

void cattn_clear_norm_backward(struct cattn_norm_backward_params *params) { CLEAR(params, grad, batch_shape); }

void cattn_clear_activation(struct cattn_activation_params *params) { CLEAR(params, x, batch_shape); }
