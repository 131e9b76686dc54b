/* arrays.c -- choices from SplitMix64 or from bytes, and strided arrays of every element type. */
#include <math.h>
#include <string.h>

#include "problem.h"

/* ---- choices ---- */

uint64_t split_mix(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint64_t choose(struct source *s, uint64_t n) {
    uint64_t number = 0;
    if (!s->has_bytes) {
        number = split_mix(&s->state);
        return n ? number % n : number;
    }
    for (int i = n == 0 ? 8 : n <= 256 ? 1 : 2; i > 0; i--) {
        number = number << 8 | (s->left ? *s->bytes : 0);
        s->bytes += s->left > 0;
        s->left -= s->left > 0;
    }
    return n ? number % n : number;
}

int64_t between(struct source *s, int64_t least, int64_t most) {
    return least + (int64_t)choose(s, (uint64_t)(most - least + 1));
}

bool one_in(struct source *s, uint64_t n) { return choose(s, n) == n - 1; }

/* ---- elements ---- */

size_t element_size(enum element element) {
    static const size_t sizes[] = {4, 8, 2, 2, 1, 8, 4, 1, 1};
    return sizes[element];
}

enum element computed_element(enum cattn_dtype dtype) { return dtype == CATTN_F32 ? F32 : F64; }

enum element stored_element(enum cattn_dtype dtype, enum cattn_storage storage) {
    return storage == CATTN_STORED_F16 ? F16 : storage == CATTN_STORED_BF16 ? BF16 : computed_element(dtype);
}

enum cattn_storage quantized_storage(enum element element) {
    return element == INT8 ? CATTN_STORED_I8 : element == F8 ? CATTN_STORED_F8 : CATTN_STORED_PLAIN;
}

/* memcpy of constant sizes, which the compiler inlines: calls of the sanitizer's memcpy would take most of the time. */
static inline void copy_element(void *to, const void *from, size_t size) {
    switch (size) {
    case 1:
        memcpy(to, from, 1);
        return;
    case 2:
        memcpy(to, from, 2);
        return;
    case 4:
        memcpy(to, from, 4);
        return;
    default:
        memcpy(to, from, 8);
    }
}

static inline uint8_t *element_at(const struct array *array, int64_t offset, size_t size) {
    return array->memory + (array->low + offset) * (int64_t)size;
}

/* By its value, not by its bytes. */
uint64_t word_at(const struct array *array, int64_t offset) {
    const size_t size = element_size(array->element);
    const uint8_t *at = element_at(array, offset, size);
    uint16_t two;
    uint32_t four;
    uint64_t eight;
    switch (size) {
    case 1:
        return *at;
    case 2:
        memcpy(&two, at, sizeof two);
        return two;
    case 4:
        memcpy(&four, at, sizeof four);
        return four;
    default:
        memcpy(&eight, at, sizeof eight);
        return eight;
    }
}

static uint16_t to_half(float number, bool is_bfloat) {
    union {
        float number;
        uint32_t bits;
    } as = {.number = number};
    if (is_bfloat)
        return (uint16_t)(as.bits >> 16 | (number != number ? 0x40 : 0));
    const uint32_t sign = as.bits >> 16 & 0x8000;
    const int exponent = (int)(as.bits >> 23 & 0xff) - 127 + 15;
    if (number != number)
        return (uint16_t)(sign | 0x7e00);
    if (exponent >= 31)
        return (uint16_t)(sign | 0x7c00);
    return (uint16_t)(exponent <= 0 ? sign : sign | (uint32_t)exponent << 10 | (as.bits >> 13 & 0x3ff));
}

void set_number(struct array *array, int64_t offset, double number) {
    const size_t size = element_size(array->element);
    uint8_t *at = element_at(array, offset, size);
    const float single = (float)number;
    uint16_t half;
    int64_t integer;
    switch (array->element) {
    case F32:
        memcpy(at, &single, sizeof single);
        return;
    case F64:
        memcpy(at, &number, sizeof number);
        return;
    case F16:
    case BF16:
        half = to_half(single, array->element == BF16);
        memcpy(at, &half, sizeof half);
        return;
    case BYTE:
        *at = number != 0;
        return;
    case INT64:
        integer = (int64_t)number;
        memcpy(at, &integer, sizeof integer);
        return;
    case INT32: /* a result alone */
        return;
    case INT8:
        *at = 0x80;
        return;
    case F8:
        *at = 0x7f;
    }
}

/* Without its scale. */
static float quantized_number(enum element element, uint8_t byte) {
    const int magnitude = byte & 0x7f, exponent = magnitude >> 3, mantissa = magnitude & 7;
    if (element == INT8)
        return (float)(byte < 128 ? byte : byte - 256);
    const float number = magnitude == 0x7f ? NAN
                         : exponent == 0   ? ldexpf((float)mantissa, -9)
                                           : ldexpf((float)(8 + mantissa), exponent - 10);
    return byte < 128 ? number : -number;
}

double number_at(const struct array *array, int64_t offset) {
    union {
        uint32_t bits;
        float single;
    } as;
    union {
        uint64_t bits;
        double number;
    } wide;
    const uint64_t word = word_at(array, offset);
    switch (array->element) {
    case F32:
        as.bits = (uint32_t)word;
        return (double)as.single;
    case F64:
        wide.bits = word;
        return wide.number;
    case F16: /* inf and NaN stay inf and NaN */
        as.bits = (uint32_t)(word & 0x8000) << 16 | ((word & 0x7c00) == 0x7c00 ? 0x7f800000u : 0) |
                  (uint32_t)(word & 0x7fff) << 13;
        return (as.bits & 0x7f800000u) == 0x7f800000u ? (double)as.single : (double)as.single * 0x1p112;
    case BF16:
        as.bits = (uint32_t)word << 16;
        return (double)as.single;
    case BYTE:
        return (double)word;
    case INT64:
        return (double)(int64_t)word;
    case INT32:
        return (double)(int32_t)(uint32_t)word;
    case INT8:
    case F8:
        return (double)quantized_number(array->element, (uint8_t)word);
    }
    return 0;
}

/* ---- layout ---- */

static void measure(struct array *array) {
    int64_t high = 0;
    bool empty = false;
    array->low = 0;
    for (int axis = 0; axis < array->n_axes; axis++) {
        const int64_t reach = (array->dim[axis] - 1) * array->stride[axis];
        empty |= array->dim[axis] == 0;
        *(reach < 0 ? &array->low : &high) += reach < 0 ? -reach : reach;
    }
    array->span = empty ? 0 : array->low + high + 1;
    array->low = empty ? 0 : array->low;
}

/* Sets the strides; `order` lists the axes in memory, the innermost first. */
static void lay(struct array *array, const int *order, unsigned broadcast, unsigned reversed, int64_t gap) {
    int64_t stride = 1;
    for (int i = 0; i < array->n_axes; i++) {
        const int axis = order[i];
        const bool is_flat = broadcast >> axis & 1;
        stride *= i < 2 ? gap : 1;
        array->stride[axis] = is_flat ? 0 : reversed >> axis & 1 ? -stride : stride;
        stride *= is_flat || array->dim[axis] < 1 ? 1 : array->dim[axis];
    }
    measure(array);
}

static void lay_contiguous(struct array *array, unsigned broadcast) {
    int order[MAX_AXES];
    for (int i = 0; i < array->n_axes; i++)
        order[i] = array->n_axes - 1 - i;
    lay(array, order, broadcast, 0, 1);
}

static size_t bytes_of(const struct array *array) { return (size_t)array->span * element_size(array->element); }

void clear_array(struct array *array) {
    if (array->role != INPUT)
        memset(array->memory, array->role == OUTPUT ? CANARY : 0, bytes_of(array));
}

struct array make_array(struct source *s, enum role role, enum element element, int n_axes, const int64_t *dims,
                        unsigned broadcast) {
    struct array array = {.element = element, .role = role, .n_axes = n_axes};
    uint64_t kind = 128, reversed = 0;
    int order[MAX_AXES];
    for (int axis = 0; axis < n_axes; axis++) {
        array.dim[axis] = role == RESULT && broadcast >> axis & 1 ? 1 : dims[axis];
        order[axis] = n_axes - 1 - axis;
    }
    if (role != RESULT) {
        kind = choose(s, 256);
        reversed = choose(s, 256);
    }
    for (int i = 0; kind & 3 && i + 1 < n_axes; i++) /* swaps two neighbours, or all in turn */
        if ((kind & 3) == 3 || i + 1 == (int)(kind & 3)) {
            const int other = order[i];
            order[i] = order[i + 1];
            order[i + 1] = other;
        }
    lay(&array, order, broadcast, (unsigned)(reversed & reversed >> 4), 1 + (int64_t)(kind >> 2 & 1));
    if (bytes_of(&array) > MOST_BYTES)
        lay_contiguous(&array, broadcast);
    array.memory = s->allocate(bytes_of(&array), kind >> 7);
    clear_array(&array);
    return array;
}

void move_array(struct source *s, struct array *array, bool contiguous) {
    const struct array before = *array;
    const bool was_at_end = ((uintptr_t)array->memory + bytes_of(array)) % 4096 == 0;
    const size_t size = element_size(array->element);
    contiguous = contiguous && array->role != RESULT; /* which is, but for the axes that it sums over */
    if (contiguous)
        lay_contiguous(array, 0);
    if (bytes_of(array) > MOST_BYTES) { /* a large array that broadcasts keeps its strides */
        *array = before;
        contiguous = false;
    }
    array->memory = s->allocate(bytes_of(array), !was_at_end);
    clear_array(array);
    if (array->role != INPUT)
        return;
    memset(array->memory, CANARY, bytes_of(array));
    if (!contiguous)
        memcpy(array->memory, before.memory, bytes_of(array));
    for (struct cursor c = walk(array); contiguous && c.more; step(&c))
        copy_element(element_at(array, c.offset, size), element_at(&before, offset_of(&before, c.index), size), size);
    array->sum = sum_of(array);
}

/* ---- contents ---- */

uint64_t sum_of(const struct array *array) {
    uint64_t sum = (uint64_t)array->span;
    for (int64_t i = 0; i < array->span; i++) {
        sum = (sum ^ word_at(array, i - array->low)) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 29;
    }
    return sum;
}

static double noise_number(struct source *s, enum content content) {
    static const double extreme[] = {
        0.0, -0.0, 1e-40, 6e4, -6e4, 1e30, -1e30, 3e38, (double)INFINITY, -(double)INFINITY, (double)NAN, -(double)NAN};
    const uint64_t word = split_mix(&s->noise);
    if (content == TIES)
        return (double)(int64_t)(word % 5) - 2;
    if (content >= SPOILT && word % (content == SPOILT ? 256 : 8) == 0)
        return extreme[word / 256 % (sizeof extreme / sizeof *extreme)];
    return (double)(int64_t)word * 0x1p-62; /* -2 .. 2 */
}

/* Quantized arrays hold any bytes, but NaN in EXTREME only. */
void fill_numbers(struct source *s, struct array *array, enum content content) {
    for (int64_t i = 0; i < array->span; i++) {
        if (!is_quantized(array)) {
            set_number(array, i - array->low, noise_number(s, content));
            continue;
        }
        const uint8_t byte = (uint8_t)(split_mix(&s->noise) & (content == TIES ? 0x91 : 0xff));
        array->memory[i] = array->element == F8 && (byte & 0x7f) == 0x7f && content != EXTREME ? byte ^ 1 : byte;
    }
    array->sum = sum_of(array);
}

void fill_scales(struct source *s, struct array *array, enum content content) {
    static const float extreme[] = {CATTN_LEAST_SCALE, CATTN_LARGEST_SCALE, 1};
    for (int64_t i = 0; i < array->span; i++) {
        const uint64_t word = split_mix(&s->noise);
        double scale = content == TIES ? 0x1p-7 : (double)(1 + word % 0xffff) * 0x1p-22; /* at most 2^-6 */
        if (content == EXTREME && word >> 32 & 1)
            scale = (double)extreme[(word >> 33) % 3];
        set_number(array, i - array->low, scale);
    }
    array->sum = sum_of(array);
}

void fill_integers(struct source *s, struct array *array, int64_t least, int64_t most) {
    for (int64_t i = 0; i < array->span; i++) {
        const uint64_t word = split_mix(&s->noise);
        set_number(array, i - array->low, (double)(least + (int64_t)(word % (uint64_t)(most - least + 1))));
    }
    array->sum = sum_of(array);
}

void set_some(struct source *s, struct array *array, uint64_t n, double number) {
    for (int64_t i = 0; i < array->span; i++)
        if (split_mix(&s->noise) % n == 0)
            set_number(array, i - array->low, number);
    array->sum = sum_of(array);
}

struct array dequantized(struct source *s, const struct array *array, const struct array *scale) {
    struct array wide = make_array(s, RESULT, F32, array->n_axes, array->dim, 0);
    wide.role = INPUT;
    for (struct cursor c = walk(&wide); c.more; step(&c)) {
        const float factor = (float)number_at(scale, offset_of(scale, c.index));
        set_number(&wide, c.offset, (double)((float)number_at(array, offset_of(array, c.index)) * factor));
    }
    wide.sum = sum_of(&wide);
    return wide;
}

/* ---- walking ---- */

struct cursor walk(const struct array *array) { return (struct cursor){.array = array, .more = array->span > 0}; }

void step(struct cursor *cursor) {
    const struct array *array = cursor->array;
    for (int axis = array->n_axes - 1; axis >= 0; axis--) {
        if (++cursor->index[axis] < array->dim[axis]) {
            cursor->offset += array->stride[axis];
            return;
        }
        cursor->offset -= (array->dim[axis] - 1) * array->stride[axis];
        cursor->index[axis] = 0;
    }
    cursor->more = false;
}

int64_t offset_of(const struct array *array, const int64_t *index) {
    int64_t offset = 0;
    for (int axis = 0; axis < array->n_axes; axis++)
        offset += index[axis] * array->stride[axis];
    return offset;
}
