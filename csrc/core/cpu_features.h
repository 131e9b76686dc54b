/* cpu_features.h -- the vector instructions that this processor has.
 *
 * A feature counts only if the operating system saves its registers too: the test reads XGETBV.
 */
#ifndef CATTN_CPU_FEATURES_H
#define CATTN_CPU_FEATURES_H

#include <stdbool.h>

struct cattn_cpu {
    bool avx2, fma, f16c;
    bool avx512; /* F, BW, DQ and VL together */
};

/* The same answer at any time, on any thread. */
const struct cattn_cpu *cattn_cpu(void);

#endif
