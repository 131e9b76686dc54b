/* check_params.h -- what cattn.h demands of its callers, checked on entry to core/ in builds with assertions.
 *
 * A user's mistake never gets here: the binding raises an error for it. A failed assertion is a bug of the binding.
 */
#ifndef CATTN_CHECK_PARAMS_H
#define CATTN_CHECK_PARAMS_H

#include "../cattn.h"

#ifdef NDEBUG
#define CATTN_CHECK(which, params) ((void)(params))
#else
#define CATTN_CHECK(which, params) cattn_check_##which(params)
void cattn_check_attention(const struct cattn_attention_params *params);
void cattn_check_backward(const struct cattn_backward_params *params);
void cattn_check_jvp(const struct cattn_jvp_params *params);
void cattn_check_statistics(const struct cattn_statistics_params *params);
void cattn_check_softmax(const struct cattn_softmax_params *params);
void cattn_check_softmax_backward(const struct cattn_softmax_backward_params *params);
void cattn_check_dropout(const struct cattn_dropout_params *params);
void cattn_check_rope(const struct cattn_rope_params *params);
void cattn_check_product(const struct cattn_product_params *params);
void cattn_check_norm(const struct cattn_norm_params *params);
void cattn_check_norm_backward(const struct cattn_norm_backward_params *params);
void cattn_check_activation(const struct cattn_activation_params *params);
void cattn_check_mask(const struct cattn_mask_params *params);
#endif

#endif
