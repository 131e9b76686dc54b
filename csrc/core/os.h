/* os.h -- all of the operating system that cattn uses: locks, threads, memory, time and processors.
 *
 * os_posix.c, with os_linux.c on Linux, os_win32.c and os_wasm.c define these functions; each of the four is empty
 * elsewhere. No other file of csrc/ includes a header of the system or asks which system it is compiled for.
 */
#ifndef CATTN_OS_H
#define CATTN_OS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32

/* The layout of SRWLOCK, CONDITION_VARIABLE and INIT_ONCE. windows.h would define hundreds of macros in every file. */
typedef struct {
    void *word;
} cattn_mutex, cattn_condition, cattn_once;
typedef void *cattn_thread;
typedef unsigned long cattn_thread_key;
#define CATTN_MUTEX_INIT {NULL}
#define CATTN_ONCE_INIT {NULL}

#elif defined(__wasm__)

typedef int cattn_mutex, cattn_condition, cattn_once, cattn_thread, cattn_thread_key;
#define CATTN_MUTEX_INIT 0
#define CATTN_ONCE_INIT 0

#else

#include <pthread.h>

typedef pthread_mutex_t cattn_mutex;
typedef pthread_cond_t cattn_condition;
typedef pthread_once_t cattn_once;
typedef pthread_t cattn_thread;
typedef pthread_key_t cattn_thread_key;
#define CATTN_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER
#define CATTN_ONCE_INIT PTHREAD_ONCE_INIT

#endif

/* macOS enables the registers of AVX-512 at their first use. Until then XGETBV does not report them. */
#ifdef __APPLE__
#define CATTN_AVX512_IS_LAZY true
#else
#define CATTN_AVX512_IS_LAZY false
#endif

/* ---- locks ---- */

/* Not recursive. CATTN_MUTEX_INIT is the initial value of a static mutex. */
void cattn_mutex_init(cattn_mutex *mutex);
void cattn_mutex_destroy(cattn_mutex *mutex);
void cattn_mutex_lock(cattn_mutex *mutex);
void cattn_mutex_unlock(cattn_mutex *mutex);

/* Waits release the mutex and may wake early. */
bool cattn_condition_init(cattn_condition *condition);
void cattn_condition_destroy(cattn_condition *condition);
void cattn_condition_wait(cattn_condition *condition, cattn_mutex *mutex);
/* At most until cattn_now_ns() is `deadline`. */
void cattn_condition_wait_until(cattn_condition *condition, cattn_mutex *mutex, int64_t deadline);
void cattn_condition_signal(cattn_condition *condition);
void cattn_condition_broadcast(cattn_condition *condition);

/* Runs the function once in the process. Later calls return after it has. CATTN_ONCE_INIT is the initial value. */
void cattn_run_once(cattn_once *once, void (*function)(void));

/* ---- threads ---- */

/* Signals go to the program's own threads: the new one blocks all of them. False: the system refuses. */
bool cattn_thread_start(cattn_thread *thread, void (*run)(void));
void cattn_thread_join(cattn_thread thread);

/* A value of each thread, at first NULL. If it is not NULL when the thread ends, the destructor receives it. */
bool cattn_thread_key_create(cattn_thread_key *key, void (*destructor)(void *));
void *cattn_thread_key_get(cattn_thread_key key);
bool cattn_thread_key_set(cattn_thread_key key, void *value);

/* function(argument) runs if the thread ends between push and pop; both stand in one block. */
#ifdef _WIN32
struct cattn_cleanup {
    void (*function)(void *);
    void *argument;
    struct cattn_cleanup *outer;
};
void cattn_cleanup_begin(struct cattn_cleanup *cleanup);
void cattn_cleanup_end(struct cattn_cleanup *cleanup);
#define CATTN_CLEANUP_PUSH(function, argument)                                                                         \
    {                                                                                                                  \
        struct cattn_cleanup cattn_cleanup_ = {function, argument, NULL};                                              \
        cattn_cleanup_begin(&cattn_cleanup_);
#define CATTN_CLEANUP_POP()                                                                                            \
    cattn_cleanup_end(&cattn_cleanup_);                                                                                \
    }
#elif defined(__wasm__) /* the thread does not end */
#define CATTN_CLEANUP_PUSH(function, argument) ((void)(function), (void)(argument))
#define CATTN_CLEANUP_POP() ((void)0)
#else
#define CATTN_CLEANUP_PUSH(function, argument) pthread_cleanup_push(function, argument)
#define CATTN_CLEANUP_POP() pthread_cleanup_pop(false)
#endif

/* From now on fork() calls `before` first, then one of the other two. Nothing happens where there is no fork(). */
bool cattn_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void));

/* ---- memory ---- */

/* `alignment` is a power of 2 and a multiple of sizeof(void *). NULL: no memory. */
void *cattn_aligned_alloc(size_t alignment, size_t size);
void cattn_aligned_free(void *memory);

/* ---- time ---- */

/* Nanoseconds of a clock that nobody sets. */
int64_t cattn_now_ns(void);

/* ---- processors ---- */

/* How many processors this process may use at a time, at least 1: those that it may run on, or fewer where its control
 * groups grant less time. */
int cattn_usable_cpus(void);

/* A set of processors. */
struct cattn_cpus {
    uint64_t words[16];
};

#ifdef __linux__

/* Asks the system to save tiles (AMX) for all threads of this process, those to come included. False: it refuses. */
bool cattn_os_permit_tiles(void);
/* The processor that the calling thread runs on; -1: unknown. */
int cattn_current_cpu(void);
/* Returns the number of processors that the calling thread may use, and the set of them without `except` (or -1). 0:
 * unknown, or threads of this system should not be placed. */
int cattn_thread_cpus(struct cattn_cpus *cpus, int except);
/* The thread may run on these only. A hint to the scheduler: errors are ignored. */
void cattn_thread_place(cattn_thread thread, const struct cattn_cpus *cpus);

#else /* other systems are not asked for tiles, and nobody has measured that placing threads helps there */

static inline bool cattn_os_permit_tiles(void) { return false; }
static inline int cattn_current_cpu(void) { return -1; }
static inline int cattn_thread_cpus(struct cattn_cpus *cpus, int except) {
    (void)cpus, (void)except;
    return 0;
}
static inline void cattn_thread_place(cattn_thread thread, const struct cattn_cpus *cpus) { (void)thread, (void)cpus; }

#endif

#endif
