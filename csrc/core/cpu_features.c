/* cpu_features.c -- detects the vector instructions of an x86 processor, once; see dispatch.h.
 *
 * Reads CPUID and XGETBV itself: the compiler's builtin needs variables of the compiler's runtime library, and where a
 * library leaves them empty (zig's does) it denies every feature. On other processors every feature is false: their
 * builds choose at compile time.
 */
#include "dispatch.h"
#include "os.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#include <string.h>
#endif

static unsigned features;
static cattn_once cpu_once = CATTN_ONCE_INIT;

#if defined(__x86_64__) || defined(__i386__)

/* CPUID 1, ecx */
#define HAS_FMA (1u << 12)
#define HAS_OSXSAVE (1u << 27) /* the system uses XSAVE, and XGETBV says for which registers */
#define HAS_AVX (1u << 28)
#define HAS_F16C (1u << 29)
/* CPUID 7, ebx */
#define HAS_AVX2 (1u << 5)
#define HAS_AVX512 (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) /* F, DQ, BW, VL */
/* CPUID 7, edx */
#define HAS_AMX (1u << 22 | 1u << 24) /* products of bfloat16, and tiles */
/* CPUID 7, subleaf 1, eax */
#define HAS_AVX512_BF16 (1u << 5)
/* XCR0: the registers that the system saves */
#define SAVES_YMM (1u << 1 | 1u << 2)           /* xmm, and the upper halves of ymm */
#define SAVES_ZMM (1u << 5 | 1u << 6 | 1u << 7) /* mask registers, upper halves of zmm0-15, zmm16-31 */
#define SAVES_TILES (1u << 17 | 1u << 18)       /* tiles, and their configuration */

static bool all_of(unsigned word, unsigned bits) { return (word & bits) == bits; }

/* The low half of XCR0. Not the intrinsic: that needs a compiler flag of its own. */
static unsigned saved_registers(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Whether CPUID 0 names this vendor, in 12 letters. */
static bool is_vendor(const char *name) {
    unsigned eax, words[3];
    return __get_cpuid(0, &eax, &words[0], &words[2], &words[1]) && memcmp(words, name, sizeof words) == 0;
}

/* Whether this is AMD's family 25, from the eax of CPUID 1. */
static bool is_amd_25(unsigned signature) {
    const unsigned family = (signature >> 8 & 15) + (signature >> 20 & 255);
    return family == 25 && is_vendor("AuthenticAMD");
}

static void detect(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !all_of(ecx, HAS_OSXSAVE | HAS_AVX))
        return;
    const unsigned signature = eax, basic = ecx, saved = saved_registers();
    if (!all_of(saved, SAVES_YMM) || !all_of(basic, HAS_FMA))
        return;
    features |= CATTN_CPU_FMA;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !all_of(ebx, HAS_AVX2) || !all_of(basic, HAS_F16C))
        return;
    features |= CATTN_CPU_AVX2;
    if (all_of(ebx, HAS_AVX512) && (all_of(saved, SAVES_ZMM) || CATTN_AVX512_IS_LAZY))
        features |= CATTN_CPU_AVX512;
    const bool has_tiles = all_of(edx, HAS_AMX) && all_of(saved, SAVES_TILES);
    if ((features & CATTN_CPU_AVX512) && eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) &&
        all_of(eax, HAS_AVX512_BF16))
        features |= CATTN_CPU_AVX512_BF16 | (has_tiles ? CATTN_CPU_AMX : 0);
    if (is_amd_25(signature))
        features |= CATTN_CPU_AMD_25;
    if (is_vendor("GenuineIntel"))
        features |= CATTN_CPU_SLOW_PAIRS;
}

#else

static void detect(void) {}

#endif

unsigned cattn_cpu(void) {
    cattn_run_once(&cpu_once, detect);
    return features;
}
