/* outputs.c -- result arrays: new ones, or the caller's `out`, checked and kept apart from the inputs */
#include "args.h"

static int64_t type_size(int type) {
    return type == NPY_BOOL    ? 1
           : type == NPY_INT32 ? (int64_t)sizeof(int32_t)
                               : (int64_t)cattn_stored_size(cattn_arg_dtype(type), cattn_arg_storage(type));
}

static PyArrayObject *new_array(const struct cattn_output_spec *spec,
                                PyArrayObject *(*make)(int nd, const int64_t *dims, int type)) {
    const int64_t size = cattn_count(spec->nd, spec->dims);
    if (size >= 0 && size <= (NPY_MAX_INTP - CATTN_LINE) / type_size(spec->type))
        return make(spec->nd, spec->dims, spec->type);
    PyErr_Format(PyExc_ValueError, "%s of shape %s is too large", spec->name,
                 cattn_show_shape(spec->nd, spec->dims).text);
    return NULL;
}

/* ---- the caller's array ---- */

static bool check_type(struct binding_state *state, PyObject *given, const struct cattn_output_spec *spec) {
    if (!PyArray_Check(given))
        return cattn_error_type(spec->name, "a numpy.ndarray", given);
    if (!PyArray_CheckExact(given)) {
        PyObject *fine = PyObject_CallFunction(state->refuse_masked, "Os", given, spec->name);
        if (fine == NULL)
            return false;
        Py_DECREF(fine);
    }
    PyArrayObject *array = (PyArrayObject *)given;
    if (PyArray_TYPE(array) != spec->type) {
        PyArray_Descr *wanted = PyArray_DescrFromType(spec->type);
        if (wanted != NULL)
            PyErr_Format(PyExc_TypeError, "%s has dtype %S, the result has %S", spec->name, PyArray_DESCR(array),
                         wanted);
        Py_XDECREF((PyObject *)wanted);
        return false;
    }
    if (!PyArray_ISALIGNED(array) || !PyArray_ISNOTSWAPPED(array))
        return cattn_raise(PyExc_TypeError, "%s must be aligned and in native byte order", spec->name);
    return true;
}

/* ValueError unless each element surely has its own memory: sorted by size, each stride must step over the span of the
 * smaller ones. This holds for all slices, transposes and reshapes of an ordinary array. Other arrays may be free of
 * overlap too, but are refused. */
static bool check_apart(PyArrayObject *array, const char *name) {
    const int nd = PyArray_NDIM(array);
    bool taken[NPY_MAXDIMS] = {false};
    npy_uintp span = (npy_uintp)PyArray_ITEMSIZE(array); /* unsigned: strides may be any numbers */
    for (int axis = 0; axis < nd; axis++)
        if (PyArray_DIM(array, axis) == 0)
            return true;
    for (int n = 0; n < nd; n++) {
        int least = -1;
        npy_uintp step = 0;
        for (int axis = 0; axis < nd; axis++) {
            const npy_uintp stride = (npy_uintp)PyArray_STRIDE(array, axis);
            const npy_uintp size = PyArray_STRIDE(array, axis) < 0 ? 0 - stride : stride;
            if (!taken[axis] && (least < 0 || size < step)) {
                least = axis;
                step = size;
            }
        }
        taken[least] = true;
        if (PyArray_DIM(array, least) == 1)
            continue;
        if (step < span)
            return cattn_raise(PyExc_ValueError, "%s overlaps itself: axis %d has stride %zd", name, least,
                               (Py_ssize_t)PyArray_STRIDE(array, least));
        span += (npy_uintp)(PyArray_DIM(array, least) - 1) * step;
    }
    return true;
}

static bool check_layout(PyArrayObject *array, const struct cattn_output_spec *spec) {
    struct cattn_array frozen;
    cattn_freeze(array, spec->name, &frozen);
    if (!cattn_check_shape(cattn_python, &frozen, "the result", spec->nd, spec->dims))
        return false;
    if (!PyArray_ISWRITEABLE(array))
        return cattn_raise(PyExc_ValueError, "%s is read-only", spec->name);
    return check_apart(array, spec->name);
}

static bool whole_strides(PyArrayObject *array, int64_t itemsize) {
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        if (PyArray_DIM(array, axis) > 1 && PyArray_STRIDE(array, axis) % itemsize != 0)
            return false;
    }
    return true;
}

/* ---- overlap ---- */

/* All elements lie in the bytes from `low` up to but not including `high`. Empty arrays have low == high. */
struct extent {
    uintptr_t low, high;
};

static struct extent extent_of(PyArrayObject *array) {
    int64_t below = 0, above = PyArray_ITEMSIZE(array);
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        const int64_t n = PyArray_DIM(array, axis), stride = PyArray_STRIDE(array, axis);
        if (n == 0) {
            below = above = 0;
            break;
        }
        if (stride < 0)
            below += (n - 1) * stride;
        else
            above += (n - 1) * stride;
    }
    const uintptr_t data = (uintptr_t)PyArray_DATA(array);
    return (struct extent){data - (uintptr_t)-below, data + (uintptr_t)above};
}

/* 1 or 0; -1 with an exception. Only arrays whose extents meet need the exact, expensive answer. */
static int overlap(struct binding_state *state, PyArrayObject *a, struct extent extent_a, PyArrayObject *b) {
    const struct extent extent_b = extent_of(b);
    if (extent_a.low >= extent_b.high || extent_b.low >= extent_a.high || extent_a.low == extent_a.high ||
        extent_b.low == extent_b.high)
        return 0;
    PyObject *answer = PyObject_CallFunctionObjArgs(state->shares_memory, (PyObject *)a, (PyObject *)b, NULL);
    if (answer == NULL)
        return -1;
    const int truth = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return truth;
}

/* Arrays of the same shape and type with every element at the same place: each element is overwritten only by its own
 * result. */
static bool same_layout(PyArrayObject *a, PyArrayObject *b) {
    return PyArray_DATA(a) == PyArray_DATA(b) && PyArray_NDIM(a) == PyArray_NDIM(b) &&
           PyArray_CompareLists(PyArray_STRIDES(a), PyArray_STRIDES(b), PyArray_NDIM(a));
}

static int needs_temporary(struct binding_state *state, PyArrayObject *array, const struct cattn_output_spec *spec) {
    struct cattn_array frozen;
    int64_t row;
    cattn_freeze(array, spec->name, &frozen);
    if (!whole_strides(array, type_size(spec->type)) || (spec->even_rows && !cattn_rows_are_even(&frozen, &row)))
        return 1;
    const struct extent extent = extent_of(array);
    for (int i = 0; i < spec->n_inputs; i++) {
        PyArrayObject *input = spec->inputs[i];
        if (input == NULL || (input == spec->in_place && same_layout(array, input)))
            continue;
        const int shared = overlap(state, array, extent, input);
        if (shared != 0)
            return shared;
    }
    return 0;
}

/* ---- an output from its check to the result ---- */

bool cattn_arg_output(struct binding_state *state, PyObject *given, const struct cattn_output_spec *spec,
                      struct cattn_output *output) {
    if (given == NULL || given == Py_None) {
        output->array = new_array(spec, cattn_new_array);
        return output->array != NULL;
    }
    PyArrayObject *array = (PyArrayObject *)given;
    if (!check_type(state, given, spec) || !check_layout(array, spec))
        return false;
    const int temporary = needs_temporary(state, array, spec);
    /* again: the check above may have run Python code, which might change the array */
    if (temporary < 0 || !check_type(state, given, spec) || !check_layout(array, spec))
        return false;
    Py_INCREF(given);
    output->given = array;
    if (temporary == 0)
        Py_INCREF(given);
    output->array = temporary ? new_array(spec, cattn_new_array) : array;
    return output->array != NULL;
}

bool cattn_arg_state_out(struct binding_state *state, PyObject *given, const struct cattn_output_spec *spec,
                         struct cattn_output *output) {
    if (given != Py_None)
        return cattn_arg_output(state, given, spec, output);
    output->array = new_array(spec, cattn_new_at_line);
    return output->array != NULL;
}

bool cattn_arg_outputs_apart(struct binding_state *state, const struct cattn_output *a, const char *name_a,
                             const struct cattn_output *b, const char *name_b) {
    if (a->given == NULL || b->given == NULL)
        return true;
    const int shared = overlap(state, a->given, extent_of(a->given), b->given);
    if (shared > 0)
        PyErr_Format(PyExc_ValueError, "%s and %s share memory", name_a, name_b);
    return shared == 0;
}

bool cattn_output_finish(struct cattn_output *output) {
    if (output->given == NULL || output->given == output->array)
        return true;
    return cattn_copy_into(output->given, output->array);
}

PyObject *cattn_output_result(const struct cattn_output *output) {
    PyObject *result = (PyObject *)(output->given != NULL ? output->given : output->array);
    Py_INCREF(result);
    return result;
}

void cattn_output_clear(struct cattn_output *output) {
    Py_CLEAR(output->given);
    Py_CLEAR(output->array);
}

PyObject *cattn_output_end(bool computed, struct cattn_output *output, PyArrayObject *const *inputs, int n_inputs) {
    PyObject *result = computed && cattn_output_finish(output) ? cattn_output_result(output) : NULL;
    for (int i = 0; i < n_inputs; i++)
        Py_XDECREF((PyObject *)inputs[i]);
    cattn_output_clear(output);
    return result;
}

PyObject *cattn_output_store(struct binding_state *state, PyObject *result, PyObject *out) {
    struct cattn_array frozen;
    cattn_freeze((PyArrayObject *)result, "result", &frozen);
    const struct cattn_output_spec spec = {
        .name = "out", .type = PyArray_TYPE((PyArrayObject *)result), .nd = frozen.nd, .dims = frozen.dims};
    if (!check_type(state, out, &spec) || !check_layout((PyArrayObject *)out, &spec) ||
        !cattn_copy_into((PyArrayObject *)out, (PyArrayObject *)result))
        return NULL;
    return Py_NewRef(out);
}

/* _store(result, out): cattn_output_store. */
PyObject *cattn_py_store(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    if (!cattn_error_count("_store", n_args, 2) || !cattn_ready(cattn_state(module)))
        return NULL;
    if (PyArray_CheckExact(args[0]))
        return cattn_output_store(cattn_state(module), args[0], args[1]);
    cattn_error_type("result", "a numpy.ndarray", args[0]);
    return NULL;
}
