/* choose_keys.c -- choose_keys(...): parse, allocate, run the core, build the result. */
#include "attention_call.h"

struct choice {
    struct cattn_call call;
    struct cattn_choice_params params;
    PyArrayObject *weights, *scores; /* owned, or NULL */
    struct cattn_output out;
    struct cattn_draw draw;
    struct cattn_frozen frozen;
};

/* ---- arguments ---- */

static bool parse_activation(struct choice *c, PyObject *activation) {
    c->params.relu = PyUnicode_Check(activation) && PyUnicode_CompareWithASCIIString(activation, "relu") == 0;
    return activation == Py_None || c->params.relu ||
           cattn_error_value(activation, "activation must be None or 'relu'");
}

/* What the shapes of the call depend on. */
static bool parse_blocks(struct choice *c, PyObject *const *args) {
    struct cattn_choice_params *params = &c->params;
    if (!cattn_arg_count(args[ARG_block_size], "block_size", 1, INT32_MAX, &params->block_size) ||
        !cattn_arg_bool(args[ARG_pooled], "pooled", &params->pooled))
        return false;
    c->call.pooled = params->pooled ? params->block_size : 1;
    return true;
}

static bool parse_counts(struct choice *c, PyObject *const *args) {
    struct cattn_choice_params *params = &c->params;
    if (!cattn_arg_count(args[ARG_count], "count", 1, NPY_MAX_INTP, &params->count) ||
        !cattn_arg_count(args[ARG_first], "first", 0, params->count, &params->first) ||
        !cattn_arg_count(args[ARG_last], "last", 0, params->count, &params->last))
        return false;
    return params->first <= params->count - params->last ||
           cattn_raise(PyExc_ValueError, "first + last must be at most count, %zd, got %zd + %zd",
                       (Py_ssize_t)params->count, (Py_ssize_t)params->first, (Py_ssize_t)params->last);
}

/* Sets the number of tokens, of which a pooled row of key has block_size, and the length of a list of keys. */
static bool settle_sizes(struct choice *c, PyObject *const *args) {
    struct cattn_choice_params *params = &c->params;
    struct cattn_attention_params *p = &params->forward;
    const int64_t size = params->block_size, edge = params->pooled ? size - 1 : 0;
    const int64_t each = params->pooled ? size : 1, rows = p->seqlen_k;
    if (rows > (INT32_MAX - edge) / each)
        return cattn_raise(PyExc_ValueError, "key must have less than 2**31 keys, got %zd", (Py_ssize_t)rows);
    if (p->num_heads == 0)
        return cattn_raise(PyExc_ValueError, "query must have at least one head to choose keys, got 0");
    const int64_t blocks = params->pooled ? rows : cattn_ceil_div(rows, size);
    const int64_t edges = p->ranges.left == CATTN_UNBOUNDED ? edge : 2 * edge;
    p->seqlen_k = rows * each + edge;
    if (params->pooled && args[ARG_key_value_seq_lengths] == Py_None)
        p->ranges.key_length = rows * each;
    p->ranges.seqlen_k = p->seqlen_k;
    params->n_columns = cattn_min(cattn_min(params->count, blocks) * size + edges, p->seqlen_k);
    c->call.shape.n_top = params->n_columns;
    return true;
}

/* ValueError if a mask differs between heads, which choose together. */
static bool check_mask(const struct cattn_attention_params *p, const struct cattn_tensor *mask, const char *name) {
    return mask->data == NULL || mask->head == 0 || p->num_heads == 1 ||
           cattn_raise(PyExc_ValueError,
                       "%s must be the same for all heads, which choose keys together: its axis of "
                       "heads must have size 1",
                       name);
}

static bool check_masks(const struct cattn_attention_params *p, PyObject *const *args) {
    const bool is_added = args[ARG_attn_mask] != Py_None && p->attn_mask.data == NULL;
    const int n = is_added ? 1 : 0;
    return check_mask(p, &p->attn_mask, "attn_mask") && (!is_added || check_mask(p, &p->bias[0], "attn_mask")) &&
           (p->n_bias == n || check_mask(p, &p->bias[n], "bias"));
}

/* weights: a number for each head and query. */
static bool parse_weights(struct choice *c, PyObject *object) {
    const struct cattn_call *call = &c->call;
    struct cattn_array frozen;
    int64_t dims[NPY_MAXDIMS];
    if (object == Py_None)
        return true;
    if ((c->weights = cattn_arg_floats(call->state, object, "weights")) == NULL ||
        (PyArray_TYPE(c->weights) != call->compute_type &&
         !cattn_arg_widen(call->state, &c->weights, call->compute_type)))
        return false;
    cattn_freeze(c->weights, "weights", &frozen);
    const int nd = cattn_axes_shape(&call->shape, call->params, "NT", dims);
    if (!cattn_check_broadcast(cattn_python, &frozen, nd, dims, "the shape (..., H, T_q)", ""))
        return false;
    cattn_axes_view(&call->shape, "NT", BROADCASTS, &frozen, &c->params.weights);
    return true;
}

/* ---- results ---- */

/* They have one row for all heads. */
static bool make_results(struct choice *c, PyObject *out, PyObject *return_scores) {
    static const char *const axes = "NTP";
    struct cattn_call *call = &c->call;
    const int64_t num_heads = call->params->num_heads;
    int64_t dims[NPY_MAXDIMS];
    bool wants_scores;
    if (!cattn_arg_flag(return_scores, "return_scores", &wants_scores))
        return false;
    call->params->num_heads = 1;
    const int nd = cattn_axes_shape(&call->shape, call->params, axes, dims);
    if (wants_scores)
        c->scores = cattn_call_new(call, axes, call->compute_type, false, &c->params.scores);
    call->params->num_heads = num_heads;
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = NPY_INT32,
                                           .nd = nd,
                                           .dims = dims,
                                           .inputs = call->inputs,
                                           .n_inputs = N_ATTENTION_OPERANDS};
    if ((wants_scores && c->scores == NULL) || !cattn_arg_output(call->state, out, &spec, &c->out))
        return false;
    struct cattn_array frozen;
    cattn_freeze(c->out.array, "out", &frozen);
    cattn_axes_view(&call->shape, axes, EXACTLY, &frozen, &c->params.indices);
    return true;
}

static PyObject *build_result(struct choice *c) {
    if (!cattn_output_finish(&c->out))
        return NULL;
    PyObject *indices = cattn_output_result(&c->out);
    return c->scores == NULL ? indices : Py_BuildValue("(NO)", indices, (PyObject *)c->scores);
}

/* ---- the call ---- */

static enum cattn_status compute(const void *params) { return cattn_choose_keys(params); }

static bool parse(struct choice *c, PyObject *const *args) {
    struct cattn_choice_params *params = &c->params;
    return parse_activation(c, args[ARG_activation]) && parse_blocks(c, args) && parse_counts(c, args) &&
           cattn_call_parse(&c->call, args) && settle_sizes(c, args) && check_masks(&params->forward, args) &&
           parse_weights(c, args[ARG_weights]) && make_results(c, args[ARG_out], args[ARG_return_scores]) &&
           cattn_call_begin(&c->call);
}

static PyObject *run(struct choice *c, struct binding_state *state, PyObject **args) {
    PyObject *result = NULL, *no_dropout = PyFloat_FromDouble(0);
    if (no_dropout == NULL)
        return NULL;
    args[ARG_dropout_p] = no_dropout;
    args[ARG_value] = NULL;
    cattn_clear_choice(&c->params);
    c->call = (struct cattn_call){.state = state, .params = &c->params.forward, .frozen = &c->frozen};
    c->weights = c->scores = NULL;
    c->out = (struct cattn_output){NULL, NULL};
    cattn_draw_clear(&c->draw);
    if (parse(c, args)) {
        c->params.forward.path = CATTN_PATH_AUTO;
        if (cattn_call_run(&c->call, Py_None, cattn_attention_work(c->call.params), compute, &c->params, &c->draw))
            result = build_result(c);
    }
    cattn_call_clear(&c->call);
    cattn_output_clear(&c->out);
    Py_XDECREF((PyObject *)c->weights);
    Py_XDECREF((PyObject *)c->scores);
    Py_DECREF(no_dropout);
    return cattn_draw_end(&c->draw, result);
}

PyObject *cattn_body_choose_keys(struct binding_state *state, PyObject **args) {
    struct choice *c = PyMem_Malloc(sizeof *c); /* too large for a small stack beside the frames of the core */
    if (c == NULL)
        return PyErr_NoMemory();
    PyObject *result = run(c, state, args);
    PyMem_Free(c);
    return result;
}
