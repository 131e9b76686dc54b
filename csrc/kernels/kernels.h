/* kernels.h -- the contract between the drivers of core/ and the kernels: a table per instruction set and dtype.
 *
 * A driver fills a struct cattn_rows: a block of rows, which are queries of one key-value head. It then calls
 *
 *     pack_query_tile | pack_query_rows  once: packs the scaled queries in the layout of its path
 *     chunk_begin                        at the start of each key chunk: an empty running state
 *       pack_block                       tile path: once for several blocks of rows that are at the same key block
 *       tile_block | rows_block          for each key block of the chunk: scores, masks, softmax, P V
 *     chunk_merge                        after each chunk but the first: merges it into the total of those before
 *     finish                             once: writes output, log-sum-exp and weights
 *
 * If `finish` sets `overflowed`, the driver repeats all but the first call with `small_weights`, and without
 * log-sum-exp and weights.
 *
 * Kernels cannot fail and allocate nothing: the binding has checked the arguments, and the driver has all scratch. A
 * pointer to void points at the table's own element type. All strides count elements.
 *
 * The lengths of key blocks, key chunks, half blocks and chains are part of the bit contract (docs/bit_contract.md):
 * never change one for speed. 192 is a multiple of every micro-tile's height and of the 64 keys that share Philox
 * counters.
 */
#ifndef CATTN_KERNELS_H
#define CATTN_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../types.h"

#define CATTN_BLOCK_KEYS 192
#define CATTN_CHUNK_KEYS (8 * CATTN_BLOCK_KEYS)
/* Every sum of products is cut into chains of FMAs of this many terms, by index. Short chains keep the rounding error
 * small. */
#define CATTN_CHAIN_TERMS 16
/* Products of bfloat16 in tiles: terms of a group, which are two chains. */
#define CATTN_GROUP_TERMS (2 * CATTN_CHAIN_TERMS)
/* Rows and lanes of the products that are computed together there: two tiles of 16 each way. */
#define CATTN_UNIT 32
/* P V is computed for this many keys at a time and added to the accumulator: that much of V stays in the L1 cache. */
#define CATTN_HALF_BLOCK (CATTN_BLOCK_KEYS / 2)
/* Rows of one tile: a multiple of every table's 2 * lanes and micro-tile height. */
#define CATTN_TILE_ROWS 96
/* The largest number of rows of a task on the row path. */
#define CATTN_FEW_ROWS 8
/* The sum of a block's weights is this many chains, by key index. */
#define CATTN_SUM_CHAINS 8
/* Products of two matrices: a sum is cut into slabs of this many terms, and a slab into so many chains, by index modulo
 * their number. */
#define CATTN_SLAB_TERMS 512
#define CATTN_PRODUCT_CHAINS 16
/* Rows of A that are computed together, and rows of B that are packed together, usually and where rows of A are packed
 * for them; multiples of every square. */
#define CATTN_PRODUCT_ROWS 192
#define CATTN_PRODUCT_LANES 192
#define CATTN_PRODUCT_MANY_LANES 384
/* Slabs whose chains are kept before they are added, with few rows of B. */
#define CATTN_FEW_SLABS 8
/* With few rows of B: rows of A that lie side by side, times rows of B, whose chains are computed together. Long pieces
 * of memory are read faster, and the chains stay in the L2 cache. */
#define CATTN_FEW_COLUMNS 2048
/* Products in tiles: columns of both operands that are packed together, a multiple of a group, and bytes of packed rows
 * of A, which stay in the L2 cache. */
#define CATTN_UNIT_TERMS 1024
#define CATTN_UNIT_BYTES ((int64_t)5 << 18)
/* The height of the tallest micro-tile. */
#define CATTN_PRODUCT_EDGE 8
#define CATTN_PHILOX_ROUNDS 10
/* Linear attention: tokens that are copied together, and the most columns of a state that are computed together. */
#define CATTN_STATE_TOKENS 16
#define CATTN_STRIP_COLUMNS 64
/* Its gradients: the most rows of a state that are computed together. */
#define CATTN_STRIP_ROWS 32
/* Columns of every row-major scratch array are padded to a multiple of this: two of the widest vectors. */
#define CATTN_PAD 32
/* The largest number of words that torch_normal takes: the words and the results stay in the L1 cache. */
#define CATTN_TORCH_CHUNK 1024

/* The parameters of dropout besides the element's position; see philox.inc.h. */
struct cattn_drop {
    bool enabled;
    uint32_t key[CATTN_PHILOX_ROUNDS][2];
    uint32_t batch_twice;                /* counter word 3 of the first draw: twice the batch index */
    uint32_t threshold_hi, threshold_lo; /* the threshold's 16-bit halves; hi is 0x10000 if nothing is dropped */
};

/* What all tasks of a call share; kernels only read it. */
struct cattn_call_shape {
    int64_t head_dim, d_v;
    int64_t acc_cols; /* d_v rounded up to CATTN_PAD: row stride of the accumulators */
    int64_t seqlen_k; /* length of the weights' last axis */
    struct cattn_score_options score_options;
    double keep_scale; /* 1; under dropout 1/(1-p) */
    bool fully_ranged; /* no element-wise mask: ranges and block mask alone decide which keys are hidden */
    bool has_positions, has_slopes, has_sinks, has_gate, has_mask, has_block_mask, has_out, has_lse, has_weights;
    bool packed_keys;           /* tables of tiles: the rows of key and value are packed already, by pack_keys */
    bool packed_block;          /* the scratch has copies of the key block at hand, by pack_block */
    bool double_lse;            /* lse is double, otherwise the table's own type */
    bool store_scores;          /* `weights` receives the scores, -inf out of range */
    enum cattn_storage storage; /* of query, gate, out and weights_out */
    int n_bias;
    int64_t query_col, mask_col, bias_col[2];
    int64_t block_size, block_mask_col; /* if has_block_mask: keys of a block, and the stride from block to block */
    int64_t gate_col, out_col, weights_col, weights_out_col;
};

/* Arrays with one entry a row, in the task's scratch: a task of few rows needs little memory. Entries announced by a
 * flag are uninitialised without it. */
struct cattn_per_row {
    int64_t *lo, *hi; /* keys lo <= k < hi are in range */
    const void **query;
    const uint8_t **mask, **block_mask;
    const void **bias[2];
    int64_t *position;                   /* if has_positions: the query's position among the keys */
    double *slope, *sink;                /* if has_slopes, has_sinks */
    const void **gate;                   /* if has_gate; unset where out is NULL */
    uint32_t *drop_position, *drop_head; /* if drop.enabled; a multiple of CATTN_PAD entries */
    uint8_t **drop_bits;                 /* if scratch.drop_bits: one bit a key, lowest first, instead of Philox */
    void **out;                          /* NULL: a row past the end of its packed sequence */
    void **lse;                          /* the same */
    void **weights;                      /* of the first valid key, in the table's own type */
    void **weights_out;                  /* halves: `finish` narrows the whole row of `weights` to here */
};

/* Scratch for copies of keys, values and their scales: [key][column]. */
struct cattn_key_copies {
    void *key, *value;
    float *key_scale, *value_scale;
};

/* Scratch arrays of a task, 64-byte aligned. */
struct cattn_row_scratch {
    uint8_t *drop_bits;   /* the bits of all rows, from a serial stream; NULL: use Philox */
    void *packed_query;   /* tile: panels [2 * lanes queries][head_dim]; rows: [row][head_dim] */
    void *score;          /* tile: [key][CATTN_TILE_ROWS], or CATTN_UNIT in tiles; rows: [row][CATTN_BLOCK_KEYS] */
    void *cap_derivative; /* the derivative of softcap, laid out as score; NULL except in second passes */
    void *cap_curvature;  /* the second derivative; NULL except for gradients with tangents */
    void *value_panel; /* tile: a panel [key][2 * lanes]; rows: a half block [key][d_v] of strided values or halves */
    void *key_copy;    /* tile: [micro-tile row][head_dim]; rows: [lane][head_dim] */
    void *block_copy;  /* tile: [key][head_dim], then [key][d_v], of strided keys and values or halves */
    struct cattn_key_copies listed; /* the key block at hand of a list of keys, for the driver */
    void *value_panels; /* of pack_block: [panel][key][2 * lanes]; only in tasks of several blocks of rows */
    void *weight_rows;  /* for halves: [row][seqlen_k] */
    void *block_max;
    void *row_max, *row_sum, *alpha; /* the running state of the chunk; this block's correction */
    void *acc;                       /* [row][acc_cols] */
    void *acc_columns; /* [unit][acc_cols][CATTN_UNIT]: of the chunk, in the tile path of the tables of tiles */
    void *wide;        /* there, without tiles: packed keys or values as numbers of the table's own type */
    void *units;       /* there: sums of four units */
    void *total_max, *total_sum,
        *total_acc; /* the merged chunks so far; uninitialised before the driver swaps in one */
};

/* The keys or values of one head as the caller stores them. A quantized element is multiplied by its scale. */
struct cattn_matrix {
    enum cattn_storage storage;
    const void *first;
    int64_t row, col;
    const float *scale; /* of the first element, if quantized */
    int64_t scale_row, scale_col;
    int64_t first_row; /* the number of the row at `first`: rows before it are not there */
};

/* A block of rows: the argument of the kernels. */
struct cattn_rows {
    struct cattn_call_shape call; /* a copy: the inner loops need no second pointer */
    struct cattn_per_row *per_row;
    const void **query; /* per_row->query, except in a view for gradients */
    int n_rows;
    bool ascending; /* consecutive queries of one head, none past the end: lo and hi never decrease */
    /* Keys are counted from the first valid one: key k is the array's key first_key + k, for which blocks of the block
     * mask, columns of the weights, and top keys count. */
    int64_t first_key;
    int64_t n_keys;                 /* keys from there on that exist in this batch entry */
    struct cattn_matrix key, value; /* of this key-value head; value.first is NULL if there is no value */
    struct cattn_drop drop;
    /* Row path, of the key block at hand: bit sets of the chains that some row sees, and of those in which the block
     * mask hides a key of some row's range. */
    unsigned seen_chains, masked_chains;
    /* The second attempt at outputs whose sums overflowed: weights are multiplied by a power of two before P V, and
     * `finish` replaces only the elements of the output that are not finite. */
    bool small_weights;
    bool overflowed; /* set by `finish`: a second attempt may give a number that is finite */
    struct cattn_row_scratch scratch;
};

/* The log-sum-exp of a block of rows, from which weights are computed again. Scratch, one number a row; split_lse in
 * second_pass.inc.h explains the parts. */
struct cattn_split_lse {
    void *value, *residual, *factor;
};

/* For each row, the sums that core/forgotten_options.c needs to tell whether out and lse belong to these arguments:
 * over the keys, sums of the weights P before dropout, of P dP and of |P dP|; over the columns, sums of grad_out
 * * out and of its magnitude, and with a gate of |grad_out|. */
struct cattn_fit {
    double weights[CATTN_TILE_ROWS], products[CATTN_TILE_ROWS], magnitudes[CATTN_TILE_ROWS];
    double delta[CATTN_TILE_ROWS], delta_magnitude[CATTN_TILE_ROWS], grad_size[CATTN_TILE_ROWS];
};

/* The gradients of a block of queries. Three views share masks and ranges, so that the kernels of the forward pass
 * serve all products: `scores` has the queries and keys of the forward pass; `grads` has grad_out as queries and the
 * values as keys; `keys` has the gradients of the scores as weights and the keys as values. A driver calls
 *
 *     backward.begin            once
 *       backward.scores         for each key block: weights, and gradients dS of the biased scores
 *       backward_bias           only if wanted: the gradient of the bias, from dS
 *       backward.query          turns dS into the gradients of the products Q K^T; adds to the gradient of the queries
 *       backward.keys           adds to the gradients of the keys and values
 *     backward_sees             if the results of the forward pass are checked: what the check needs to know of a row
 *     jvp_backward_terms        the same, if tangents are checked
 *     backward.sink             only with sinks
 *     backward_finish           once: writes the gradient of the queries
 *
 * The driver fixes the order of backward_bias and backward.keys among blocks; it is part of the bit contract.
 */
struct cattn_backward {
    struct cattn_rows scores, grads, keys;
    const void *grad_out[CATTN_TILE_ROWS]; /* the queries of `grads`; backward.begin multiplies them by the gate */
    enum cattn_storage out_storage;        /* of scores.per_row->out */
    bool has_grad_lse;
    double grad_lse[CATTN_TILE_ROWS]; /* if has_grad_lse */
    /* scratch: the queries and grad_out, row by row, with zeros after the last row and column */
    void *query_rows, *grad_rows;
    int64_t query_cols, grad_cols; /* multiples of CATTN_PAD */
    struct cattn_split_lse lse;
    void *delta, *bias_sum; /* one a row: grad_out . out - grad_lse; the sum of dS */
    void *bias_part;        /* [CATTN_BLOCK_KEYS]: sums of dS over the rows */
    struct cattn_fit fit;
    /* results; all gradients have unit column stride */
    void *grad_query[CATTN_TILE_ROWS]; /* written */
    void *grad_gate[CATTN_TILE_ROWS];  /* written, if has_gate */
    void *grad_key, *grad_value;       /* of this key-value head; added to */
    int64_t grad_key_row, grad_value_row;
    /* at most one of these three is set */
    void *grad_bias[CATTN_TILE_ROWS];     /* dS is added, row by row */
    void *grad_bias_keys;                 /* the sums of dS over the rows are added */
    void *grad_bias_row[CATTN_TILE_ROWS]; /* the sum of dS over the keys is written */
};

/* Steps shared by `backward` and `jvp_backward`. struct cattn_jvp_backward begins with struct
 * cattn_backward, so both take the same pointer. */
struct cattn_backward_steps {
    void (*begin)(struct cattn_backward *b);
    void (*scores)(struct cattn_backward *b, int64_t k0, int64_t k1);
    void (*query)(struct cattn_backward *b, int64_t k0, int64_t k1);
    void (*keys)(struct cattn_backward *b, int64_t k0, int64_t k1);
    /* returns the rows' contribution to the gradient of the sink */
    double (*sink)(struct cattn_backward *b);
};

/* ---- passes with tangents: the derivative of attention in a direction, and the gradients of that derivative ---- */

/* The tangents of a block's scores. Two views compute the products of query tangents and keys, and of queries and key
 * tangents, which are added in one array [key][CATTN_TILE_ROWS]. */
struct cattn_score_tangents {
    bool has_query, has_key, has_bias, has_sink;
    struct cattn_rows query, key;
    const void *query_rows[CATTN_TILE_ROWS]; /* if has_query: the queries of `query` */
    const void *bias[CATTN_TILE_ROWS];       /* if has_bias */
    int64_t bias_col;
    double sink[CATTN_TILE_ROWS]; /* if has_sink */
    void *tangent;                /* scratch */
};

/* The derivative of a block of queries. `scores` has the results of the forward pass; `values` and `value_tangents`
 * have numbers of pairs as weights, and the values and their tangents as values. A driver calls
 *
 *     jvp_begin      once
 *       jvp_block    for each key block
 *     jvp_finish     once: writes the tangents of the output and of the log-sum-exp
 */
struct cattn_jvp {
    struct cattn_rows scores, values, value_tangents;
    bool has_value;
    struct cattn_score_tangents tangents;
    struct cattn_split_lse lse;
    void *mean; /* scratch, one a row: the sum of weight * tangent */
    /* results */
    void *out_tangent[CATTN_TILE_ROWS]; /* stored as out */
    int64_t out_tangent_col;
    void *lse_tangent[CATTN_TILE_ROWS]; /* in the table's own type; the first is NULL if nobody wants them */
};

/* For each row, the sums that core/forgotten_options.c needs to tell whether the tangents of out and lse belong to the
 * tangents of the inputs: over the keys, sums of P (S' - mean) and of its magnitude, of the terms of grad_out *
 * out_tangent and of their magnitudes; over the columns, sums of grad_out * out_tangent and of its magnitude. */
struct cattn_tangent_fit {
    double centred[CATTN_TILE_ROWS], centred_magnitude[CATTN_TILE_ROWS];
    double products[CATTN_TILE_ROWS], magnitudes[CATTN_TILE_ROWS];
    double delta[CATTN_TILE_ROWS], delta_magnitude[CATTN_TILE_ROWS];
};

/* The gradients of that derivative. A driver calls the functions of the gradients (struct cattn_backward), with the
 * steps `jvp_backward` in place of `backward`. Beside the views of `backward`, `grads` has grad_out and the
 * tangents of the values, and `keys` has gradients of the score tangents as weights and the tangents of the keys as
 * values. */
struct cattn_jvp_backward {
    struct cattn_backward backward; /* the first member: the driver passes its address */
    struct cattn_tangent_fit fit;
    struct cattn_score_tangents tangents;
    bool has_value;
    struct cattn_rows grads, keys;
    void *query_rows;                   /* scratch: the query tangents, as backward.query_rows */
    void *delta;                        /* scratch, one a row: grad_out . out_tangent */
    void *mean;                         /* scratch, one a row: the tangent of the lse */
    void *out_tangent[CATTN_TILE_ROWS]; /* stored as backward.out_storage says */
    int64_t out_tangent_col;
    const void *lse_tangent[CATTN_TILE_ROWS]; /* in the table's own type */
};

/* ---- statistics ---- */

/* Statistics of the attention weights of a block of queries. The rows have an lse in float64, and no output. A driver
 * calls
 *
 *     statistics_begin     once
 *       statistics_block   for each key block: sums over its keys, and its weights
 *       statistics_add     only if column sums are wanted: adds the sums over the rows to them
 *     statistics_finish    once: writes the statistics of the rows
 *
 * The driver fixes the order of statistics_add among blocks of queries; it is part of the bit contract.
 */
struct cattn_statistics {
    struct cattn_rows rows;
    struct cattn_split_lse lse;
    bool wants_received; /* some row counts in the column sums */
    int first_received;  /* the first such row */
    int64_t top_k;
    /* scratch, one a row: the sums of w ln w and w |position - key| so far, the largest score, the score that a key
     * must exceed to be among the top keys, and whether the weights are NaN */
    void *log_sum, *distance, *max_score, *top_root;
    bool *undefined;
    bool any_undefined;
    void *column_sum, *column_max;  /* [CATTN_BLOCK_KEYS]: over the rows */
    int columns_begin, columns_end; /* the keys of the block that have them */
    /* results with unit stride: the first row's, or NULL */
    void *row_results[CATTN_N_ROW_STATISTICS];
    void *top_weights; /* [row][top_k]; the scores until statistics_finish */
    int64_t *top_keys;
    void *received, *received_max; /* of this head; added to; or NULL */
};

/* What the loops over long rows ask now and then. True: return soon, the results will not be used. */
struct cattn_stop {
    bool (*wanted)(void *worker); /* or NULL */
    void *worker;
};

/* ---- rows ---- */

/* Softmax over one row of n elements, lanes across the row. */
struct cattn_softmax_row {
    struct cattn_stop stop;
    int64_t n;
    int64_t lo, hi; /* columns lo <= k < hi are in range */
    const void *x;
    const void *next; /* the next row, to be prefetched; x if there is none */
    int64_t x_stride;
    void *out;
    int64_t out_stride;
    const uint8_t *mask; /* or NULL */
    int64_t mask_stride;
    double scale;
    bool renormalize;
};

/* The gradient of a softmax over one row of n elements. */
struct cattn_softmax_gradient {
    struct cattn_stop stop;
    int64_t n;
    const void *grad, *weights; /* the gradient of the softmax's result, and that result */
    int64_t grad_stride, weights_stride;
    void *out;
    int64_t out_stride;
    double scale;
};

/* Dropout of n elements from flat index `first` on. */
struct cattn_dropout_row {
    int64_t n;
    uint64_t first;
    const void *x;
    int64_t x_stride;
    void *out;
    int64_t out_stride;
    uint8_t *mask; /* or NULL */
    int64_t mask_stride;
    double keep_scale;
    struct cattn_drop drop;
};

/* Sines and cosines of one position, rounded once to the dtype of a table. */
struct cattn_rope_angles {
    int64_t n; /* pairs */
    const double *frequencies;
    double position;
    double cosine_factor, sine_factor; /* the attention factor; negative for the sines of the inverse rotation */
    enum cattn_dtype dtype;            /* of the tables */
    /* Interleaved tables have 2 n numbers, two for each pair: its cosine twice, its sine once negated. Others have n.
     */
    bool interleaved;
    void *cosines, *sines;
};

/* Rotates the first rotary_dim columns of rows at consecutive positions and copies the other ones. */
struct cattn_rope_rows {
    int64_t n_rows, n_cols, rotary_dim;
    bool interleaved;           /* pairs are neighbours, else column i and column i + rotary_dim / 2 */
    enum cattn_storage storage; /* of x and out */
    const void *x;
    int64_t x_row, x_col;
    void *out; /* may be x with the same strides */
    int64_t out_row, out_col;
    const void *cosines, *sines; /* as rope_angles writes them, a table for each row */
    int64_t table_row;
};

/* x / sqrt(mean of its squares + eps) * weight + bias over one row; centred: of x minus its mean. */
struct cattn_norm_row {
    struct cattn_stop stop;
    int64_t n;
    double eps;
    bool centred;
    enum cattn_storage storage; /* of x and out */
    const void *x;
    int64_t x_stride;
    const void *weight, *bias; /* or NULL */
    int64_t weight_stride, bias_stride;
    void *out; /* may be x with the same stride */
    int64_t out_stride;
    void *scratch; /* n numbers of the table's type */
};

/* The gradient of a norm over one row. */
struct cattn_norm_gradient {
    struct cattn_norm_row forward; /* plain storage; out receives the gradient of x and may be one of the inputs */
    const void *grad;
    int64_t grad_stride;
    void *weight_sums, *bias_sums; /* the row's gradients of weight and bias are added; unit stride; or NULL */
};

/* out = f(x) or, if grad is not NULL, grad * f'(x). Plain storage and unit strides. */
struct cattn_activation_row {
    enum cattn_activation which;
    int64_t n;
    const void *x, *grad;
    void *out; /* may be one of the others */
};

/* One token of a short convolution: for each channel, the sum over rows of row times weight, plus bias. */
struct cattn_conv_row {
    int64_t n, width;
    bool silu;                  /* of the result */
    enum cattn_storage storage; /* of rows and out */
    const void *const *rows;    /* [width]; NULL takes no part */
    const int64_t *cols;        /* [width]: their strides */
    const void *weight;         /* [width][n], in the table's own type */
    const void *bias;           /* the same; or NULL */
    int64_t bias_col;
    void *out;
    int64_t out_col;
};

/* The scores by which a query chooses keys: for each key the sum over the heads of weight * act(scale * product). All
 * in the table's own type, keys side by side. */
struct cattn_choice_row {
    int64_t n_keys, n_heads;
    const void *products; /* [head][key] */
    int64_t head;         /* stride of the heads */
    const void *weights;  /* one for each head; or NULL: 1 */
    int64_t weight_head;
    double scale;
    bool relu; /* act; else the identity */
    void *scores;
};

/* The rows of one head, or of consecutive ones; strides in elements. */
struct cattn_strided {
    void *data;
    int64_t head, row, col;
};

/* Linear attention of the tokens of one state: some of its columns, for which value, state, out and state_out begin at
 * the first one. Consecutive heads of query and out belong to the state. */
struct cattn_state_columns {
    struct cattn_stop stop;
    int64_t n_tokens, n_columns, d_k, n_queries;
    double scale;
    enum cattn_storage storage; /* of query, key, value and out; decay, beta and states have the table's own type */
    bool decay_by_row;          /* the decay has a number for each row of the state; else one for a token */
    struct cattn_strided query, key, value, out;
    struct cattn_strided decay, beta, state, state_out; /* data may be NULL; state_out may be state */
    /* scratch: a strip, and CATTN_STATE_NUMBERS numbers of tokens */
    void *strip, *tokens;
};
#define CATTN_STATE_NUMBERS(d_k, n_queries, by_row)                                                                    \
    (((CATTN_STATE_TOKENS + 1) * (d_k) + CATTN_STATE_TOKENS * (n_queries) * (d_k)) * ((by_row) ? 2 : 1) +              \
     CATTN_STATE_TOKENS * (n_queries) + ((by_row) ? CATTN_STATE_TOKENS * (d_k) : 0))

/* The gradients of the tokens of one state. Results have the table's own type, and unit stride along rows of d_k and
 * d_v. A driver calls
 *
 *     gradient_columns   for all columns, in any order
 *     gradient_rows      for all rows, in any order
 *     gradient_tokens    once
 */
struct cattn_state_gradient {
    struct cattn_state_columns forward; /* without out; for the whole state */
    int64_t begin, end, d_v;            /* the columns or rows that are computed */
    struct cattn_strided grad_out;      /* stored as query */
    struct cattn_strided grad_final;    /* the gradient of the last state; or absent */
    struct cattn_strided grad_query, grad_key, grad_value, grad_state;
    struct cattn_strided grad_decay, grad_beta; /* one number for a token; or absent */
    struct cattn_strided residual;              /* [token][d_v], written by gradient_columns */
    struct cattn_strided decay_rows;            /* [token][d_k]: the gradient of the decay of each row; or absent */
    /* scratch: a strip; if there are decay_rows, CATTN_STATE_HISTORY numbers and a strip for each block of tokens;
     * CATTN_STATE_COLUMN_NUMBERS numbers */
    void *grad_strip, *history, *checkpoints, *columns;
};
#define CATTN_STATE_HISTORY (CATTN_STATE_TOKENS * CATTN_CHAIN_TERMS * CATTN_STRIP_ROWS)
#define CATTN_STATE_COLUMN_NUMBERS(d_v, n_queries) (CATTN_STATE_TOKENS * (d_v) * (2 + (n_queries)))

/* C[i][j] = the sum over d of A[i][d] * B[j][d], plus a bias: a task's part of a product of two matrices. A driver
 * calls
 *
 *     product_tile           with more than CATTN_FEW_ROWS rows of B
 *     product_pack_few       with fewer: packs B, unless it is packed by slabs
 *       product_few          for some rows of A
 *
 * product_tile and product_few compute and write the part of C of some rows of A. */
struct cattn_product {
    struct cattn_stop stop;
    bool by_slabs; /* few rows: B is too long to be packed as a whole; each slab is packed anew for some rows of A */
    struct cattn_matrix a, b; /* rows of n_cols = depth columns, any strides */
    int64_t depth, n_b;
    /* element (i, j) of C is at i * out_a + j * out_b; the bias at i * bias_a + j * bias_b, in the table's own type */
    enum cattn_storage out_storage;
    bool streams; /* tiles: store whole cache lines of C with streaming stores */
    void *out;
    int64_t out_a, out_b;
    const void *bias; /* or NULL */
    int64_t bias_a, bias_b;
    /* scratch */
    void *packed; /* a slab of a block of B; few rows: all of B, or CATTN_FEW_SLABS slabs; in tiles CATTN_UNIT rows */
    void *sums;   /* [row of A][CATTN_PRODUCT_SUMS_ROW] unless they rest in C; or the chains and sums of few rows; in
                     tiles [unit of B][row of A][CATTN_UNIT], of one unit if all columns are packed together */
    void *a_copy; /* [CATTN_PRODUCT_ROWS][CATTN_SLAB_TERMS]: rows of A that lie otherwise; or all, packed */
    void *converted; /* [the most rows][CATTN_SLAB_TERMS]: numbers of another storage, or terms of pairs; in tiles
                        what widen_left makes of a_copy */
    void *edge;      /* [CATTN_PRODUCT_EDGE][CATTN_SLAB_TERMS] */
};

/* Rows of B that product_tile packs at a time: even blocks, which stay in the L2 cache. */
static inline int64_t cattn_product_block(int64_t n_b) {
    return cattn_round_up(cattn_ceil_div(n_b, cattn_ceil_div(n_b, CATTN_PRODUCT_MANY_LANES)), CATTN_PAD);
}

#define CATTN_PRODUCT_SUMS_ROW(n_b) cattn_round_up(n_b, CATTN_PAD)

/* Products in tiles: the columns that are packed together. */
static inline int64_t cattn_unit_cols(int64_t depth) {
    return depth < CATTN_UNIT_TERMS ? cattn_round_up(depth, CATTN_GROUP_TERMS) : CATTN_UNIT_TERMS;
}

/* Whether sums rest in C: its rows are lanes, and its elements have the table's own type. */
static inline bool cattn_sums_in_place(const struct cattn_product *product) {
    return product->out_storage == CATTN_STORED_PLAIN && product->out_b == 1;
}

/* The elements of a row of packed keys or values. */
static inline int64_t cattn_packed_key_cols(enum cattn_bf16_products products, int64_t n_cols) {
    return products == CATTN_BF16_TILES ? cattn_round_up(n_cols, CATTN_GROUP_TERMS) : n_cols;
}
static inline int64_t cattn_packed_value_cols(enum cattn_bf16_products products, int64_t n_cols) {
    return products == CATTN_BF16_TILES ? cattn_round_up(n_cols, CATTN_UNIT) : n_cols;
}

/* ---- the tables ---- */

/* The kernels of attention and of products of matrices. */
struct cattn_kernels {
    const char *name;
    int lanes, mr, nr;
    bool has_fma;    /* products and sums are rounded once, as the bit contract requires */
    int64_t far_row; /* bytes between rows of V of which a panel does not stay in the L1 cache */

    bool (*keeps_arithmetic)(void); /* whether the compiler kept the arithmetic of the source; see arithmetic.inc.h */
    void (*pack_query_tile)(struct cattn_rows *rows);
    void (*pack_query_rows)(struct cattn_rows *rows);
    void (*chunk_begin)(struct cattn_rows *rows);
    /* copies of a key block for all blocks of rows of a task, which then have call.packed_block; NULL in tables of
     * products of bfloat16 */
    void (*pack_block)(struct cattn_rows *rows, int64_t k0, int64_t k1);
    /* keys k0 <= k < k1 of one block; k0 is a multiple of CATTN_BLOCK_KEYS */
    void (*tile_block)(struct cattn_rows *rows, int64_t k0, int64_t k1);
    void (*rows_block)(struct cattn_rows *rows, int64_t k0, int64_t k1);
    /* total = merge(total, chunk). For the first chunk the driver swaps the two sets of pointers instead. */
    void (*chunk_merge)(struct cattn_rows *rows);
    /* Reads the total. `weights` holds the scores until then. */
    void (*finish)(struct cattn_rows *rows);
    struct cattn_backward_steps backward, jvp_backward;
    void (*backward_bias)(struct cattn_backward *b, int64_t k0, int64_t k1);
    /* whether row r sees a key; *sink_weight receives the weight of its sink, 0 without sinks */
    bool (*backward_sees)(const struct cattn_backward *b, int r, double *sink_weight);
    /* the largest sum over the columns of |q' k| + |q k'|, before the scale, for a key that row r sees */
    double (*jvp_backward_terms)(const struct cattn_backward *b, int r);
    void (*backward_finish)(struct cattn_backward *b);
    void (*jvp_begin)(struct cattn_jvp *j);
    void (*jvp_block)(struct cattn_jvp *j, int64_t k0, int64_t k1);
    void (*jvp_finish)(struct cattn_jvp *j);
    void (*statistics_begin)(struct cattn_statistics *s);
    void (*statistics_block)(struct cattn_statistics *s, int64_t k0, int64_t k1);
    void (*statistics_add)(const struct cattn_statistics *s, int64_t k0);
    void (*statistics_finish)(struct cattn_statistics *s);
    /* products of bfloat16: the rows begin .. end-1 of keys or values, rounded, to rows of cattn_packed_key_cols and
     * cattn_packed_value_cols elements from `to` on; begin is a multiple of CATTN_GROUP_TERMS. Tables of tiles have
     * whole units in the order of bf16_units.inc.h, and zeros after the last value */
    void (*pack_keys)(const struct cattn_matrix *key, int64_t begin, int64_t end, int64_t n_cols, uint16_t *to);
    void (*pack_values)(const struct cattn_matrix *value, int64_t begin, int64_t end, int64_t n_cols, uint16_t *to);
    /* tables of tiles: the end of a chunk on the tile path; NULL elsewhere */
    void (*chunk_end)(struct cattn_rows *rows);
    /* instructions for tiles: before and after a task that has them; NULL elsewhere */
    void (*tiles_begin)(void);
    void (*tiles_end)(void);
    void (*product_pack_few)(struct cattn_product *product);
    /* n_rows rows of A from `first` on; product_few: at most CATTN_PRODUCT_ROWS or CATTN_FEW_COLUMNS */
    void (*product_tile)(struct cattn_product *product, int64_t first, int64_t n_rows);
    int64_t product_packs_from; /* rows of B from which on product_tile packs rows of A */
    void (*product_few)(struct cattn_product *product, int64_t first, int n_rows);

    bool (*keeps_tiles)(void); /* keeps_arithmetic of instructions for tiles, which the system has to permit before */
};

/* The kernels of functions of rows. No micro-tile changes them, so tables of one vocabulary share them. */
struct cattn_row_kernels {
    /* the drop bits of the keys 0 .. n-1 of one row of an attention matrix, as bytes */
    void (*dropout_mask_row)(const struct cattn_drop *drop, uint32_t position, uint32_t head, uint8_t *mask,
                             int64_t stride, int64_t n);
    /* conversion of n stored elements to the table's own type, and back */
    void (*widen_row)(enum cattn_storage storage, const void *from, int64_t stride, int64_t n, void *to);
    void (*narrow_row)(enum cattn_storage storage, const void *from, int64_t n, void *to, int64_t stride);
    void (*softmax_row)(const struct cattn_softmax_row *row);
    /* writes a row past the caches; NULL if the instruction set has no such stores */
    void (*stream_row)(const void *from, int64_t n, void *to);
    /* a fence that orders such rows before later stores; NULL as stream_row */
    void (*stream_end)(void);
    void (*softmax_gradient)(const struct cattn_softmax_gradient *row);
    void (*dropout_row)(const struct cattn_dropout_row *row);

    /* frequencies[i] = exp(-i * (step_high + step_low)) for i below n; step_high has at most 27 bits. This and
     * rope_angles compute in double whatever the dtype of the call: NULL in the tables of float32. */
    void (*rope_frequencies)(int64_t n, double step_high, double step_low, double *frequencies);
    void (*rope_angles)(const struct cattn_rope_angles *angles);
    void (*rope_rows)(const struct cattn_rope_rows *rows);
    void (*norm_row)(const struct cattn_norm_row *row);
    void (*norm_gradient)(const struct cattn_norm_gradient *row);
    void (*activation_row)(const struct cattn_activation_row *row);
    void (*conv_row)(const struct cattn_conv_row *row);
    void (*choice_row)(const struct cattn_choice_row *row);
    void (*state_columns)(const struct cattn_state_columns *columns);
    void (*gradient_columns)(const struct cattn_state_gradient *gradient);
    void (*gradient_rows)(const struct cattn_state_gradient *gradient);
    void (*gradient_tokens)(const struct cattn_state_gradient *gradient);

    /* PyTorch's generator (torch.inc.h): the next block of 624 words, in place */
    void (*mt19937_block)(uint32_t *state);
    /* n words of a block as they are drawn */
    void (*mt19937_temper)(const uint32_t *state, int n, uint32_t *words);
    /* n numbers in the table's type, of one word each (float32) or two (float64), uniform in [low, high), which are
     * numbers of that type */
    void (*torch_uniform)(const uint32_t *words, int64_t n, double low, double high, void *numbers);
    /* the same, normal; n is a multiple of 16, and there are at most CATTN_TORCH_CHUNK words */
    void (*torch_normal)(const uint32_t *words, int64_t n, void *numbers);
    /* out[i] = 1 if the 53 bits of words 2i, 2i+1 are below the threshold */
    void (*torch_below)(const uint32_t *words, int64_t n, uint64_t threshold, uint8_t *out);
    /* out = x * keep_scale where mask is 1, +0 where it is 0 */
    void (*torch_drop)(int64_t n, const void *x, int64_t x_stride, const uint8_t *mask, double keep_scale, void *out,
                       int64_t out_stride);
};

/* A Mac's compiler may compile for two machines at once, with the same macros. Only one of them has these tables. */
#ifndef __x86_64__
#undef CATTN_HAVE_GNU512
#undef CATTN_HAVE_AVX2
#undef CATTN_HAVE_AVX2_4X2
#undef CATTN_HAVE_AVX512_256
#undef CATTN_HAVE_AVX512
#undef CATTN_HAVE_AVX512_BF16
#undef CATTN_HAVE_AMX
#endif

/* A build has the objects that its tables use (setup.py). */
#define CATTN_EXTERN_TABLES(isa)                                                                                       \
    extern const struct cattn_kernels cattn_kernels_##isa##_16, cattn_kernels_##isa##_17, cattn_kernels_##isa##_32,    \
        cattn_kernels_##isa##_64;                                                                                      \
    extern const struct cattn_row_kernels cattn_row_kernels_##isa##_32, cattn_row_kernels_##isa##_64
CATTN_EXTERN_TABLES(scalar);
CATTN_EXTERN_TABLES(gnu128);
CATTN_EXTERN_TABLES(gnu512);
CATTN_EXTERN_TABLES(avx2);
CATTN_EXTERN_TABLES(avx512);
extern const struct cattn_kernels cattn_kernels_avx2_4x2_32, cattn_kernels_avx2_4x2_64;
extern const struct cattn_kernels cattn_kernels_avx512_256_32, cattn_kernels_avx512_256_64;
extern const struct cattn_kernels cattn_kernels_avx512_bf16_16, cattn_kernels_amx_17;

#endif
