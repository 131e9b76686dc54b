/* attention_args.c -- attention's arguments beside query, key and value: masks, ranges, numbers of heads, lists of
 * keys. See attention_args.h.
 */
#include "attention_args.h"
#include "arrays.h"
#include "error.h"
#include "fp_mode.h"
#include "numbers.h"
#include "rng.h"

#include <math.h>

/* ---- masks and positions ---- */

static bool parse_scale(struct cattn_call *call, PyObject *scale) {
    struct cattn_attention_params *params = call->params;
    if (scale != Py_None)
        return cattn_arg_scale(scale, call->compute_type, &params->score_options.scale);
    const unsigned mode = cattn_fp_enter(); /* the caller's rounding must not show */
    params->score_options.scale = params->head_dim > 0 ? 1.0 / sqrt((double)params->head_dim) : 1.0;
    cattn_fp_leave(mode);
    return true;
}

/* Called right after the check of the array, for the reason given at fill_inputs. */
static void take_bias(struct cattn_call *call, PyArrayObject *bias) {
    struct cattn_attention_params *params = call->params;
    cattn_tensor_from(&params->bias[params->n_bias++], bias, call->n_batch_dims, call->axes);
    call->bias_nd = PyArray_NDIM(bias);
    for (int axis = 0; call->bias_dims != NULL && axis < call->bias_nd; axis++)
        call->bias_dims[axis] = PyArray_DIM(bias, axis);
}

static bool parse_masks(struct cattn_call *call, PyObject *const *args) {
    struct cattn_attention_params *params = call->params;
    call->bias_nd = -1;
    if (args[ARG_attn_mask] != Py_None) {
        PyArrayObject *mask = cattn_arg_mask(call->state, args[ARG_attn_mask], "attn_mask", CATTN_MASK_ANY,
                                             call->compute_type, call->nd, call->dims);
        call->inputs[OPERAND_attn_mask] = mask;
        if (mask == NULL)
            return false;
        if (PyArray_TYPE(mask) == NPY_BOOL) {
            cattn_tensor_from(&params->attn_mask, mask, call->n_batch_dims, call->axes);
        } else {
            take_bias(call, mask);
            if (!cattn_arg_warn_binary(mask, "attn_mask"))
                return false;
        }
    }
    if (args[ARG_bias] != Py_None) {
        PyArrayObject *bias = cattn_arg_mask(call->state, args[ARG_bias], "bias", CATTN_MASK_BIAS, call->compute_type,
                                             call->nd, call->dims);
        call->inputs[OPERAND_bias] = bias;
        if (bias == NULL)
            return false;
        take_bias(call, bias);
    }
    return true;
}

/* The size of the blocks of a cattn.BlockMask. */
static bool parse_block_size(const struct binding_state *state, PyObject *mask, int64_t *to) {
    PyObject *size = PyObject_GetAttr(mask, state->size);
    const bool parsed = size != NULL && cattn_arg_count(size, "block_mask.size", 1, INT64_MAX, to);
    Py_XDECREF(size);
    return parsed;
}

/* The blocks of a cattn.BlockMask, which broadcast to dims. */
static PyArrayObject *parse_blocks(struct cattn_call *call, PyObject *mask, const npy_intp *dims) {
    const struct cattn_attention_params *params = call->params;
    char meaning[160];
    PyOS_snprintf(meaning, sizeof meaning, "the blocks of size=%lld for T_q=%lld and T_k=%lld,",
                  (long long)params->block_size, (long long)params->seqlen_q, (long long)params->seqlen_k);
    PyObject *blocks = PyObject_GetAttr(mask, call->state->blocks);
    if (blocks == NULL)
        return NULL;
    PyArrayObject *array = cattn_arg_bool_mask(call->state, blocks, "block_mask", call->nd, dims, meaning);
    Py_DECREF(blocks);
    return array;
}

/* block_mask: a cattn.BlockMask, a boolean mask with an element for each block of `size` queries by `size` keys. */
static bool parse_block_mask(struct cattn_call *call, PyObject *mask) {
    struct cattn_attention_params *params = call->params;
    if (mask == Py_None)
        return true;
    if ((PyObject *)Py_TYPE(mask) != call->state->block_mask_class)
        return cattn_error_type("block_mask", "a cattn.BlockMask(blocks, size) or None", mask);
    if (!parse_block_size(call->state, mask, &params->block_size))
        return false;
    /* larger blocks are the same as one block; the core multiplies sizes by numbers of blocks */
    const int64_t longest = params->seqlen_q > params->seqlen_k ? params->seqlen_q : params->seqlen_k;
    if (params->block_size > longest)
        params->block_size = longest > 0 ? longest : 1;
    npy_intp dims[NPY_MAXDIMS];
    memcpy(dims, call->dims, (size_t)call->nd * sizeof *dims);
    dims[call->nd - 2] = (npy_intp)cattn_ceil_div(params->seqlen_q, params->block_size);
    dims[call->nd - 1] = (npy_intp)cattn_ceil_div(params->seqlen_k, params->block_size);
    PyArrayObject *blocks = call->inputs[OPERAND_block_mask] = parse_blocks(call, mask, dims);
    if (blocks == NULL)
        return false;
    cattn_tensor_from(&params->block_mask, blocks, call->n_batch_dims, call->axes);
    return true;
}

static bool parse_ranges(struct cattn_call *call, PyObject *const *args) {
    const struct cattn_range_sizes sizes = {.seqlen_q = call->dims[call->nd - 2],
                                            .seqlen_k = call->dims[call->nd - 1],
                                            .n_batch_dims = call->n_batch_dims,
                                            .batch = call->dims,
                                            .query_lengths = args[ARG_query_seq_lengths],
                                            .key_lengths = args[ARG_key_value_seq_lengths],
                                            .first_keys = args[ARG_key_value_seq_starts]};
    return cattn_arg_ranges(call->state, args[ARG_is_causal], args[ARG_query_offset], args[ARG_window_size],
                            &call->ranges) &&
           (call->packed == NULL || cattn_packed_align(call->state, call->packed, &call->ranges)) &&
           cattn_ranges_settle(call->state, &call->ranges, &sizes, &call->params->ranges);
}

/* One number for each query head, the same in all batch entries or not: (H,) or (*batch, H), in the compute type. */
static bool parse_numbers(struct cattn_call *call, PyObject *object, int operand) {
    if (object == Py_None)
        return true;
    const unsigned mode = cattn_fp_enter(); /* conversions round as the kernels do, whatever the caller has set */
    PyObject *numbers = PyObject_CallFunction(call->state->as_head_numbers, "Oss", object, cattn_operands[operand].name,
                                              call->compute_type == NPY_FLOAT ? "f" : "d");
    cattn_fp_leave(mode);
    call->inputs[operand] = (PyArrayObject *)numbers;
    if (numbers == NULL)
        return false;
    npy_intp dims[NPY_MAXDIMS];
    for (int axis = 0; axis < call->n_batch_dims; axis++)
        dims[axis] = call->packed != NULL ? call->packed->queries.n_sequences : call->dims[axis];
    dims[call->n_batch_dims] = (npy_intp)call->params->num_heads;
    if (!cattn_arg_broadcasts(call->inputs[operand], cattn_operands[operand].name, call->n_batch_dims + 1, dims,
                              "(leading dimensions, heads)", ""))
        return false;
    cattn_tensor_from(cattn_operand_view(call->params, operand), call->inputs[operand], call->n_batch_dims,
                      CATTN_AXIS_HEAD);
    return true;
}

/* Is a positive number neither 0 nor inf in float32, rounded to nearest whatever mode the caller has set? */
static bool rounds_to_float(double number) { return number > 0x1p-150 && number < 0x1.ffffffp127; }

static bool parse_score_options(struct cattn_call *call, PyObject *const *args) {
    struct cattn_attention_params *params = call->params;
    if (args[ARG_softcap] != Py_None) {
        if (!cattn_arg_real(args[ARG_softcap], "softcap", &params->score_options.softcap))
            return false;
        if (params->score_options.softcap < 0)
            return cattn_error_value(args[ARG_softcap], "softcap must be positive, or None or 0 for none");
        if (call->compute_type == NPY_FLOAT && params->score_options.softcap != 0 &&
            !rounds_to_float(params->score_options.softcap))
            return cattn_error_value(args[ARG_softcap], "softcap must round to a positive finite float32");
    }
    return parse_numbers(call, args[ARG_alibi_slopes], OPERAND_alibi_slopes) &&
           parse_numbers(call, args[ARG_sinks], OPERAND_sinks);
}

/* key_indices: the keys that each query sees, (..., T_q, n). */
static bool parse_key_indices(struct cattn_call *call, PyObject *object) {
    struct cattn_attention_params *params = call->params;
    call->weight_cols = call->dims[call->nd - 1];
    if (object == Py_None)
        return true;
    PyObject *indices = PyObject_CallFunction(call->state->as_key_indices, "OL", object, (long long)params->seqlen_k);
    PyArrayObject *array = call->inputs[OPERAND_key_indices] = (PyArrayObject *)indices;
    if (array == NULL)
        return false;
    npy_intp dims[NPY_MAXDIMS];
    memcpy(dims, call->dims, (size_t)call->nd * sizeof *dims);
    call->weight_cols = dims[call->nd - 1] = PyArray_DIM(array, PyArray_NDIM(array) - 1);
    if (!cattn_arg_broadcasts(array, "key_indices", call->nd, dims, "the queries' shape, with n keys for each,", ""))
        return false;
    cattn_tensor_from(&params->key_indices, array, call->n_batch_dims, call->axes);
    params->n_indices = call->weight_cols;
    params->own_head_lists = call->has_heads && cattn_size_from_end(array, 3) > 1;
    params->own_row_lists = cattn_size_from_end(array, 2) > 1;
    if (cattn_attention_counts_fit(params))
        return true;
    PyErr_Format(PyExc_ValueError, "key_indices names %zd keys for each query, which is too large for these arrays",
                 (Py_ssize_t)call->weight_cols);
    return false;
}

/* Refuses slopes and dropout, which depend on a key's index in the whole array. */
static bool check_key_indices(const struct cattn_call *call) {
    if (call->inputs[OPERAND_key_indices] == NULL)
        return true;
    const bool slopes = call->params->slopes.data != NULL;
    if (slopes || call->params->dropout.enabled)
        PyErr_Format(PyExc_ValueError, "%s and key_indices do not go together%s", slopes ? "alibi_slopes" : "dropout_p",
                     slopes ? ": pass -slope * abs(p - j) as bias" : "");
    return PyErr_Occurred() == NULL;
}

static bool parse_edges(struct cattn_call *call, PyObject *rng) {
    return call->packed == NULL ||
           cattn_packed_parse(call->state, call->packed, call->dims[call->nd - 2], call->dims[call->nd - 1], rng);
}

bool cattn_call_parse(struct cattn_call *call, PyObject *const *args) {
    cattn_clear_attention(call->params);
    return cattn_call_parse_shapes(call, args) && parse_edges(call, args[ARG_rng]) &&
           parse_scale(call, args[ARG_scale]) && parse_masks(call, args) &&
           parse_block_mask(call, args[ARG_block_mask]) && parse_ranges(call, args) &&
           parse_score_options(call, args) &&
           cattn_dropout_spec_from(args[ARG_dropout_p], "dropout_p", &call->params->dropout) &&
           parse_key_indices(call, args[ARG_key_indices]) && check_key_indices(call);
}

bool cattn_call_begin(struct cattn_call *call) {
    if (call->packed == NULL)
        return true;
    cattn_packed_fill(call->packed, call->params);
    return cattn_call_counts_fit(call->params);
}
