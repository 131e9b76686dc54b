/* cpu_features.c -- asks the processor, once, which vector instructions it has.
 *
 * The compiler's own test is used: gcc and clang read CPUID and XGETBV for it. Single features are named, since clang
 * refuses the level names (x86-64-v3). Elsewhere than on x86 every answer is no: those builds choose at compile time.
 */
#include "cpu_features.h"

#include <pthread.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

static struct cattn_cpu cpu;
static pthread_once_t cpu_once = PTHREAD_ONCE_INIT;

static void detect(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    cpu.avx2 = __builtin_cpu_supports("avx2");
    cpu.fma = __builtin_cpu_supports("fma");
    cpu.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");

    /* The builtin of older clangs does not know f16c. It uses AVX's registers, so AVX vouches for the system's part. */
    unsigned eax, ebx, ecx, edx;
    cpu.f16c = __builtin_cpu_supports("avx") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
#endif
}

const struct cattn_cpu *cattn_cpu(void) {
    pthread_once(&cpu_once, detect);
    return &cpu;
}
