/* gathered_keys.h -- calls whose queries see the keys of a list: the keys of a list are gathered, and become a call of
 * their own.
 *
 * A unit is a number of queries of some heads that share a list, and a key-value head: one query of a group of heads
 * or, where all queries have one list and one range, many queries. Its call sees the gathered keys only, so that the
 * bits are the bits of such a call by definition. Forward and backward pass fill in its results.
 */
#ifndef CATTN_GATHERED_KEYS_H
#define CATTN_GATHERED_KEYS_H

#include "../cattn.h"
#include "arena.h"
#include "attention_rows.h"
#include "parallel.h"

struct cattn_gather_plan {
    int64_t heads_per_unit, units_per_batch; /* of all heads at the same queries */
    int64_t rows_per_unit, blocks_per_head;
    int64_t n_units;
    int num_threads;      /* that take units */
    int threads_per_unit; /* either of the two is 1 */
};

/* The plan of a call with key_indices. for_gradients: the units follow the bit contract, and queries that share a
 * list are never cut into several. */
struct cattn_gather_plan cattn_gather_plan(const struct cattn_attention_params *params, bool for_gradients);

/* A unit and its gathered keys, in the scratch of a task. */
struct cattn_gather {
    struct cattn_attention_params call; /* on the gathered keys; without results */
    struct cattn_batch batch;
    int64_t first_head, first_row, n_rows;
    int64_t n_keys;         /* gathered: the keys of the list that are in range */
    int64_t *index, *place; /* of each: its place among the keys of the array, and in the list */
    void *key, *value;      /* [gathered][column] */
    float *key_scale, *value_scale;
    uint8_t *mask;              /* [head][row][gathered]; also holds the block mask */
    void *bias[CATTN_MAX_BIAS]; /* the same */
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

#endif
