/* attention.c -- the drivers of attention: the tasks of a plan, and in each task the kernels, key block by key block.
 *
 * The binding calls them with checked parameters. A task lays out its scratch, fills a struct cattn_rows with pointers
 * to its queries, masks and outputs, and calls the kernels for the key blocks of each chunk. The four paths differ in
 * the block kernel, in the source of the scratch and in who merges the chunks; never in the order of a sum.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../fp_mode.h"
#include "attention.h"
#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "plan.h"
#include "random.h"
#include "scratch.h"

struct forward_job {
    const struct cattn_attention_params *params;
    const struct cattn_kernels *kernels;
    struct cattn_plan plan;
    struct cattn_call_shape call;
    /* split path: the partial results of the tasks of a wave, which starts at first_task */
    int64_t first_task;
    char *partials;
    cattn_size partial_size, stats_size, acc_size; /* of a partial result; of its maxima or sums; of its accumulator */
    struct cattn_dropout_stream *dropout_stream;   /* serial dropout bits, or NULL */
    bool overflowed, small_weights;                /* split path: a block overflowed; this is its repetition */
};

/* A second attempt at the elements of the output whose sums overflowed; the other results are there. */
static void make_weights_small(struct cattn_rows *rows) {
    rows->small_weights = true;
    rows->call.has_lse = rows->call.has_weights = false;
}

/* Fills the rows of one block, with packed queries; their scratch must be set. */
static void fill_rows(const struct forward_job *job, int64_t block, struct cattn_rows *rows) {
    const struct cattn_attention_params *p = job->params;
    const struct cattn_row_block at = cattn_plan_block(&job->plan, block);
    struct cattn_batch batch;
    cattn_batch_fill(p, at.batch, &batch);
    rows->call = job->call;
    rows->overflowed = rows->small_weights = false;
    if (job->small_weights)
        make_weights_small(rows);
    rows->n_rows = at.n_rows;
    cattn_rows_of_batch(rows, p, &batch, at.first_head / p->group_size);
    /* a unit of several heads is flattened: a block may hold the end of one head and the start of the next */
    int64_t head = at.first_head + at.first_row / p->seqlen_q, i = at.first_row % p->seqlen_q;
    for (int r = 0, n; r < rows->n_rows; r += n, head++, i = 0) {
        n = (int)cattn_min(p->seqlen_q - i, rows->n_rows - r);
        cattn_rows_of_head(rows, p, &batch, r, n, head, i);
    }
    if (job->plan.path == CATTN_PATH_TILE)
        job->kernels->pack_query_tile(rows);
    else
        job->kernels->pack_query_rows(rows);
}

/* The scratch and the rows of one block. */
static struct cattn_rows *set_up(const struct forward_job *job, int64_t block, void *memory) {
    struct cattn_rows *blocks[CATTN_MOST_BLOCKS];
    cattn_plan_lay_out(&job->plan, job->params, job->kernels, memory, blocks);
    fill_rows(job, block, blocks[0]);
    return blocks[0];
}

static void swap(void **a, void **b) {
    void *t = *a;
    *a = *b;
    *b = t;
}

/* Merges the finished chunk into the total. The first chunk becomes the total: swapping pointers saves the copy. */
static void merge_chunk(const struct forward_job *job, struct cattn_rows *rows, bool first) {
    if (!first) {
        job->kernels->chunk_merge(rows);
        return;
    }
    swap(&rows->scratch.row_max, &rows->scratch.total_max);
    swap(&rows->scratch.row_sum, &rows->scratch.total_sum);
    swap(&rows->scratch.acc, &rows->scratch.total_acc);
}

/* A block of rows on its way through the keys. */
struct walk {
    struct cattn_rows *rows;
    int64_t next, end; /* the next key block, INT64_MAX after the last one, and the end of the keys */
    bool has_total;
};

static void end_chunk(const struct forward_job *job, struct walk *walk) {
    if (job->plan.path == CATTN_PATH_TILE && job->kernels->chunk_end)
        job->kernels->chunk_end(walk->rows);
    merge_chunk(job, walk->rows, !walk->has_total);
    walk->has_total = true;
}

/* Also without keys there is an empty chunk: `finish` needs an initialised state. Blocks are counted from the first
 * valid key, even if the first visible one is inside a block: the bit contract fixes the sums. */
static struct walk begin_walk(const struct forward_job *job, struct cattn_rows *rows, struct cattn_range keys) {
    const int64_t first = cattn_rows_next_block(rows, keys.lo / CATTN_BLOCK_KEYS * CATTN_BLOCK_KEYS, keys.hi);
    struct walk walk = {rows, first < keys.hi ? first : INT64_MAX, keys.hi, false};
    job->kernels->chunk_begin(rows);
    if (first >= keys.hi)
        end_chunk(job, &walk);
    return walk;
}

/* Runs the block kernel at the next key block. Chunks that the rows do not see are left out: a merge with one changes
 * nothing. */
static void step(const struct forward_job *job, struct walk *walk) {
    struct cattn_rows *rows = walk->rows;
    const int64_t k0 = walk->next, k1 = cattn_block_end(k0, rows->n_keys);
    if (job->plan.path == CATTN_PATH_TILE)
        job->kernels->tile_block(rows, k0, k1);
    else
        job->kernels->rows_block(rows, k0, k1);
    const int64_t next = cattn_rows_next_block(rows, k0 + CATTN_BLOCK_KEYS, walk->end);
    const bool goes_on = next < walk->end;
    walk->next = goes_on ? next : INT64_MAX;
    if (goes_on && next / CATTN_CHUNK_KEYS == k0 / CATTN_CHUNK_KEYS)
        return;
    end_chunk(job, walk);
    if (goes_on)
        job->kernels->chunk_begin(rows);
}

/* Copies a key block of a list, for the blocks of rows that are at it. */
static void copy_listed_block(const struct forward_job *job, const struct walk *walks, int n, int64_t k0, int64_t k1) {
    const struct cattn_attention_params *p = job->params;
    struct cattn_matrix key, value;
    cattn_copy_listed_keys(p, p->key_list, k0, k1, &walks[0].rows->scratch.listed, &key, &value);
    for (int i = 0; i < n; i++)
        if (walks[i].next == k0) {
            walks[i].rows->key = key;
            walks[i].rows->value = value;
        }
}

/* Leads blocks of rows through their keys, together: a key block comes from memory once for all of them. Returns false
 * if the call was stopped. worker is NULL on the tiny path. */
static bool walk_keys(const struct forward_job *job, struct walk *walks, int n, struct cattn_worker *worker) {
    for (;;) {
        struct cattn_rows *rows = NULL; /* of a block that is at the first key block */
        int64_t k0 = INT64_MAX;
        int n_here = 0;
        for (int i = 0; i < n; i++) {
            n_here = walks[i].next < k0 ? 1 : n_here + (walks[i].next == k0);
            rows = walks[i].next < k0 ? walks[i].rows : rows;
            k0 = cattn_min(k0, walks[i].next);
        }
        if (k0 == INT64_MAX)
            return true;
        if (worker && cattn_should_stop(worker))
            return false;
        const bool packs = job->kernels->pack_block && n_here >= CATTN_LEAST_BLOCKS;
        const int64_t k1 = cattn_block_end(k0, rows->n_keys);
        if (job->params->key_list)
            copy_listed_block(job, walks, n, k0, k1);
        if (packs)
            job->kernels->pack_block(rows, k0, k1);
        for (int i = 0; i < n; i++)
            if (walks[i].next == k0) {
                walks[i].rows->call.packed_block = packs;
                step(job, &walks[i]);
            }
    }
}

/* Blocks of rows from their packed queries to the output. */
static void run_rows(const struct forward_job *job, struct cattn_rows *const *blocks, int n,
                     struct cattn_worker *worker) {
    struct walk walks[CATTN_MOST_BLOCKS];
    for (int i = 0; i < n; i++)
        walks[i] = begin_walk(job, blocks[i], cattn_rows_keys(blocks[i]));
    if (walk_keys(job, walks, n, worker))
        for (int i = 0; i < n; i++)
            job->kernels->finish(blocks[i]);
}

/* Whether the block starts past the end of its packed sequence: all sequences are cut as if they had the longest one's
 * length. In a unit of several heads a later head may still have rows, so such blocks always run. */
static bool is_past_end(const struct forward_job *job, int64_t block) {
    if (!job->params->query_starts.data || job->plan.heads_per_unit > 1)
        return false;
    const struct cattn_row_block at = cattn_plan_block(&job->plan, block);
    struct cattn_batch batch;
    cattn_batch_fill(job->params, at.batch, &batch);
    return at.first_row >= batch.batch_range.n_queries;
}

/* Some blocks of one unit from packing to output. */
static void run_task(const struct forward_job *job, int64_t first, int n_blocks, void *memory,
                     struct cattn_worker *worker) {
    struct cattn_rows *blocks[CATTN_MOST_BLOCKS];
    int n = 0;
    cattn_plan_lay_out(&job->plan, job->params, job->kernels, memory, blocks);
    for (int64_t block = first; block < first + n_blocks; block++)
        if (!is_past_end(job, block))
            fill_rows(job, block, blocks[n++]);
    if (n > 0 && job->dropout_stream && !cattn_dropout_stream_take(job->dropout_stream, first, blocks[0], worker))
        return;
    run_rows(job, blocks, n, worker);
    for (int i = 0; i < n; i++)
        if (blocks[i]->overflowed) {
            make_weights_small(blocks[i]);
            run_rows(job, &blocks[i], 1, worker);
        }
}

static void block_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct forward_job *job = context;
    const bool tiles = job->plan.path == CATTN_PATH_TILE && job->kernels->tiles_begin;
    int n_blocks;
    const int64_t first = cattn_plan_first_block(&job->plan, task, &n_blocks);
    if (tiles)
        job->kernels->tiles_begin();
    run_task(job, first, n_blocks, cattn_worker_scratch(worker), worker);
    if (tiles)
        job->kernels->tiles_end();
}

/* ---- split path: tasks are pairs (block of rows, key chunk), whose results are merged in order between waves ---- */

/* Copies the total of one chunk to its place in the wave, or back to the running state. */
static void copy_partial(const struct forward_job *job, int64_t index, const struct cattn_rows *rows, bool back) {
    const struct cattn_row_scratch *s = &rows->scratch;
    void *const arrays[] = {back ? s->row_max : s->total_max, back ? s->row_sum : s->total_sum,
                            back ? s->acc : s->total_acc};
    char *place = job->partials + (cattn_size)index * job->partial_size;
    const size_t sizes[] = {(size_t)job->stats_size, (size_t)job->stats_size, (size_t)job->acc_size};
    for (int i = 0; i < 3; place += sizes[i++])
        memcpy(back ? arrays[i] : place, back ? place : arrays[i], sizes[i]);
}

static void split_task(void *context, int64_t index, struct cattn_worker *worker) {
    const struct forward_job *job = context;
    const int64_t task = job->first_task + index;
    struct cattn_rows *rows = set_up(job, task / job->plan.n_chunks, cattn_worker_scratch(worker));
    const int64_t begin = task % job->plan.n_chunks * CATTN_CHUNK_KEYS;
    struct cattn_range keys = cattn_rows_keys(rows);
    keys = (struct cattn_range){keys.lo > begin ? keys.lo : begin, cattn_min(keys.hi, begin + CATTN_CHUNK_KEYS)};
    struct walk walk = begin_walk(job, rows, keys);
    if (walk_keys(job, &walk, 1, worker))
        copy_partial(job, index, rows, false);
}

/* Merges the chunks of a wave of n tasks into the totals of their blocks, in order. `rows` keeps the current block and
 * its total between waves, because the chunks of a block may span several waves. */
static void merge_wave(struct forward_job *job, int64_t n, void *memory, struct cattn_rows **rows) {
    for (int64_t index = 0; index < n; index++) {
        const int64_t task = job->first_task + index, chunk = task % job->plan.n_chunks;
        if (chunk == 0)
            *rows = set_up(job, task / job->plan.n_chunks, memory);
        assert(*rows); /* the first wave starts with chunk 0 of a block */
        copy_partial(job, index, *rows, true);
        merge_chunk(job, *rows, chunk == 0);
        if (chunk == job->plan.n_chunks - 1) {
            job->kernels->finish(*rows);
            job->overflowed |= (*rows)->overflowed;
        }
    }
}

/* All tasks, a wave at a time. The block that is being merged has `memory` of its own. */
static enum cattn_status run_waves(struct forward_job *job, int64_t n_tasks, int64_t wave, void *memory) {
    const struct cattn_plan *plan = &job->plan;
    const struct cattn_poll *poll = &job->params->poll;
    struct cattn_rows *rows = NULL;
    int64_t next_poll = 0;
    for (job->first_task = 0; job->first_task < n_tasks; job->first_task += wave) {
        const int64_t n = cattn_min(n_tasks - job->first_task, wave);
        const enum cattn_status status =
            cattn_parallel_for(n, plan->num_threads, plan->scratch_size, split_task, job, poll);
        if (status != CATTN_OK)
            return status;
        unsigned mode = cattn_fp_enter();
        merge_wave(job, n, memory, &rows);
        cattn_fp_leave(mode);
        if (cattn_poll_between(poll, &next_poll))
            return CATTN_INTERRUPTED;
    }
    return CATTN_OK;
}

static enum cattn_status run_split(struct forward_job *job, int64_t n_blocks) {
    const struct cattn_attention_params *p = job->params;
    struct cattn_plan *plan = &job->plan;
    if (plan->n_chunks == 0)
        plan->n_chunks = 1; /* no keys: one empty chunk */
    const size_t element = cattn_element_size(p->dtype);
    job->stats_size = (cattn_size)cattn_plan_row_slots(plan) * element;
    job->acc_size = CATTN_FEW_ROWS * (cattn_size)cattn_plan_acc_cols(p) * element;
    job->partial_size = 2 * job->stats_size + (job->acc_size + 63) / 64 * 64; /* the scratch after them stays aligned */
    const int64_t n_tasks = n_blocks * plan->n_chunks;
    const int64_t wave = cattn_plan_wave(plan, n_tasks, job->partial_size);
    const cattn_size partials_size = (cattn_size)wave * job->partial_size;
    char *memory = cattn_allocate(partials_size + plan->scratch_size + 64); /* 64: room for the alignment */
    if (!memory)
        return CATTN_NO_MEMORY;
    job->partials = memory + (64 - (uintptr_t)memory % 64) % 64;
    enum cattn_status status = run_waves(job, n_tasks, wave, job->partials + partials_size);
    if (status == CATTN_OK && job->overflowed) {
        job->small_weights = true;
        status = run_waves(job, n_tasks, wave, job->partials + partials_size);
    }
    free(memory);
    return status;
}

/* ---- the dropout mask as an output of its own ---- */

/* One head of one batch entry: by position, so that it does not depend on the path that computed the output. */
static void mask_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct forward_job *job = context;
    const struct cattn_attention_params *p = job->params;
    const struct cattn_tensor *mask = &p->dropout_mask;
    const struct cattn_row_kernels *kernels = cattn_row_kernels_for(p->dtype);
    const int64_t head = task % p->num_heads;
    struct cattn_batch batch;
    struct cattn_drop drop;
    cattn_batch_fill(p, task / p->num_heads, &batch);
    cattn_drop_fill(&p->dropout, batch.index, &drop);
    const int64_t first_key = batch.batch_range.first_key;
    uint8_t *to = (uint8_t *)mask->data + cattn_batch_start(p, mask, batch.index) + head * mask->head;
    for (int64_t i = 0; i < p->seqlen_q && !cattn_should_stop(worker); i++, to += mask->row) {
        for (int64_t k = 0; k < first_key; k++)
            to[k * mask->col] = 1; /* nothing is dropped from the padding */
        kernels->dropout_mask_row(&drop, (uint32_t)(i + batch.batch_range.offset), (uint32_t)head,
                                  to + first_key * mask->col, mask->col, p->seqlen_k - first_key);
    }
}

/* The dropout mask of a serial stream, on one thread. It draws the same bits again with a second cursor. */
static void stream_mask_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct forward_job *job = context;
    const struct cattn_attention_params *p = job->params;
    const struct cattn_tensor *mask = &p->dropout_mask;
    const int64_t n_rows = p->n_batch * p->num_heads * p->seqlen_q;
    struct cattn_torch_dropout cursor;
    uint8_t kept[CATTN_STREAM_KEYS];
    (void)task; /* there is one */
    cattn_torch_dropout_begin(&cursor, p->dropout.torch, p->dropout.keep_probability);
    for (int64_t row = 0; row < n_rows; row++) {
        const int64_t head = row / p->seqlen_q % p->num_heads, batch = row / p->seqlen_q / p->num_heads;
        uint8_t *to = (uint8_t *)mask->data + cattn_batch_start(p, mask, batch) + head * mask->head +
                      row % p->seqlen_q * mask->row;
        for (int64_t k0 = 0, n; k0 < p->seqlen_k; k0 += n) {
            n = cattn_dropout_stream_keys(&cursor, k0, p->seqlen_k, kept, worker);
            if (n == 0)
                return;
            for (int64_t k = 0; k < n; k++)
                to[(k0 + k) * mask->col] = kept[k];
        }
    }
}

static enum cattn_status run_mask(struct forward_job *job) {
    const struct cattn_attention_params *p = job->params;
    if (job->dropout_stream)
        return cattn_parallel_for(1, 1, 0, stream_mask_task, job, &p->poll);
    return cattn_parallel_for(p->n_batch * p->num_heads, p->num_threads, 0, mask_task, job, &p->poll);
}

/* ---- choice of the path ---- */

/* One thread and one floating-point mode for the whole call. */
static void run_tiny_blocks(const struct forward_job *job, int64_t n_blocks, void *memory) {
    unsigned mode = cattn_fp_enter();
    for (int64_t block = 0; block < n_blocks; block++)
        run_task(job, block, 1, memory, NULL);
    cattn_fp_leave(mode);
}

/* Not inlined, so that no other path has this memory in its frame. */
static __attribute__((noinline)) void run_on_stack(const struct forward_job *job, int64_t n_blocks) {
    _Alignas(64) char memory[CATTN_TINY_STACK];
    run_tiny_blocks(job, n_blocks, memory);
}

/* Without pool or poll: such a call is over before another thread could start. */
static enum cattn_status run_tiny(const struct forward_job *job, int64_t n_blocks) {
    if (job->plan.scratch_size <= CATTN_TINY_STACK) {
        run_on_stack(job, n_blocks);
        return CATTN_OK;
    }
    struct cattn_scratch scratch;
    if (!cattn_scratch_take(&scratch, job->plan.scratch_size))
        return CATTN_NO_MEMORY;
    run_tiny_blocks(job, n_blocks, scratch.data);
    cattn_scratch_give_back(&scratch);
    return CATTN_OK;
}

static enum cattn_status run_blocks(struct forward_job *job) {
    const struct cattn_attention_params *p = job->params;
    const int64_t n_blocks = job->plan.n_units * job->plan.blocks_per_unit;
    if (n_blocks == 0)
        return CATTN_OK;
    if (job->plan.path == CATTN_PATH_TINY)
        return run_tiny(job, n_blocks);
    if (job->plan.path == CATTN_PATH_SPLIT)
        return run_split(job, n_blocks);
    const int64_t n_tasks = job->plan.n_units * job->plan.tasks_per_unit;
    return cattn_parallel_for(n_tasks, job->plan.num_threads, job->plan.scratch_size, block_task, job, &p->poll);
}

static enum cattn_status run(struct forward_job *job) {
    const enum cattn_status status = run_blocks(job);
    return status == CATTN_OK && job->params->dropout_mask.data ? run_mask(job) : status;
}

/* Not inlined: the stream is large, and other calls have no room for it in their frames. */
static __attribute__((noinline)) enum cattn_status run_with_stream(struct forward_job *job) {
    const struct cattn_dropout_spec *dropout = &job->params->dropout;
    struct cattn_dropout_stream stream;
    cattn_dropout_stream_begin(&stream, dropout->torch, dropout->keep_probability);
    job->dropout_stream = &stream;
    const enum cattn_status status = run(job);
    /* a call that failed leaves the generator where it was */
    cattn_dropout_stream_end(&stream, status == CATTN_OK ? dropout->torch : NULL);
    return status;
}

static enum cattn_status attend(const struct cattn_attention_params *params) {
    struct forward_job job;
    job.params = params;
    const struct cattn_kernel_pair kernels = cattn_attention_kernels(params);
    job.plan = cattn_plan(params, kernels.tiles);
    job.kernels = job.plan.path == CATTN_PATH_TILE ? kernels.tiles : kernels.few;
    cattn_call_shape_fill(params, &job.call);
    job.dropout_stream = NULL;
    job.overflowed = job.small_weights = false;
    return job.plan.uses_stream ? run_with_stream(&job) : run(&job);
}

enum cattn_status cattn_attention(const struct cattn_attention_params *params) {
    CATTN_CHECK(attention, params);
    struct cattn_rounded_keys *rounded = NULL;
    enum cattn_status status = cattn_rounds_keys(params) ? cattn_round_keys(params, &rounded) : CATTN_OK;
    if (status == CATTN_OK)
        status = attend(rounded ? &rounded->params : params);
    free(rounded);
    return status;
}

/* ---- explaining a call instead of computing it ---- */

/* The number of keys in a range that the block mask shows to row r. */
static int64_t count_keys(const struct cattn_rows *rows, int r, struct cattn_range keys) {
    const int64_t size = rows->call.block_size;
    if (!rows->call.has_block_mask || keys.lo >= keys.hi)
        return keys.lo < keys.hi ? keys.hi - keys.lo : 0;
    int64_t n = 0;
    for (int64_t key = keys.lo, end; key < keys.hi; key = end) {
        const int64_t at = (rows->first_key + key) / size;
        end = cattn_min(keys.hi, (at + 1) * size - rows->first_key);
        n += rows->per_row->block_mask[r][at * rows->call.block_mask_col] ? end - key : 0;
    }
    return n;
}

/* Adds to *explanation what a block of rows visits. */
static void explain_block(const struct forward_job *job, int64_t block, struct cattn_explanation *explanation) {
    const struct cattn_attention_params *p = job->params;
    const struct cattn_row_block at = cattn_plan_block(&job->plan, block);
    struct cattn_batch batch;
    const uint8_t *block_masks[CATTN_TILE_ROWS];
    struct cattn_per_row per_row = {.block_mask = block_masks};
    struct cattn_rows rows = {.call = job->call, .per_row = &per_row, .n_rows = at.n_rows};
    cattn_batch_fill(p, at.batch, &batch);
    rows.first_key = batch.batch_range.first_key;
    struct cattn_range all = {0, 0};
    for (int r = 0; r < at.n_rows; r++) {
        const int64_t i = (at.first_row + r) % p->seqlen_q, head = at.first_head + (at.first_row + r) / p->seqlen_q;
        const struct cattn_range keys = cattn_visible_keys(&batch.batch_range, i);
        if (p->block_mask.data)
            cattn_block_masks_of_head(&per_row, p, &batch, r, 1, head, i);
        explanation->n_keys += count_keys(&rows, r, keys);
        all = cattn_range_union(all, keys);
    }
    for (int64_t k0 = all.lo / CATTN_BLOCK_KEYS * CATTN_BLOCK_KEYS; k0 < all.hi; k0 += CATTN_BLOCK_KEYS)
        explanation->n_visited += cattn_rows_see_block(&rows, all, k0, cattn_min(k0 + CATTN_BLOCK_KEYS, all.hi));
}

enum cattn_status cattn_attention_explain(const struct cattn_attention_params *params,
                                          struct cattn_explanation *explanation) {
    CATTN_CHECK(attention, params);
    struct forward_job job = {.params = params, .kernels = cattn_attention_kernels(params).tiles};
    job.plan = cattn_plan(params, job.kernels);
    cattn_call_shape_fill(params, &job.call);
    const int64_t n_blocks = job.plan.n_units * job.plan.blocks_per_unit;
    const int64_t n_key_blocks = cattn_ceil_div(params->seqlen_k, CATTN_BLOCK_KEYS);
    const bool split = job.plan.path == CATTN_PATH_SPLIT;
    *explanation = (struct cattn_explanation){.path = job.plan.path,
                                              .n_tasks = split ? n_blocks * job.plan.n_chunks
                                                               : job.plan.n_units * job.plan.tasks_per_unit,
                                              .task_rows = job.plan.task_blocks * job.plan.block_rows,
                                              .scratch_size = job.plan.scratch_size};
    int64_t next_poll = 0; /* ranges of long batches take a while, so Ctrl-C must work */
    for (int64_t block = 0; block < n_blocks; block++) {
        explain_block(&job, block, explanation);
        if (cattn_poll_between(&params->poll, &next_poll))
            return CATTN_INTERRUPTED;
    }
    explanation->n_skipped = n_blocks * n_key_blocks - explanation->n_visited;
    return CATTN_OK;
}
