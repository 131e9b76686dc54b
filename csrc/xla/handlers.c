/* handlers.c -- attention and its derivatives as XLA calls them.
 *
 * XLA's threads run this without the GIL: nothing here knows Python, and no signal stops a computation. XLA's mode may
 * flush subnormal numbers; the core computes in its own.
 */
#include "../fp_mode.h"
#include "call.h"

#include <string.h>

#define BIT(operand) ((uint64_t)1 << XLA_##operand)
#define INPUTS (BIT(query) | BIT(key) | BIT(value))
#define BIT_IN_XLA(name, axes, kind, fits, calls, view) | ((calls) & IN_XLA ? BIT(name) : 0)
#define ALL_INPUTS (BIT(dropout_seed) ATTENTION_OPERANDS(BIT_IN_XLA))
#define FORWARD (INPUTS | BIT(out))
#define BACKWARD (INPUTS | BIT(forward_out) | BIT(forward_lse) | BIT(grad_out) | GRADIENTS)
#define TANGENTS (BIT(query_tangent) | BIT(key_tangent) | BIT(value_tangent) | BIT(bias_tangent) | BIT(sinks_tangent))
#define JVP (INPUTS | BIT(forward_out) | BIT(forward_lse) | BIT(out_tangent) | BIT(lse_tangent))
#define JVP_BACKWARD (BACKWARD | BIT(forward_out_tangent) | BIT(forward_lse_tangent))
#define PLAIN_INPUTS (ALL_INPUTS & ~(BIT(key_scale) | BIT(value_scale) | BIT(gate)))
#define GRADIENTS (BIT(grad_query) | BIT(grad_key) | BIT(grad_value))

/* ---- from the call to the params ---- */

static int64_t bound_of(const struct xla_call *call, int side) {
    const int64_t keys = call->numbers[NUMBER_window_size][side].integer;
    return keys >= 0 ? keys : CATTN_UNBOUNDED;
}

static void fill_options(const struct xla_call *call, struct cattn_attention_params *params) {
    const int64_t corner = call->numbers[NUMBER_is_causal][0].integer;
    params->dtype = call->dtype;
    params->storage = call->storage;
    params->quantized_key = call->quantized_key;
    params->quantized_value = call->quantized_value;
    params->double_lse =
        call->dtype == CATTN_F64 || call->operands[XLA_lse] != NULL || call->operands[XLA_forward_lse] != NULL;
    params->num_threads = cattn_get_num_threads();
    params->num_heads = call->sizes['N'];
    params->group_size = call->sizes['K'] > 0 && call->sizes['N'] > 0 ? call->sizes['N'] / call->sizes['K'] : 1;
    params->seqlen_q = call->sizes['T'];
    params->seqlen_k = call->sizes['S'];
    params->head_dim = call->sizes['H'];
    params->d_v = call->sizes['D'];
    cattn_set_block_size(params, call->numbers[NUMBER_block_size][0].integer);
    for (int i = 0; i < N_ATTENTION_NUMBERS; i++)
        if (cattn_number_place(params, i) != NULL)
            *cattn_number_place(params, i) = call->numbers[i][0].real;
    params->ranges.left = bound_of(call, 0);
    params->ranges.right = corner != 0 ? 0 : bound_of(call, 1);
    params->ranges.lower_right = corner == XLA_LOWER_RIGHT;
    params->ranges.query_length = params->seqlen_q;
    params->ranges.key_length = params->ranges.seqlen_k = params->seqlen_k;
    cattn_set_dropout(&params->dropout, call->numbers[NUMBER_dropout_p][0].real);
}

static void fill_batch(const struct xla_call *call, bool splits, struct cattn_attention_params *params) {
    params->n_batch_dims = 0;
    params->n_batch = 1;
    for (int axis = 0; axis < call->n_leading && !splits; axis++)
        params->batch_shape[params->n_batch_dims++] = call->leading[axis];
    params->batch_shape[params->n_batch_dims++] = call->sizes['B'];
    for (int axis = 0; axis < params->n_batch_dims; axis++) /* unsigned: beside a size of 0 it may wrap */
        params->n_batch = (int64_t)((uint64_t)params->n_batch * (uint64_t)params->batch_shape[axis]);
}

/* The tensors that both passes have. With a dropout, this is the part of the call at `index`. */
static void fill_tensors(const struct xla_call *call, int64_t index, struct cattn_attention_params *params) {
    for (int i = 0; i < N_ATTENTION_OPERANDS; i++)
        cattn_xla_view(call, i, index, cattn_operand_view(params, i));
    cattn_xla_view(call, XLA_forward_out, index, &params->out);
    cattn_xla_view(call, XLA_out, index, &params->out);
    cattn_xla_view(call, XLA_residual, index, &params->lse);
    cattn_xla_view(call, XLA_forward_lse, index, &params->lse);
    cattn_xla_view(call, XLA_lse, index, &params->lse); /* after the residual, which is then made of it */
    params->n_bias = call->operands[XLA_bias] != NULL;
    if (params->dropout.enabled) {
        struct cattn_tensor seed;
        uint32_t words[2];
        cattn_xla_view(call, XLA_dropout_seed, index, &seed);
        memcpy(words, seed.data, sizeof words);
        params->dropout.seed = words[0] | (uint64_t)words[1] << 32;
    }
}

static struct xla_error *check_params(struct xla_call *call, const struct cattn_attention_params *params) {
    const struct cattn_door door = cattn_xla_door(call);
    if (!cattn_check_counts(&door, params) || !cattn_check_dropout_batch(&door, params))
        return call->error;
    if (params->dropout.enabled && call->operands[XLA_dropout_seed] == NULL)
        return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "there is no dropout_seed");
    return NULL;
}

static struct xla_error *error_from(const struct xla_frame *frame, enum cattn_status status) {
    if (status == CATTN_OK)
        return NULL;
    if (status == CATTN_NO_MEMORY)
        return cattn_xla_fail(frame, XLA_RESOURCE_EXHAUSTED, "attention lacks memory for its scratch");
    return cattn_xla_fail(frame, XLA_INTERNAL, "attention ended with status %d", (int)status);
}

/* The numbers of a dropout count from the batch entry: every index of the leading axes has a seed and a call of its
 * own, so that vmap gives what a loop would. */
static struct xla_error *run(struct xla_call *call, struct cattn_backward_params *params,
                             enum cattn_status (*compute)(const struct xla_call *, int64_t,
                                                          struct cattn_backward_params *)) {
    struct cattn_attention_params *forward = &params->forward;
    const bool splits = call->numbers[NUMBER_dropout_p][0].real > 0;
    fill_options(call, forward);
    uint64_t n_calls = 1; /* wraps beside a size of 0 only, and then is 0 */
    for (int axis = 0; axis < call->n_leading && splits; axis++)
        n_calls *= (uint64_t)call->leading[axis];
    fill_batch(call, splits, forward);
    struct xla_error *error = check_params(call, forward);
    for (int64_t index = 0; error == NULL && index < (int64_t)n_calls; index++) {
        fill_tensors(call, splits ? index : -1, forward);
        error = error_from(call->frame, compute(call, splits ? index : -1, params));
    }
    return error;
}

/* ---- the passes ---- */

static enum cattn_status compute_forward(const struct xla_call *call, int64_t index,
                                         struct cattn_backward_params *params) {
    (void)call;
    (void)index;
    return cattn_attention(&params->forward);
}

/* lse in the type of the computation: to nearest, as the core itself stores it. */
static void round_lse(const struct xla_call *call) {
    const double *lse = call->operands[XLA_lse]->data;
    void *residual = call->operands[XLA_residual]->data;
    const int64_t count = cattn_xla_count(call->operands[XLA_residual]);
    const unsigned mode = cattn_fp_enter();
    for (int64_t i = 0; i < count; i++) {
        if (call->dtype == CATTN_F64)
            ((double *)residual)[i] = lse[i];
        else
            ((float *)residual)[i] = (float)lse[i];
    }
    cattn_fp_leave(mode);
}

/* A gradient with one row for several queries, or one column for several keys, is a sum over them. */
static enum cattn_bias_sum bias_sum(const struct xla_call *call) {
    const struct xla_buffer *gradient = call->operands[XLA_grad_bias];
    if (gradient == NULL)
        return CATTN_BIAS_NO_SUM;
    if (gradient->dims[gradient->rank - 2] != call->sizes['T'])
        return CATTN_BIAS_SUM_ROWS;
    return gradient->dims[gradient->rank - 1] != call->sizes['S'] ? CATTN_BIAS_SUM_COLS : CATTN_BIAS_NO_SUM;
}

/* The core sums one of the two axes, and then over nothing else. */
static struct xla_error *check_bias_gradient(const struct xla_call *call) {
    const struct xla_buffer *gradient = call->operands[XLA_grad_bias], *bias = call->operands[XLA_bias];
    if (gradient == NULL)
        return NULL;
    const int64_t *own = gradient->dims + call->n_leading;
    const enum cattn_bias_sum sum = bias_sum(call);
    bool fits = bias != NULL;
    if (sum != CATTN_BIAS_NO_SUM)
        fits = fits && own[0] == call->sizes['B'] && own[1] == call->sizes['N'] &&
               (sum == CATTN_BIAS_SUM_COLS || own[3] == call->sizes['S']);
    return fits ? NULL : cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "grad_bias has the wrong shape");
}

/* A tangent has the sizes of its input, but for axes that broadcast. */
static struct xla_error *check_tangents(const struct xla_call *call) {
    static const int pairs[][2] = {{XLA_bias_tangent, XLA_bias}, {XLA_sinks_tangent, XLA_sinks}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (call->operands[pairs[i][0]] != NULL && call->operands[pairs[i][1]] == NULL)
            return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "there is no %s for its tangent",
                                  cattn_xla_operands[pairs[i][1]]);
    return NULL;
}

static void view_tangents(const struct xla_call *call, int64_t index, struct cattn_tangents *tangents) {
    cattn_xla_view(call, XLA_query_tangent, index, &tangents->query);
    cattn_xla_view(call, XLA_key_tangent, index, &tangents->key);
    cattn_xla_view(call, XLA_value_tangent, index, &tangents->value);
    cattn_xla_view(call, XLA_bias_tangent, index, &tangents->bias);
    cattn_xla_view(call, XLA_sinks_tangent, index, &tangents->sinks);
}

static enum cattn_status compute_jvp(const struct xla_call *call, int64_t index, struct cattn_backward_params *params) {
    struct cattn_jvp_params jvp;
    cattn_clear_jvp(&jvp);
    jvp.has_results = true;
    jvp.forward = params->forward;
    view_tangents(call, index, &jvp.tangents);
    cattn_xla_view(call, XLA_out_tangent, index, &jvp.tangents.out);
    cattn_xla_view(call, XLA_lse_tangent, index, &jvp.tangents.lse);
    return cattn_attention_jvp(&jvp);
}

static enum cattn_status compute_backward(const struct xla_call *call, int64_t index,
                                          struct cattn_backward_params *params) {
    params->bias_sum = bias_sum(call);
    params->forward.path = CATTN_PATH_TILE;
    cattn_xla_view(call, XLA_grad_out, index, &params->grad_out);
    cattn_xla_view(call, XLA_grad_residual, index, &params->grad_lse);
    cattn_xla_view(call, XLA_grad_query, index, &params->grad_query);
    cattn_xla_view(call, XLA_grad_key, index, &params->grad_key);
    cattn_xla_view(call, XLA_grad_value, index, &params->grad_value);
    cattn_xla_view(call, XLA_grad_bias, index, &params->grad_bias);
    cattn_xla_view(call, XLA_grad_sinks, index, &params->grad_sinks);
    cattn_xla_view(call, XLA_grad_gate, index, &params->grad_gate);
    if (params->of_tangents) {
        view_tangents(call, index, &params->tangents);
        cattn_xla_view(call, XLA_forward_out_tangent, index, &params->tangents.out);
        cattn_xla_view(call, XLA_forward_lse_tangent, index, &params->tangents.lse);
    }
    return cattn_attention_backward(params);
}

/* ---- entry points ---- */

/* A pass: the operands that it cannot do without, and others that it knows. */
struct pass {
    uint64_t required, others;
    bool of_tangents; /* gradients of attention's derivative */
    enum cattn_status (*compute)(const struct xla_call *, int64_t, struct cattn_backward_params *);
};

/* Most calls lack what the checks between parsing and running are about. */
static struct xla_error *handle(struct xla_frame *frame, const struct pass *pass) {
    if (cattn_xla_describe(frame))
        return NULL;
    struct xla_call call;
    struct cattn_backward_params params;
    cattn_clear_backward(&params);
    params.of_tangents = pass->of_tangents;
    struct xla_error *error = cattn_xla_parse(&call, frame, pass->required, pass->required | pass->others);
    if (error == NULL)
        error = check_tangents(&call);
    if (error == NULL)
        error = check_bias_gradient(&call);
    if (error == NULL && call.operands[XLA_grad_sinks] != NULL && call.operands[XLA_sinks] == NULL)
        error = cattn_xla_fail(frame, XLA_INVALID_ARGUMENT, "there are no sinks for grad_sinks");
    if (error == NULL && pass->compute == compute_backward && !call.operands[XLA_grad_gate] != !call.operands[XLA_gate])
        error = cattn_xla_fail(frame, XLA_INVALID_ARGUMENT, "gate and grad_gate come together");
    for (int i = XLA_grad_key; error == NULL && i < XLA_N_OPERANDS; i++)
        if (call.operands[i] != NULL && call.operands[i]->data != NULL)
            memset(call.operands[i]->data, 0, cattn_xla_bytes(&call, i)); /* the core adds to them */
    if (error == NULL)
        error = run(&call, &params, pass->compute);
    if (error == NULL && call.operands[XLA_residual] != NULL && call.operands[XLA_lse] != NULL)
        round_lse(&call);
    cattn_xla_clear(&call);
    return error;
}

#define OF_RESULTS (BIT(grad_residual) | BIT(grad_bias) | BIT(grad_sinks))

struct xla_error *cattn_xla_forward(struct xla_frame *frame) {
    return handle(frame, &(struct pass){FORWARD, ALL_INPUTS | BIT(residual) | BIT(lse), false, compute_forward});
}

struct xla_error *cattn_xla_jvp(struct xla_frame *frame) {
    return handle(frame, &(struct pass){JVP, PLAIN_INPUTS | TANGENTS, false, compute_jvp});
}

struct xla_error *cattn_xla_backward(struct xla_frame *frame) {
    return handle(frame, &(struct pass){BACKWARD, ALL_INPUTS | OF_RESULTS | BIT(grad_gate), false, compute_backward});
}

struct xla_error *cattn_xla_jvp_backward(struct xla_frame *frame) {
    return handle(frame, &(struct pass){JVP_BACKWARD, PLAIN_INPUTS | TANGENTS | OF_RESULTS, true, compute_backward});
}
