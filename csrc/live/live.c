/* live.c -- the functions that the live page calls from JavaScript, for whole arrays of float32 in C order.
 *
 * Compiled for WebAssembly only, with the forward kernels of float32 (nox -s live). JavaScript passes addresses in the
 * module's memory and numbers that it has checked; each function returns a cattn_status. The functions of Python with
 * the same arguments have the same bits.
 */
#include "../call/operands.h"
#include "../torch_random.h"

#include <stdlib.h>

#ifdef __wasm__
#define EXPORT(name) __attribute__((export_name(#name)))
#else
#define EXPORT(name)
#endif

EXPORT(allocate) void *live_allocate(size_t size) { return malloc(size); }
EXPORT(release) void live_release(void *memory) { free(memory); }

/* An array (head, row, col). */
static struct cattn_tensor in_order(void *data, int64_t n_rows, int64_t n_cols) {
    struct cattn_tensor tensor = {.data = data, .head = n_rows * n_cols, .row = n_cols, .col = 1};
    return tensor;
}

/* Dropout by PyTorch's generator, which draws nothing if everything is dropped. */
static void set_dropout(struct cattn_dropout_spec *spec, double p, double seed, struct cattn_torch_random *random) {
    random->stream = CATTN_TORCH_ATEN;
    cattn_torch_seed(random, (uint64_t)seed);
    cattn_set_dropout(spec, p);
    spec->torch = spec->enabled && spec->keep_probability > 0 ? random : NULL;
}

/* The sizes of a call, and its numbers; JavaScript writes them as doubles, in this order. */
struct live_attention {
    double heads, seqlen_q, seqlen_k, head_dim, d_v;
    double scale, softcap;
    double is_causal, left, right; /* of the window; negative: no bound */
    double offset, first_key;
    double dropout_p, seed; /* of PyTorch's generator */
};

static void set_ranges(const struct live_attention *call, struct cattn_ranges *ranges) {
    ranges->left = call->left < 0 ? CATTN_UNBOUNDED : (int64_t)call->left;
    ranges->right = call->is_causal > 0 ? 0 : call->right < 0 ? CATTN_UNBOUNDED : (int64_t)call->right;
    ranges->query_length = (int64_t)call->seqlen_q;
    ranges->key_length = ranges->seqlen_k = (int64_t)call->seqlen_k;
    ranges->offset = (int64_t)call->offset;
    ranges->first_key = (int64_t)call->first_key;
}

/* Attention up to a stage. `value` is read and `result` is the output at the last stage; before it the result is
 * scores or weights. mask (row, col), slopes and sinks (head) may be absent. */
EXPORT(attention)
int live_attention(const struct live_attention *call, int stage, float *query, float *key, float *value, uint8_t *mask,
                   float *slopes, float *sinks, float *result) {
    static struct cattn_attention_params p; /* ten KB of strides, on the stack of a page */
    struct cattn_torch_random random;
    uint8_t *kept = NULL;
    cattn_clear_attention(&p);
    p.num_threads = 1;
    p.n_batch = p.group_size = 1;
    p.num_heads = (int64_t)call->heads;
    p.seqlen_q = (int64_t)call->seqlen_q;
    p.seqlen_k = (int64_t)call->seqlen_k;
    p.head_dim = (int64_t)call->head_dim;
    p.score_options.scale = call->scale;
    p.score_options.softcap = call->softcap;
    set_ranges(call, &p.ranges);
    p.query = in_order(query, p.seqlen_q, p.head_dim);
    p.key = in_order(key, p.seqlen_k, p.head_dim);
    if (mask)
        p.attn_mask = (struct cattn_tensor){.data = mask, .row = p.seqlen_k, .col = 1};
    if (slopes)
        p.slopes = (struct cattn_tensor){.data = slopes, .head = 1};
    if (sinks)
        p.sinks = (struct cattn_tensor){.data = sinks, .head = 1};
    set_dropout(&p.dropout, call->dropout_p, call->seed, &random);
    cattn_stop_at(&p, (enum cattn_stage)stage);
    if (stage == CATTN_STAGE_OUT) {
        p.d_v = (int64_t)call->d_v;
        p.value = in_order(value, p.seqlen_k, p.d_v);
        p.out = in_order(result, p.seqlen_q, p.d_v);
    } else {
        p.weights = in_order(result, p.seqlen_q, p.seqlen_k);
    }
    const int64_t n = p.num_heads * p.seqlen_q * p.seqlen_k;
    if (p.dropout.enabled && stage == CATTN_STAGE_DROPOUT) { /* the core drops from the output only */
        if ((kept = malloc((size_t)n + 1)) == NULL)
            return CATTN_NO_MEMORY;
        p.dropout_mask = in_order(kept, p.seqlen_q, p.seqlen_k);
    }
    const enum cattn_status status = cattn_attention(&p);
    for (int64_t i = 0; kept && i < n; i++)
        result[i] = kept[i] ? result[i] * (float)p.dropout.keep_scale : 0;
    free(kept);
    return status;
}

/* The book's second method: a softmax of all scores, hidden ones become 0, and the others are divided by their sum. */
EXPORT(renormalized_softmax)
int live_renormalized_softmax(int heads, int n_rows, int n_cols, float *scores, uint8_t *mask, float *weights) {
    static struct cattn_softmax_params p;
    cattn_clear_softmax(&p);
    p.method = CATTN_SOFTMAX_RENORMALIZE;
    p.num_threads = 1;
    p.n_batch_dims = 2;
    p.batch_shape[0] = heads;
    p.batch_shape[1] = n_rows;
    p.n_rows = (int64_t)heads * n_rows;
    p.n_cols = n_cols;
    p.scale = 1;
    p.x = p.out = (struct cattn_tensor){.data = scores, .col = 1, .batch = {(int64_t)n_rows * n_cols, n_cols}};
    p.out.data = weights;
    p.mask = (struct cattn_tensor){.data = mask, .col = 1, .batch = {0, n_cols}};
    return cattn_softmax(&p);
}

EXPORT(dropout) int live_dropout(int n, float *x, double p, double seed, float *out) {
    static struct cattn_dropout_params params;
    struct cattn_torch_random random;
    cattn_clear_dropout(&params);
    params.num_threads = 1;
    params.n_rows = 1;
    params.n_cols = n;
    params.x = params.out = (struct cattn_tensor){.data = x, .col = 1};
    params.out.data = out;
    set_dropout(&params.dropout, p, seed, &random);
    return cattn_dropout(&params);
}

/* x (n_x, depth) times the rows of weight (n_w, depth), plus a bias (n_w) if there is one. */
EXPORT(linear) int live_linear(int n_x, int n_w, int depth, float *x, float *weight, float *bias, float *out) {
    struct cattn_product_params p = {.num_threads = 1, .n_batch = 1, .n_a = n_x, .n_b = n_w, .depth = depth};
    p.a = (struct cattn_operand){.data = x, .row = depth, .col = 1};
    p.b = (struct cattn_operand){.data = weight, .row = depth, .col = 1};
    p.out = out;
    p.out_a = n_w;
    p.out_b = 1;
    p.bias = bias;
    p.bias_b = 1;
    return cattn_product(&p);
}

/* The layer norm of each row, without a bias. */
EXPORT(layer_norm) int live_layer_norm(int n_rows, int n_cols, float *x, float *weight, float *out) {
    static struct cattn_norm_params p;
    cattn_clear_norm(&p);
    p.centred = true;
    p.num_threads = 1;
    p.n_batch_dims = 1;
    p.n_rows = p.batch_shape[0] = n_rows;
    p.n_cols = n_cols;
    p.eps = 1e-5;
    p.x = p.out = (struct cattn_tensor){.data = x, .col = 1, .batch = {n_cols}};
    p.out.data = out;
    p.weight = (struct cattn_tensor){.data = weight, .col = 1};
    return cattn_norm(&p);
}

EXPORT(gelu) int live_gelu(int n, float *x, float *out) {
    static struct cattn_activation_params p;
    cattn_clear_activation(&p);
    p.which = CATTN_GELU;
    p.num_threads = 1;
    p.n_rows = 1;
    p.n_cols = n;
    p.x = p.out = (struct cattn_tensor){.data = x, .col = 1};
    p.out.data = out;
    return cattn_activate(&p);
}
