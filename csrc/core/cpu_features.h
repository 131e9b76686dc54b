/* cpu_features.h -- the vector instructions that this processor has.
 *
 * A feature counts only if the operating system saves its registers too: the test reads XGETBV.
 */
#ifndef CATTN_CPU_FEATURES_H
#define CATTN_CPU_FEATURES_H

#define CATTN_CPU_FMA 1u
#define CATTN_CPU_AVX2 2u   /* with FMA and F16C */
#define CATTN_CPU_AVX512 4u /* F, BW, DQ and VL together, with AVX2 */

/* The sum of this processor's features; the same at any time, on any thread. */
unsigned cattn_cpu(void);

#endif
