/* product.c -- the driver of products of two matrices.
 *
 * A task is a block of rows of one operand, B, which it packs, against a range of rows of the other one, A, which it
 * reads where they lie, or packs too. No element of the result depends on which operand is packed, nor on the tasks.
 */
#include "attention.h"
#include "dispatch.h"
#include "parallel.h"
#include "params.h"

/* Fewer multiply-adds are not worth a second thread. */
#define PARALLEL_WORK 200000.0
/* Bytes from which on few rows of B are packed slab by slab: a sum may be longer than memory, and pages that are given
 * back take time, too. */
#define BY_SLABS ((cattn_size)64 << 20)
/* Tasks for each thread, so that no thread waits long for the last one. */
#define TASKS_PER_THREAD 4
/* Rows of A of a task: at least, and at most, because their sums are read and written for each slab. If they are packed
 * and their sums rest in the result, so many bytes of a slab, whose memory is kept between calls. */
#define LEAST_ROWS 96
#define MOST_ROWS 576
#define MOST_PACKED (576 * CATTN_SLAB_TERMS * (int64_t)sizeof(double))
/* Rows of B of a task at most, if rows of A are packed for them and the sums rest in the result. */
#define MOST_LANES (8 * CATTN_PRODUCT_MANY_LANES)
/* In tiles: the most rows of A, the most rows of B, and the most whose sums are kept until all columns are added. */
#define MOST_ROWS_IN_TILES 1536
#define MOST_LANES_IN_TILES 4096
#define MOST_SUMS_IN_TILES 768
/* In tiles: elements of the result from which on it bypasses the caches, which do not hold it. */
#define LARGE_RESULT ((int64_t)1 << 21)
/* With few rows of B: elements of A in a task. */
#define FEW_ELEMENTS 65536
/* Memory bounds the length of a sum, but not of arrays that repeat one element (stride 0). Within this limit,
 * sizes of scratch do not overflow. */
#define MOST_TERMS ((int64_t)1 << 50)

struct product_job {
    struct cattn_product_params p; /* a is read in place, b is packed */
    const struct cattn_kernels *kernels;
    bool few, by_slabs;
    bool packs_a;               /* tasks with enough rows of B do */
    bool sums_in_place;         /* as cattn_sums_in_place */
    int64_t b_rows, a_rows;     /* of a task */
    int64_t b_blocks, a_blocks; /* of a pair of matrices */
    cattn_size scratch_size;
};

/* ---- which operand is packed ---- */

static void swap_operands(struct cattn_product_params *p) {
    const struct cattn_product_params from = *p;
    p->n_a = from.n_b;
    p->n_b = from.n_a;
    p->a = from.b;
    p->b = from.a;
    p->out_a = from.out_b;
    p->out_b = from.out_a;
    p->bias_a = from.bias_b;
    p->bias_b = from.bias_a;
}

/* What a sum adds: a product of elements, or of pairs of them. */
static int64_t count_terms(const struct cattn_product_params *p) {
    return p->bf16_products ? cattn_ceil_div(p->depth, 2) : p->depth;
}

/* The most rows of A of a task in tiles. */
static int64_t rows_in_tiles(int64_t depth) {
    const int64_t row = 2 * cattn_unit_cols(depth < CATTN_GROUP_TERMS ? CATTN_GROUP_TERMS : depth);
    return cattn_min(MOST_ROWS_IN_TILES, CATTN_UNIT_BYTES / row) / LEAST_ROWS * LEAST_ROWS;
}

/* Whether kernels read this operand in place, or round it row by row. */
static bool lies_in_rows(const struct cattn_product_params *p, const struct cattn_operand *operand) {
    return (operand->storage == CATTN_STORED_PLAIN || p->bf16_products) && operand->col == 1;
}

/* Shuffles of vectors that products in tiles take, in 32nds: B is transposed in squares as it is packed, once for each
 * block of A, and the results too where they are no rows. */
static double shuffles_in_tiles(const struct cattn_product_params *p, int64_t n_a, int64_t n_b, int64_t out_b) {
    const double results = out_b == 1 ? 0 : 8 * (double)n_a * (double)n_b;
    return 3 * (double)p->depth * (double)n_b * (double)cattn_ceil_div(n_a, rows_in_tiles(p->depth)) + results;
}

static bool should_swap(const struct cattn_product_params *p, bool packs_both) {
    const bool few_a = p->n_a <= CATTN_FEW_ROWS, few_b = p->n_b <= CATTN_FEW_ROWS;
    if (few_a != few_b) /* the larger matrix is read once */
        return few_a;
    if (packs_both && (p->out_a == 1) != (p->out_b == 1)) /* rows of the result are lanes */
        return p->out_a == 1;
    if (lies_in_rows(p, &p->a) != lies_in_rows(p, &p->b))
        return lies_in_rows(p, &p->b);
    if (p->bf16_products == CATTN_BF16_TILES && p->n_a > CATTN_FEW_ROWS)
        return shuffles_in_tiles(p, p->n_b, p->n_a, p->out_a) < shuffles_in_tiles(p, p->n_a, p->n_b, p->out_b);
    return p->n_a < p->n_b;
}

/* ---- tasks ---- */

static bool copies_a(const struct product_job *job) {
    return job->packs_a || (job->p.a.col != 1 && !job->p.bf16_products);
}

static bool converts(const struct cattn_product_params *p) {
    return p->bf16_products || p->a.storage != CATTN_STORED_PLAIN || p->b.storage != CATTN_STORED_PLAIN;
}

static void lay_out_few(const struct product_job *job, struct cattn_product *product, struct cattn_arena *arena) {
    const size_t element = cattn_element_size(job->p.dtype), slab = CATTN_SLAB_TERMS * element;
    /* tables of tiles pack few rows as numbers, as many as there may be */
    const cattn_size rows =
        job->p.bf16_products == CATTN_BF16_TILES ? 2 * (cattn_size)CATTN_FEW_ROWS : (cattn_size)job->p.n_b;
    const cattn_size cols = (cattn_size)cattn_round_up(count_terms(&job->p), CATTN_PRODUCT_CHAINS);
    const cattn_size chains_of_rows =
        (cattn_size)CATTN_FEW_SLABS * CATTN_FEW_ROWS * CATTN_PRODUCT_CHAINS * CATTN_PRODUCT_CHAINS;
    const cattn_size chains_of_columns = (cattn_size)CATTN_FEW_COLUMNS * (CATTN_PRODUCT_CHAINS + 1);
    const cattn_size sums = chains_of_rows > chains_of_columns ? chains_of_rows : chains_of_columns;
    const cattn_size packed = job->by_slabs ? (cattn_size)CATTN_FEW_SLABS * CATTN_SLAB_TERMS : cols;
    product->packed = cattn_carve(arena, rows * packed * element);
    product->sums = cattn_carve(arena, sums * element);
    product->a_copy = cattn_carve(arena, copies_a(job) ? CATTN_PRODUCT_CHAINS * slab : 0);
    product->converted = cattn_carve(arena, converts(&job->p) ? CATTN_PRODUCT_CHAINS * slab : 0);
}

static void lay_out(const struct product_job *job, struct cattn_product *product, struct cattn_arena *arena) {
    const size_t element = cattn_element_size(job->p.dtype), slab = CATTN_SLAB_TERMS * element;
    const cattn_size b_rows = (cattn_size)cattn_product_block(job->b_rows), a_rows = (cattn_size)CATTN_PRODUCT_ROWS;
    const cattn_size sums = (cattn_size)job->a_rows * (cattn_size)CATTN_PRODUCT_SUMS_ROW(job->b_rows);
    product->packed = cattn_carve(arena, b_rows * slab);
    product->sums = cattn_carve(arena, job->sums_in_place ? 0 : sums * element);
    product->a_copy = cattn_carve(arena, copies_a(job) ? (job->packs_a ? (cattn_size)job->a_rows : a_rows) * slab : 0);
    product->converted = cattn_carve(arena, converts(&job->p) ? (b_rows > a_rows ? b_rows : a_rows) * slab : 0);
    product->edge = cattn_carve(arena, CATTN_PRODUCT_EDGE * slab);
}

static void lay_out_tiles(const struct product_job *job, struct cattn_product *product, struct cattn_arena *arena) {
    const cattn_size cols = (cattn_size)cattn_unit_cols(job->p.depth),
                     rows = (cattn_size)cattn_round_up(job->a_rows, CATTN_UNIT);
    /* the first unit of B may be a part of one */
    const cattn_size lanes =
        job->p.depth > CATTN_UNIT_TERMS ? (cattn_size)cattn_round_up(job->b_rows, CATTN_UNIT) + CATTN_UNIT : CATTN_UNIT;
    product->packed = cattn_carve(arena, CATTN_UNIT * cols * sizeof(uint16_t));
    product->sums = cattn_carve(arena, rows * lanes * sizeof(float));
    product->a_copy = cattn_carve(arena, rows * cols * sizeof(uint16_t));
    product->converted = cattn_carve(arena, job->kernels->tiles_begin ? 0 : rows * cols * sizeof(float));
}

/* The scratch of a task. */
static void lay_out_task(const struct product_job *job, struct cattn_product *product, struct cattn_arena *arena) {
    if (job->few)
        lay_out_few(job, product, arena);
    else if (job->p.bf16_products == CATTN_BF16_TILES)
        lay_out_tiles(job, product, arena);
    else
        lay_out(job, product, arena);
}

/* The scales of a quantized matrix begin at its first element's. */
static struct cattn_matrix matrix_of(const struct cattn_operand *from, enum cattn_dtype dtype, int64_t batch,
                                     int64_t row) {
    const int64_t size = (int64_t)cattn_stored_size(dtype, from->storage);
    struct cattn_matrix matrix = {.storage = from->storage,
                                  .first = (const char *)from->data + (batch * from->batch + row * from->row) * size,
                                  .row = from->row,
                                  .col = from->col,
                                  .scale_row = from->scale_row,
                                  .scale_col = from->scale_col};
    if (cattn_is_quantized(from->storage))
        matrix.scale = from->scale + batch * from->scale_batch + row * from->scale_row;
    return matrix;
}

static void run_few(const struct cattn_kernels *kernels, struct cattn_product *product, int64_t a, int64_t end,
                    struct cattn_worker *worker) {
    const int64_t most = product->a.row == 1 ? CATTN_FEW_COLUMNS / product->n_b : CATTN_PRODUCT_ROWS;
    if (!product->by_slabs)
        kernels->product_pack_few(product);
    for (; a < end && !cattn_should_stop(worker); a += most)
        kernels->product_few(product, a, (int)cattn_min(most, end - a));
}

static void product_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct product_job *job = context;
    const struct cattn_product_params *p = &job->p;
    const int64_t a_first = task % job->a_blocks * job->a_rows, rest = task / job->a_blocks;
    const int64_t b_first = rest % job->b_blocks * job->b_rows, batch = rest / job->b_blocks;
    const int64_t a_end = cattn_min(a_first + job->a_rows, p->n_a);
    const int64_t element = (int64_t)cattn_element_size(p->dtype);
    const int64_t out = batch * p->out_batch + b_first * p->out_b;
    struct cattn_product product = {
        .stop = cattn_stop_of(worker),
        .by_slabs = job->by_slabs,
        .a = matrix_of(&p->a, p->dtype, batch, 0),
        .b = matrix_of(&p->b, p->dtype, batch, b_first),
        .depth = p->depth,
        .n_b = cattn_min(job->b_rows, p->n_b - b_first),
        .out_storage = p->out_storage,
        .streams = p->n_a * p->n_b >= LARGE_RESULT,
        .out = (char *)p->out + out * (int64_t)cattn_stored_size(p->dtype, p->out_storage),
        .out_a = p->out_a,
        .out_b = p->out_b,
        .bias_a = p->bias_a,
        .bias_b = p->bias_b,
    };
    if (p->bias)
        product.bias = (const char *)p->bias + (batch * p->bias_batch + b_first * p->bias_b) * element;
    struct cattn_arena arena = cattn_arena(cattn_worker_scratch(worker), job->scratch_size, true);
    lay_out_task(job, &product, &arena);
    if (job->few)
        run_few(job->kernels, &product, a_first, a_end, worker);
    else {
        if (job->kernels->tiles_begin)
            job->kernels->tiles_begin();
        job->kernels->product_tile(&product, a_first, a_end - a_first);
        if (job->kernels->tiles_end)
            job->kernels->tiles_end();
    }
}

/* Rows of B of a task: even blocks. Where rows of A are packed too, a block has more rows, unless there were too few
 * tasks then: square ones pack least. */
static int64_t rows_of_b(const struct product_job *job, int64_t wanted) {
    const struct cattn_product_params *p = &job->p;
    int64_t most = !job->packs_a ? CATTN_PRODUCT_LANES : job->sums_in_place ? MOST_LANES : CATTN_PRODUCT_MANY_LANES;
    if (p->bf16_products == CATTN_BF16_TILES)
        most = p->depth > CATTN_UNIT_TERMS ? MOST_SUMS_IN_TILES : MOST_LANES_IN_TILES;
    while (most > CATTN_PRODUCT_LANES &&
           p->n_batch * cattn_ceil_div(p->n_b, most) * cattn_ceil_div(p->n_a, most) < wanted)
        most -= CATTN_PAD;
    return cattn_round_up(cattn_ceil_div(p->n_b, cattn_ceil_div(p->n_b, most)), CATTN_PAD);
}

/* The most rows of A of a task. */
static int64_t most_rows(const struct product_job *job) {
    if (job->few)
        return INT64_MAX - LEAST_ROWS;
    if (job->p.bf16_products == CATTN_BF16_TILES)
        return rows_in_tiles(job->p.depth);
    if (!job->packs_a || !job->sums_in_place)
        return MOST_ROWS;
    return MOST_PACKED / (CATTN_SLAB_TERMS * (int64_t)cattn_element_size(job->p.dtype));
}

/* Whether few rows of B are packed slab by slab. */
static bool is_long(const struct cattn_product_params *p) {
    const cattn_size row = (cattn_size)cattn_round_up(count_terms(p), CATTN_PRODUCT_CHAINS);
    return (cattn_size)p->n_b * row * cattn_element_size(p->dtype) > BY_SLABS;
}

static bool rest_in_place(const struct cattn_product_params *p) {
    return p->out_storage == CATTN_STORED_PLAIN && p->out_b == 1 && p->bf16_products != CATTN_BF16_TILES;
}

/* Cuts both operands into blocks. */
static void cut(struct product_job *job) {
    const struct cattn_product_params *p = &job->p;
    const int64_t wanted = p->num_threads > 1 ? TASKS_PER_THREAD * (int64_t)p->num_threads : 1;
    job->sums_in_place = rest_in_place(p);
    job->b_rows = job->few ? p->n_b : rows_of_b(job, wanted);
    job->b_blocks = cattn_ceil_div(p->n_b, job->b_rows);
    job->by_slabs = job->few && is_long(p);
    const int64_t least = job->few ? cattn_ceil_div(FEW_ELEMENTS, p->depth + 1) : LEAST_ROWS;
    const int64_t most = most_rows(job);
    int64_t each = cattn_ceil_div(p->n_a, cattn_ceil_div(wanted, job->b_blocks * p->n_batch));
    if (each > most) /* even blocks */
        each = cattn_ceil_div(each, cattn_ceil_div(each, most));
    job->a_rows = cattn_round_up(cattn_min(most, each < least ? least : each), LEAST_ROWS);
    job->a_blocks = cattn_ceil_div(p->n_a, job->a_rows);
    struct cattn_product unused = {0};
    struct cattn_arena count = cattn_arena(NULL, 0, false);
    lay_out_task(job, &unused, &count);
    job->scratch_size = count.used;
}

enum cattn_status cattn_product(const struct cattn_product_params *params) {
    CATTN_CHECK(product, params);
    if (params->n_batch == 0 || params->n_a == 0 || params->n_b == 0)
        return CATTN_OK;
    if (params->depth > MOST_TERMS)
        return CATTN_NO_MEMORY;
    struct product_job job = {.p = *params};
    const struct cattn_kernel_pair pairs = cattn_bf16_kernels(params->bf16_products);
    const struct cattn_kernels *tiles = params->bf16_products ? pairs.tiles : cattn_kernels_for(params->dtype);
    if (should_swap(params, cattn_min(params->n_a, params->n_b) >= tiles->product_packs_from))
        swap_operands(&job.p);
    job.packs_a = job.p.n_b >= tiles->product_packs_from;
    job.few = job.p.n_b <= CATTN_FEW_ROWS;
    job.kernels = params->bf16_products && job.few ? pairs.few : tiles;
    if ((double)params->n_batch * (double)params->n_a * (double)params->n_b * (double)params->depth < PARALLEL_WORK)
        job.p.num_threads = 1;
    cut(&job);
    const int64_t n_tasks = params->n_batch * job.b_blocks * job.a_blocks;
    return cattn_parallel_for(n_tasks, job.p.num_threads, job.scratch_size, product_task, &job, &params->poll);
}

/* ---- within a task of another driver ---- */

void cattn_product_lay_out(const struct cattn_product_params *most, struct cattn_product *product,
                           struct cattn_arena *arena) {
    struct product_job job = {.p = *most, .kernels = cattn_kernels_for(most->dtype)};
    job.few = most->n_b <= CATTN_FEW_ROWS;
    job.packs_a = most->n_b >= job.kernels->product_packs_from;
    job.sums_in_place = rest_in_place(most);
    job.by_slabs = job.few && is_long(most);
    job.a_rows = cattn_round_up(most->n_a, LEAST_ROWS);
    job.b_rows = most->n_b;
    lay_out_task(&job, product, arena);
    product->by_slabs = job.by_slabs;
}

void cattn_product_compute(const struct cattn_kernels *kernels, struct cattn_product *product, int64_t n_a,
                           struct cattn_worker *worker) {
    product->stop = cattn_stop_of(worker);
    if (product->n_b <= CATTN_FEW_ROWS)
        run_few(kernels, product, 0, n_a, worker);
    else
        kernels->product_tile(product, 0, n_a);
}
