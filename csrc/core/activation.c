/* activation.c -- the driver of gelu, silu and their gradients.
 *
 * Kernels take elements of the computation's type without gaps. Others are gathered, computed and stored in pieces.
 */
#include "dispatch.h"
#include "params.h"
#include "rowwise.h"

struct activation_job {
    const struct cattn_activation_params *params;
    const struct cattn_row_kernels *kernels;
    struct cattn_long_rows rows;
    bool direct; /* the kernels can read and write the tensors */
};

/* Elements that are gathered at a time. */
#define GATHERED 512

static bool is_direct(const struct cattn_activation_params *p) {
    return p->storage == CATTN_STORED_PLAIN && p->x.col == 1 && p->out.col == 1 && (!p->grad.data || p->grad.col == 1);
}

/* Column `begin` of a row; NULL for an absent tensor. */
static void *element_at(const struct activation_job *job, const struct cattn_tensor *tensor, int64_t row,
                        int64_t begin) {
    const size_t element = cattn_stored_size(job->params->dtype, job->params->storage);
    if (!tensor->data)
        return NULL;
    char *first = cattn_row_at(tensor, job->rows.n_batch_dims, job->rows.batch_shape, row, element);
    return first + begin * tensor->col * (int64_t)element;
}

static void activate_piece(const void *context, int64_t row, int64_t begin, int64_t end) {
    const struct activation_job *job = context;
    const struct cattn_activation_params *p = job->params;
    struct cattn_activation_row args = {.which = p->which, .n = end - begin};
    if (job->direct) {
        args.x = element_at(job, &p->x, row, begin);
        args.grad = element_at(job, &p->grad, row, begin);
        args.out = element_at(job, &p->out, row, begin);
        job->kernels->activation_row(&args);
        return;
    }
    double x[GATHERED], grad[GATHERED];
    args.x = args.out = x;
    args.grad = p->grad.data ? grad : NULL;
    for (int64_t k = begin; k < end; k += GATHERED) {
        args.n = cattn_min(GATHERED, end - k);
        job->kernels->widen_row(p->storage, element_at(job, &p->x, row, k), p->x.col, args.n, x);
        if (args.grad)
            job->kernels->widen_row(p->storage, element_at(job, &p->grad, row, k), p->grad.col, args.n, grad);
        job->kernels->activation_row(&args);
        job->kernels->narrow_row(p->storage, x, args.n, element_at(job, &p->out, row, k), p->out.col);
    }
}

static void activation_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct activation_job *job = context;
    (void)worker; /* a task is too short to be interrupted */
    cattn_each_piece(&job->rows, task, activate_piece, job);
}

enum cattn_status cattn_activate(const struct cattn_activation_params *p) {
    CATTN_CHECK(activation, p);
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    const struct cattn_tensor *const tensors[] = {&p->x, &p->grad, &p->out};
    struct activation_job job = {
        .params = p,
        .kernels = cattn_row_kernels_for(p->dtype),
        .rows = {.n_batch_dims = p->n_batch_dims,
                 .batch_shape = p->batch_shape,
                 .n_rows = p->n_rows,
                 .n_cols = p->n_cols},
        .direct = is_direct(p),
    };
    cattn_merge_rows(&job.rows, tensors, 3);
    return cattn_parallel_for(job.rows.n_tasks, p->num_threads, 0, activation_task, &job, &p->poll);
}
