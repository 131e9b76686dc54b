/* tangents.h -- from tensors of tangents to the rows of a task, for the derivative of attention and its gradients. */
#ifndef CATTN_CORE_TANGENTS_H
#define CATTN_CORE_TANGENTS_H

#include "../kernels/tangents.h"
#include "attention_rows.h"

/* What the rows of the two views of score tangents share in all tasks. */
struct cattn_tangent_calls {
    struct cattn_call_shape query, key;
};

/* A block of queries of one head. */
struct cattn_place {
    int64_t batch, head, first_row;
};

void cattn_tangent_calls_fill(const struct cattn_call_shape *scores, const struct cattn_tangents *tangents,
                              struct cattn_tangent_calls *calls);
/* `rows` has the scores, whose scratch the views share. */
void cattn_score_tangents_fill(struct cattn_score_tangents *s, const struct cattn_attention_params *p,
                               const struct cattn_tangents *tangents, const struct cattn_tangent_calls *calls,
                               const struct cattn_rows *rows, const struct cattn_place *place);
/* The tangents of the keys or values of a head, from the first valid key on. Without any, `first` is NULL. */
struct cattn_matrix cattn_tangent_matrix(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                                         const struct cattn_rows *rows, const struct cattn_place *place);
/* Row r of the block, of a tensor that may be a half or has the dtype of the computation. NULL for an absent one. */
void *cattn_tangent_row(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                        const struct cattn_place *place, int r, bool may_be_half);

#endif
