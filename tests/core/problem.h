/* problem.h -- problems of every function of the core, for bits.c and for the fuzzer: choices, arrays, calls.
 *
 * A problem follows from a `struct source`: SplitMix64 of an index, the same on every machine, or the bytes of a
 * fuzzer. Its arrays have any strides. `compute` makes the call in one way (path, threads, memory); all ways give the
 * same bits.
 */
#ifndef CATTN_PROBLEM_H
#define CATTN_PROBLEM_H

#include "arrays.h"
#include "call/operands.h"
#include "torch_random.h"

/* An array and its tensor in the params. Letters are axes as in call/operands.h, but the batch dimensions; P of the
 * largest weights, 1 of size 1, R a row and C a column of any other function. */
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
    STATISTICS,
    RECEIVED = STATISTICS + CATTN_N_ROW_STATISTICS,
    RECEIVED_MAX,
    TOP_KEYS,
    TOP_WEIGHTS,
    N_PARTS
};

enum pass { FORWARD, BACKWARD, JVP, JVP_BACKWARD, SUMMARY };
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
    } of;
};

/* The kinds of problems; `choose` begins with a problem of zeros. */
struct kind {
    const char *name;
    void (*choose)(struct source *s, struct problem *problem);
};
enum { N_KINDS = 16 };
extern const struct kind kinds[N_KINDS];

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
void choose_backward(struct source *s, struct problem *problem);
void choose_jvp(struct source *s, struct problem *problem);
void choose_jvp_backward(struct source *s, struct problem *problem);
void choose_statistics(struct source *s, struct problem *problem);

#endif
