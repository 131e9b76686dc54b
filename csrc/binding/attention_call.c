/* attention_call.c -- query, key and value of attention, and the views and shapes of arrays with such axes. See
 * attention_call.h.
 */
#include "attention_call.h"
#include "arrays.h"
#include "compute_dtype.h"
#include "error.h"
#include "numbers.h"
#include "quantized.h"

_Static_assert(OPERAND_query == 0 && OPERAND_key == 1 && OPERAND_value == 2, "loops over the three begin the table");

static const char *name_of(int operand) { return cattn_operands[operand].name; }
static int scale_of(int input) { return input == OPERAND_key ? OPERAND_key_scale : OPERAND_value_scale; }
static const char *scale_name(int input) { return input == OPERAND_key ? "key.scale" : "value.scale"; }

/* A size of query, key or value, counted from the end in the order of the call's axes. */
static npy_intp input_size(const struct cattn_call *call, int input, int back) {
    const int axis = !call->tokens_first || back == 1 || back > 3 ? back : 5 - back;
    return cattn_size_from_end(call->inputs[input], axis);
}

void cattn_call_view(const struct cattn_call *call, PyArrayObject *array, struct cattn_tensor *tensor) {
    cattn_tensor_from(tensor, array, call->n_batch_dims, call->axes);
    if (call->tokens_first) {
        const int64_t heads = tensor->row;
        tensor->row = tensor->head;
        tensor->head = heads;
    }
}

int cattn_call_shape(const struct cattn_call *call, int nd, npy_intp *dims) {
    if (call->tokens_first && nd == call->nd) {
        const npy_intp heads = dims[nd - 3];
        dims[nd - 3] = dims[nd - 2];
        dims[nd - 2] = heads;
    }
    if (call->packed == NULL)
        return nd;
    memmove(dims, dims + 1, (size_t)(nd - 1) * sizeof *dims);
    return nd - 1;
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

/* Nothing runs Python code between this and fill_inputs. */
static bool check_unchanged(const struct cattn_call *call, const enum cattn_storage *quantized) {
    const char *const names = "query, key and value";
    const int type = call->stored_type;
    for (int i = OPERAND_query; i <= OPERAND_value; i++) {
        const bool is_quantized = quantized[i] && type != NPY_DOUBLE;
        const int own = !is_quantized ? type : quantized[i] == CATTN_STORED_I8 ? NPY_BYTE : NPY_UBYTE;
        PyArrayObject *scale = i == OPERAND_query ? NULL : call->inputs[scale_of(i)];
        if (!cattn_arg_unchanged(call->inputs[i], own, names) ||
            (is_quantized && !cattn_arg_unchanged(scale, NPY_FLOAT, scale_name(i))))
            return false;
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
    return check_unchanged(call, quantized);
}

static bool error_axes(const struct cattn_call *call, int input) {
    static const char *const rows[] = {"T_q", "T_k", "T_k"}, *const widths[] = {"head_dim", "head_dim", "d_v"};
    PyArrayObject *array = call->inputs[input];
    PyObject *shape = cattn_shape_tuple(PyArray_NDIM(array), PyArray_DIMS(array));
    if (shape != NULL && call->packed != NULL)
        PyErr_Format(PyExc_ValueError, "%s must have shape (total, heads, %s), got %R", name_of(input), widths[input],
                     shape);
    else if (shape != NULL && call->tokens_first)
        PyErr_Format(PyExc_ValueError,
                     "%s must have at least 3 dimensions (..., %s, heads, %s) for layout='bthd', got %d",
                     name_of(input), rows[input], widths[input], PyArray_NDIM(array));
    else if (shape != NULL)
        PyErr_Format(PyExc_ValueError, "%s must have at least 2 dimensions (..., %s, %s), got %d", name_of(input),
                     rows[input], widths[input], PyArray_NDIM(array));
    Py_XDECREF(shape);
    return false;
}

/* layout: the order of tokens and heads. Packed sequences always have their tokens first. */
static bool parse_layout(struct cattn_call *call, PyObject *layout) {
    call->tokens_first = call->packed != NULL || cattn_arg_is(layout, call->state->tokens_first);
    return call->tokens_first || layout == Py_None || cattn_arg_is(layout, call->state->heads_first) ||
           cattn_error_value(layout, "layout must be 'bhtd' or 'bthd'");
}

static bool parse_arrays(struct cattn_call *call, PyObject *const *args) {
    enum cattn_storage quantized[OPERAND_value + 1] = {CATTN_STORED_PLAIN};
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
    for (int i = OPERAND_query; i <= OPERAND_value; i++) {
        const int nd = call->inputs[i] != NULL ? PyArray_NDIM(call->inputs[i]) : 3;
        if (call->packed != NULL ? nd != 3 : nd < (call->tokens_first ? 3 : 2))
            return error_axes(call, i);
        if (nd > call->nd && call->inputs[i] != NULL)
            call->nd = nd;
    }
    call->nd += call->packed != NULL; /* one batch entry */
    return true;
}

/* Gradients are computed in float32, from the numbers that the forward pass has multiplied. */
static bool round_inputs(struct cattn_call *call, enum cattn_bf16_products products) {
    if (call->params->quantized_key || call->params->quantized_value) {
        PyErr_Format(PyExc_ValueError, "compute_dtype='%s' has no gradients of a Quantized key or value",
                     cattn_compute_dtype_word(products));
        return false;
    }
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

static bool error_sizes(const char *a, npy_intp size_a, const char *b, npy_intp size_b, const char *what) {
    PyErr_Format(PyExc_ValueError, "%s has %s %zd, %s has %zd", a, what, (Py_ssize_t)size_a, b, (Py_ssize_t)size_b);
    return false;
}

static bool parse_sizes(struct cattn_call *call) {
    struct cattn_attention_params *params = call->params;
    const npy_intp seqlen_q = input_size(call, OPERAND_query, 2), seqlen_k = input_size(call, OPERAND_key, 2);
    const npy_intp head_dim = input_size(call, OPERAND_query, 1), key_dim = input_size(call, OPERAND_key, 1);
    const bool has_value = call->inputs[OPERAND_value] != NULL;
    params->seqlen_q = call->dims[call->nd - 2] = seqlen_q;
    params->seqlen_k = call->dims[call->nd - 1] = seqlen_k;
    params->head_dim = head_dim;
    params->d_v = has_value ? input_size(call, OPERAND_value, 1) : 0;
    if (key_dim != head_dim)
        return error_sizes("key", key_dim, "query", head_dim, "head_dim");
    if (has_value && input_size(call, OPERAND_value, 2) != seqlen_k)
        return error_sizes("value", input_size(call, OPERAND_value, 2), "key", seqlen_k, "T_k");
    return true;
}

/* enable_gqa: None infers grouped heads, False forbids them, True also makes axis -3 of 3-D arrays the heads. */
static bool parse_enable_gqa(PyObject *object, bool *forbidden, bool *forced) {
    *forbidden = *forced = false;
    if (object == Py_None)
        return true;
    if (object != Py_True && object != Py_False && !PyArray_IsScalar(object, Bool))
        return cattn_error_type("enable_gqa", "None, True or False", object);
    *forced = PyObject_IsTrue(object) > 0;
    *forbidden = !*forced;
    return true;
}

static bool error_heads(const struct cattn_call *call, npy_intp query, const char *reason) {
    PyErr_Format(PyExc_ValueError, "query has %zd heads (axis %d), key and value have %zd%s", (Py_ssize_t)query,
                 call->tokens_first ? -2 : -3, (Py_ssize_t)call->kv_heads, reason);
    return false;
}

static bool parse_heads(struct cattn_call *call, PyObject *enable_gqa) {
    struct cattn_attention_params *params = call->params;
    bool forbidden, forced;
    if (!parse_enable_gqa(enable_gqa, &forbidden, &forced))
        return false;
    call->has_heads = call->nd > 3 || ((forced || call->tokens_first) && call->nd == 3);
    call->axes = CATTN_AXIS_COL | CATTN_AXIS_ROW | (call->has_heads ? CATTN_AXIS_HEAD : 0);
    call->n_batch_dims = call->nd - 2 - call->has_heads;
    params->num_heads = params->group_size = call->kv_heads = 1;
    if (!call->has_heads)
        return true;
    const npy_intp query = input_size(call, OPERAND_query, 3), key = input_size(call, OPERAND_key, 3);
    const npy_intp value = call->inputs[OPERAND_value] != NULL ? input_size(call, OPERAND_value, 3) : key;
    if (key != value && key != 1 && value != 1)
        return error_sizes("value", value, "key", key, call->tokens_first ? "heads (axis -2):" : "heads (axis -3):");
    const npy_intp kv_heads = call->kv_heads = key == 1 ? value : key;
    const bool broadcasts = query == 1 || kv_heads == 1 || query == kv_heads; /* as NumPy does */
    if (!broadcasts && (kv_heads == 0 || query % kv_heads != 0))
        return error_heads(call, query,
                           params->seqlen_q == params->seqlen_k && !call->tokens_first
                               ? ": they must be equal, or query's a multiple; " CATTN_LAYOUT_HINT
                               : ": they must be equal, or query's a multiple");
    if (!broadcasts && forbidden)
        return error_heads(call, query, ", and enable_gqa=False forbids grouped heads");
    params->num_heads = query == 1 ? kv_heads : query;
    if (kv_heads > 0 && params->num_heads > 0)
        params->group_size = params->num_heads / kv_heads;
    call->dims[call->nd - 3] = (npy_intp)params->num_heads;
    return true;
}

/* The scales of a quantized key or value, whose shape they broadcast to. */
static bool fill_scale(struct cattn_call *call, int i) {
    PyArrayObject *scale = call->inputs[scale_of(i)];
    if (!cattn_arg_scale_fits(scale, scale_name(i), call->inputs[i], name_of(i)))
        return false;
    cattn_call_view(call, scale, cattn_operand_view(call->params, scale_of(i)));
    return true;
}

/* Called right after the sizes are read: the checks that follow may run Python code, which might change the arrays. */
static bool fill_inputs(struct cattn_call *call) {
    struct cattn_attention_params *params = call->params;
    for (int i = OPERAND_query; i <= OPERAND_value; i++) {
        if (call->inputs[i] == NULL)
            continue;
        struct cattn_tensor *tensor = cattn_operand_view(params, i);
        cattn_call_view(call, call->inputs[i], tensor);
        if (PyArray_DIM(call->inputs[i], PyArray_NDIM(call->inputs[i]) - 1) == 1)
            tensor->col = 1;
    }
    return (!params->quantized_key || fill_scale(call, OPERAND_key)) &&
           (!params->quantized_value || fill_scale(call, OPERAND_value));
}

static bool parse_batch_dims(struct cattn_call *call) {
    struct cattn_attention_params *params = call->params;
    params->n_batch_dims = call->n_batch_dims;
    for (int axis = 0; axis < call->n_batch_dims; axis++) {
        npy_intp size = 1;
        int owner = OPERAND_query;
        for (int i = OPERAND_query; i <= OPERAND_value; i++) {
            const npy_intp own = call->inputs[i] != NULL ? input_size(call, i, call->nd - axis) : 1;
            if (own == 1 || own == size)
                continue;
            if (size != 1) {
                PyErr_Format(PyExc_ValueError,
                             "leading dimensions do not broadcast: on axis %d %s has size %zd, %s has %zd",
                             axis - call->nd, name_of(owner), (Py_ssize_t)size, name_of(i), (Py_ssize_t)own);
                return false;
            }
            size = own;
            owner = i;
        }
        call->dims[axis] = size;
        params->batch_shape[axis] = size;
    }
    params->n_batch = PyArray_OverflowMultiplyList(call->dims, call->n_batch_dims);
    if (params->n_batch < 0) {
        PyErr_SetString(PyExc_ValueError, "query, key and value broadcast to a batch that is too large");
        return false;
    }
    return cattn_call_counts_fit(params) && fill_inputs(call);
}

bool cattn_call_counts_fit(const struct cattn_attention_params *p) {
    if (cattn_attention_counts_fit(p))
        return true;
    PyErr_Format(PyExc_ValueError,
                 "a batch of %lld with %lld heads, T_q %lld, T_k %lld, head_dim %lld and d_v %lld is too large",
                 (long long)p->n_batch, (long long)p->num_heads, (long long)p->seqlen_q, (long long)p->seqlen_k,
                 (long long)p->head_dim, (long long)p->d_v);
    return false;
}

bool cattn_call_parse_shapes(struct cattn_call *call, PyObject *const *args) {
    enum cattn_bf16_products products;
    return cattn_arg_compute_dtype(args[ARG_compute_dtype], &products) && parse_layout(call, args[ARG_layout]) &&
           parse_arrays(call, args) && (!products || use_bfloat16(call, products)) && parse_sizes(call) &&
           parse_heads(call, args[ARG_enable_gqa]) && parse_batch_dims(call);
}
