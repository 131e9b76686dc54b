/* attention.c -- the forward functions of attention: parse, allocate, run the core, build the result. */
#include "attention_call.h"
#include "fp_mode.h"

/* ---- outputs ---- */

static const struct cattn_result_row OUTPUTS[N_OUTPUTS] = {
    {"out", "NTD", STORED}, {"weights", "NTL", STORED}, {"lse", "NT", COMPUTED}, {"dropout_mask", "NTS", MASK}};

/* out= is None, an array for the one result, or an AttentionOutput. Puts its arrays, borrowed, into given[]. */
static bool unpack_out(struct cattn_call *call, PyObject *out, PyObject **given) {
    const bool plain = out == Py_None || PyArray_CheckExact(out);
    const int is_tuple = plain ? 0 : PyObject_IsInstance(out, call->state->attention_output);
    if (is_tuple <= 0) {
        given[OUT] = out;
        if (is_tuple == 0 && out != Py_None && !PyArray_Check(out))
            return cattn_error_type("out", "a numpy.ndarray or a cattn.AttentionOutput", out);
        return is_tuple == 0;
    }
    call->as_tuple = true;
    if (PyTuple_Size(out) < N_OUTPUTS) { /* tuple.__new__ makes such an object */
        return cattn_raise(PyExc_ValueError, "out must have the %d fields of a cattn.AttentionOutput, got %zd",
                           N_OUTPUTS + 1, PyTuple_Size(out));
    }
    for (int i = 0; i < N_OUTPUTS; i++) {
        given[i] = PyTuple_GetItem(out, i);
        if (given[i] != Py_None && !call->wants[i])
            return cattn_raise(PyExc_ValueError,
                               "out has an array for %s, but return_%s is not asked for: pass return_%s=True",
                               OUTPUTS[i].name, OUTPUTS[i].name, OUTPUTS[i].name);
    }
    return true;
}

/* return_lse: whether, or the dtype. Every other object means its truth, as for the other flags. */
bool cattn_call_parse_return_lse(struct cattn_call *call, PyObject *object) {
    if (object == Py_True || (!PyType_Check(object) && !PyArray_DescrCheck(object)))
        return cattn_arg_flag(object, "return_lse", &call->wants[LSE]);
    PyArray_Descr *descr = NULL;
    if (PyArray_DescrConverter(object, &descr) == NPY_FAIL)
        return false;
    const int type = descr->type_num;
    const bool fits = type == NPY_DOUBLE || (type == NPY_FLOAT && call->compute_type == NPY_FLOAT);
    if (!fits)
        PyErr_Format(PyExc_TypeError, "return_lse must be a bool, %s for these inputs, got %S",
                     call->compute_type == NPY_FLOAT ? "float32 or float64" : "or float64", descr);
    Py_DECREF((PyObject *)descr);
    call->wants[LSE] = true;
    call->lse_type = type;
    return fits;
}

/* lse has the type of the computation, or float64 if return_lse or the caller's array for it says so. */
static int lse_type(struct cattn_call *call, PyObject *given) {
    if (call->lse_type != NPY_BOOL) {
        call->params->double_lse = call->lse_type == NPY_DOUBLE;
        return call->lse_type;
    }
    if (given != NULL && PyArray_Check(given) && PyArray_TYPE((PyArrayObject *)given) == NPY_DOUBLE)
        call->params->double_lse = true;
    return call->params->double_lse ? NPY_DOUBLE : call->compute_type;
}

/* NumPy's type number of an output, for which the caller gave this object or NULL. */
static int output_type(struct cattn_call *call, int which, PyObject *given) {
    return which == LSE ? lse_type(call, given) : OUTPUTS[which].kind == MASK ? NPY_BOOL : call->stored_type;
}

/* Warns before weights are allocated that take more than half of the memory of this machine. */
static bool warn_of_weights(struct binding_state *state, const struct cattn_output_spec *spec) {
    const double bytes = (double)cattn_count(spec->nd, spec->dims) * (spec->type == NPY_DOUBLE ? 8 : 4);
    PyObject *done = bytes < 1 << 20 ? Py_NewRef(Py_None) : PyObject_CallFunction(state->warn_of_memory, "d", bytes);
    Py_XDECREF(done);
    return done != NULL;
}

__attribute__((noinline)) static bool make_outputs(struct cattn_call *call, PyObject *const *given,
                                                   const char *const *names) {
    struct cattn_attention_params *params = call->params;
    struct cattn_tensor *const tensors[] = {&params->out, &params->weights, &params->lse, &params->dropout_mask};
    for (int i = 0; i < N_OUTPUTS; i++) {
        if (!call->wants[i])
            continue;
        int64_t dims[NPY_MAXDIMS];
        struct cattn_array frozen;
        const struct cattn_output_spec spec = {.name = names[i],
                                               .type = output_type(call, i, given[i]),
                                               .nd = cattn_axes_shape(&call->shape, params, OUTPUTS[i].axes, dims),
                                               .dims = dims,
                                               .inputs = call->inputs,
                                               .n_inputs = N_ATTENTION_OPERANDS};
        if (i == WEIGHTS && (given[i] == NULL || given[i] == Py_None) && !warn_of_weights(call->state, &spec))
            return false;
        if (!cattn_arg_output(call->state, given[i], &spec, &call->outputs[i]))
            return false;
        cattn_freeze(call->outputs[i].array, names[i], &frozen);
        cattn_axes_view(&call->shape, OUTPUTS[i].axes, EXACTLY, &frozen, tensors[i]);
        for (int j = 0; call->outputs[i].given != NULL && j < i; j++) {
            if (!cattn_arg_outputs_apart(call->state, &call->outputs[j], names[j], &call->outputs[i], names[i]))
                return false;
        }
    }
    return true;
}

/* ---- weights after dropout ----
 *
 * The core applies dropout to the output only, so its mask is applied to the weights here. Weights of halves are
 * computed in float32 until then (the call widens its inputs), so that they are rounded once.
 */

/* Chooses where the weights go: into `out` itself (then *given = out), or, if they must be rounded afterwards, `out`
 * takes the unused slot OUT. */
__attribute__((noinline)) static bool weights_out(struct cattn_call *call, PyObject *out, PyObject **given) {
    if (call->half_type == NPY_BOOL) {
        *given = out;
        return true;
    }
    if (out == Py_None)
        return true;
    int64_t dims[NPY_MAXDIMS];
    memcpy(dims, call->shape.dims, (size_t)call->shape.nd * sizeof *dims);
    const struct cattn_output_spec spec = {"out",        call->half_type,      call->shape.nd, dims,
                                           call->inputs, N_ATTENTION_OPERANDS, NULL,           false};
    return cattn_arg_output(call->state, out, &spec, &call->outputs[OUT]);
}

/* x / (1 - p) of the elements that are kept, and 0 for the others: a dropped NaN or infinity becomes 0, too. */
#define DEFINE_DROP(real)                                                                                              \
    static void drop_##real(char *data, int64_t stride, const npy_bool *kept, int64_t n, double scale) {               \
        const real factor = (real)scale;                                                                               \
        for (int64_t i = 0; i < n; i++, data += stride) {                                                              \
            real *x = (real *)(void *)data;                                                                            \
            *x = kept[i] ? *x * factor : 0;                                                                            \
        }                                                                                                              \
    }
DEFINE_DROP(float)
DEFINE_DROP(double)

/* Applies the dropout mask to the weights, in place. Its arrays of axes have no place in the frame of `attend`, which
 * must leave room for the call on a small stack. */
__attribute__((noinline)) static void weights_drop(struct cattn_call *call) {
    PyArrayObject *weights = call->outputs[WEIGHTS].array;
    const npy_bool *kept = PyArray_DATA(call->outputs[DROPOUT_MASK].array); /* new, and so contiguous */
    const double scale = call->params->dropout.keep_scale;
    struct cattn_array frozen;
    struct cattn_walk walk;
    cattn_freeze(weights, "out", &frozen);
    const unsigned mode = cattn_fp_enter(); /* as the kernels compute, whatever the caller has set */
    cattn_walk_begin(&walk, &frozen, false);
    do {
        (call->compute_type == NPY_FLOAT ? drop_float : drop_double)(walk.run, walk.stride, kept, walk.n, scale);
        kept += walk.n;
    } while (cattn_walk_next(&walk));
    cattn_fp_leave(mode);
}

/* The weights in half precision, a new reference, if the inputs were widened. */
static PyObject *weights_rounded(struct cattn_call *call) {
    const struct cattn_output *out = &call->outputs[OUT];
    PyArrayObject *rounded = cattn_arg_cast(call->state, call->outputs[WEIGHTS].array, "weights", call->half_type);
    if (rounded == NULL || out->array == NULL)
        return (PyObject *)rounded;
    const bool stored = cattn_copy_into(out->array, rounded) && cattn_output_finish(&call->outputs[OUT]);
    Py_DECREF((PyObject *)rounded);
    return stored ? cattn_output_result(out) : NULL;
}

/* ---- running ---- */

bool cattn_call_run(struct cattn_call *call, PyObject *rng, double work, enum cattn_status (*compute)(const void *),
                    const void *params, struct cattn_draw *draw) {
    struct cattn_attention_params *forward = call->params;
    struct cattn_dropout_spec *dropout = &forward->dropout;
    forward->num_threads = cattn_get_num_threads();
    if (!cattn_check_dropout_batch(cattn_python, forward))
        return false;
    if (dropout->enabled && !cattn_draw_begin(call->state, rng, dropout, draw))
        return false;
    call->has_seed = dropout->enabled && !draw->is_torch;
    const enum cattn_status status = cattn_compute(work < CATTN_GIL_WORK, &forward->poll, compute, params);
    return cattn_error_status(status);
}

void cattn_call_clear(struct cattn_call *call) {
    for (int i = 0; i < N_ATTENTION_OPERANDS; i++)
        Py_XDECREF((PyObject *)call->inputs[i]);
    cattn_ranges_clear(&call->ranges);
    for (int i = 0; i < N_OUTPUTS; i++)
        cattn_output_clear(&call->outputs[i]);
    cattn_packed_clear(call->packed);
}

static enum cattn_status compute(const void *params) {
    const struct cattn_attention_params *p = params;
    return p->key_indices.data ? cattn_gathered_attention(p) : cattn_attention(p);
}

static bool run(struct cattn_call *call, PyObject *rng, struct cattn_draw *draw) {
    struct cattn_attention_params *params = call->params;
    params->path = call->state->path;
    if (params->path != CATTN_PATH_AUTO && !cattn_attention_path_fits(params))
        return cattn_raise(PyExc_ValueError, "the forced path cannot run this call");
    return cattn_call_run(call, rng, cattn_attention_work(params), compute, params, draw);
}

static PyObject *build_result(struct cattn_call *call, int single) {
    PyObject *fields[N_OUTPUTS + 1] = {NULL}, *result = NULL;
    for (int i = 0; i < N_OUTPUTS; i++) {
        if (call->wants[i] && !cattn_output_finish(&call->outputs[i]))
            return NULL;
    }
    if (!call->as_tuple)
        return cattn_output_result(&call->outputs[single]);
    for (int i = 0; i < N_OUTPUTS; i++)
        fields[i] = call->wants[i] ? cattn_output_result(&call->outputs[i]) : Py_NewRef(Py_None);
    fields[N_OUTPUTS] = call->has_seed ? PyLong_FromUnsignedLongLong(call->params->dropout.seed) : Py_NewRef(Py_None);
    if (fields[N_OUTPUTS] != NULL)
        result = PyObject_CallFunctionObjArgs(call->state->attention_output, fields[0], fields[1], fields[2], fields[3],
                                              fields[4], NULL);
    for (int i = 0; i <= N_OUTPUTS; i++)
        Py_XDECREF(fields[i]);
    return result;
}

/* ---- entry points ---- */

/* Which outputs the caller asks for. */
static bool parse_wants(struct cattn_call *call, PyObject *const *args, enum cattn_stage stage) {
    const bool weights_only = stage < CATTN_STAGE_OUT;
    call->wants[OUT] = !weights_only;
    if (!cattn_arg_flag(args[ARG_return_weights], "return_weights", &call->wants[WEIGHTS]) ||
        (args[ARG_return_lse] != Py_False && !cattn_call_parse_return_lse(call, args[ARG_return_lse])) ||
        !cattn_arg_flag(args[ARG_return_dropout_mask], "return_dropout_mask", &call->wants[DROPOUT_MASK]))
        return false;
    call->as_tuple = !weights_only && (call->wants[WEIGHTS] || call->wants[LSE] || call->wants[DROPOUT_MASK]);
    call->wants[WEIGHTS] |= weights_only;
    call->wants[DROPOUT_MASK] |= stage == CATTN_STAGE_DROPOUT;
    if (!call->wants[DROPOUT_MASK] || call->inputs[OPERAND_key_indices] == NULL)
        return true;
    return cattn_raise(PyExc_ValueError, "%s and key_indices do not go together: there is no dropout of gathered keys",
                       weights_only ? "stage='dropout'" : "return_dropout_mask");
}

/* out=, as the function takes it: the weights and packed sequences have one array. */
static bool take_out(struct cattn_call *call, PyObject *out, PyObject **given, bool weights_only) {
    if (weights_only)
        return weights_out(call, out, &given[WEIGHTS]);
    if (call->packed == NULL)
        return unpack_out(call, out, given);
    given[OUT] = out;
    return true;
}

/* A call up to a stage. Before STAGE_OUT there is no value, and the weights are the one result. `packed` is NULL unless
 * the sequences are packed. */
static PyObject *attend(struct binding_state *state, PyObject *const *args, enum cattn_stage stage,
                        struct cattn_packed *packed) {
    struct cattn_attention_params params;
    struct cattn_frozen frozen;
    struct cattn_draw draw;
    PyObject *given[N_OUTPUTS] = {NULL}, *result = NULL;
    struct cattn_call call = {
        .state = state, .params = &params, .frozen = &frozen, .packed = packed, .widens = stage == CATTN_STAGE_DROPOUT};
    const bool weights_only = stage < CATTN_STAGE_OUT;
    const char *const names[] = {"out", weights_only ? "out" : "out.weights", "out.lse", "out.dropout_mask"};

    cattn_draw_clear(&draw);
    if (!cattn_call_parse(&call, args) || !cattn_rng_check(args[ARG_rng]) || !parse_wants(&call, args, stage) ||
        !take_out(&call, args[ARG_out], given, weights_only))
        goto done;
    cattn_stop_at(&params, stage);
    if (!make_outputs(&call, given, names) || !cattn_call_begin(&call) || !run(&call, args[ARG_rng], &draw))
        goto done;
    if (stage == CATTN_STAGE_DROPOUT)
        weights_drop(&call);
    result = call.half_type != NPY_BOOL ? weights_rounded(&call) : build_result(&call, weights_only ? WEIGHTS : OUT);
done:
    cattn_call_clear(&call);
    return cattn_draw_end(&draw, result);
}

PyObject *cattn_body_scaled_dot_product_attention(struct binding_state *state, PyObject **args) {
    return attend(state, args, CATTN_STAGE_OUT, NULL);
}

/* Puts the keys and values of a KVCache, given as key, and the offset that its lengths mean in their places. Returns
 * what owns them. */
static PyObject *take_cache(struct binding_state *state, PyObject **args) {
    PyObject *const attended_by = PyObject_GetAttrString(args[ARG_key], "_attended_by");
    if (attended_by == NULL) { /* a lack of memory stays one */
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_SetString(
                PyExc_TypeError,
                "value must be an array of real numbers, got NoneType; only a key that is a cattn.KVCache needs none");
        return NULL;
    }
    Py_DECREF(attended_by);
    if (cattn_arg_is(args[ARG_layout], state->tokens_first)) {
        PyErr_SetString(PyExc_ValueError,
                        "layout='bthd' and a cattn.KVCache do not go together: its keys are (..., heads, "
                        "tokens, head_dim); pass query.swapaxes(-3, -2)");
        return NULL;
    }
    /* "O" alone would unpack a tuple */
    PyObject *const lengths = args[ARG_query_seq_lengths];
    PyObject *parts = PyObject_CallMethod(args[ARG_key], "_attended_by", "(OO)", args[ARG_query],
                                          args[ARG_query_offset] == Py_None && lengths == Py_None ? Py_True : Py_False);
    PyObject *key, *value, *offset;
    if (parts == NULL || !PyArg_ParseTuple(parts, "OOO", &key, &value, &offset)) {
        Py_XDECREF(parts);
        return NULL;
    }
    args[ARG_key] = key;
    args[ARG_value] = value;
    if (args[ARG_query_offset] == Py_None)
        args[ARG_query_offset] = offset;
    return parts;
}

/* The public function has no is_causal: without an offset the last query sees every key. */
PyObject *cattn_body_causal_attention(struct binding_state *state, PyObject **args) {
    PyObject *cached = NULL;
    if (args[ARG_value] == Py_None && (cached = take_cache(state, args)) == NULL)
        return NULL;
    args[ARG_is_causal] = args[ARG_query_offset] == Py_None ? state->unnamed_corner : state->upper_left;
    PyObject *result = cattn_body_scaled_dot_product_attention(state, args);
    Py_XDECREF(cached);
    return result;
}

PyObject *cattn_body_varlen_attention(struct binding_state *state, PyObject **args) {
    struct cattn_packed packed = {.args = args + N_ATTENTION_ARGS};
    return attend(state, args, CATTN_STAGE_OUT, &packed);
}

/* ---- attention_weights: the weights, or the scores of one of the steps before them ---- */

static bool parse_stage(PyObject *object, enum cattn_stage *stage) {
    static const char *const names[] = {"qk", "softcap", "bias", "mask", "softmax", "dropout"};
    for (int i = 0; PyUnicode_Check(object) && i < CATTN_STAGE_OUT; i++) {
        if (PyUnicode_CompareWithASCIIString(object, names[i]) == 0) {
            *stage = (enum cattn_stage)i;
            return true;
        }
    }
    return cattn_error_value(object, "stage must be 'qk', 'softcap', 'bias', 'mask', 'softmax' or 'dropout'");
}

PyObject *cattn_body_attention_weights(struct binding_state *state, PyObject **args) {
    enum cattn_stage stage = CATTN_STAGE_QK;
    double p;
    /* p is converted once: the steps after this one may run the caller's Python code */
    if (!cattn_arg_probability(args[ARG_dropout_p], "dropout_p", &p) || !parse_stage(args[ARG_stage], &stage))
        return NULL;
    PyObject *probability = PyFloat_FromDouble(p);
    if (probability == NULL)
        return NULL;
    args[ARG_dropout_p] = probability;
    args[ARG_value] = NULL;
    PyObject *result = attend(state, args, stage, NULL);
    Py_DECREF(probability);
    return result;
}

/* ---- explain: what a call would return, and how the core would compute it; it allocates and draws nothing ---- */

/* {name: (shape, dtype)} of each output. */
static PyObject *describe_outputs(struct cattn_call *call) {
    PyObject *outputs = PyDict_New();
    for (int i = 0; outputs != NULL && i < N_OUTPUTS; i++) {
        if (!call->wants[i])
            continue;
        int64_t dims[NPY_MAXDIMS];
        const int nd = cattn_axes_shape(&call->shape, call->params, OUTPUTS[i].axes, dims);
        PyObject *shape = cattn_shape_tuple(nd, dims), *output = NULL;
        if (shape != NULL)
            output = Py_BuildValue("(NN)", shape, (PyObject *)PyArray_DescrFromType(output_type(call, i, NULL)));
        if (output == NULL || PyDict_SetItemString(outputs, OUTPUTS[i].name, output) < 0)
            Py_CLEAR(outputs);
        Py_XDECREF(output);
    }
    return outputs;
}

static PyObject *build_explanation(struct cattn_call *call, const struct cattn_explanation *plan) {
    static const char *const paths[] = {"auto", "tile", "rows", "split", "tiny"};
    const struct cattn_attention_params *params = call->params;
    PyObject *depth = Py_BuildValue("(L)", (long long)params->head_dim + (long long)params->d_v), *result = NULL;
    PyObject *fields = Py_BuildValue(
        "{s:N,s:s,s:s,s:L,s:L,s:L,s:L,s:L,s:n,s:i}", "outputs", describe_outputs(call), "path", paths[plan->path],
        "instruction_set", cattn_isa_info(cattn_isa_current()).name, "tasks", (long long)plan->n_tasks, "rows_per_task",
        (long long)plan->task_rows, "key_blocks_visited", (long long)plan->n_visited, "key_blocks_skipped",
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
    PyObject *result = NULL;
    struct cattn_frozen frozen;
    struct cattn_call call = {.state = state, .params = &params, .frozen = &frozen};
    if (cattn_call_parse(&call, args) && cattn_rng_check(args[ARG_rng]) && parse_wants(&call, args, CATTN_STAGE_OUT)) {
        params.num_threads = cattn_get_num_threads();
        params.path = state->path;
        params.gate.data = NULL; /* it multiplies the output, which is not computed */
        PyThreadState *thread;
        struct cattn_explanation plan;
        cattn_gil_release(&params.poll, &thread);
        const enum cattn_status status = cattn_attention_explain(&params, &plan);
        PyEval_RestoreThread(thread);
        if (cattn_error_status(status))
            result = build_explanation(&call, &plan);
    }
    cattn_call_clear(&call);
    return result;
}
