/* fp_mode.h -- the floating-point mode in which all results are promised.
 *
 * cattn_fp_enter() and cattn_fp_leave() bracket a computation. Between them rounding is to nearest, subnormals are kept
 * and no exception traps, whatever the calling program has set. Afterwards mode and exception flags are as before, so
 * neither a changed mode nor a floating-point warning leaks out. Brackets may nest.
 *
 * The compiler does not know of the mode, but the memory barriers keep loads and stores inside the bracket: values that
 * come from memory and go to memory are computed in the right mode.
 */
#ifndef CATTN_FP_MODE_H
#define CATTN_FP_MODE_H

#if defined(__SSE2__)

/* MXCSR: all exceptions masked, no flag raised, round to nearest, FTZ and DAZ off */
#define CATTN_FP_DEFAULT 0x1f80u

/* Loading MXCSR costs more than reading it, and most callers run in the default mode already: load only a change. */
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

/* Both registers are saved in one word. FPCR keeps its bits (0-2, 8-26); the flags of FPSR go to the gaps: bits 0-4 to
 * 3-7, bit 7 to 28, bit 27 stays. */
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

#elif defined(__wasm__)

/* There is only this mode, and there are no flags. */
static inline unsigned cattn_fp_enter(void) { return 0; }
static inline void cattn_fp_leave(unsigned saved) { (void)saved; }

#else

#include <fenv.h>

/* Rounding and flags only: standard C has no name for a subnormal mode, and traps that were enabled stay disabled
 * afterwards. The flags keep their bits (s390x has them in bits 3-7), the rounding direction moves up by 8 bits. */
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
