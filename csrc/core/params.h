/* params.h -- params structs of cattn.h inside core/: assertions of their contract, and strides of batch entries. */
#ifndef CATTN_PARAMS_H
#define CATTN_PARAMS_H

#include "../cattn.h"

/* ---- the contract of cattn.h, asserted on entry to core/ in builds with assertions ---- */

/* A user's mistake never gets here: the binding raises an error for it. A failed assertion is a bug of the binding.
 */

#ifdef NDEBUG
#define CATTN_CHECK(which, params) ((void)(params))
#else
#define CATTN_CHECK(which, params) cattn_check_##which(params)
void cattn_check_attention(const struct cattn_attention_params *params);
void cattn_check_backward(const struct cattn_backward_params *params);
void cattn_check_jvp(const struct cattn_jvp_params *params);
void cattn_check_statistics(const struct cattn_statistics_params *params);
void cattn_check_choice(const struct cattn_choice_params *params);
void cattn_check_softmax(const struct cattn_softmax_params *params);
void cattn_check_softmax_backward(const struct cattn_softmax_backward_params *params);
void cattn_check_dropout(const struct cattn_dropout_params *params);
void cattn_check_rope(const struct cattn_rope_params *params);
void cattn_check_product(const struct cattn_product_params *params);
void cattn_check_norm(const struct cattn_norm_params *params);
void cattn_check_norm_backward(const struct cattn_norm_backward_params *params);
void cattn_check_activation(const struct cattn_activation_params *params);
void cattn_check_linear_attention(const struct cattn_linear_attention_params *params);
void cattn_check_linear_attention_backward(const struct cattn_linear_attention_backward_params *params);
void cattn_check_conv(const struct cattn_conv_params *params);
void cattn_check_mask(const struct cattn_mask_params *params);
#endif

/* ---- numbers of the type of a computation ---- */

static inline double cattn_number_at(enum cattn_dtype dtype, const void *numbers, int64_t i) {
    return dtype == CATTN_F32 ? (double)((const float *)numbers)[i] : ((const double *)numbers)[i];
}

/* ---- the part of a strided tensor that belongs to one batch entry ---- */

/* Batch entries are numbered in C order over the batch dimensions.
 */

/* Elements from a tensor's start to batch entry `index`. */
int64_t cattn_batch_offset(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                           int64_t index);

/* The int64 of batch entry `index`; `common` if the tensor is absent. */
int64_t cattn_batch_number(const struct cattn_tensor *numbers, int64_t common, int n_batch_dims,
                           const int64_t *batch_shape, int64_t index);

/* The rows of batch entry `index`: of packed sequences, if there are edges, else the first ones of the entry. */
struct cattn_token_span {
    int64_t first, n;
};
struct cattn_token_span cattn_token_span(const int64_t *edges, const struct cattn_tensor *lengths, int64_t length,
                                         int n_batch_dims, const int64_t *batch_shape, int64_t index);

#endif
