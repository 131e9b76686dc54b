/* compute_dtype.c -- the argument compute_dtype, and numbers that are rounded to bfloat16. */
#include "compute_dtype.h"

#include "arrays.h"
#include "error.h"
#include "gil.h"

/* Numbers that are rounded between two looks at signals. */
#define ROUNDED_PIECE ((npy_intp)1 << 20)

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
    PyErr_Format(PyExc_TypeError, "compute_dtype='%s' is for float32 and bfloat16, and %s are %s: convert them",
                 cattn_compute_dtype_word(products), names, dtype);
    return false;
}

bool cattn_arg_round_to_bfloat16(PyArrayObject **array) {
    PyArrayObject *copy = (PyArrayObject *)PyArray_NewLikeArray(*array, NPY_KEEPORDER, NULL, 0); /* without gaps */
    if (copy == NULL || !cattn_copy_into(copy, *array)) {
        Py_XDECREF((PyObject *)copy);
        return false;
    }
    uint32_t *bits = PyArray_DATA(copy);
    for (npy_intp i = 0; i < PyArray_SIZE(copy); i++) {
        if (i % ROUNDED_PIECE == ROUNDED_PIECE - 1 && !cattn_check_signals()) {
            Py_DECREF((PyObject *)copy);
            return false;
        }
        const uint32_t size = bits[i] & 0x7fffffffu;
        if (size < 0x00800000u) /* subnormal */
            bits[i] &= 0x80000000u;
        else if (size <= 0x7f800000u) /* not NaN */
            bits[i] = (bits[i] + 0x7fffu + (bits[i] >> 16 & 1u)) & 0xffff0000u;
    }
    Py_DECREF((PyObject *)*array);
    *array = copy;
    return true;
}
