/* signature.h -- how a public function's arguments reach its body in C. See signature.c.
 *
 * A table of arguments is an X-macro, TABLE(A): A(name) A(name) ... Its names, their number and an enum of their slots
 * all come from it. attention_args.h has the tables of attention, this file those of the small functions.
 */
#ifndef CATTN_SIGNATURE_H
#define CATTN_SIGNATURE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

struct binding_state;

#define SOFTMAX_ARGUMENTS(A) A(x) A(axis) A(where) A(scale) A(out)
#define MASKED_SOFTMAX_ARGUMENTS(A) A(scores) A(mask) A(is_causal) A(query_offset) A(scale) A(method) A(out)
#define DROPOUT_ARGUMENTS(A) A(x) A(p) A(training) A(rng) A(return_mask) A(out)
#define CAUSAL_MASK_ARGUMENTS(A) A(T_q) A(T_k) A(is_causal) A(query_offset) A(window_size)

#define CATTN_SLOT(name) SLOT_##name,

enum cattn_entry_point {
    CATTN_SCALED_DOT_PRODUCT_ATTENTION,
    CATTN_CAUSAL_ATTENTION,
    CATTN_ATTENTION_WEIGHTS,
    CATTN_VARLEN_ATTENTION,
    CATTN_ATTENTION_BACKWARD,
    CATTN_EXPLAIN,
    CATTN_SOFTMAX,
    CATTN_MASKED_SOFTMAX,
    CATTN_DROPOUT,
    CATTN_CAUSAL_MASK,
    CATTN_N_ENTRY_POINTS
};

/* args has one object for each slot of the function's table, borrowed: the argument, its default, or None where the
 * public function has no such parameter. A body may put other objects there. */
typedef PyObject *cattn_body(struct binding_state *state, PyObject **args);
cattn_body cattn_body_scaled_dot_product_attention, cattn_body_causal_attention, cattn_body_attention_weights,
    cattn_body_varlen_attention, cattn_body_attention_backward, cattn_body_explain, cattn_body_softmax,
    cattn_body_masked_softmax, cattn_body_dropout, cattn_body_causal_mask;

#define CATTN_MOST_SLOTS 25
struct cattn_signature {
    PyMethodDef method;
    PyObject *function, *text, *names, *defaults; /* owned; NULL before the function is registered */
    int n_parameters, n_required, n_positional;
    PyObject *name[CATTN_MOST_SLOTS];     /* of each parameter, from names */
    unsigned char slot[CATTN_MOST_SLOTS]; /* of each parameter, in the table */
    PyObject *initial[CATTN_MOST_SLOTS];  /* of each slot: the default, None, or NULL where an argument is required */
};
/* Releases all but the text, to which a builtin may still point. */
void cattn_signature_clear(struct cattn_signature *signature);

PyObject *cattn_py_register(PyObject *module, PyObject *args);

#endif
