/* xla_targets.h -- the functions that XLA calls, for Python to register. */
#ifndef CATTN_XLA_TARGETS_H
#define CATTN_XLA_TARGETS_H

#include "binding.h"

/* _xla_targets(): a dict from the name of a pass to the capsule of its function */
PyObject *cattn_py_xla_targets(PyObject *module, PyObject *unused);
/* _xla_operands(): the names of arguments and results, by their bits in the attribute `present`: two lists */
PyObject *cattn_py_xla_operands(PyObject *module, PyObject *unused);
/* _xla_is_known(): whether XLA has asked for them, by structs of the layout that they know */
PyObject *cattn_py_xla_is_known(PyObject *module, PyObject *unused);

#endif
