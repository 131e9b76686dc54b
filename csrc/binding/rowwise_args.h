/* rowwise_args.h -- the tables of the arguments of softmax, masked_softmax, dropout, causal_mask, rope, norms,
 * activations and linear; as attention_args.h.
 */
#ifndef CATTN_ROWWISE_ARGS_H
#define CATTN_ROWWISE_ARGS_H

#define SOFTMAX_ARGUMENTS(A) A(x) A(axis) A(where) A(scale) A(out)
#define MASKED_SOFTMAX_ARGUMENTS(A) A(scores) A(mask) A(axis) A(is_causal) A(query_offset) A(scale) A(method) A(out)
#define DROPOUT_ARGUMENTS(A) A(x) A(p) A(training) A(rng) A(return_mask) A(out)
#define CAUSAL_MASK_ARGUMENTS(A) A(T_q) A(T_k) A(is_causal) A(query_offset) A(window_size)
#define ROPE_ARGUMENTS(A) A(x) A(positions) A(theta) A(rotary_dim) A(interleaved) A(scaling) A(inverse) A(out)
#define RMS_NORM_ARGUMENTS(A) A(x) A(weight) A(eps) A(out)
#define LINEAR_ARGUMENTS(A) A(x) A(weight) A(bias) A(compute_dtype) A(out)
#define LAYER_NORM_ARGUMENTS(A) A(x) A(weight) A(bias) A(eps) A(out)
#define ACTIVATION_ARGUMENTS(A) A(grad_out) A(x) A(approximate) A(out)

/* The slots of each table. */
#define SOFTMAX_SLOT(name) SOFTMAX_##name,
#define MASKED_SOFTMAX_SLOT(name) MASKED_SOFTMAX_##name,
#define DROPOUT_SLOT(name) DROPOUT_##name,
#define CAUSAL_MASK_SLOT(name) CAUSAL_MASK_##name,
#define ROPE_SLOT(name) ROPE_##name,
#define RMS_NORM_SLOT(name) RMS_NORM_##name,
#define LINEAR_SLOT(name) LINEAR_##name,
#define LAYER_NORM_SLOT(name) LAYER_NORM_##name,
#define ACTIVATION_SLOT(name) ACTIVATION_##name,
enum { SOFTMAX_ARGUMENTS(SOFTMAX_SLOT) N_SOFTMAX_ARGS };
enum { MASKED_SOFTMAX_ARGUMENTS(MASKED_SOFTMAX_SLOT) N_MASKED_SOFTMAX_ARGS };
enum { DROPOUT_ARGUMENTS(DROPOUT_SLOT) N_DROPOUT_ARGS };
enum { CAUSAL_MASK_ARGUMENTS(CAUSAL_MASK_SLOT) N_CAUSAL_MASK_ARGS };
enum { ROPE_ARGUMENTS(ROPE_SLOT) N_ROPE_ARGS };
enum { RMS_NORM_ARGUMENTS(RMS_NORM_SLOT) N_RMS_NORM_ARGS };
enum { LINEAR_ARGUMENTS(LINEAR_SLOT) N_LINEAR_ARGS };
enum { LAYER_NORM_ARGUMENTS(LAYER_NORM_SLOT) N_LAYER_NORM_ARGS };
enum { ACTIVATION_ARGUMENTS(ACTIVATION_SLOT) N_ACTIVATION_ARGS };

#endif
