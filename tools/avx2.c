/* avx2.c -- hides from a program that preloads it all instructions of x86-64 that are newer than AVX2 and FMA.
 *
 * Linux lets a process ask that CPUID faults (arch_prctl(2), ARCH_SET_CPUID; Intel's processors have it since Ivy
 * Bridge). The handler of the fault executes the instruction and clears the bits of AVX-512, AMX and AVX-VNNI in its
 * result, so that a library that looks by itself sees a processor without them. The setting is inherited by threads
 * and children. A handler of SIGSEGV that the program installs gets all other faults. The signal is never blocked: the
 * kernel would end the process at the next CPUID of that thread. And it does not run on an alternate stack, because a
 * library may have freed the one that it gave its thread (OpenVINO does).
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { SET_CPUID = 0x1012 }; /* ARCH_SET_CPUID of <asm/prctl.h> */

static struct sigaction programs; /* what the program wants of SIGSEGV */

static void clear(greg_t *reg, unsigned bits) { *reg = (greg_t)((uint32_t)*reg & ~bits); }

static void hide(unsigned leaf, unsigned subleaf, greg_t *regs) {
    if (leaf == 7 && subleaf == 0) {
        clear(&regs[REG_RBX], 1u << 16 | 1u << 17 | 1u << 21 | 0xfu << 26 | 3u << 30); /* AVX512F to VL */
        clear(&regs[REG_RCX], 1u << 1 | 1u << 6 | 3u << 11 | 1u << 14);                /* VBMI to VPOPCNTDQ */
        clear(&regs[REG_RDX], 3u << 2 | 1u << 8 | 0xfu << 22);                         /* VP2INTERSECT, FP16, AMX */
    } else if (leaf == 7 && subleaf == 1) {
        clear(&regs[REG_RAX], 3u << 4 | 1u << 21 | 1u << 23);           /* AVX-VNNI, BF16, AMX-FP16, AVX-IFMA */
        clear(&regs[REG_RDX], 3u << 4 | 1u << 8 | 1u << 10 | 1u << 19); /* AVX-VNNI-INT8, AMX-COMPLEX, AVX10 */
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24)
        regs[REG_RAX] = regs[REG_RBX] = regs[REG_RCX] = regs[REG_RDX] = 0; /* tiles, AVX10 */
}

static void handle(int number, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)regs[REG_RIP];
    if (info->si_code == SI_KERNEL && at[0] == 0x0f && at[1] == 0xa2) {
        const unsigned leaf = (unsigned)regs[REG_RAX], subleaf = (unsigned)regs[REG_RCX];
        unsigned a, b, c, d;
        syscall(SYS_arch_prctl, SET_CPUID, 1);
        __cpuid_count(leaf, subleaf, a, b, c, d);
        syscall(SYS_arch_prctl, SET_CPUID, 0);
        regs[REG_RAX] = a, regs[REG_RBX] = b, regs[REG_RCX] = c, regs[REG_RDX] = d;
        hide(leaf, subleaf, regs);
        regs[REG_RIP] += 2;
    } else if (programs.sa_flags & SA_SIGINFO)
        programs.sa_sigaction(number, info, context);
    else if (programs.sa_handler != SIG_DFL && programs.sa_handler != SIG_IGN)
        programs.sa_handler(number);
    else {
        const struct sigaction usual = {.sa_handler = SIG_DFL};
        int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
        next(number, &usual, NULL);
    }
}

int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
    int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    if (number != SIGSEGV)
        return next(number, wanted, before);
    const struct sigaction old = programs;
    if (wanted != NULL)
        programs = *wanted;
    if (before != NULL)
        *before = old;
    return 0;
}

static int set_mask(const char *function, int how, const sigset_t *wanted, sigset_t *before) {
    int (*next)(int, const sigset_t *, sigset_t *) = dlsym(RTLD_NEXT, function);
    if (wanted == NULL || how == SIG_UNBLOCK)
        return next(how, wanted, before);
    sigset_t open = *wanted;
    sigdelset(&open, SIGSEGV);
    return next(how, &open, before);
}

int pthread_sigmask(int how, const sigset_t *wanted, sigset_t *before) {
    return set_mask("pthread_sigmask", how, wanted, before);
}

int sigprocmask(int how, const sigset_t *wanted, sigset_t *before) {
    return set_mask("sigprocmask", how, wanted, before);
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction wanted = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    sigemptyset(&wanted.sa_mask);
    return sigaction(number, &wanted, &before) == 0 ? before.sa_handler : SIG_ERR;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction ours = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    sigemptyset(&ours.sa_mask);
    if (next(SIGSEGV, &ours, NULL) != 0 || syscall(SYS_arch_prctl, SET_CPUID, 0) != 0) {
        static const char text[] = "avx2: this processor or kernel cannot let CPUID fault\n";
        if (write(2, text, sizeof text - 1) < 0)
            abort();
        _exit(126);
    }
}
