/* py_backward.c -- attention_backward(...) and softmax_backward(...): parse, check what the forward pass gave,
 * allocate, run the core.
 *
 * Gradients of attention come back in the shapes of the whole call: cattn._backward sums them over what was broadcast.
 */
#include "attention_call.h"
#include "error.h"

/* Behind the arguments of attention. */
enum { ARG_GRAD_OUT = N_ARGS, ARG_FORWARD_OUT, ARG_FORWARD_LSE, N_BACKWARD };
enum { GRAD_OUT, FORWARD_OUT, FORWARD_LSE, N_GIVEN };
enum { GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS, GRAD_SINKS, N_GRADIENTS };

struct backward {
    struct cattn_call call;
    struct cattn_backward_params params;
    PyArrayObject *given[N_GIVEN];         /* owned, or NULL */
    PyArrayObject *gradients[N_GRADIENTS]; /* owned, or NULL: not asked for */
    npy_intp dims[NPY_MAXDIMS];            /* of the call */
    npy_intp bias_dims[NPY_MAXDIMS];
};

/* ---- what the forward pass gave ---- */

static bool check_shape(PyArrayObject *array, const char *name, const char *whose, int nd, const npy_intp *dims) {
    if (PyArray_NDIM(array) == nd && PyArray_CompareLists(PyArray_DIMS(array), dims, nd))
        return true;
    PyObject *own = cattn_shape_tuple(PyArray_NDIM(array), PyArray_DIMS(array)), *wanted = cattn_shape_tuple(nd, dims);
    if (own != NULL && wanted != NULL)
        PyErr_Format(PyExc_ValueError, "%s has shape %R, %s has %R", name, own, whose, wanted);
    Py_XDECREF(own);
    Py_XDECREF(wanted);
    return false;
}

/* Brings one to the type that the forward pass gives it, if that is wider. A log-sum-exp may be float64 anyway. */
static bool widen(struct backward *b, int i, const char *name) {
    const struct cattn_call *call = &b->call;
    const int own = PyArray_TYPE(b->given[i]), wanted = i == FORWARD_LSE ? call->type : call->stored;
    if (i == FORWARD_LSE)
        call->params->double_lse = own == NPY_DOUBLE || wanted == NPY_DOUBLE;
    if (own == wanted || (i == FORWARD_LSE && own == NPY_DOUBLE))
        return true;
    if (own == NPY_FLOAT && wanted == NPY_DOUBLE) {
        PyArrayObject *pair[] = {call->inputs[QUERY], b->given[i]};
        const int type = cattn_arg_promote(call->state, pair, 2);
        b->given[i] = pair[1];
        return type >= 0;
    }
    PyArray_Descr *descr = PyArray_DescrFromType(wanted);
    if (descr != NULL)
        PyErr_Format(PyExc_TypeError, "%s has dtype %S, the forward pass gives %S: pass %s.astype('%S')", name,
                     PyArray_DESCR(b->given[i]), descr, name, descr);
    Py_XDECREF((PyObject *)descr);
    return false;
}

static bool parse_given(struct backward *b, int i, PyObject *object) {
    static const char *const names[] = {"grad_out", "out", "lse"};
    static const char *const whose[] = {"the output", "the output", "the log-sum-exp"};
    struct cattn_call *call = &b->call;
    struct cattn_tensor *const tensors[] = {&b->params.grad_out, &b->params.forward.out, &b->params.forward.lse};
    npy_intp dims[NPY_MAXDIMS];
    const int nd = i == FORWARD_LSE ? call->nd - 1 : call->nd;
    PyArrayObject *array = b->given[i] = cattn_arg_floats(call->state, object, names[i]);
    if (array == NULL)
        return false;
    for (int axis = 0; axis < nd; axis++)
        dims[axis] = axis == call->nd - 1 ? (npy_intp)call->params->d_v : call->dims[axis];
    if (!check_shape(array, names[i], whose[i], nd, dims))
        return false;
    if (!widen(b, i, names[i]))
        return false;
    cattn_tensor_from(tensors[i], b->given[i], call->n_batch_dims,
                      (call->heads ? CATTN_AXIS_HEAD : 0) | CATTN_AXIS_ROW | (i == FORWARD_LSE ? 0 : CATTN_AXIS_COL));
    if (call->params->d_v == 1 && i != FORWARD_LSE)
        tensors[i]->col = 1;
    return true;
}

/* ---- gradients ---- */

static bool make_gradient(struct backward *b, int i, int nd, const npy_intp *dims, struct cattn_tensor *tensor,
                          int axes) {
    /* what is added to starts at 0; a query's gradient is written once */
    b->gradients[i] = (PyArrayObject *)(i == GRAD_QUERY ? PyArray_SimpleNew(nd, dims, b->call.type)
                                                        : PyArray_ZEROS(nd, dims, b->call.type, 0));
    if (b->gradients[i] == NULL)
        return false;
    cattn_tensor_from(tensor, b->gradients[i], b->call.n_batch_dims, axes);
    return true;
}

/* The gradient of the bias, summed over the rows or the columns of the scores where it has but one. */
static bool make_bias_gradient(struct backward *b) {
    struct cattn_call *call = &b->call;
    b->params.grad_bias.data = NULL;
    b->params.bias_sum = CATTN_BIAS_NO_SUM;
    if (call->bias_nd < 0)
        return true;
    const int own = call->bias_nd, nd = call->nd;
    const int axes = (call->heads ? CATTN_AXIS_HEAD : 0) | CATTN_AXIS_ROW | CATTN_AXIS_COL;
    const bool one_row = own < 2 || call->bias_dims[own - 2] == 1, one_col = own < 1 || call->bias_dims[own - 1] == 1;
    if (one_row && call->params->seqlen_q != 1)
        b->params.bias_sum = CATTN_BIAS_SUM_ROWS;
    else if (one_col && call->params->seqlen_k != 1)
        b->params.bias_sum = CATTN_BIAS_SUM_COLS;
    else
        return make_gradient(b, GRAD_BIAS, own, call->bias_dims, &b->params.grad_bias, axes);
    npy_intp dims[NPY_MAXDIMS];
    memcpy(dims, call->dims, (size_t)nd * sizeof *dims);
    dims[b->params.bias_sum == CATTN_BIAS_SUM_ROWS ? nd - 2 : nd - 1] = 1;
    return make_gradient(b, GRAD_BIAS, nd, dims, &b->params.grad_bias, axes);
}

static bool make_gradients(struct backward *b, PyObject *const *args) {
    const struct cattn_call *call = &b->call;
    const struct cattn_attention_params *params = call->params;
    const int nd = call->nd;
    const int axes = (call->heads ? CATTN_AXIS_HEAD : 0) | CATTN_AXIS_ROW | CATTN_AXIS_COL;
    npy_intp dims[NPY_MAXDIMS];
    memcpy(dims, call->dims, (size_t)nd * sizeof *dims);
    dims[nd - 1] = (npy_intp)params->head_dim;
    if (!make_gradient(b, GRAD_QUERY, nd, dims, &b->params.grad_query, axes))
        return false;
    if (call->heads)
        dims[nd - 3] = call->kv_heads;
    dims[nd - 2] = (npy_intp)params->seqlen_k;
    if (!make_gradient(b, GRAD_KEY, nd, dims, &b->params.grad_key, axes))
        return false;
    dims[nd - 1] = (npy_intp)params->d_v;
    if (!make_gradient(b, GRAD_VALUE, nd, dims, &b->params.grad_value, axes) || !make_bias_gradient(b))
        return false;
    b->params.grad_sinks.data = NULL;
    memcpy(dims, call->dims, (size_t)call->n_batch_dims * sizeof *dims);
    dims[call->n_batch_dims] = (npy_intp)params->num_heads;
    return args[ARG_SINKS] == Py_None ||
           make_gradient(b, GRAD_SINKS, call->n_batch_dims + 1, dims, &b->params.grad_sinks, CATTN_AXIS_HEAD);
}

/* ---- running ---- */

/* A mask must be drawn again: not every rng can. */
static bool check_rng(const struct backward *b, PyObject *rng) {
    if (!b->params.forward.dropout.enabled || cattn_torch_check(b->call.state, rng))
        return true;
    if (!cattn_rng_check(rng))
        return false;
    if (PyIndex_Check(rng))
        return true;
    PyErr_SetString(PyExc_ValueError, "rng must be what draws the forward pass's mask again: the int that it was "
                                      "given, its result's dropout_seed, or a TorchGenerator in the state before");
    return false;
}

static enum cattn_status compute(const void *params) { return cattn_attention_backward(params); }

static bool run(struct backward *b, PyObject *rng) {
    b->call.params->path = CATTN_PATH_TILE;
    return cattn_call_run(&b->call, rng, 3 * cattn_attention_work(b->call.params), compute, &b->params);
}

/* The gradients, and the dtype that those of query, key and value are to have. */
static PyObject *build_result(const struct backward *b) {
    PyObject *fields[N_GRADIENTS], *descr = (PyObject *)PyArray_DescrFromType(b->call.stored), *result = NULL;
    for (int i = 0; i < N_GRADIENTS; i++)
        fields[i] = b->gradients[i] != NULL ? (PyObject *)b->gradients[i] : Py_None;
    if (descr != NULL)
        result = PyTuple_Pack(N_GRADIENTS + 1, fields[0], fields[1], fields[2], fields[3], fields[4], descr);
    Py_XDECREF(descr);
    return result;
}

/* attention_backward(the arguments of attention, of which the extras and out do not count, grad_out, out, lse) */
PyObject *cattn_py_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    struct backward b;
    struct cattn_attention_params *params = &b.params.forward;
    PyObject *result = NULL;
    if (!cattn_error_count("attention_backward", n_args, N_BACKWARD))
        return NULL;
    b.call = (struct cattn_call){.state = cattn_state(module),
                                 .params = params,
                                 .stacklevel = CATTN_BEHIND_PYTHON,
                                 .dims = b.dims,
                                 .bias_dims = b.bias_dims};
    memset(b.given, 0, sizeof b.given);
    memset(b.gradients, 0, sizeof b.gradients);
    if (!cattn_call_parse(&b.call, args) || !check_rng(&b, args[ARG_RNG]))
        goto done;
    for (int i = 0; i < N_GIVEN; i++) {
        if (!parse_given(&b, i, args[ARG_GRAD_OUT + i]))
            goto done;
    }
    if (!make_gradients(&b, args))
        goto done;
    params->query_starts.data = params->key_starts.data = NULL;
    params->weights.data = params->dropout_mask.data = NULL;
    params->store_scores = false;
    if (run(&b, args[ARG_RNG]))
        result = build_result(&b);
done:
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)b.call.inputs[i]);
    for (int i = 0; i < N_GIVEN; i++)
        Py_XDECREF((PyObject *)b.given[i]);
    for (int i = 0; i < N_GRADIENTS; i++)
        Py_XDECREF((PyObject *)b.gradients[i]);
    cattn_ranges_clear(&b.call.ranges);
    return result;
}

/* ---- softmax ---- */

static enum cattn_status compute_softmax(const void *params) { return cattn_softmax_backward(params); }

static bool run_softmax(struct cattn_softmax_backward_params *params, PyArrayObject *out) {
    params->num_threads = cattn_get_num_threads();
    const bool brief = PyArray_SIZE(out) <= CATTN_GIL_ELEMENTS;
    return cattn_error_status(cattn_compute(brief, &params->poll, compute_softmax, params));
}

/* At once after their sizes: what runs Python code comes later, and might change the arrays. */
static void fill_softmax(struct cattn_softmax_backward_params *params, PyArrayObject *const *inputs, int nd,
                         const npy_intp *dims) {
    params->dtype = PyArray_TYPE(inputs[1]) == NPY_FLOAT ? CATTN_F32 : CATTN_F64;
    params->n_batch_dims = nd - 1;
    params->n_rows = 1;
    for (int axis = 0; axis < nd - 1; axis++) {
        params->batch_shape[axis] = dims[axis];
        params->n_rows *= dims[axis];
    }
    params->n_cols = dims[nd - 1];
    cattn_tensor_rows(&params->grad, inputs[0], nd, nd - 1);
    cattn_tensor_rows(&params->weights, inputs[1], nd, nd - 1);
}

/* softmax_backward(grad_out, weights, scale, out) over the last axis; at least one dimension */
PyObject *cattn_py_softmax_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    static const char *const names[] = {"grad_out", "weights"};
    struct binding_state *state = cattn_state(module);
    struct cattn_softmax_backward_params params;
    PyArrayObject *inputs[2] = {NULL, NULL};
    struct cattn_output output = {NULL, NULL};
    PyObject *result = NULL;
    if (!cattn_error_count("softmax_backward", n_args, 4))
        return NULL;
    for (int i = 0; i < 2; i++) {
        inputs[i] = cattn_arg_floats(state, args[i], names[i]);
        if (inputs[i] == NULL)
            goto done;
    }
    const int type = cattn_arg_promote(state, inputs, 2), nd = PyArray_NDIM(inputs[1]);
    npy_intp dims[NPY_MAXDIMS];
    if (type < 0 || !check_shape(inputs[0], "grad_out", "weights", nd, PyArray_DIMS(inputs[1])))
        goto done;
    if (type != cattn_arg_compute_type(type)) {
        PyErr_SetString(PyExc_TypeError, "weights must be float32 or float64: cattn.softmax_backward widens halves");
        goto done;
    }
    if (nd == 0) {
        PyErr_SetString(PyExc_ValueError, "weights must have at least 1 dimension, got 0");
        goto done;
    }
    memcpy(dims, PyArray_DIMS(inputs[1]), (size_t)nd * sizeof *dims);
    fill_softmax(&params, inputs, nd, dims);
    if (!cattn_arg_scale(args[2], type, &params.scale))
        goto done;
    const bool first = args[3] == (PyObject *)inputs[0]; /* in place of one or the other */
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = type,
                                           .nd = nd,
                                           .dims = dims,
                                           .inputs = inputs,
                                           .n_inputs = 2,
                                           .in_place = inputs[first ? 0 : 1]};
    if (!cattn_arg_output(state, args[3], &spec, &output))
        goto done;
    cattn_tensor_rows(&params.out, output.array, nd, nd - 1);
    if (params.n_cols == 1)
        params.grad.col = params.weights.col = params.out.col = 1;
    if (run_softmax(&params, output.array) && cattn_output_finish(&output))
        result = cattn_output_result(&output);
done:
    Py_XDECREF((PyObject *)inputs[0]);
    Py_XDECREF((PyObject *)inputs[1]);
    cattn_output_clear(&output);
    return result;
}
