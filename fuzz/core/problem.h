/* problem.h -- a problem of attention, forwards and maybe back: what problem.c chooses, attention.c computes in two
 * ways, and visible.c knows who sees whom in.
 */
#ifndef CATTN_FUZZ_PROBLEM_H
#define CATTN_FUZZ_PROBLEM_H

#include "memory.h"
#include "torch_random.h"

enum { QUERY, KEY, VALUE, MASK, BIAS_0, BIAS_1, SLOPES, SINKS, OFFSETS, QUERY_LENGTHS, KEY_LENGTHS, N_INPUTS };
enum { OUT, WEIGHTS, LSE, DROPOUT_MASK, N_OUTPUTS };
enum { GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS, GRAD_SINKS, N_GRADIENTS };

struct problem {
    struct cattn_backward_params back;
    struct array inputs[N_INPUTS], outputs[N_OUTPUTS], gradients[N_GRADIENTS], grad_out;
    bool has_input[N_INPUTS], has_output[N_OUTPUTS], has_gradient[N_GRADIENTS];
    unsigned bias_broadcast; /* axes of the bias whose gradient is asked for */
    bool backward, is_tame;
    struct cattn_torch_random torch;
};

/* Any problem that the binding could make; its parameters lack only the arrays. */
void choose_problem(struct input *in, struct problem *problem);
/* (lead, heads, row, col); how many axes these are */
int axes_of(const struct cattn_attention_params *p, int64_t row, int64_t col, int64_t *dims);

#endif
