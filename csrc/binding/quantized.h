/* quantized.h -- keys and values that are numbers of one byte, each multiplied by a scale. */
#ifndef CATTN_QUANTIZED_H
#define CATTN_QUANTIZED_H

#include "arrays.h"

/* key or value, whose scale was given: one byte an element, of int8 or float8_e4m3fn; which one, `storage` receives. */
PyArrayObject *cattn_arg_quantized(struct binding_state *state, PyObject *object, const char *name,
                                   enum cattn_storage *storage);
/* TypeError if an array without a scale is int8, although `other` has a scale. */
bool cattn_arg_has_scale(PyObject *object, const char *name, const char *other);
/* Replaces such an array by its elements times their scales, rounded to float32, as float64. */
bool cattn_arg_dequantize(struct binding_state *state, PyArrayObject **array, PyArrayObject *scale, const char *name);
/* key_scale or value_scale: positive, finite numbers in float32. */
PyArrayObject *cattn_arg_scale_array(struct binding_state *state, PyObject *object, const char *name);

#endif
