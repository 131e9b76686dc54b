/* outputs.h -- result arrays: new ones, or the caller's `out`, checked and kept apart from the inputs. */
#ifndef CATTN_OUTPUTS_H
#define CATTN_OUTPUTS_H

#include "binding.h"

struct cattn_output {
    PyArrayObject *given; /* the caller's array, or NULL */
    PyArrayObject *array; /* written by the core: the caller's array, a temporary for it, or a new one */
};
struct cattn_output_spec {
    const char *name;
    int type, nd;
    const npy_intp *dims;
    PyArrayObject *const *inputs; /* an output that overlaps one is computed in a temporary; NULLs are skipped */
    int n_inputs;
    PyArrayObject *in_place; /* the input of this shape and type that may be overwritten, if the strides are the same;
                                or NULL */
};
/* given: None or NULL allocates. */
bool cattn_arg_output(struct binding_state *state, PyObject *given, const struct cattn_output_spec *spec,
                      struct cattn_output *output);
/* ValueError if two of the caller's arrays share memory. */
bool cattn_arg_outputs_apart(struct binding_state *state, const struct cattn_output *a, const char *name_a,
                             const struct cattn_output *b, const char *name_b);
/* Copies a temporary, if there is one, into the caller's array. */
bool cattn_output_finish(struct cattn_output *output);
/* The array that the user gets, a new reference. */
PyObject *cattn_output_result(const struct cattn_output *output);
void cattn_output_clear(struct cattn_output *output);

#endif
