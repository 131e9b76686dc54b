/* numbers.c -- arguments that are numbers, flags or words, compute_dtype among them. */
#include "args.h"

#include <math.h>

bool cattn_arg_real(PyObject *object, const char *name, double *value) {
    double number;
    if (PyFloat_CheckExact(object)) {
        number = PyFloat_AsDouble(object);
    } else {
        if (PyBool_Check(object) || PyArray_IsScalar(object, Bool) || PyArray_IsScalar(object, ComplexFloating) ||
            PyUnicode_Check(object) || PyBytes_Check(object))
            return cattn_error_type(name, "a real number", object);
        number = PyFloat_AsDouble(object);
        if (number == -1.0 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError))
                return cattn_error_named(name, "a real number", object);
            PyErr_Clear();
            number = HUGE_VAL; /* an int beyond every double */
        }
    }
    if (!isfinite(number)) {
        PyObject *shown = PyFloat_FromDouble(number);
        if (shown != NULL)
            PyErr_Format(PyExc_ValueError, "%s must be finite, got %R", name, shown);
        Py_XDECREF(shown);
        return false;
    }
    *value = number;
    return true;
}

bool cattn_arg_scale(PyObject *object, int type, double *value) {
    if (!cattn_arg_real(object, "scale", value))
        return false;
    const char *fault = cattn_number_fault(REAL, *value, cattn_arg_dtype(type));
    return fault == NULL || cattn_error_value(object, "scale %s", fault);
}

bool cattn_arg_probability(PyObject *object, const char *name, double *p) {
    if (!cattn_arg_real(object, name, p))
        return false;
    const char *fault = cattn_number_fault(PROBABILITY, *p, CATTN_F64);
    return fault == NULL || cattn_error_value(object, "%s %s", name, fault);
}

PyObject *cattn_arg_index(PyObject *object, const char *name) {
    if (!PyBool_Check(object) && !PyArray_IsScalar(object, Bool) && PyIndex_Check(object)) {
        PyObject *number = PyNumber_Index(object);
        if (number == NULL) /* arrays have the method, and use it only where they hold one integer */
            cattn_error_named(name, "an int", object);
        return number;
    }
    cattn_error_type(name, "an int", object);
    return NULL;
}

bool cattn_arg_count(PyObject *object, const char *name, int64_t least, int64_t most, int64_t *value) {
    PyObject *number = PyLong_CheckExact(object) ? Py_NewRef(object) : cattn_arg_index(object, name);
    if (number == NULL)
        return false;
    int overflow;
    const long long n = PyLong_AsLongLongAndOverflow(number, &overflow);
    const bool failed = n == -1 && PyErr_Occurred() != NULL;
    const bool fits = !failed && overflow == 0 && n >= least && n <= most;
    if (fits)
        *value = n;
    else if (!failed && (overflow > 0 || n > most))
        cattn_error_value(number, "%s must be at most %lld", name, (long long)most);
    else if (!failed)
        cattn_error_value(number, "%s must be at least %lld", name, (long long)least);
    Py_DECREF(number);
    return fits;
}

bool cattn_arg_truth(PyObject *object, const char *name, bool *value) {
    const int truth = PyObject_IsTrue(object);
    *value = truth > 0;
    return truth >= 0 || cattn_error_named(name, "True or False", object);
}

bool cattn_arg_bool(PyObject *object, const char *name, bool *value) {
    if (!PyBool_Check(object) && !PyArray_IsScalar(object, Bool))
        return cattn_error_type(name, "True or False", object);
    return cattn_arg_truth(object, name, value);
}

bool cattn_arg_is_integers(PyObject *object) {
    return PyArray_CheckExact(object) && PyArray_NDIM((PyArrayObject *)object) > 0 &&
           PyTypeNum_ISINTEGER(PyArray_TYPE((PyArrayObject *)object));
}

bool cattn_arg_is(PyObject *object, PyObject *interned) {
    if (object == interned)
        return true;
    return PyUnicode_Check(object) && PyUnicode_Compare(object, interned) == 0;
}

/* ---- compute_dtype ---- */

/* Whether an object is a dtype by this name, or the type of its scalars. No exception is set. */
static bool is_dtype(PyObject *object, const char *name) {
    PyArray_Descr *descr = NULL;
    if (!PyType_Check(object) && !PyArray_DescrCheck(object))
        return false;
    PyObject *own =
        PyArray_DescrConverter(object, &descr) != NPY_FAIL ? PyObject_GetAttrString((PyObject *)descr, "name") : NULL;
    const bool is = own != NULL && PyUnicode_CompareWithASCIIString(own, name) == 0;
    Py_XDECREF(own);
    Py_XDECREF((PyObject *)descr);
    PyErr_Clear();
    return is;
}

static bool is_word(PyObject *object, const char *word) {
    return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, word) == 0;
}

bool cattn_arg_compute_dtype(PyObject *object, enum cattn_bf16_products *products) {
    *products = CATTN_BF16_NOT;
    if (object == Py_None)
        return true;
    *products = is_word(object, "bfloat16_tiles") ? CATTN_BF16_TILES : CATTN_BF16_PAIRS;
    if (*products == CATTN_BF16_TILES || is_word(object, "bfloat16") || is_dtype(object, "bfloat16"))
        return true;
    return cattn_error_value(object, "compute_dtype must be None, 'bfloat16' or 'bfloat16_tiles'");
}

const char *cattn_compute_dtype_word(enum cattn_bf16_products products) {
    return products == CATTN_BF16_TILES ? "bfloat16_tiles" : "bfloat16";
}

bool cattn_error_not_bfloat16(enum cattn_bf16_products products, const char *names, const char *dtype) {
    return cattn_raise(PyExc_TypeError, "compute_dtype='%s' is for float32 and bfloat16, and %s are %s: convert them",
                       cattn_compute_dtype_word(products), names, dtype);
}

/* ---- for Python ---- */

/* _probability(object, name): a float in [0, 1], by the rule of every dropout */
PyObject *cattn_py_probability(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *object;
    const char *name;
    double p = 0.0;
    if (!PyArg_ParseTuple(args, "Os:_probability", &object, &name) || !cattn_arg_probability(object, name, &p))
        return NULL;
    return PyFloat_FromDouble(p);
}

/* _default_scale(width) */
PyObject *cattn_py_default_scale(PyObject *Py_UNUSED(module), PyObject *width) {
    int64_t n;
    double scale;
    if (!cattn_arg_count(width, "width", 0, INT64_MAX, &n))
        return NULL;
    cattn_default_scale(&n, &scale);
    return PyFloat_FromDouble(scale);
}
