/* attention_args.c -- attention's arguments on their way into the params.
 *
 * Query, key and value come first, with dtypes, layout, sizes, heads and batch; then masks, ranges, numbers of heads
 * and lists of keys.
 */
#include "attention_call.h"
#include "fp_mode.h"

_Static_assert(OPERAND_query == 0 && OPERAND_key == 1 && OPERAND_value == 2, "loops over the three begin the table");

static const char *name_of(int operand) { return cattn_operands[operand].name; }
static int scale_of(int input) { return input == OPERAND_key ? OPERAND_key_scale : OPERAND_value_scale; }
static const char *scale_name(int input) { return input == OPERAND_key ? "key.scale" : "value.scale"; }

static void view_frozen(const struct cattn_call *call, int operand, const struct cattn_array *array) {
    const struct cattn_operand_row *row = &cattn_operands[operand];
    cattn_axes_view(&call->shape, row->axes, row->fits, array, cattn_operand_view(call->params, operand));
}

static void view_operand(const struct cattn_call *call, int operand) {
    struct cattn_array frozen;
    cattn_freeze(call->inputs[operand], name_of(operand), &frozen);
    view_frozen(call, operand, &frozen);
}

PyArrayObject *cattn_call_new(const struct cattn_call *call, const char *axes, int type, bool zeros,
                              struct cattn_tensor *tensor) {
    int64_t dims[NPY_MAXDIMS];
    struct cattn_array frozen;
    const int nd = cattn_axes_shape(&call->shape, call->params, axes, dims);
    PyArrayObject *array = (zeros ? cattn_new_zeros : cattn_new_array)(nd, dims, type);
    if (array != NULL) {
        cattn_freeze(array, "the result", &frozen);
        cattn_axes_view(&call->shape, axes, EXACTLY, &frozen, tensor);
    }
    return array;
}

/* Takes query, key and value in their own types, and the scales of a cattn.Quantized, whose storage `quantized`
 * receives. */
static bool take_arrays(struct cattn_call *call, PyObject *const *args, enum cattn_storage *quantized) {
    PyObject *const arrays[] = {args[ARG_query], args[ARG_key], args[ARG_value]};
    for (int i = OPERAND_query; i <= OPERAND_value; i++) {
        if (arrays[i] == NULL)
            continue;
        PyArrayObject **array = &call->inputs[i];
        if (i != OPERAND_query && cattn_arg_is_quantized(call->state, arrays[i])) {
            PyArrayObject **scale = &call->inputs[scale_of(i)];
            if (!cattn_arg_take_quantized(call->state, arrays[i], name_of(i), array, scale, &quantized[i]))
                return false;
        } else if ((*array = cattn_arg_floats(call->state, arrays[i], name_of(i))) == NULL) {
            return false;
        }
    }
    return true;
}

/* Converts query, key and value to one type. Quantized ones count as float32 and stay as they are, but beside float64
 * they become arrays of that. */
static bool promote_arrays(struct cattn_call *call, enum cattn_storage *quantized) {
    PyArrayObject *floats[OPERAND_value + 1];
    for (int i = OPERAND_query; i <= OPERAND_value; i++)
        floats[i] = quantized[i] ? NULL : call->inputs[i];
    int type = cattn_arg_promote(call->state, floats, OPERAND_value + 1, "query, key and value");
    for (int i = OPERAND_query; i <= OPERAND_value; i++)
        if (!quantized[i])
            call->inputs[i] = floats[i]; /* may be another array now, even after an error */
    if (type < 0)
        return false;
    if (type != NPY_DOUBLE && (quantized[OPERAND_key] || quantized[OPERAND_value]))
        type = NPY_FLOAT;
    if (call->widens && type != NPY_FLOAT && type != NPY_DOUBLE) {
        call->half_type = type;
        type = NPY_FLOAT;
    }
    for (int i = OPERAND_query; i <= OPERAND_value; i++) {
        PyArrayObject **array = &call->inputs[i];
        if (!quantized[i] && *array != NULL && !cattn_arg_widen(call->state, array, type))
            return false;
        if (quantized[i] && type == NPY_DOUBLE &&
            !cattn_arg_dequantize(call->state, array, name_of(i), call->inputs[scale_of(i)], scale_name(i)))
            return false;
    }
    call->stored_type = type;
    return true;
}

/* layout: the order of tokens and heads. Packed sequences always have their tokens first. */
static bool parse_layout(struct cattn_call *call, PyObject *layout) {
    call->shape.tokens_first = call->packed != NULL || cattn_arg_is(layout, call->state->tokens_first);
    return call->shape.tokens_first || layout == Py_None || cattn_arg_is(layout, call->state->heads_first) ||
           cattn_error_value(layout, "layout must be 'bhtd' or 'bthd'");
}

static bool parse_arrays(struct cattn_call *call, PyObject *const *args, enum cattn_storage *quantized) {
    if (!take_arrays(call, args, quantized) || !promote_arrays(call, quantized))
        return false;
    call->compute_type = cattn_arg_compute_type(call->stored_type);
    call->params->dtype = cattn_arg_dtype(call->stored_type);
    call->params->storage = cattn_arg_storage(call->stored_type);
    call->params->double_lse = call->compute_type == NPY_DOUBLE;
    if (call->compute_type == NPY_FLOAT) {
        call->params->quantized_key = quantized[OPERAND_key];
        call->params->quantized_value = quantized[OPERAND_value];
    }
    return true;
}

/* Gradients are computed in float32, from the numbers that the forward pass has multiplied. */
static bool round_inputs(struct cattn_call *call, enum cattn_bf16_products products) {
    if (call->params->quantized_key || call->params->quantized_value)
        return cattn_raise(PyExc_ValueError, "compute_dtype='%s' has no gradients of a Quantized key or value",
                           cattn_compute_dtype_word(products));
    for (int i = OPERAND_query; i <= OPERAND_value && call->stored_type == NPY_FLOAT; i++)
        if (call->inputs[i] != NULL && !cattn_arg_round_to_bfloat16(&call->inputs[i]))
            return false;
    return true;
}

static bool use_bfloat16(struct cattn_call *call, enum cattn_bf16_products products) {
    if (call->params->dtype != CATTN_F32 || call->params->storage == CATTN_STORED_F16 || call->half_type == NPY_HALF)
        return cattn_error_not_bfloat16(products, "query, key and value",
                                        call->compute_type == NPY_DOUBLE ? "float64" : "float16");
    call->params->bf16_products = call->rounds_inputs ? CATTN_BF16_NOT : products;
    return !call->rounds_inputs || round_inputs(call, products);
}

/* enable_gqa: None infers grouped heads, False forbids them, True also makes axis -3 of 3-D arrays the heads. */
static bool parse_enable_gqa(PyObject *object, enum cattn_grouping *grouping) {
    if (object != Py_None && object != Py_True && object != Py_False && !PyArray_IsScalar(object, Bool))
        return cattn_error_type("enable_gqa", "None, True or False", object);
    if (object != Py_None)
        *grouping = PyObject_IsTrue(object) > 0 ? CATTN_GROUPS_FORCED : CATTN_GROUPS_FORBIDDEN;
    return true;
}

/* Copies what the core needs to know of query, key, value and their scales: from here on nobody looks at the objects
 * again, which Python code may change. They may have changed already while the others were read. */
static bool freeze_inputs(const struct cattn_call *call, const enum cattn_storage *quantized,
                          struct cattn_array *inputs, struct cattn_array *scales) {
    const char *const names = "query, key and value";
    for (int i = OPERAND_query; i <= OPERAND_value; i++) {
        const bool is_quantized = quantized[i] && call->stored_type != NPY_DOUBLE;
        const int own = !is_quantized ? call->stored_type : quantized[i] == CATTN_STORED_I8 ? NPY_BYTE : NPY_UBYTE;
        PyArrayObject *scale = is_quantized ? call->inputs[scale_of(i)] : NULL;
        if (!cattn_freeze_unchanged(call->inputs[i], own, names, name_of(i), &inputs[i]) ||
            !cattn_freeze_unchanged(scale, NPY_FLOAT, scale_name(i), scale_name(i), &scales[i]))
            return false;
    }
    return true;
}

static bool view_inputs(struct cattn_call *call, const struct cattn_array *inputs, const struct cattn_array *scales) {
    for (int i = OPERAND_query; i <= OPERAND_value; i++) {
        if (inputs[i].data == NULL)
            continue;
        view_frozen(call, i, &inputs[i]);
        if (scales[i].data == NULL)
            continue;
        if (!cattn_check_scale_shape(&scales[i], &inputs[i]))
            return false;
        view_frozen(call, scale_of(i), &scales[i]);
    }
    return true;
}

/* Parses query, key, value, compute_dtype, layout and enable_gqa, and fills in the views, sizes, heads and batch. */
static bool parse_shapes(struct cattn_call *call, PyObject *const *args) {
    enum cattn_bf16_products products;
    enum cattn_storage quantized[OPERAND_value + 1] = {CATTN_STORED_PLAIN};
    struct cattn_array *inputs = call->frozen->inputs, scales[OPERAND_value + 1];
    call->shape.is_packed = call->packed != NULL;
    call->shape.dims = call->frozen->dims;
    if (!cattn_arg_compute_dtype(args[ARG_compute_dtype], &products) || !parse_layout(call, args[ARG_layout]) ||
        !parse_arrays(call, args, quantized) || (products && !use_bfloat16(call, products)) ||
        !parse_enable_gqa(args[ARG_enable_gqa], &call->shape.grouping) ||
        !freeze_inputs(call, quantized, inputs, scales) ||
        !cattn_check_sizes(cattn_python, inputs, &call->shape, call->params))
        return false;
    return view_inputs(call, inputs, scales);
}

/* ---- masks and positions ---- */

/* The slots of operands and numbers; what is part of another argument has none, and comes after the others. */
#define SLOT_OF(name, ...) ARG_##name,
static const int OPERAND_SLOTS[] = {ATTENTION_OPTIONS(SLOT_OF, NO_OPTION, NO_OPTION)};
static const int NUMBER_SLOTS[] = {ATTENTION_OPTIONS(NO_OPTION, SLOT_OF, NO_OPTION)};
enum {
    N_OPERAND_SLOTS = sizeof OPERAND_SLOTS / sizeof *OPERAND_SLOTS,
    N_NUMBER_SLOTS = sizeof NUMBER_SLOTS / sizeof *NUMBER_SLOTS
};

/* The real numbers that have a place in the params. */
static bool parse_reals(struct cattn_call *call, PyObject *const *args) {
    struct cattn_attention_params *params = call->params;
    cattn_default_scale(&params->head_dim, &params->score_options.scale);
    for (int i = 0; i < N_NUMBER_SLOTS; i++) {
        const struct cattn_number_row *row = &cattn_numbers[i];
        PyObject *object = args[NUMBER_SLOTS[i]];
        double *place = cattn_number_place(params, i);
        if (place == NULL || object == Py_None)
            continue;
        if (!cattn_arg_real(object, row->name, place))
            return false;
        const char *fault = cattn_number_fault((int)row->kind, *place, params->dtype);
        if (fault != NULL)
            return cattn_error_value(object, "%s %s", row->name, fault);
    }
    return true;
}

static void take_bias(struct cattn_call *call, PyArrayObject *bias, const char *name) {
    struct cattn_attention_params *params = call->params;
    struct cattn_array *frozen = &call->frozen->bias;
    cattn_freeze(bias, name, frozen);
    cattn_axes_view(&call->shape, "NTS", BROADCASTS, frozen, &params->bias[params->n_bias++]);
}

static bool parse_masks(struct cattn_call *call, PyObject *const *args) {
    call->frozen->bias.data = NULL;
    if (args[ARG_attn_mask] != Py_None) {
        PyArrayObject *mask = cattn_arg_mask(call->state, args[ARG_attn_mask], "attn_mask", CATTN_MASK_ANY,
                                             call->compute_type, call->shape.nd, call->shape.dims);
        call->inputs[OPERAND_attn_mask] = mask;
        if (mask == NULL)
            return false;
        if (PyArray_TYPE(mask) == NPY_BOOL) {
            view_operand(call, OPERAND_attn_mask);
        } else {
            take_bias(call, mask, "attn_mask");
            if (!cattn_arg_warn_binary(mask, "attn_mask"))
                return false;
        }
    }
    if (args[ARG_bias] != Py_None) {
        PyArrayObject *bias = cattn_arg_mask(call->state, args[ARG_bias], "bias", CATTN_MASK_BIAS, call->compute_type,
                                             call->shape.nd, call->shape.dims);
        call->inputs[OPERAND_bias] = bias;
        if (bias == NULL)
            return false;
        take_bias(call, bias, "bias");
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
static PyArrayObject *parse_blocks(struct cattn_call *call, PyObject *mask, const int64_t *dims) {
    const struct cattn_attention_params *params = call->params;
    char meaning[160];
    PyOS_snprintf(meaning, sizeof meaning, "the blocks of size=%lld for T_q=%lld and T_k=%lld,",
                  (long long)params->block_size, (long long)params->seqlen_q, (long long)params->seqlen_k);
    PyObject *blocks = PyObject_GetAttr(mask, call->state->blocks);
    if (blocks == NULL)
        return NULL;
    PyArrayObject *array = cattn_arg_bool_mask(call->state, blocks, "block_mask", call->shape.nd, dims, meaning);
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
    cattn_set_block_size(params, params->block_size);
    int64_t dims[NPY_MAXDIMS];
    (void)cattn_axes_shape(&call->shape, params, cattn_operands[OPERAND_block_mask].axes, dims);
    PyArrayObject *blocks = call->inputs[OPERAND_block_mask] = parse_blocks(call, mask, dims);
    if (blocks == NULL)
        return false;
    view_operand(call, OPERAND_block_mask);
    return true;
}

static bool parse_ranges(struct cattn_call *call, PyObject *const *args) {
    const int64_t rows = call->shape.dims[call->shape.nd - 1];
    const bool is_pooled = call->pooled > 1; /* the last keys may be no whole block */
    const int64_t most = is_pooled ? (cattn_min(rows, INT32_MAX) + 1) * call->pooled - 1 : rows;
    const struct cattn_range_sizes sizes = {.seqlen_q = call->shape.dims[call->shape.nd - 2],
                                            .seqlen_k = most,
                                            .n_batch_dims = call->shape.n_batch_dims,
                                            .batch = call->shape.dims,
                                            .query_lengths = args[ARG_query_seq_lengths],
                                            .key_lengths = args[ARG_key_value_seq_lengths],
                                            .first_keys = args[ARG_key_value_seq_starts]};
    if (!cattn_arg_ranges(call->state, args[ARG_is_causal], args[ARG_query_offset], args[ARG_window_size],
                          &call->ranges))
        return false;
    call->ranges.bare = call->ranges.bare && !is_pooled; /* the rows of key do not tell the alignment */
    return (call->packed == NULL || cattn_packed_align(call->state, call->packed, &call->ranges)) &&
           cattn_ranges_settle(call->state, &call->ranges, &sizes, &call->params->ranges);
}

/* A copy of numbers of each query head, (H,) or (*batch, H), in the type of the computation. */
static PyArrayObject *copy_head_numbers(const struct cattn_call *call, PyArrayObject *array, int operand) {
    const struct cattn_operand_row *row = &cattn_operands[operand];
    const struct cattn_door *door = cattn_python;
    struct cattn_array given;
    int64_t dims[NPY_MAXDIMS];
    cattn_freeze(array, row->name, &given);
    for (int axis = 0; axis < call->shape.n_batch_dims; axis++)
        dims[axis] = call->packed != NULL ? call->packed->queries.n_sequences : call->shape.dims[axis];
    dims[call->shape.n_batch_dims] = call->params->num_heads;
    if (given.nd == 0)
        cattn_fail(door, CATTN_WRONG_VALUE, "%s must have one number for each query head, shape (H,), got one number",
                   row->name);
    if (given.nd == 0 ||
        !cattn_check_broadcast(door, &given, call->shape.n_batch_dims + 1, dims, "(leading dimensions, heads)", ""))
        return NULL;
    PyArrayObject *own = cattn_new_array(given.nd, given.dims, call->compute_type);
    const unsigned mode = cattn_fp_enter(); /* conversions round as the kernels do, whatever the caller has set */
    if (own != NULL && !cattn_check_heads(door, &given, row->kind, call->params->dtype, PyArray_DATA(own)))
        Py_CLEAR(own);
    cattn_fp_leave(mode);
    return own;
}

static bool parse_head_numbers(struct cattn_call *call, PyObject *object, int operand) {
    if (object == Py_None)
        return true;
    PyArrayObject *given = cattn_arg_floats(call->state, object, cattn_operands[operand].name);
    const bool is_half = given != NULL && cattn_arg_storage(PyArray_TYPE(given)) != CATTN_STORED_PLAIN;
    if (given != NULL && (!is_half || cattn_arg_widen(call->state, &given, call->compute_type)))
        call->inputs[operand] = copy_head_numbers(call, given, operand);
    Py_XDECREF((PyObject *)given);
    if (call->inputs[operand] == NULL)
        return false;
    view_operand(call, operand);
    return true;
}

/* The arrays of numbers of each query head. */
static bool parse_heads(struct cattn_call *call, PyObject *const *args) {
    for (int i = 0; i < N_OPERAND_SLOTS; i++) {
        const enum cattn_operand_kind kind = cattn_operands[i].kind;
        if ((kind == SLOPES || kind == LOGITS) && !parse_head_numbers(call, args[OPERAND_SLOTS[i]], i))
            return false;
    }
    return true;
}

/* gate: numbers that broadcast to the output, in its type. */
static bool parse_gate(struct cattn_call *call, PyObject *object) {
    struct cattn_array *frozen = &call->frozen->gate;
    int64_t dims[NPY_MAXDIMS];
    frozen->data = NULL;
    if (object == Py_None)
        return true;
    PyArrayObject *given = cattn_arg_floats(call->state, object, name_of(OPERAND_gate));
    if (given == NULL)
        return false;
    PyArrayObject *gate = call->inputs[OPERAND_gate] =
        cattn_arg_cast(call->state, given, name_of(OPERAND_gate), call->stored_type);
    Py_DECREF((PyObject *)given);
    if (gate == NULL)
        return false;
    cattn_freeze(gate, name_of(OPERAND_gate), frozen);
    const int nd = cattn_axes_shape(&call->shape, call->params, cattn_operands[OPERAND_gate].axes, dims);
    if (!cattn_check_broadcast(cattn_python, frozen, nd, dims, "the output's shape", ""))
        return false;
    view_frozen(call, OPERAND_gate, frozen);
    return true;
}

/* The copy of an array of key_indices, whose shape is checked first. */
static bool copy_key_indices(struct cattn_call *call, PyArrayObject *array, struct cattn_array *given) {
    const struct cattn_door *door = cattn_python;
    int64_t dims[NPY_MAXDIMS];
    cattn_freeze(array, "key_indices", given);
    call->shape.listed = given->nd > 0 ? given->dims[given->nd - 1] : 1;
    (void)cattn_axes_shape(&call->shape, call->params, cattn_operands[OPERAND_key_indices].axes, dims);
    if (!cattn_check_broadcast(door, given, call->shape.nd, dims, "the queries' shape, with n keys for each,", ""))
        return false;
    PyArrayObject *own = call->inputs[OPERAND_key_indices] = cattn_new_integers(given);
    return own != NULL && cattn_read_key_indices(door, given, call->params->seqlen_k, PyArray_DATA(own));
}

/* key_indices: the keys that each query sees, (..., T_q, n). */
static bool parse_key_indices(struct cattn_call *call, PyObject *object) {
    struct cattn_attention_params *params = call->params;
    if (object == Py_None)
        return true;
    struct cattn_array given;
    PyObject *array = cattn_arg_is_integers(object) ? Py_NewRef(object)
                                                    : PyObject_CallFunction(call->state->read_key_indices, "O", object);
    const bool copied = array != NULL && copy_key_indices(call, (PyArrayObject *)array, &given);
    Py_XDECREF(array);
    if (!copied)
        return false;
    view_operand(call, OPERAND_key_indices);
    params->n_indices = call->shape.listed;
    params->own_head_lists = call->shape.has_heads && given.nd >= 3 && given.dims[given.nd - 3] > 1;
    params->own_row_lists = given.nd >= 2 && given.dims[given.nd - 2] > 1;
    if (cattn_attention_counts_fit(params))
        return true;
    return cattn_raise(PyExc_ValueError,
                       "key_indices names %zd keys for each query, which is too large for these arrays",
                       (Py_ssize_t)call->shape.listed);
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
    return call->packed == NULL || cattn_packed_parse(call->state, call->packed, call->shape.dims[call->shape.nd - 2],
                                                      call->shape.dims[call->shape.nd - 1], rng);
}

bool cattn_call_parse(struct cattn_call *call, PyObject *const *args) {
    cattn_clear_attention(call->params);
    return parse_shapes(call, args) && parse_edges(call, args[ARG_rng]) && parse_reals(call, args) &&
           parse_masks(call, args) && parse_block_mask(call, args[ARG_block_mask]) && parse_ranges(call, args) &&
           parse_heads(call, args) && parse_gate(call, args[ARG_gate]) &&
           cattn_dropout_spec_from(args[ARG_dropout_p], "dropout_p", &call->params->dropout) &&
           parse_key_indices(call, args[ARG_key_indices]) && check_key_indices(call);
}

bool cattn_call_begin(struct cattn_call *call) {
    if (call->packed == NULL)
        return true;
    cattn_packed_fill(call->packed, call->params);
    return cattn_check_counts(cattn_python, call->params);
}
