/* norm.c -- the drivers of RMS norm, layer norm and their gradients.
 *
 * Rows are independent, but for the gradients of weight and bias, which are sums over all rows. They are cut into
 * blocks of rows. A block is summed row by row; the sums of the blocks are added in double, in their order: a task
 * computes the sums of several blocks and then waits for its ticket.
 */
#include <math.h>
#include <string.h>

#include "../fp_mode.h"
#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "rowwise.h"
#include "scratch.h"

struct norm_job {
    const struct cattn_norm_params *params;
    const struct cattn_row_kernels *kernels;
};

/* Bytes of a row in the type of the computation, in whole cache lines. */
static cattn_size row_size(enum cattn_dtype dtype, int64_t n_cols) {
    return ((cattn_size)n_cols * cattn_element_size(dtype) + 63) / 64 * 64;
}

static void norm_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct norm_job *job = context;
    const struct cattn_norm_params *p = job->params;
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const int64_t each = cattn_rows_per_task(p->n_cols), last = (task + 1) * each;
    for (int64_t row = task * each; row < last && row < p->n_rows; row++) {
        const struct cattn_norm_row args = {
            .stop = cattn_stop_of(worker),
            .n = p->n_cols,
            .eps = p->eps,
            .centred = p->centred,
            .storage = p->storage,
            .x = cattn_row_at(&p->x, p->n_batch_dims, p->batch_shape, row, element),
            .x_stride = p->x.col,
            .weight = p->weight.data,
            .weight_stride = p->weight.data ? p->weight.col : 0,
            .bias = p->bias.data,
            .bias_stride = p->bias.data ? p->bias.col : 0,
            .out = cattn_row_at(&p->out, p->n_batch_dims, p->batch_shape, row, element),
            .out_stride = p->out.col,
            .scratch = cattn_worker_scratch(worker),
        };
        job->kernels->norm_row(&args);
    }
}

enum cattn_status cattn_norm(const struct cattn_norm_params *p) {
    CATTN_CHECK(norm, p);
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    const int64_t n_tasks = cattn_ceil_div(p->n_rows, cattn_rows_per_task(p->n_cols));
    const bool alone = p->n_rows * p->n_cols < 2 * CATTN_TASK_ELEMENTS;
    struct norm_job job = {.params = p, .kernels = cattn_row_kernels_for(p->dtype)};
    return cattn_parallel_for(n_tasks, alone ? 1 : p->num_threads, row_size(p->dtype, p->n_cols), norm_task, &job,
                              &p->poll);
}

/* ---- gradients ---- */

/* Rows whose gradients of weight and bias are summed in the dtype of the computation: part of the bit contract. */
#define BLOCK_ROWS 64
/* Sums that are added between two looks at a stop. */
#define SUMS_PER_LOOK ((int64_t)1 << 16)

struct gradient_job {
    const struct cattn_norm_backward_params *params;
    const struct cattn_row_kernels *kernels;
    int64_t n_blocks, blocks_per_task;
    int64_t n_sums; /* of a block: n_cols for the weight, then n_cols for the bias, if their gradients are wanted */
    double *totals; /* the sums so far; NULL if there are none */
    struct cattn_tickets tickets;
};

/* row_scratch: of row_size; sums: of this block, or NULL */
static void gradient_block(const struct gradient_job *job, int64_t block, void *row_scratch, void *sums,
                           struct cattn_worker *worker) {
    const struct cattn_norm_backward_params *p = job->params;
    const size_t element = cattn_element_size(p->dtype);
    const int64_t end = cattn_min((block + 1) * BLOCK_ROWS, p->n_rows);
    const bool is_long = p->n_cols >= CATTN_TASK_ELEMENTS; /* reading the clock costs nothing beside such a row */
    char *const bias_sums =
        sums && p->grad_bias.data ? (char *)sums + (job->n_sums - p->n_cols) * (int64_t)element : NULL;
    if (sums)
        memset(sums, 0, (size_t)job->n_sums * element);
    for (int64_t row = block * BLOCK_ROWS; row < end && !(is_long && cattn_should_stop(worker)); row++) {
        const struct cattn_norm_gradient args = {
            .forward = {.stop = cattn_stop_of(worker),
                        .n = p->n_cols,
                        .eps = p->eps,
                        .centred = p->centred,
                        .x = cattn_row_at(&p->x, p->n_batch_dims, p->batch_shape, row, element),
                        .x_stride = p->x.col,
                        .weight = p->weight.data,
                        .weight_stride = p->weight.data ? p->weight.col : 0,
                        .out = cattn_row_at(&p->grad_x, p->n_batch_dims, p->batch_shape, row, element),
                        .out_stride = p->grad_x.col,
                        .scratch = row_scratch},
            .grad = cattn_row_at(&p->grad, p->n_batch_dims, p->batch_shape, row, element),
            .grad_stride = p->grad.col,
            .weight_sums = p->grad_weight.data ? sums : NULL,
            .bias_sums = bias_sums,
        };
        job->kernels->norm_gradient(&args);
    }
}

static void gradient_task(void *context, int64_t task, struct cattn_worker *worker) {
    struct gradient_job *job = context;
    const struct cattn_norm_backward_params *p = job->params;
    const int64_t first = task * job->blocks_per_task, n = cattn_min(job->blocks_per_task, job->n_blocks - first);
    const int64_t bytes = job->n_sums * (int64_t)cattn_element_size(p->dtype);
    char *const scratch = cattn_worker_scratch(worker);
    char *const sums = job->totals ? scratch + row_size(p->dtype, p->n_cols) : NULL;
    for (int64_t i = 0; i < n; i++)
        gradient_block(job, first + i, scratch, sums ? sums + i * bytes : NULL, worker);
    if (!sums || !cattn_tickets_wait(&job->tickets, 0, task, worker))
        return;
    for (int64_t i = 0; i < n * job->n_sums; i++) {
        if (i % SUMS_PER_LOOK == SUMS_PER_LOOK - 1 && cattn_should_stop(worker))
            return;
        job->totals[i % job->n_sums] += cattn_number_at(p->dtype, sums, i);
    }
    cattn_tickets_pass(&job->tickets, 0);
}

/* Rounds totals into a gradient. Every NaN is written as the same one. */
static void store_totals(const double *totals, enum cattn_dtype dtype, int64_t n, const struct cattn_tensor *gradient) {
    for (int64_t k = 0; k < n; k++) {
        const double total = isnan(totals[k]) ? (double)NAN : totals[k];
        if (dtype == CATTN_F32)
            ((float *)gradient->data)[k * gradient->col] = (float)total;
        else
            ((double *)gradient->data)[k * gradient->col] = total;
    }
}

static enum cattn_status run_tasks(struct gradient_job *job) {
    const struct cattn_norm_backward_params *p = job->params;
    const int64_t block_elements = BLOCK_ROWS * p->n_cols;
    job->n_blocks = cattn_ceil_div(p->n_rows, BLOCK_ROWS);
    job->blocks_per_task = block_elements < CATTN_TASK_ELEMENTS ? CATTN_TASK_ELEMENTS / block_elements : 1;
    const int64_t n_tasks = cattn_ceil_div(job->n_blocks, job->blocks_per_task);
    const cattn_size sums = (cattn_size)(job->blocks_per_task * job->n_sums) * cattn_element_size(p->dtype);
    return cattn_parallel_for(n_tasks, p->num_threads, row_size(p->dtype, p->n_cols) + sums, gradient_task, job,
                              &p->poll);
}

enum cattn_status cattn_norm_backward(const struct cattn_norm_backward_params *p) {
    CATTN_CHECK(norm_backward, p);
    if (p->n_cols == 0)
        return CATTN_OK;
    const int64_t weight_sums = p->grad_weight.data ? p->n_cols : 0, bias_sums = p->grad_bias.data ? p->n_cols : 0;
    struct gradient_job job = {
        .params = p, .kernels = cattn_row_kernels_for(p->dtype), .n_sums = weight_sums + bias_sums};
    if (job.n_sums == 0)
        return p->n_rows > 0 ? run_tasks(&job) : CATTN_OK;
    struct cattn_scratch totals = {NULL, 0};
    const cattn_size size = (cattn_size)job.n_sums * sizeof(double);
    if (!cattn_scratch_grow(&totals, size))
        return CATTN_NO_MEMORY;
    job.totals = totals.data;
    memset(job.totals, 0, (size_t)size);
    enum cattn_status status = CATTN_NO_MEMORY;
    if (cattn_tickets_begin(&job.tickets, 1)) {
        status = p->n_rows > 0 ? run_tasks(&job) : CATTN_OK;
        cattn_tickets_end(&job.tickets);
    }
    if (status == CATTN_OK) {
        const unsigned mode = cattn_fp_enter(); /* the caller's rounding must not show */
        store_totals(job.totals, p->dtype, weight_sums, &p->grad_weight);
        store_totals(job.totals + weight_sums, p->dtype, bias_sums, &p->grad_bias);
        cattn_fp_leave(mode);
    }
    cattn_scratch_free(&totals);
    return status;
}
