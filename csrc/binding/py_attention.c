/* py_attention.c -- attention(...) and attention_weights(...): parse, allocate, run the core, build the result.
 *
 * One struct cattn_call carries what a call owns; params is filled in place and never cleared as a whole (it is large,
 * and only n_lead of its 64 strides count).
 */
#include "attention_call.h"
#include "error.h"

/* ---- outputs ---- */

/* out= is None, an array for the one result, or an AttentionOutput: given[] gets borrowed fields. */
static bool unpack_out(struct cattn_call *call, PyObject *out, int single, PyObject **given) {
    static const char *const asked_by[] = {"", "need_weights", "return_lse", "return_dropout_mask"};
    const bool plain = out == Py_None || PyArray_CheckExact(out);
    const int is_tuple = plain ? 0 : PyObject_IsInstance(out, call->state->attention_output);
    if (is_tuple <= 0) {
        given[single] = out;
        if (is_tuple == 0 && out != Py_None && !PyArray_Check(out))
            return cattn_error_type("out", "a numpy.ndarray or a cattn.AttentionOutput", out);
        return is_tuple == 0;
    }
    call->as_tuple = true;
    for (int i = 0; i < N_OUTPUTS; i++) {
        given[i] = PyTuple_GetItem(out, i);
        if (given[i] == NULL)
            return false;
        if (given[i] != Py_None && !call->wants[i]) {
            PyErr_Format(PyExc_ValueError, "out has an array for %s, but %s is not asked for",
                         asked_by[i] + (i == WEIGHTS ? 5 : 7), asked_by[i]);
            return false;
        }
    }
    return true;
}

/* The log-sum-exp has the dtype computed in, or is float64 where the caller's array is. */
static int lse_type(struct cattn_call *call, PyObject *given) {
    if (given != NULL && PyArray_Check(given) && PyArray_TYPE((PyArrayObject *)given) == NPY_DOUBLE)
        call->params->double_lse = true;
    return call->params->double_lse ? NPY_DOUBLE : call->type;
}

static bool make_outputs(struct cattn_call *call, PyObject *const *given, const char *const *names) {
    struct cattn_attention_params *params = call->params;
    struct cattn_tensor *const tensors[] = {&params->out, &params->weights, &params->lse, &params->dropout_mask};
    const int head = call->heads ? CATTN_AXIS_HEAD : 0;
    const npy_intp seqlen_k = call->dims[call->nd - 1];
    const int types[N_OUTPUTS] = {call->stored, call->stored, lse_type(call, given[LSE]), NPY_BOOL};
    for (int i = 0; i < N_OUTPUTS; i++) {
        tensors[i]->data = NULL;
        if (!call->wants[i])
            continue;
        /* out's last axis is d_v where the call's is T_k */
        call->dims[call->nd - 1] = i == OUT ? (npy_intp)params->d_v : seqlen_k;
        const struct cattn_output_spec spec = {.name = names[i],
                                               .type = types[i],
                                               .nd = i == LSE ? call->nd - 1 : call->nd,
                                               .dims = call->dims,
                                               .inputs = call->inputs,
                                               .n_inputs = N_INPUTS};
        const bool made = cattn_arg_output(call->state, given[i], &spec, &call->outputs[i]);
        call->dims[call->nd - 1] = seqlen_k;
        if (!made)
            return false;
        cattn_tensor_from(tensors[i], call->outputs[i].array, call->n_batch_dims,
                          head | CATTN_AXIS_ROW | (i == LSE ? 0 : CATTN_AXIS_COL));
        for (int j = 0; call->outputs[i].given != NULL && j < i; j++) {
            if (!cattn_arg_outputs_apart(call->state, &call->outputs[j], names[j], &call->outputs[i], names[i]))
                return false;
        }
    }
    if (params->d_v == 1)
        params->out.col = 1;
    if (seqlen_k == 1)
        params->weights.col = params->dropout_mask.col = 1;
    return true;
}

/* ---- running ---- */

static enum cattn_status compute(const void *params) { return cattn_attention(params); }

static bool run(struct cattn_call *call, PyObject *rng) {
    struct cattn_attention_params *params = call->params;
    params->path = call->state->path;
    if (params->path != CATTN_PATH_AUTO && !cattn_attention_path_fits(params)) {
        PyErr_SetString(PyExc_ValueError, "the forced path cannot run this call");
        return false;
    }
    return cattn_call_run(call, rng, cattn_attention_work(params), compute, params);
}

static PyObject *build_result(struct cattn_call *call, int single) {
    PyObject *fields[N_OUTPUTS + 1] = {NULL}, *result = NULL;
    for (int i = 0; i < N_OUTPUTS; i++) {
        if (call->wants[i] && !cattn_output_finish(&call->outputs[i]))
            return NULL;
    }
    if (!call->as_tuple)
        return cattn_output_result(&call->outputs[single]);
    for (int i = 0; i < N_OUTPUTS; i++) {
        fields[i] = call->wants[i] ? cattn_output_result(&call->outputs[i]) : Py_None;
        if (!call->wants[i])
            Py_INCREF(Py_None);
    }
    if (call->has_seed) {
        fields[N_OUTPUTS] = PyLong_FromUnsignedLongLong(call->params->dropout.seed);
    } else {
        fields[N_OUTPUTS] = Py_None;
        Py_INCREF(Py_None);
    }
    if (fields[N_OUTPUTS] != NULL)
        result = PyObject_CallFunctionObjArgs(call->state->attention_output, fields[0], fields[1], fields[2], fields[3],
                                              fields[4], NULL);
    for (int i = 0; i <= N_OUTPUTS; i++)
        Py_XDECREF(fields[i]);
    return result;
}

static bool parse_stage(PyObject *object, enum stage *stage) {
    static const char *const names[] = {"qk", "softcap", "bias", "mask", "softmax", "dropout"};
    for (int i = 0; PyUnicode_Check(object) && i < STAGE_OUT; i++) {
        if (PyUnicode_CompareWithASCIIString(object, names[i]) == 0) {
            *stage = (enum stage)i;
            return true;
        }
    }
    PyErr_Format(PyExc_ValueError, "stage must be 'qk', 'softcap', 'bias', 'mask', 'softmax' or 'dropout', got %R",
                 object);
    return false;
}

/* Leaves out what comes after the stage. */
static void stop_at(struct cattn_attention_params *params, enum stage stage) {
    params->store_scores = stage < STAGE_SOFTMAX;
    if (stage < STAGE_DROPOUT)
        params->dropout.enabled = false;
    if (stage < STAGE_SOFTCAP)
        params->softcap = 0;
    if (stage < STAGE_BIAS) {
        params->slopes.data = NULL;
        params->n_bias = 0;
    }
    if (stage < STAGE_MASK) {
        params->attn_mask.data = NULL;
        params->ranges.all_visible = true;
    }
}

/* What varlen_attention passes behind the arguments of attention: int64 arrays, and the longest of each. Checked. */
enum { QUERY_STARTS = N_ARGS, QUERY_LENGTHS, KEY_STARTS, KEY_LENGTHS, MAX_QUERY, MAX_KEY, N_PACKED };

/* The call was parsed as one batch entry of all rows; now it becomes the sequences that are packed there. */
static bool unpack_sequences(struct cattn_call *call, PyObject *const *args) {
    struct cattn_attention_params *params = call->params;
    struct cattn_ranges *ranges = &params->ranges;
    struct cattn_tensor *const tensors[] = {&params->query_starts, &ranges->query_lengths, &params->key_starts,
                                            &ranges->key_lengths};
    for (int i = 0; i < 4; i++)
        cattn_tensor_from(tensors[i], (PyArrayObject *)args[QUERY_STARTS + i], 1, 0);
    params->batch_shape[0] = params->n_batch = PyArray_DIM((PyArrayObject *)args[QUERY_STARTS], 0);
    return cattn_arg_count(args[MAX_QUERY], "max_seqlen_q", 0, params->seqlen_q, &params->seqlen_q) &&
           cattn_arg_count(args[MAX_KEY], "max_seqlen_k", 0, params->seqlen_k, &params->seqlen_k) &&
           cattn_call_counts_fit(params);
}

/* args in the order of ARG_*. Before STAGE_OUT value is NULL and weights are the one result; with STAGE_DROPOUT the
 * mask comes along, to be applied to them. packed: more arguments follow. */
static PyObject *attend(PyObject *module, PyObject *const *args, enum stage stage, bool packed, int stacklevel) {
    static const char *const names[] = {"out", "out.weights", "out.lse", "out.dropout_mask"};
    static const char *const weights_names[] = {"out", "out", "out.lse", "out.dropout_mask"};
    struct cattn_attention_params params;
    npy_intp dims[NPY_MAXDIMS];
    PyObject *given[N_OUTPUTS] = {NULL}, *result = NULL;
    struct cattn_call call = {.state = cattn_state(module), .params = &params, .stacklevel = stacklevel, .dims = dims};
    const bool weights_only = stage < STAGE_OUT;
    const int single = weights_only ? WEIGHTS : OUT;

    call.wants[OUT] = !weights_only;
    if (!cattn_call_parse(&call, args) || !cattn_rng_check(args[ARG_RNG]) ||
        !cattn_arg_flag(args[ARG_NEED_WEIGHTS], "need_weights", &call.wants[WEIGHTS]) ||
        !cattn_arg_flag(args[ARG_RETURN_LSE], "return_lse", &call.wants[LSE]) ||
        !cattn_arg_flag(args[ARG_RETURN_DROPOUT_MASK], "return_dropout_mask", &call.wants[DROPOUT_MASK]))
        goto done;
    call.wants[WEIGHTS] |= weights_only;
    call.as_tuple = !weights_only && (call.wants[WEIGHTS] || call.wants[LSE] || call.wants[DROPOUT_MASK]);
    if (stage == STAGE_DROPOUT)
        call.as_tuple = call.wants[DROPOUT_MASK] = true;
    if (!weights_only && !unpack_out(&call, args[ARG_OUT], single, given))
        goto done;
    if (weights_only)
        given[WEIGHTS] = args[ARG_OUT];
    stop_at(&params, stage);
    if (!make_outputs(&call, given, weights_only ? weights_names : names))
        goto done;
    params.query_starts.data = NULL;
    if (packed && !unpack_sequences(&call, args))
        goto done;
    if (run(&call, args[ARG_RNG]))
        result = build_result(&call, single);
done:
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)call.inputs[i]);
    cattn_ranges_clear(&call.ranges);
    for (int i = 0; i < N_OUTPUTS; i++)
        cattn_output_clear(&call.outputs[i]);
    return result;
}

/* scaled_dot_product_attention(the arguments in the order of ARG_*) */
PyObject *cattn_attention_body(PyObject *module, PyObject *const *args, int stacklevel) {
    return attend(module, args, STAGE_OUT, false, stacklevel);
}

/* causal_attention(the same without is_causal) */
PyObject *cattn_causal_attention_body(PyObject *module, PyObject *const *args, int stacklevel) {
    const struct binding_state *state = cattn_state(module);
    PyObject *all[N_ARGS];
    for (int i = 0; i < N_ARGS; i++)
        all[i] = args[i > ARG_IS_CAUSAL ? i - 1 : i];
    all[ARG_IS_CAUSAL] = all[ARG_QUERY_OFFSET] == Py_None ? state->lower_right : state->upper_left;
    return attend(module, all, STAGE_OUT, false, stacklevel);
}

PyObject *cattn_py_varlen_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    if (!cattn_error_count("varlen_attention", n_args, N_PACKED))
        return NULL;
    return attend(module, args, STAGE_OUT, true, CATTN_BEHIND_PYTHON);
}

/* The arguments of attention, of which value and the extras do not count, and the stage. */
PyObject *cattn_py_attention_weights(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    enum stage stage;
    if (!cattn_error_count("attention_weights", n_args, N_ARGS + 1) || !parse_stage(args[N_ARGS], &stage))
        return NULL;
    PyObject *without_value[N_ARGS];
    memcpy(without_value, args, sizeof without_value);
    without_value[ARG_VALUE] = NULL;
    return attend(module, without_value, stage, false, CATTN_BEHIND_PYTHON);
}

/* explain(the arguments of attention): what the core would do, as a dict. Nothing is allocated or drawn. */
PyObject *cattn_py_explain(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    static const char *const paths[] = {"auto", "tile", "rows", "split", "tiny"};
    struct cattn_attention_params params;
    npy_intp dims[NPY_MAXDIMS];
    PyObject *result = NULL;
    struct cattn_call call = {
        .state = cattn_state(module), .params = &params, .stacklevel = CATTN_BEHIND_PYTHON, .dims = dims};
    if (!cattn_error_count("explain", n_args, N_ARGS))
        return NULL;
    if (cattn_call_parse(&call, args)) {
        params.query_starts.data = NULL;
        params.out.data = params.weights.data = params.lse.data = params.dropout_mask.data = NULL;
        params.num_threads = cattn_get_num_threads();
        params.path = call.state->path;
        params.dropout.torch = NULL;
        PyThreadState *thread;
        struct cattn_explanation told;
        cattn_gil_release(&params.poll, &thread);
        const enum cattn_status status = cattn_attention_explain(&params, &told);
        PyEval_RestoreThread(thread);
        if (cattn_error_status(status))
            result = Py_BuildValue("{s:s,s:s,s:L,s:L,s:L,s:L,s:L,s:n,s:i}", "path", paths[told.path], "instruction_set",
                                   cattn_isa_info(cattn_isa_current()).name, "tasks", (long long)told.n_tasks,
                                   "rows_per_task", (long long)told.block_rows, "key_blocks_visited",
                                   (long long)told.n_visited, "key_blocks_skipped", (long long)told.n_skipped,
                                   "visible_pairs", (long long)told.n_keys, "scratch_bytes_per_thread",
                                   (Py_ssize_t)told.scratch_size, "threads", params.num_threads);
    }
    for (int i = 0; i < N_INPUTS; i++)
        Py_XDECREF((PyObject *)call.inputs[i]);
    cattn_ranges_clear(&call.ranges);
    return result;
}
