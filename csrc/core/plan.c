/* plan.c -- choice of path, cut into tasks, scratch layout; see plan.h. All tuning numbers of attention stand here. */
#include "plan.h"

#include <assert.h>

#include "arena.h"
#include "dispatch.h"
#include "dropout_stream.h"

/* A call below this many multiply-adds costs less than waking a thread or polling for Ctrl-C. */
#define TINY_WORK 100000.0
/* Key chunks are worth handing to other threads from here on: some 30 us of work. */
#define SPLIT_WORK 600000.0
/* Up to this many rows a unit, threads that share out the keys beat tiles that one thread has to itself. With up to
 * CATTN_FEW_ROWS, one pass of the row kernel, keys stream past faster than tiles that would be mostly empty fill. */
#define SPLIT_ROWS 16

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

double cattn_attention_work(const struct cattn_attention_params *p) {
    double visible =
        (double)p->seqlen_q * (double)(p->seqlen_k > 0 ? p->seqlen_k : 1); /* rows cost without keys, too */
    return (double)p->n_batch * (double)p->num_heads * visible * (double)(p->head_dim + p->d_v + 8);
}

int64_t cattn_plan_acc_cols(const struct cattn_attention_params *p) { return round_up(p->d_v, CATTN_PAD); }

int64_t cattn_plan_row_slots(const struct cattn_plan *plan) { return round_up(plan->task_rows, CATTN_PAD); }

static bool is_tile(const struct cattn_plan *plan) { return plan->path == CATTN_PATH_TILE; }

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

bool cattn_plan_copies(const struct cattn_attention_params *p, const struct cattn_tensor *tensor) {
    return tensor->data && (p->storage != CATTN_STORED_PLAIN || tensor->col != 1);
}

bool cattn_attention_counts_fit(const struct cattn_attention_params *p) {
    /* no array has as many elements of its own; so scratch of a block of rows is a sum of few products below 2^59 */
    const int64_t most = (int64_t)1 << 48;
    const double rows = (double)p->n_batch * (double)p->num_heads * ((double)p->seqlen_q + CATTN_TILE_ROWS);
    const double pairs = rows * ((double)p->seqlen_k + CATTN_BLOCK_KEYS);
    return p->seqlen_q <= most && p->seqlen_k <= most && p->head_dim <= most && p->d_v <= most && pairs < 0x1p62;
}

/* One place for the layout: called without memory to measure it, with memory to cut it. */
static void lay_out(const struct cattn_plan *plan, const struct cattn_attention_params *p,
                    const struct cattn_kernels *kernels, struct cattn_rows *r, struct cattn_arena *arena) {
    const bool tile = is_tile(plan), one_chunk = plan->n_chunks <= 1;
    const size_t size = cattn_element_size(p->dtype), slots = (size_t)cattn_plan_row_slots(plan);
    const size_t rows = (size_t)(tile ? CATTN_TILE_ROWS : CATTN_FEW_ROWS), depth = (size_t)p->head_dim;
    const size_t acc = rows * (size_t)cattn_plan_acc_cols(p);
    const size_t panel = (size_t)kernels->lanes * (size_t)kernels->nr;
    const size_t copied_key = cattn_plan_copies(p, &p->key) ? depth : 0;
    const size_t copied_value = cattn_plan_copies(p, &p->value) ? (size_t)p->d_v : 0;
    const bool narrowed = p->weights.data && p->storage != CATTN_STORED_PLAIN;
    r->drop_bits[0] = plan->uses_stream ? cattn_carve(arena, rows * cattn_dropout_stream_row_bytes(p->seqlen_k)) : NULL;
    r->packed_query = cattn_carve(arena, rows * depth * size);
    r->score = cattn_carve(arena, rows * CATTN_BLOCK_KEYS * size);
    r->cap_slope = NULL;
    r->value_panel = cattn_carve(arena, CATTN_HALF_BLOCK * (tile ? panel : copied_value) * size);
    r->key_copy = cattn_carve(arena, (tile ? (size_t)kernels->mr * depth : (size_t)kernels->lanes * copied_key) * size);
    r->block_copy = cattn_carve(arena, tile ? CATTN_BLOCK_KEYS * max_size(copied_key, copied_value) * size : 0);
    r->weight_rows = cattn_carve(arena, narrowed ? rows * (size_t)p->seqlen_k * size : 0);
    r->block_max = cattn_carve(arena, slots * size);
    r->alpha = cattn_carve(arena, slots * size);
    r->row_max = cattn_carve(arena, slots * size);
    r->row_sum = cattn_carve(arena, slots * size);
    r->acc = cattn_carve(arena, acc * size);
    /* a single chunk is the total: the second set of pointers is never written */
    r->total_max = one_chunk ? r->row_max : cattn_carve(arena, slots * size);
    r->total_sum = one_chunk ? r->row_sum : cattn_carve(arena, slots * size);
    r->total_acc = one_chunk ? r->acc : cattn_carve(arena, acc * size);
}

struct cattn_rows *cattn_plan_lay_out(const struct cattn_plan *plan, const struct cattn_attention_params *params,
                                      const struct cattn_kernels *kernels, void *memory) {
    struct cattn_arena arena = cattn_arena(memory, plan->scratch_size, plan->path != CATTN_PATH_TINY);
    struct cattn_rows *rows = cattn_carve(&arena, sizeof *rows);
    lay_out(plan, params, kernels, rows, &arena);
    assert(arena.used == plan->scratch_size);
    return rows;
}

static void cut(struct cattn_plan *plan, const struct cattn_attention_params *p, const struct cattn_kernels *kernels,
                enum cattn_path path) {
    /* key chunks of the same rows cannot take turns in row-major order, nor share rows of weights in scratch */
    const bool together = plan->uses_stream || (p->weights.data && p->storage != CATTN_STORED_PLAIN);
    plan->path = together && path == CATTN_PATH_SPLIT ? CATTN_PATH_ROWS : path;
    plan->task_rows = is_tile(plan) ? CATTN_TILE_ROWS : CATTN_FEW_ROWS;
    plan->blocks_per_unit = ceil_div(plan->unit_rows, plan->task_rows);
    struct cattn_arena count = cattn_arena(NULL, 0, false);
    struct cattn_rows unused;
    cattn_carve(&count, sizeof unused);
    lay_out(plan, p, kernels, &unused, &count);
    plan->scratch_size = count.used;
}

static bool tiny_fits(const struct cattn_plan *plan, const struct cattn_attention_params *p) {
    return p->seqlen_k <= CATTN_BLOCK_KEYS && plan->scratch_size <= CATTN_TINY_SCRATCH;
}

struct cattn_plan cattn_plan(const struct cattn_attention_params *p, const struct cattn_kernels *kernels) {
    struct cattn_plan plan = {.n_chunks = ceil_div(p->seqlen_k, CATTN_CHUNK_KEYS)};
    plan.heads_per_unit = p->seqlen_q < CATTN_TILE_ROWS ? p->group_size : 1;
    plan.units_per_batch = p->num_heads / plan.heads_per_unit;
    plan.n_units = p->n_batch * plan.units_per_batch;
    plan.unit_rows = p->seqlen_q * plan.heads_per_unit;
    plan.uses_stream = p->dropout.enabled && p->dropout.torch && plan.n_units * plan.unit_rows > 0 && p->seqlen_k > 0;
    if (p->path != CATTN_PATH_AUTO) {
        cut(&plan, p, kernels, p->path);
        return plan;
    }
    const bool few = plan.unit_rows <= CATTN_FEW_ROWS;
    if (few && cattn_attention_work(p) <= TINY_WORK) {
        cut(&plan, p, kernels, CATTN_PATH_TINY);
        if (tiny_fits(&plan, p))
            return plan;
    }
    /* few rows: give key chunks to the threads where units alone would leave some idle */
    const int64_t tasks = plan.n_units * ceil_div(plan.unit_rows, CATTN_FEW_ROWS);
    const bool split = plan.unit_rows <= SPLIT_ROWS && plan.n_chunks > 1 && p->num_threads > 1 &&
                       cattn_attention_work(p) >= SPLIT_WORK && tasks < 4 * (int64_t)p->num_threads;
    cut(&plan, p, kernels, split ? CATTN_PATH_SPLIT : few ? CATTN_PATH_ROWS : CATTN_PATH_TILE);
    return plan;
}

bool cattn_attention_path_fits(const struct cattn_attention_params *p) {
    if (p->path != CATTN_PATH_TINY)
        return true;
    struct cattn_plan plan = cattn_plan(p, cattn_kernels_for(p->dtype));
    return tiny_fits(&plan, p);
}
