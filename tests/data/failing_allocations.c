/* failing_allocations.c -- preloaded by test_faults.py: lets the n-th allocation of the extension on the main thread
 * fail, whether the extension calls the allocator itself or through Python or NumPy.
 *
 * With PYTHONMALLOC=malloc every Python object, NumPy array and block of the extension is allocated here. The test
 * reads and writes variables instead of calling functions, because a call through ctypes would allocate. For glibc.
 *
 * Allocations of the interpreter and of NumPy for Python code are not counted and do not fail: not all of that code
 * survives it.
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

int fail_in;        /* set to n: the n-th allocation from now fails; 0 after that */
const char *failed; /* the allocator function that failed, or "within" if Python or NumPy called it for the extension;
                       NULL: none has failed */
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

/* Returns `function` if the extension called it, "within" if it did so indirectly, NULL if Python code did. */
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
