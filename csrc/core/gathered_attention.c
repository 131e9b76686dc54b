/* gathered_attention.c -- attention with key_indices: the gathered keys of a list are a call of their own. */
#include <stdatomic.h>
#include <string.h>

#include "attention.h"
#include "plan.h"

/* Most queries of a unit that need not be whole: enough to make the copies of keys cheap, and few enough that the
 * gathered masks need little memory. */
#define UNIT_ROWS 384
#define UNIT_ROWS_MASKED CATTN_TILE_ROWS

/* ---- the plan ---- */

/* Whether queries have ranges of their own. */
static bool ranges_differ(const struct cattn_ranges *r) {
    return !r->all_visible && (r->left != CATTN_UNBOUNDED || r->right != CATTN_UNBOUNDED);
}

static bool has_masks(const struct cattn_attention_params *p) {
    return p->attn_mask.data || p->block_mask.data || p->n_bias > 0;
}

struct cattn_gather_plan cattn_gather_plan(const struct cattn_attention_params *p, bool for_gradients) {
    struct cattn_gather_plan plan = {.heads_per_unit = 1, .rows_per_unit = 1, .num_threads = 1, .threads_per_unit = 1};
    if (p->n_batch == 0 || p->num_heads == 0 || p->seqlen_q == 0)
        return plan;
    /* the sums of gradients depend on the cut, and may not depend on strides */
    if (for_gradients ? !p->own_head_lists : p->key_indices.head == 0)
        plan.heads_per_unit = p->group_size;
    if ((for_gradients ? !p->own_row_lists : p->key_indices.row == 0) && !ranges_differ(&p->ranges)) {
        const int64_t most = has_masks(p) ? UNIT_ROWS_MASKED : UNIT_ROWS;
        plan.rows_per_unit = for_gradients ? p->seqlen_q : cattn_min(p->seqlen_q, most);
    }
    plan.units_per_batch = p->num_heads / plan.heads_per_unit;
    plan.blocks_per_head = cattn_ceil_div(p->seqlen_q, plan.rows_per_unit);
    plan.n_units = p->n_batch * plan.units_per_batch * plan.blocks_per_head;
    plan.copies_lists = for_gradients || (p->bf16_products && plan.rows_per_unit > 1);
    const int threads = cattn_plan_second_threads(p);
    *(plan.n_units >= threads ? &plan.num_threads : &plan.threads_per_unit) = threads;
    return plan;
}

/* ---- scratch ---- */

/* Whether a mask or bias has other elements for other heads, queries or keys. A tensor that has none for other keys is
 * not gathered. */
static int64_t heads_of(const struct cattn_tensor *tensor, int64_t heads) { return tensor->head ? heads : 1; }
static int64_t rows_of(const struct cattn_tensor *tensor, int64_t rows) { return tensor->row ? rows : 1; }
static bool is_gathered(const struct cattn_tensor *tensor) { return tensor->data && tensor->col != 0; }

/* The mask and the block mask become one tensor. */
static struct cattn_tensor joint_mask(const struct cattn_attention_params *p, int64_t heads, int64_t rows, int64_t n) {
    const struct cattn_tensor *mask = &p->attn_mask, *blocks = &p->block_mask;
    struct cattn_tensor joint = {.col = 1};
    const bool own_rows = (mask->data && mask->row) || (blocks->data && blocks->row);
    const bool own_heads = (mask->data && mask->head) || (blocks->data && blocks->head);
    joint.row = own_rows && rows > 1 ? n : 0;
    joint.head = own_heads && heads > 1 ? n * (own_rows ? rows : 1) : 0;
    return joint;
}

static bool joins_masks(const struct cattn_attention_params *p) {
    return p->block_mask.data || is_gathered(&p->attn_mask);
}

struct cattn_gather *cattn_gather_lay_out(const struct cattn_gather_plan *plan, const struct cattn_attention_params *p,
                                          struct cattn_arena *arena) {
    const cattn_size n = (cattn_size)p->n_indices, element = cattn_element_size(p->dtype);
    const cattn_size pairs = n * (cattn_size)plan->heads_per_unit * (cattn_size)plan->rows_per_unit;
    struct cattn_gather unused = {.n_keys = 0}, *gather = cattn_carve(arena, sizeof *gather),
                        *g = gather ? gather : &unused;
    g->index = cattn_carve(arena, n * sizeof *g->index);
    g->place = cattn_carve(arena, n * sizeof *g->place);
    cattn_key_copies_lay_out(p, plan->copies_lists ? n : 0, &g->copies, arena);
    g->mask = cattn_carve(arena, joins_masks(p) ? pairs : 0);
    for (int b = 0; b < p->n_bias; b++)
        g->bias[b] = cattn_carve(arena, is_gathered(&p->bias[b]) ? pairs * element : 0);
    return gather;
}

/* ---- gathering ---- */

struct cattn_tensor cattn_gather_part(const struct cattn_gather *g, const struct cattn_tensor *tensor, int64_t start,
                                      size_t element) {
    if (!tensor->data)
        return (struct cattn_tensor){.data = NULL};
    start += g->first_head * tensor->head + g->first_row * tensor->row;
    char *data = (char *)tensor->data + start * (int64_t)element;
    return (struct cattn_tensor){.data = data, .head = tensor->head, .row = tensor->row, .col = tensor->col};
}

/* The gathered elements of a bias. */
static struct cattn_tensor gather_bias(const struct cattn_gather *g, const struct cattn_tensor *bias, int64_t start,
                                       size_t element, void *to) {
    const int64_t first_key = g->batch.batch_range.first_key, heads = heads_of(bias, g->call.num_heads);
    const int64_t rows = rows_of(bias, g->n_rows), n = g->n_keys;
    struct cattn_tensor part = cattn_gather_part(g, bias, start, element);
    if (bias->col == 0)
        return part;
    char *next = to;
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row++) {
            const char *from = (const char *)part.data + (head * bias->head + row * bias->row) * (int64_t)element;
            for (int64_t k = 0; k < n; k++, next += element)
                memcpy(next, from + (g->index[k] - first_key) * bias->col * (int64_t)element, element);
        }
    return (struct cattn_tensor){.data = to, .head = heads > 1 ? rows * n : 0, .row = rows > 1 ? n : 0, .col = 1};
}

/* The gathered elements of the mask and of the block mask, as one mask. */
static struct cattn_tensor gather_mask(const struct cattn_gather *g, const struct cattn_attention_params *p) {
    const int64_t first_key = g->batch.batch_range.first_key, n = g->n_keys;
    struct cattn_tensor mask = cattn_gather_part(g, &p->attn_mask, g->batch.attn_mask, 1);
    if (!joins_masks(p))
        return mask;
    struct cattn_tensor joint = joint_mask(p, g->call.num_heads, g->n_rows, n);
    const struct cattn_tensor *blocks = &p->block_mask;
    joint.data = g->mask;
    for (int64_t head = 0; head < (joint.head ? g->call.num_heads : 1); head++)
        for (int64_t row = 0; row < (joint.row ? g->n_rows : 1); row++) {
            uint8_t *to = g->mask + head * joint.head + row * joint.row;
            const uint8_t *from = mask.data ? (const uint8_t *)mask.data + head * mask.head + row * mask.row : NULL;
            for (int64_t k = 0; k < n; k++)
                to[k] = !from || from[(g->index[k] - first_key) * mask.col];
            if (!blocks->data)
                continue;
            const uint8_t *block = (const uint8_t *)blocks->data + g->batch.block_mask +
                                   (g->first_head + head) * blocks->head +
                                   (g->first_row + row) / p->block_size * blocks->row;
            for (int64_t k = 0; k < n; k++)
                to[k] &= block[g->index[k] / p->block_size * blocks->col] != 0;
        }
    return joint;
}

/* ---- a unit ---- */

/* Finds the unit's queries, and those keys of its list that are in range. */
static void find_keys(const struct cattn_gather_plan *plan, const struct cattn_attention_params *p, int64_t unit,
                      struct cattn_gather *g) {
    const int64_t block = unit % plan->blocks_per_head, heads = unit / plan->blocks_per_head;
    cattn_batch_fill(p, heads / plan->units_per_batch, &g->batch);
    g->first_head = heads % plan->units_per_batch * plan->heads_per_unit;
    g->first_row = block * plan->rows_per_unit;
    g->n_rows = cattn_min(plan->rows_per_unit, p->seqlen_q - g->first_row);
    /* several queries have the same range, but for those past the end, which see nothing */
    const struct cattn_batch_range *range = &g->batch.batch_range;
    const struct cattn_range visible =
        plan->rows_per_unit > 1 ? (struct cattn_range){0, range->n_keys} : cattn_visible_keys(range, g->first_row);
    const struct cattn_tensor *indices = &p->key_indices;
    const int64_t *list = (const int64_t *)indices->data + cattn_batch_start(p, indices, g->batch.index) +
                          g->first_head * indices->head + g->first_row * indices->row;
    g->n_keys = 0;
    for (int64_t place = 0; place < p->n_indices; place++) {
        const int64_t index = list[place * indices->col], key = index - range->first_key;
        g->index[g->n_keys] = index;
        g->place[g->n_keys] = place;
        g->n_keys += index >= 0 && key >= visible.lo && key < visible.hi;
    }
}

/* The numbers of the unit's call. */
static void describe(const struct cattn_gather_plan *plan, const struct cattn_attention_params *p,
                     struct cattn_worker *worker, struct cattn_gather *g) {
    struct cattn_attention_params *call = &g->call;
    const int64_t n_queries = g->batch.batch_range.n_queries;
    cattn_clear_attention(call);
    call->dtype = p->dtype;
    call->storage = p->storage;
    call->bf16_products = p->bf16_products;
    call->quantized_key = p->quantized_key;
    call->quantized_value = p->quantized_value;
    call->double_lse = p->double_lse;
    call->store_scores = p->store_scores;
    call->n_bias = p->n_bias;
    call->num_threads = plan->threads_per_unit;
    call->path = p->path;
    call->n_batch = 1;
    call->num_heads = call->group_size = plan->heads_per_unit;
    call->seqlen_q = g->n_rows;
    call->seqlen_k = g->n_keys;
    call->head_dim = p->head_dim;
    call->d_v = p->d_v;
    call->score_options = p->score_options;
    call->poll = (struct cattn_poll){cattn_stop_wanted, worker};
    call->ranges.left = call->ranges.right = CATTN_UNBOUNDED;
    call->ranges.query_length = n_queries < g->first_row ? 0 : cattn_min(n_queries - g->first_row, g->n_rows);
    call->ranges.key_length = g->n_keys;
}

static void *address(const void *data) { return (void *)(uintptr_t)data; }

/* A matrix as the keys or values of a call without batch and heads. */
static void to_tensors(const struct cattn_matrix *matrix, struct cattn_tensor *tensor, struct cattn_tensor *scale) {
    *tensor = (struct cattn_tensor){.data = address(matrix->first), .row = matrix->row, .col = matrix->col};
    if (matrix->first && cattn_is_quantized(matrix->storage))
        *scale =
            (struct cattn_tensor){.data = address(matrix->scale), .row = matrix->scale_row, .col = matrix->scale_col};
}

/* The keys and values of the unit's call: copies, or the list, of which the call copies one key block at a time. */
static void find_list(const struct cattn_gather_plan *plan, const struct cattn_attention_params *p,
                      struct cattn_gather *g) {
    struct cattn_key_list *list = &g->list;
    cattn_keys_of_head(p, &g->batch, g->first_head / p->group_size, &list->key, &list->value);
    list->rows = g->index;
    list->key.first_row = list->value.first_row = g->batch.batch_range.first_key;
    struct cattn_matrix key = list->key, value = list->value;
    if (plan->copies_lists)
        cattn_copy_listed_keys(p, list, 0, g->n_keys, &g->copies, &key, &value);
    else
        g->call.key_list = list;
    to_tensors(&key, &g->call.key, &g->call.key_scale);
    to_tensors(&value, &g->call.value, &g->call.value_scale);
}

void cattn_gather_unit(const struct cattn_gather_plan *plan, const struct cattn_attention_params *p, int64_t unit,
                       struct cattn_worker *worker, struct cattn_gather *g) {
    struct cattn_attention_params *call = &g->call;
    find_keys(plan, p, unit, g);
    describe(plan, p, worker, g);
    const struct cattn_batch *at = &g->batch;
    const size_t element = cattn_element_size(p->dtype), stored = cattn_stored_size(p->dtype, p->storage);
    call->query = cattn_gather_part(g, &p->query, at->query, stored);
    find_list(plan, p, g);
    call->attn_mask = gather_mask(g, p);
    for (int b = 0; b < p->n_bias; b++)
        call->bias[b] = gather_bias(g, &p->bias[b], at->bias[b], element, g->bias[b]);
    if (p->sinks.data)
        call->sinks = (struct cattn_tensor){
            .data = cattn_tensor_at(p, &p->sinks, at->sinks + g->first_head * p->sinks.head), .head = p->sinks.head};
    call->gate = cattn_gather_part(g, &p->gate, at->gate, stored);
    if (!cattn_attention_path_fits(call))
        call->path = CATTN_PATH_AUTO;
}

/* ---- the driver: gathers the keys of each unit and hands its call to the driver of all other calls ---- */

struct gathered_job {
    const struct cattn_attention_params *params;
    struct cattn_gather_plan plan;
    cattn_size scratch_size;
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
