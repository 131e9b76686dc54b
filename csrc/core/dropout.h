/* dropout.h -- from a seed and a probability to what the kernels take. */
#ifndef CATTN_DROPOUT_H
#define CATTN_DROPOUT_H

#include "../cattn.h"
#include "../kernels/kernels.h"

/* For one leading index. A disabled spec keeps everything. */
void cattn_drop(const struct cattn_dropout_spec *spec, int64_t batch, struct cattn_drop *drop);

#endif
