/* rng.c -- the arguments `rng` and dropout probability: a seed or a generator, a threshold and a scale. */
#include "engine.h"

/* An int is the Philox key itself. False with a ValueError: it is out of range. */
static bool key_from_int(PyObject *rng, uint64_t *seed) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(rng);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return cattn_error_value(rng, "rng must be in 0 <= rng < 2**64 if it is an int");
    }
    *seed = value;
    return true;
}

bool cattn_rng_check(PyObject *rng) {
    uint64_t unused;
    if (PyBool_Check(rng) || PyArray_IsScalar(rng, Bool) || PyFloat_Check(rng) || PyUnicode_Check(rng) ||
        PyBytes_Check(rng))
        return cattn_error_type("rng", "None, an int, a cattn.TorchGenerator, or what numpy.random.default_rng takes",
                                rng);
    return !PyLong_Check(rng) || key_from_int(rng, &unused);
}

static bool key_from_system(struct binding_state *state, uint64_t *seed) {
    PyObject *bytes = PyObject_CallFunctionObjArgs(state->urandom, state->eight, NULL);
    if (bytes == NULL)
        return false;
    const char *data = PyBytes_AsString(bytes);
    if (data != NULL)
        memcpy(seed, data, sizeof *seed);
    Py_DECREF(bytes);
    return data != NULL;
}

static bool rng_seed(struct binding_state *state, PyObject *rng, uint64_t *seed) {
    if (rng == Py_None)
        return key_from_system(state, seed);
    if (!cattn_rng_check(rng))
        return false;
    if (PyLong_Check(rng))
        return key_from_int(rng, seed);
    PyObject *key = PyObject_CallFunctionObjArgs(state->draw_seed, rng, NULL);
    if (key == NULL)
        return false;
    const bool fits = key_from_int(key, seed);
    Py_DECREF(key);
    return fits;
}

bool cattn_draw_begin(struct binding_state *state, PyObject *rng, struct cattn_dropout_spec *spec,
                      struct cattn_draw *draw) {
    draw->is_torch = cattn_torch_check(state, rng);
    if (!draw->is_torch)
        return rng_seed(state, rng, &spec->seed);
    if (spec->keep_probability == 0.0) /* all is dropped: PyTorch draws nothing */
        return true;
    if (!cattn_torch_begin(rng, &draw->random))
        return false;
    draw->stream = rng;
    spec->torch = &draw->random;
    return true;
}

PyObject *cattn_draw_end(struct cattn_draw *draw, PyObject *result) {
    if (draw->stream == NULL)
        return result;
    if (result == NULL)
        cattn_torch_abort(draw->stream);
    else if (!cattn_torch_commit(draw->stream, &draw->random))
        Py_CLEAR(result);
    return result;
}

bool cattn_dropout_spec_from(PyObject *p, const char *name, struct cattn_dropout_spec *spec) {
    double probability;
    if (!cattn_arg_probability(p, name, &probability))
        return false;
    cattn_set_dropout(spec, probability);
    return true;
}

/* ---- dropout ---- */

bool cattn_settle_dropout(struct cattn_function_call *call) {
    struct cattn_dropout_params *params = call->params;
    bool training;
    call->draw = &((struct cattn_dropout_memory *)call->params)->draw;
    cattn_draw_clear(call->draw);
    if (!cattn_dropout_spec_from(call->args[DROPOUT_p], "p", &params->dropout) ||
        !cattn_arg_flag(call->args[DROPOUT_training], "training", &training))
        return false;
    params->dropout.enabled = params->dropout.enabled && training;
    return cattn_rng_check(call->args[DROPOUT_rng]);
}

bool cattn_run_dropout(struct cattn_function_call *call) {
    struct cattn_dropout_params *params = call->params;
    PyArrayObject *const mask = call->results[1].array;
    if (params->dropout.enabled)
        return cattn_draw_begin(call->state, call->args[DROPOUT_rng], &params->dropout, call->draw) &&
               cattn_run_core(call);
    if (mask != NULL) /* nothing is dropped */
        memset(PyArray_DATA(mask), 1, (size_t)PyArray_SIZE(mask));
    return cattn_copy_into(call->results[0].array, call->arrays[0]);
}
