/* variants.h -- single functions of the core, compiled twice on x86: for any processor, and for AVX2 with FMA.
 *
 * For loops that compilers turn into vectors, and for fma(), which is a slow call without the instruction. Both give
 * the same bits. Which one runs follows the kernel table in use, so CATTN_ISA and the tests decide here too.
 */
#ifndef CATTN_VARIANTS_H
#define CATTN_VARIANTS_H

#include "dispatch.h"

#if defined(__GNUC__)
#define CATTN_ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define CATTN_ALWAYS_INLINE static inline
#endif

/* Defines `name` with these parameters, which calls name##_body (CATTN_ALWAYS_INLINE) with these arguments. */
#if defined(__x86_64__) && defined(__GNUC__)
#define CATTN_VARIANTS(name, parameters, arguments)                                                                    \
    __attribute__((target("avx2,fma"))) static void name##_avx2 parameters { name##_body arguments; }                  \
    static void name##_any parameters { name##_body arguments; }                                                       \
    static void name parameters {                                                                                      \
        if (cattn_kernels_for(CATTN_F32)->lanes >= 8) /* all such tables need both */                                  \
            name##_avx2 arguments;                                                                                     \
        else                                                                                                           \
            name##_any arguments;                                                                                      \
    }
#else
#define CATTN_VARIANTS(name, parameters, arguments)                                                                    \
    static void name parameters { name##_body arguments; }
#endif

#endif
