/* attention.h -- from tensors to rows: the parts of an attention call that all its passes share. */
#ifndef CATTN_ATTENTION_H
#define CATTN_ATTENTION_H

#include "../cattn.h"
#include "../kernels/kernels.h"
#include "parallel.h"
#include "params.h"
#include "scratch.h"

/* ---- the range of keys that a query sees ---- */

/* Causality, windows, lengths and a first valid key all leave each query one range: keys lo <= k < hi, counted from the
 * first valid key of the batch entry. Nothing else in core/ or kernels/ knows which of them made it.
 */

struct cattn_range {
    int64_t lo, hi; /* keys lo <= k < hi */
};

/* The smallest range that holds both. Empty ranges do not count. */
static inline struct cattn_range cattn_range_union(struct cattn_range a, struct cattn_range b) {
    if (a.lo >= a.hi || b.lo >= b.hi)
        return b.lo < b.hi ? b : a;
    return (struct cattn_range){cattn_min(a.lo, b.lo), a.hi > b.hi ? a.hi : b.hi};
}

/* struct cattn_ranges for one batch entry: what its queries share. Everything but first_key counts keys from the first
 * valid one: key k is the array's key first_key + k. So padding on the left moves no key to another block. */
struct cattn_batch_range {
    int64_t first_key;                              /* of the array; 0 if all keys are visible */
    int64_t offset, n_queries, n_keys, left, right; /* n_keys is 0 if no key is valid */
};
void cattn_batch_range(const struct cattn_ranges *ranges, int n_batch_dims, const int64_t *batch_shape, int64_t index,
                       struct cattn_batch_range *batch_range);

/* The keys that query i sees. */
struct cattn_range cattn_visible_keys(const struct cattn_batch_range *batch_range, int64_t i);
/* The same for queries i .. i+n-1, as arrays. */
void cattn_visible_ranges(const struct cattn_batch_range *batch_range, int64_t i, int n, int64_t *lo, int64_t *hi);

/* ---- from a call's tensors to the rows of one task ---- */

/* Where each tensor starts in one batch entry, in elements. Packed sequences start at a row of their own. */
struct cattn_batch {
    int64_t index;
    struct cattn_batch_range batch_range;
    int64_t query, key, value, key_scale, value_scale, attn_mask, block_mask, bias[CATTN_MAX_BIAS], slopes, sinks, gate,
        out, weights, lse;
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

/* ---- from tensors of tangents to the rows of one task ---- */

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

/* ---- keys and values rounded to bfloat16 once a call, instead of once a task ---- */

/* A call that reads rounded copies of keys and values: `params` holds them as CATTN_STORED_BF16 in place of a quantized
 * storage, without scales. The tables of tiles read them packed. */
struct cattn_rounded_keys {
    struct cattn_attention_params params;
    /* from here on for rounded_keys.c */
    const struct cattn_attention_params *from;
    const struct cattn_kernels *kernels;
    int64_t kv_heads, n_pieces;
};

/* Whether each key is read by enough queries to be worth copying. */
bool cattn_rounds_keys(const struct cattn_attention_params *params);

/* Makes the copies. *rounded is NULL if there is no memory for them: then the call is computed without. Free it after
 * the call. */
enum cattn_status cattn_round_keys(const struct cattn_attention_params *params, struct cattn_rounded_keys **rounded);

/* ---- forgotten options: lse and out that do not belong to the other arguments of a call of gradients ---- */

/* After all key blocks of a step: whether there is a row that does not fit, and in *found the first one, its row
 * counted from the first of the step. */
bool cattn_find_misfit(const struct cattn_backward *b, const struct cattn_backward_params *params,
                       const struct cattn_kernels *kernels, struct cattn_misfit *found);

/* ---- key_indices: the gathered keys of a list are a call of their own ---- */

/* A unit is a number of queries of some heads that share a list, and a key-value head: one query of a group of heads
 * or, where all queries have one list and one range, many queries. Its call sees the gathered keys only, so that the
 * bits are the bits of such a call by definition. Forward and backward pass fill in its results.
 */

struct cattn_gather_plan {
    int64_t heads_per_unit, units_per_batch; /* of all heads at the same queries */
    int64_t rows_per_unit, blocks_per_head;
    int64_t n_units;
    int num_threads;      /* that take units */
    int threads_per_unit; /* either of the two is 1 */
    bool copies_lists;    /* a unit's keys are copied at once; otherwise its call copies one key block at a time */
};

/* The plan of a call with key_indices. for_gradients: the units follow the bit contract, and queries that share a
 * list are never cut into several. */
struct cattn_gather_plan cattn_gather_plan(const struct cattn_attention_params *params, bool for_gradients);

/* The keys and values of one list: key k is row rows[k] of both matrices. value.first is NULL if there is no value. */
struct cattn_key_list {
    const int64_t *rows;
    struct cattn_matrix key, value;
};

/* Copies the keys k0 .. k1-1 of a list. The results keep their numbers: first_row is k0. */
void cattn_copy_listed_keys(const struct cattn_attention_params *params, const struct cattn_key_list *list, int64_t k0,
                            int64_t k1, const struct cattn_key_copies *copies, struct cattn_matrix *key,
                            struct cattn_matrix *value);

/* A unit and its gathered keys, in the scratch of a task. */
struct cattn_gather {
    struct cattn_attention_params call; /* on the gathered keys; without results */
    struct cattn_batch batch;
    int64_t first_head, first_row, n_rows;
    int64_t n_keys;         /* gathered: the keys of the list that are in range */
    int64_t *index, *place; /* of each: its place among the keys of the array, and in the list */
    struct cattn_key_list list;
    struct cattn_key_copies copies; /* if the plan copies lists */
    uint8_t *mask;                  /* [head][row][gathered]; also holds the block mask */
    void *bias[CATTN_MAX_BIAS];     /* the same */
};

/* Lays out a unit and its arrays, or counts their bytes if the arena has no memory. */
struct cattn_gather *cattn_gather_lay_out(const struct cattn_gather_plan *plan,
                                          const struct cattn_attention_params *params, struct cattn_arena *arena);
/* Gathers a unit's keys and what belongs to them, and describes its call. `poll` is filled in and must last as long. */
void cattn_gather_unit(const struct cattn_gather_plan *plan, const struct cattn_attention_params *params, int64_t unit,
                       struct cattn_worker *worker, struct cattn_gather *gather);

/* The part of a tensor for the unit's first head and query. `start` is its start in the batch entry, in elements. */
struct cattn_tensor cattn_gather_part(const struct cattn_gather *gather, const struct cattn_tensor *tensor,
                                      int64_t start, size_t element);

/* ---- a product of two matrices within a task, for the choice of keys (product.c) ---- */

/* The scratch of products of up to n_a rows of A by up to n_b rows of B, of these storages: of more than CATTN_FEW_ROWS
 * rows of B if n_b is larger, else of that many or fewer. out_b is 1 in all of them, or in none. */
void cattn_product_lay_out(const struct cattn_product_params *most, struct cattn_product *product,
                           struct cattn_arena *arena);
/* Computes all n_a rows; everything but `stop` and the scratch must be set. */
void cattn_product_compute(const struct cattn_kernels *kernels, struct cattn_product *product, int64_t n_a,
                           struct cattn_worker *worker);

#endif
