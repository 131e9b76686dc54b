/* plan.c -- choice of path, cut into tasks, scratch layout, and the tuning numbers of all three; see plan.h. */
#include "plan.h"

#include <assert.h>

#include "random.h"
#include "scratch.h"

/* Work is counted in multiply-adds. A call below this costs less than waking a thread or polling for Ctrl-C. */
#define TINY_WORK 100000.0
/* Below this, other threads would wake up too late to help, after some 30 us. In that time the row path, which waits
 * for memory, does fewer multiply-adds than the tile path. */
#define POOL_WORK_TILE 2500000.0
#define POOL_WORK_ROWS 600000.0
/* From here on it pays to hand key chunks to other threads: some 30 us of work. */
#define SPLIT_WORK 600000.0
/* Up to this many rows a unit, threads that share the keys of a unit are faster than one thread with tiles. Up to
 * CATTN_FEW_ROWS rows, one pass of the row kernel is faster than tiles, most of whose rows would be padding. */
#define SPLIT_ROWS 16
/* Split unless there are this many tasks a thread anyway. */
#define SPLIT_TASKS 4
/* Bytes of partial results of the split path that may wait to be merged. */
#define SPLIT_BUDGET ((cattn_size)512 << 10)
/* Elements of a head's keys and values that do not stay in the L2 cache from one block of rows to the next. */
#define FAR_KEYS ((double)(1 << 18))
/* Blocks that go through the keys together have at most so much scratch, and each thread at least so many tasks. */
#define JOINED_SCRATCH ((cattn_size)1 << 20)
#define JOINED_TASKS 4

struct cattn_kernel_pair cattn_attention_kernels(const struct cattn_attention_params *p) {
    const struct cattn_kernels *own = cattn_kernels_for(p->dtype);
    return p->bf16_products ? cattn_bf16_kernels(p->bf16_products) : (struct cattn_kernel_pair){own, own};
}

double cattn_attention_work(const struct cattn_attention_params *p) {
    const int64_t n_keys = p->key_indices.data ? p->n_indices : p->seqlen_k;
    const double pairs = (double)p->seqlen_q * (double)(n_keys > 0 ? n_keys : 1); /* rows without keys cost time, too */
    return (double)p->n_batch * (double)p->num_heads * pairs * (double)(p->head_dim + p->d_v + 8);
}

int64_t cattn_plan_acc_cols(const struct cattn_attention_params *p) { return cattn_round_up(p->d_v, CATTN_PAD); }

int64_t cattn_plan_row_slots(const struct cattn_plan *plan) { return cattn_round_up(plan->block_rows, CATTN_PAD); }

static bool is_tile(const struct cattn_plan *plan) { return plan->path == CATTN_PATH_TILE; }

static cattn_size max_size(cattn_size a, cattn_size b) { return a > b ? a : b; }

bool cattn_plan_copies(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                       enum cattn_storage quantized) {
    return tensor->data && (quantized || p->storage != CATTN_STORED_PLAIN || tensor->col != 1);
}

int64_t cattn_plan_most_keys(const struct cattn_attention_params *p) {
    const struct cattn_ranges *r = &p->ranges;
    const bool window = !r->all_visible && r->left < p->seqlen_k && r->right < p->seqlen_k;
    return window ? cattn_min(p->seqlen_k, r->left + r->right + 1) : p->seqlen_k;
}

bool cattn_plan_uses_stream(const struct cattn_attention_params *p) {
    return p->dropout.enabled && p->dropout.torch && p->n_batch * p->num_heads * p->seqlen_q > 0 && p->seqlen_k > 0;
}

/* With key_indices a task gathers all keys of a list: each has less than 32 bytes for a column of key and value and
 * their gradients, and for a pair with a query. */
static bool lists_fit(const struct cattn_attention_params *p) {
    const double columns = (double)p->head_dim + (double)p->d_v, queries = (double)p->group_size * (double)p->seqlen_q;
    return (double)p->n_indices * (columns + queries + 1) < 0x1p56;
}

bool cattn_attention_counts_fit(const struct cattn_attention_params *p) {
    /* No array in memory has that many elements. With lengths up to it, the scratch of a block of rows is a sum of a
     * few products below 2^59. */
    const int64_t most = (int64_t)1 << 48;
    const double rows = (double)p->n_batch * (double)p->num_heads * ((double)p->seqlen_q + CATTN_TILE_ROWS);
    const int64_t n_indices = p->key_indices.data ? p->n_indices : 0;
    const double pairs = rows * ((double)(n_indices > p->seqlen_k ? n_indices : p->seqlen_k) + CATTN_BLOCK_KEYS);
    return p->seqlen_q <= most && p->seqlen_k <= most && p->head_dim <= most && p->d_v <= most && pairs < 0x1p62 &&
           (!p->key_indices.data || lists_fit(p));
}

struct cattn_per_row *cattn_plan_carve_per_row(struct cattn_arena *arena, cattn_size n_rows) {
    /* entries of 8 bytes, then the two arrays of whole vectors for dropout */
    enum { N_ARRAYS = sizeof(struct cattn_per_row) / sizeof(void *) - 2 };
    const cattn_size n_lanes = (cattn_size)cattn_round_up((int64_t)n_rows, CATTN_PAD);
    struct cattn_per_row *rows = cattn_carve(arena, sizeof *rows);
    char *memory = cattn_carve(arena, N_ARRAYS * n_rows * sizeof(int64_t));
    uint32_t *drops = cattn_carve(arena, 2 * n_lanes * sizeof *drops);
    if (!rows)
        return NULL;
#define PER_ROW(A)                                                                                                     \
    A(lo)                                                                                                              \
    A(hi)                                                                                                              \
    A(query)                                                                                                           \
    A(mask)                                                                                                            \
    A(block_mask)                                                                                                      \
    A(bias[0])                                                                                                         \
    A(bias[1])                                                                                                         \
    A(position)                                                                                                        \
    A(slope)                                                                                                           \
    A(sink)                                                                                                            \
    A(gate)                                                                                                            \
    A(drop_bits)                                                                                                       \
    A(out)                                                                                                             \
    A(lse)                                                                                                             \
    A(weights)                                                                                                         \
    A(weights_out)
#define ONE(array) +1
    _Static_assert(PER_ROW(ONE) == N_ARRAYS, "each array of struct cattn_per_row has its memory here");
    char *end = memory + N_ARRAYS * n_rows * sizeof(int64_t);
#define NEXT_ARRAY(array)                                                                                              \
    end -= n_rows * sizeof(int64_t);                                                                                   \
    rows->array = (void *)end;
    PER_ROW(NEXT_ARRAY)
#undef NEXT_ARRAY
#undef ONE
#undef PER_ROW
    rows->drop_position = drops;
    rows->drop_head = drops + n_lanes;
    return rows;
}

void cattn_key_copies_lay_out(const struct cattn_attention_params *p, cattn_size n, struct cattn_key_copies *copies,
                              struct cattn_arena *arena) {
    const cattn_size key = n * (cattn_size)p->head_dim, value = p->value.data ? n * (cattn_size)p->d_v : 0;
    copies->key =
        cattn_carve(arena, key * cattn_stored_size(p->dtype, p->quantized_key ? p->quantized_key : p->storage));
    copies->value =
        cattn_carve(arena, value * cattn_stored_size(p->dtype, p->quantized_value ? p->quantized_value : p->storage));
    copies->key_scale = cattn_carve(arena, p->quantized_key ? key * sizeof(float) : 0);
    copies->value_scale = cattn_carve(arena, p->quantized_value ? value * sizeof(float) : 0);
}

/* Sets the arrays of a task that hold nothing between two key blocks: its blocks share them. */
static void lay_out_work(const struct cattn_plan *plan, const struct cattn_attention_params *p,
                         const struct cattn_kernels *kernels, struct cattn_row_scratch *s, struct cattn_arena *arena) {
    const bool tile = is_tile(plan), tiles = p->bf16_products == CATTN_BF16_TILES;
    const cattn_size size = cattn_element_size(p->dtype);
    const cattn_size rows = (cattn_size)(tile ? CATTN_TILE_ROWS : CATTN_FEW_ROWS), depth = (cattn_size)p->head_dim;
    const cattn_size panel = (cattn_size)kernels->lanes * (cattn_size)kernels->nr;
    const cattn_size copied_key = cattn_plan_copies(p, &p->key, p->quantized_key) ? depth : 0;
    const cattn_size copied_value = cattn_plan_copies(p, &p->value, p->quantized_value) ? (cattn_size)p->d_v : 0;
    const cattn_size key_cols = (cattn_size)cattn_packed_key_cols(p->bf16_products, p->head_dim);
    const cattn_size value_cols = (cattn_size)cattn_packed_value_cols(p->bf16_products, p->d_v);
    const cattn_size unit = (cattn_size)CATTN_UNIT * CATTN_UNIT;
    cattn_key_copies_lay_out(p, p->key_list ? (cattn_size)cattn_min(p->seqlen_k, CATTN_BLOCK_KEYS) : 0, &s->listed,
                             arena);
    s->score = cattn_carve(arena, (tiles && tile ? CATTN_UNIT : rows) * CATTN_BLOCK_KEYS * size);
    s->cap_derivative = s->cap_curvature = NULL; /* only second passes need them */
    const bool widens = tiles && tile && !kernels->tiles_begin;
    s->wide = cattn_carve(arena, widens ? CATTN_BLOCK_KEYS * (key_cols + value_cols) * size : 0);
    s->units = cattn_carve(arena, tiles && tile ? 4 * unit * size : 0);
    s->value_panel = cattn_carve(arena, CATTN_HALF_BLOCK * (tile ? panel : copied_value) * size);
    s->key_copy =
        cattn_carve(arena, (tile ? (cattn_size)kernels->mr * depth : (cattn_size)kernels->lanes * copied_key) * size);
    /* pairs of bfloat16: keys without a gap at the end of a row, values in whole panels */
    const cattn_size copied = tiles              ? max_size(key_cols, value_cols)
                              : p->bf16_products ? max_size(depth, (cattn_size)cattn_plan_acc_cols(p))
                                                 : max_size(copied_key, copied_value);
    s->block_copy = cattn_carve(arena, tile ? CATTN_BLOCK_KEYS * copied * size : 0);
    const bool packs = plan->task_blocks > 1 && kernels->pack_block;
    s->value_panels = cattn_carve(arena, packs ? CATTN_BLOCK_KEYS * (cattn_size)cattn_plan_acc_cols(p) * size : 0);
}

/* Whether weights are computed in float32 rows and rounded once at the end. */
static bool narrows_weights(const struct cattn_attention_params *p) {
    return p->weights.data && p->storage != CATTN_STORED_PLAIN;
}

/* Sets the other arrays of one block. */
static void lay_out_state(const struct cattn_plan *plan, const struct cattn_attention_params *p, struct cattn_rows *r,
                          struct cattn_arena *arena) {
    const bool tile = is_tile(plan), one_chunk = plan->n_chunks <= 1;
    const bool tiles = tile && p->bf16_products == CATTN_BF16_TILES;
    const cattn_size size = cattn_element_size(p->dtype), slots = (cattn_size)cattn_plan_row_slots(plan);
    const cattn_size rows = (cattn_size)(tile ? CATTN_TILE_ROWS : CATTN_FEW_ROWS);
    const cattn_size acc = rows * (cattn_size)cattn_plan_acc_cols(p);
    const cattn_size key_cols = (cattn_size)cattn_packed_key_cols(p->bf16_products, p->head_dim);
    const cattn_size value_cols = (cattn_size)cattn_packed_value_cols(p->bf16_products, p->d_v);
    struct cattn_row_scratch *s = &r->scratch;
    r->per_row = cattn_plan_carve_per_row(arena, rows);
    s->drop_bits = plan->uses_stream ? cattn_carve(arena, rows * cattn_dropout_stream_row_bytes(p->seqlen_k)) : NULL;
    s->packed_query =
        cattn_carve(arena, rows * (p->bf16_products == CATTN_BF16_TILES ? key_cols : (cattn_size)p->head_dim) * size);
    s->acc_columns = tiles ? cattn_carve(arena, CATTN_TILE_ROWS * value_cols * size) : NULL;
    s->weight_rows = cattn_carve(arena, narrows_weights(p) ? rows * (cattn_size)p->seqlen_k * size : 0);
    s->block_max = cattn_carve(arena, slots * size);
    s->alpha = cattn_carve(arena, slots * size);
    s->row_max = cattn_carve(arena, slots * size);
    s->row_sum = cattn_carve(arena, slots * size);
    s->acc = cattn_carve(arena, acc * size);
    /* a single chunk is the total, so its second set of arrays is never written */
    s->total_max = one_chunk ? s->row_max : cattn_carve(arena, slots * size);
    s->total_sum = one_chunk ? s->row_sum : cattn_carve(arena, slots * size);
    s->total_acc = one_chunk ? s->acc : cattn_carve(arena, acc * size);
}

/* The only description of the layout: called without memory to measure it, and with memory to cut it. */
static void lay_out(const struct cattn_plan *plan, const struct cattn_attention_params *p,
                    const struct cattn_kernels *kernels, struct cattn_arena *arena,
                    struct cattn_rows *blocks[CATTN_MOST_BLOCKS]) {
    struct cattn_row_scratch work;
    lay_out_work(plan, p, kernels, &work, arena);
    for (int i = 0; i < plan->task_blocks; i++) {
        struct cattn_rows unused = {.n_rows = 0}, *r = blocks[i] = cattn_carve(arena, sizeof *r);
        r = r ? r : &unused;
        r->scratch = work;
        lay_out_state(plan, p, r, arena);
    }
}

void cattn_plan_lay_out(const struct cattn_plan *plan, const struct cattn_attention_params *params,
                        const struct cattn_kernels *kernels, void *memory,
                        struct cattn_rows *blocks[CATTN_MOST_BLOCKS]) {
    struct cattn_arena arena = cattn_arena(memory, plan->scratch_size, plan->path != CATTN_PATH_TINY);
    lay_out(plan, params, kernels, &arena, blocks);
    for (int i = 0; i < plan->task_blocks; i++)
        blocks[i]->query = blocks[i]->per_row->query;
    assert(arena.used == plan->scratch_size);
}

static cattn_size measure(const struct cattn_plan *plan, const struct cattn_attention_params *p,
                          const struct cattn_kernels *kernels) {
    struct cattn_arena count = cattn_arena(NULL, 0, false);
    struct cattn_rows *none[CATTN_MOST_BLOCKS];
    lay_out(plan, p, kernels, &count, none);
    return count.used;
}

/* Whether blocks of rows go through the keys together: where these come from far away, or, if the blocks see the same
 * keys, where they are copied or the rows of V so far apart that a panel of them finds few sets of the cache. */
static bool joins_blocks(const struct cattn_plan *plan, const struct cattn_attention_params *p,
                         const struct cattn_kernels *kernels) {
    const int64_t n_keys = cattn_plan_most_keys(p), far_row = kernels->far_row / (int64_t)cattn_element_size(p->dtype);
    const bool is_far = (double)n_keys * ((double)p->head_dim + (double)p->d_v) >= FAR_KEYS;
    const bool packs = cattn_plan_copies(p, &p->key, p->quantized_key) || (p->value.data && p->value.row >= far_row);
    return is_tile(plan) && !plan->uses_stream && !narrows_weights(p) && (is_far || (packs && n_keys == p->seqlen_k));
}

/* Sets the blocks of a task: as many as leave each thread tasks enough and the scratch near. */
static void join_blocks(struct cattn_plan *plan, const struct cattn_attention_params *p,
                        const struct cattn_kernels *kernels) {
    const int64_t least = plan->num_threads == 1 ? 1 : JOINED_TASKS * (int64_t)plan->num_threads;
    int most = joins_blocks(plan, p, kernels) && plan->blocks_per_unit > 1 ? CATTN_MOST_BLOCKS : 1;
    do {
        plan->tasks_per_unit = cattn_ceil_div(plan->blocks_per_unit, most);
        plan->task_blocks =
            plan->blocks_per_unit > 1 ? (int)cattn_ceil_div(plan->blocks_per_unit, plan->tasks_per_unit) : 1;
        plan->scratch_size = measure(plan, p, kernels);
        most /= 2;
    } while (most > 0 && (plan->n_units * plan->tasks_per_unit < least || plan->scratch_size > JOINED_SCRATCH));
}

/* Completes the plan for this path. */
static void cut(struct cattn_plan *plan, const struct cattn_attention_params *p, const struct cattn_kernels *kernels,
                enum cattn_path path) {
    /* Key chunks of the same rows cannot draw from a serial stream in row-major order, nor share the rows of weights
     * that are scratch. */
    const bool together = plan->uses_stream || narrows_weights(p);
    plan->path = together && path == CATTN_PATH_SPLIT ? CATTN_PATH_ROWS : path;
    plan->block_rows = is_tile(plan) ? CATTN_TILE_ROWS : CATTN_FEW_ROWS;
    plan->blocks_per_unit = cattn_ceil_div(plan->unit_rows, plan->block_rows);
    const double least = is_tile(plan) ? POOL_WORK_TILE : POOL_WORK_ROWS;
    const bool alone = p->path == CATTN_PATH_AUTO && plan->path != CATTN_PATH_SPLIT && cattn_attention_work(p) < least;
    plan->num_threads = alone ? 1 : p->num_threads;
    join_blocks(plan, p, kernels);
}

static bool tiny_fits(const struct cattn_plan *plan, const struct cattn_attention_params *p) {
    return p->seqlen_k <= CATTN_BLOCK_KEYS && plan->scratch_size <= CATTN_TINY_SCRATCH;
}

struct cattn_plan cattn_plan(const struct cattn_attention_params *p, const struct cattn_kernels *kernels) {
    struct cattn_plan plan = {.n_chunks = cattn_ceil_div(p->seqlen_k, CATTN_CHUNK_KEYS)};
    /* with a tile or more of queries, a head alone fills tiles; heads of a group then read K and V separately */
    plan.heads_per_unit = p->seqlen_q < CATTN_TILE_ROWS ? p->group_size : 1;
    plan.units_per_batch = p->num_heads / plan.heads_per_unit;
    plan.n_units = p->n_batch * plan.units_per_batch;
    plan.unit_rows = p->seqlen_q * plan.heads_per_unit;
    plan.uses_stream = cattn_plan_uses_stream(p);
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
    /* few rows: split the keys if the units alone would leave threads idle */
    const int64_t tasks = plan.n_units * cattn_ceil_div(plan.unit_rows, CATTN_FEW_ROWS);
    const bool split = plan.unit_rows <= SPLIT_ROWS && plan.n_chunks > 1 && p->num_threads > 1 &&
                       cattn_attention_work(p) >= SPLIT_WORK && tasks < SPLIT_TASKS * (int64_t)p->num_threads;
    cut(&plan, p, kernels, split ? CATTN_PATH_SPLIT : few ? CATTN_PATH_ROWS : CATTN_PATH_TILE);
    return plan;
}

/* The last blocks of a unit come first: under a causal mask they take longest, and a long task at the end would leave
 * the other threads idle. Bits of a serial stream are drawn in ascending order. */
struct cattn_row_block cattn_plan_block(const struct cattn_plan *plan, int64_t block) {
    const int64_t unit = block / plan->blocks_per_unit, index = block % plan->blocks_per_unit;
    const int64_t first = (plan->uses_stream ? index : plan->blocks_per_unit - 1 - index) * plan->block_rows;
    return (struct cattn_row_block){.batch = unit / plan->units_per_batch,
                                    .first_head = unit % plan->units_per_batch * plan->heads_per_unit,
                                    .first_row = first,
                                    .n_rows = (int)cattn_min(plan->unit_rows - first, plan->block_rows)};
}

int64_t cattn_plan_first_block(const struct cattn_plan *plan, int64_t task, int *n_blocks) {
    const int64_t first = task % plan->tasks_per_unit * plan->task_blocks;
    *n_blocks = (int)cattn_min(plan->blocks_per_unit - first, plan->task_blocks);
    return task / plan->tasks_per_unit * plan->blocks_per_unit + first;
}

int64_t cattn_plan_wave(const struct cattn_plan *plan, int64_t n_tasks, cattn_size partial_size) {
    const int64_t fitting = (int64_t)(SPLIT_BUDGET / partial_size);
    const int64_t wave = fitting < plan->num_threads ? plan->num_threads : fitting; /* a task for every thread */
    return cattn_min(wave, n_tasks);
}

bool cattn_attention_path_fits(const struct cattn_attention_params *p) {
    if (p->path != CATTN_PATH_TINY || p->key_indices.data) /* each query chooses anew there */
        return true;
    struct cattn_plan plan = cattn_plan(p, cattn_attention_kernels(p).tiles);
    return tiny_fits(&plan, p);
}
