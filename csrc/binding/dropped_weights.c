/* dropped_weights.c -- weights after dropout, stage "dropout" of attention_weights(...). See dropped_weights.h. */
#include "dropped_weights.h"
#include "arrays.h"
#include "fp_mode.h"

bool cattn_weights_out(struct cattn_call *call, PyObject *out, PyObject **given) {
    if (call->half_type == NPY_BOOL) {
        *given = out;
        return true;
    }
    if (out == Py_None)
        return true;
    npy_intp dims[NPY_MAXDIMS];
    memcpy(dims, call->dims, (size_t)call->nd * sizeof *dims);
    const struct cattn_output_spec spec = {.name = "out",
                                           .type = call->half_type,
                                           .nd = call->nd,
                                           .dims = dims,
                                           .inputs = call->inputs,
                                           .n_inputs = N_ATTENTION_OPERANDS};
    return cattn_arg_output(call->state, out, &spec, &call->outputs[OUT]);
}

/* x / (1 - p) of the elements that are kept, and 0 for the others: a dropped NaN or infinity becomes 0, too. */
#define DEFINE_DROP(real)                                                                                              \
    static void drop_##real(char *data, npy_intp stride, const npy_bool *kept, npy_intp n, double scale) {             \
        const real factor = (real)scale;                                                                               \
        for (npy_intp i = 0; i < n; i++, data += stride) {                                                             \
            real *x = (real *)(void *)data;                                                                            \
            *x = kept[i] ? *x * factor : 0;                                                                            \
        }                                                                                                              \
    }
DEFINE_DROP(float)
DEFINE_DROP(double)

void cattn_weights_drop(struct cattn_call *call) {
    PyArrayObject *weights = call->outputs[WEIGHTS].array;
    const npy_bool *kept = PyArray_DATA(call->outputs[DROPOUT_MASK].array); /* new, and so contiguous */
    const double scale = call->params->dropout.keep_scale;
    char *first = PyArray_BYTES(weights);
    struct cattn_walk walk;
    const unsigned mode = cattn_fp_enter(); /* as the kernels compute, whatever the caller has set */
    cattn_walk_begin(&walk, weights);
    do {
        char *run = first + (walk.run - first);
        (call->compute_type == NPY_FLOAT ? drop_float : drop_double)(run, walk.stride, kept, walk.n, scale);
        kept += walk.n;
    } while (cattn_walk_next(&walk));
    cattn_fp_leave(mode);
}

PyObject *cattn_weights_rounded(struct cattn_call *call) {
    const struct cattn_output *out = &call->outputs[OUT];
    PyObject *descr = (PyObject *)PyArray_DescrFromType(call->half_type), *rounded = NULL;
    if (descr != NULL)
        rounded =
            PyObject_CallFunction(call->state->cast, "OsO", (PyObject *)call->outputs[WEIGHTS].array, "weights", descr);
    Py_XDECREF(descr);
    if (rounded == NULL || out->array == NULL)
        return rounded;
    const bool stored =
        cattn_copy_into(out->array, (PyArrayObject *)rounded) && cattn_output_finish(&call->outputs[OUT]);
    Py_DECREF(rounded);
    return stored ? cattn_output_result(out) : NULL;
}
