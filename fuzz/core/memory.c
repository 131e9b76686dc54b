/* memory.c -- arrays of the fuzz targets, each between two unreadable pages.
 *
 * A slot is a fixed piece of address space with an unreadable page at either end. An array lies at the start or at the
 * end of its slot, so that a read of one byte too far is a fault. That covers masked vector loads, which
 * AddressSanitizer does not always check. The rest of the slot is poisoned for AddressSanitizer. The next execution
 * uses the slots again, without a system call.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sanitizer/asan_interface.h>

#include "memory.h"

enum { N_SLOTS = 96, CANARY = 0xa5 };

struct slot {
    uint8_t *begin; /* SLOT_BYTES, or NULL */
    uint8_t *used;
    size_t bytes;
};

static struct slot slots[N_SLOTS];
static int n_used;

static void map_slot(struct slot *slot) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *memory = mmap(NULL, SLOT_BYTES + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + page, SLOT_BYTES, PROT_READ | PROT_WRITE)) {
        perror("mmap");
        exit(1);
    }
    slot->begin = memory + page;
    __asan_poison_memory_region(slot->begin, SLOT_BYTES);
}

static uint8_t *take_memory(size_t bytes, bool at_end) {
    if (n_used == N_SLOTS || bytes > SLOT_BYTES) {
        fprintf(stderr, "%d arrays, %zu bytes: too many\n", n_used, bytes);
        exit(1);
    }
    struct slot *slot = &slots[n_used++];
    if (!slot->begin)
        map_slot(slot);
    slot->used = slot->begin + (at_end ? SLOT_BYTES - bytes : 0);
    slot->bytes = bytes;
    __asan_unpoison_memory_region(slot->used, bytes);
    return slot->used;
}

void arrays_begin(void) {
    for (int i = 0; i < n_used; i++)
        __asan_poison_memory_region(slots[i].used, slots[i].bytes);
    n_used = 0;
}

/* ---- elements ---- */

size_t element_size(enum element element) {
    static const size_t sizes[] = {4, 8, 2, 2, 1, 8, 1, 1};
    return sizes[element];
}

enum element computed_element(enum cattn_dtype dtype) { return dtype == CATTN_F32 ? F32 : F64; }

enum element stored_element(enum cattn_dtype dtype, enum cattn_storage storage) {
    return storage == CATTN_STORED_F16 ? F16 : storage == CATTN_STORED_BF16 ? BF16 : computed_element(dtype);
}

/* Returns a float. set_number() rounds it toward zero for float16 and bfloat16. */
static double noise_number(struct noise *noise, enum content content) {
    static const double extreme[] = {0.0, -0.0, 1e-40, 6e4, -6e4, 1e30, -1e30, 3e38, (double)INFINITY, (double)NAN};
    const uint64_t word = noise_word(noise);
    if (content == TIES)
        return (double)(int64_t)(word % 5) - 2;
    if (content == EXTREME && word % 8 == 0)
        return extreme[word / 8 % (sizeof extreme / sizeof *extreme)];
    return (double)(int64_t)word * 0x1p-62; /* -2 .. 2 */
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
        return 0x7e00;
    if (exponent >= 31)
        return (uint16_t)(sign | 0x7c00);
    return (uint16_t)(exponent <= 0 ? sign : sign | (uint32_t)exponent << 10 | (as.bits >> 13 & 0x3ff));
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
    case 8:
        memcpy(to, from, 8);
    }
}

static inline bool same_element(const void *a, const void *b, size_t size) {
    uint64_t left = 0, right = 0;
    copy_element(&left, a, size);
    copy_element(&right, b, size);
    return left == right;
}

static inline uint8_t *element_at(const struct array *array, int64_t offset, size_t size) {
    return array->memory + (array->low + offset) * (int64_t)size;
}

void set_number(struct array *array, int64_t offset, double number) {
    const size_t size = element_size(array->element);
    uint8_t *at = element_at(array, offset, size);
    const float single = (float)number;
    uint16_t half;
    int64_t integer;
    switch (array->element) {
    case F32:
        copy_element(at, &single, size);
        return;
    case F64:
        copy_element(at, &number, size);
        return;
    case F16:
    case BF16:
        half = to_half(single, array->element == BF16);
        copy_element(at, &half, size);
        return;
    case BYTE:
        *at = number != 0;
        return;
    case INT64:
        integer = (int64_t)number;
        copy_element(at, &integer, size);
        return;
    case INT8:
        *at = 0x80;
        return;
    case F8:
        *at = 0x7f;
    }
}

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
    const size_t size = element_size(array->element);
    const uint8_t *at = element_at(array, offset, size);
    union {
        float single;
        double number;
        uint32_t bits;
        int64_t integer;
        uint16_t half;
    } as = {0};
    copy_element(&as, at, size);
    switch (array->element) {
    case F32:
        return (double)as.single;
    case F64:
        return as.number;
    case F16: /* subnormals do not occur; inf and NaN stay inf and NaN */
        as.bits = (as.half & 0x8000u) << 16 | ((as.half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0) |
                  ((as.half & 0x7fffu) ? (as.half & 0x7fffu) << 13 : 0);
        return (as.bits & 0x7f800000u) == 0x7f800000u ? (double)as.single : (double)as.single * 0x1p112;
    case BF16:
        as.bits = (uint32_t)as.half << 16;
        return (double)as.single;
    case BYTE:
        return *at;
    case INT64:
        return (double)as.integer;
    case INT8:
    case F8:
        return (double)quantized_number(array->element, *at);
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

static struct array lay_out(struct input *in, enum element element, int n_axes, const int64_t *dims,
                            unsigned broadcast) {
    struct array array = {.element = element, .n_axes = n_axes};
    memcpy(array.dim, dims, (size_t)n_axes * sizeof *dims);
    const uint8_t kind = take_byte(in), reversed = take_byte(in);
    int order[MAX_AXES];
    for (int i = 0; i < n_axes; i++)
        order[i] = n_axes - 1 - i;
    for (int i = 0; kind & 3 && i + 1 < n_axes; i++) /* swaps two neighbours, or all in turn */
        if ((kind & 3) == 3 || i + 1 == (kind & 3)) {
            const int other = order[i];
            order[i] = order[i + 1];
            order[i + 1] = other;
        }
    lay(&array, order, broadcast, reversed & (reversed >> 4), 1 + (kind >> 2 & 1));
    if ((size_t)array.span * element_size(element) > SLOT_BYTES)
        lay_contiguous(&array, broadcast);
    array.memory = take_memory((size_t)array.span * element_size(element), kind >> 7);
    return array;
}

static uint64_t sum_of(const struct array *array) {
    const uint8_t *at = array->memory;
    const size_t n = (size_t)array->span * element_size(array->element);
    uint64_t sum = n, word;
    size_t i = 0;
    for (; i + sizeof word <= n; i += sizeof word) {
        copy_element(&word, at + i, sizeof word);
        sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 29;
    }
    for (; i < n; i++)
        sum = (sum ^ at[i]) * 0x9e3779b97f4a7c15u;
    return sum;
}

void renew_sum(struct array *array) { array->sum = sum_of(array); }

struct array make_input(struct input *in, enum element element, int n_axes, const int64_t *dims, unsigned broadcast,
                        struct noise *noise, enum content content) {
    struct array array = lay_out(in, element, n_axes, dims, broadcast);
    array.is_input = true;
    for (int64_t i = 0; i < array.span; i++)
        set_number(&array, i - array.low, noise_number(noise, content));
    renew_sum(&array);
    return array;
}

struct array make_quantized(struct input *in, enum element element, int n_axes, const int64_t *dims, unsigned broadcast,
                            struct noise *noise, enum content content) {
    struct array array = lay_out(in, element, n_axes, dims, broadcast);
    array.is_input = true;
    for (int64_t i = 0; i < array.span; i++) {
        const uint8_t byte = (uint8_t)(noise_word(noise) & (content == TIES ? 0x91 : 0xff));
        const bool is_nan = element == F8 && (byte & 0x7f) == 0x7f;
        array.memory[i] = is_nan && content != EXTREME ? byte ^ 1 : byte;
    }
    renew_sum(&array);
    return array;
}

struct array make_scales(struct input *in, int n_axes, const int64_t *dims, unsigned broadcast, struct noise *noise,
                         enum content content) {
    static const float extreme[] = {CATTN_LEAST_SCALE, CATTN_LARGEST_SCALE, 1};
    struct array array = lay_out(in, F32, n_axes, dims, broadcast);
    array.is_input = true;
    for (int64_t i = 0; i < array.span; i++) {
        const uint64_t word = noise_word(noise);
        double scale = content == TIES ? 0x1p-7 : (double)(1 + word % 0xffff) * 0x1p-22; /* at most 2^-6 */
        if (content == EXTREME && word >> 32 & 1)
            scale = (double)extreme[(word >> 33) % 3];
        set_number(&array, i - array.low, scale);
    }
    renew_sum(&array);
    return array;
}

struct array dequantized(const struct array *array, const struct array *scale) {
    struct array wide = make_zeros(F32, array->n_axes, array->dim, 0);
    wide.is_input = true;
    for (struct cursor c = walk(&wide); c.more; step(&c)) {
        const float factor = (float)number_at(scale, offset_of(scale, c.index));
        set_number(&wide, c.offset, (double)((float)number_at(array, offset_of(array, c.index)) * factor));
    }
    renew_sum(&wide);
    return wide;
}

struct array make_output(struct input *in, enum element element, int n_axes, const int64_t *dims) {
    struct array array = lay_out(in, element, n_axes, dims, 0);
    memset(array.memory, CANARY, (size_t)array.span * element_size(element));
    return array;
}

struct array make_zeros(enum element element, int n_axes, const int64_t *dims, unsigned broadcast) {
    struct array array = {.element = element, .n_axes = n_axes};
    for (int axis = 0; axis < n_axes; axis++)
        array.dim[axis] = broadcast >> axis & 1 ? 1 : dims[axis];
    lay_contiguous(&array, broadcast);
    const size_t bytes = (size_t)array.span * element_size(element);
    array.memory = take_memory(bytes, true);
    memset(array.memory, 0, bytes);
    return array;
}

void move_array(struct array *array, bool contiguous) {
    const struct array before = *array;
    const bool was_at_end = ((uintptr_t)array->memory + (size_t)array->span * element_size(array->element)) % 4096 == 0;
    if (contiguous)
        lay_contiguous(array, 0);
    const size_t size = element_size(array->element);
    if ((size_t)array->span * size > SLOT_BYTES) { /* a large array that broadcasts keeps its strides */
        *array = before;
        contiguous = false;
    }
    array->memory = take_memory((size_t)array->span * size, !was_at_end);
    memset(array->memory, CANARY, (size_t)array->span * size);
    if (!array->is_input)
        return;
    if (!contiguous)
        memcpy(array->memory, before.memory, (size_t)array->span * size);
    for (struct cursor c = walk(array); contiguous && c.more; step(&c))
        copy_element(element_at(array, c.offset, size), element_at(&before, offset_of(&before, c.index), size), size);
    renew_sum(array);
}

/* ---- walking ---- */

struct cursor walk(const struct array *array) { return (struct cursor){.array = array, .more = array->span > 0}; }

/* Called when the last index has reached the end of its axis: carries to the axes before it. */
void step_row(struct cursor *cursor) {
    const struct array *array = cursor->array;
    for (int axis = array->n_axes - 1; axis >= 0; axis--) {
        cursor->offset -= (array->dim[axis] - 1) * array->stride[axis];
        cursor->index[axis] = 0;
        if (axis > 0 && ++cursor->index[axis - 1] < array->dim[axis - 1]) {
            cursor->offset += array->stride[axis - 1];
            return;
        }
    }
    cursor->more = false;
}

int64_t offset_of(const struct array *array, const int64_t *index) {
    int64_t offset = 0;
    for (int axis = 0; axis < array->n_axes; axis++)
        offset += index[axis] * array->stride[axis];
    return offset;
}

void poison(struct array *array, const uint8_t *seen, double number) {
    for (int64_t i = 0; i < array->span; i++)
        if (!seen[i])
            set_number(array, i - array->low, number);
    renew_sum(array);
}

/* ---- findings ---- */

void finding(const char *what) {
    fprintf(stderr, "FINDING: %s\n", what);
    abort();
}

void check_untouched(const struct array *array, const char *name) {
    if (array->is_input) {
        if (sum_of(array) != array->sum)
            finding(name);
        return;
    }
    int64_t n = array->span > 0 ? 1 : 0;
    for (int axis = 0; axis < array->n_axes; axis++)
        n *= array->dim[axis];
    if (n == array->span)
        return;
    const size_t size = element_size(array->element);
    uint8_t *own = calloc(1, (size_t)array->span);
    for (struct cursor c = walk(array); c.more; step(&c))
        own[array->low + c.offset] = 1;
    for (int64_t i = 0; i < array->span; i++)
        for (size_t b = 0; !own[i] && b < size; b++)
            if (array->memory[(size_t)i * size + b] != CANARY)
                finding(name);
    free(own);
}

void *gathered(const struct array *array) {
    const size_t size = element_size(array->element);
    size_t n = size;
    for (int axis = 0; axis < array->n_axes; axis++)
        n *= (size_t)array->dim[axis];
    uint8_t *memory = malloc(n + 1), *to = memory;
    for (struct cursor c = walk(array); c.more; step(&c), to += size)
        copy_element(to, element_at(array, c.offset, size), size);
    return memory;
}

void check_same(const struct array *array, const void *expected, const char *name) {
    const size_t size = element_size(array->element);
    const uint8_t *right = expected;
    for (struct cursor c = walk(array); c.more; step(&c), right += size)
        if (!same_element(right, element_at(array, c.offset, size), size)) {
            fprintf(stderr, "at");
            for (int axis = 0; axis < array->n_axes; axis++)
                fprintf(stderr, " %lld", (long long)c.index[axis]);
            fprintf(stderr, ": %.17g\n", number_at(array, c.offset));
            finding(name);
        }
}
