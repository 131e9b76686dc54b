/* attention_statistics.c -- attention_statistics(...): parse, allocate, run the core, build the result. */
#include "attention_call.h"

/* The fields of the result, in its order. The first are the values of enum cattn_row_statistic. */
enum { TOP_KEYS = CATTN_N_ROW_STATISTICS, TOP_WEIGHTS, RECEIVED, RECEIVED_MAX, N_FIELDS };
static const struct cattn_result_row FIELDS[N_FIELDS] = {
    {"lse", "NT", COMPUTED},         {"max_score", "NT", COMPUTED},    {"entropy", "NT", COMPUTED},
    {"max_weight", "NT", COMPUTED},  {"sink_weight", "NT", COMPUTED},  {"distance", "NT", COMPUTED},
    {"top_keys", "NTP", LISTS},      {"top_weights", "NTP", COMPUTED}, {"received", "NS", COMPUTED},
    {"received_max", "NS", COMPUTED}};

struct statistics {
    struct cattn_call call;
    struct cattn_statistics_params params;
    bool wants[N_FIELDS];
    PyArrayObject *fields[N_FIELDS]; /* owned, or NULL */
    PyArrayObject *lse;              /* owned: in float64, from the forward pass */
    struct cattn_draw draw;
    struct cattn_frozen frozen;
};

/* ---- arguments ---- */

static bool is_top(int field) { return field == TOP_KEYS || field == TOP_WEIGHTS; }

static bool want(struct statistics *s, PyObject *name) {
    for (int i = 0; PyUnicode_Check(name) && i < N_FIELDS; i++) {
        if (!is_top(i) && PyUnicode_CompareWithASCIIString(name, FIELDS[i].name) == 0) {
            s->wants[i] = true;
            return true;
        }
    }
    PyObject *shown = cattn_shown(name);
    const bool top = PyUnicode_Check(name) && (PyUnicode_CompareWithASCIIString(name, FIELDS[TOP_KEYS].name) == 0 ||
                                               PyUnicode_CompareWithASCIIString(name, FIELDS[TOP_WEIGHTS].name) == 0);
    if (shown != NULL)
        PyErr_Format(PyExc_ValueError,
                     "statistics must hold names of 'lse', 'max_score', 'entropy', 'max_weight', 'sink_weight', "
                     "'distance', 'received' and 'received_max', got %U%s",
                     shown, top ? ": pass top_k for the top keys" : "");
    Py_XDECREF(shown);
    return false;
}

/* An iterator may have no end. */
#define MOST_NAMES 1000

/* None means all of them. One name may stand without a sequence. */
static bool parse_statistics(struct statistics *s, PyObject *object) {
    if (object == Py_None || PyUnicode_Check(object)) {
        for (int i = 0; object == Py_None && i < N_FIELDS; i++)
            s->wants[i] = !is_top(i);
        return object == Py_None || want(s, object);
    }
    const char *const wanted = "None, a name or a sequence of names";
    if (PyBytes_Check(object) || PyByteArray_Check(object)) /* sequences of ints */
        return cattn_error_type("statistics", wanted, object);
    PyObject *names = PyObject_GetIter(object), *name;
    if (names == NULL)
        return cattn_error_named("statistics", wanted, object);
    bool fine = true;
    for (int n = 0; fine && (name = PyIter_Next(names)) != NULL; n++) {
        fine = n < MOST_NAMES ? want(s, name) : cattn_error_type("statistics", wanted, object);
        Py_DECREF(name);
    }
    Py_DECREF(names);
    if (fine && PyErr_Occurred())
        return cattn_error_named("statistics", wanted, object);
    return fine;
}

static bool parse_top_k(struct statistics *s, PyObject *top_k) {
    if (!cattn_arg_count(top_k, "top_k", 0, s->call.params->seqlen_k, &s->params.top_k))
        return false;
    s->call.shape.n_top = s->params.top_k;
    s->wants[TOP_KEYS] = s->wants[TOP_WEIGHTS] = s->params.top_k > 0;
    return true;
}

static bool parse_observation_window(struct statistics *s, PyObject *window) {
    s->params.observation_window = CATTN_UNBOUNDED;
    return window == Py_None ||
           cattn_arg_count(window, "observation_window", 1, CATTN_UNBOUNDED, &s->params.observation_window);
}

/* ---- results ---- */

static struct cattn_tensor *tensor_of(struct statistics *s, int field) {
    struct cattn_statistics_params *p = &s->params;
    return field == TOP_KEYS       ? &p->top_keys
           : field == TOP_WEIGHTS  ? &p->top_weights
           : field == RECEIVED     ? &p->received
           : field == RECEIVED_MAX ? &p->received_max
                                   : &p->rows[field];
}

/* Statistics of keys begin with 0, because the core adds to them. */
static bool make_field(struct statistics *s, int i) {
    const struct cattn_call *call = &s->call;
    const int type = FIELDS[i].kind == LISTS ? NPY_INT64 : call->compute_type;
    s->fields[i] = cattn_call_new(call, FIELDS[i].axes, type, i == RECEIVED || i == RECEIVED_MAX, tensor_of(s, i));
    return s->fields[i] != NULL;
}

static bool make_fields(struct statistics *s) {
    const struct cattn_call *call = &s->call;
    s->lse = cattn_call_new(call, FIELDS[CATTN_ROW_LSE].axes, NPY_DOUBLE, false, &call->params->lse);
    if (s->lse == NULL)
        return false;
    call->params->double_lse = true;
    for (int i = 0; i < N_FIELDS; i++) {
        if (s->wants[i] && !make_field(s, i))
            return false;
    }
    return true;
}

static PyObject *build_result(const struct statistics *s) {
    PyObject *fields = PyTuple_New(N_FIELDS), *result = NULL;
    for (int i = 0; fields != NULL && i < N_FIELDS; i++)
        PyTuple_SetItem(fields, i, Py_NewRef(s->fields[i] != NULL ? (PyObject *)s->fields[i] : Py_None));
    if (fields != NULL)
        result = PyObject_CallObject(s->call.state->make_statistics, fields);
    Py_XDECREF(fields);
    return result;
}

/* ---- entry points ---- */

static enum cattn_status compute(const void *params) { return cattn_attention_statistics(params); }

static PyObject *run(struct statistics *s, struct binding_state *state, PyObject **args, struct cattn_packed *packed) {
    PyObject *result = NULL, *no_dropout = PyFloat_FromDouble(0);
    if (no_dropout == NULL)
        return NULL;
    args[ARG_dropout_p] = no_dropout; /* statistics are of the weights before dropout */
    args[ARG_value] = NULL;
    cattn_clear_statistics(&s->params);
    s->call = (struct cattn_call){.state = state, .params = &s->params.forward, .frozen = &s->frozen, .packed = packed};
    s->lse = NULL;
    memset(s->wants, 0, sizeof s->wants);
    memset(s->fields, 0, sizeof s->fields);
    cattn_draw_clear(&s->draw);
    if (cattn_call_parse(&s->call, args) && parse_statistics(s, args[ARG_statistics]) &&
        parse_top_k(s, args[ARG_top_k]) && parse_observation_window(s, args[ARG_observation_window]) &&
        make_fields(s) && cattn_call_begin(&s->call)) {
        s->params.forward.path = CATTN_PATH_AUTO;
        if (cattn_call_run(&s->call, Py_None, 2 * cattn_attention_work(s->call.params), compute, &s->params, &s->draw))
            result = build_result(s);
    }
    cattn_call_clear(&s->call);
    Py_XDECREF((PyObject *)s->lse);
    for (int i = 0; i < N_FIELDS; i++)
        Py_XDECREF((PyObject *)s->fields[i]);
    Py_DECREF(no_dropout);
    return cattn_draw_end(&s->draw, result);
}

static PyObject *statistics(struct binding_state *state, PyObject **args, struct cattn_packed *packed) {
    struct statistics *s = PyMem_Malloc(sizeof *s); /* too large for a small stack beside the frames of the core */
    if (s == NULL)
        return PyErr_NoMemory();
    PyObject *result = run(s, state, args, packed);
    PyMem_Free(s);
    return result;
}

PyObject *cattn_body_attention_statistics(struct binding_state *state, PyObject **args) {
    return statistics(state, args, NULL);
}

PyObject *cattn_body_varlen_attention_statistics(struct binding_state *state, PyObject **args) {
    struct cattn_packed packed = {.args = args + N_STATISTICS_ARGS};
    return statistics(state, args, &packed);
}
