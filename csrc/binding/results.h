/* results.h -- the results of a forward pass as arguments, their gradients, and their tangents. */
#ifndef CATTN_RESULTS_H
#define CATTN_RESULTS_H

#include "attention_args.h"

enum {
    CATTN_GRAD_OUT,
    CATTN_GRAD_LSE,
    CATTN_FORWARD_OUT,
    CATTN_FORWARD_LSE,
    CATTN_OUT_TANGENT, /* comes after the output, whose type it has */
    CATTN_LSE_TANGENT,
    CATTN_N_RESULTS
};

struct cattn_results {
    PyArrayObject *arrays[CATTN_N_RESULTS]; /* owned, or NULL */
    bool plain_out;                         /* out has the type of the computation though the inputs are halves */
};

/* Checks and converts one of them, after cattn_call_parse; fills in its tensor. */
bool cattn_results_take(struct cattn_results *results, struct cattn_call *call, int which, PyObject *object,
                        const char *name, struct cattn_tensor *tensor);
void cattn_results_clear(struct cattn_results *results);

#endif
