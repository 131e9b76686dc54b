/* softmax.c -- the driver of softmax and masked softmax.
 *
 * A row of any length is one kernel call. Softmax along an axis that is not contiguous (axis=0 of a C array) would
 * touch a new cache line with every element, so bundles of rows that are neighbours in memory are copied to scratch and
 * back. Halves are widened to floats in scratch, a row at a time.
 */
#include "attention.h"
#include "dispatch.h"
#include "params.h"
#include "rowwise.h"

struct softmax_job {
    const struct cattn_softmax_params *params;
    const struct cattn_row_kernels *kernels;
    int64_t rows_per_task;
    int64_t bundle; /* rows copied to scratch together, 0: none */
    bool streams;   /* rows are computed in scratch and copied from there with streaming stores */
    size_t element; /* bytes of an element of x and out */
};

/* From this many columns on it pays to prefetch the next row. */
#define LONG_ROW 128
/* Columns of a row of halves that are widened or narrowed between two looks at a stop. */
#define WIDE_PIECE ((int64_t)1 << 16)
/* Rows of a bundle: a cache line of floats. */
#define BUNDLE 16
#define BUNDLE_SCRATCH ((int64_t)512 << 10)
/* Elements between rows in scratch: not a power of 2, so that neighbours do not fight for the same cache set. */
static int64_t bundle_stride(int64_t n_cols) { return n_cols + 24; }

static int64_t find_bundle(const struct cattn_softmax_params *p) {
    const int last = p->n_batch_dims - 1;
    if (last < 0 || p->x.col == 1 || p->x.batch[last] != 1 || p->batch_shape[last] < 2)
        return 0;
    const int64_t row_bytes = bundle_stride(p->n_cols) * (int64_t)cattn_stored_size(p->dtype, p->storage);
    return row_bytes * BUNDLE <= BUNDLE_SCRATCH ? BUNDLE : 0;
}

/* Bytes of a result that no cache holds. */
#define LARGE_RESULT ((int64_t)32 << 20)
/* Bytes of a row that stays in the nearest caches between kernel and copy. */
#define STREAM_ROW ((int64_t)64 << 10)

/* Use streaming stores only if the call is bandwidth-bound and the output is not in the cache already. A causal softmax
 * is: half of the exponentials fall away. New pages were just cleared through the cache, and x was just read. */
static bool find_streams(const struct cattn_softmax_params *p, const struct cattn_row_kernels *kernels) {
    const int64_t row_bytes = p->n_cols * (int64_t)cattn_element_size(p->dtype);
    return kernels->stream_row && p->is_causal && p->method != CATTN_SOFTMAX_RENORMALIZE && !p->out_is_new &&
           p->out.data != p->x.data && p->x.col == 1 && p->out.col == 1 && p->storage == CATTN_STORED_PLAIN &&
           row_bytes <= STREAM_ROW && p->n_rows >= LARGE_RESULT / row_bytes;
}

/* to[r][k] = from[r][k] for n_rows x n_cols elements; strides in elements. The rows are the inner loop, since they are
 * the neighbours in memory. */
static void copy_rows(void *to, int64_t to_row, int64_t to_col, const void *from, int64_t from_row, int64_t from_col,
                      int64_t n_rows, int64_t n_cols, size_t element) {
    for (int64_t k = 0; k < n_cols; k++)
        for (int64_t r = 0; r < n_rows; r++) {
            const int64_t at = k * to_col + r * to_row, source = k * from_col + r * from_row;
            if (element == sizeof(uint16_t))
                ((uint16_t *)to)[at] = ((const uint16_t *)from)[source];
            else if (element == sizeof(uint32_t))
                ((uint32_t *)to)[at] = ((const uint32_t *)from)[source];
            else
                ((uint64_t *)to)[at] = ((const uint64_t *)from)[source];
        }
}

/* One row from x to out, both in the type of the computation. */
static void softmax_plain(const struct softmax_job *job, int64_t row, const void *x, int64_t x_stride, void *out,
                          int64_t out_stride, struct cattn_worker *worker) {
    const struct cattn_softmax_params *p = job->params;
    struct cattn_range visible = {0, p->n_cols};
    if (p->is_causal) {
        const int64_t i = row % p->batch_shape[p->n_batch_dims - 1];
        struct cattn_batch_range batch_range;
        cattn_batch_range(&p->ranges, p->n_batch_dims, p->batch_shape, row, &batch_range);
        visible = cattn_visible_keys(&batch_range, i);
    }
    const bool plain = p->storage == CATTN_STORED_PLAIN;
    const bool has_next = plain && p->x.col == 1 && p->n_cols >= LONG_ROW && row + 1 < p->n_rows;
    const struct cattn_softmax_row args = {
        .stop = cattn_stop_of(worker),
        .n = p->n_cols,
        .lo = visible.lo,
        .hi = visible.hi,
        .x = x,
        .next = has_next ? cattn_row_at(&p->x, p->n_batch_dims, p->batch_shape, row + 1, job->element) : x,
        .x_stride = x_stride,
        .out = out,
        .out_stride = out_stride,
        .mask = p->mask.data ? cattn_row_at(&p->mask, p->n_batch_dims, p->batch_shape, row, 1) : NULL,
        .mask_stride = p->mask.data ? p->mask.col : 0,
        .scale = p->scale,
        .renormalize = p->method == CATTN_SOFTMAX_RENORMALIZE,
    };
    job->kernels->softmax_row(&args);
}

/* One row of any storage; `wide` is scratch for a row of halves. */
static void softmax_one(const struct softmax_job *job, int64_t row, const void *x, int64_t x_stride, void *out,
                        int64_t out_stride, float *wide, struct cattn_worker *worker) {
    const struct cattn_softmax_params *p = job->params;
    if (p->storage == CATTN_STORED_PLAIN) {
        softmax_plain(job, row, x, x_stride, out, out_stride, worker);
        return;
    }
    for (int64_t k = 0; k < p->n_cols && !(k > 0 && cattn_should_stop(worker)); k += WIDE_PIECE)
        job->kernels->widen_row(p->storage, (const uint16_t *)x + k * x_stride, x_stride,
                                cattn_min(WIDE_PIECE, p->n_cols - k), wide + k);
    softmax_plain(job, row, wide, 1, wide, 1, worker);
    for (int64_t k = 0; k < p->n_cols && !(k > 0 && cattn_should_stop(worker)); k += WIDE_PIECE)
        job->kernels->narrow_row(p->storage, wide + k, cattn_min(WIDE_PIECE, p->n_cols - k),
                                 (uint16_t *)out + k * out_stride, out_stride);
}

/* Bytes of scratch for one row of halves. */
static cattn_size wide_size(const struct cattn_softmax_params *p) {
    return p->storage == CATTN_STORED_PLAIN ? 0 : ((cattn_size)p->n_cols * sizeof(float) + 63) / 64 * 64;
}

/* One row where it lies. Returns how many rows were computed: 1. */
static int64_t softmax_in_place(const struct softmax_job *job, int64_t row, struct cattn_worker *worker) {
    void *scratch = cattn_worker_scratch(worker);
    const struct cattn_softmax_params *p = job->params;
    const void *x = cattn_row_at(&p->x, p->n_batch_dims, p->batch_shape, row, job->element);
    void *out = cattn_row_at(&p->out, p->n_batch_dims, p->batch_shape, row, job->element);
    if (job->streams) {
        softmax_plain(job, row, x, p->x.col, scratch, 1, worker);
        job->kernels->stream_row(scratch, p->n_cols, out);
    } else {
        softmax_one(job, row, x, p->x.col, out, p->out.col, scratch, worker);
    }
    return 1;
}

/* Up to `most` neighbouring rows from `row` on, in scratch. Returns how many. */
static int64_t softmax_bundle(const struct softmax_job *job, int64_t row, int64_t most, struct cattn_worker *worker) {
    const struct cattn_softmax_params *p = job->params;
    const size_t element = job->element;
    void *scratch = cattn_worker_scratch(worker);
    char *copies = (char *)scratch + wide_size(p);
    const int last = p->n_batch_dims - 1;
    const int64_t stride = bundle_stride(p->n_cols), together = p->batch_shape[last] - row % p->batch_shape[last];
    int64_t rows = job->bundle < most ? job->bundle : most;
    rows = rows < together ? rows : together;
    copy_rows(copies, stride, 1, cattn_row_at(&p->x, p->n_batch_dims, p->batch_shape, row, element), 1, p->x.col, rows,
              p->n_cols, element);
    for (int64_t r = 0; r < rows; r++) {
        char *at = copies + r * stride * (int64_t)element;
        softmax_one(job, row + r, at, 1, at, 1, scratch, worker);
    }
    copy_rows(cattn_row_at(&p->out, p->n_batch_dims, p->batch_shape, row, element), p->out.batch[last], p->out.col,
              copies, stride, 1, rows, p->n_cols, element);
    return rows;
}

/* A task takes some ten microseconds or is a single row, whose loops look at a stop. */
static void softmax_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct softmax_job *job = context;
    const int64_t first = task * job->rows_per_task, left = job->params->n_rows - first;
    const int64_t n = left < job->rows_per_task ? left : job->rows_per_task;
    for (int64_t i = 0; i < n;)
        i += job->bundle ? softmax_bundle(job, first + i, n - i, worker) : softmax_in_place(job, first + i, worker);
    if (job->streams)
        job->kernels->stream_end();
}

enum cattn_status cattn_softmax(const struct cattn_softmax_params *p) {
    CATTN_CHECK(softmax, p);
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    const struct cattn_row_kernels *kernels = cattn_row_kernels_for(p->dtype);
    struct softmax_job job = {.params = p,
                              .kernels = kernels,
                              .rows_per_task = cattn_rows_per_task(p->n_cols),
                              .bundle = find_bundle(p),
                              .streams = find_streams(p, kernels),
                              .element = cattn_stored_size(p->dtype, p->storage)};
    cattn_size scratch = wide_size(p) + (job.streams ? (cattn_size)p->n_cols * job.element : 0);
    if (job.bundle) {
        job.rows_per_task = cattn_ceil_div(job.rows_per_task, job.bundle) * job.bundle;
        scratch += (cattn_size)(job.bundle * bundle_stride(p->n_cols)) * job.element;
    }
    const int64_t n_tasks = cattn_ceil_div(p->n_rows, job.rows_per_task);
    /* waking a second thread for less than a whole task costs more than it gains */
    const bool alone = p->n_rows < 2 * job.rows_per_task && p->n_cols < CATTN_TASK_ELEMENTS;
    return cattn_parallel_for(n_tasks, alone ? 1 : p->num_threads, scratch, softmax_task, &job, &p->poll);
}

/* ---- gradients ---- */

struct gradient_job {
    const struct cattn_softmax_backward_params *params;
    const struct cattn_row_kernels *kernels;
};

static void gradient_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct gradient_job *job = context;
    const struct cattn_softmax_backward_params *p = job->params;
    const size_t element = cattn_element_size(p->dtype);
    const int64_t each = cattn_rows_per_task(p->n_cols), last = (task + 1) * each;
    for (int64_t row = task * each; row < last && row < p->n_rows; row++) {
        const struct cattn_softmax_gradient args = {
            .stop = cattn_stop_of(worker),
            .n = p->n_cols,
            .grad = cattn_row_at(&p->grad, p->n_batch_dims, p->batch_shape, row, element),
            .weights = cattn_row_at(&p->weights, p->n_batch_dims, p->batch_shape, row, element),
            .out = cattn_row_at(&p->out, p->n_batch_dims, p->batch_shape, row, element),
            .grad_stride = p->grad.col,
            .weights_stride = p->weights.col,
            .out_stride = p->out.col,
            .scale = p->scale,
        };
        job->kernels->softmax_gradient(&args);
    }
}

enum cattn_status cattn_softmax_backward(const struct cattn_softmax_backward_params *p) {
    CATTN_CHECK(softmax_backward, p);
    if (p->n_rows == 0 || p->n_cols == 0)
        return CATTN_OK;
    const int64_t n_tasks = cattn_ceil_div(p->n_rows, cattn_rows_per_task(p->n_cols));
    struct gradient_job job = {.params = p, .kernels = cattn_row_kernels_for(p->dtype)};
    return cattn_parallel_for(n_tasks, p->num_threads, 0, gradient_task, &job, &p->poll);
}
