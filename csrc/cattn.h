/* cattn.h -- the core's C API: what the binding fills in, and the calls that run it.
 *
 * Plain data only: no Python object and no vector type crosses this header. All strides count ELEMENTS of the tensor's
 * own type; they may be negative or 0. The caller has checked shapes, types and alignment, and that no size overflows:
 * the only things that can go wrong below are memory and an interrupt.
 */
#ifndef CATTN_H
#define CATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dtype.h"

enum cattn_status { CATTN_OK = 0, CATTN_NO_MEMORY, CATTN_INTERRUPTED };

/* How attention is computed. The results have the same bits on every path; AUTO picks the fastest. */
enum cattn_path {
    CATTN_PATH_AUTO = 0,
    CATTN_PATH_TILE,  /* blocks of queries against blocks of keys */
    CATTN_PATH_ROWS,  /* few queries: keys and values stream by */
    CATTN_PATH_SPLIT, /* as ROWS, key chunks handed to threads */
    CATTN_PATH_TINY   /* small inputs: one key block, no plan, no threads */
};

/* NumPy arrays have at most 64 dimensions; the last one is always ours. */
#define CATTN_MAX_BATCH_DIMS 64

/* A strided view. `lead` has one stride for each leading dimension of the call (0 where the tensor broadcasts);
 * an absent tensor has data == NULL and nothing else set. */
struct cattn_tensor {
    void *data;
    int64_t head; /* stride of the head axis */
    int64_t row;  /* stride of the query or key axis */
    int64_t col;  /* stride of the last axis */
    int64_t batch[CATTN_MAX_BATCH_DIMS];
};

/* Called on the calling thread every few ten milliseconds; true asks the computation to stop. */
struct cattn_poll {
    bool (*stop)(void *context);
    void *context;
};

struct cattn_torch_random; /* core/torch_random.h */

/* Random bits of a dropout: Philox4x32-10 with this key, compared with `threshold` (keep if below; in 2^-32). Where
 * `torch` is set, bits are drawn from it in row-major order instead. */
struct cattn_dropout_spec {
    bool enabled;
    struct cattn_torch_random *torch;
    double keep_probability; /* 1 - p */
    uint64_t seed;
    uint64_t threshold; /* round((1 - p) * 2^32), 0 .. 2^32 */
    double keep_scale;  /* 1 / (1 - p); 0 for p = 1 */
};

#define CATTN_MAX_BIAS 2
#define CATTN_UNBOUNDED INT64_MAX
/* Offsets lie within +-this, so that no position and no end of a window leaves int64. */
#define CATTN_MAX_OFFSET ((int64_t)1 << 61)

/* Which keys a query may see, as far as that is one range of keys: query i stands at position p = i + offset and sees
 * the keys p - left .. p + right among the first key_length ones. Queries from query_length on see none. The tensors
 * are int64 and have lead strides only; where one is absent, its number holds for the whole batch. */
struct cattn_ranges {
    int64_t left, right; /* >= 0, or CATTN_UNBOUNDED; causal: right is 0 */
    bool lower_right;    /* offset is key_length - query_length, of each batch; else as given */
    bool all_visible;    /* positions count, ranges do not: every query sees all seqlen_k keys */
    int64_t seqlen_k;
    int64_t offset, query_length, key_length;
    struct cattn_tensor offsets, query_lengths, key_lengths;
};

struct cattn_attention_params {
    enum cattn_dtype dtype;     /* computed in; of bias, slopes, sinks and lse */
    bool double_lse;            /* lse is float64, whatever the dtype: with the digits that float32 has no room for */
    enum cattn_storage storage; /* of query, key, value, out and weights */
    int n_batch_dims;
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
    int64_t n_batch;    /* product of lead_shape */
    int64_t num_heads;  /* query heads */
    int64_t group_size; /* query heads that read one key-value head */
    int64_t seqlen_q, seqlen_k, head_dim, d_v;
    double scale;

    struct cattn_tensor query, key, value; /* value: absent if and only if d_v is 0 and out is absent */
    struct cattn_tensor attn_mask;         /* bytes, not 0 = keep; (lead, head, row, col); or absent */
    int n_bias;
    struct cattn_tensor bias[CATTN_MAX_BIAS]; /* added to the scaled scores; -inf masks */
    struct cattn_ranges ranges;
    /* Packed sequences: query, key, value, out and lse have one row axis for the whole batch, in which each leading
     * index starts at these rows (int64, lead strides) and has its lengths of ranges; dropout.torch is absent, having
     * no order there. Absent: no. */
    struct cattn_tensor query_starts, key_starts;
    double softcap;             /* softcap * tanh(score / softcap), before everything added; 0: none */
    struct cattn_tensor slopes; /* of ALiBi, > 0, lead and head strides; or absent */
    struct cattn_tensor sinks;  /* a score that only the sum takes part of, in the same way */
    struct cattn_dropout_spec dropout;

    struct cattn_tensor out;          /* (lead, head, row, col); absent for weights alone */
    struct cattn_tensor weights;      /* optional: after softmax, before dropout */
    bool store_scores;                /* weights are the scores instead, -inf where a key is hidden */
    struct cattn_tensor lse;          /* optional: (lead, head, row) */
    struct cattn_tensor dropout_mask; /* optional: bytes, 1 = kept */

    int num_threads;
    enum cattn_path path;
    struct cattn_poll poll;
};

/* Which axes of the scores the gradient of the bias is summed over while it is computed. */
enum cattn_bias_sum { CATTN_BIAS_NO_SUM = 0, CATTN_BIAS_SUM_ROWS, CATTN_BIAS_SUM_COLS };

/* Gradients of a scalar function of attention's output. Of `forward`, out and lse are inputs: what it computed with the
 * same arguments; weights and dropout_mask are absent. grad_out is stored as out. The gradients are of the dtype
 * computed in and have unit column strides; all but grad_query are 0 on entry. */
struct cattn_backward_params {
    struct cattn_attention_params forward;
    struct cattn_tensor grad_out;             /* (lead, head, row, col) */
    struct cattn_tensor grad_query;           /* (lead, head, row, col) */
    struct cattn_tensor grad_key, grad_value; /* (lead, key-value head, row, col) */
    /* Or absent. NO_SUM: (lead, head, row, col), where leading indices and heads with stride 0 share one matrix.
     * SUM_ROWS: (lead, head, col). SUM_COLS: (lead, head, row); no stride is 0 in either. */
    struct cattn_tensor grad_bias;
    enum cattn_bias_sum bias_sum;
    struct cattn_tensor grad_sinks; /* (lead, head), or absent */
};

enum cattn_softmax_method {
    CATTN_SOFTMAX_PLAIN = 0,   /* hidden elements take no part: 0; if all visible ones are -inf they are NaN */
    CATTN_SOFTMAX_RENORMALIZE, /* softmax over everything, zero the masked, divide by what is left */
};

/* Softmax over the `col` axis of x. The `lead` dimensions are all others; with is_causal the last of them is the query
 * axis, and the ranges say what its row i sees. */
struct cattn_softmax_params {
    enum cattn_dtype dtype;
    enum cattn_storage storage; /* of x and out */
    enum cattn_softmax_method method;
    int n_batch_dims;
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
    int64_t n_rows; /* product of lead_shape */
    int64_t n_cols;
    double scale;
    struct cattn_tensor x, out; /* lead and col strides; out may be x itself, same strides */
    struct cattn_tensor mask;   /* bytes, not 0 = keep; or absent */
    bool out_is_new;            /* nothing was ever written there */
    bool is_causal;
    struct cattn_ranges ranges; /* read only if is_causal */
    int num_threads;
    struct cattn_poll poll;
};

/* Which keys each query sees, as a byte each. */
struct cattn_mask_params {
    int64_t seqlen_q, seqlen_k;
    struct cattn_ranges ranges;
    uint8_t *mask; /* [seqlen_q][seqlen_k] */
    int num_threads;
    struct cattn_poll poll;
};

/* The gradient of a softmax over the `col` axis, given its result and the gradient of that. */
struct cattn_softmax_backward_params {
    enum cattn_dtype dtype;
    int n_batch_dims;
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
    int64_t n_rows; /* product of lead_shape */
    int64_t n_cols;
    double scale;
    struct cattn_tensor grad, weights, out; /* lead and col strides; out may be either of the others, same strides */
    int num_threads;
    struct cattn_poll poll;
};

/* out = keep ? x * keep_scale : +0, the keep bit drawn for the element's index in C order. */
struct cattn_dropout_params {
    enum cattn_dtype dtype;
    enum cattn_storage storage; /* of x and out */
    int n_batch_dims;
    int64_t batch_shape[CATTN_MAX_BATCH_DIMS];
    int64_t n_rows, n_cols;
    struct cattn_dropout_spec dropout;
    struct cattn_tensor x, out; /* lead and col strides; out may be x itself, same strides */
    struct cattn_tensor mask;   /* optional output: bytes, 1 = kept */
    int num_threads;
    struct cattn_poll poll;
};

/* False where a count of rows, tasks, pairs or bytes of scratch would leave 64 bits. Sizes of arrays that repeat one
 * element (stride 0) know no other bound; everything below may be asked only if this is true. */
bool cattn_attention_counts_fit(const struct cattn_attention_params *params);
/* False where a forced params->path cannot run this problem (CATTN_PATH_TINY beyond its size). */
bool cattn_attention_path_fits(const struct cattn_attention_params *params);
enum cattn_status cattn_attention(const struct cattn_attention_params *params);
enum cattn_status cattn_attention_backward(const struct cattn_backward_params *params);
enum cattn_status cattn_softmax(const struct cattn_softmax_params *params);
enum cattn_status cattn_mask(const struct cattn_mask_params *params);
enum cattn_status cattn_softmax_backward(const struct cattn_softmax_backward_params *params);
enum cattn_status cattn_dropout(const struct cattn_dropout_params *params);

/* How cattn_attention would go about it. Reads no element, but looks at the range of every row. */
struct cattn_explanation {
    enum cattn_path path;
    int64_t n_tasks;     /* shared out to threads */
    int64_t block_rows;  /* rows of a task at most */
    int64_t n_visited;   /* pairs of a block of rows and a block of keys that are computed */
    int64_t n_skipped;   /* those that no row of the block sees by its range */
    int64_t n_keys;      /* pairs of a row and a key in its range */
    size_t scratch_size; /* bytes a thread */
};
enum cattn_status cattn_attention_explain(const struct cattn_attention_params *params,
                                          struct cattn_explanation *explanation);

/* Rough cost of a call in multiply-adds: the binding keeps the GIL below a few microseconds of it. */
double cattn_attention_work(const struct cattn_attention_params *params);

/* ---- dispatch: one kernel table per instruction set, chosen once, switchable for tests ---- */
struct cattn_isa_info {
    const char *name;
    bool usable;    /* this CPU can run it */
    bool has_fma;   /* inside the bit contract */
    bool test_only; /* never chosen unless asked for by name */
    int lanes_f32, mr, nr, br;
};
int cattn_isa_count(void);
struct cattn_isa_info cattn_isa_info(int index);
/* index of the table in use */
int cattn_isa_current(void);
/* false: no table of this name, or this CPU cannot run it. NULL picks the best. */
bool cattn_isa_select(const char *name);
/* key block and key chunk, constants of the bit contract */
int64_t cattn_block_keys(void);
int64_t cattn_chunk_keys(void);

/* ---- threads (parallel.c) ---- */
/* Precedence of the count: the thread's own override, the process's setting, what the environment allows. */
int cattn_get_num_threads(void);
/* Whether CATTN_NUM_THREADS may have this text. */
bool cattn_is_thread_count(const char *text);
/* n >= 1 sets the process's count, 0 returns to the environment's */
void cattn_set_num_threads(int n);
/* This thread's override (the num_threads context): n >= 1, or 0 for none. Returns the one before. */
int cattn_override_num_threads(int n);
/* Stop the workers and free all scratch; the next call starts anew. False while another thread computes. */
bool cattn_release(void);

/* Forks between this process and the one that loaded us. In the child, locks and conditions from before may be held, or
 * waited at, by threads that it does not have. */
unsigned cattn_fork_count(void);
/* Is `thread`, a pthread_t of when there had been fork_count forks, one that a fork has left behind since? */
bool cattn_left_behind(unsigned long thread, unsigned fork_count);

#endif
