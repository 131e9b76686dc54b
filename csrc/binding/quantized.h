/* quantized.h -- keys, values and weights that are numbers of one byte, each multiplied by a scale. */
#ifndef CATTN_QUANTIZED_H
#define CATTN_QUANTIZED_H

#include "arrays.h"

/* Is it a cattn.Quantized? */
bool cattn_arg_is_quantized(const struct binding_state *state, PyObject *object);
/* Its arrays, new references: one byte an element, of int8 or float8_e4m3fn (which one, `storage` receives), and the
 * scales. Its constructor has checked them. After an error the caller still owns what `array` and `scale` got. */
bool cattn_arg_take_quantized(const struct binding_state *state, PyObject *object, const char *name,
                              PyArrayObject **array, PyArrayObject **scale, enum cattn_storage *storage);
/* ValueError unless a scale broadcasts to the shape of its array. */
bool cattn_arg_scale_fits(PyArrayObject *scale, const char *name, PyArrayObject *array, const char *whose);
/* Replaces such an array by its elements times their scales, rounded to float32, as float64. */
bool cattn_arg_dequantize(struct binding_state *state, PyArrayObject **array, const char *name, PyArrayObject *scale,
                          const char *scale_name);

#endif
