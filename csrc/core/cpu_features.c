/* cpu_features.c -- detects the vector instructions of an x86 processor, once; see cpu_features.h.
 *
 * The compiler's builtin reads CPUID and XGETBV. Features are tested one by one, since clang does not know the names of
 * levels (x86-64-v3). On other processors every feature is false: their builds choose at compile time.
 */
#include "cpu_features.h"
#include "os.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

static unsigned features;
static cattn_once cpu_once = CATTN_ONCE_INIT;

static void detect(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        features |= CATTN_CPU_AVX512;
    /* Older clangs do not know f16c. It uses AVX's registers, so if AVX is usable, the system saves what f16c needs. */
    unsigned eax, ebx, ecx, edx;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
        (ecx & bit_F16C) != 0)
        features |= CATTN_CPU_AVX2;
#endif
}

unsigned cattn_cpu(void) {
    cattn_run_once(&cpu_once, detect);
    return features;
}
