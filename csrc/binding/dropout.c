/* dropout.c -- dropout(...): parse, check, allocate, run, return. */
#include "args.h"

struct call {
    struct binding_state *state;
    struct cattn_dropout_params *params;
    PyArrayObject *x;
    struct cattn_output output, mask;
    int type, own_nd;           /* of x */
    struct cattn_array *frozen; /* x */
};

static void take_x(struct call *call) {
    struct cattn_dropout_params *params = call->params;
    const struct cattn_array *x = call->frozen;
    cattn_clear_dropout(params);
    call->type = PyArray_TYPE(call->x);
    call->own_nd = cattn_freeze_rows(call->x, "x", call->frozen);
    CATTN_FILL_ROWS(params, x, call->type, x->nd - 1);
    params->storage = cattn_arg_storage(call->type);
    cattn_view_rows(&params->x, x, x->nd, x->nd - 1);
    if (params->n_cols == 1)
        params->x.col = 1;
}

static void view_output(const struct call *call, const struct cattn_output *output, struct cattn_tensor *tensor) {
    cattn_tensor_rows(tensor, output->array, call->frozen->nd, call->frozen->nd - 1);
    if (call->params->n_cols == 1)
        tensor->col = 1;
}

static bool make_outputs(struct call *call, PyObject *out, bool return_mask) {
    struct cattn_output_spec spec = {"out", call->type, call->own_nd, call->frozen->dims, &call->x, 1, call->x};
    if (!cattn_arg_output(call->state, out, &spec, &call->output))
        return false;
    view_output(call, &call->output, &call->params->out);
    if (!return_mask)
        return true;
    spec.name = "mask";
    spec.type = NPY_BOOL;
    if (!cattn_arg_output(call->state, NULL, &spec, &call->mask))
        return false;
    view_output(call, &call->mask, &call->params->mask);
    return true;
}

/* Nothing is dropped: the result is a copy, the mask all True. */
static bool copy(struct call *call) {
    if (!cattn_copy_into(call->output.array, call->x) || !cattn_output_finish(&call->output))
        return false;
    if (call->mask.array != NULL)
        memset(PyArray_DATA(call->mask.array), 1, (size_t)PyArray_SIZE(call->mask.array));
    return true;
}

CATTN_DEFINE_RUN(run, cattn_dropout, cattn_dropout_params)

static PyObject *build_result(const struct call *call, bool return_mask) {
    PyObject *result = cattn_output_result(&call->output);
    if (!return_mask)
        return result;
    PyObject *both = PyTuple_Pack(2, result, (PyObject *)call->mask.array);
    Py_DECREF(result);
    return both;
}

PyObject *cattn_body_dropout(struct binding_state *state, PyObject **args) {
    struct cattn_dropout_params params;
    struct cattn_draw draw;
    struct cattn_array frozen;
    struct call call = {.state = state, .params = &params, .frozen = &frozen};
    bool training, return_mask, filled;
    PyObject *result = NULL;
    call.x = cattn_arg_floats(state, args[DROPOUT_x], "x");
    if (call.x == NULL)
        return NULL;
    take_x(&call);
    cattn_draw_clear(&draw);
    if (!cattn_dropout_spec_from(args[DROPOUT_p], "p", &params.dropout) ||
        !cattn_arg_flag(args[DROPOUT_training], "training", &training) || !cattn_rng_check(args[DROPOUT_rng]) ||
        !cattn_arg_flag(args[DROPOUT_return_mask], "return_mask", &return_mask) ||
        !make_outputs(&call, args[DROPOUT_out], return_mask))
        goto done;
    if (!training || !params.dropout.enabled)
        filled = copy(&call);
    else
        filled = cattn_draw_begin(state, args[DROPOUT_rng], &params.dropout, &draw) &&
                 run(&params, call.output.array) && cattn_output_finish(&call.output);
    if (filled)
        result = build_result(&call, return_mask);
done:
    Py_XDECREF((PyObject *)call.x);
    cattn_output_clear(&call.output);
    cattn_output_clear(&call.mask);
    return cattn_draw_end(&draw, result);
}
