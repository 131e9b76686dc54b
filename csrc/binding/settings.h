/* settings.h -- threads, instruction set and path, facts about the build, and the environment's settings. */
#ifndef CATTN_SETTINGS_H
#define CATTN_SETTINGS_H

#include "binding.h"

/* Reads CATTN_ISA and CATTN_NUM_THREADS. ImportError: a wrong setting must not be a surprise later. */
bool cattn_read_environment(void);

/* For the module's PyMethodDef table. */
PyObject *cattn_py_get_num_threads(PyObject *module, PyObject *unused);
PyObject *cattn_py_set_num_threads(PyObject *module, PyObject *count);
PyObject *cattn_py_override_num_threads(PyObject *module, PyObject *count);
PyObject *cattn_py_isa_list(PyObject *module, PyObject *unused);
PyObject *cattn_py_set_isa(PyObject *module, PyObject *name);
PyObject *cattn_py_get_isa(PyObject *module, PyObject *unused);
PyObject *cattn_py_set_path(PyObject *module, PyObject *name);
PyObject *cattn_py_block_keys(PyObject *module, PyObject *unused);
PyObject *cattn_py_chunk_keys(PyObject *module, PyObject *unused);
PyObject *cattn_py_build_info(PyObject *module, PyObject *unused);
PyObject *cattn_py_release(PyObject *module, PyObject *unused);

#endif
