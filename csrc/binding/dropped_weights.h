/* dropped_weights.h -- weights after dropout, stage "dropout" of attention_weights(...).
 *
 * The core applies dropout to the output only, so its mask is applied to the weights here. Weights of halves are
 * computed in float32 until then (the call widens its inputs), so that they are rounded once.
 */
#ifndef CATTN_DROPPED_WEIGHTS_H
#define CATTN_DROPPED_WEIGHTS_H

#include "attention_args.h"

/* Chooses where the weights go: into `out` itself (then *given = out), or, if they must be rounded afterwards, `out`
 * takes the unused slot OUT. */
bool cattn_weights_out(struct cattn_call *call, PyObject *out, PyObject **given);
/* Applies the dropout mask to the weights, in place. */
void cattn_weights_drop(struct cattn_call *call);
/* The weights in half precision, a new reference, if the inputs were widened. */
PyObject *cattn_weights_rounded(struct cattn_call *call);

#endif
