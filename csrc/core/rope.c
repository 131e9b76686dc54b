/* rope.c -- the driver of rotary positions.
 *
 * Batch entries are reordered, so that those with positions of their own come first: the others share sines and
 * cosines. A task computes them once, for a block of tokens whose table stays in the nearest caches, and rotates that
 * block in every entry that shares them. If these are too few tasks for the threads, the entries are divided among
 * several tasks, each with its own table.
 */
#include <math.h>

#include "../fp_mode.h"
#include "../kernels/fma.h"
#include "dispatch.h"
#include "rowwise.h"
#include "scratch.h"

/* ---- inverse frequencies from theta and a scaling ---- */

/* The formulas come from Hugging Face transformers (modeling_rope_utils), computed in double instead of float. The
 * logarithm is our own, because the C library's differs between platforms in the last bit. It has some 90 bits,
 * so that a frequency is exact to less than an ULP however large its exponent is.
 */

/* What the frequencies of a call follow from. */
struct cattn_rope_law {
    int64_t n;                  /* rotary_dim / 2 */
    double step_high, step_low; /* before the scaling, frequency i is exp(-i * (step_high + step_low)) */
    double attention_factor;    /* of every sine and cosine */
    double ramp_low, ramp_high; /* yarn: below the first index nothing changes, from the second on all is divided */
    struct cattn_rope_scaling scaling;
};

void cattn_rope_settle(const struct cattn_rope_params *params, struct cattn_rope_law *law);
/* `kernels` is the float64 table. Writes law->n numbers. */
void cattn_rope_frequencies(const struct cattn_rope_law *law, const struct cattn_row_kernels *kernels,
                            double *frequencies);

#define TWO_PI 0x1.921fb54442d18p+2
/* ln 2 in two parts; the first has 42 bits, so that its product with an exponent is exact */
#define LN2_HIGH 0x1.62e42fefa3800p-1
#define LN2_LOW 0x1.ef35793c76730p-45

/* A number with twice the digits of a double: the sum of both. */
struct pair {
    double high, low;
};

static struct pair add(struct pair a, struct pair b) {
    double error, low;
    const double high = cattn_two_sum(a.high, b.high, &error);
    const double sum = cattn_two_sum(high, error + (a.low + b.low), &low);
    return (struct pair){sum, low};
}

static struct pair multiply(struct pair a, struct pair b) {
    double error, low;
    const double high = cattn_two_product(a.high, b.high, &error);
    const double product = cattn_two_sum(high, error + (a.high * b.low + a.low * b.high), &low);
    return (struct pair){product, low};
}

static struct pair divide(struct pair a, struct pair b) {
    double error, low;
    const double quotient = a.high / b.high, product = cattn_two_product(quotient, b.high, &error);
    const double rest = ((a.high - product) - error) + (a.low - quotient * b.low);
    const double high = cattn_two_sum(quotient, rest / b.high, &low);
    return (struct pair){high, low};
}

/* The natural logarithm of a positive normal number 2^e m with m from sqrt(1/2) to sqrt(2): e ln 2 + 2 atanh(s) with
 * s = (m - 1) / (m + 1). Then s^2 < 0.0295, and the terms of the series that are left out are below 2^-90. */
static struct pair logarithm(double x) {
    int exponent;
    double low, m = frexp(x, &exponent);
    if (m < 0x1.6a09e667f3bcdp-1) {
        m *= 2;
        exponent--;
    }
    const double high = cattn_two_sum(m, 1, &low);
    const struct pair s = divide((struct pair){m - 1, 0}, (struct pair){high, low}), z = multiply(s, s);
    struct pair series = {0, 0};
    for (int k = 35; k >= 1; k -= 2)
        series = add(multiply(series, z), divide((struct pair){1, 0}, (struct pair){k, 0}));
    const struct pair twice = {2 * s.high, 2 * s.low};
    const struct pair whole = add((struct pair){exponent * LN2_HIGH, 0}, (struct pair){exponent * LN2_LOW, 0});
    return add(whole, multiply(twice, series));
}

/* ---- scalings ---- */

/* The factor of the scores that makes up for a context that is `scale` times as long, as a factor of the rows. */
static double yarn_mscale(double scale, double mscale) {
    return scale <= 1 ? 1 : 0.1 * mscale * logarithm(scale).high + 1;
}

/* The index of the frequency that turns this often within the original length. */
static double yarn_index(const struct cattn_rope_params *p, double rotations) {
    const double turns = logarithm(p->scaling.original_length / (rotations * TWO_PI)).high;
    return (double)p->rotary_dim * turns / (2 * logarithm(p->theta).high);
}

static void settle_yarn(const struct cattn_rope_params *p, struct cattn_rope_law *law) {
    const struct cattn_rope_scaling *s = &p->scaling;
    double low = yarn_index(p, s->beta_fast), high = yarn_index(p, s->beta_slow);
    if (s->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    law->ramp_low = low > 0 ? low : 0;
    law->ramp_high = high < (double)p->rotary_dim - 1 ? high : (double)p->rotary_dim - 1;
    if (law->ramp_low == law->ramp_high)
        law->ramp_high += 0.001; /* as transformers does */
    if (s->attention_factor > 0)
        law->attention_factor = s->attention_factor;
    else if (s->mscale != 0 && s->mscale_all_dim != 0)
        law->attention_factor = yarn_mscale(s->factor, s->mscale) / yarn_mscale(s->factor, s->mscale_all_dim);
    else
        law->attention_factor = yarn_mscale(s->factor, 1);
}

/* What theta is multiplied by, to the power of rotary_dim / (rotary_dim - 2). */
static double dynamic_ratio(const struct cattn_rope_params *p) {
    const struct cattn_rope_scaling *s = &p->scaling;
    const double length = p->length > s->original_length ? p->length : s->original_length;
    return s->factor * length / s->original_length - (s->factor - 1);
}

void cattn_rope_settle(const struct cattn_rope_params *p, struct cattn_rope_law *law) {
    const double dim = (double)p->rotary_dim;
    *law = (struct cattn_rope_law){.n = p->rotary_dim / 2, .attention_factor = 1, .scaling = p->scaling};
    if (law->n == 0)
        return;
    struct pair base = logarithm(p->theta);
    if (p->scaling.type == CATTN_ROPE_DYNAMIC) {
        const struct pair power = divide((struct pair){dim, 0}, (struct pair){dim - 2, 0});
        base = add(base, multiply(power, logarithm(dynamic_ratio(p))));
    }
    const struct pair step = divide((struct pair){2 * base.high, 2 * base.low}, (struct pair){dim, 0});
    /* 26 bits move from the first part to the second: adding and subtracting rounds to the others */
    const double shifter = step.high * (0x1p26 + 1);
    law->step_high = shifter - (shifter - step.high);
    law->step_low = (step.high - law->step_high) + step.low;
    if (p->scaling.type == CATTN_ROPE_YARN)
        settle_yarn(p, law);
}

/* The frequency of a long wave is divided by the factor; of a short one it stays; between them lies a ramp. */
static double scale_llama3(const struct cattn_rope_scaling *s, double frequency) {
    const double wave = TWO_PI / frequency;
    if (wave > s->original_length / s->low_freq_factor)
        return frequency / s->factor;
    if (wave < s->original_length / s->high_freq_factor)
        return frequency;
    const double smooth = (s->original_length / wave - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return (1 - smooth) * frequency / s->factor + smooth * frequency;
}

static double scale_yarn(const struct cattn_rope_law *law, int64_t i, double frequency) {
    double ramp = ((double)i - law->ramp_low) / (law->ramp_high - law->ramp_low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return frequency / law->scaling.factor * ramp + frequency * (1 - ramp);
}

void cattn_rope_frequencies(const struct cattn_rope_law *law, const struct cattn_row_kernels *kernels,
                            double *frequencies) {
    kernels->rope_frequencies(law->n, law->step_high, law->step_low, frequencies);
    for (int64_t i = 0; i < law->n && law->scaling.type >= CATTN_ROPE_LINEAR; i++) {
        if (law->scaling.type == CATTN_ROPE_LINEAR)
            frequencies[i] /= law->scaling.factor;
        else if (law->scaling.type == CATTN_ROPE_YARN)
            frequencies[i] = scale_yarn(law, i, frequencies[i]);
        else if (law->scaling.type == CATTN_ROPE_LLAMA3)
            frequencies[i] = scale_llama3(&law->scaling, frequencies[i]);
    }
}

/* ---- the driver ---- */

/* Bytes of a table. Larger than the nearest cache: then a task writes whole pages of each entry, which matters more if
 * they are new. */
#define TABLE_BYTES ((int64_t)64 << 10)
/* Tasks of a thread that even out their times. */
#define TASKS_EACH 4
/* Entries between two looks at the clock. */
#define ENTRIES_PER_LOOK 16

struct rope_job {
    const struct cattn_rope_params *params;
    const struct cattn_row_kernels *kernels, *kernels_f64;
    struct cattn_rope_law law;
    struct cattn_tensor x, out, positions; /* with the batch dimensions reordered, as batch_shape */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
    int64_t n_sharing; /* entries that share their positions: consecutive ones, after reordering */
    int64_t block, n_blocks;
    int64_t entries_per_task, parts; /* of n_sharing */
    int64_t table_row;
};

/* Moves the dimensions along which the positions differ before the others. */
static void reorder(struct rope_job *job) {
    const struct cattn_rope_params *p = job->params;
    int to = 0;
    job->x = p->x;
    job->out = p->out;
    job->positions = p->positions;
    job->n_sharing = 1;
    for (int sharing = 0; sharing < 2; sharing++)
        for (int d = 0; d < p->n_batch_dims; d++) {
            const int64_t stride = p->positions.data ? p->positions.batch[d] : 0;
            if ((stride == 0) != (sharing == 1))
                continue;
            job->x.batch[to] = p->x.batch[d];
            job->out.batch[to] = p->out.batch[d];
            job->positions.batch[to] = stride;
            job->batch_shape[to++] = p->batch_shape[d];
            job->n_sharing *= sharing ? p->batch_shape[d] : 1;
        }
}

static void *batch_at(const struct rope_job *job, const struct cattn_tensor *tensor, int64_t entry, int64_t token,
                      size_t element) {
    char *at = cattn_row_at(tensor, job->params->n_batch_dims, job->batch_shape, entry, element);
    return at + token * tensor->row * (int64_t)element;
}

static double position_at(const struct rope_job *job, int64_t entry, int64_t token) {
    if (!job->params->positions.data)
        return (double)token;
    return *(const double *)batch_at(job, &job->positions, entry, token, sizeof(double));
}

struct tables {
    double *frequencies;
    void *cosines, *sines;
};

static cattn_size carve(const struct rope_job *job, void *memory, cattn_size size, struct tables *tables) {
    struct cattn_arena arena = cattn_arena(memory, size, true);
    const cattn_size bytes = (cattn_size)(job->block * job->table_row) * cattn_element_size(job->params->dtype);
    tables->frequencies = cattn_carve(&arena, (cattn_size)job->law.n * sizeof(double));
    tables->cosines = cattn_carve(&arena, bytes);
    tables->sines = cattn_carve(&arena, bytes);
    return arena.used;
}

static void fill(const struct rope_job *job, const struct tables *tables, int64_t entry, int64_t token, int64_t n) {
    const struct cattn_rope_params *p = job->params;
    const int64_t row_bytes = job->table_row * (int64_t)cattn_element_size(p->dtype);
    cattn_rope_frequencies(&job->law, job->kernels_f64, tables->frequencies);
    for (int64_t i = 0; i < n; i++) {
        const struct cattn_rope_angles args = {
            .n = job->law.n,
            .frequencies = tables->frequencies,
            .position = position_at(job, entry, token + i),
            .cosine_factor = job->law.attention_factor,
            .sine_factor = p->inverse ? -job->law.attention_factor : job->law.attention_factor,
            .dtype = p->dtype,
            .interleaved = p->interleaved,
            .cosines = (char *)tables->cosines + i * row_bytes,
            .sines = (char *)tables->sines + i * row_bytes,
        };
        job->kernels_f64->rope_angles(&args);
    }
}

static void rope_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct rope_job *job = context;
    const struct cattn_rope_params *p = job->params;
    const size_t element = cattn_stored_size(p->dtype, p->storage);
    const int64_t part = task % job->parts, block = task / job->parts % job->n_blocks;
    const int64_t first = task / job->parts / job->n_blocks * job->n_sharing, token = block * job->block;
    const int64_t n = cattn_min(job->block, p->seqlen - token), begin = part * job->entries_per_task;
    const int64_t end = cattn_min(begin + job->entries_per_task, job->n_sharing);
    struct tables tables;
    char *scratch = cattn_worker_scratch(worker);
    carve(job, scratch, carve(job, NULL, 0, &tables), &tables);
    if (job->law.n > 0) /* else there is no memory for the tables */
        fill(job, &tables, first, token, n);
    for (int64_t i = begin; i < end; i++) {
        if (i % ENTRIES_PER_LOOK == ENTRIES_PER_LOOK - 1 && cattn_should_stop(worker))
            return;
        const struct cattn_rope_rows args = {
            .n_rows = n,
            .n_cols = p->n_cols,
            .rotary_dim = p->rotary_dim,
            .interleaved = p->interleaved,
            .storage = p->storage,
            .x = batch_at(job, &job->x, first + i, token, element),
            .x_row = p->x.row,
            .x_col = p->x.col,
            .out = batch_at(job, &job->out, first + i, token, element),
            .out_row = p->out.row,
            .out_col = p->out.col,
            .cosines = tables.cosines,
            .sines = tables.sines,
            .table_row = job->table_row,
        };
        job->kernels->rope_rows(&args);
    }
}

/* Blocks of tokens, and the division of the entries that share them. Returns the number of tasks. */
static int64_t divide_entries(struct rope_job *job) {
    const struct cattn_rope_params *p = job->params;
    job->table_row = p->interleaved ? p->rotary_dim : p->rotary_dim / 2;
    const int64_t row_bytes = 2 * job->table_row * (int64_t)cattn_element_size(p->dtype);
    const int64_t fitting = row_bytes > 0 ? TABLE_BYTES / row_bytes : p->seqlen;
    job->block = cattn_min(fitting > 0 ? fitting : 1, p->seqlen);
    job->n_blocks = cattn_ceil_div(p->seqlen, job->block);
    const int64_t n_tasks = p->n_batch / job->n_sharing * job->n_blocks;
    const int64_t wanted = (int64_t)p->num_threads * TASKS_EACH;
    job->entries_per_task = job->n_sharing;
    if (p->num_threads > 1 && n_tasks < wanted) {
        const int64_t least = cattn_ceil_div(CATTN_TASK_ELEMENTS, job->block * p->n_cols);
        const int64_t each = cattn_ceil_div(job->n_sharing, cattn_ceil_div(wanted, n_tasks));
        job->entries_per_task = cattn_min(job->n_sharing, each > least ? each : least);
    }
    job->parts = cattn_ceil_div(job->n_sharing, job->entries_per_task);
    return n_tasks * job->parts;
}

enum cattn_status cattn_rope(const struct cattn_rope_params *p) {
    CATTN_CHECK(rope, p);
    if (p->n_batch == 0 || p->seqlen == 0 || p->n_cols == 0)
        return CATTN_OK;
    struct rope_job job = {
        .params = p, .kernels = cattn_row_kernels_for(p->dtype), .kernels_f64 = cattn_row_kernels_for(CATTN_F64)};
    struct tables unused;
    reorder(&job);
    const unsigned mode = cattn_fp_enter(); /* the caller's rounding must not show */
    cattn_rope_settle(p, &job.law);
    cattn_fp_leave(mode);
    const int64_t n_tasks = divide_entries(&job);
    /* waking a second thread for less than a whole task costs more than it gains */
    const bool alone = p->n_batch * p->seqlen * p->n_cols < 2 * CATTN_TASK_ELEMENTS;
    return cattn_parallel_for(n_tasks, alone ? 1 : p->num_threads, carve(&job, NULL, 0, &unused), rope_task, &job,
                              &p->poll);
}
