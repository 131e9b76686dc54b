/* attention_rows.h -- from a call's tensors to the rows of one task, for the forward and the backward pass. */
#ifndef CATTN_ATTENTION_ROWS_H
#define CATTN_ATTENTION_ROWS_H

#include "../kernels/kernels.h"
#include "visible_keys.h"

/* Where each tensor starts in one batch entry, in elements. Packed sequences start at a row of their own. */
struct cattn_batch {
    int64_t index;
    struct cattn_batch_range batch_range;
    int64_t query, key, value, key_scale, value_scale, attn_mask, block_mask, bias[CATTN_MAX_BIAS], slopes, sinks, out,
        weights, lse;
};

void cattn_batch_fill(const struct cattn_attention_params *p, int64_t index, struct cattn_batch *batch);

/* Elements from a tensor's start to its part for one batch entry; 0 if the tensor is absent. */
int64_t cattn_batch_start(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t index);

/* The address of the element at `offset`. cattn_stored_at is for tensors that may be halves: query, key, value, out,
 * weights and grad_out. */
void *cattn_tensor_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset);
void *cattn_stored_at(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t offset);

/* Fills *call, which every task of the call reads. */
void cattn_call_shape_fill(const struct cattn_attention_params *p, struct cattn_call_shape *call);

/* The keys and values of one batch entry and key-value head, from the first valid key on. */
void cattn_keys_of_head(const struct cattn_attention_params *p, const struct cattn_batch *batch, int64_t kv_head,
                        struct cattn_matrix *key, struct cattn_matrix *value);
/* Fills what the rows of a task share: keys, values and dropout of one batch entry and key-value head. n_rows and the
 * scratch must be set. */
void cattn_rows_of_batch(struct cattn_rows *rows, const struct cattn_attention_params *p,
                         const struct cattn_batch *batch, int64_t kv_head);
/* Rows r .. r+n-1 of the task are queries i .. i+n-1 of one query head. */
void cattn_rows_of_head(struct cattn_rows *rows, const struct cattn_attention_params *p,
                        const struct cattn_batch *batch, int r, int n, int64_t head, int64_t i);
/* The block masks of those rows, which cattn_rows_of_head also sets. */
void cattn_block_masks_of_head(struct cattn_per_row *per_row, const struct cattn_attention_params *p,
                               const struct cattn_batch *batch, int r, int n, int64_t head, int64_t i);

/* Fills *rows with the queries of one block of one head; the scratch must be set. Returns the block's first row in the
 * tensors, which is not its first query in packed sequences. n_rows is 0, and nothing else is set, past the end of one.
 */
int64_t cattn_rows_of_block(struct cattn_rows *rows, const struct cattn_attention_params *p,
                            const struct cattn_call_shape *call, int64_t batch, int64_t head, int64_t block);
/* The same call for a view that computes plain products, since the masks were applied to the scores. */
struct cattn_call_shape cattn_call_of_products(const struct cattn_call_shape *scores);
/* A view of these rows with other keys or values, unless these are NULL; its queries and scratch must be set. */
void cattn_rows_view(struct cattn_rows *view, const struct cattn_call_shape *call, const struct cattn_rows *rows,
                     const struct cattn_matrix *key, const struct cattn_matrix *value);
/* Elements from a tensor's start to its part for one batch entry and head. */
int64_t cattn_head_start(const struct cattn_attention_params *p, const struct cattn_tensor *tensor, int64_t batch,
                         int64_t head);
/* The first row of a packed sequence; 0 if they are not packed. */
int64_t cattn_sequence_start(const struct cattn_attention_params *p, const struct cattn_tensor *starts, int64_t batch);

/* The smallest range that holds the ranges of all rows of the task; {0, 0} if they are empty. */
struct cattn_range cattn_rows_keys(const struct cattn_rows *rows);
/* The first key of the first key block, from the one at k0 on, of which the block mask shows a key below `hi` to some
 * row of the task; at least hi if there is none. Without a block mask it is k0. */
int64_t cattn_rows_next_block(const struct cattn_rows *rows, int64_t k0, int64_t hi);
/* Whether some row may see a key of the key block k0 .. k1-1; `keys` is what cattn_rows_keys returned. */
bool cattn_rows_see_block(const struct cattn_rows *rows, struct cattn_range keys, int64_t k0, int64_t k1);

#endif
