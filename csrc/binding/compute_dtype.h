/* compute_dtype.h -- the argument compute_dtype, and numbers that are rounded to bfloat16. */
#ifndef CATTN_COMPUTE_DTYPE_H
#define CATTN_COMPUTE_DTYPE_H

#include "binding.h"

/* None, bfloat16 as a word or a dtype, or the word bfloat16_tiles. Python code may run, so it comes before the arrays.
 */
bool cattn_arg_compute_dtype(PyObject *object, enum cattn_bf16_products *products);
/* The word for products of bfloat16. */
const char *cattn_compute_dtype_word(enum cattn_bf16_products products);
/* TypeError for products of bfloat16 of arrays of another dtype; `names` is what messages call them. Always false. */
bool cattn_error_not_bfloat16(enum cattn_bf16_products products, const char *names, const char *dtype);
/* Replaces an array of float32 by a copy that is rounded to bfloat16, to nearest even; subnormal numbers become zeros.
 */
bool cattn_arg_round_to_bfloat16(PyArrayObject **array);

#endif
