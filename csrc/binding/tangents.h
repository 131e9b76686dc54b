/* tangents.h -- tangents of attention's inputs as arguments. */
#ifndef CATTN_BINDING_TANGENTS_H
#define CATTN_BINDING_TANGENTS_H

#include "attention_args.h"

/* In the order of TANGENTS_EXTRA. */
enum { QUERY_TANGENT, KEY_TANGENT, VALUE_TANGENT, BIAS_TANGENT, SINKS_TANGENT, CATTN_N_TANGENTS };

/* Checks and converts them, after cattn_call_parse, and fills in their tensors. None is no tangent. */
bool cattn_tangents_take(struct cattn_call *call, PyObject *const *objects, PyArrayObject **arrays,
                         struct cattn_tangents *tangents);
void cattn_tangents_clear(PyArrayObject **arrays);
/* An error for arguments that have no derivatives here: quantized keys and values, and a dropout mask that is not
 * drawn again from an int. */
bool cattn_tangents_refuse(const struct cattn_call *call, PyObject *const *args);

#endif
