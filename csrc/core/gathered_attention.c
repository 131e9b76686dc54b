/* gathered_attention.c -- the driver of attention with key_indices: gathers the keys of each unit and hands its call to
 * the driver of all other calls. See gathered_keys.h.
 */
#include <stdatomic.h>
#include <string.h>

#include "check_params.h"
#include "gathered_keys.h"

struct gathered_job {
    const struct cattn_attention_params *params;
    struct cattn_gather_plan plan;
    size_t scratch_size;
    atomic_int status; /* the first that is not CATTN_OK */
};

/* The weight, or the score, of a place that has no key, as it is stored. */
static uint64_t number_of_no_key(const struct cattn_attention_params *p) {
    static const uint64_t neg_inf[2][CATTN_STORED_BF16 + 1] = {{0xff800000, 0xfc00, 0xff80}, {0xfff0000000000000}};
    return p->store_scores ? neg_inf[p->dtype][p->storage] : 0;
}

/* A constant size makes it fast. */
static inline void spread(const struct cattn_attention_params *p, const struct cattn_gather *g, char *row, int64_t col,
                          size_t size) {
    const uint64_t number = number_of_no_key(p);
    char none[sizeof number];
    const uint16_t half = (uint16_t)number;
    const uint32_t single = (uint32_t)number;
    memcpy(none,
           size == sizeof half     ? (const void *)&half
           : size == sizeof single ? (const void *)&single
                                   : &number,
           size);
    const int64_t step = col * (int64_t)size;
    for (int64_t place = p->n_indices - 1, k = g->n_keys - 1; place >= 0; place--) {
        const bool has_key = k >= 0 && g->place[k] == place;
        memmove(row + place * step, has_key ? row + k * step : none, size);
        k -= has_key;
    }
}

/* Moves the weights of the gathered keys, which are the first ones of a row, to their places in the list: from the last
 * one on, because none moves to the left. */
static void spread_row(const struct cattn_attention_params *p, const struct cattn_gather *g, void *row, int64_t col) {
    const size_t stored = cattn_stored_size(p->dtype, p->storage);
    if (stored == sizeof(uint16_t))
        spread(p, g, row, col, sizeof(uint16_t));
    else if (stored == sizeof(uint32_t))
        spread(p, g, row, col, sizeof(uint32_t));
    else
        spread(p, g, row, col, sizeof(uint64_t));
}

static void spread_weights(const struct cattn_attention_params *p, const struct cattn_gather *g) {
    const struct cattn_tensor *weights = &g->call.weights;
    if (!weights->data || g->n_keys == p->n_indices)
        return;
    for (int64_t head = 0; head < g->call.num_heads; head++)
        for (int64_t row = 0; row < g->n_rows; row++)
            spread_row(p, g, cattn_stored_at(p, weights, head * weights->head + row * weights->row), weights->col);
}

static void run_unit(void *context, int64_t unit, struct cattn_worker *worker) {
    struct gathered_job *job = context;
    const struct cattn_attention_params *p = job->params;
    struct cattn_arena arena = cattn_arena(cattn_worker_scratch(worker), job->scratch_size, true);
    struct cattn_gather *g = cattn_gather_lay_out(&job->plan, p, &arena);
    const size_t stored = cattn_stored_size(p->dtype, p->storage);
    cattn_gather_unit(&job->plan, p, unit, worker, g);
    g->call.out = cattn_gather_part(g, &p->out, g->batch.out, stored);
    g->call.weights = cattn_gather_part(g, &p->weights, g->batch.weights, stored);
    g->call.lse =
        cattn_gather_part(g, &p->lse, g->batch.lse, p->double_lse ? sizeof(double) : cattn_element_size(p->dtype));
    const enum cattn_status status = cattn_attention(&g->call);
    if (status != CATTN_OK) {
        int ok = CATTN_OK;
        atomic_compare_exchange_strong(&job->status, &ok, status);
        return;
    }
    spread_weights(p, g);
}

enum cattn_status cattn_gathered_attention(const struct cattn_attention_params *params) {
    CATTN_CHECK(attention, params);
    struct gathered_job job = {.params = params, .plan = cattn_gather_plan(params, false)};
    struct cattn_arena count = cattn_arena(NULL, 0, true);
    cattn_gather_lay_out(&job.plan, params, &count);
    job.scratch_size = count.used;
    atomic_init(&job.status, CATTN_OK);
    const enum cattn_status status =
        cattn_parallel_for(job.plan.n_units, job.plan.num_threads, job.scratch_size, run_unit, &job, &params->poll);
    return status == CATTN_OK ? (enum cattn_status)atomic_load(&job.status) : status;
}
