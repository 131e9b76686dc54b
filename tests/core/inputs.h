/* inputs.h -- numbers, strides and memory of the problems in bits.c. All follow from integer arithmetic, so they are
 * the same on every machine. Included once.
 */
#ifndef INPUTS_H
#define INPUTS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cattn.h"

/* ---- one source of integers: SplitMix64 ---- */

static uint64_t source;

static uint64_t draw(void) {
    uint64_t z = source += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static int64_t between(int64_t least, int64_t most) { return least + (int64_t)(draw() % (uint64_t)(most - least + 1)); }
static bool chance(int percent) { return between(0, 99) < percent; }

#define PICK(list) list[between(0, (int64_t)(sizeof list / sizeof *list) - 1)]

/* Any sign, magnitude from 1/4 to 4, all bits of the mantissa. */
static double number(void) {
    const uint64_t bits = draw();
    const double mantissa = 1 + (double)(bits >> 12) * 0x1p-52;
    return ldexp(bits & 1 ? -mantissa : mantissa, (int)(bits >> 1 & 3) - 2);
}

/* ---- memory: freed at once at the end of a problem; outputs are hashed ---- */

struct block {
    void *data;
    size_t n, size; /* number of elements, bytes of an element */
};

enum { MOST_BLOCKS = 64 };
static struct block blocks[MOST_BLOCKS], outputs[MOST_BLOCKS];
static int n_blocks, n_outputs;

static void *room(size_t n, size_t size) {
    void *data = malloc(n * size + 1);
    if (!data || n_blocks == MOST_BLOCKS)
        abort();
    blocks[n_blocks++] = (struct block){data, n, size};
    return data;
}

static void forget(void) {
    while (n_blocks > 0)
        free(blocks[--n_blocks].data);
    n_outputs = 0;
}

/* A word by its value, not by its bytes. */
static uint64_t word_at(const struct block *block, size_t i) {
    const char *at = (const char *)block->data + i * block->size;
    uint16_t two;
    uint32_t four;
    uint64_t eight;
    switch (block->size) {
    case 1:
        return *(const uint8_t *)at;
    case 2:
        return memcpy(&two, at, sizeof two), two;
    case 4:
        return memcpy(&four, at, sizeof four), four;
    default:
        return memcpy(&eight, at, sizeof eight), eight;
    }
}

/* Includes the gaps between rows: nothing may be written there. */
static uint64_t hash_of_outputs(void) {
    uint64_t hash = 1;
    for (int b = 0; b < n_outputs; b++)
        for (size_t i = 0; i < outputs[b].n; i++) {
            hash = (hash ^ word_at(&outputs[b], i)) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 29;
        }
    return hash;
}

static void clear_outputs(void) {
    for (int b = 0; b < n_outputs; b++)
        memset(outputs[b].data, 0, outputs[b].n * outputs[b].size);
}

/* ---- numbers in each storage ---- */

/* Truncated, not rounded: any half will do. */
static uint16_t half_of(enum cattn_storage storage, float x) {
    uint32_t w;
    memcpy(&w, &x, sizeof w);
    const uint32_t magnitude = w & 0x7fffffffu, sign = w >> 16 & 0x8000u;
    if (storage == CATTN_STORED_BF16)
        return (uint16_t)(w >> 16);
    if (magnitude >= 0x47800000u)
        return (uint16_t)(sign | (magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (magnitude < 0x38800000u)
        return (uint16_t)(sign | (magnitude >> 13 & 0x3ffu));
    return (uint16_t)(sign | (magnitude - 0x38000000u) >> 13);
}

struct type {
    const char *name;
    enum cattn_dtype dtype;
    enum cattn_storage storage;
};
static const struct type TYPES[] = {{"float32", CATTN_F32, CATTN_STORED_PLAIN},
                                    {"float64", CATTN_F64, CATTN_STORED_PLAIN},
                                    {"float16", CATTN_F32, CATTN_STORED_F16},
                                    {"bfloat16", CATTN_F32, CATTN_STORED_BF16}};
/* of keys and values with scales */
static const struct type QUANTIZED[] = {{"int8", CATTN_F32, CATTN_STORED_I8},
                                        {"float8_e4m3fn", CATTN_F32, CATTN_STORED_F8}};
/* of masks, of lengths */
static const struct type BYTES = {"bytes", 0, 0}, INTEGERS = {"integers", 0, 0};

static size_t size_of(const struct type *type) {
    if (type == &BYTES || type == &INTEGERS)
        return type == &BYTES ? 1 : 8;
    return cattn_stored_size(type->dtype, type->storage);
}

static void put(const struct type *type, void *data, size_t i, double x) {
    if (type->storage != CATTN_STORED_PLAIN)
        ((uint16_t *)data)[i] = half_of(type->storage, (float)x);
    else if (type->dtype == CATTN_F32)
        ((float *)data)[i] = (float)x;
    else
        ((double *)data)[i] = x;
}

/* ---- tensors ---- */

struct shape {
    int n_batch_dims;
    int64_t batch[2];
    int64_t heads, rows, cols;
};

/* Memory and strides of a tensor, in one of several layouts. */
static struct block lay(struct cattn_tensor *tensor, const struct type *type, const struct shape *shape, bool plain) {
    const int64_t step = plain || chance(60) ? 1 : 2, gap = plain || chance(60) ? 0 : between(1, 5);
    const bool backwards = !plain && chance(15);
    int64_t stride = shape->cols * step + gap;
    *tensor = (struct cattn_tensor){.col = shape->cols == 1 ? 1 : step, .row = stride};
    stride *= shape->rows;
    tensor->head = shape->heads == 1 ? 0 : stride;
    stride *= shape->heads;
    for (int d = shape->n_batch_dims - 1; d >= 0; d--) {
        tensor->batch[d] = shape->batch[d] == 1 ? 0 : stride;
        stride *= shape->batch[d];
    }
    const struct block block = {room((size_t)stride, size_of(type)), (size_t)stride, size_of(type)};
    tensor->data = block.data;
    if (backwards && stride > 0) { /* the last element comes first in memory */
        const int64_t last = (shape->rows - 1) * tensor->row + (shape->cols - 1) * tensor->col;
        tensor->data = (char *)block.data + last * (int64_t)block.size;
        tensor->row = -tensor->row;
        tensor->col = shape->cols == 1 ? 1 : -tensor->col;
    }
    return block;
}

static void output(struct cattn_tensor *tensor, const struct type *type, struct shape shape, bool plain) {
    outputs[n_outputs++] = lay(tensor, type, &shape, plain);
}

/* Batch entries and heads may share one matrix. */
static struct shape thinned(struct shape shape, bool heads) {
    for (int d = 0; d < shape.n_batch_dims; d++)
        shape.batch[d] = chance(25) ? 1 : shape.batch[d];
    shape.heads = heads && chance(40) ? 1 : shape.heads;
    return shape;
}

static struct block input(struct cattn_tensor *tensor, const struct type *type, struct shape shape) {
    const struct block block = lay(tensor, type, &shape, false);
    for (size_t i = 0; i < block.n; i++)
        put(type, block.data, i, number());
    return block;
}

/* Puts in a few NaNs, infinities, zeros, huge and tiny numbers. */
static void spoil(const struct type *type, const struct block *block) {
    if (cattn_is_quantized(type->storage)) { /* NaN, zeros, the least and the largest */
        for (int n = 0; n < 4 && block->n > 0; n++)
            ((uint8_t *)block->data)[between(0, (int64_t)block->n - 1)] =
                PICK(((const uint8_t[]){0x7f, 0xff, 0, 0x80, 1, 0x81, 0x7e, 0xfe}));
        return;
    }
    const double huge = type->dtype == CATTN_F32 ? 0x1p126 : 0x1p1022,
                 tiny = type->dtype == CATTN_F32 ? 0x1p-140 : 0x1p-1060;
    const double special[] = {(double)NAN, -(double)NAN, (double)INFINITY, -(double)INFINITY, -0.0, huge, -huge, tiny};
    for (int n = 0; n < 4 && block->n > 0; n++) {
        const size_t i = (size_t)between(0, (int64_t)block->n - 1);
        put(type, block->data, i, PICK(special));
    }
}

/* Any byte but the two that are NaN in float8_e4m3fn. */
static struct block quantized_input(struct cattn_tensor *tensor, const struct type *type, struct shape shape) {
    const struct block block = lay(tensor, type, &shape, false);
    for (size_t i = 0; i < block.n; i++) {
        const uint8_t byte = (uint8_t)draw();
        ((uint8_t *)block.data)[i] = (byte & 0x7f) == 0x7f ? byte ^ 1 : byte;
    }
    return block;
}

/* Scales for elements of `shape`: for each token, for each column, for both, or one. */
static void scales(struct cattn_tensor *tensor, struct shape shape) {
    if (chance(60))
        shape.cols = 1;
    if (chance(40))
        shape.rows = 1;
    const struct block block = lay(tensor, &TYPES[CATTN_F32], &shape, false);
    for (size_t i = 0; i < block.n; i++)
        put(&TYPES[CATTN_F32], block.data, i, fabs(number()) / 64);
    tensor->row = shape.rows == 1 ? 0 : tensor->row;
    tensor->col = shape.cols == 1 ? 0 : tensor->col;
}

/* The number that a byte encodes, without its scale. */
static float number_of(enum cattn_storage storage, uint8_t byte) {
    const int magnitude = byte & 0x7f, exponent = magnitude >> 3, mantissa = magnitude & 7;
    if (storage == CATTN_STORED_I8)
        return (float)(byte < 128 ? byte : byte - 256);
    const float x = magnitude == 0x7f ? NAN
                    : exponent == 0   ? ldexpf((float)mantissa, -9)
                                      : ldexpf((float)(8 + mantissa), exponent - 10);
    return byte < 128 ? x : -x;
}

static int64_t place_of(const struct cattn_tensor *tensor, const struct shape *shape, int64_t i) {
    int64_t place = i % shape->cols * tensor->col;
    i /= shape->cols;
    place += i % shape->rows * tensor->row;
    i /= shape->rows;
    place += i % shape->heads * tensor->head;
    i /= shape->heads;
    for (int d = shape->n_batch_dims - 1; d >= 0; d--) {
        place += i % shape->batch[d] * tensor->batch[d];
        i /= shape->batch[d];
    }
    return place;
}

/* The float32 numbers that quantized elements of `shape` encode. */
static struct cattn_tensor dequantized(const struct cattn_tensor *tensor, enum cattn_storage storage,
                                       const struct cattn_tensor *scale, struct shape shape) {
    struct cattn_tensor wide;
    const struct block block = lay(&wide, &TYPES[CATTN_F32], &shape, true);
    for (size_t i = 0; i < block.n; i++) {
        const uint8_t byte = ((const uint8_t *)tensor->data)[place_of(tensor, &shape, (int64_t)i)];
        const float factor = ((const float *)scale->data)[place_of(scale, &shape, (int64_t)i)];
        ((float *)block.data)[i] = number_of(storage, byte) * factor;
    }
    return wide;
}

static void mask(struct cattn_tensor *tensor, struct shape shape) {
    const struct block block = lay(tensor, &BYTES, &shape, false);
    const int percent = PICK(((const int[]){5, 50, 95}));
    for (size_t i = 0; i < block.n; i++)
        ((uint8_t *)block.data)[i] = chance(percent);
}

static void integers(struct cattn_tensor *tensor, struct shape shape, int64_t least, int64_t most) {
    const struct block block = lay(tensor, &INTEGERS, &shape, true);
    for (size_t i = 0; i < block.n; i++)
        ((int64_t *)block.data)[i] = between(least, most);
}

#endif
