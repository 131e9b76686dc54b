/* error.h -- exceptions: from the core's status, and messages that several files need. */
#ifndef CATTN_ERROR_H
#define CATTN_ERROR_H

#include "binding.h"

/* True for CATTN_OK; every other status becomes an exception here and nowhere else. */
bool cattn_error_status(enum cattn_status status);
/* TypeError "<name> must be <wanted>, got <type of got>". Always false. */
bool cattn_error_type(const char *name, const char *wanted, PyObject *got);
/* ValueError "<format>, got <the object>". Always false. */
bool cattn_error_value(PyObject *got, const char *format, ...);
/* An object as an error shows it, a new reference: its repr, or for what is long, or fails to show itself, a few words
 * about it. */
PyObject *cattn_shown(PyObject *object);
/* Replaces an exception raised by the argument's own method with a TypeError that names the argument; the old one
 * becomes its cause. Exceptions of signals, exits, memory and recursion are not about the object, and stay. Always
 * false. */
bool cattn_error_named(const char *name, const char *wanted, PyObject *got);
/* TypeError unless a C entry point got as many arguments as it is declared with. */
bool cattn_error_count(const char *function, Py_ssize_t got, Py_ssize_t wanted);
/* RuntimeError unless the helpers of the package are registered and can be called. */
bool cattn_ready(const struct binding_state *state);
/* A shape as Python shows it, a new reference. */
PyObject *cattn_shape_tuple(int nd, const npy_intp *dims);

/* For errors about heads and tokens that the arrays would not have with these two axes swapped. */
#define CATTN_LAYOUT_HINT                                                                                              \
    "if the arrays are (..., tokens, heads, head_dim), pass query.swapaxes(-3, -2) and so on, or layout='bthd'"

#endif
