/* problem.h -- problems of every function of the core, for bits.c and for the fuzzer: choices, arrays, calls.
 *
 * A problem follows from a `struct source`: SplitMix64 of an index, the same on every machine, or the bytes of a
 * fuzzer. Its arrays have any strides. `compute` makes the call in one way (path, threads, memory); all ways give the
 * same bits.
 */
#ifndef CATTN_PROBLEM_H
#define CATTN_PROBLEM_H

#include "call/operands.h"
#include "cattn.h"
#include "torch_random.h"

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
enum element { F32, F64, F16, BF16, BYTE, INT64, INT32, INT8, F8 };
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

/* ---- problems ---- */

/* An array and its tensor in the params. Letters are axes as in call/operands.h, but the batch dimensions; P of the
 * largest weights, I of chosen keys, 1 of size 1, R a row and C a column of any other function. */
struct part {
    const char *name;
    const char *letters;
    struct cattn_tensor *tensor;
    struct array array;
    bool present;
    bool shares; /* an output in the memory of an input */
    bool is_own; /* no result, but an array of the generator */
};

/* Parts of attention: first the rows of call/operands.h. */
enum {
    BIAS_1 = N_ATTENTION_OPERANDS,
    QUERY_STARTS,
    KEY_STARTS,
    QUERY_TANGENT,
    KEY_TANGENT,
    VALUE_TANGENT,
    BIAS_TANGENT,
    SINKS_TANGENT,
    GRAD_OUT,
    GRAD_LSE,
    OUT,
    WEIGHTS,
    LSE,
    DROPOUT_MASK,
    PLAIN_OUT,
    PLAIN_OUT_TANGENT,
    OUT_TANGENT,
    LSE_TANGENT,
    GRAD_QUERY,
    GRAD_KEY,
    GRAD_VALUE,
    GRAD_BIAS,
    GRAD_SINKS,
    GRAD_GATE,
    STATISTICS,
    RECEIVED = STATISTICS + CATTN_N_ROW_STATISTICS,
    RECEIVED_MAX,
    TOP_KEYS,
    TOP_WEIGHTS,
    HEAD_WEIGHTS,
    INDICES,
    SCORES,
    N_PARTS
};

enum pass { FORWARD, BACKWARD, JVP, JVP_BACKWARD, SUMMARY, CHOOSING };
enum lists { DENSE, GATHERED, PACKED };

/* How a call is made. */
struct way {
    enum cattn_path path;
    int num_threads;
    int direction;    /* of the caller's rounding */
    bool alone;       /* packed sequences: one call for each */
    bool has_results; /* the tangents' call gets out and lse */
    bool plain_out;   /* the gradients' call gets out in the dtype of the computation */
    bool reimports;   /* a generator's state is taken out and put back */
};

struct problem {
    const struct kind *kind;
    char said[700];
    struct part parts[N_PARTS];
    int n_parts;
    enum cattn_status (*run)(struct source *s, struct problem *problem, const struct way *way);
    enum { NOTHING, NUMBERS_OF_ATTENTION, WEIGHTS_OF_SOFTMAX, DROPPED, VISIBLE, RANDOM } checks; /* of the results */
    bool is_tame, has_paths;
    bool is_renormalized;                   /* a softmax whose sums the bit contract leaves out */
    bool stage;                             /* attention without values */
    struct cattn_torch_random torch, fresh; /* of a call, before a call */
    int scale_of[2][2];                     /* parts: quantized elements, and their scales */
    int shareable[2];                       /* inputs whose memory the output (`result`) may take, or -1 */
    int result;
    /* attention */
    enum pass pass;
    enum lists lists;
    int64_t total_q, total_k; /* packed: rows of all sequences */
    struct cattn_backward_params back;
    struct cattn_statistics_params statistics;
    struct cattn_choice_params choice;
    struct cattn_misfit misfit;
    /* all others */
    struct cattn_tensor tensors[6];
    struct cattn_torch_fill stream;
    union {
        struct cattn_softmax_params softmax;
        struct cattn_softmax_backward_params softmax_backward;
        struct cattn_dropout_params dropout;
        struct cattn_rope_params rope;
        struct cattn_norm_params norm;
        struct cattn_norm_backward_params norm_backward;
        struct cattn_activation_params activation;
        struct cattn_product_params product;
        struct cattn_mask_params mask;
        struct cattn_linear_attention_params linear_attention;
        struct cattn_linear_attention_backward_params linear_backward;
        struct cattn_conv_params conv;
    } of;
    int64_t edges[4]; /* of packed sequences of linear attention */
};

/* The kinds of problems; `choose` begins with a problem of zeros. */
struct kind {
    const char *name;
    void (*choose)(struct source *s, struct problem *problem);
    int function; /* a row of call/functions.h; or -1 */
};
extern const struct kind kinds[];
extern const int n_kinds;

void choose_problem(struct source *s, struct problem *problem, const struct kind *kind);
/* Makes the call, after the outputs were cleared. Leaves the caller's rounding direction as it was, or is wrong. */
enum cattn_status compute(struct source *s, struct problem *problem, const struct way *way);
/* Puts float32 arrays in the place of quantized ones. Returns whether there are any. */
bool dequantize(struct source *s, struct problem *problem);

/* ---- for the files of the generator ---- */

void say(struct problem *problem, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Returns one bit for each axis; most bits are 0. */
unsigned choose_broadcast(struct source *s, int n_axes);
enum content choose_content(struct source *s, struct problem *problem);
struct part *add_part(struct problem *problem, int which, const char *name, const char *letters,
                      struct cattn_tensor *tensor, struct array array);
/* A part of attention, with the sizes of its letters. */
struct part *add_sized(struct source *s, struct problem *problem, int which, const char *name, const char *letters,
                       struct cattn_tensor *tensor, enum role role, enum element element, unsigned broadcast);
/* What a choice of keys has beside the operands of attention, and its call. */
void choose_indices(struct source *s, struct problem *problem, enum content content);
enum cattn_status run_choice(struct problem *problem);
/* `ordered`: the elements have an order, so that PyTorch's generator may draw. */
void choose_dropout(struct source *s, struct problem *problem, struct cattn_dropout_spec *spec, bool ordered);
/* Causality, windows and one offset for all. */
void choose_ranges(struct source *s, struct problem *problem, struct cattn_ranges *ranges, int64_t seqlen_q,
                   int64_t seqlen_k);
/* dtype and storage; returns the element of storage. */
enum element choose_type(struct source *s, struct problem *problem, bool halves, enum cattn_dtype *dtype,
                         enum cattn_storage *storage);
/* A quantized array in the place of a part, and its scales. */
void quantize(struct source *s, struct problem *problem, int which, int scale, const char *name, const char *letters,
              struct cattn_tensor *tensor, enum content content);

void choose_attention(struct source *s, struct problem *problem);
void choose_gathered(struct source *s, struct problem *problem);
void choose_packed(struct source *s, struct problem *problem);
void choose_bf16_products(struct source *s, struct problem *problem);
void choose_linear_attention(struct source *s, struct problem *problem);
void choose_backward(struct source *s, struct problem *problem);
void choose_jvp(struct source *s, struct problem *problem);
void choose_jvp_backward(struct source *s, struct problem *problem);
void choose_statistics(struct source *s, struct problem *problem);
void choose_keys(struct source *s, struct problem *problem);

/* The call of attention. */
enum cattn_status run_attention(struct source *s, struct problem *problem, const struct way *way);
/* Computes one vector from lines of standard input, and prints its results; false at their end. See vectors.c. */
bool compute_vector(struct source *s, bool *is_wrong);

#endif
