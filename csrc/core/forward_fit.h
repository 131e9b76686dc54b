/* forward_fit.h -- whether lse and out of a call of gradients can be the results of its forward pass. */
#ifndef CATTN_FORWARD_FIT_H
#define CATTN_FORWARD_FIT_H

#include "../cattn.h"
#include "../kernels/kernels.h"

/* After all key blocks of a step: whether there is a row that does not fit, and in *found the first one, its row
 * counted from the first of the step. */
bool cattn_find_misfit(const struct cattn_backward *b, const struct cattn_backward_params *params,
                       const struct cattn_kernels *kernels, struct cattn_misfit *found);

#endif
