/* dropout.h -- from a seed and a probability to the counters and thresholds of the kernels. */
#ifndef CATTN_DROPOUT_H
#define CATTN_DROPOUT_H

#include "../cattn.h"
#include "../kernels/kernels.h"

/* For one batch entry. A disabled spec keeps every element. */
void cattn_drop_fill(const struct cattn_dropout_spec *spec, int64_t batch, struct cattn_drop *drop);

#endif
