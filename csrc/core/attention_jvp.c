/* attention_jvp.c -- the driver of the derivative of attention in the direction of tangents.
 *
 * After the forward pass, each block of queries of each head meets the keys that it sees.
 */
#include "attention.h"
#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "plan.h"

struct jvp_job {
    const struct cattn_jvp_params *params;
    const struct cattn_kernels *kernels;
    struct cattn_jvp_plan plan;
    struct cattn_call_shape scores;
    struct cattn_tangent_calls tangent_calls;
};

static struct cattn_jvp *set_up(const struct jvp_job *job, int64_t task, void *memory) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tangents *tangents = &job->params->tangents;
    const int64_t unit = task / job->plan.blocks_per_head, block = task % job->plan.blocks_per_head;
    const struct cattn_place place = {unit / p->num_heads, unit % p->num_heads, block * CATTN_TILE_ROWS};
    struct cattn_jvp *j = cattn_jvp_lay_out(&job->plan, job->params, job->kernels, memory);
    struct cattn_rows *rows = &j->scores;
    cattn_rows_of_block(rows, p, &job->scores, place.batch, place.head, block);
    cattn_score_tangents_fill(&j->tangents, p, tangents, &job->tangent_calls, rows, &place);
    const struct cattn_matrix value = cattn_tangent_matrix(p, &tangents->value, rows, &place);
    cattn_rows_view(&j->values, &job->scores, rows, NULL, &rows->value);
    cattn_rows_view(&j->value_tangents, &job->scores, rows, NULL, &value);
    j->has_value = tangents->value.data;
    j->out_tangent_col = tangents->out.col;
    for (int r = 0; r < rows->n_rows; r++) {
        j->out_tangent[r] = cattn_tangent_row(p, &tangents->out, &place, r, true);
        j->lse_tangent[r] = cattn_tangent_row(p, &tangents->lse, &place, r, false);
    }
    return j;
}

static void block_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct jvp_job *job = context;
    struct cattn_jvp *j = set_up(job, task, cattn_worker_scratch(worker));
    const struct cattn_range keys = cattn_rows_keys(&j->scores);
    job->kernels->jvp_begin(j);
    for (int64_t key_block = 0; key_block < job->plan.n_key_blocks; key_block++) {
        const int64_t k0 = key_block * CATTN_BLOCK_KEYS, k1 = cattn_block_end(k0, j->scores.n_keys);
        if (cattn_should_stop(worker))
            return;
        if (cattn_rows_see_block(&j->scores, keys, k0, k1))
            job->kernels->jvp_block(j, k0, k1);
    }
    job->kernels->jvp_finish(j);
}

enum cattn_status cattn_attention_jvp(const struct cattn_jvp_params *params) {
    CATTN_CHECK(jvp, params);
    const struct cattn_attention_params *p = &params->forward;
    const enum cattn_status status = params->has_results ? CATTN_OK : cattn_attention(p);
    if (status != CATTN_OK)
        return status;
    struct jvp_job job = {.params = params, .kernels = cattn_kernels_for(p->dtype)};
    job.plan = cattn_jvp_plan(params, job.kernels);
    cattn_call_shape_fill(p, &job.scores);
    cattn_tangent_calls_fill(&job.scores, &params->tangents, &job.tangent_calls);
    if (job.plan.n_tasks == 0)
        return CATTN_OK;
    return cattn_parallel_for(job.plan.n_tasks, job.plan.num_threads, job.plan.scratch_size, block_task, &job,
                              &p->poll);
}
