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
    PyObject *result = cattn_attend(state, args, stage, NULL);
    Py_DECREF(probability);
    return result;
}
