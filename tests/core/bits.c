/* bits.c -- csrc/core without Python: prints hashes that must be equal for all tables and on all machines.
 *
 *   bits                    the tables of this build: name, usable on this CPU, inside the bit contract
 *   bits TABLE BEGIN END    problems BEGIN .. END-1 of each kind with that table, one line each: description and hash
 *
 * Shapes, options, strides and numbers of a problem follow from its index, and hashes take the values of words, not
 * their bytes, so lines can be compared across machines. Each problem is computed in several ways (paths, threads,
 * rounding directions of the caller, float32 in the place of quantized arrays) that must give the same hash; the exit
 * code is 1 if one did not. tools/machines builds and runs this program.
 *
 * Left out: PyTorch's normal numbers in float64. Their logarithm, sine and cosine come from the C library.
 */
#include <fenv.h>

#include "attention.h"
#include "core/mt19937.h"
#include "problem.h"
#include "torch_random.h"

/* ---- softmax and dropout ---- */

static const int COLUMNS[] = {1, 2, 5, 7, 8, 9, 16, 31, 64, 65, 127, 500, 511, 512, 513, 1025, 2000};

/* Rows of a softmax or a dropout. */
static struct shape draw_rows(int64_t *batch_shape, int *n_batch_dims, int64_t *n_rows, int64_t *n_cols) {
    struct shape shape = {.n_batch_dims = 2, .heads = 1, .rows = 1};
    *n_batch_dims = 2;
    *n_rows = 1;
    for (int d = 0; d < 2; d++)
        *n_rows *= batch_shape[d] = shape.batch[d] = between(1, d == 0 ? 3 : 40);
    shape.cols = *n_cols = PICK(COLUMNS);
    say(" %" PRId64 "x%" PRId64, *n_rows, *n_cols);
    return shape;
}

static void softmax(int64_t index) {
    const struct type *type = &TYPES[index % 4];
    struct cattn_softmax_params p = {.dtype = type->dtype, .storage = type->storage};
    begin("softmax", index);
    p.scale = number();
    say(" %s", type->name);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    const struct block x = input(&p.x, type, shape);
    if (chance(20))
        spoil(type, &x);
    if (chance(50))
        mask(&p.mask, shape);
    p.is_causal = chance(40);
    p.ranges = (struct cattn_ranges){.left = CATTN_UNBOUNDED,
                                     .lower_right = chance(50),
                                     .seqlen_k = p.n_cols,
                                     .query_length = shape.batch[1],
                                     .key_length = p.n_cols};
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_softmax(&p), "softmax", p.num_threads);
    }
    end_line();
    forget();
}

static void softmax_gradient(int64_t index) {
    const struct type *type = &TYPES[index % 2];
    struct cattn_softmax_backward_params p = {.dtype = type->dtype};
    begin("softmax_backward", index);
    p.scale = number();
    say(" %s", type->name);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    input(&p.grad, type, shape);
    input(&p.weights, type, shape);
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_softmax_backward(&p), "softmax_backward", p.num_threads);
    }
    end_line();
    forget();
}

static void dropout(int64_t index) {
    const struct type *type = &TYPES[index % 4];
    struct cattn_dropout_params p = {.dtype = type->dtype, .storage = type->storage};
    struct cattn_torch_random random = {0};
    begin("dropout", index);
    say(" %s", type->name);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    draw_dropout(&p.dropout, &random);
    const struct cattn_torch_random fresh = random;
    input(&p.x, type, shape);
    output(&p.out, type, shape, false);
    output(&p.mask, &BYTES, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        random = fresh;
        compare(cattn_dropout(&p), "dropout", p.num_threads);
    }
    end_line();
    forget();
}

/* ---- rotary positions and RMS norm ---- */

/* One statement for each number: C does not fix the order in which initialisers and arguments are evaluated. */
static struct cattn_rope_scaling draw_scaling(void) {
    struct cattn_rope_scaling s;
    s.type = (enum cattn_rope_type)between(0, CATTN_ROPE_LLAMA3);
    s.truncate = chance(50);
    s.factor = 1 + fabs(number());
    s.original_length = 1 + 64 * fabs(number());
    s.low_freq_factor = fabs(number());
    s.high_freq_factor = s.low_freq_factor + fabs(number());
    s.beta_slow = fabs(number());
    s.beta_fast = s.beta_slow + 8 * fabs(number());
    s.attention_factor = chance(30) ? fabs(number()) : 0;
    s.mscale = chance(50) ? fabs(number()) : 0;
    s.mscale_all_dim = fabs(number());
    return s;
}

/* Near and far ones, whole and between: up to 2^51. */
static void draw_positions(struct cattn_rope_params *p, struct shape shape) {
    shape = thinned(shape, false);
    shape.cols = 1;
    const struct block positions = input(&p->positions, &TYPES[CATTN_F64], shape);
    for (size_t i = 0; i < positions.n; i++) {
        const int exponent = (int)between(0, 49);
        const double position = ldexp(number(), exponent);
        put(&TYPES[CATTN_F64], positions.data, i, chance(70) ? nearbyint(position) : position);
        p->length = fmax(p->length, ((const double *)positions.data)[i] + 1);
    }
    say(" positions");
}

static void rope(int64_t index) {
    static const int WIDTHS[] = {4, 5, 8, 16, 22, 34, 64, 66, 128, 129};
    const struct type *type = &TYPES[index % 4];
    struct cattn_rope_params p = {.dtype = type->dtype, .storage = type->storage, .n_batch_dims = 2, .n_batch = 1};
    struct shape shape = {.n_batch_dims = 2, .heads = 1};
    begin("rope", index);
    for (int d = 0; d < 2; d++)
        p.n_batch *= p.batch_shape[d] = shape.batch[d] = between(1, d == 0 ? 3 : 9);
    shape.rows = p.seqlen = between(1, 90);
    shape.cols = p.n_cols = PICK(WIDTHS);
    p.rotary_dim = chance(50) ? p.n_cols / 2 * 2 : 2 * between(2, p.n_cols / 2);
    p.interleaved = chance(50);
    p.inverse = chance(30);
    const int exponent = (int)between(-9, 40);
    p.theta = chance(50) ? 10000 : 1 + ldexp(fabs(number()), exponent);
    p.scaling = draw_scaling();
    p.length = (double)p.seqlen;
    say(" %s, %" PRId64 " of %" PRId64 "x%" PRId64 ", %" PRId64 " rotated, scaling %d", type->name, p.n_batch, p.seqlen,
        p.n_cols, p.rotary_dim, (int)p.scaling.type);
    const struct block x = input(&p.x, type, shape);
    if (chance(20))
        spoil(type, &x);
    if (chance(60))
        draw_positions(&p, shape);
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        fesetround(p.num_threads == 1 ? FE_TONEAREST : FE_UPWARD);
        const enum cattn_status status = cattn_rope(&p);
        fesetround(FE_TONEAREST);
        compare(status, "rope", p.num_threads);
    }
    end_line();
    forget();
}

static void norm(int64_t index) {
    const struct type *type = &TYPES[index % 4], *wide = &TYPES[type->dtype];
    struct cattn_norm_params p = {.dtype = type->dtype, .storage = type->storage};
    begin("norm", index);
    say(" %s", type->name);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    const struct block x = input(&p.x, type, shape);
    p.eps = fabs(number());
    if (chance(20))
        spoil(type, &x);
    if (chance(70))
        input(&p.weight, wide, (struct shape){.heads = 1, .rows = 1, .cols = p.n_cols});
    p.centred = chance(50);
    if (chance(50))
        input(&p.bias, wide, (struct shape){.heads = 1, .rows = 1, .cols = p.n_cols});
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_norm(&p), "norm", p.num_threads);
    }
    end_line();
    forget();
}

static void norm_gradient(int64_t index) {
    const struct type *type = &TYPES[index % 2];
    const struct shape columns = {.heads = 1, .rows = 1};
    struct cattn_norm_backward_params p = {.dtype = type->dtype};
    struct shape shape, weight = columns;
    begin("norm_backward", index);
    say(" %s", type->name);
    shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    weight.cols = p.n_cols;
    p.eps = fabs(number());
    input(&p.grad, type, shape);
    input(&p.x, type, shape);
    output(&p.grad_x, type, shape, false);
    if (chance(70)) {
        input(&p.weight, type, weight);
        output(&p.grad_weight, type, weight, false);
    }
    p.centred = chance(50);
    if (p.centred)
        output(&p.grad_bias, type, weight, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_norm_backward(&p), "norm_backward", p.num_threads);
    }
    end_line();
    forget();
}

static void activation(int64_t index) {
    const struct type *type = &TYPES[index % 4];
    struct cattn_activation_params p = {.dtype = type->dtype, .storage = type->storage};
    begin("activation", index);
    p.which = (enum cattn_activation)between(CATTN_GELU, CATTN_SILU);
    say(" %s, function %d", type->name, (int)p.which);
    const struct shape shape = draw_rows(p.batch_shape, &p.n_batch_dims, &p.n_rows, &p.n_cols);
    const struct block x = input(&p.x, type, shape);
    if (chance(20))
        spoil(type, &x);
    if (chance(50))
        input(&p.grad, type, shape);
    output(&p.out, type, shape, false);
    for (p.num_threads = 1; p.num_threads <= 3; p.num_threads += 2) {
        clear_outputs();
        compare(cattn_activate(&p), "activation", p.num_threads);
    }
    end_line();
    forget();
}

/* ---- products of matrices ---- */

/* Around vectors, 8 rows, blocks of rows, chains and slabs, of elements and of pairs. */
static const int PRODUCT_ROWS[] = {1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 95, 97, 193, 230};
static const int TERMS[] = {0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 64, 100, 511, 512, 513, 700, 1023, 1025, 1600};

static struct cattn_operand operand_of(const struct cattn_tensor *tensor, const struct type *type) {
    return (struct cattn_operand){.storage = type->storage,
                                  .data = tensor->data,
                                  .batch = tensor->batch[0],
                                  .row = tensor->row,
                                  .col = tensor->col};
}

/* A matrix by rows or by columns, of this type or quantized, which then also is `plain` in float32. */
static struct cattn_operand draw_operand(const struct type *type, struct shape shape, struct cattn_operand *plain) {
    const bool quantize = type->dtype == CATTN_F32 && chance(25), by_columns = chance(30);
    struct cattn_tensor tensor, scale, wide;
    struct shape laid = shape;
    if (by_columns) {
        laid.rows = shape.cols;
        laid.cols = shape.rows;
    }
    type = quantize ? &QUANTIZED[between(0, 1)] : type;
    const struct block block = quantize ? quantized_input(&tensor, type, laid) : input(&tensor, type, laid);
    if (quantize) {
        laid.n_batch_dims = 0; /* scales have no batch */
        scales(&scale, laid);
        laid.n_batch_dims = 1;
        wide = dequantized(&tensor, type->storage, &scale, laid);
    }
    if (chance(20) && !quantize)
        spoil(type, &block);
    struct cattn_operand operand = operand_of(&tensor, type);
    *plain = quantize ? operand_of(&wide, &TYPES[CATTN_F32]) : operand;
    if (quantize) {
        operand.scale = scale.data;
        operand.scale_row = by_columns ? scale.col : scale.row;
        operand.scale_col = by_columns ? scale.row : scale.col;
    }
    for (int i = 0; i < 2 && by_columns; i++) {
        struct cattn_operand *turned = i == 0 ? &operand : plain;
        const int64_t row = turned->row;
        turned->row = turned->col;
        turned->col = row;
    }
    say(" %s%s", type->name, by_columns ? " by columns" : "");
    return operand;
}

static void multiply(struct cattn_product_params *p, const char *way, int num_threads, int direction) {
    p->num_threads = num_threads;
    clear_outputs();
    fesetround(direction);
    const enum cattn_status status = cattn_product(p);
    fesetround(FE_TONEAREST);
    compare(status, way, num_threads);
}

static void product(int64_t index) {
    const struct type *type = &TYPES[index % 4], *wide = &TYPES[type->dtype];
    struct cattn_product_params p = {.dtype = type->dtype, .out_storage = type->storage};
    struct shape shape = {.n_batch_dims = 1, .heads = 1};
    struct cattn_operand plain_a, plain_b;
    struct cattn_tensor out, bias;
    begin("product", index);
    p.bf16_products = type->dtype == CATTN_F32 && chance(50);
    p.n_batch = shape.batch[0] = between(1, 2);
    p.n_a = PICK(PRODUCT_ROWS);
    p.n_b = PICK(PRODUCT_ROWS);
    p.depth = PICK(TERMS);
    while ((double)p.n_batch * (double)p.n_a * (double)p.n_b * (double)p.depth > 1e6) { /* emulators are slow */
        p.n_a = cattn_ceil_div(p.n_a, 2);
        p.n_b = cattn_ceil_div(p.n_b, 2);
    }
    say(" %s%s, %" PRId64 " of %" PRId64 "x%" PRId64 "x%" PRId64, type->name, p.bf16_products ? " by pairs" : "",
        p.n_batch, p.n_a, p.n_b, p.depth);
    shape.cols = p.depth;
    shape.rows = p.n_a;
    p.a = draw_operand(type, shape, &plain_a);
    shape.rows = p.n_b;
    p.b = draw_operand(type, shape, &plain_b);
    shape.rows = p.n_a;
    shape.cols = p.n_b;
    output(&out, type, shape, false);
    p.out = out.data;
    p.out_batch = out.batch[0];
    p.out_a = out.row;
    p.out_b = out.col;
    if (chance(50)) {
        input(&bias, wide, (struct shape){.heads = 1, .rows = 1, .cols = p.n_b});
        p.bias = bias.data;
        p.bias_b = bias.col;
    }
    multiply(&p, "product", 1, FE_TONEAREST);
    multiply(&p, "product", 3, FE_UPWARD);
    p.a = plain_a;
    p.b = plain_b;
    multiply(&p, "in float32", 1, FE_DOWNWARD);
    end_line();
    forget();
}

/* ---- PyTorch's random numbers ---- */

static const char *const DISTRIBUTIONS[] = {"uniform", "normal", "integer", "bernoulli", "keep"};

/* Numbers of one distribution, then words of another generator that has imported the state. */
static void torch(int64_t index) {
    struct cattn_torch_random random = {.stream = index % 3 ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL}, other = {0};
    struct cattn_torch_fill fill = {.distribution = (enum cattn_torch_distribution)(index % 5)};
    struct shape shape = {.heads = 1, .rows = 1, .cols = 700};
    struct cattn_tensor out, words;
    uint8_t state[CATTN_TORCH_STATE_BYTES];
    begin("torch", index);
    say(" %s", DISTRIBUTIONS[fill.distribution]);
    output(&words, &TYPES[CATTN_F32], shape, true);
    if (fill.distribution != CATTN_TORCH_NORMAL)
        fill.dtype = (enum cattn_dtype)between(0, 1);
    fill.n = between(16, 3000);
    fill.low = chance(50) ? number() : 0;
    fill.high = 5;
    fill.range = draw();
    fill.range = fill.range >> between(0, 62) | 1;
    fill.base = between(-9, 9);
    fill.skip = between(0, 99);
    fill.probability = 0.3;
    shape.cols = fill.n;
    output(&out,
           fill.distribution == CATTN_TORCH_DROPOUT_MASK ? &BYTES
           : fill.distribution == CATTN_TORCH_INTEGER    ? &INTEGERS
                                                         : &TYPES[fill.dtype],
           shape, true);
    fill.out = out.data;
    clear_outputs();
    cattn_torch_seed(&random, draw());
    enum cattn_status status = cattn_torch_fill(&random, &fill);
    cattn_torch_export(&random, state);
    if (!cattn_torch_import(&other, state))
        status = CATTN_NO_MEMORY;
    cattn_mt19937_draw(&other.mt, 700, words.data);
    compare(status, "torch", 1);
    end_line();
    forget();
}

/* ---- main ---- */

int main(int argc, char **argv) {
    if (argc == 1) {
        for (int i = 0; i < cattn_isa_count(); i++) {
            const struct cattn_isa_info info = cattn_isa_info(i);
            printf("%s %d %d\n", info.name, info.usable, info.has_fma);
        }
        return 0;
    }
    if (argc != 4 || !cattn_isa_select(argv[1])) {
        fprintf(stderr, "usage: %s TABLE BEGIN END, with a table that this CPU can run\n", argv[0]);
        return 2;
    }
    for (int64_t i = atoll(argv[2]); i < atoll(argv[3]); i++) {
        attention(i);
        bf16_products(i);
        statistics(i);
        softmax(i);
        softmax_gradient(i);
        dropout(i);
        rope(i);
        norm(i);
        norm_gradient(i);
        activation(i);
        product(i);
        torch(i);
    }
    return agree ? 0 : 1;
}
