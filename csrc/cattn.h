/* cattn.h -- the core's C API: structs of parameters that the binding fills in, and functions that compute.
 *
 * Plain data only: no Python object and no vector type crosses this header. All strides count ELEMENTS of the tensor's
 * own type; they may be negative or 0. The caller has checked shapes, types and alignment, and that no size overflows.
 * So a call can fail for two reasons only: memory and an interrupt. Builds with assertions check the caller
 * (core/params.c).
 */
#ifndef CATTN_H
#define CATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "types.h"

enum cattn_status { CATTN_OK = 0, CATTN_NO_MEMORY, CATTN_INTERRUPTED };

/* How attention is computed. All paths give the same bits; AUTO picks the fastest. */
enum cattn_path {
    CATTN_PATH_AUTO = 0,
    CATTN_PATH_TILE,  /* blocks of queries against blocks of keys */
    CATTN_PATH_ROWS,  /* few queries: keys and values are read once, for all of them */
    CATTN_PATH_SPLIT, /* as ROWS, with key chunks handed to threads */
    CATTN_PATH_TINY   /* small inputs: one key block, no threads, no checks for interrupts */
};

/* NumPy arrays have at most 64 dimensions, and the last one is never a batch dimension. */
#define CATTN_MAX_BATCH_DIMS 64

/* A strided view. `batch` has one stride for each batch dimension of the call, 0 where the tensor broadcasts. An absent
 * tensor has data == NULL; its other members are not read. */
struct cattn_tensor {
    void *data;
    int64_t head; /* stride of the head axis */
    int64_t row;  /* stride of the query or key axis */
    int64_t col;  /* stride of the last axis */
    int64_t batch[CATTN_MAX_BATCH_DIMS];
};

/* poll() is called on the calling thread every few ten milliseconds; true stops the computation. */
struct cattn_poll {
    bool (*stop)(void *context);
    void *context;
};

struct cattn_torch_random; /* torch_random.h */

/* The random bits of a dropout. Without `torch` they are Philox4x32-10 with this seed as its key: an element is kept if
 * its 32 bits are below `threshold`. With `torch` they are drawn from that generator, in row-major order. */
struct cattn_dropout_spec {
    bool enabled;
    struct cattn_torch_random *torch;
    double keep_probability; /* 1 - p */
    uint64_t seed;
    uint64_t threshold; /* round((1 - p) * 2^32), 0 .. 2^32 */
    double keep_scale;  /* 1 / (1 - p); 0 for p = 1 */
};

#define CATTN_MAX_BIAS 2
/* Scales of quantized keys and values lie between these, so that kernels may multiply them by powers of two. */
#define CATTN_LEAST_SCALE 0x1p-100f
#define CATTN_LARGEST_SCALE 0x1p100f
static inline bool cattn_is_scale(float x) { return x >= CATTN_LEAST_SCALE && x <= CATTN_LARGEST_SCALE; }
#define CATTN_UNBOUNDED INT64_MAX
/* Offsets lie within +-this, so that neither positions nor ends of windows overflow int64. */
#define CATTN_MAX_OFFSET ((int64_t)1 << 61)

/* All masks that leave each query one range of keys: causality, windows, lengths, padding before the first key. Query i
 * stands at position p = i + offset and sees the keys p - left .. p + right among first_key .. key_length - 1. Queries
 * from query_length on see none. The tensors hold int64 and have batch strides only; if one is absent, its number below
 * holds for the whole batch. */
struct cattn_ranges {
    int64_t left, right; /* >= 0, or CATTN_UNBOUNDED; causal: right is 0 */
    bool lower_right;    /* the offset of each batch entry is its key_length - query_length; else as given */
    bool all_visible;    /* every query sees all seqlen_k keys; the offset still gives its position */
    int64_t seqlen_k;    /* read if all_visible */
    int64_t offset, query_length, key_length, first_key;
    struct cattn_tensor offsets, query_lengths, key_lengths, first_keys;
};

struct cattn_attention_params {
    enum cattn_dtype dtype;     /* type of the computation, of bias, slopes, sinks and lse */
    enum cattn_storage storage; /* of query, key, value, out and weights */
    /* If quantized, the storage of key or value instead, and then the dtype is float32 and storage PLAIN: an element is
     * the stored number times the scale's element in its place, rounded once. */
    enum cattn_storage quantized_key, quantized_value;
    enum cattn_bf16_products bf16_products; /* of query, key, value and weights; only with dtype float32 */
    bool packed_keys; /* key and value are copies of rounded_keys.c, in the layout of the tables of tiles */
    /* The call of one list of key_indices, by gathered_attention.c: where its seqlen_k keys and values lie. Or NULL. */
    const struct cattn_key_list *key_list;
    bool double_lse;   /* lse is float64 whatever the dtype, with the digits that float32 cannot hold */
    bool store_scores; /* weights receives the scores instead, -inf where a key is hidden */
    bool own_head_lists, own_row_lists; /* key_indices has a head axis, a query axis: gradients are added accordingly */
    int n_batch_dims;
    int n_bias;
    int num_threads;
    enum cattn_path path;
    int64_t n_batch;    /* product of batch_shape */
    int64_t num_heads;  /* query heads */
    int64_t group_size; /* query heads that read one key-value head */
    int64_t seqlen_q, seqlen_k, head_dim, d_v;
    int64_t block_size; /* queries and keys of a block of block_mask, >= 1; read if that is present */
    int64_t n_indices;  /* columns of key_indices; read if that is present */
    struct cattn_score_options score_options;
    struct cattn_dropout_spec dropout;
    struct cattn_poll poll;

    struct cattn_ranges ranges;               /* its tensors are the first ones */
    struct cattn_tensor query, key, value;    /* value may be absent if d_v is 0 and out is absent */
    struct cattn_tensor attn_mask;            /* bytes, 0 hides the key; (batch, head, row, col); or absent */
    struct cattn_tensor block_mask;           /* bytes, 0 hides all pairs of a block; strides count blocks; or absent */
    struct cattn_tensor bias[CATTN_MAX_BIAS]; /* added to the scaled scores; -inf hides the key */
    /* int64, (batch, head, row, col), each -1 .. seqlen_k - 1; or absent. Row i lists the keys of query i, in the
     * order of the sum; -1 means no key. Ranges and masks still apply. The columns of weights are the columns of this
     * tensor, not the keys. Not allowed together with dropout, slopes or packed sequences. */
    struct cattn_tensor key_indices;
    /* Packed sequences (else absent): query, key, value, out, lse and their gradients have one row axis for the whole
     * batch. Batch entry b starts at these rows (int64, batch strides) and has the lengths that ranges gives it.
     * dropout.torch is absent: it would have no order. */
    struct cattn_tensor query_starts, key_starts;
    struct cattn_tensor slopes; /* of ALiBi, > 0, (batch, head); or absent */
    struct cattn_tensor sinks;  /* one extra logit a head, which enters the softmax denominator only; or absent */
    /* (batch, head, row, col), stored as query: the output is multiplied by its logistic function. Or absent, as where
     * there is no output, and in passes with tangents. */
    struct cattn_tensor gate;
    /* only for quantized key or value: float32, with strides for the axes of the array, 0 where elements share one */
    struct cattn_tensor key_scale, value_scale;

    struct cattn_tensor out;          /* (batch, head, row, col); absent if only weights are wanted */
    struct cattn_tensor weights;      /* optional: after softmax, before dropout */
    struct cattn_tensor lse;          /* optional: (batch, head, row) */
    struct cattn_tensor dropout_mask; /* optional: bytes, 1 = kept */

    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* One tangent for each input, shaped and typed like it, or absent. With two biases, `bias` is the tangent of bias[1].
 * out and lse are the derivatives of the results in this direction. Not allowed together with quantized keys and
 * values, key_indices, packed sequences or dropout.torch. */
struct cattn_tangents {
    struct cattn_tensor query, key, value, bias, sinks;
    struct cattn_tensor out; /* stored as forward.out */
    struct cattn_tensor lse; /* in the dtype of the computation */
};

/* The derivatives of attention's results in a direction; `tangents.lse` may be absent. out and lse of `forward` are
 * computed first, unless `has_results`. */
struct cattn_jvp_params {
    bool has_results;
    struct cattn_tangents tangents;
    struct cattn_attention_params forward;
};

/* Which axis of the scores the gradient of the bias is summed over while it is computed. */
enum cattn_bias_sum { CATTN_BIAS_NO_SUM = 0, CATTN_BIAS_SUM_ROWS, CATTN_BIAS_SUM_COLS };

/* Which result does not fit: the weights computed from the lse do not sum to 1; or they do, and the gradient of the
 * scores does not sum to 0; or the same of the tangents. */
enum cattn_misfit_kind { CATTN_MISFIT_LSE, CATTN_MISFIT_OUT, CATTN_MISFIT_LSE_TANGENT, CATTN_MISFIT_OUT_TANGENT };

/* The first row whose results cannot come from the forward pass with the same arguments. */
struct cattn_misfit {
    bool found;
    enum cattn_misfit_kind kind;
    int64_t batch, head, row; /* of the tensors: in packed sequences the row counts from the first of them */
    double weights;           /* their sum, the weight of the sink included */
};

/* Gradients of a scalar function of attention's output and log-sum-exp. out and lse of `forward` are inputs here: the
 * results of the forward pass with the same arguments. weights and dropout_mask are absent. grad_out is stored as
 * query. The gradients have the dtype of the computation and unit column strides; all but grad_query and grad_gate are
 * 0 on entry. */
struct cattn_backward_params {
    struct cattn_misfit *misfit; /* receives the first row that does not fit; NULL: nothing is checked */
    enum cattn_bias_sum bias_sum;
    bool plain_out; /* forward.out and tangents.out have the dtype of the computation, even if the others are halves */
    /* Differentiate attention_jvp instead. grad_out and grad_lse are the gradients of its two results, tangents.out and
     * tangents.lse, which are inputs here. */
    bool of_tangents;
    struct cattn_tensor grad_out;             /* (batch, head, row, col) */
    struct cattn_tensor grad_lse;             /* (batch, head, row), float64 whatever the dtype; or absent */
    struct cattn_tensor grad_query;           /* (batch, head, row, col) */
    struct cattn_tensor grad_key, grad_value; /* (batch, key-value head, row, col) */
    /* Or absent. NO_SUM: (batch, head, row, col), where batch entries and heads with stride 0 share one matrix.
     * SUM_ROWS: (batch, head, col). SUM_COLS: (batch, head, row); no stride is 0 in either. */
    struct cattn_tensor grad_bias;
    struct cattn_tensor grad_sinks; /* (batch, head), or absent */
    struct cattn_tensor grad_gate;  /* (batch, head, row, col), which is written; or absent */
    struct cattn_tangents tangents; /* read if of_tangents */
    struct cattn_attention_params forward;
};

/* Statistics of the attention weights, which are never stored as a whole. `forward` describes the weights, without
 * dropout; value, out and weights are absent, and lse takes float64. All results have the dtype of the computation and
 * unit stride along the last axis. */
struct cattn_statistics_params {
    int64_t top_k;
    int64_t observation_window; /* the last queries of each batch entry that column sums count; or CATTN_UNBOUNDED */
    struct cattn_tensor rows[CATTN_N_ROW_STATISTICS]; /* (batch, head, row); or absent */
    struct cattn_tensor top_keys, top_weights;        /* (batch, head, row, top_k), int64 and weights; if top_k > 0 */
    struct cattn_tensor received, received_max;       /* (batch, head, col), 0 on entry; or absent */
    struct cattn_attention_params forward;
};

enum cattn_softmax_method {
    CATTN_SOFTMAX_PLAIN = 0,   /* hidden elements take no part and become 0; a row whose visible ones are -inf is NaN */
    CATTN_SOFTMAX_RENORMALIZE, /* softmax over all elements, then zero the hidden ones and divide by the rest's sum */
};

/* Softmax over the `col` axis of x. All other axes are batch dimensions; with is_causal the last of them is the query
 * axis, and `ranges` gives the visible columns of its row i. */
struct cattn_softmax_params {
    enum cattn_dtype dtype;
    enum cattn_storage storage; /* of x and out */
    enum cattn_softmax_method method;
    bool out_is_new; /* out was just allocated: its pages have never been written */
    bool is_causal;
    int n_batch_dims;
    int num_threads;
    int64_t n_rows; /* product of batch_shape; any number if n_cols is 0 */
    int64_t n_cols;
    double scale;
    struct cattn_poll poll;
    struct cattn_ranges ranges; /* read only if is_causal */
    struct cattn_tensor x, out; /* batch and col strides; out may be x itself with the same strides */
    struct cattn_tensor mask;   /* bytes, 0 hides the element; or absent */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* Writes which keys each query sees, one byte each. */
struct cattn_mask_params {
    int64_t seqlen_q, seqlen_k;
    struct cattn_ranges ranges;
    uint8_t *mask; /* [seqlen_q][seqlen_k] */
    int num_threads;
    struct cattn_poll poll;
};

/* The gradient of a softmax over the `col` axis, from its result and the gradient of its result. */
struct cattn_softmax_backward_params {
    enum cattn_dtype dtype;
    int n_batch_dims;
    int num_threads;
    int64_t n_rows; /* product of batch_shape; any number if n_cols is 0 */
    int64_t n_cols;
    double scale;
    struct cattn_poll poll;
    struct cattn_tensor grad, weights, out; /* batch and col strides; out may be one of the others, same strides */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* out = x * keep_scale where the element is kept, +0 where it is dropped. Element i in C order has the i-th bit. */
struct cattn_dropout_params {
    enum cattn_dtype dtype;
    enum cattn_storage storage; /* of x and out */
    int n_batch_dims;
    int num_threads;
    int64_t n_rows, n_cols;
    struct cattn_dropout_spec dropout;
    struct cattn_poll poll;
    struct cattn_tensor x, out; /* batch and col strides; out may be x itself with the same strides */
    struct cattn_tensor mask;   /* optional output: bytes, 1 = kept */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* How the inverse frequencies of rotary positions differ from theta^(-2i / rotary_dim). */
enum cattn_rope_type {
    CATTN_ROPE_DEFAULT = 0,
    CATTN_ROPE_LINEAR,
    CATTN_ROPE_DYNAMIC,
    CATTN_ROPE_YARN,
    CATTN_ROPE_LLAMA3
};

/* The numbers of a rope_scaling of Hugging Face transformers; a type reads those that it knows. */
struct cattn_rope_scaling {
    enum cattn_rope_type type;
    bool truncate;                            /* yarn */
    double factor;                            /* >= 1; all but DEFAULT */
    double original_length;                   /* > 0; dynamic, yarn, llama3 */
    double low_freq_factor, high_freq_factor; /* llama3: 0 < low < high */
    double beta_fast, beta_slow;              /* yarn: > 0 */
    double attention_factor;       /* yarn: a factor of every sine and cosine, or 0: it follows from factor */
    double mscale, mscale_all_dim; /* yarn: and from these two, unless one is 0 */
};

/* Rotates pairs of columns of x by the angle position * frequency: of the first rotary_dim columns, column i with
 * column i + rotary_dim / 2, or neighbours if interleaved. The other columns are copied. */
struct cattn_rope_params {
    enum cattn_dtype dtype;
    enum cattn_storage storage; /* of x and out */
    bool interleaved;
    bool inverse; /* by the negative angle */
    int n_batch_dims;
    int num_threads;
    int64_t n_batch; /* product of batch_shape; or 0 if x is empty */
    int64_t seqlen;
    int64_t n_cols, rotary_dim; /* rotary_dim is even, and at least 4 with CATTN_ROPE_DYNAMIC */
    double theta;               /* >= 1, and > 1 with CATTN_ROPE_YARN */
    double length;              /* the largest position + 1; read by CATTN_ROPE_DYNAMIC */
    struct cattn_rope_scaling scaling;
    struct cattn_poll poll;
    struct cattn_tensor x, out; /* batch, row and col strides; out may be x itself with the same strides */
    /* double, batch and row strides: each from -CATTN_MAX_POSITION to CATTN_MAX_POSITION. If absent: 0, 1, 2, ... */
    struct cattn_tensor positions;
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};
#define CATTN_MAX_POSITION 0x1p53

/* out = x / sqrt(mean of the row's squares + eps) * weight + bias; centred: of x minus its row's mean. */
struct cattn_norm_params {
    enum cattn_dtype dtype;
    enum cattn_storage storage; /* of x and out */
    bool centred;               /* a layer norm; else an RMS norm */
    int n_batch_dims;
    int num_threads;
    int64_t n_rows; /* product of batch_shape; any number if n_cols is 0 */
    int64_t n_cols;
    double eps; /* >= 0 */
    struct cattn_poll poll;
    struct cattn_tensor x, out;       /* batch and col strides; out may be x itself with the same strides */
    struct cattn_tensor weight, bias; /* col stride, in the dtype of the computation; each may be absent */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* The gradients of a norm, in the dtype of the computation. They do not depend on the bias. */
struct cattn_norm_backward_params {
    enum cattn_dtype dtype;
    bool centred;
    int n_batch_dims;
    int num_threads;
    int64_t n_rows; /* product of batch_shape; any number if n_cols is 0 */
    int64_t n_cols;
    double eps;
    struct cattn_poll poll;
    struct cattn_tensor grad, x, grad_x; /* batch and col strides; grad_x may be one of the others, same strides */
    struct cattn_tensor weight;          /* col stride; or absent */
    struct cattn_tensor grad_weight,
        grad_bias; /* col stride; each may be absent, and grad_weight is without a weight */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* out = f(x) or, if grad is present, grad * f'(x) */
struct cattn_activation_params {
    enum cattn_activation which;
    enum cattn_dtype dtype;
    enum cattn_storage storage; /* of all tensors */
    int n_batch_dims;
    int num_threads;
    int64_t n_rows; /* product of batch_shape; any number if n_cols is 0 */
    int64_t n_cols;
    struct cattn_poll poll;
    struct cattn_tensor x, grad, out; /* batch and col strides; out may be one of the others, same strides */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* A matrix of a product: strides in elements. A quantized one has float32 scales, each from CATTN_LEAST_SCALE to
 * CATTN_LARGEST_SCALE; stride 0 where elements share a scale. */
struct cattn_operand {
    enum cattn_storage storage;
    const void *data;
    int64_t batch, row, col;
    const float *scale;
    int64_t scale_batch, scale_row, scale_col;
};

/* out[i][j] = the sum over d of a[i][d] * b[j][d], plus bias[i][j]; for each of n_batch pairs of matrices. */
struct cattn_product_params {
    enum cattn_dtype dtype;
    enum cattn_bf16_products bf16_products; /* of a and b; only with dtype float32 */
    int num_threads;
    int64_t n_batch;
    int64_t n_a, n_b; /* rows */
    int64_t depth;    /* columns of a and b */
    struct cattn_poll poll;
    struct cattn_operand a, b;
    enum cattn_storage out_storage;
    void *out;
    int64_t out_batch, out_a, out_b;
    const void *bias; /* in the dtype of the computation, with bias_a or bias_b 0; or NULL */
    int64_t bias_batch, bias_a, bias_b;
};

/* Linear attention with a state S of shape (d_k, d_v) for each head. For each token:
 * S = exp(decay) S; u = beta * (v - S' k), or v without beta; S = S + k u'; out = scale * S' q.
 * There are n_states heads. key_heads and value_heads divide that number, and one of them is it. query_heads divides it
 * or is a multiple of it. Output has the larger number of heads of the two. */
struct cattn_linear_attention_params {
    enum cattn_dtype dtype;     /* of the computation, decay, beta and the states */
    enum cattn_storage storage; /* of query, key, value and out */
    bool decay_by_row;          /* decay has one number for each row of S, else one for a token */
    int n_batch_dims;
    int num_threads;
    int64_t n_batch; /* product of batch_shape */
    int64_t n_states, query_heads, key_heads, value_heads;
    int64_t seqlen, d_k, d_v;
    int64_t length; /* tokens from there on have no effect, if `lengths` is absent */
    double scale;
    /* Packed sequences: entry b has the rows edges[b] .. edges[b + 1] - 1. Only states have batch strides. Or NULL. */
    const int64_t *edges;
    struct cattn_poll poll;
    struct cattn_tensor query, key, value; /* (batch, head, row, col) */
    struct cattn_tensor decay;             /* the same, col only if decay_by_row; or absent: 0 */
    struct cattn_tensor beta;              /* (batch, head, row); or absent */
    struct cattn_tensor state, state_out;  /* (batch, head, d_k, d_v); each may be absent, and they may be the same */
    struct cattn_tensor lengths;           /* of the batch entries: int64, batch strides; or absent */
    struct cattn_tensor out;               /* (batch, head, row, col); 0 for tokens without effect */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* Its gradients, in the dtype of the computation and with unit stride along rows, for each head of the output (of
 * queries) and of the states (all others): sums over repeated heads are left to the caller. */
struct cattn_linear_attention_backward_params {
    struct cattn_tensor grad_out;   /* stored as query, with the heads of out */
    struct cattn_tensor grad_final; /* of state_out, in the dtype of the computation; or absent */
    struct cattn_tensor grad_query, grad_key, grad_value;
    struct cattn_tensor grad_decay, grad_beta;    /* absent as decay and beta are */
    struct cattn_tensor grad_state;               /* or absent */
    struct cattn_linear_attention_params forward; /* without out and state_out */
};

/* For each channel: out[t] = f(the sum over j of weight[j] * x[t - width + 1 + j], plus bias). Rows before the first
 * one come from the state; without a state they take no part. */
struct cattn_conv_params {
    enum cattn_dtype dtype;     /* of the computation, weight and bias */
    enum cattn_storage storage; /* of x, out and the states */
    bool silu;                  /* f; else the identity */
    int n_batch_dims;
    int num_threads;
    int64_t n_batch; /* product of batch_shape */
    int64_t seqlen, n_channels, width;
    int64_t length;       /* tokens from there on have no effect, if `lengths` is absent */
    const int64_t *edges; /* packed sequences, as in struct cattn_linear_attention_params; or NULL */
    int64_t longest;      /* of the packed sequences */
    struct cattn_poll poll;
    struct cattn_tensor x, out;           /* (batch, row, col): tokens and channels */
    struct cattn_tensor weight, bias;     /* (channel, place) as row and col; col; bias may be absent */
    struct cattn_tensor state, state_out; /* (batch, width - 1, channel); each may be absent, they may be the same */
    struct cattn_tensor lengths;          /* of the batch entries: int64, batch strides; or absent */
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
};

/* Choosing the keys that attention is to read. `forward` says which keys a query sees, has the scale, and query, key,
 * attn_mask and bias, the latter two with one row for all heads; it has no value and no results. The score of a key is
 * the sum over the query heads of weight * act(scale * q k), plus the bias. Blocks of block_size keys, counted from the
 * first valid one, are chosen by the largest score of their visible keys: `count` blocks, ties to the lower one. NaN
 * loses to all other scores, and hidden keys are never chosen. */
struct cattn_choice_params {
    bool relu; /* act; else the identity */
    /* key has one row for each whole block, the first of which begins at the first valid key. A block is chosen if all
     * of its keys are visible; visible keys of other blocks are chosen besides. attn_mask and bias are of blocks. */
    bool pooled;
    int64_t count, block_size;   /* >= 1 */
    int64_t first, last;         /* so many first and last blocks with a visible key are chosen in any case */
    int64_t n_columns;           /* of the results */
    struct cattn_tensor weights; /* (batch, head, row), in the dtype of the computation; or absent: 1 */
    struct cattn_tensor indices; /* int32, (batch, row, col): the keys in ascending order, then -1 */
    struct cattn_tensor
        scores; /* (batch, row, col), in the dtype of the computation: -inf at -1, NaN without a score */
    struct cattn_attention_params forward;
};

/* Each zeroes the scalars of a params struct and makes every tensor absent; the contents of the arrays are arbitrary.
 * The binding begins with it. */
void cattn_clear_attention(struct cattn_attention_params *params);
void cattn_clear_jvp(struct cattn_jvp_params *params);
void cattn_clear_backward(struct cattn_backward_params *params);
void cattn_clear_statistics(struct cattn_statistics_params *params);
void cattn_clear_choice(struct cattn_choice_params *params);
void cattn_clear_softmax(struct cattn_softmax_params *params);
void cattn_clear_softmax_backward(struct cattn_softmax_backward_params *params);
void cattn_clear_dropout(struct cattn_dropout_params *params);
void cattn_clear_rope(struct cattn_rope_params *params);
void cattn_clear_norm(struct cattn_norm_params *params);
void cattn_clear_norm_backward(struct cattn_norm_backward_params *params);
void cattn_clear_activation(struct cattn_activation_params *params);
void cattn_clear_linear_attention(struct cattn_linear_attention_params *params);
void cattn_clear_conv(struct cattn_conv_params *params);
void cattn_clear_linear_attention_backward(struct cattn_linear_attention_backward_params *params);
void cattn_clear_product(struct cattn_product_params *params);

/* All of `spec` but the seed or the generator, for a dropout with probability p, 0 <= p <= 1. */
void cattn_set_dropout(struct cattn_dropout_spec *spec, double p);

/* Whether all counts of rows, tasks, pairs and bytes of scratch fit in 64 bits. Memory bounds the sizes of most arrays,
 * but not of those that repeat one element (stride 0). All other functions of attention demand that it is true. */
bool cattn_attention_counts_fit(const struct cattn_attention_params *params);
/* Whether params->path can compute this problem: CATTN_PATH_TINY is limited in size. */
bool cattn_attention_path_fits(const struct cattn_attention_params *params);
enum cattn_status cattn_attention(const struct cattn_attention_params *params);
enum cattn_status cattn_attention_backward(const struct cattn_backward_params *params);
enum cattn_status cattn_attention_jvp(const struct cattn_jvp_params *params);
/* The same with key_indices: what the first two functions compute from the gathered keys of each query. */
enum cattn_status cattn_gathered_attention(const struct cattn_attention_params *params);
enum cattn_status cattn_gathered_backward(const struct cattn_backward_params *params);
/* Also computes the forward pass, as far as lse needs it. */
enum cattn_status cattn_attention_statistics(const struct cattn_statistics_params *params);
enum cattn_status cattn_choose_keys(const struct cattn_choice_params *params);
enum cattn_status cattn_softmax(const struct cattn_softmax_params *params);
enum cattn_status cattn_mask(const struct cattn_mask_params *params);
enum cattn_status cattn_softmax_backward(const struct cattn_softmax_backward_params *params);
enum cattn_status cattn_dropout(const struct cattn_dropout_params *params);
enum cattn_status cattn_rope(const struct cattn_rope_params *params);
enum cattn_status cattn_product(const struct cattn_product_params *params);
enum cattn_status cattn_norm(const struct cattn_norm_params *params);
enum cattn_status cattn_norm_backward(const struct cattn_norm_backward_params *params);
enum cattn_status cattn_activate(const struct cattn_activation_params *params);
enum cattn_status cattn_causal_conv(const struct cattn_conv_params *params);
enum cattn_status cattn_linear_attention(const struct cattn_linear_attention_params *params);
enum cattn_status cattn_linear_attention_backward(const struct cattn_linear_attention_backward_params *params);

/* How cattn_attention would compute a call. Explaining reads the block mask, but no other element, and computes the
 * range of every row. */
struct cattn_explanation {
    enum cattn_path path;
    int64_t n_tasks;         /* handed to threads */
    int64_t task_rows;       /* most rows of a task */
    int64_t n_visited;       /* pairs of a block of rows and a key block that are computed */
    int64_t n_skipped;       /* pairs that are not: ranges and block mask hide the key block from all rows */
    int64_t n_keys;          /* pairs of a row and a key that these leave visible */
    cattn_size scratch_size; /* a thread */
};
enum cattn_status cattn_attention_explain(const struct cattn_attention_params *params,
                                          struct cattn_explanation *explanation);

/* Rough cost of a call in multiply-adds. Calls of a few microseconds keep the GIL. */
double cattn_attention_work(const struct cattn_attention_params *params);

/* ---- kernel tables (dispatch.c): one per instruction set, chosen once; tests switch ---- */
struct cattn_isa_info {
    const char *name;
    bool usable;    /* this CPU can run it */
    bool has_fma;   /* products and sums are rounded once, as the bit contract requires */
    bool test_only; /* used only if selected by name */
    int lanes_f32, mr, nr, br;
};
int cattn_isa_count(void);
struct cattn_isa_info cattn_isa_info(int index);
/* Index of the table in use. */
int cattn_isa_current(void);
/* NULL selects the best table. False: there is no table of this name, or this CPU cannot run it. */
bool cattn_isa_select(const char *name);
/* Whether the compiler kept the arithmetic of the source for this table. True for a table that this CPU cannot run. */
bool cattn_isa_keeps_arithmetic(int index);
/* Whether the table in use rounds products and sums separately although this CPU has an FMA. */
bool cattn_isa_wastes_fma(void);
/* Whether products in tiles have instructions with the table in use. The system is asked for them, as by a call. */
bool cattn_isa_has_tiles(void);
/* Keys of a key block and of a key chunk, constants of the bit contract. */
int64_t cattn_block_keys(void);
int64_t cattn_chunk_keys(void);

/* Besides the module's init function, two functions are exported, because threadpoolctl calls them. Windows has an
 * attribute of its own for that. */
#if __has_attribute(dllexport)
#define CATTN_EXPORT __attribute__((dllexport))
#else
#define CATTN_EXPORT __attribute__((visibility("default")))
#endif

/* ---- threads (thread_count.c, parallel.c) ---- */
/* In order of precedence: the thread's override, the process's setting, the environment's count. */
CATTN_EXPORT int cattn_get_num_threads(void);
/* Whether `text` is a valid value of CATTN_NUM_THREADS. */
bool cattn_is_thread_count(const char *text);
/* n >= 1 sets the process's count; 0 returns to the environment's. */
CATTN_EXPORT void cattn_set_num_threads(int n);
/* Sets this thread's override (the num_threads context): n >= 1, or 0 for none. Returns the previous one. */
int cattn_override_num_threads(int n);
/* Stops the workers and frees all scratch; the next call starts new ones. False: another thread is computing. */
bool cattn_release(void);

/* Number of forks between the process that loaded this library and this one. A lock or condition that was made at
 * another count may be held, or waited at, by a thread that this process does not have. */
unsigned cattn_fork_count(void);

/* The calling thread sleeps, or yields its processor where the system's timer is coarser (os_*.c). */
void cattn_sleep_ns(int64_t nanoseconds);

#endif
