/* py_attention.c -- attention(...) and attention_weights(...): parse, check, allocate, run the core, build the result.
 *
 * One struct call carries what a call owns; params is filled in place and never cleared as a whole (it is large, and
 * only n_lead of its 64 strides count).
 */
#include "args.h"
#include "error.h"
#include "ranges.h"

#include <math.h>

#include "../core/cpu_features.h"
#include "../core/torch_random.h"

/* The order of the positional arguments of _cattn.attention. */
enum {
    ARG_QUERY,
    ARG_KEY,
    ARG_VALUE,
    ARG_ATTN_MASK,
    ARG_DROPOUT_P,
    ARG_IS_CAUSAL,
    ARG_SCALE,
    ARG_ENABLE_GQA,
    ARG_BIAS,
    ARG_QUERY_OFFSET,
    ARG_QUERY_LENGTHS,
    ARG_KEY_LENGTHS,
    ARG_WINDOW_SIZE,
    ARG_SOFTCAP,
    ARG_ALIBI_SLOPES,
    ARG_SINKS,
    ARG_RNG,
    ARG_NEED_WEIGHTS,
    ARG_RETURN_LSE,
    ARG_RETURN_DROPOUT_MASK,
    ARG_OUT,
    N_ARGS
};

enum { QUERY, KEY, VALUE, ATTN_MASK, BIAS, SLOPES, SINKS, N_INPUTS };
enum { OUT, WEIGHTS, LSE, DROPOUT_MASK, N_OUTPUTS };

static const char *const INPUT_NAMES[] = {"query", "key", "value"};

struct call {
    struct binding_state *state;
    struct cattn_attention_params *params;
    PyArrayObject *inputs[N_INPUTS]; /* owned, or NULL */
    struct cattn_range_args ranges;
    struct cattn_output outputs[N_OUTPUTS];
    bool wants[N_OUTPUTS];
    bool as_tuple; /* the result is an AttentionOutput */
    bool has_seed; /* dropout_seed draws the same mask again */
    bool heads;    /* axis -3 of the call is heads */
    int type, n_lead;
    int nd;         /* of dims */
    npy_intp *dims; /* (*lead, [H], T_q, T_k) */
};

/* ---- shapes ---- */

static npy_intp dim_back(PyArrayObject *array, int back) {
    const int nd = PyArray_NDIM(array);
    return back <= nd ? PyArray_DIM(array, nd - back) : 1;
}

static bool parse_arrays(struct call *call, PyObject *const *args) {
    for (int i = QUERY; i <= VALUE; i++) {
        if (args[i] == NULL)
            continue;
        PyArrayObject *array = cattn_arg_floats(call->state, args[i], INPUT_NAMES[i]);
        call->inputs[i] = array;
        if (array == NULL)
            return false;
        const int nd = PyArray_NDIM(array);
        if (nd < 2) {
            PyErr_Format(PyExc_ValueError, "%s must have at least 2 dimensions (..., %s), got %d", INPUT_NAMES[i],
                         i == QUERY ? "T_q, head_dim"
                         : i == KEY ? "T_k, head_dim"
                                    : "T_k, d_v",
                         nd);
            return false;
        }
        if (nd > call->nd)
            call->nd = nd;
    }
    call->type = cattn_arg_promote(call->state, call->inputs, VALUE + 1);
    call->params->dtype = call->type == NPY_FLOAT ? CATTN_F32 : CATTN_F64;
    return call->type >= 0;
}

static bool sizes_differ(const char *a, npy_intp size_a, const char *b, npy_intp size_b, const char *what) {
    PyErr_Format(PyExc_ValueError, "%s has %s %zd, %s has %zd", a, what, (Py_ssize_t)size_a, b, (Py_ssize_t)size_b);
    return false;
}

static bool parse_sizes(struct call *call) {
    struct cattn_attention_params *params = call->params;
    PyArrayObject *query = call->inputs[QUERY], *key = call->inputs[KEY], *value = call->inputs[VALUE];
    params->seqlen_q = dim_back(query, 2);
    params->head_dim = dim_back(query, 1);
    params->seqlen_k = dim_back(key, 2);
    params->d_v = value != NULL ? dim_back(value, 1) : 0;
    if (dim_back(key, 1) != params->head_dim)
        return sizes_differ("key", dim_back(key, 1), "query", dim_back(query, 1), "head_dim");
    if (value != NULL && dim_back(value, 2) != params->seqlen_k)
        return sizes_differ("value", dim_back(value, 2), "key", dim_back(key, 2), "T_k");
    call->dims[call->nd - 2] = dim_back(query, 2);
    call->dims[call->nd - 1] = dim_back(key, 2);
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

static bool parse_heads(struct call *call, PyObject *enable_gqa) {
    struct cattn_attention_params *params = call->params;
    bool forbidden, forced;
    if (!parse_enable_gqa(enable_gqa, &forbidden, &forced))
        return false;
    call->heads = call->nd > 3 || (forced && call->nd == 3);
    call->n_lead = call->nd - 2 - call->heads;
    params->num_heads = params->group_size = 1;
    if (!call->heads)
        return true;
    const npy_intp query = dim_back(call->inputs[QUERY], 3), key = dim_back(call->inputs[KEY], 3);
    const npy_intp value = call->inputs[VALUE] != NULL ? dim_back(call->inputs[VALUE], 3) : key;
    if (key != value && key != 1 && value != 1)
        return sizes_differ("value", value, "key", key, "heads (axis -3):");
    const npy_intp both = key == 1 ? value : key;
    if (query == 1 || both == 1 || query == both) { /* NumPy's broadcasting */
        params->num_heads = query == 1 ? both : query;
    } else if (both == 0 || query % both != 0) {
        PyErr_Format(PyExc_ValueError,
                     "query has %zd heads (axis -3), key and value have %zd: they must be equal, or query's a multiple",
                     (Py_ssize_t)query, (Py_ssize_t)both);
        return false;
    } else if (forbidden) {
        PyErr_Format(
            PyExc_ValueError,
            "query has %zd heads (axis -3), key and value have %zd, and enable_gqa=False forbids grouped heads",
            (Py_ssize_t)query, (Py_ssize_t)both);
        return false;
    } else {
        params->num_heads = query;
    }
    if (both > 0 && params->num_heads > 0)
        params->group_size = params->num_heads / both;
    call->dims[call->nd - 3] = (npy_intp)params->num_heads;
    return true;
}

static bool parse_lead(struct call *call) {
    struct cattn_attention_params *params = call->params;
    params->n_lead = call->n_lead;
    for (int axis = 0; axis < call->n_lead; axis++) {
        npy_intp size = 1;
        int owner = QUERY;
        for (int i = QUERY; i <= VALUE; i++) {
            const npy_intp own = call->inputs[i] != NULL ? dim_back(call->inputs[i], call->nd - axis) : 1;
            if (own == 1 || own == size)
                continue;
            if (size != 1) {
                PyErr_Format(PyExc_ValueError,
                             "leading dimensions do not broadcast: on axis %d %s has size %zd, %s has %zd",
                             axis - call->nd, INPUT_NAMES[owner], (Py_ssize_t)size, INPUT_NAMES[i], (Py_ssize_t)own);
                return false;
            }
            size = own;
            owner = i;
        }
        call->dims[axis] = size;
        params->lead_shape[axis] = size;
    }
    params->n_batch = PyArray_OverflowMultiplyList(call->dims, call->n_lead);
    if (params->n_batch < 0) {
        PyErr_SetString(PyExc_ValueError, "query, key and value broadcast to a batch that is too large");
        return false;
    }
    return true;
}

/* ---- masks and positions ---- */

static bool parse_scale(PyObject *scale, struct cattn_attention_params *params) {
    if (scale != Py_None)
        return cattn_arg_real(scale, "scale", &params->scale);
    const unsigned mode = cattn_fp_enter(); /* the caller's rounding must not show */
    params->scale = params->head_dim > 0 ? 1.0 / sqrt((double)params->head_dim) : 1.0;
    cattn_fp_leave(mode);
    return true;
}

static bool parse_masks(struct call *call, PyObject *const *args) {
    struct cattn_attention_params *params = call->params;
    const int axes = CATTN_AXIS_COL | CATTN_AXIS_ROW | (call->heads ? CATTN_AXIS_HEAD : 0);
    params->attn_mask.data = NULL;
    params->n_bias = 0;
    if (args[ARG_ATTN_MASK] != Py_None) {
        PyArrayObject *mask = cattn_arg_mask(call->state, args[ARG_ATTN_MASK], "attn_mask", CATTN_MASK_ANY, call->type,
                                             call->nd, call->dims);
        call->inputs[ATTN_MASK] = mask;
        if (mask == NULL)
            return false;
        const bool boolean = PyArray_TYPE(mask) == NPY_BOOL;
        if (!boolean && !cattn_arg_warn_binary(mask, "attn_mask"))
            return false;
        cattn_tensor_from(boolean ? &params->attn_mask : &params->bias[params->n_bias++], mask, call->n_lead, axes);
    }
    if (args[ARG_BIAS] != Py_None) {
        PyArrayObject *bias =
            cattn_arg_mask(call->state, args[ARG_BIAS], "bias", CATTN_MASK_BIAS, call->type, call->nd, call->dims);
        call->inputs[BIAS] = bias;
        if (bias == NULL)
            return false;
        cattn_tensor_from(&params->bias[params->n_bias++], bias, call->n_lead, axes);
    }
    return true;
}

static bool parse_ranges(struct call *call, PyObject *const *args) {
    const struct cattn_range_sizes sizes = {.seqlen_q = call->dims[call->nd - 2],
                                            .seqlen_k = call->dims[call->nd - 1],
                                            .n_lead = call->n_lead,
                                            .lead = call->dims,
                                            .query_lengths = args[ARG_QUERY_LENGTHS],
                                            .key_lengths = args[ARG_KEY_LENGTHS]};
    return cattn_arg_ranges(call->state, args[ARG_IS_CAUSAL], args[ARG_QUERY_OFFSET], args[ARG_WINDOW_SIZE],
                            &call->ranges) &&
           cattn_ranges_settle(call->state, &call->ranges, &sizes, &call->params->ranges);
}

/* One number for each query head, or for each of the batch: (H,) or (*lead, H), in the call's dtype. */
static bool parse_numbers(struct call *call, PyObject *object, const char *name, int input, struct cattn_tensor *to) {
    to->data = NULL;
    if (object == Py_None)
        return true;
    PyObject *numbers =
        PyObject_CallFunction(call->state->as_head_numbers, "Oss", object, name, call->type == NPY_FLOAT ? "f" : "d");
    call->inputs[input] = (PyArrayObject *)numbers;
    if (numbers == NULL)
        return false;
    npy_intp dims[NPY_MAXDIMS];
    for (int axis = 0; axis < call->n_lead; axis++)
        dims[axis] = call->dims[axis];
    dims[call->n_lead] = (npy_intp)call->params->num_heads;
    if (!cattn_arg_broadcasts(call->inputs[input], name, call->n_lead + 1, dims, "(leading dimensions, heads)"))
        return false;
    cattn_tensor_from(to, call->inputs[input], call->n_lead, CATTN_AXIS_HEAD);
    return true;
}

static bool parse_shapers(struct call *call, PyObject *const *args) {
    struct cattn_attention_params *params = call->params;
    params->softcap = 0;
    if (args[ARG_SOFTCAP] != Py_None) {
        if (!cattn_arg_real(args[ARG_SOFTCAP], "softcap", &params->softcap))
            return false;
        if (params->softcap < 0) {
            PyErr_Format(PyExc_ValueError, "softcap must be positive, or None or 0 for none, got %R",
                         args[ARG_SOFTCAP]);
            return false;
        }
    }
    return parse_numbers(call, args[ARG_ALIBI_SLOPES], "alibi_slopes", SLOPES, &params->slopes) &&
           parse_numbers(call, args[ARG_SINKS], "sinks", SINKS, &params->sinks);
}

/* ---- outputs ---- */

/* out= is None, an array for the one result, or an AttentionOutput: given[] gets borrowed fields. */
static bool unpack_out(struct call *call, PyObject *out, int single, PyObject **given) {
    static const char *const asked_by[] = {"", "need_weights", "return_lse", "return_dropout_mask"};
    const int is_tuple = out == Py_None ? 0 : PyObject_IsInstance(out, call->state->attention_output);
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

static bool make_outputs(struct call *call, PyObject *const *given, const char *const *names) {
    struct cattn_attention_params *params = call->params;
    struct cattn_tensor *const tensors[] = {&params->out, &params->weights, &params->lse, &params->dropout_mask};
    const int head = call->heads ? CATTN_AXIS_HEAD : 0;
    const npy_intp seqlen_k = call->dims[call->nd - 1];
    for (int i = 0; i < N_OUTPUTS; i++) {
        tensors[i]->data = NULL;
        if (!call->wants[i])
            continue;
        /* out's last axis is d_v where the call's is T_k */
        call->dims[call->nd - 1] = i == OUT ? (npy_intp)params->d_v : seqlen_k;
        const struct cattn_output_spec spec = {.name = names[i],
                                               .type = i == DROPOUT_MASK ? NPY_BOOL : call->type,
                                               .nd = i == LSE ? call->nd - 1 : call->nd,
                                               .dims = call->dims,
                                               .inputs = call->inputs,
                                               .n_inputs = N_INPUTS};
        const bool made = cattn_arg_output(call->state, given[i], &spec, &call->outputs[i]);
        call->dims[call->nd - 1] = seqlen_k;
        if (!made)
            return false;
        cattn_tensor_from(tensors[i], call->outputs[i].array, call->n_lead,
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

static void fill_inputs(struct call *call) {
    struct cattn_attention_params *params = call->params;
    struct cattn_tensor *const tensors[] = {&params->query, &params->key, &params->value};
    const int axes = CATTN_AXIS_COL | CATTN_AXIS_ROW | (call->heads ? CATTN_AXIS_HEAD : 0);
    for (int i = QUERY; i <= VALUE; i++) {
        if (call->inputs[i] == NULL) {
            tensors[i]->data = NULL;
            continue;
        }
        cattn_tensor_from(tensors[i], call->inputs[i], call->n_lead, axes);
        if (PyArray_DIM(call->inputs[i], PyArray_NDIM(call->inputs[i]) - 1) == 1)
            tensors[i]->col = 1;
    }
}

/* Everything is checked and allocated: draw the seed, compute. */
static bool run(struct call *call, PyObject *rng) {
    struct cattn_attention_params *params = call->params;
    params->num_threads = cattn_get_num_threads();
    params->path = call->state->path;
    params->poll.stop = NULL;
    params->poll.context = NULL;
    if (params->path != CATTN_PATH_AUTO && !cattn_attention_path_fits(params)) {
        PyErr_SetString(PyExc_ValueError, "the forced path cannot run this call");
        return false;
    }
    if (params->dropout.enabled && params->n_batch > (int64_t)1 << 31) {
        PyErr_SetString(PyExc_ValueError, "dropout_p: the batch is too large for dropout (more than 2**31)");
        return false;
    }
    struct cattn_torch_random torch;
    const bool serial = params->dropout.enabled && cattn_torch_check(call->state, rng);
    if (params->dropout.enabled && !serial && !cattn_rng_seed(call->state, rng, &params->dropout.seed))
        return false;
    /* PyTorch draws nothing where all is dropped, or where there is nothing to drop */
    const bool draws = serial && params->dropout.keep_probability > 0.0;
    if (draws && !cattn_torch_begin(rng, &torch))
        return false;
    params->dropout.torch = draws ? &torch : NULL;
    enum cattn_status status;
    if (cattn_attention_work(params) < CATTN_GIL_WORK) {
        status = cattn_attention(params);
    } else {
        PyThreadState *thread;
        cattn_gil_release(&params->poll, &thread);
        status = cattn_attention(params);
        PyEval_RestoreThread(thread);
    }
    if (draws)
        cattn_torch_end(rng, status == CATTN_OK ? &torch : NULL);
    call->has_seed = params->dropout.enabled && !serial;
    return cattn_error_status(status);
}

static PyObject *build_result(struct call *call, int single) {
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

/* args in the order of ARG_*; value is NULL for weights alone, which then are the one result. */
static PyObject *attend(PyObject *module, PyObject *const *args, bool weights_only) {
    static const char *const names[] = {"out", "out.weights", "out.lse", "out.dropout_mask"};
    static const char *const weights_names[] = {"out", "out", "out.lse", "out.dropout_mask"};
    struct cattn_attention_params params;
    npy_intp dims[NPY_MAXDIMS];
    PyObject *given[N_OUTPUTS] = {NULL}, *result = NULL;
    struct call call = {.state = cattn_state(module), .params = &params, .dims = dims};
    const int single = weights_only ? WEIGHTS : OUT;

    call.wants[OUT] = !weights_only;
    if (!parse_arrays(&call, args) || !parse_sizes(&call) || !parse_heads(&call, args[ARG_ENABLE_GQA]) ||
        !parse_lead(&call) || !parse_scale(args[ARG_SCALE], &params) || !parse_masks(&call, args) ||
        !cattn_dropout_spec_from(args[ARG_DROPOUT_P], "dropout_p", &params.dropout) ||
        !cattn_rng_check(args[ARG_RNG]) || !cattn_arg_flag(args[ARG_NEED_WEIGHTS], &call.wants[WEIGHTS]) ||
        !cattn_arg_flag(args[ARG_RETURN_LSE], &call.wants[LSE]) ||
        !cattn_arg_flag(args[ARG_RETURN_DROPOUT_MASK], &call.wants[DROPOUT_MASK]))
        goto done;
    call.as_tuple = !weights_only && (call.wants[WEIGHTS] || call.wants[LSE] || call.wants[DROPOUT_MASK]);
    if (!parse_ranges(&call, args) || !parse_shapers(&call, args) ||
        (!weights_only && !unpack_out(&call, args[ARG_OUT], single, given)))
        goto done;
    if (weights_only)
        given[WEIGHTS] = args[ARG_OUT];
    if (!make_outputs(&call, given, weights_only ? weights_names : names))
        goto done;
    fill_inputs(&call);
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

PyObject *cattn_py_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    if (!cattn_error_count("attention", n_args, N_ARGS))
        return NULL;
    return attend(module, args, false);
}

/* The arguments of attention with value, dropout and the extras as if they were not asked for, and the stage. */
PyObject *cattn_py_attention_weights(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    if (!cattn_error_count("attention_weights", n_args, N_ARGS + 1))
        return NULL;
    if (!cattn_arg_is(args[N_ARGS], cattn_state(module)->softmax)) {
        PyErr_Format(PyExc_ValueError, "stage must be 'softmax', got %R", args[N_ARGS]);
        return NULL;
    }
    PyObject *without_value[N_ARGS];
    memcpy(without_value, args, sizeof without_value);
    without_value[ARG_VALUE] = NULL;
    return attend(module, without_value, true);
}
