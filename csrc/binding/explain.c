/* explain.c -- explain(...): what a call of attention would return, and how the core would compute it. It allocates and
 * draws nothing.
 */
#include "attention.h"
#include "error.h"
#include "gil.h"

/* {name: (shape, dtype)} of each output. */
static PyObject *describe_outputs(struct cattn_call *call) {
    PyObject *outputs = PyDict_New();
    for (int i = 0; outputs != NULL && i < N_OUTPUTS; i++) {
        if (!call->wants[i])
            continue;
        npy_intp dims[NPY_MAXDIMS];
        int type;
        const int nd = cattn_call_output(call, i, NULL, &type, dims);
        PyObject *shape = cattn_shape_tuple(nd, dims), *output = NULL;
        if (shape != NULL)
            output = Py_BuildValue("(NN)", shape, (PyObject *)PyArray_DescrFromType(type));
        if (output == NULL || PyDict_SetItemString(outputs, cattn_output_names[i], output) < 0)
            Py_CLEAR(outputs);
        Py_XDECREF(output);
    }
    return outputs;
}

static PyObject *build_result(struct cattn_call *call, const struct cattn_explanation *plan) {
    static const char *const paths[] = {"auto", "tile", "rows", "split", "tiny"};
    const struct cattn_attention_params *params = call->params;
    PyObject *depth = Py_BuildValue("(L)", (long long)params->head_dim + (long long)params->d_v), *result = NULL;
    PyObject *fields = Py_BuildValue(
        "{s:N,s:s,s:s,s:L,s:L,s:L,s:L,s:L,s:n,s:i}", "outputs", describe_outputs(call), "path", paths[plan->path],
        "instruction_set", cattn_isa_info(cattn_isa_current()).name, "tasks", (long long)plan->n_tasks, "rows_per_task",
        (long long)plan->block_rows, "key_blocks_visited", (long long)plan->n_visited, "key_blocks_skipped",
        (long long)plan->n_skipped, "visible_pairs", (long long)plan->n_keys, "scratch_bytes_per_thread",
        (Py_ssize_t)plan->scratch_size, "threads", params->num_threads);
    if (depth != NULL && fields != NULL)
        result = PyObject_Call(call->state->make_explanation, depth, fields);
    Py_XDECREF(depth);
    Py_XDECREF(fields);
    return result;
}

PyObject *cattn_body_explain(struct binding_state *state, PyObject **args) {
    struct cattn_attention_params params;
    npy_intp dims[NPY_MAXDIMS];
    PyObject *result = NULL;
    struct cattn_call call = {.state = state, .params = &params, .dims = dims};
    if (cattn_call_parse(&call, args) && cattn_rng_check(args[ARG_rng]) &&
        cattn_call_parse_wants(&call, args, CATTN_STAGE_OUT)) {
        params.num_threads = cattn_get_num_threads();
        params.path = state->path;
        PyThreadState *thread;
        struct cattn_explanation plan;
        cattn_gil_release(&params.poll, &thread);
        const enum cattn_status status = cattn_attention_explain(&params, &plan);
        PyEval_RestoreThread(thread);
        if (cattn_error_status(status))
            result = build_result(&call, &plan);
    }
    cattn_call_clear(&call);
    return result;
}
