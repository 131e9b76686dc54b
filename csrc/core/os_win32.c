/* os_win32.c -- the functions of os.h on Windows.
 *
 * Not winpthreads: it would be one more library to ship, and only MinGW's compilers have it.
 */
#include "os.h"

#ifdef _WIN32

/* Windows 8.1, the oldest that Python 3.11 runs on. */
#undef _WIN32_WINNT
#define _WIN32_WINNT 0x0603
#define WIN32_LEAN_AND_MEAN
#include <malloc.h>
#include <process.h>
#include <windows.h>

#include "../cattn.h"

#define SECOND_NS INT64_C(1000000000)
#define MILLISECOND_NS INT64_C(1000000)

/* ---- locks ---- */

_Static_assert(sizeof(cattn_mutex) == sizeof(SRWLOCK), "os.h repeats the layout");
_Static_assert(sizeof(cattn_condition) == sizeof(CONDITION_VARIABLE), "os.h repeats the layout");
_Static_assert(sizeof(cattn_once) == sizeof(INIT_ONCE), "os.h repeats the layout");

static SRWLOCK *lock_of(cattn_mutex *mutex) { return (SRWLOCK *)(void *)mutex; }
static CONDITION_VARIABLE *variable_of(cattn_condition *condition) { return (CONDITION_VARIABLE *)(void *)condition; }

void cattn_mutex_init(cattn_mutex *mutex) { InitializeSRWLock(lock_of(mutex)); }
void cattn_mutex_destroy(cattn_mutex *mutex) { (void)mutex; }
void cattn_mutex_lock(cattn_mutex *mutex) { AcquireSRWLockExclusive(lock_of(mutex)); }
void cattn_mutex_unlock(cattn_mutex *mutex) { ReleaseSRWLockExclusive(lock_of(mutex)); }

bool cattn_condition_init(cattn_condition *condition) {
    InitializeConditionVariable(variable_of(condition));
    return true;
}

void cattn_condition_destroy(cattn_condition *condition) { (void)condition; }

void cattn_condition_wait(cattn_condition *condition, cattn_mutex *mutex) {
    SleepConditionVariableSRW(variable_of(condition), lock_of(mutex), INFINITE, 0);
}

/* Rounded up: a wait of 0 ms before the deadline would return at once, again and again. */
void cattn_condition_wait_until(cattn_condition *condition, cattn_mutex *mutex, int64_t deadline) {
    int64_t left = (deadline - cattn_now_ns() + MILLISECOND_NS - 1) / MILLISECOND_NS;
    left = left < 0 ? 0 : left > INT32_MAX ? INT32_MAX : left;
    SleepConditionVariableSRW(variable_of(condition), lock_of(mutex), (DWORD)left, 0);
}

void cattn_condition_signal(cattn_condition *condition) { WakeConditionVariable(variable_of(condition)); }
void cattn_condition_broadcast(cattn_condition *condition) { WakeAllConditionVariable(variable_of(condition)); }

/* A pointer to a function fits in a pointer to void. */
union run {
    void (*function)(void);
    void *argument;
};

static BOOL CALLBACK run_function(INIT_ONCE *once, void *argument, void **context) {
    (void)once, (void)context;
    const union run run = {.argument = argument};
    run.function();
    return TRUE;
}

void cattn_run_once(cattn_once *once, void (*function)(void)) {
    const union run run = {.function = function};
    InitOnceExecuteOnce((INIT_ONCE *)(void *)once, run_function, run.argument, NULL);
}

/* ---- threads ---- */

static unsigned __stdcall run_thread(void *argument) {
    const union run run = {.argument = argument};
    run.function();
    return 0;
}

bool cattn_thread_start(cattn_thread *thread, void (*function)(void)) {
    const union run run = {.function = function};
    *thread = (cattn_thread)_beginthreadex(NULL, 0, run_thread, run.argument, 0, NULL);
    return *thread != NULL;
}

void cattn_thread_join(cattn_thread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

/* Fiber-local storage, since thread-local storage has no destructors. */
bool cattn_thread_key_create(cattn_thread_key *key, void (*destructor)(void *)) {
    *key = FlsAlloc(destructor);
    return *key != FLS_OUT_OF_INDEXES;
}

void *cattn_thread_key_get(cattn_thread_key key) { return FlsGetValue(key); }
bool cattn_thread_key_set(cattn_thread_key key, void *value) { return FlsSetValue(key, value) != 0; }

static cattn_thread_key cleanup_key;
static bool has_cleanup_key;
static cattn_once cleanup_once = CATTN_ONCE_INIT;

/* Runs on the thread that ends, before the system frees its stack. */
static void clean_up(void *innermost) {
    for (struct cattn_cleanup *cleanup = innermost; cleanup != NULL; cleanup = cleanup->outer)
        cleanup->function(cleanup->argument);
}

static void create_cleanup_key(void) { has_cleanup_key = cattn_thread_key_create(&cleanup_key, clean_up); }

void cattn_cleanup_begin(struct cattn_cleanup *cleanup) {
    cattn_run_once(&cleanup_once, create_cleanup_key);
    if (!has_cleanup_key)
        return;
    cleanup->outer = cattn_thread_key_get(cleanup_key);
    cattn_thread_key_set(cleanup_key, cleanup);
}

void cattn_cleanup_end(struct cattn_cleanup *cleanup) {
    if (has_cleanup_key)
        cattn_thread_key_set(cleanup_key, cleanup->outer);
}

bool cattn_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    (void)before, (void)in_parent, (void)in_child;
    return true;
}

/* ---- memory ---- */

void *cattn_aligned_alloc(size_t alignment, size_t size) { return _aligned_malloc(size, alignment); }
void cattn_aligned_free(void *memory) { _aligned_free(memory); }

/* ---- time ---- */

int64_t cattn_now_ns(void) {
    LARGE_INTEGER ticks, each_second;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&each_second);
    const int64_t seconds = ticks.QuadPart / each_second.QuadPart, rest = ticks.QuadPart % each_second.QuadPart;
    return seconds * SECOND_NS + rest * SECOND_NS / each_second.QuadPart;
}

/* Less than a millisecond yields the processor: the system's timer is no finer. */
void cattn_sleep_ns(int64_t nanoseconds) { Sleep((DWORD)(nanoseconds / MILLISECOND_NS)); }

/* ---- processors ---- */

/* Processors are in groups of at most 64, and an affinity mask concerns the one group of the process. A process whose
 * threads may run in several groups has no mask. */
int cattn_usable_cpus(void) {
    USHORT groups[64], n_groups = sizeof groups / sizeof *groups;
    DWORD_PTR mask, all;
    DWORD count = 0;
    if (!GetProcessGroupAffinity(GetCurrentProcess(), &n_groups, groups))
        return (int)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    if (n_groups == 1 && GetProcessAffinityMask(GetCurrentProcess(), &mask, &all) && mask != 0)
        return __builtin_popcountll(mask);
    for (USHORT i = 0; i < n_groups; i++)
        count += GetActiveProcessorCount(groups[i]);
    return count > 0 ? (int)count : 1;
}

#endif
