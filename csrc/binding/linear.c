/* linear.c -- what the rows of linear and of the products of its gradients do not say: a quantized weight, the dtypes
 * of products of bfloat16, and rows that are one axis. */
#include "engine.h"

/* Both are required and the first arrays of their calls. */
enum { A, B };

/* ---- factors ---- */

/* The scale of a quantized weight is an array of its own. */
enum { LINEAR_scale = N_LINEAR_ARGS };
static const struct cattn_argument SCALE_ROW = {.name = "weight.scale", .role = ARRAY_ROLE, .kind = SCALES};
static const struct cattn_slot SCALE_SLOT = {&SCALE_ROW, LINEAR_scale, -1, CATTN_OTHER};

bool cattn_take_weight(struct cattn_function_call *call, const struct cattn_slot *slot) {
    PyObject *weight = call->args[slot->slot];
    PyArrayObject *elements = NULL, *scale = NULL;
    enum cattn_storage storage;
    /* int8 is no type of numbers here, but it would be converted to one */
    if (PyArray_Check(weight) && PyArray_TYPE((PyArrayObject *)weight) == NPY_BYTE)
        return cattn_raise(PyExc_TypeError,
                           "weight has dtype int8 and no scale: pass cattn.Quantized(weight, scale), or "
                           "weight.astype(np.float32) if its elements are the numbers");
    if (!cattn_arg_is_quantized(call->state, weight))
        return cattn_append_array(call, slot, cattn_arg_floats(call->state, weight, "weight"));
    const bool taken = cattn_arg_take_quantized(call->state, weight, "weight", &elements, &scale, &storage);
    const bool appended = cattn_append_array(call, slot, elements);
    return cattn_append_array(call, &SCALE_SLOT, scale) && appended && taken;
}

/* Freezes an array that was replaced. */
static bool freeze_again(struct cattn_function_call *call, int i, int type) {
    const char *name = call->slots[i]->row->name;
    call->types[i] = type;
    return cattn_freeze_unchanged(call->arrays[i], type, name, name, &call->frozen[i]);
}

/* Products of float64 do without scales. */
static bool dequantize(struct cattn_function_call *call) {
    PyArrayObject *const scale = call->arrays[B + 1]; /* comes after its weight */
    return call->types[B] == call->type || call->type != NPY_DOUBLE ||
           (cattn_arg_dequantize(call->state, &call->arrays[B], "weight", scale, "weight.scale") &&
            freeze_again(call, B, NPY_DOUBLE));
}

/* Replaces x by a copy if its rows are no single axis. */
static bool make_rows_even(struct cattn_function_call *call) {
    PyArrayObject *const x = call->arrays[A];
    int64_t row;
    if (cattn_rows_are_even(&call->frozen[A], &row))
        return true;
    PyArrayObject *copy = (PyArrayObject *)PyArray_NewLikeArray(x, NPY_CORDER, NULL, 0);
    if (copy == NULL || !cattn_copy_into(copy, x)) {
        Py_XDECREF((PyObject *)copy);
        return false;
    }
    Py_DECREF((PyObject *)x);
    call->arrays[A] = copy;
    return freeze_again(call, A, call->types[A]);
}

/* TypeError for products of bfloat16 unless both factors are float32 or bfloat16. */
static bool check_bfloat16(const struct cattn_function_call *call, const char *names) {
    const struct cattn_product_params *p = call->params;
    const bool is_half = call->types[A] == NPY_HALF || call->types[B] == NPY_HALF;
    return p->bf16_products == CATTN_BF16_NOT || (p->dtype == CATTN_F32 && !is_half) ||
           cattn_error_not_bfloat16(p->bf16_products, names, p->dtype == CATTN_F64 ? "float64" : "float16");
}

/* 0 for an axis of one element, or of none; the axes are counted from the end. */
static int64_t stride_of(const struct cattn_array *array, int back) {
    return cattn_size_of(array, back) == 1 ? 0 : array->strides[array->nd - back] / array->size;
}

/* A column of its own may have any stride; with 1 kernels read it in place. */
static int64_t column_stride(const struct cattn_array *array) {
    return cattn_size_of(array, 1) == 1 ? 1 : stride_of(array, 1);
}

static struct cattn_operand operand_of(const struct cattn_function_call *call, int i) {
    const struct cattn_array *array = &call->frozen[i];
    const int type = call->types[i];
    return (struct cattn_operand){.storage = type == NPY_BYTE    ? CATTN_STORED_I8
                                             : type == NPY_UBYTE ? CATTN_STORED_F8
                                                                 : cattn_arg_storage(type),
                                  .data = array->data,
                                  .row = stride_of(array, 2),
                                  .col = column_stride(array)};
}

double cattn_work_of_product(const void *params) {
    const struct cattn_product_params *p = params;
    return (double)p->n_batch * (double)p->n_a * (double)p->n_b * (double)p->depth;
}

/* ---- linear ---- */

static bool check_shapes(const struct cattn_function_call *call, struct cattn_array *x) {
    const struct cattn_array *weight = &call->frozen[B], *scale = cattn_frozen(call, LINEAR_scale);
    const struct cattn_array *bias = cattn_frozen(call, LINEAR_bias);
    if (x->nd == 0)
        return cattn_check_main(cattn_python, &call->function->arguments[LINEAR_x], x);
    if (weight->nd != 2)
        return cattn_raise(PyExc_ValueError, "weight must have 2 dimensions (N, K), got %d", weight->nd);
    const int64_t n = weight->dims[0], k = x->dims[x->nd - 1];
    if (weight->dims[1] != k)
        return cattn_raise(PyExc_ValueError, "weight must have as many columns as x, %zd, got shape (%zd, %zd)%s",
                           (Py_ssize_t)k, (Py_ssize_t)n, (Py_ssize_t)weight->dims[1],
                           n == k ? ": it is (outputs, inputs), as in PyTorch; pass weight.T if it is (inputs, outputs)"
                                  : "");
    return (scale == NULL || cattn_check_scale_shape(scale, weight)) &&
           (bias == NULL || (bias->nd == 1 && bias->dims[0] == n) ||
            cattn_raise(PyExc_ValueError, "bias must have one number for each row of weight, shape %s, got shape %s",
                        cattn_show_shape(1, &n).text, cattn_show_shape(bias->nd, bias->dims).text));
}

bool cattn_settle_linear(struct cattn_function_call *call) {
    struct cattn_product_params *p = call->params;
    struct cattn_array *const x = &call->frozen[A];
    const struct cattn_array *bias = cattn_frozen(call, LINEAR_bias), *scale = cattn_frozen(call, LINEAR_scale);
    if (!check_bfloat16(call, call->function->counted) || !dequantize(call) || !make_rows_even(call) ||
        !check_shapes(call, x))
        return false;
    p->a = operand_of(call, B);
    p->b = operand_of(call, A);
    cattn_rows_are_even(x, &p->b.row);
    if (scale != NULL && p->dtype == CATTN_F32) {
        p->a.scale = (const float *)(const void *)scale->data;
        p->a.scale_col = stride_of(scale, 1); /* 0 where the scale has no such axis, or repeats along it */
        p->a.scale_row = stride_of(scale, 2);
    }
    if (bias != NULL) {
        p->bias = bias->data;
        p->bias_a = column_stride(bias);
    }
    p->n_a = cattn_size_of(&call->frozen[B], 2);
    p->depth = cattn_size_of(x, 1);
    return true;
}

bool cattn_make_linear(struct cattn_function_call *call) {
    struct cattn_product_params *p = call->params;
    const int nd = call->frozen[A].nd;
    struct cattn_array out;
    int64_t dims[CATTN_MAX_AXES];
    memcpy(dims, call->frozen[A].dims, (size_t)nd * sizeof *dims);
    dims[nd - 1] = p->n_a;
    const struct cattn_output_spec spec = {"out", call->type, nd, dims, call->arrays, call->n_arrays, NULL, true};
    if (!cattn_arg_output(call->state, call->args[LINEAR_out], &spec, &call->results[0]))
        return false;
    cattn_freeze(call->results[0].array, "out", &out);
    p->n_b = p->n_a > 0 ? cattn_count(nd, dims) / p->n_a : 0;
    p->out = out.data;
    p->out_a = column_stride(&out);
    return cattn_rows_are_even(&out, &p->out_b);
}

/* ---- products ---- */

bool cattn_settle_product(struct cattn_function_call *call) {
    struct cattn_product_params *p = call->params;
    const bool is_gradient = call->args[PRODUCT_is_gradient] == Py_True;
    const struct cattn_array *a = &call->frozen[A], *b = &call->frozen[B];
    if (!check_bfloat16(call, "grad_out, x and weight"))
        return false;
    if (p->bf16_products && is_gradient && call->types[B] == NPY_FLOAT &&
        !(cattn_arg_round_to_bfloat16(&call->arrays[B]) && freeze_again(call, B, NPY_FLOAT)))
        return false;
    if (b->nd != a->nd || a->nd < 2 || a->nd > 3 || cattn_size_of(a, 1) != cattn_size_of(b, 1) ||
        cattn_size_of(a, 3) != cattn_size_of(b, 3)) /* what cattn.functional does not pass */
        return cattn_raise(PyExc_SystemError, "_product: shapes do not fit");
    if (is_gradient)
        p->bf16_products = CATTN_BF16_NOT;
    p->n_batch = cattn_size_of(a, 3);
    p->n_a = cattn_size_of(a, 2);
    p->n_b = cattn_size_of(b, 2);
    p->depth = cattn_size_of(a, 1);
    p->a = operand_of(call, A);
    p->a.batch = stride_of(a, 3);
    p->b = operand_of(call, B);
    p->b.batch = stride_of(b, 3);
    return true;
}

bool cattn_make_product(struct cattn_function_call *call) {
    struct cattn_product_params *p = call->params;
    const int nd = call->frozen[A].nd;
    const int64_t dims[] = {p->n_batch, p->n_a, p->n_b};
    const struct cattn_output_spec spec = {.name = "out", .type = call->type, .nd = nd, .dims = &dims[3 - nd]};
    if (!cattn_arg_output(call->state, NULL, &spec, &call->results[0]))
        return false;
    p->out = PyArray_DATA(call->results[0].array);
    p->out_b = 1;
    p->out_a = p->n_b;
    p->out_batch = p->n_a * p->n_b;
    return true;
}
