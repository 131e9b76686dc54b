/* attention_rows.h -- from a call's tensors to the rows of one task: what the forward and the backward pass share.
 */
#ifndef CATTN_ATTENTION_ROWS_H
#define CATTN_ATTENTION_ROWS_H

#include "../kernels/kernels.h"
#include "visible_keys.h"

/* Where each tensor starts for one leading index. */
struct cattn_batch {
    int64_t index;
    struct cattn_batch_range batch_range;
    int64_t query, key, value, attn_mask, bias[CATTN_MAX_BIAS], slopes, sinks, out, weights, lse;
};

void cattn_batch(const struct cattn_attention_params *p, int64_t index, struct cattn_batch *batch);

/* Elements from a tensor's start to its part for one leading index; 0 where it is absent. */
int64_t cattn_batch_start(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t index);

/* The element `offset` elements behind the first; of query, key, value, out and weights as they are stored. */
void *cattn_tensor_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset);
void *cattn_stored_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset);

/* What all rows of the call have in common. */
void cattn_rows_common(struct cattn_rows *rows, const struct cattn_attention_params *p, const struct cattn_batch *batch,
                       int64_t kv_head);
/* Rows r .. r+n-1 of the task are queries i .. i+n-1 of one query head. */
void cattn_rows_of_head(struct cattn_rows *rows, const struct cattn_attention_params *p,
                        const struct cattn_batch *batch, int r, int n, int64_t head, int64_t i);

/* Where each row's dropout bits will lie that are drawn beforehand: behind those of row 0, if that has any. */
void cattn_rows_drop_bits(struct cattn_rows *rows);

/* First and last key that any row of the task sees. */
struct cattn_range cattn_rows_keys(const struct cattn_rows *rows);

#endif
