/* numbers.h -- arguments that are numbers, flags or words. `name` is the argument's name in messages. */
#ifndef CATTN_NUMBERS_H
#define CATTN_NUMBERS_H

#include "binding.h"

/* A finite real number that is not a bool. */
bool cattn_arg_real(PyObject *object, const char *name, double *value);
/* The argument `scale`, which must be finite in the compute type of arrays of `type`. */
bool cattn_arg_scale(PyObject *object, int type, double *value);
/* A number in [0, 1]. */
bool cattn_arg_probability(PyObject *object, const char *name, double *p);
/* An int, a new reference. TypeError for a bool, and for anything else that is no integer. */
PyObject *cattn_arg_index(PyObject *object, const char *name);
/* The truth of any object, as Python defines it. */
bool cattn_arg_truth(PyObject *object, const char *name, bool *value);
/* The same, inline for the objects that nearly all calls have: a call of attention has four flags. */
static inline bool cattn_arg_flag(PyObject *object, const char *name, bool *value) {
    *value = object == Py_True;
    return *value || object == Py_False || object == Py_None || cattn_arg_truth(object, name, value);
}
/* True or False, and no other object. */
bool cattn_arg_bool(PyObject *object, const char *name, bool *value);
/* An int (no bool) between two bounds. */
bool cattn_arg_count(PyObject *object, const char *name, int64_t least, int64_t most, int64_t *value);
/* Is `object` the str `interned`? */
bool cattn_arg_is(PyObject *object, PyObject *interned);

#endif
