/* plan.h -- how an attention call and its gradients are cut into tasks, and the scratch that a task needs.
 *
 * The rows of a unit share one key-value head. If a head has few queries, a unit is all query heads of the group,
 * flattened, so that keys and values are read once for the group; otherwise each query head is a unit.
 *
 *     task = one block of rows of one unit                          (rows, tiny)
 *     task = some blocks of rows of one unit, key block by key block (tile)
 *     task = one block of rows of one unit against one key chunk    (split)
 *
 * Every row gets the same sums in the same order, whatever the plan. All tuning numbers of attention are in plan.[ch]
 * and plan_second.c: nothing in them can change a result.
 */
#ifndef CATTN_PLAN_H
#define CATTN_PLAN_H

#include "../cattn.h"
#include "../kernels/kernels.h"
#include "dispatch.h"

/* The tiny path takes at most this much scratch, and uses the stack for up to CATTN_TINY_STACK of it, because that is
 * faster than the thread's scratch. Threads may have stacks of only 64 KiB, of which a call should leave a quarter. */
#define CATTN_TINY_SCRATCH (96 * 1024)
#define CATTN_TINY_STACK (15 * 1024)

struct cattn_plan {
    enum cattn_path path; /* never AUTO */
    int num_threads;      /* 1 if other threads would start too late to help */
    int64_t n_units, units_per_batch;
    int64_t heads_per_unit;
    int64_t unit_rows; /* heads_per_unit * seqlen_q */
    int block_rows;    /* rows of a block at most */
    int task_blocks;   /* blocks of a task at most */
    int64_t blocks_per_unit, tasks_per_unit;
    int64_t n_chunks;
    bool uses_stream;        /* dropout bits come from a serial stream, so tasks are in row-major order */
    cattn_size scratch_size; /* bytes a thread */
};

/* The kernels of a forward pass, in the table in use. */
struct cattn_kernel_pair cattn_attention_kernels(const struct cattn_attention_params *params);

struct cattn_plan cattn_plan(const struct cattn_attention_params *params, const struct cattn_kernels *kernels);

/* The rows of one block, counted over all units. */
struct cattn_row_block {
    int64_t batch, first_head;
    int64_t first_row; /* of the unit's rows */
    int n_rows;
};
struct cattn_row_block cattn_plan_block(const struct cattn_plan *plan, int64_t block);
/* The first block of a task, and its number of blocks. */
int64_t cattn_plan_first_block(const struct cattn_plan *plan, int64_t task, int *n_blocks);

/* Split path: how many tasks run before their partial results are merged. */
int64_t cattn_plan_wave(const struct cattn_plan *plan, int64_t n_tasks, cattn_size partial_size);

/* The length of one scratch array of row statistics, and of one row of an accumulator. */
int64_t cattn_plan_row_slots(const struct cattn_plan *plan);
int64_t cattn_plan_acc_cols(const struct cattn_attention_params *params);

/* Whether the kernels copy the rows of this tensor (keys or values) before they read them. */
bool cattn_plan_copies(const struct cattn_attention_params *params, const struct cattn_tensor *tensor,
                       enum cattn_storage quantized);

/* An upper bound of the number of keys that one query sees. */
int64_t cattn_plan_most_keys(const struct cattn_attention_params *params);

/* Whether the dropout bits come from a serial stream. It draws nothing for an empty call. */
bool cattn_plan_uses_stream(const struct cattn_attention_params *params);

/* The end of the key block that starts at k0. */
static inline int64_t cattn_block_end(int64_t k0, int64_t n_keys) { return cattn_min(k0 + CATTN_BLOCK_KEYS, n_keys); }

/* The arrays of so many rows; NULL if slices are only counted. */
struct cattn_arena;
struct cattn_per_row *cattn_plan_carve_per_row(struct cattn_arena *arena, cattn_size n_rows);

#define CATTN_MOST_BLOCKS 8  /* of a task */
#define CATTN_LEAST_BLOCKS 4 /* at a key block, from which on copies of it pay */

/* Lays out the structs of a task's blocks and all their scratch arrays in `memory` of plan->scratch_size bytes. Blocks
 * share the arrays that hold nothing between two key blocks. */
void cattn_plan_lay_out(const struct cattn_plan *plan, const struct cattn_attention_params *params,
                        const struct cattn_kernels *kernels, void *memory,
                        struct cattn_rows *blocks[CATTN_MOST_BLOCKS]);

/* ---- second passes, which read the results of a forward pass: gradients and statistics ---- */

/* 1 if other threads would wake up too late to help. */
int cattn_plan_second_threads(const struct cattn_attention_params *params);
/* Whether a task is a whole unit instead of one block: then nobody waits for a ticket. `ordered` fixes the order of
 * blocks across units. */
bool cattn_plan_whole_units(int64_t n_units, int num_threads, bool ordered);

/* ---- the derivative in the direction of tangents: a task is one block of queries of one head ---- */

struct cattn_jvp_plan {
    int num_threads;
    int64_t n_tasks, blocks_per_head, n_key_blocks;
    cattn_size scratch_size;
};

struct cattn_jvp_plan cattn_jvp_plan(const struct cattn_jvp_params *params, const struct cattn_kernels *kernels);
struct cattn_jvp *cattn_jvp_lay_out(const struct cattn_jvp_plan *plan, const struct cattn_jvp_params *params,
                                    const struct cattn_kernels *kernels, void *memory);

/* ---- gradients: a unit is the query heads of one key-value head, a step is one block of queries of one head ---- */

struct cattn_backward_plan {
    int num_threads;
    int64_t n_units, units_per_batch;
    int64_t blocks_per_head, steps_per_unit, n_key_blocks;
    bool shares_bias; /* several heads or batch entries add to one gradient of the bias */
    bool uses_stream; /* dropout bits come from a serial stream */
    bool whole_units; /* one task takes all steps of a unit; otherwise a task is one step */
    cattn_size scratch_size;
};

struct cattn_backward_plan cattn_backward_plan(const struct cattn_backward_params *params,
                                               const struct cattn_kernels *kernels);

/* Lays out a step's struct with its three views, and all their scratch arrays, in `memory`. */
struct cattn_backward *cattn_backward_lay_out(const struct cattn_backward_plan *plan,
                                              const struct cattn_backward_params *params,
                                              const struct cattn_kernels *kernels, void *memory);

/* Lays out the copies of n keys, or counts their bytes if the arena has no memory. */
void cattn_key_copies_lay_out(const struct cattn_attention_params *params, cattn_size n,
                              struct cattn_key_copies *copies, struct cattn_arena *arena);
/* ---- statistics: a unit is one query head of one batch entry ---- */

struct cattn_statistics_plan {
    int num_threads;
    int64_t n_units, blocks_per_unit, n_key_blocks;
    bool adds_columns; /* blocks of queries add to the same column sums, in order */
    bool whole_units;  /* one task takes all blocks of a unit; otherwise a task is one block */
    cattn_size scratch_size;
};

struct cattn_statistics_plan cattn_statistics_plan(const struct cattn_statistics_params *params,
                                                   const struct cattn_kernels *kernels);
struct cattn_statistics *cattn_statistics_lay_out(const struct cattn_statistics_plan *plan,
                                                  const struct cattn_statistics_params *params,
                                                  const struct cattn_kernels *kernels, void *memory);

#endif
