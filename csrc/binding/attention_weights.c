/* attention_weights.c -- attention_weights(...): the weights, or the scores of one of the steps before them. */
#include "attention.h"
#include "error.h"
#include "numbers.h"

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

/* context: (p, dtype or None, out or None) */
static PyObject *drop(struct cattn_call *call, PyObject *result, PyObject *context) {
    return PyObject_CallFunctionObjArgs(call->state->drop_weights, result, PyTuple_GetItem(context, 0),
                                        PyTuple_GetItem(context, 1), PyTuple_GetItem(context, 2), NULL);
}

/* The core applies dropout to the output only, so NumPy multiplies the weights by the mask. Halves are computed in
 * float32 until then, so that they are rounded once. */
static PyObject *drop_weights(struct binding_state *state, PyObject **args) {
    PyObject *result = NULL, *out = args[ARG_out];
    PyObject *wide = PyObject_CallFunctionObjArgs(state->widen_for_dropout, args[ARG_query], args[ARG_key],
                                                  args[ARG_key_scale], out, NULL);
    if (wide == NULL)
        return NULL;
    PyObject *context = PyTuple_Pack(3, args[ARG_dropout_p], PyTuple_GetItem(wide, 3), out);
    if (context != NULL) {
        args[ARG_query] = PyTuple_GetItem(wide, 0);
        args[ARG_key] = PyTuple_GetItem(wide, 1);
        args[ARG_out] = PyTuple_GetItem(wide, 2);
        const struct cattn_variant variant = {.stage = CATTN_STAGE_DROPOUT, .finish = drop, .context = context};
        result = cattn_attend(state, args, &variant);
    }
    Py_XDECREF(context);
    Py_DECREF(wide);
    return result;
}

PyObject *cattn_body_attention_weights(struct binding_state *state, PyObject **args) {
    struct cattn_variant variant = {.stage = CATTN_STAGE_QK};
    double p;
    /* p is converted once: the steps after this one may run the caller's Python code */
    if (!cattn_arg_probability(args[ARG_dropout_p], "dropout_p", &p) || !parse_stage(args[ARG_stage], &variant.stage))
        return NULL;
    PyObject *probability = PyFloat_FromDouble(p);
    if (probability == NULL)
        return NULL;
    args[ARG_dropout_p] = probability;
    args[ARG_value] = NULL;
    PyObject *result =
        variant.stage == CATTN_STAGE_DROPOUT ? drop_weights(state, args) : cattn_attend(state, args, &variant);
    Py_DECREF(probability);
    return result;
}
