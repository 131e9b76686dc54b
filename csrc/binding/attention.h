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

/* A call up to a stage. Before STAGE_OUT there is no value, and the weights are the one result. `packed` is NULL unless
 * the sequences are packed. */
PyObject *cattn_attend(struct binding_state *state, PyObject *const *args, enum cattn_stage stage,
                       struct cattn_packed *packed);
/* The gradients, or the statistics, of a call. */
PyObject *cattn_differentiate(struct binding_state *state, PyObject *const *args, struct cattn_packed *packed);
PyObject *cattn_statistics(struct binding_state *state, PyObject **args, struct cattn_packed *packed);

/* Comes after all checks and allocations: draws a seed, or from a TorchGenerator, and computes; without the GIL if
 * `work`, in multiply-adds, is long enough. The caller ends `draw` in any case. */
bool cattn_call_run(struct cattn_call *call, PyObject *rng, double work, enum cattn_status (*compute)(const void *),
                    const void *params, struct cattn_draw *draw);
/* The names of the outputs in a cattn.AttentionOutput. */
extern const char *const cattn_output_names[N_OUTPUTS];
/* Which outputs the caller asks for. */
bool cattn_call_parse_wants(struct cattn_call *call, PyObject *const *args, enum cattn_stage stage);
/* NumPy's type number and the shape of an output, for which the caller gave this object or NULL. Returns its number of
 * axes. */
int cattn_call_output(struct cattn_call *call, int which, PyObject *given, int *type, npy_intp *dims);
/* return_lse: whether the log-sum-exp is wanted, or its dtype. */
bool cattn_call_parse_return_lse(struct cattn_call *call, PyObject *object);
/* Releases the objects that the call owns. */
void cattn_call_clear(struct cattn_call *call);

#endif
