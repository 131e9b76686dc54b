/* memory.h -- arrays between unreadable pages, and how they are compared. */
#ifndef CATTN_FUZZ_MEMORY_H
#define CATTN_FUZZ_MEMORY_H

#include "cattn.h"
#include "input.h"

/* INT8 and F8 are quantized: of bytes that have scales. */
enum element { F32, F64, F16, BF16, BYTE, INT64, INT8, F8 };

/* Kinds of numbers in an array: ordinary, many equal ones, with infinities and NaN. */
enum content { PLAIN, TIES, EXTREME, N_CONTENTS };

enum { MAX_AXES = 8, SLOT_BYTES = 1 << 23 };

/* A strided array. Axes that broadcast have stride 0. */
struct array {
    enum element element;
    int n_axes;
    int64_t dim[MAX_AXES], stride[MAX_AXES];
    int64_t low, span; /* elements in memory before element 0; from the lowest to the highest address */
    uint8_t *memory;   /* span elements; memory on both sides is unreadable */
    bool is_input;
    uint64_t sum; /* checksum of an input's memory */
};

size_t element_size(enum element element);
enum element stored_element(enum cattn_dtype dtype, enum cattn_storage storage);
enum element computed_element(enum cattn_dtype dtype);

/* Frees the arrays of the last execution. */
void arrays_begin(void);

/* Choose strides and memory. Inputs are filled and may broadcast (bit a of `broadcast`: axis a). Outputs hold a
 * pattern. */
struct array make_input(struct input *in, enum element element, int n_axes, const int64_t *dims, unsigned broadcast,
                        struct noise *noise, enum content content);
/* The same for INT8 and F8: any bytes, but NaN in EXTREME only. */
struct array make_quantized(struct input *in, enum element element, int n_axes, const int64_t *dims, unsigned broadcast,
                            struct noise *noise, enum content content);
/* Numbers that may be scales, of F32. */
struct array make_scales(struct input *in, int n_axes, const int64_t *dims, unsigned broadcast, struct noise *noise,
                         enum content content);
/* Returns a contiguous F32 array of the values of quantized elements. */
struct array dequantized(const struct array *array, const struct array *scale);
struct array make_output(struct input *in, enum element element, int n_axes, const int64_t *dims);
/* Returns a contiguous array of zeros. Axes in `broadcast` have size 1 and stride 0. */
struct array make_zeros(enum element element, int n_axes, const int64_t *dims, unsigned broadcast);

/* Moves the contents elsewhere in memory, contiguous or with the same strides. An output loses its contents. */
void move_array(struct array *array, bool contiguous);

/* Visits the elements in C order: for (struct cursor c = walk(a); c.more; step(&c)) */
struct cursor {
    const struct array *array;
    int64_t index[MAX_AXES], offset;
    bool more;
};
struct cursor walk(const struct array *array);
void step_row(struct cursor *cursor);
int64_t offset_of(const struct array *array, const int64_t *index);

static inline void step(struct cursor *cursor) {
    const int last = cursor->array->n_axes - 1;
    if (last >= 0 && ++cursor->index[last] < cursor->array->dim[last])
        cursor->offset += cursor->array->stride[last];
    else
        step_row(cursor);
}

double number_at(const struct array *array, int64_t offset);
/* Rounds halves toward zero; subnormals of float16 become 0. Quantized elements become NaN, or the least number. */
void set_number(struct array *array, int64_t offset, double number);
/* Takes the checksum of an input again, after a write on purpose. */
void renew_sum(struct array *array);
/* Overwrites every element whose byte in `seen` is 0 with this number. seen has `span` bytes. */
void poison(struct array *array, const uint8_t *seen, double number);

/* ---- findings ---- */

/* Prints the sentence and aborts. */
void finding(const char *what);
/* An input, and the memory between the elements of an output, must not have changed. */
void check_untouched(const struct array *array, const char *name);
/* Returns a contiguous copy of the elements; the caller frees it. */
void *gathered(const struct array *array);
void check_same(const struct array *array, const void *expected, const char *name);

#endif
