/* problem.h -- a problem of attention, with or without gradients. problem.c chooses it, attention.c computes it in two
 * ways, and visible.c knows which keys its queries see.
 */
#ifndef CATTN_FUZZ_PROBLEM_H
#define CATTN_FUZZ_PROBLEM_H

#include "memory.h"
#include "torch_random.h"

enum {
    QUERY,
    KEY,
    VALUE,
    MASK,
    BIAS_0,
    BIAS_1,
    SLOPES,
    SINKS,
    OFFSETS,
    QUERY_LENGTHS,
    KEY_LENGTHS,
    FIRST_KEYS,
    KEY_SCALE,
    VALUE_SCALE,
    N_INPUTS
};
enum { OUT, WEIGHTS, LSE, DROPOUT_MASK, N_OUTPUTS };
enum { GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS, GRAD_SINKS, N_GRADIENTS };

struct problem {
    struct cattn_backward_params back;
    struct array inputs[N_INPUTS], outputs[N_OUTPUTS], gradients[N_GRADIENTS], grad_out, grad_lse;
    bool has_input[N_INPUTS], has_output[N_OUTPUTS], has_gradient[N_GRADIENTS];
    unsigned bias_broadcast; /* axes of the bias that broadcast, if its gradient is computed */
    bool backward, has_grad_lse, is_tame;
    bool dequantizes; /* in the second call, quantized keys and values are replaced by their values */
    struct cattn_torch_random torch;
};

/* Chooses any problem that the binding could make. The caller sets the array pointers of its parameters. */
void choose_problem(struct input *in, struct problem *problem);
/* Puts float32 arrays in the place of quantized keys and values. */
void dequantize(struct problem *problem);
/* Sets dims to (batch dimensions, heads, row, col) and returns the number of axes. */
int axes_of(const struct cattn_attention_params *p, int64_t row, int64_t col, int64_t *dims);

#endif
