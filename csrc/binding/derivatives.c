/* derivatives.c -- results of a forward pass as arguments, with gradients and tangents; and tangents of inputs. */
#include "attention_call.h"

static bool has_rows_only(int which) {
    return which == CATTN_GRAD_LSE || which == CATTN_FORWARD_LSE || which == CATTN_LSE_TANGENT;
}

/* The type that the core takes. */
static int type_of(const struct cattn_results *results, const struct cattn_call *call, int which) {
    switch (which) {
    case CATTN_FORWARD_LSE:
    case CATTN_LSE_TANGENT:
        return call->compute_type;
    case CATTN_OUT_TANGENT:
        return results->plain_out ? call->compute_type : call->stored_type;
    default:
        return call->stored_type;
    }
}

/* Converts one to the type that the forward pass gives it, if that is wider. lse may be float64 in any case, and out of
 * halves float32. The core takes grad_lse in float64 only. */
static bool widen(struct cattn_results *results, struct cattn_call *call, int which, PyObject *given,
                  const char *name) {
    PyArrayObject **array = &results->arrays[which];
    if (which == CATTN_GRAD_LSE)
        return cattn_arg_widen(call->state, array, NPY_DOUBLE);
    const int own = PyArray_TYPE(*array), wanted = type_of(results, call, which);
    if (which == CATTN_FORWARD_LSE)
        call->params->double_lse = own == NPY_DOUBLE || wanted == NPY_DOUBLE;
    if (own == wanted || (which == CATTN_FORWARD_LSE && own == NPY_DOUBLE))
        return true;
    if (which == CATTN_FORWARD_OUT && own == call->compute_type) {
        results->plain_out = true;
        return true;
    }
    const bool is_half_of_plain = which == CATTN_OUT_TANGENT && own == call->stored_type;
    if ((own == NPY_FLOAT && wanted == NPY_DOUBLE) || is_half_of_plain)
        return cattn_arg_widen(call->state, array, wanted);
    cattn_arg_wrong_type(*array, given, name, "the forward pass gives", wanted);
    return false;
}

bool cattn_results_take(struct cattn_results *results, struct cattn_call *call, int which, PyObject *object,
                        const char *name, struct cattn_tensor *tensor) {
    const bool rows_only = has_rows_only(which);
    const char *const whose = rows_only ? "the log-sum-exp" : "the output";
    const char *const axes = rows_only ? "NT" : "NTD";
    int64_t dims[NPY_MAXDIMS];
    struct cattn_array frozen;
    const int nd = cattn_axes_shape(&call->shape, call->params, axes, dims);
    if ((results->arrays[which] = cattn_arg_floats(call->state, object, name)) == NULL ||
        !widen(results, call, which, object, name))
        return false;
    cattn_freeze(results->arrays[which], name, &frozen);
    if (!cattn_check_shape(cattn_python, &frozen, whose, nd, dims))
        return false;
    cattn_axes_view(&call->shape, axes, EXACTLY, &frozen, tensor);
    return true;
}

void cattn_results_clear(struct cattn_results *results) {
    for (int i = 0; i < CATTN_N_RESULTS; i++)
        Py_CLEAR(results->arrays[i]);
}

/* ---- tangents ---- */

static const char *const NAMES[CATTN_N_TANGENTS] = {"query_tangent", "key_tangent", "value_tangent", "bias_tangent",
                                                    "sinks_tangent"};

/* The input that a tangent belongs to, into *input; false if there is none. */
static bool find_input(const struct cattn_call *call, int which, struct cattn_array *input) {
    if (which == SINKS_TANGENT && call->inputs[OPERAND_sinks] != NULL) /* a copy that nobody else has */
        cattn_freeze(call->inputs[OPERAND_sinks], "sinks", input);
    else if (which != SINKS_TANGENT)
        *input = which == BIAS_TANGENT ? call->frozen->bias : call->frozen->inputs[OPERAND_query + which];
    return input->data != NULL;
}

/* Converts a tangent to the type of its input: from any type, as biases and sinks are converted, or if it is wider. */
static bool convert(struct cattn_call *call, PyArrayObject **array, PyObject *given, const char *name, int wanted,
                    bool from_any) {
    const int own = PyArray_TYPE(*array);
    if (own == wanted)
        return true;
    if (from_any || wanted == NPY_DOUBLE || (wanted == NPY_FLOAT && own != NPY_DOUBLE))
        return cattn_arg_widen(call->state, array, wanted);
    cattn_arg_wrong_type(*array, given, name, "its input", wanted);
    return false;
}

static bool take(struct cattn_call *call, int which, PyObject *object, PyArrayObject **array,
                 struct cattn_tensor *tensor) {
    static const char *const missing[] = {"query", "key", "value", "a bias or a float attn_mask", "sinks"};
    static const int inputs[] = {OPERAND_query, OPERAND_key, OPERAND_value, OPERAND_bias, OPERAND_sinks};
    const struct cattn_operand_row *row = &cattn_operands[inputs[which]];
    const int wanted = which <= VALUE_TANGENT ? call->stored_type : call->compute_type;
    struct cattn_array input = {.data = NULL}, frozen;
    if (!find_input(call, which, &input))
        return cattn_raise(PyExc_ValueError, "%s is given without %s", NAMES[which], missing[which]);
    *array = cattn_arg_floats(call->state, object, NAMES[which]);
    if (*array == NULL || !convert(call, array, object, NAMES[which], wanted, which > VALUE_TANGENT))
        return false;
    cattn_freeze(*array, NAMES[which], &frozen);
    if (!cattn_check_shape(cattn_python, &frozen, input.name, input.nd, input.dims))
        return false;
    cattn_axes_view(&call->shape, row->axes, row->fits, &frozen, tensor);
    return true;
}

bool cattn_tangents_take(struct cattn_call *call, PyObject *const *objects, PyArrayObject **arrays,
                         struct cattn_tangents *tangents) {
    struct cattn_tensor *const tensors[] = {&tangents->query, &tangents->key, &tangents->value, &tangents->bias,
                                            &tangents->sinks};
    for (int i = 0; i < CATTN_N_TANGENTS; i++) {
        if (objects[i] != Py_None && !take(call, i, objects[i], &arrays[i], tensors[i]))
            return false;
    }
    return true;
}

void cattn_tangents_clear(PyArrayObject **arrays) {
    for (int i = 0; i < CATTN_N_TANGENTS; i++)
        Py_CLEAR(arrays[i]);
}

bool cattn_tangents_refuse(const struct cattn_call *call, PyObject *const *args) {
    PyObject *const inputs[] = {args[ARG_key], args[ARG_value]};
    for (int i = 0; i < 2; i++)
        if (cattn_arg_is_quantized(call->state, inputs[i])) {
            const char *name = cattn_operands[OPERAND_key + i].name;
            return cattn_raise(PyExc_TypeError, "%s is quantized and has no tangent: pass cattn.dequantize(%s)", name,
                               name);
        }
    if (!call->params->dropout.enabled || PyIndex_Check(args[ARG_rng]))
        return true;
    return cattn_raise(PyExc_ValueError,
                       "rng must be the int that draws the dropout mask of every pass, which a result's "
                       "dropout_seed is, too");
}
