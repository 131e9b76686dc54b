/* attention_backward.c -- attention_backward(...): parse, check the forward pass's results, allocate, run the core.
 *
 * The core's gradients have the shapes of the whole call. Where an argument was broadcast, or is in half precision, the
 * helper sum_gradients makes of them what the caller gets.
 */
#include "attention_call.h"

enum { GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS, GRAD_SINKS, GRAD_GATE, N_GRADIENTS };

struct backward {
    struct cattn_call call;
    struct cattn_backward_params params;
    struct cattn_results results;
    PyArrayObject *tangents[CATTN_N_TANGENTS]; /* owned, or NULL */
    PyArrayObject *gradients[N_GRADIENTS];     /* owned, or NULL: no such argument */
    struct cattn_misfit misfit;
    struct cattn_draw draw;
    struct cattn_frozen frozen;
};

/* ---- gradients ---- */

/* The core writes the gradients of query and gate once, and adds to the others. This one has a shape of its own. */
static bool make_sum(struct backward *b, int i, const char *axes, int nd, const int64_t *dims,
                     struct cattn_tensor *tensor) {
    struct cattn_array frozen;
    b->gradients[i] = cattn_new_zeros(nd, dims, b->call.compute_type);
    if (b->gradients[i] == NULL)
        return false;
    cattn_freeze(b->gradients[i], "the gradient", &frozen);
    cattn_axes_view(&b->call.shape, axes, BROADCASTS, &frozen, tensor);
    return true;
}

/* The gradient of a bias of one row or one column is summed over the scores' rows or columns as it is computed. */
static bool make_bias_gradient(struct backward *b) {
    struct cattn_call *call = &b->call;
    const struct cattn_array *bias = &call->frozen->bias;
    if (bias->data == NULL)
        return true;
    const int own = bias->nd, nd = call->shape.nd;
    const bool one_row = own < 2 || bias->dims[own - 2] == 1, one_col = own < 1 || bias->dims[own - 1] == 1;
    if (one_row && call->params->seqlen_q != 1)
        b->params.bias_sum = CATTN_BIAS_SUM_ROWS;
    else if (one_col && call->params->seqlen_k != 1)
        b->params.bias_sum = CATTN_BIAS_SUM_COLS;
    else
        return make_sum(b, GRAD_BIAS, "NTS", own, bias->dims, &b->params.grad_bias);
    int64_t dims[NPY_MAXDIMS];
    memcpy(dims, call->shape.dims, (size_t)nd * sizeof *dims);
    dims[b->params.bias_sum == CATTN_BIAS_SUM_ROWS ? nd - 2 : nd - 1] = 1;
    return make_sum(b, GRAD_BIAS, "NTS", nd, dims, &b->params.grad_bias);
}

static bool make_gradients(struct backward *b) {
    static const char *const axes[] = {[GRAD_QUERY] = "NTH", [GRAD_KEY] = "KSH", [GRAD_VALUE] = "KSD"};
    struct cattn_tensor *const tensors[] = {&b->params.grad_query, &b->params.grad_key, &b->params.grad_value};
    const struct cattn_call *call = &b->call;
    const int n_batch_dims = call->shape.n_batch_dims;
    for (int i = GRAD_QUERY; i <= GRAD_VALUE; i++) {
        b->gradients[i] = cattn_call_new(call, axes[i], call->compute_type, i != GRAD_QUERY, tensors[i]);
        if (b->gradients[i] == NULL)
            return false;
    }
    if (!make_bias_gradient(b))
        return false;
    if (call->inputs[OPERAND_gate] != NULL &&
        (b->gradients[GRAD_GATE] = cattn_call_new(call, cattn_operands[OPERAND_gate].axes, call->compute_type, false,
                                                  &b->params.grad_gate)) == NULL)
        return false;
    if (call->inputs[OPERAND_sinks] == NULL)
        return true;
    int64_t dims[NPY_MAXDIMS];
    memcpy(dims, call->shape.dims, (size_t)n_batch_dims * sizeof *dims);
    if (call->packed != NULL)
        dims[0] = call->packed->queries.n_sequences;
    dims[n_batch_dims] = call->params->num_heads;
    return make_sum(b, GRAD_SINKS, "N", n_batch_dims + 1, dims, &b->params.grad_sinks);
}

/* ---- running ---- */

/* The dropout mask of the forward pass must be drawn again, which not every rng can do. */
static bool check_rng(const struct backward *b, PyObject *rng) {
    if (!b->params.forward.dropout.enabled || cattn_torch_check(b->call.state, rng))
        return true;
    if (!cattn_rng_check(rng))
        return false;
    if (PyIndex_Check(rng))
        return true;
    return cattn_raise(PyExc_ValueError, "rng must be what draws the forward pass's mask again: the int that it was "
                                         "given, its result's dropout_seed, or a TorchGenerator in the state before");
}

static enum cattn_status compute(const void *params) {
    const struct cattn_backward_params *p = params;
    return p->forward.key_indices.data ? cattn_gathered_backward(p) : cattn_attention_backward(p);
}

static bool run(struct backward *b, PyObject *rng) {
    b->call.params->path = CATTN_PATH_TILE;
    return cattn_call_run(&b->call, rng, 3 * cattn_attention_work(b->call.params), compute, &b->params, &b->draw);
}

/* The place of the misfit in lse. For packed sequences lse has the shape (1, heads, all rows) here, and (heads, all
 * rows) for the caller. */
static struct cattn_shape_text place_of_misfit(const struct backward *b) {
    const struct cattn_call *call = &b->call;
    int64_t place[NPY_MAXDIMS];
    int64_t batch = b->misfit.batch;
    for (int axis = call->shape.n_batch_dims - 1; axis >= 0; axis--) {
        place[axis] = call->shape.dims[axis] > 0 ? (batch % call->shape.dims[axis]) : 0;
        batch = call->shape.dims[axis] > 0 ? batch / call->shape.dims[axis] : 0;
    }
    if (call->shape.has_heads)
        place[call->shape.nd - 3] = b->misfit.head;
    place[call->shape.nd - 2] = b->misfit.row;
    const int skipped = call->packed != NULL;
    return cattn_show_shape(call->shape.nd - 1 - skipped, place + skipped);
}

/* Raises ValueError if lse or out is not the result of a forward pass with these arguments: an option was left out or
 * changed. */
static bool check_misfit(const struct backward *b) {
    if (!b->misfit.found)
        return true;
    const struct cattn_shape_text place = place_of_misfit(b);
    const struct cattn_number_text sum = cattn_show_number(b->misfit.weights, 3);
    const bool of_tangents = b->params.of_tangents, is_out = b->misfit.kind == CATTN_MISFIT_OUT_TANGENT;
    switch (b->misfit.kind) {
    case CATTN_MISFIT_LSE:
        return cattn_raise(
            PyExc_ValueError,
            "lse is not that of these arguments: at %s the weights sum to %s, not to 1. Pass every option of the "
            "forward pass (is_causal, scale, masks, lengths, ...)%s",
            place.text, sum.text,
            of_tangents
                ? ""
                : "; if lse counts keys of other calls, too, because merge_attention made it, pass merged=True");
    case CATTN_MISFIT_OUT:
        return cattn_raise(
            PyExc_ValueError,
            "out is not the output of these arguments at %s. Pass value and every option of the forward pass "
            "(dropout_p and rng, ...)%s",
            place.text,
            of_tangents
                ? ""
                : "; if out counts keys of other calls, too, because merge_attention made it, pass merged=True");
    default:
        return cattn_raise(
            PyExc_ValueError,
            "%s is not the derivative of %s in the direction of these tangents, at %s. Pass every tangent "
            "of the call of attention_jvp (query_tangent, key_tangent, value_tangent, bias_tangent, "
            "sinks_tangent), and its results",
            is_out ? "out_tangent" : "lse_tangent", is_out ? "out" : "lse", place.text);
    }
}

/* Whether the core's gradients have the types and shapes of the arguments. */
static bool are_final(const struct backward *b, const struct cattn_array *const *of) {
    bool final = b->call.stored_type == b->call.compute_type;
    for (int i = 0; final && i < N_GRADIENTS; i++) {
        PyArrayObject *gradient = b->gradients[i];
        final = gradient == NULL || PyArray_NDIM(gradient) == of[i]->nd;
        for (int axis = 0; final && gradient != NULL && axis < of[i]->nd; axis++)
            final = PyArray_DIM(gradient, axis) == of[i]->dims[axis];
    }
    return final;
}

/* Returns AttentionGradients. Only if no gradient has to be summed or rounded first. */
static PyObject *gather(const struct backward *b) {
    PyObject *fields[N_GRADIENTS];
    for (int i = 0; i < N_GRADIENTS; i++)
        fields[i] = b->gradients[i] != NULL ? (PyObject *)b->gradients[i] : Py_None;
    return PyObject_CallFunctionObjArgs(b->call.state->attention_gradients, fields[GRAD_QUERY], fields[GRAD_KEY],
                                        fields[GRAD_VALUE], fields[GRAD_BIAS], fields[GRAD_SINKS], fields[GRAD_GATE],
                                        NULL);
}

/* sum_gradients(gradients, shapes of the arguments, dtype of the gradients of query, key, value and gate, whether the
 * tokens stand before the heads) */
static PyObject *build_result(const struct backward *b) {
    const struct cattn_frozen *frozen = &b->frozen;
    struct cattn_array sinks = {.nd = 0};
    if (b->call.inputs[OPERAND_sinks] != NULL) /* a copy that nobody else has */
        cattn_freeze(b->call.inputs[OPERAND_sinks], "sinks", &sinks);
    const struct cattn_array *const of[N_GRADIENTS] = {&frozen->inputs[OPERAND_query],
                                                       &frozen->inputs[OPERAND_key],
                                                       &frozen->inputs[OPERAND_value],
                                                       &frozen->bias,
                                                       &sinks,
                                                       &frozen->gate};
    if (are_final(b, of))
        return gather(b);
    PyObject *gradients = PyList_New(0), *shapes = PyList_New(0), *result = NULL;
    PyObject *descr = (PyObject *)PyArray_DescrFromType(b->call.stored_type);
    bool packed = gradients != NULL && shapes != NULL && descr != NULL;
    for (int i = 0; packed && i < N_GRADIENTS; i++) {
        PyObject *shape = cattn_shape_tuple(b->gradients[i] != NULL ? of[i]->nd : 0, of[i]->dims);
        PyObject *gradient = b->gradients[i] != NULL ? (PyObject *)b->gradients[i] : Py_None;
        packed = shape != NULL && PyList_Append(shapes, shape) == 0 && PyList_Append(gradients, gradient) == 0;
        Py_XDECREF(shape);
    }
    if (packed)
        result = PyObject_CallFunctionObjArgs(b->call.state->sum_gradients, gradients, shapes, descr,
                                              b->call.shape.tokens_first ? Py_True : Py_False, NULL);
    Py_XDECREF(gradients);
    Py_XDECREF(shapes);
    Py_XDECREF(descr);
    return result;
}

/* What one of the two functions takes besides attention's options. */
struct given {
    const char *const *names;
    PyObject *results[CATTN_N_RESULTS]; /* NULL: there is no such argument */
    PyObject *merged;                   /* or NULL */
    PyObject *const *tangents;          /* or NULL */
};

static bool parse(struct backward *b, PyObject *const *args, const struct given *given) {
    bool merged = false;
    if (!cattn_call_parse(&b->call, args) || !check_rng(b, args[ARG_rng]) ||
        (given->merged != NULL && !cattn_arg_bool(given->merged, "merged", &merged)))
        return false;
    b->misfit.found = false;
    b->params.misfit = merged ? NULL : &b->misfit;
    struct cattn_tensor *const tensors[] = {&b->params.grad_out,    &b->params.grad_lse,     &b->params.forward.out,
                                            &b->params.forward.lse, &b->params.tangents.out, &b->params.tangents.lse};
    for (int i = 0; i < CATTN_N_RESULTS; i++) {
        if (given->results[i] != NULL && (i != CATTN_GRAD_LSE || given->results[i] != Py_None) &&
            !cattn_results_take(&b->results, &b->call, i, given->results[i], given->names[i], tensors[i]))
            return false;
    }
    b->params.plain_out = b->results.plain_out;
    b->params.of_tangents = given->tangents != NULL;
    return given->tangents == NULL ||
           (cattn_tangents_refuse(&b->call, args) &&
            cattn_tangents_take(&b->call, given->tangents, b->tangents, &b->params.tangents));
}

static PyObject *differentiate(struct backward *b, struct binding_state *state, PyObject *const *args,
                               struct cattn_packed *packed, const struct given *given) {
    PyObject *result = NULL;
    cattn_clear_backward(&b->params);
    b->call = (struct cattn_call){.state = state,
                                  .params = &b->params.forward,

                                  .frozen = &b->frozen,
                                  .packed = packed,
                                  .rounds_inputs = true};
    b->results = (struct cattn_results){.plain_out = false};
    memset(b->tangents, 0, sizeof b->tangents);
    memset(b->gradients, 0, sizeof b->gradients);
    cattn_draw_clear(&b->draw);
    if (parse(b, args, given) && make_gradients(b) && cattn_call_begin(&b->call) && run(b, args[ARG_rng]) &&
        check_misfit(b))
        result = build_result(b);
    cattn_call_clear(&b->call);
    cattn_results_clear(&b->results);
    cattn_tangents_clear(b->tangents);
    for (int i = 0; i < N_GRADIENTS; i++)
        Py_XDECREF((PyObject *)b->gradients[i]);
    return cattn_draw_end(&b->draw, result);
}

static PyObject *differentiate_given(struct binding_state *state, PyObject *const *args, struct cattn_packed *packed,
                                     const struct given *given) {
    struct backward *b = PyMem_Malloc(sizeof *b); /* too large for a small stack beside the frames of the core */
    if (b == NULL)
        return PyErr_NoMemory();
    PyObject *result = differentiate(b, state, args, packed, given);
    PyMem_Free(b);
    return result;
}

static PyObject *differentiate_attention(struct binding_state *state, PyObject *const *args,
                                         struct cattn_packed *packed) {
    static const char *const names[] = {"grad_out", "grad_lse", "out", "lse"};
    const struct given given = {names,
                                {args[ARG_grad_out], args[ARG_grad_lse], args[ARG_out], args[ARG_lse], NULL, NULL},
                                args[ARG_merged],
                                NULL};
    return differentiate_given(state, args, packed, &given);
}

PyObject *cattn_body_attention_backward(struct binding_state *state, PyObject **args) {
    return differentiate_attention(state, args, NULL);
}

PyObject *cattn_body_varlen_attention_backward(struct binding_state *state, PyObject **args) {
    struct cattn_packed packed = {.args = args + N_BACKWARD_ARGS};
    return differentiate_attention(state, args, &packed);
}

PyObject *cattn_body_attention_jvp_backward(struct binding_state *state, PyObject **args) {
    static const char *const names[] = {"grad_out_tangent", "grad_lse_tangent", "out", "lse",
                                        "out_tangent",      "lse_tangent"};
    const struct given given = {names,
                                {args[ARG_jvp_grad_out_tangent], args[ARG_jvp_grad_lse_tangent], args[ARG_out],
                                 args[ARG_jvp_lse], args[ARG_jvp_out_tangent], args[ARG_jvp_lse_tangent]},
                                NULL,
                                args + ARG_jvp_query_tangent};
    return differentiate_given(state, args, NULL, &given);
}
