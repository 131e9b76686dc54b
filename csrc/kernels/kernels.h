/* kernels.h -- the contract between the drivers of core/ and the kernel tables, one table per instruction set and
 * dtype.
 *
 * A driver owns a struct cattn_rows: some rows (queries of one key-value head) on their way past the keys. It calls
 *
 *     pack_query_tile | pack_query_rows  once: the scaled queries, in the layout of its path
 *     chunk_begin                        at each key chunk
 *       tile_block | rows_block          for each key block of the chunk: scores, masks, softmax, P V
 *     chunk_merge                        folds the chunk into what came before
 *     finish                             output, log-sum-exp, weights
 *
 * Kernels cannot fail and allocate nothing; everything was checked before. `void *` stands for the table's own element
 * type. All strides count elements.
 *
 * The lengths of blocks, chunks, runs and chains are law: the order of every sum hangs on them (csrc/README.md, "The
 * bit contract"). 192 is a multiple of every table's micro-tile height and of the 64 keys that share Philox counters.
 */
#ifndef CATTN_KERNELS_H
#define CATTN_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../dtype.h"

#define CATTN_BLOCK_KEYS 192
#define CATTN_CHUNK_KEYS (8 * CATTN_BLOCK_KEYS)
/* every sum of products is one chain of FMAs for so many terms each, by their place: shorter chains, smaller errors */
#define CATTN_CHAIN_TERMS 16
/* P V goes by runs of so many keys of a block, added to the output one by one: that much of V stays in the nearest
 * cache, and the order is law */
#define CATTN_RUN_KEYS (CATTN_BLOCK_KEYS / 2)
/* rows of one tile: a multiple of every table's 2 * lanes and micro-tile height */
#define CATTN_TILE_ROWS 96
/* most rows that pass the keys together on the row path */
#define CATTN_FEW_ROWS 8
/* row_sum of a block is this many chains, by key index */
#define CATTN_SUM_CHAINS 8
#define CATTN_PHILOX_ROUNDS 10
/* columns of every row-major scratch array are padded to a multiple of this: two of the widest vectors */
#define CATTN_PAD 32
/* most words that torch_normal takes: they and their numbers stay in the nearest cache */
#define CATTN_TORCH_CHUNK 1024

/* What a dropout decision needs besides the element's place; see philox.inc.h. */
struct cattn_drop {
    bool enabled;
    uint32_t key[CATTN_PHILOX_ROUNDS][2];
    uint32_t batch_twice;                /* counter word 3 of the first draw: twice the lead index */
    uint32_t threshold_hi, threshold_lo; /* halves of the threshold; hi is 0x10000 where everything is kept */
};

struct cattn_rows {
    int n_rows;
    bool fully_ranged; /* no mask per element: the ranges alone decide */
    bool ascending;    /* one head's queries, all of them there: lo and hi never fall from row to row */
    int64_t head_dim, d_v;
    int64_t acc_cols; /* d_v rounded up to CATTN_PAD: row stride of the accumulators */
    double scale;
    double keep_scale; /* 1, or 1/(1-p) under dropout */
    double softcap;    /* > 0, or 0: none */
    bool has_slopes, has_sinks;
    bool has_mask, has_out, has_lse, has_weights; /* else these pointers of the rows are not set */
    bool double_lse;                              /* lse is double, else real */
    bool store_scores;                            /* weights stay scores, -inf out of range */
    enum cattn_storage storage;                   /* of query, key, value, out and weights_out */

    const void *key, *value; /* of this key-value head */
    int64_t key_row, key_col, value_row, value_col;
    int64_t mask_col;
    int n_bias;
    int64_t bias_col[2];
    struct cattn_drop drop;
    int64_t query_col, out_col, weights_col, weights_out_col;

    /* per row */
    int64_t lo[CATTN_TILE_ROWS], hi[CATTN_TILE_ROWS]; /* keys lo <= k < hi are in range */
    const void *query[CATTN_TILE_ROWS];
    const uint8_t *mask[CATTN_TILE_ROWS];
    const void *bias[2][CATTN_TILE_ROWS];
    int64_t position[CATTN_TILE_ROWS];                    /* if has_slopes: of the query among the keys */
    double slope[CATTN_TILE_ROWS], sink[CATTN_TILE_ROWS]; /* if has_slopes, has_sinks */
    uint32_t drop_position[CATTN_TILE_ROWS], drop_head[CATTN_TILE_ROWS]; /* if drop.enabled */
    uint8_t *drop_bits[CATTN_TILE_ROWS]; /* or the first NULL: one bit a key, lowest first, instead of Philox */
    void *out[CATTN_TILE_ROWS];          /* NULL: a row behind the end of its sequence */
    void *lse[CATTN_TILE_ROWS];          /* the same */
    void *weights[CATTN_TILE_ROWS];      /* in the kernels' own type */
    void *weights_out[CATTN_TILE_ROWS];  /* of halves, which weights go to in the end */
    int64_t seqlen_k, n_keys;            /* of the weights' last axis; that are there */

    /* scratch, 64-byte aligned */
    void *packed_query; /* tile: panels [2 * lanes queries][head_dim]; rows: [n][head_dim] */
    void *score;        /* tile: [key][CATTN_TILE_ROWS]; rows: [row][CATTN_BLOCK_KEYS] */
    void *cap_slope;    /* as score, or NULL: the derivative of softcap (tile path, for the backward pass) */
    void *value_panel;  /* tile: one panel [key][2 * lanes]; rows: [key of a run][d_v], for strided values and halves */
    void *key_rows;     /* a few key rows made contiguous */
    void *block_rows;   /* tile: [key][head_dim], then [key][d_v], for strided keys and values and halves */
    void *weight_rows;  /* for halves: [row][seqlen_k] */
    void *block_max;
    void *row_max, *row_sum, *alpha;         /* the chunk so far, and this block's correction */
    void *acc;                               /* [row][acc_cols] */
    void *total_max, *total_sum, *total_acc; /* the chunks before; used from the second chunk on */
};

/* Gradients: a block of queries on its way past the keys. Three views share masks and ranges: in `scores` are the
 * queries and keys of the forward pass, in `grads` grad_out takes the place of the queries and the values that of the
 * keys, in `keys` the gradients of the scores take the place of the weights and the keys that of the values. A driver
 * calls
 *
 *     backward_begin            once
 *       backward_scores         for each key block: the weights, and the gradients of the biased scores
 *       backward_bias           the gradient of the bias, from those; if asked for
 *       backward_query          from here on they are the gradients of the products; what they add to the query's
 *       backward_keys           what the block of queries adds to the gradients of the keys and values
 *     backward_sink, backward_finish
 */
struct cattn_backward {
    struct cattn_rows scores, grads, keys;
    /* scratch: the queries and grad_out, row by row, zero behind the last row and column */
    void *query_rows, *grad_rows;
    int64_t query_cols, grad_cols;         /* multiples of CATTN_PAD */
    void *lse, *lse_residual, *lse_factor; /* per row: load_lse */
    void *delta, *bias_sum;                /* per row; grad_out . out; of the gradients of its scores */
    void *bias_part;                       /* [CATTN_BLOCK_KEYS]: sums over the rows */
    void *grad_query[CATTN_TILE_ROWS];     /* unit stride, as all gradients */
    void *grad_key, *grad_value;           /* of this key-value head: added to */
    int64_t grad_key_row, grad_value_row;
    /* at most one of the three: added to, row by row; added to, for all rows together; one number a row, written */
    void *grad_bias[CATTN_TILE_ROWS];
    void *grad_bias_keys;
    void *grad_bias_row[CATTN_TILE_ROWS];
};

/* Softmax over one row of n elements, lanes across the row. */
struct cattn_softmax_row {
    int64_t n;
    int64_t lo, hi; /* columns in range */
    const void *x;
    const void *next; /* the row that comes next, asked for while this one is computed; or x */
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
    int64_t n;
    const void *grad, *weights; /* of the softmax's result; that result */
    int64_t grad_stride, weights_stride;
    void *out;
    int64_t out_stride;
    double scale;
};

/* n elements from flat index `first` on. */
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

struct cattn_kernels {
    const char *name;
    int lanes, mr, nr;
    bool has_fma; /* inside the bit contract */

    void (*pack_query_tile)(struct cattn_rows *rows);
    void (*pack_query_rows)(struct cattn_rows *rows);
    void (*chunk_begin)(struct cattn_rows *rows);
    /* keys k0 <= k < k1, inside one block: k0 is a multiple of CATTN_BLOCK_KEYS */
    void (*tile_block)(struct cattn_rows *rows, int64_t k0, int64_t k1);
    void (*rows_block)(struct cattn_rows *rows, int64_t k0, int64_t k1);
    /* total := merge(total, chunk); for its first chunk the driver exchanges the two sets of pointers instead */
    void (*chunk_merge)(struct cattn_rows *rows);
    /* from the total; with weights, turns the raw scores left there into weights */
    void (*finish)(struct cattn_rows *rows);
    void (*backward_begin)(struct cattn_backward *b);
    void (*backward_scores)(struct cattn_backward *b, int64_t k0, int64_t k1);
    void (*backward_bias)(struct cattn_backward *b, int64_t k0, int64_t k1);
    void (*backward_query)(struct cattn_backward *b, int64_t k0, int64_t k1);
    void (*backward_keys)(struct cattn_backward *b, int64_t k0, int64_t k1);
    /* sum over the rows of (weight of the sink) * delta */
    double (*backward_sink)(struct cattn_backward *b);
    void (*backward_finish)(struct cattn_backward *b);
    /* keep bits of one row of an attention matrix, keys 0 .. n-1 */
    void (*dropout_mask_row)(const struct cattn_drop *drop, uint32_t position, uint32_t head, uint8_t *mask,
                             int64_t stride, int64_t n);
    /* n halves become numbers, and back */
    void (*widen_row)(enum cattn_storage storage, const void *from, int64_t stride, int64_t n, void *to);
    void (*narrow_row)(enum cattn_storage storage, const void *from, int64_t n, void *to, int64_t stride);
    void (*softmax_row)(const struct cattn_softmax_row *row);
    /* a row to memory, past the caches, and what makes sure that rows got there before what is written next; NULL where
     * the instruction set cannot */
    void (*stream_row)(const void *from, int64_t n, void *to);
    void (*stream_end)(void);
    void (*softmax_gradient)(const struct cattn_softmax_gradient *row);
    void (*dropout_row)(const struct cattn_dropout_row *row);

    /* PyTorch's generator (torch.inc.h). The next block of 624 words, in place; n words of a block as they are drawn */
    void (*mt19937_block)(uint32_t *state);
    void (*mt19937_temper)(const uint32_t *state, int n, uint32_t *words);
    /* n numbers in the table's type, of one word each (float32) or two (float64): uniform in [low, high), which are
     * numbers of that type; normal, where n is a multiple of 16 and the words at most CATTN_TORCH_CHUNK */
    void (*torch_uniform)(const uint32_t *words, int64_t n, double low, double high, void *numbers);
    void (*torch_normal)(const uint32_t *words, int64_t n, void *numbers);
    /* are 53 bits of 2 words below the threshold? */
    void (*torch_below)(const uint32_t *words, int64_t n, uint64_t threshold, uint8_t *out);
    /* out = x * keep_scale where mask is 1, +0 where it is 0 */
    void (*torch_drop)(int64_t n, const void *x, int64_t x_stride, const uint8_t *mask, double keep_scale, void *out,
                       int64_t out_stride);
};

extern const struct cattn_kernels cattn_kernels_scalar_32, cattn_kernels_scalar_64;
extern const struct cattn_kernels cattn_kernels_gnu128_32, cattn_kernels_gnu128_64;
extern const struct cattn_kernels cattn_kernels_gnu512_32, cattn_kernels_gnu512_64;
extern const struct cattn_kernels cattn_kernels_avx2_32, cattn_kernels_avx2_64;
extern const struct cattn_kernels cattn_kernels_avx512_32, cattn_kernels_avx512_64;

#endif
