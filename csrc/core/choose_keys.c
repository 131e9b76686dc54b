/* choose_keys.c -- the driver of the choice of keys: scores of a block of queries, and the best keys of each of them.
 *
 * A task is a block of queries against the keys that they see, in blocks of keys: a product for all heads, then for
 * each query the scores, of which those that may still win become candidates. A query has room for twice as many
 * candidates as it chooses: when that is full, only the best are kept, and from then on their least rank must be
 * exceeded. Ranks order scores, and ties go to the lower key, so that the choice depends on neither blocks nor threads.
 * With few queries the keys are cut into parts, whose candidates a second pass merges.
 */
#include <math.h>
#include <string.h>

#include "attention.h"
#include "dispatch.h"

/* Rows of a task, of all heads of its queries: at most, if there are so few heads. */
#define MOST_ROWS 256
#define MOST_QUERIES 64
/* With fewer rows keys are read where they lie, and the rows are packed. */
#define PACKS_KEYS_FROM 64
/* Keys of a block: so many products, of so many keys. */
#define MOST_PRODUCTS 131072
#define LEAST_KEYS 192
#define MOST_KEYS 2048
/* Bytes of the candidates of a task, unless a single query has more. */
#define CANDIDATE_BYTES ((int64_t)2 << 20)
/* Candidates beyond the chosen ones: at least so many, so that the best are not looked for too often. */
#define SPARE 512
/* Scores that are offered together. */
#define RUN 16
/* Multiply-adds of a task's keys from which on they are worth a second thread. */
#define PARALLEL_WORK 200000.0

/* Candidates in the order of their blocks. */
struct candidates {
    int64_t n, most;
    bool was_full; /* since then a rank must exceed `least` */
    uint64_t least;
    uint64_t *rank;
    double *score;
    int32_t *block;
    /* the block at hand */
    int64_t open;
    double best;
};

struct choice_job {
    const struct cattn_choice_params *params;
    const struct cattn_kernels *kernels;
    const struct cattn_row_kernels *rows;
    int64_t count;      /* of blocks, no more than there are */
    int64_t n_room;     /* candidates of a query */
    int64_t n_queries;  /* of a task */
    int64_t n_blocks;   /* of queries of a batch entry */
    int64_t block_keys; /* rows of key of a product */
    int64_t n_keys;     /* rows of key */
    int64_t block_rows; /* rows of key of a block from which keys are chosen: 1 if they are pooled */
    int64_t n_parts, part_keys;
    char *parts; /* the candidates of all parts; or NULL */
    cattn_size part_size, scratch_size;
};

/* The memory of a task. */
struct task {
    struct cattn_product tile, few;
    void *queries;  /* [head][query][head_dim] */
    void *products; /* [head][query][block_keys] */
    void *scores;   /* [block_keys] */
    void *weights;  /* [head] */
    uint64_t *sorted;
    struct candidates *candidates; /* [query] */
    int64_t *lo, *hi;              /* the rows of key that each query may choose */
};

/* The queries of a task. */
struct place {
    int64_t batch, first, n;
    struct cattn_batch at;
};

/* ---- the best candidates ---- */

/* Orders scores; NaN comes before all others, and UINT64_MAX after them. */
static uint64_t rank_of(double score) {
    int64_t bits;
    memcpy(&bits, &score, sizeof bits);
    const uint64_t sign = (uint64_t)1 << 63, rank = bits < 0 ? ~(uint64_t)bits : (uint64_t)bits | sign;
    return isnan(score) ? 0 : rank;
}

/* The count-th largest of n ranks; n >= count. Eight bits at a time, from the highest one in which those that are left
 * differ. `left` has room for all. */
static uint64_t find_rank(const uint64_t *ranks, int64_t n, int64_t count, uint64_t *left) {
    memcpy(left, ranks, (size_t)n * sizeof *left);
    for (;;) {
        uint64_t any = 0, all = UINT64_MAX, digit = 255;
        for (int64_t i = 0; i < n; i++) {
            any |= left[i];
            all &= left[i];
        }
        if (any == all)
            return any;
        int shift = 0;
        while ((any ^ all) >> shift > 255)
            shift++;
        int64_t of_digit[256] = {0}, kept = 0;
        for (int64_t i = 0; i < n; i++)
            of_digit[left[i] >> shift & 255]++;
        for (; of_digit[digit] < count; digit--)
            count -= of_digit[digit];
        for (int64_t i = 0; i < n; i++) { /* without a branch: half of them would be mispredicted */
            left[kept] = left[i];
            kept += (left[i] >> shift & 255) == digit;
        }
        n = kept;
    }
}

/* Keeps the best ones, of equal ones the first. */
static void keep_best(struct candidates *c, int64_t count, uint64_t *left) {
    if (c->n <= count)
        return;
    const uint64_t least = find_rank(c->rank, c->n, count, left);
    int64_t equal = count, kept = 0;
    for (int64_t i = 0; i < c->n; i++)
        equal -= c->rank[i] > least;
    for (int64_t i = 0; i < c->n; i++) {
        const bool is_equal = c->rank[i] == least, keeps = c->rank[i] > least || (is_equal && equal > 0);
        equal -= is_equal;
        c->rank[kept] = c->rank[i];
        c->score[kept] = c->score[i];
        c->block[kept] = c->block[i];
        kept += keeps;
    }
    c->n = kept;
    c->was_full = true;
    c->least = least;
}

static void add(const struct choice_job *job, struct candidates *c, uint64_t rank, double score, int64_t block,
                uint64_t *left) {
    if (c->n == c->most)
        keep_best(c, job->count, left);
    c->rank[c->n] = rank;
    c->score[c->n] = score;
    c->block[c->n++] = (int32_t)block;
}

/* ---- memory ---- */

static int64_t round_up_to_line(int64_t n) { return cattn_round_up(n, CATTN_PAD); }

static struct candidates *lay_out_candidates(const struct choice_job *job, struct cattn_arena *arena) {
    const cattn_size n = (cattn_size)job->n_queries, room = (cattn_size)job->n_room;
    struct candidates *all = cattn_carve(arena, n * sizeof *all);
    for (cattn_size i = 0; i < n; i++) {
        struct candidates c = {.most = job->n_room, .open = -1};
        c.rank = cattn_carve(arena, room * sizeof *c.rank);
        c.score = cattn_carve(arena, room * sizeof *c.score);
        c.block = cattn_carve(arena, room * sizeof *c.block);
        if (all)
            all[i] = c;
    }
    return all;
}

/* What the products of a task have in common: A is the rows of all heads and B the keys, or the other way round. */
static struct cattn_product_params most_products(const struct choice_job *job, int64_t n_rows, bool few) {
    const struct cattn_attention_params *p = &job->params->forward;
    const bool packs_keys = n_rows >= PACKS_KEYS_FROM;
    const enum cattn_storage storage = p->quantized_key ? p->quantized_key : p->storage;
    struct cattn_product_params most = {.dtype = p->dtype, .depth = p->head_dim, .out_b = packs_keys ? 1 : 2};
    most.n_a = packs_keys ? n_rows : job->block_keys;
    most.n_b = packs_keys ? job->block_keys : n_rows;
    if (few)
        most.n_b = cattn_min(most.n_b, CATTN_FEW_ROWS);
    most.a.col = most.b.col = p->key.col;
    most.a.storage = most.b.storage = storage;
    return most;
}

static void lay_out(const struct choice_job *job, struct task *task, struct cattn_arena *arena) {
    const struct cattn_attention_params *p = &job->params->forward;
    const cattn_size element = cattn_element_size(p->dtype), queries = (cattn_size)job->n_queries;
    const cattn_size rows = (cattn_size)p->num_heads * queries;
    const int64_t of_group = p->group_size * job->n_queries;
    const struct cattn_product_params tile = most_products(job, of_group, false),
                                      few = most_products(job, of_group, true);
    task->tile = task->few = (struct cattn_product){.out_storage = CATTN_STORED_PLAIN};
    cattn_product_lay_out(&tile, &task->tile, arena);
    cattn_product_lay_out(&few, &task->few, arena);
    task->queries = cattn_carve(arena, rows * (cattn_size)p->head_dim * element);
    task->products = cattn_carve(arena, rows * (cattn_size)job->block_keys * element);
    task->scores = cattn_carve(arena, (cattn_size)job->block_keys * element);
    task->weights = cattn_carve(arena, (cattn_size)p->num_heads * element);
    task->sorted = cattn_carve(arena, (cattn_size)job->n_room * sizeof *task->sorted);
    task->lo = cattn_carve(arena, queries * sizeof *task->lo);
    task->hi = cattn_carve(arena, queries * sizeof *task->hi);
    task->candidates = job->parts || !arena->memory ? NULL : lay_out_candidates(job, arena);
    if (!arena->memory)
        lay_out_candidates(job, arena);
}

/* ---- products ---- */

/* Copies the queries of all heads, in the type of the computation. */
static void copy_queries(const struct choice_job *job, const struct place *place, struct task *task) {
    const struct cattn_attention_params *p = &job->params->forward;
    const int64_t row = p->head_dim * (int64_t)cattn_element_size(p->dtype);
    char *to = task->queries;
    for (int64_t h = 0; h < p->num_heads; h++)
        for (int64_t i = 0; i < place->n; i++, to += row) {
            const int64_t at = place->at.query + h * p->query.head + (place->first + i) * p->query.row;
            job->rows->widen_row(p->storage, cattn_stored_at(p, &p->query, at), p->query.col, p->head_dim, to);
        }
}

/* The products of the queries of a key-value head's group with n keys from row k of `key` on. */
static void multiply(const struct choice_job *job, const struct place *place, struct task *task, int64_t kv_head,
                     int64_t k, int64_t n, struct cattn_worker *worker) {
    const struct cattn_attention_params *p = &job->params->forward;
    const int64_t element = (int64_t)cattn_element_size(p->dtype), n_rows = p->group_size * place->n;
    const int64_t first_row = kv_head * n_rows;
    const bool packs_keys = p->group_size * job->n_queries >= PACKS_KEYS_FROM;
    struct cattn_matrix keys, values;
    cattn_keys_of_head(p, &place->at, kv_head, &keys, &values);
    keys.first = (const char *)keys.first + k * keys.row * (int64_t)cattn_stored_size(p->dtype, keys.storage);
    if (keys.scale)
        keys.scale += k * keys.scale_row;
    const struct cattn_matrix queries = {
        .first = (const char *)task->queries + first_row * p->head_dim * element, .row = p->head_dim, .col = 1};
    const int64_t n_b = packs_keys ? n : n_rows;
    struct cattn_product *product = n_b <= CATTN_FEW_ROWS ? &task->few : &task->tile;
    product->a = packs_keys ? queries : keys;
    product->b = packs_keys ? keys : queries;
    product->depth = p->head_dim;
    product->n_b = n_b;
    product->out = (char *)task->products + first_row * job->block_keys * element;
    product->out_a = packs_keys ? job->block_keys : 1;
    product->out_b = packs_keys ? 1 : job->block_keys;
    cattn_product_compute(job->kernels, product, packs_keys ? n_rows : n, worker);
}

/* ---- scores ---- */

/* What hides keys of a query one by one, or changes their scores: from the first valid key on. */
struct masks {
    const uint8_t *mask; /* or NULL */
    int64_t mask_col;
    const char *bias[CATTN_MAX_BIAS];
    int64_t bias_col[CATTN_MAX_BIAS];
    int n_bias;
    enum cattn_dtype dtype;
};

static struct masks masks_of(const struct choice_job *job, const struct place *place, int64_t i) {
    const struct cattn_attention_params *p = &job->params->forward;
    struct masks masks = {.n_bias = p->n_bias, .dtype = p->dtype};
    if (p->attn_mask.data) {
        masks.mask = (const uint8_t *)p->attn_mask.data + place->at.attn_mask + (place->first + i) * p->attn_mask.row;
        masks.mask_col = p->attn_mask.col;
    }
    for (int b = 0; b < p->n_bias; b++) {
        masks.bias[b] = cattn_tensor_at(p, &p->bias[b], place->at.bias[b] + (place->first + i) * p->bias[b].row);
        masks.bias_col[b] = p->bias[b].col;
    }
    return masks;
}

/* Adds the biases of key k to its score. False: the key is hidden. */
static bool see(const struct masks *masks, int64_t k, double *score) {
    bool visible = !masks->mask || masks->mask[k * masks->mask_col];
    for (int b = 0; b < masks->n_bias && visible; b++) {
        const double bias = cattn_number_at(masks->dtype, masks->bias[b], k * masks->bias_col[b]);
        *score = masks->dtype == CATTN_F32 ? (double)((float)*score + (float)bias) : *score + bias;
        visible = !(isinf(bias) && bias < 0);
    }
    *score += 0; /* no -0 */
    return visible;
}

/* The blocks that a query chooses in any case: below `first`, and from `last` on. */
struct forced {
    int64_t first, last;
};

static struct forced forced_of(const struct choice_job *job, int64_t lo, int64_t hi) {
    const struct cattn_choice_params *c = job->params;
    return (struct forced){lo / job->block_rows + c->first, (hi - 1) / job->block_rows + 1 - c->last};
}

/* Makes a block a candidate if it may win. */
static void offer(const struct choice_job *job, struct candidates *c, struct forced forced, int64_t block, double score,
                  uint64_t *left) {
    const bool is_forced = block < forced.first || block >= forced.last;
    const uint64_t rank = is_forced ? UINT64_MAX : rank_of(score);
    if (!c->was_full || rank > c->least)
        add(job, c, rank, score, block, left);
}

/* Offers a run of keys from key k on, which nothing hides or forces; the score of k has the index `at`. Each is written
 * down, and stays if it may win: a branch would often be mispredicted. */
static void offer_run(const struct choice_job *job, struct candidates *c, const struct masks *masks, const void *scores,
                      int64_t at, int64_t k, uint64_t *left) {
    if (c->n + RUN > c->most)
        keep_best(c, job->count, left);
    for (int64_t j = 0; j < RUN; j++) {
        const double score = cattn_number_at(masks->dtype, scores, at + j);
        const uint64_t rank = rank_of(score);
        c->rank[c->n] = rank;
        c->score[c->n] = score;
        c->block[c->n] = (int32_t)(k + j);
        c->n += !c->was_full || rank > c->least;
    }
}

static void close_block(const struct choice_job *job, struct candidates *c, struct forced forced, uint64_t *left) {
    if (c->open >= 0)
        offer(job, c, forced, c->open, c->best, left);
    c->open = -1;
}

/* The scores of the keys from .. to-1 of a query, of which the first one belongs to `scores`. */
static void take_scores(const struct choice_job *job, const struct masks *masks, struct candidates *c,
                        struct forced forced, int64_t from, int64_t to, const struct task *task) {
    const int64_t size = job->block_rows;
    const bool is_plain = size == 1 && !masks->mask && masks->n_bias == 0;
    for (int64_t k = from; k < to; k++) {
        if (is_plain && k >= forced.first && k + RUN <= cattn_min(to, forced.last)) {
            offer_run(job, c, masks, task->scores, k - from, k, task->sorted);
            k += RUN - 1;
            continue;
        }
        double score = cattn_number_at(masks->dtype, task->scores, k - from);
        if (!see(masks, k, &score))
            continue;
        if (size == 1) {
            offer(job, c, forced, k, score, task->sorted);
        } else if (k / size != c->open) {
            close_block(job, c, forced, task->sorted);
            c->open = k / size;
            c->best = score;
        } else if (score > c->best || isnan(c->best)) {
            c->best = score;
        }
    }
}

/* The weights of the heads of a query, side by side. */
static void copy_weights(const struct choice_job *job, const struct place *place, int64_t i, struct task *task) {
    const struct cattn_attention_params *p = &job->params->forward;
    const struct cattn_tensor *weights = &job->params->weights;
    const size_t element = cattn_element_size(p->dtype);
    const int64_t start = cattn_batch_start(p, weights, place->batch) + (place->first + i) * weights->row;
    for (int64_t h = 0; h < p->num_heads; h++)
        memcpy((char *)task->weights + (size_t)h * element, cattn_tensor_at(p, weights, start + h * weights->head),
               element);
}

/* Offers the keys k0 .. k1-1 to the queries of a task. */
static void offer_keys(const struct choice_job *job, const struct place *place, struct task *task, int64_t k0,
                       int64_t k1) {
    const struct cattn_attention_params *p = &job->params->forward;
    const int64_t element = (int64_t)cattn_element_size(p->dtype);
    for (int64_t i = 0; i < place->n; i++) {
        const int64_t from = task->lo[i] > k0 ? task->lo[i] : k0, to = cattn_min(task->hi[i], k1);
        if (from >= to)
            continue;
        const struct masks masks = masks_of(job, place, i);
        struct cattn_choice_row row = {
            .n_keys = to - from,
            .n_heads = p->num_heads,
            .products = (const char *)task->products + (i * job->block_keys + from - k0) * element,
            .head = place->n * job->block_keys,
            .weight_head = 1,
            .scale = p->score_options.scale,
            .relu = job->params->relu,
            .scores = task->scores,
        };
        if (job->params->weights.data) {
            copy_weights(job, place, i, task);
            row.weights = task->weights;
        }
        job->rows->choice_row(&row);
        take_scores(job, &masks, &task->candidates[i], forced_of(job, task->lo[i], task->hi[i]), from, to, task);
    }
}

/* ---- tasks ---- */

/* The queries of a unit. In `lo` and `hi` come the rows of key from which they choose: whole blocks if these are
 * pooled. */
static void find_place(const struct choice_job *job, int64_t unit, struct place *place, int64_t *lo, int64_t *hi) {
    const struct cattn_choice_params *c = job->params;
    const struct cattn_attention_params *p = &c->forward;
    place->batch = unit / job->n_blocks;
    place->first = unit % job->n_blocks * job->n_queries;
    place->n = cattn_min(job->n_queries, p->seqlen_q - place->first);
    cattn_batch_fill(p, place->batch, &place->at);
    cattn_visible_ranges(&place->at.batch_range, place->first, (int)place->n, lo, hi);
    if (!c->pooled)
        return;
    place->at.key = cattn_batch_start(p, &p->key, place->batch); /* the first block begins at the first valid key */
    place->at.key_scale = cattn_batch_start(p, &p->key_scale, place->batch);
    place->at.attn_mask = cattn_batch_start(p, &p->attn_mask, place->batch);
    for (int b = 0; b < p->n_bias; b++)
        place->at.bias[b] = cattn_batch_start(p, &p->bias[b], place->batch);
    for (int64_t i = 0; i < place->n; i++) {
        lo[i] = cattn_ceil_div(lo[i], c->block_size);
        hi[i] = cattn_min(hi[i] / c->block_size, job->n_keys);
    }
}

/* Writes the keys from .. to-1 of a query, counted from the first valid one, as far as they are visible. */
static int64_t write_keys(const struct choice_job *job, const struct place *place, const struct masks *masks, int64_t i,
                          int64_t n, int64_t from, int64_t to, double score) {
    const struct cattn_choice_params *c = job->params;
    const struct cattn_attention_params *p = &c->forward;
    const int64_t row = place->first + i;
    int32_t *indices =
        (int32_t *)c->indices.data + cattn_batch_start(p, &c->indices, place->batch) + row * c->indices.row;
    const int64_t scores = cattn_batch_start(p, &c->scores, place->batch) + row * c->scores.row;
    score = isnan(score) ? (double)NAN : score; /* one NaN on all machines */
    for (int64_t k = from; k < to; k++) {
        double unused = 0;
        if (masks && !see(masks, k, &unused))
            continue;
        indices[n * c->indices.col] = (int32_t)(k < 0 ? -1 : k + place->at.batch_range.first_key);
        if (c->scores.data && p->dtype == CATTN_F32)
            *(float *)cattn_tensor_at(p, &c->scores, scores + n * c->scores.col) = (float)score;
        else if (c->scores.data)
            *(double *)cattn_tensor_at(p, &c->scores, scores + n * c->scores.col) = score;
        n++;
    }
    return n;
}

/* Writes the result of a query, whose best blocks are left. */
static void write_row(const struct choice_job *job, const struct place *place, const struct candidates *c, int64_t i) {
    const struct cattn_choice_params *params = job->params;
    const int64_t size = params->block_size;
    struct cattn_range seen = cattn_visible_keys(&place->at.batch_range, place->first + i);
    const struct masks masks = masks_of(job, place, i);
    int64_t n = 0, tail = seen.hi;
    if (params->pooled) { /* keys of blocks that are not whole have no scores */
        const int64_t end = cattn_min(seen.hi / size, job->n_keys) * size, begin = cattn_round_up(seen.lo, size);
        tail = begin < end ? end : seen.lo;
        if (begin < end)
            n = write_keys(job, place, NULL, i, n, seen.lo, begin, (double)NAN);
    }
    for (int64_t j = 0; j < c->n; j++) {
        const int64_t first = c->block[j] * size, end = first + size;
        n = params->pooled ? write_keys(job, place, NULL, i, n, first, end, c->score[j])
                           : write_keys(job, place, &masks, i, n, first > seen.lo ? first : seen.lo,
                                        cattn_min(end, seen.hi), c->score[j]);
    }
    n = write_keys(job, place, NULL, i, n, tail, seen.hi, (double)NAN);
    write_keys(job, place, NULL, i, n, n - params->n_columns, 0, -(double)INFINITY);
}

/* Chooses among the rows k0 .. k1-1 of key. */
static void choose(const struct choice_job *job, const struct place *place, struct task *task, int64_t k0, int64_t k1,
                   struct cattn_worker *worker) {
    const struct cattn_attention_params *p = &job->params->forward;
    int64_t lo = INT64_MAX, hi = 0;
    for (int64_t i = 0; i < place->n; i++)
        if (task->lo[i] < task->hi[i]) {
            lo = cattn_min(lo, task->lo[i]);
            hi = task->hi[i] > hi ? task->hi[i] : hi;
        }
    lo = lo > k0 ? lo : k0;
    hi = cattn_min(hi, k1);
    if (lo < hi)
        copy_queries(job, place, task);
    for (int64_t k = lo, n; k < hi; k += n) {
        n = cattn_min(job->block_keys, hi - k);
        for (int64_t g = 0; g * p->group_size < p->num_heads; g++)
            multiply(job, place, task, g, k, n, worker);
        if (cattn_should_stop(worker))
            return;
        offer_keys(job, place, task, k, k + n);
    }
    for (int64_t i = 0; i < place->n; i++)
        if (task->lo[i] < task->hi[i])
            close_block(job, &task->candidates[i], forced_of(job, task->lo[i], task->hi[i]), task->sorted);
}

static void choice_task(void *context, int64_t index, struct cattn_worker *worker) {
    const struct choice_job *job = context;
    const int64_t unit = index / job->n_parts, part = index % job->n_parts;
    struct cattn_arena arena = cattn_arena(cattn_worker_scratch(worker), job->scratch_size, true);
    struct task task;
    struct place place;
    lay_out(job, &task, &arena);
    if (job->parts) {
        struct cattn_arena own = cattn_arena(job->parts + (cattn_size)index * job->part_size, job->part_size, false);
        task.candidates = lay_out_candidates(job, &own);
    }
    find_place(job, unit, &place, task.lo, task.hi);
    choose(job, &place, &task, part * job->part_keys, cattn_min((part + 1) * job->part_keys, job->n_keys), worker);
    for (int64_t i = 0; i < place.n; i++) {
        keep_best(&task.candidates[i], job->count, task.sorted);
        if (!job->parts)
            write_row(job, &place, &task.candidates[i], i);
    }
}

/* Chooses among the candidates of all parts of a unit. */
static void merge_task(void *context, int64_t unit, struct cattn_worker *worker) {
    const struct choice_job *job = context;
    struct cattn_arena arena = cattn_arena(cattn_worker_scratch(worker), job->scratch_size, true);
    uint64_t *left = cattn_carve(&arena, (cattn_size)job->n_room * sizeof *left);
    int64_t *lo = cattn_carve(&arena, (cattn_size)job->n_queries * sizeof *lo);
    int64_t *hi = cattn_carve(&arena, (cattn_size)job->n_queries * sizeof *hi);
    struct candidates *merged = lay_out_candidates(job, &arena);
    struct place place;
    find_place(job, unit, &place, lo, hi);
    for (int64_t i = 0; i < place.n; i++) {
        for (int64_t part = 0; part < job->n_parts; part++) {
            const char *memory = job->parts + (cattn_size)(unit * job->n_parts + part) * job->part_size;
            const struct candidates *c = (const struct candidates *)(const void *)memory + i;
            for (int64_t j = 0; j < c->n; j++)
                add(job, &merged[i], c->rank[j], c->score[j], c->block[j], left);
        }
        keep_best(&merged[i], job->count, left);
        write_row(job, &place, &merged[i], i);
    }
}

/* ---- sizes ---- */

static cattn_size count_bytes(const struct choice_job *job) {
    struct cattn_arena arena = cattn_arena(NULL, 0, false);
    struct task task;
    lay_out(job, &task, &arena);
    return arena.used;
}

/* Cuts queries into blocks, and keys into parts where there are fewer tasks than threads. */
static void cut(struct choice_job *job) {
    const struct cattn_choice_params *c = job->params;
    const struct cattn_attention_params *p = &c->forward;
    const int64_t blocks = cattn_ceil_div(job->n_keys, job->block_rows), heads = p->num_heads;
    job->count = cattn_min(c->count, blocks > 0 ? blocks : 1);
    const int64_t spare = 2 * job->count > SPARE ? 2 * job->count : SPARE;
    job->n_room = job->count + cattn_min(spare, blocks + 1);
    const int64_t bytes = job->n_room * (int64_t)(sizeof(uint64_t) + sizeof(double) + sizeof(int32_t));
    int64_t n = cattn_min(cattn_min(MOST_ROWS / heads, MOST_QUERIES), CANDIDATE_BYTES / bytes);
    n = cattn_min(n > 0 ? n : 1, p->seqlen_q);
    job->n_blocks = cattn_ceil_div(p->seqlen_q, n);
    job->n_queries = cattn_ceil_div(p->seqlen_q, job->n_blocks);
    int64_t keys = round_up_to_line(MOST_PRODUCTS / (job->n_queries * heads) + 1);
    keys = keys < LEAST_KEYS ? LEAST_KEYS : cattn_min(keys, MOST_KEYS);
    job->block_keys = cattn_min(keys, round_up_to_line(job->n_keys > 0 ? job->n_keys : 1));
    const double work = (double)job->n_keys * (double)(job->n_queries * heads) * (double)p->head_dim;
    const int64_t units = p->n_batch * job->n_blocks;
    job->n_parts = 1;
    if (units < p->num_threads && work > PARALLEL_WORK)
        job->n_parts = cattn_min(cattn_ceil_div(p->num_threads, units), cattn_ceil_div(job->n_keys, job->block_keys));
    job->part_keys = cattn_round_up(cattn_ceil_div(job->n_keys, job->n_parts), job->block_rows);
    job->scratch_size = count_bytes(job);
}

enum cattn_status cattn_choose_keys(const struct cattn_choice_params *params) {
    CATTN_CHECK(choice, params);
    const struct cattn_attention_params *p = &params->forward;
    if (p->n_batch == 0 || p->seqlen_q == 0 || params->n_columns == 0)
        return CATTN_OK;
    struct choice_job job = {
        .params = params, .kernels = cattn_kernels_for(p->dtype), .rows = cattn_row_kernels_for(p->dtype)};
    job.block_rows = params->pooled ? 1 : params->block_size;
    job.n_keys = params->pooled ? p->seqlen_k / params->block_size : p->seqlen_k;
    cut(&job);
    const int64_t units = p->n_batch * job.n_blocks;
    if (job.n_parts > 1) {
        struct cattn_arena arena = cattn_arena(NULL, 0, false);
        lay_out_candidates(&job, &arena);
        job.part_size = arena.used;
        job.parts = cattn_allocate((cattn_size)(units * job.n_parts) * job.part_size);
        if (!job.parts)
            return CATTN_NO_MEMORY;
    }
    enum cattn_status status =
        cattn_parallel_for(units * job.n_parts, p->num_threads, job.scratch_size, choice_task, &job, &p->poll);
    if (status == CATTN_OK && job.parts)
        status = cattn_parallel_for(units, p->num_threads, job.scratch_size, merge_task, &job, &p->poll);
    free(job.parts);
    return status;
}
