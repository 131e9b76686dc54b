/* rope_frequencies.h -- the inverse frequencies of rotary positions, from theta and a scaling. */
#ifndef CATTN_ROPE_FREQUENCIES_H
#define CATTN_ROPE_FREQUENCIES_H

#include "../cattn.h"
#include "../kernels/kernels.h"

/* What the frequencies of a call follow from. */
struct cattn_rope_law {
    int64_t n;                  /* rotary_dim / 2 */
    double step_high, step_low; /* before the scaling, frequency i is exp(-i * (step_high + step_low)) */
    double attention_factor;    /* of every sine and cosine */
    double ramp_low, ramp_high; /* yarn: below the first index nothing changes, from the second on all is divided */
    struct cattn_rope_scaling scaling;
};

void cattn_rope_settle(const struct cattn_rope_params *params, struct cattn_rope_law *law);
/* `kernels` is the float64 table. Writes law->n numbers. */
void cattn_rope_frequencies(const struct cattn_rope_law *law, const struct cattn_kernels *kernels, double *frequencies);

#endif
