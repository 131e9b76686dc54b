/* quantized.h -- keys and values that are numbers of one byte, each multiplied by a scale. */
#ifndef CATTN_QUANTIZED_H
#define CATTN_QUANTIZED_H

#include "arrays.h"

/* key or value, whose scale was given: one byte an element, of int8 or float8_e4m3fn; which one, `storage` receives. */
PyArrayObject *cattn_arg_quantized(struct binding_state *state, PyObject *object, const char *name,
                                   enum cattn_storage *storage);
/* key_scale or value_scale: positive, finite numbers in float32. */
PyArrayObject *cattn_arg_scale_array(struct binding_state *state, PyObject *object, const char *name);
/* ValueError unless a scale broadcasts to the shape of its key or value. */
bool cattn_arg_scale_fits(PyArrayObject *scale, const char *name, PyArrayObject *array, const char *whose);
/* Replaces such an array by its elements times their scales, rounded to float32, as float64. */
bool cattn_arg_dequantize(struct binding_state *state, PyArrayObject **array, const char *name, PyArrayObject *scale,
                          const char *scale_name);

#endif
