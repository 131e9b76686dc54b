/* failing_allocations.c -- preloaded by test_faults.py: the n-th allocation that the extension asks for on the main
 * thread fails, whether it calls the allocator itself or something of Python's or NumPy's that does.
 *
 * With PYTHONMALLOC=malloc every object of Python, array of NumPy and block of our own passes through here. What the
 * test reads and writes are variables, not functions: a call by way of ctypes would allocate itself. For glibc.
 *
 * What the interpreter and NumPy allocate for Python code is neither counted nor fails: they do not survive all of
 * that.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

int fail_in;        /* set to n: the n-th from now fails; 0 once that is over */
const char *failed; /* what failed: the function that the extension called, or "within" one of Python's or NumPy's that
                       it called; NULL: nothing did */
atomic_long live;   /* blocks allocated and not freed */

static pthread_t main_thread;

__attribute__((constructor)) static void begin(void) {
    void *frame;
    main_thread = pthread_self();
    backtrace(&frame, 1); /* allocates the first time */
}

static bool is_ours(const Dl_info *info) { return info->dli_fname && strstr(info->dli_fname, "/cattn/_cattn."); }

static bool is_interpreter(const Dl_info *info) {
    return info->dli_sname && strcmp(info->dli_sname, "_PyEval_EvalFrameDefault") == 0;
}

/* Who allocates by calling `function`: NULL unless the extension is on the stack before any Python code. */
static const char *blame(const char *function) {
    enum { SKIPPED = 3 }; /* this function, fails() and the allocator */
    void *frame[64];
    const int depth = backtrace(frame, 64);
    for (int i = SKIPPED; i < depth; i++) {
        Dl_info info;
        if (!dladdr(frame[i], &info))
            continue;
        if (is_ours(&info))
            return i == SKIPPED ? function : "within";
        if (is_interpreter(&info))
            break;
    }
    return NULL;
}

static __attribute__((noinline)) bool fails(const char *function) {
    const char *who = NULL;
    if (fail_in > 0 && pthread_equal(pthread_self(), main_thread))
        who = blame(function);
    if (who == NULL || --fail_in > 0)
        return false;
    failed = who;
    errno = ENOMEM;
    return true;
}

static void *counted(void *block) {
    live += block != NULL;
    return block;
}

void *malloc(size_t size) { return fails("malloc") ? NULL : counted(__libc_malloc(size)); }

void *calloc(size_t n, size_t size) { return fails("calloc") ? NULL : counted(__libc_calloc(n, size)); }

void *realloc(void *block, size_t size) {
    if (fails("realloc"))
        return NULL;
    void *moved = __libc_realloc(block, size);
    live += (moved != NULL) - (block != NULL && (moved != NULL || size == 0));
    return moved;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    if (fails("posix_memalign"))
        return ENOMEM;
    *block = counted(__libc_memalign(alignment, size));
    return *block != NULL ? 0 : ENOMEM;
}

void free(void *block) {
    live -= block != NULL;
    __libc_free(block);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    static int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (fails("pthread_create"))
        return EAGAIN;
    if (create == NULL)
        *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    return create(thread, attributes, start, argument);
}
