/* cpu_features.h -- what this processor can do, and the floating-point mode that results are promised in.
 *
 * cattn_cpu() answers once and for all; any thread may call it at any time. A feature counts only where the operating
 * system saves its registers too (the test reads XGETBV).
 *
 * cattn_fp_enter() and cattn_fp_leave() bracket computation: between them rounding is to nearest, subnormals are kept
 * and no exception traps, whatever the calling program has set; afterwards mode and exception flags are as they were,
 * so neither a changed mode nor a floating-point warning leaks. Brackets may nest. The compiler knows nothing of the
 * mode, but keeps loads and stores inside the bracket: values that come from memory and go to memory are safe.
 */
#ifndef CATTN_CPU_FEATURES_H
#define CATTN_CPU_FEATURES_H

#include <stdbool.h>

struct cattn_cpu {
    bool avx2, fma, f16c;
    bool avx512; /* F, BW, DQ and VL together */
};

const struct cattn_cpu *cattn_cpu(void);

#if defined(__SSE2__)

/* MXCSR: all exceptions masked, no flag raised, round to nearest, FTZ and DAZ off */
#define CATTN_FP_DEFAULT 0x1f80u

/* Loading MXCSR costs more than reading it, and most callers run in the default mode already. */
static inline void cattn_fp_load(unsigned mode) {
    if (__builtin_ia32_stmxcsr() != mode)
        __builtin_ia32_ldmxcsr(mode);
}

static inline unsigned cattn_fp_enter(void) {
    unsigned saved = __builtin_ia32_stmxcsr();
    cattn_fp_load(CATTN_FP_DEFAULT);
    __asm__ volatile("" ::: "memory");
    return saved;
}

static inline void cattn_fp_leave(unsigned saved) {
    __asm__ volatile("" ::: "memory");
    cattn_fp_load(saved);
}

#elif defined(__aarch64__)

#include <stdint.h>

/* Both registers in one word: FPCR keeps its own places (0-2, 8-26), FPSR's flags move into the gaps:
 * 0-4 to 3-7, 7 to 28, and 27 stays. */
#define CATTN_FPCR_BITS 0x07ffff07u

static inline unsigned cattn_fp_enter(void) {
    uint64_t mode, flags;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("mrs %0, fpsr" : "=r"(flags));
    if (mode != 0)
        __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    __asm__ volatile("" ::: "memory");
    return (unsigned)((mode & CATTN_FPCR_BITS) | (flags & 0x1fu) << 3 | (flags & 0x80u) << 21 | (flags & 0x08000000u));
}

static inline void cattn_fp_leave(unsigned saved) {
    uint64_t mode = saved & CATTN_FPCR_BITS;
    uint64_t flags = (saved >> 3 & 0x1fu) | (saved >> 21 & 0x80u) | (saved & 0x08000000u);
    __asm__ volatile("" ::: "memory");
    if (mode != 0)
        __asm__ volatile("msr fpcr, %0" ::"r"(mode));
    __asm__ volatile("msr fpsr, %0" ::"r"(flags));
}

#else

#include <fenv.h>

/* Rounding and flags only: standard C cannot name a subnormal mode, and enabled traps stay disabled afterwards. The
 * flags keep their places (s390x has them in bits 3-7), directions move up by 8. */
#define CATTN_FP_DIRECTIONS ((unsigned)(FE_DOWNWARD | FE_UPWARD | FE_TOWARDZERO))
_Static_assert(((CATTN_FP_DIRECTIONS << 8) & (unsigned)FE_ALL_EXCEPT) == 0, "both fit in one word");
_Static_assert(CATTN_FP_DIRECTIONS << 8 >> 8 == CATTN_FP_DIRECTIONS, "and lose nothing there");

static inline unsigned cattn_fp_enter(void) {
    fenv_t unused;
    unsigned saved = (unsigned)fetestexcept(FE_ALL_EXCEPT) | (unsigned)fegetround() << 8;
    feholdexcept(&unused);
    fesetround(FE_TONEAREST);
    __asm__ volatile("" ::: "memory");
    return saved;
}

static inline void cattn_fp_leave(unsigned saved) {
    __asm__ volatile("" ::: "memory");
    feclearexcept(FE_ALL_EXCEPT);
    feraiseexcept((int)(saved & (unsigned)FE_ALL_EXCEPT));
    fesetround((int)((saved & ~(unsigned)FE_ALL_EXCEPT) >> 8));
}

#endif

#endif
