/* arrays.h -- choices from SplitMix64 or from bytes, and strided arrays of every element type. */
#ifndef CATTN_ARRAYS_H
#define CATTN_ARRAYS_H

#include "cattn.h"

/* ---- choices ---- */

struct source {
    bool has_bytes; /* choices come from `bytes`, and continue with zeros at their end; else from `state` */
    const uint8_t *bytes;
    size_t left;
    uint64_t state, noise;                        /* noise: numbers of arrays, which cost no bytes */
    double budget;                                /* limit of the multiply-adds of a call */
    void *(*allocate)(size_t bytes, bool at_end); /* memory until the problem ends, aligned for any element at its
                                                     beginning, or at its end */
};

uint64_t split_mix(uint64_t *state);
/* Returns 0 .. n-1; n = 0 stands for 2^64. */
uint64_t choose(struct source *s, uint64_t n);
int64_t between(struct source *s, int64_t least, int64_t most);
/* Returns true for one value in n. */
bool one_in(struct source *s, uint64_t n);
#define CHOOSE_FROM(s, table) ((table)[choose(s, sizeof(table) / sizeof *(table))])

/* ---- arrays ---- */

/* INT8 and F8 are quantized: of bytes that have scales. */
enum element { F32, F64, F16, BF16, BYTE, INT64, INT8, F8 };
/* Kinds of numbers: ordinary, many equal ones, a few infinities and NaN, many of them. */
enum content { PLAIN, TIES, SPOILT, EXTREME };
/* An input has any strides and may broadcast, an output has any strides. A result is contiguous, and 0 before a call.
 */
enum role { INPUT, OUTPUT, RESULT };

enum { MAX_AXES = 8, MOST_BYTES = 1 << 23, CANARY = 0xa5 };

/* A strided array. Axes that broadcast have stride 0. */
struct array {
    enum element element;
    enum role role;
    int n_axes;
    int64_t dim[MAX_AXES], stride[MAX_AXES];
    int64_t low, span; /* elements in memory before element 0; from the lowest to the highest address */
    uint8_t *memory;   /* of `span` elements */
    uint64_t sum;      /* checksum of an input's memory */
};

size_t element_size(enum element element);
enum element computed_element(enum cattn_dtype dtype);
enum element stored_element(enum cattn_dtype dtype, enum cattn_storage storage);
enum cattn_storage quantized_storage(enum element element);

/* Bit a of `broadcast` is axis a: stride 0 in an input, size 1 in a result. */
struct array make_array(struct source *s, enum role role, enum element element, int n_axes, const int64_t *dims,
                        unsigned broadcast);
void fill_numbers(struct source *s, struct array *array, enum content content);
/* Positive numbers that may be scales. */
void fill_scales(struct source *s, struct array *array, enum content content);
void fill_integers(struct source *s, struct array *array, int64_t least, int64_t most);
/* Sets one element in n to this number. */
void set_some(struct source *s, struct array *array, uint64_t n, double number);
/* Returns a contiguous F32 input of the values of quantized elements. */
struct array dequantized(struct source *s, const struct array *array, const struct array *scale);
/* Moves an array elsewhere, contiguous or with the same strides. An output loses its contents. */
void move_array(struct source *s, struct array *array, bool contiguous);
/* Fills an output with a pattern, a result with zeros. */
void clear_array(struct array *array);
uint64_t sum_of(const struct array *array);

/* Visits the elements in C order: for (struct cursor c = walk(a); c.more; step(&c)) */
struct cursor {
    const struct array *array;
    int64_t index[MAX_AXES], offset;
    bool more;
};
struct cursor walk(const struct array *array);
void step(struct cursor *cursor);
int64_t offset_of(const struct array *array, const int64_t *index);
double number_at(const struct array *array, int64_t offset);
/* Rounds halves toward zero, subnormals of float16 to 0. Quantized elements become NaN, or the least number. */
void set_number(struct array *array, int64_t offset, double number);
/* memcpy of constant sizes, which the compiler inlines. */
uint64_t word_at(const struct array *array, int64_t offset);
static inline bool is_quantized(const struct array *array) { return array->element >= INT8; }

#endif
