/* attention_jvp.c -- attention_jvp(...): parse, allocate, run the core, build the result. The gradients of its result
 * are in attention_backward.c.
 */
#include "attention_call.h"
#include "fp_mode.h"

enum { JVP_OUT, JVP_OUT_TANGENT, JVP_LSE, JVP_LSE_TANGENT, N_FIELDS };

struct jvp {
    struct cattn_call call;
    struct cattn_jvp_params params;
    struct cattn_results results;              /* of the forward pass, if they are given */
    PyArrayObject *tangents[CATTN_N_TANGENTS]; /* owned, or NULL */
    PyArrayObject *fields[N_FIELDS];           /* owned, or NULL; lse in float64 unless it was given */
    struct cattn_draw draw;
    struct cattn_frozen frozen;
};

/* out and lse, of which both or neither are given. */
static bool take_results(struct jvp *j, PyObject *out, PyObject *lse) {
    if ((out == Py_None) != (lse == Py_None))
        return cattn_raise(PyExc_ValueError,
                           "%s is given without %s: pass both results of the forward pass, or neither",
                           out == Py_None ? "lse" : "out", out == Py_None ? "out" : "lse");
    if (out == Py_None)
        return true;
    struct cattn_attention_params *forward = &j->params.forward;
    j->params.has_results = true;
    if (!cattn_results_take(&j->results, &j->call, CATTN_FORWARD_OUT, out, "out", &forward->out) ||
        !cattn_results_take(&j->results, &j->call, CATTN_FORWARD_LSE, lse, "lse", &forward->lse))
        return false;
    if (j->results.plain_out)
        return cattn_raise(PyExc_TypeError, "out has dtype float32, the forward pass gives halves");
    j->fields[JVP_OUT] = (PyArrayObject *)Py_NewRef((PyObject *)j->results.arrays[CATTN_FORWARD_OUT]);
    j->fields[JVP_LSE] = (PyArrayObject *)Py_NewRef((PyObject *)j->results.arrays[CATTN_FORWARD_LSE]);
    return true;
}

/* A new array for a result. */
static bool make_field(struct jvp *j, int i, struct cattn_tensor *tensor) {
    const struct cattn_call *call = &j->call;
    const bool rows_only = i == JVP_LSE || i == JVP_LSE_TANGENT;
    const int type = i == JVP_LSE ? NPY_DOUBLE : rows_only ? call->compute_type : call->stored_type;
    j->fields[i] = cattn_call_new(call, rows_only ? "NT" : "NTD", type, false, tensor);
    return j->fields[i] != NULL;
}

static bool make_fields(struct jvp *j) {
    struct cattn_attention_params *forward = &j->params.forward;
    if (!j->params.has_results) {
        forward->double_lse = true;
        if (!make_field(j, JVP_OUT, &forward->out) || !make_field(j, JVP_LSE, &forward->lse))
            return false;
    }
    return make_field(j, JVP_OUT_TANGENT, &j->params.tangents.out) &&
           (!j->call.wants[LSE] || make_field(j, JVP_LSE_TANGENT, &j->params.tangents.lse));
}

static enum cattn_status compute(const void *params) { return cattn_attention_jvp(params); }

/* lse as the caller wants it. */
static PyObject *finished_lse(const struct jvp *j) {
    PyArrayObject *lse = j->fields[JVP_LSE];
    const int type = j->call.lse_type != NPY_BOOL ? j->call.lse_type : j->call.compute_type;
    if (!j->call.wants[LSE])
        return Py_NewRef(Py_None);
    if (PyArray_TYPE(lse) == type)
        return Py_NewRef((PyObject *)lse);
    const unsigned mode = cattn_fp_enter(); /* the caller's rounding must not show */
    PyObject *rounded = PyArray_CastToType(lse, PyArray_DescrFromType(type), 0);
    cattn_fp_leave(mode);
    return rounded;
}

static PyObject *build_result(const struct jvp *j) {
    PyObject *lse = finished_lse(j), *result = NULL;
    PyObject *lse_tangent = j->call.wants[LSE] ? (PyObject *)j->fields[JVP_LSE_TANGENT] : Py_None;
    if (lse != NULL)
        result = PyObject_CallFunctionObjArgs(j->call.state->attention_tangents, (PyObject *)j->fields[JVP_OUT],
                                              (PyObject *)j->fields[JVP_OUT_TANGENT], lse, lse_tangent, NULL);
    Py_XDECREF(lse);
    return result;
}

static PyObject *derive(struct jvp *j, struct binding_state *state, PyObject *const *args) {
    PyObject *result = NULL;
    cattn_clear_jvp(&j->params);
    j->call = (struct cattn_call){
        .state = state,
        .params = &j->params.forward,
        .frozen = &j->frozen,
    };
    j->results = (struct cattn_results){.plain_out = false};
    memset(j->tangents, 0, sizeof j->tangents);
    memset(j->fields, 0, sizeof j->fields);
    cattn_draw_clear(&j->draw);
    if (cattn_call_parse(&j->call, args) && cattn_tangents_refuse(&j->call, args) &&
        (args[ARG_return_lse] == Py_False || cattn_call_parse_return_lse(&j->call, args[ARG_return_lse])) &&
        cattn_tangents_take(&j->call, args + ARG_jvp_query_tangent, j->tangents, &j->params.tangents) &&
        take_results(j, args[ARG_out], args[ARG_jvp_lse]) && make_fields(j)) {
        j->params.forward.path = CATTN_PATH_AUTO;
        const double work = 4 * cattn_attention_work(j->call.params);
        if (cattn_call_run(&j->call, args[ARG_rng], work, compute, &j->params, &j->draw))
            result = build_result(j);
    }
    cattn_call_clear(&j->call);
    cattn_results_clear(&j->results);
    cattn_tangents_clear(j->tangents);
    for (int i = 0; i < N_FIELDS; i++)
        Py_XDECREF((PyObject *)j->fields[i]);
    return cattn_draw_end(&j->draw, result);
}

PyObject *cattn_body_attention_jvp(struct binding_state *state, PyObject **args) {
    struct jvp *j = PyMem_Malloc(sizeof *j); /* too large for a small stack beside the frames of the core */
    if (j == NULL)
        return PyErr_NoMemory();
    PyObject *result = derive(j, state, args);
    PyMem_Free(j);
    return result;
}
