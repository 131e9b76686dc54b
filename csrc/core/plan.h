/* plan.h -- how one attention call is cut into tasks, and what scratch a task needs.
 *
 * The rows of a unit share one key-value head. Where a head has few queries, a unit is all query heads of the group,
 * flattened, so that keys and values are read once for the group; otherwise each query head is a unit.
 *
 *     task = one block of rows of one unit                          (tile, rows, tiny)
 *     task = one block of rows of one unit against one key chunk    (split)
 *
 * Whatever the plan, every row sees the same sums in the same order.
 */
#ifndef CATTN_PLAN_H
#define CATTN_PLAN_H

#include "../cattn.h"
#include "../kernels/kernels.h"

struct cattn_plan {
    enum cattn_path path; /* never AUTO */
    int64_t n_units, units_per_batch;
    int64_t heads_per_unit;
    int64_t unit_rows; /* heads_per_unit * seqlen_q */
    int task_rows;     /* rows of a task at most */
    int64_t blocks_per_unit;
    int64_t n_chunks;
    bool uses_stream;    /* dropout bits come from a serial stream: tasks in row-major order */
    size_t scratch_size; /* bytes a thread */
};

/* Elements of one array of scratch rows-long statistics, and of one row of an accumulator. */
int64_t cattn_plan_row_slots(const struct cattn_plan *plan);
int64_t cattn_plan_acc_cols(const struct cattn_attention_params *params);

struct cattn_plan cattn_plan(const struct cattn_attention_params *params, const struct cattn_kernels *kernels);

/* Must the kernels copy its rows to read them? Keys and values as they are stored. */
bool cattn_plan_copies(const struct cattn_attention_params *params, const struct cattn_tensor *tensor);

/* The task's struct and all its scratch arrays, laid out in `memory` of scratch_size bytes. */
struct cattn_rows *cattn_plan_lay_out(const struct cattn_plan *plan, const struct cattn_attention_params *params,
                                      const struct cattn_kernels *kernels, void *memory);

/* Most bytes of scratch of the tiny path, and how many of them it has on the stack, which is quicker: threads may have
 * but 64 KiB of that. */
#define CATTN_TINY_SCRATCH (96 * 1024)
#define CATTN_TINY_STACK (28 * 1024)

#endif
