/* signature.h -- how a public function's arguments reach its body in C. See signature.c. */
#ifndef CATTN_SIGNATURE_H
#define CATTN_SIGNATURE_H

#include "binding.h"

/* Releases all but the text, to which a builtin may still point. */
void cattn_signature_clear(struct cattn_signature *signature);

/* For the module's PyMethodDef table. */
PyObject *cattn_py_register(PyObject *module, PyObject *args);
PyObject *cattn_py_arguments(PyObject *module, PyObject *name);
PyObject *cattn_py_operands(PyObject *module, PyObject *unused);
PyObject *cattn_py_numbers(PyObject *module, PyObject *unused);

#endif
