/* types.h -- types and constants that the callers, core/ and kernels/ share, and the arithmetic of sizes. */
#ifndef CATTN_TYPES_H
#define CATTN_TYPES_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if FLT_EVAL_METHOD != 0
#error "float must be computed in float, by the bit contract: on s390x -std=gnu11"
#endif

/* Sizes of memory that is still to be allocated, and their factors: 64 bits also where size_t has 32, so that no
 * product wraps for arrays of up to 2^48 elements. What exists is counted in size_t. */
typedef uint64_t cattn_size;

/* The type that a call computes in. */
enum cattn_dtype { CATTN_F32 = 0, CATTN_F64 = 1 };

/* How large arrays are stored: in the type of the computation, or as halves, which are computed in float32. Only keys
 * and values are ever quantized: bytes (int8, float8_e4m3fn) with float32 scales, which are computed in float32. */
enum cattn_storage { CATTN_STORED_PLAIN = 0, CATTN_STORED_F16, CATTN_STORED_BF16, CATTN_STORED_I8, CATTN_STORED_F8 };

/* What the factors of a call in float32 are rounded to before they are multiplied, and the arithmetic of the sums: by
 * pairs, as VDPBF16PS has it, or by tiles, as TDPBF16PS has it (docs/bit_contract.md). */
enum cattn_bf16_products { CATTN_BF16_NOT = 0, CATTN_BF16_PAIRS, CATTN_BF16_TILES };

static inline size_t cattn_element_size(enum cattn_dtype dtype) {
    return dtype == CATTN_F32 ? sizeof(float) : sizeof(double);
}
static inline bool cattn_is_quantized(enum cattn_storage storage) { return storage >= CATTN_STORED_I8; }
static inline size_t cattn_stored_size(enum cattn_dtype dtype, enum cattn_storage storage) {
    return storage == CATTN_STORED_PLAIN ? cattn_element_size(dtype)
           : cattn_is_quantized(storage) ? sizeof(uint8_t)
                                         : sizeof(uint16_t);
}

static inline int64_t cattn_min(int64_t a, int64_t b) { return a < b ? a : b; }
/* For a >= 0 and b > 0. a + b - 1 could overflow. */
static inline int64_t cattn_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t cattn_round_up(int64_t n, int64_t multiple) { return cattn_ceil_div(n, multiple) * multiple; }

/* The functions of single elements. */
enum cattn_activation {
    CATTN_GELU = 0,  /* x times the normal distribution function of x */
    CATTN_GELU_TANH, /* its approximation by a tanh */
    CATTN_SILU       /* x times the logistic function of x */
};

/* The statistics of a row of attention weights. */
enum cattn_row_statistic {
    CATTN_ROW_LSE,
    CATTN_ROW_MAX_SCORE,   /* the largest visible score, -inf without one */
    CATTN_ROW_ENTROPY,     /* in nats */
    CATTN_ROW_MAX_WEIGHT,  /* the largest weight */
    CATTN_ROW_SINK_WEIGHT, /* the share of the sink, 0 without one */
    CATTN_ROW_DISTANCE,    /* the mean distance between the query's position and a key, by weight */
    CATTN_N_ROW_STATISTICS
};

/* Numbers that act on every score of attention. The core hands them from the params of a call to the
 * kernels as one struct, so that a new one changes neither. */
struct cattn_score_options {
    double scale;   /* factor of query . key */
    double softcap; /* > 0: softcap * tanh(score / softcap), before anything is added to the score; 0: none */
};

#endif
