/* linear.c -- linear(...) and the products of its gradients: parse, check, allocate, run, return. */
#include "args.h"

enum { X, WEIGHT, BIAS, SCALE, N_INPUTS };

struct call {
    struct binding_state *state;
    PyArrayObject *inputs[N_INPUTS];     /* owned, or NULL */
    struct cattn_array *frozen;          /* N_INPUTS of them */
    enum cattn_storage stored[N_INPUTS]; /* as they were frozen */
    int type;                            /* of the result */
    enum cattn_storage quantized;        /* of the weight, if it has a scale */
    enum cattn_bf16_products bf16;       /* the factors are rounded to bfloat16 */
    int nd;                              /* of x and the result */
    int64_t dims[NPY_MAXDIMS];           /* of the result */
};

/* ---- arguments ---- */

/* The type that NumPy promotes x, weight and bias to; a quantized weight does not count. */
static int result_type(const struct call *call, const char *names) {
    PyArrayObject *const counted[] = {call->inputs[X], call->inputs[SCALE] ? NULL : call->inputs[WEIGHT],
                                      call->inputs[BIAS]};
    return cattn_arg_common_type(call->state, counted, 3, names);
}

static bool parse_weight(struct call *call, PyObject *weight) {
    PyArrayObject **array = &call->inputs[WEIGHT];
    if (cattn_arg_is_quantized(call->state, weight))
        return cattn_arg_take_quantized(call->state, weight, "weight", array, &call->inputs[SCALE], &call->quantized);
    /* int8 is no type of numbers here, but it would be converted to one */
    if (PyArray_Check(weight) && PyArray_TYPE((PyArrayObject *)weight) == NPY_BYTE)
        return cattn_raise(PyExc_TypeError,
                           "weight has dtype int8 and no scale: pass cattn.Quantized(weight, scale), or "
                           "weight.astype(np.float32) if its elements are the numbers");
    return (*array = cattn_arg_floats(call->state, weight, "weight")) != NULL;
}

static bool check_shapes(struct call *call) {
    const struct cattn_array *x = &call->frozen[X], *weight = &call->frozen[WEIGHT], *scale = &call->frozen[SCALE];
    const struct cattn_array *bias = &call->frozen[BIAS];
    call->nd = x->nd;
    if (call->nd == 0)
        return cattn_raise(PyExc_ValueError, "x must have at least 1 dimension (..., K), got 0");
    if (weight->nd != 2)
        return cattn_raise(PyExc_ValueError, "weight must have 2 dimensions (N, K), got %d", weight->nd);
    memcpy(call->dims, x->dims, (size_t)call->nd * sizeof *x->dims);
    const int64_t n = weight->dims[0], k = call->dims[call->nd - 1];
    if (weight->dims[1] != k)
        return cattn_raise(PyExc_ValueError, "weight must have as many columns as x, %zd, got shape (%zd, %zd)%s",
                           (Py_ssize_t)k, (Py_ssize_t)n, (Py_ssize_t)weight->dims[1],
                           n == k ? ": it is (outputs, inputs), as in PyTorch; pass weight.T if it is (inputs, outputs)"
                                  : "");
    call->dims[call->nd - 1] = n;
    if (scale->data != NULL && !cattn_check_scale_shape(scale, weight))
        return false;
    return bias->data == NULL || (bias->nd == 1 && bias->dims[0] == n) ||
           cattn_raise(PyExc_ValueError, "bias must have one number for each row of weight, shape %s, got shape %s",
                       cattn_show_shape(1, &n).text, cattn_show_shape(bias->nd, bias->dims).text);
}

/* Freezes the arrays. ValueError if one has another type or other strides than when its argument was read: what reads
 * the next argument may run Python code. */
static bool freeze(struct call *call, const int types[N_INPUTS]) {
    static const char *const names[] = {"x", "weight", "bias", "weight.scale"};
    for (int i = X; i < N_INPUTS; i++) {
        if (!cattn_freeze_unchanged(call->inputs[i], types[i], names[i], names[i], &call->frozen[i]))
            return false;
        call->stored[i] = cattn_arg_storage(types[i]);
    }
    if (call->inputs[SCALE] != NULL)
        call->stored[WEIGHT] = call->quantized;
    return true;
}

/* All that is not stored as it may be is converted: everything to float64 if one array is, and the bias. */
static bool convert(struct call *call) {
    const int type = cattn_arg_compute_type(call->type);
    int types[N_INPUTS] = {0};
    for (int i = X; i < N_INPUTS; i++)
        types[i] = call->inputs[i] == NULL                      ? 0
                   : i == SCALE                                 ? NPY_FLOAT
                   : i != WEIGHT || call->inputs[SCALE] == NULL ? PyArray_TYPE(call->inputs[i])
                   : call->quantized == CATTN_STORED_I8         ? NPY_BYTE
                                                                : NPY_UBYTE;
    bool is_converted = false;
    if (!freeze(call, types))
        return false;
    for (int i = X; i <= BIAS; i++) {
        const bool dense = call->inputs[i] != NULL && !(i == WEIGHT && call->inputs[SCALE] != NULL);
        if (!dense || (type != NPY_DOUBLE && i != BIAS))
            continue;
        is_converted |= types[i] != type;
        if (!cattn_arg_widen(call->state, &call->inputs[i], type))
            return false;
        types[i] = type;
    }
    if (type == NPY_DOUBLE && call->inputs[SCALE] != NULL) {
        if (!cattn_arg_dequantize(call->state, &call->inputs[WEIGHT], "weight", call->inputs[SCALE], "weight.scale"))
            return false;
        Py_CLEAR(call->inputs[SCALE]);
        types[WEIGHT] = type;
        is_converted = true;
    }
    return !is_converted || freeze(call, types);
}

/* TypeError for products of bfloat16 unless the two factors are float32 or bfloat16. */
static bool check_bfloat16(const struct call *call, const char *names) {
    if (!call->bf16)
        return true;
    const int compute_type = cattn_arg_compute_type(call->type);
    const bool is_half = PyArray_TYPE(call->inputs[X]) == NPY_HALF || PyArray_TYPE(call->inputs[WEIGHT]) == NPY_HALF;
    if (compute_type == NPY_FLOAT && !is_half)
        return true;
    return cattn_error_not_bfloat16(call->bf16, names, compute_type == NPY_DOUBLE ? "float64" : "float16");
}

/* ---- views with two axes ---- */

/* Sets the stride in bytes of the rows, if all axes but the last one are one axis of rows. */
static bool rows_are_even(const struct cattn_array *array, int64_t *row) {
    int64_t length = 0; /* of the axes so far, in bytes */
    bool first = true;
    *row = 0;
    for (int axis = array->nd - 2; axis >= 0; axis--) {
        const int64_t n = array->dims[axis], stride = array->strides[axis];
        if (n == 1)
            continue;
        if (first)
            *row = stride;
        else if (stride != length)
            return false;
        first = false;
        length = stride * n;
    }
    return true;
}

/* Replaces x by a copy if its rows are no single axis. */
static bool make_rows_even(struct call *call) {
    PyArrayObject **x = &call->inputs[X];
    int64_t row;
    if (rows_are_even(&call->frozen[X], &row))
        return true;
    PyArrayObject *copy = (PyArrayObject *)PyArray_NewLikeArray(*x, NPY_CORDER, NULL, 0);
    if (copy == NULL || !cattn_copy_into(copy, *x)) {
        Py_XDECREF((PyObject *)copy);
        return false;
    }
    Py_DECREF((PyObject *)*x);
    *x = copy;
    cattn_freeze(copy, "x", &call->frozen[X]);
    return true;
}

static int64_t stride_of(const struct cattn_array *array, int axis) {
    return array->dims[axis] == 1 ? 0 : array->strides[axis] / array->size;
}

/* A column of its own may have any stride; with 1 kernels read it in place. */
static int64_t column_stride(const struct cattn_array *array) {
    return array->dims[array->nd - 1] == 1 ? 1 : stride_of(array, array->nd - 1);
}

/* Stride 0 where the scale has no such axis, or repeats along it. */
static void take_scales(struct cattn_operand *operand, const struct cattn_array *scale) {
    operand->scale = (const float *)(const void *)scale->data;
    operand->scale_col = scale->nd > 0 ? stride_of(scale, scale->nd - 1) : 0;
    operand->scale_row = scale->nd > 1 ? stride_of(scale, scale->nd - 2) : 0;
}

/* ---- linear ---- */

/* The output, with rows that are one axis: a temporary stands in for another layout. */
static bool make_output(struct call *call, PyObject *out, struct cattn_output *output) {
    const struct cattn_output_spec spec = {"out", call->type, call->nd, call->dims, call->inputs, N_INPUTS, NULL};
    struct cattn_output temporary = {NULL, NULL};
    struct cattn_array frozen;
    int64_t row;
    if (!cattn_arg_output(call->state, out, &spec, output))
        return false;
    cattn_freeze(output->array, "out", &frozen);
    if (rows_are_even(&frozen, &row))
        return true;
    if (!cattn_arg_output(call->state, NULL, &spec, &temporary))
        return false;
    Py_DECREF((PyObject *)output->array);
    output->array = temporary.array;
    return true;
}

static void fill_params(const struct call *call, PyArrayObject *output, struct cattn_product_params *p) {
    const struct cattn_array *x = &call->frozen[X], *weight = &call->frozen[WEIGHT], *bias = &call->frozen[BIAS];
    struct cattn_array out;
    int64_t row;
    *p = (struct cattn_product_params){.dtype = cattn_arg_dtype(call->type), .n_batch = 1};
    p->bf16_products = call->bf16;
    p->depth = weight->dims[1];
    p->n_a = weight->dims[0];
    p->a = (struct cattn_operand){.storage = call->stored[WEIGHT],
                                  .data = weight->data,
                                  .row = stride_of(weight, 0),
                                  .col = column_stride(weight)};
    if (call->frozen[SCALE].data != NULL)
        take_scales(&p->a, &call->frozen[SCALE]);
    rows_are_even(x, &row);
    p->b = (struct cattn_operand){
        .storage = call->stored[X], .data = x->data, .row = row / x->size, .col = column_stride(x)};
    if (bias->data != NULL) {
        p->bias = bias->data;
        p->bias_a = column_stride(bias);
    }
    cattn_freeze(output, "out", &out);
    rows_are_even(&out, &row);
    p->n_b = p->n_a > 0 ? cattn_count(out.nd, out.dims) / p->n_a : 0;
    p->out_storage = cattn_arg_storage(call->type);
    p->out = out.data;
    p->out_a = column_stride(&out);
    p->out_b = row / out.size;
}

static enum cattn_status compute(const void *params) { return cattn_product(params); }

static bool run(struct cattn_product_params *p) {
    p->num_threads = cattn_get_num_threads();
    const double work = (double)p->n_batch * (double)p->n_a * (double)p->n_b * (double)p->depth;
    return cattn_error_status(cattn_compute(work < CATTN_GIL_WORK, &p->poll, compute, p));
}

PyObject *cattn_body_linear(struct binding_state *state, PyObject **args) {
    struct cattn_product_params params;
    struct cattn_array frozen[N_INPUTS];
    struct call call = {.state = state, .frozen = frozen};
    struct cattn_output output = {NULL, NULL};
    bool computed = false;
    PyObject *bias = args[LINEAR_bias];
    if (!cattn_arg_compute_dtype(args[LINEAR_compute_dtype], &call.bf16) ||
        (call.inputs[X] = cattn_arg_floats(state, args[LINEAR_x], "x")) == NULL ||
        !parse_weight(&call, args[LINEAR_weight]) ||
        (bias != Py_None && (call.inputs[BIAS] = cattn_arg_floats(state, bias, "bias")) == NULL))
        goto done;
    call.type = result_type(&call, "x, weight and bias");
    if (call.type < 0 || !check_bfloat16(&call, "x, weight and bias") || !convert(&call) || !check_shapes(&call) ||
        !make_rows_even(&call) || !make_output(&call, args[LINEAR_out], &output))
        goto done;
    fill_params(&call, output.array, &params);
    computed = run(&params);
done:
    return cattn_output_end(computed, &output, call.inputs, N_INPUTS);
}

/* ---- products ---- */

static struct cattn_operand operand_of(const struct call *call, int i) {
    const struct cattn_array *array = &call->frozen[i];
    return (struct cattn_operand){.storage = call->stored[i],
                                  .data = array->data,
                                  .batch = array->nd == 3 ? stride_of(array, 0) : 0,
                                  .row = stride_of(array, array->nd - 2),
                                  .col = column_stride(array)};
}

/* SystemError unless the arrays are what cattn.functional passes: (T, K) and (N, K), or both with a batch in front. */
static bool check_product(const struct call *call) {
    const struct cattn_array *a = &call->frozen[X], *b = &call->frozen[WEIGHT];
    const int nd = a->nd;
    if (b->nd == nd && (nd == 2 || nd == 3) && a->dims[nd - 1] == b->dims[nd - 1] &&
        (nd == 2 || a->dims[0] == b->dims[0]))
        return true;
    return cattn_raise(PyExc_SystemError, "_product: shapes do not fit");
}

/* _product(a, b, compute_dtype, is_gradient): a @ b.mT, of matrices or of batches of them, in the dtype that NumPy
 * promotes both to. In a gradient the products are of float32 whatever compute_dtype is, but b is a factor of the
 * forward pass and is rounded as it was there. */
PyObject *cattn_py_product(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_array frozen[N_INPUTS];
    struct call call = {.state = cattn_state(module), .frozen = frozen};
    struct cattn_output output = {NULL, NULL};
    bool computed = false;
    if (!cattn_error_count("_product", n_args, 4) || !cattn_ready(call.state))
        return NULL;
    const bool is_gradient = args[3] == Py_True;
    if (!cattn_arg_compute_dtype(args[2], &call.bf16) ||
        (call.inputs[X] = cattn_arg_floats(call.state, args[0], "a")) == NULL ||
        (call.inputs[WEIGHT] = cattn_arg_floats(call.state, args[1], "b")) == NULL)
        goto done;
    call.type = result_type(&call, "the factors");
    if (call.type < 0 || !check_bfloat16(&call, "grad_out, x and weight") || !convert(&call) || !check_product(&call))
        goto done;
    const struct cattn_array *a = &frozen[X], *b = &frozen[WEIGHT];
    if (call.bf16 && is_gradient && b->size == sizeof(float)) {
        if (!cattn_arg_round_to_bfloat16(&call.inputs[WEIGHT]))
            goto done;
        cattn_freeze(call.inputs[WEIGHT], "b", &frozen[WEIGHT]);
    }
    call.nd = a->nd;
    memcpy(call.dims, a->dims, (size_t)a->nd * sizeof *a->dims);
    call.dims[call.nd - 1] = b->dims[call.nd - 2];
    const struct cattn_output_spec spec = {"out", call.type, call.nd, call.dims, NULL, 0, NULL};
    if (!cattn_arg_output(call.state, NULL, &spec, &output))
        goto done;
    struct cattn_product_params params = {.dtype = cattn_arg_dtype(call.type),
                                          .n_batch = call.nd == 3 ? call.dims[0] : 1,
                                          .n_a = call.dims[call.nd - 2],
                                          .n_b = call.dims[call.nd - 1],
                                          .depth = a->dims[call.nd - 1],
                                          .bf16_products = is_gradient ? CATTN_BF16_NOT : call.bf16,
                                          .a = operand_of(&call, X),
                                          .b = operand_of(&call, WEIGHT),
                                          .out_storage = cattn_arg_storage(call.type),
                                          .out = PyArray_DATA(output.array),
                                          .out_b = 1};
    params.out_a = params.n_b;
    params.out_batch = params.n_a * params.n_b;
    computed = run(&params);
done:
    return cattn_output_end(computed, &output, call.inputs, N_INPUTS);
}
