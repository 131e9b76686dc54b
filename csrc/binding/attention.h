/* attention.h -- one call of attention: parse, allocate, run the core, build the result. */
#ifndef CATTN_ATTENTION_H
#define CATTN_ATTENTION_H

#include "attention_args.h"
#include "outputs.h"
#include "rng.h"

/* The steps of attention, in order. */
enum cattn_stage {
    CATTN_STAGE_QK,
    CATTN_STAGE_SOFTCAP,
    CATTN_STAGE_BIAS,
    CATTN_STAGE_MASK,
    CATTN_STAGE_SOFTMAX,
    CATTN_STAGE_DROPOUT,
    CATTN_STAGE_OUT
};

/* How a call differs from scaled_dot_product_attention. */
struct cattn_variant {
    /* Before STAGE_OUT there is no value, and the weights are the one result. With STAGE_DROPOUT the result is an
     * AttentionOutput of the weights, without dropout, and the mask to apply to them. */
    enum cattn_stage stage;
    /* Turns the call, which was parsed as one batch entry, into a batch of packed sequences. NULL: not packed. */
    bool (*unpack)(struct cattn_call *call, PyObject *context);
    const npy_intp *n_sequences; /* the number of packed sequences; NULL: not packed */
    /* Returns the final result, a new reference, given the one of the core. A TorchGenerator advances only after it.
     * NULL: there is nothing to do. */
    PyObject *(*finish)(struct cattn_call *call, PyObject *result, PyObject *context);
    PyObject *context;
};

PyObject *cattn_attend(struct binding_state *state, PyObject *const *args, const struct cattn_variant *variant);
/* The gradients, or the statistics, of such a call or of packed sequences; stage and finish of the variant are unused.
 */
PyObject *cattn_differentiate(struct binding_state *state, PyObject *const *args, const struct cattn_variant *variant);
PyObject *cattn_statistics(struct binding_state *state, PyObject **args, const struct cattn_variant *variant);

/* Comes after all checks and allocations: draws a seed, or from a TorchGenerator, and computes; without the GIL if
 * `work`, in multiply-adds, is long enough. The caller ends `draw` in any case. */
bool cattn_call_run(struct cattn_call *call, PyObject *rng, double work, enum cattn_status (*compute)(const void *),
                    const void *params, struct cattn_draw *draw);
/* Releases the objects that the call owns. */
void cattn_call_clear(struct cattn_call *call);

#endif
