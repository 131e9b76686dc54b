/* results.c -- the results of a forward pass as arguments, their gradients, and their tangents; see results.h. */
#include "results.h"
#include "arrays.h"

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
    npy_intp dims[NPY_MAXDIMS];
    PyArrayObject *array = results->arrays[which] = cattn_arg_floats(call->state, object, name);
    if (array == NULL)
        return false;
    memcpy(dims, call->dims, (size_t)call->nd * sizeof *dims);
    dims[call->nd - 1] = (npy_intp)call->params->d_v;
    const int nd = cattn_call_shape(call, rows_only ? call->nd - 1 : call->nd, dims);
    /* the shape again: a conversion may have run Python code, which might change the array */
    if (!cattn_check_shape(array, name, whose, nd, dims) || !widen(results, call, which, object, name) ||
        !cattn_check_shape(results->arrays[which], name, whose, nd, dims))
        return false;
    if (rows_only)
        cattn_tensor_from(tensor, results->arrays[which], call->n_batch_dims, call->axes & ~CATTN_AXIS_COL);
    else
        cattn_call_view(call, results->arrays[which], tensor);
    if (call->params->d_v == 1 && !rows_only)
        tensor->col = 1;
    return true;
}

void cattn_results_clear(struct cattn_results *results) {
    for (int i = 0; i < CATTN_N_RESULTS; i++)
        Py_CLEAR(results->arrays[i]);
}
