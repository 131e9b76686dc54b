/* parallel.c -- the thread pool of cattn_parallel_for().
 *
 * A pool of our own, since OpenMP's hangs in a forked child and cannot be interrupted.
 *
 * Method. One call at a time owns the pool. An atomic flag, `pool.owned`, is the claim, so a second caller never waits
 * for the lock. The owner describes its call in a `struct job` on its stack and offers seats, one for each worker that
 * may take part. A parked worker that wakes takes a seat, and with it the scratch that belongs to the seat. It takes
 * task numbers from an atomic counter until there are none, and leaves the seat. The owner takes tasks too, then closes
 * the seats and waits for the workers that sit, but not for those that never woke: a short call does not pay for slow
 * wake-ups. No thread spins, except for the owner's few microseconds at the end (SPIN_NS).
 *
 * pool.lock guards everything in `pool` except the claim. It is never held while a task or the poll runs. It also
 * orders the memory accesses of tasks and caller, so the task counter can be relaxed.
 *
 * Placement (Linux). The idle processors of a virtual machine look busy to its scheduler, which then queues a woken
 * worker on the caller's processor, for milliseconds: calls of 1 ms gained nothing from a second thread. So if there
 * are enough processors, workers are kept off the one that the caller runs on.
 *
 * fork(). The prepare handler takes the lock, so the child's copy of the pool is consistent. The child has no workers,
 * no owner and the old scratch; it starts new workers when it needs some. If the forking thread is the owner (its poll
 * ran a signal handler that forked), the child's copy of the call cannot be completed, and stops.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#ifdef __linux__
#include <sched.h>
#endif

#include "../fp_mode.h"
#include "scratch.h"

#define MAX_WORKERS (CATTN_MAX_THREADS - 1)
#define SECOND_NS INT64_C(1000000000)
#define POLL_INTERVAL_NS (20 * INT64_C(1000000))

/* How long the owner spins for the last workers before it sleeps: about as long as waking up again would take. */
#define SPIN_NS INT64_C(20000)

/* Values of pool.avoided_cpu besides a processor's number. */
#define AVOIDS_NONE (-1)
#define AVOIDS_UNKNOWN (-2)

/* One call. The two atomics that every thread touches have cache lines of their own. */
struct job {
    cattn_task_fn *fn;
    void *context;
    int64_t n_tasks;
    _Alignas(64) _Atomic int64_t next_task;
    _Alignas(64) atomic_bool stop;
};

static struct {
    atomic_bool owned;
    pthread_mutex_t lock;
    pthread_cond_t work;                       /* parked workers wait for seats, or for quit */
    pthread_cond_t done;                       /* the owner waits for the last seated worker */
    int n_workers;                             /* started threads */
    pthread_t worker[MAX_WORKERS];             /* the first n_workers */
    struct cattn_scratch scratch[MAX_WORKERS]; /* one for each seat */
    struct job *job;                           /* valid while seats are open or taken */
    int open_seats;
    atomic_int taken_seats; /* written under the lock; the owner spins on it without */
    int n_cpus;             /* processors of the caller when workers were last started or placed; 0: unknown */
    int avoided_cpu;        /* the processor that no worker may use */
#ifdef __linux__
    cpu_set_t placed; /* the processors that workers may use, once avoided_cpu is known */
#endif
    bool quit;
    unsigned fork_count; /* see cattn_fork_count */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .avoided_cpu = AVOIDS_NONE};

static pthread_once_t pool_once = PTHREAD_ONCE_INIT;
static bool pool_works; /* set by pool_once; false: every call runs on its own thread */

/* ---- time ---- */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND_NS + t.tv_nsec;
}

static bool init_condition(pthread_cond_t *condition) {
#ifdef __APPLE__
    return pthread_cond_init(condition, NULL) == 0;
#else
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0)
        return false;
    bool ok = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0;
    ok = ok && pthread_cond_init(condition, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    return ok;
#endif
}

/* Waits for the condition until `deadline` (CLOCK_MONOTONIC); may wake early. */
static void wait_until(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t deadline) {
#ifdef __APPLE__ /* no monotonic condition variables there, but relative waits */
    int64_t left = deadline - now_ns();
    left = left > 0 ? left : 0;
    struct timespec t = {(time_t)(left / SECOND_NS), (long)(left % SECOND_NS)};
    pthread_cond_timedwait_relative_np(condition, lock, &t);
#else
    struct timespec t = {(time_t)(deadline / SECOND_NS), (long)(deadline % SECOND_NS)};
    pthread_cond_timedwait(condition, lock, &t);
#endif
}

/* ---- fork ---- */

static void before_fork(void) { pthread_mutex_lock(&pool.lock); }

static void after_fork_parent(void) { pthread_mutex_unlock(&pool.lock); }

/* The other threads are gone, and with them the pool's owner. This thread holds the mutex and unlocks it. The condition
 * variables count waiters that no longer exist, so they are made anew. The scratch is kept for the next workers. */
static void after_fork_child(void) {
    if (pool.job != NULL)
        atomic_store_explicit(&pool.job->stop, true, memory_order_relaxed);
    pool.n_workers = 0;
    pool.job = NULL;
    pool.open_seats = 0;
    pool.taken_seats = 0;
    pool.quit = false;
    pool.fork_count++;
    pool_works = init_condition(&pool.work) && init_condition(&pool.done);
    atomic_store_explicit(&pool.owned, false, memory_order_relaxed);
    pthread_mutex_unlock(&pool.lock);
}

static void init_pool(void) {
    pool_works = init_condition(&pool.work) && init_condition(&pool.done) &&
                 pthread_atfork(before_fork, after_fork_parent, after_fork_child) == 0;
}

unsigned cattn_fork_count(void) {
    pthread_once(&pool_once, init_pool);
    return pool.fork_count;
}

/* ---- the pool's owner ---- */

/* True if the pool is now the caller's. Never waits. */
static bool claim_pool(void) {
    pthread_once(&pool_once, init_pool);
    return pool_works && !atomic_exchange_explicit(&pool.owned, true, memory_order_acquire);
}

static void unclaim_pool(void) { atomic_store_explicit(&pool.owned, false, memory_order_release); }

/* ---- tasks ---- */

bool cattn_worker_poll(struct cattn_worker *worker) {
    if (now_ns() < worker->next_poll)
        return false;
    cattn_fp_leave(worker->fp_saved); /* the poll runs signal handlers, which expect the thread's own mode */
    if (worker->poll->stop(worker->poll->context))
        atomic_store_explicit(worker->stop, true, memory_order_relaxed);
    worker->fp_saved = cattn_fp_enter();
    worker->next_poll = now_ns() + POLL_INTERVAL_NS;
    return atomic_load_explicit(worker->stop, memory_order_relaxed); /* a fork in the poll may have stopped the call */
}

/* Runs tasks until there are none left or the call is stopped. */
static void run_tasks(struct job *job, struct cattn_worker *worker) {
    while (!cattn_should_stop(worker)) {
        int64_t task = atomic_fetch_add_explicit(&job->next_task, 1, memory_order_relaxed);
        if (task >= job->n_tasks)
            break;
        job->fn(job->context, task, worker);
    }
}

/* ---- workers ---- */

static void *worker_main(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.open_seats == 0 && !pool.quit)
            pthread_cond_wait(&pool.work, &pool.lock);
        if (pool.quit)
            break;
        struct job *job = pool.job;
        pool.taken_seats++;
        pool.open_seats--;
        struct cattn_worker worker = {.scratch = pool.scratch[pool.open_seats].data, .stop = &job->stop};
        pthread_mutex_unlock(&pool.lock);

        worker.fp_saved = cattn_fp_enter();
        run_tasks(job, &worker);
        cattn_fp_leave(worker.fp_saved);

        pthread_mutex_lock(&pool.lock);
        pool.open_seats = 0; /* no task is left: no other worker needs a seat */
        pool.taken_seats--;
        if (pool.taken_seats == 0)
            pthread_cond_signal(&pool.done);
    }
    pthread_mutex_unlock(&pool.lock);
    return NULL;
}

/* Keeps all workers off the calling thread's processor if there are enough others for this many seats. Otherwise they
 * may use the caller's processors. Lock held. System calls are made only if the caller has moved since the last time,
 * or if there are not enough processors. A hint to the scheduler: errors are ignored. */
static void place_workers(int seats) {
#ifdef __linux__
    int cpu = seats < pool.n_cpus ? sched_getcpu() : AVOIDS_NONE;
    cpu_set_t cpus;
    if ((cpu >= 0 && cpu == pool.avoided_cpu) || sched_getaffinity(0, sizeof cpus, &cpus) != 0)
        return;
    pool.n_cpus = CPU_COUNT(&cpus);
    if (cpu >= 0)
        CPU_CLR((unsigned)cpu, &cpus);
    const bool known = pool.avoided_cpu != AVOIDS_UNKNOWN && CPU_EQUAL(&cpus, &pool.placed);
    for (int i = 0; i < pool.n_workers && !known; i++)
        pthread_setaffinity_np(pool.worker[i], sizeof cpus, &cpus);
    pool.avoided_cpu = cpu;
    pool.placed = cpus;
#else
    (void)seats;
#endif
}

/* The number of processors that the calling thread may use, and so the workers that it starts; 0: unknown. */
static int count_cpus(void) {
#ifdef __linux__
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) == 0)
        return CPU_COUNT(&cpus);
#endif
    return 0;
}

/* Starts workers until there are `wanted` or the system refuses; lock held. They inherit a full signal mask, so signals
 * go to the program's own threads. */
static void start_workers(int wanted) {
    sigset_t all, saved;
    if (pool.n_workers >= wanted)
        return;
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &saved) != 0)
        return;
    while (pool.n_workers < wanted && pthread_create(&pool.worker[pool.n_workers], NULL, worker_main, NULL) == 0)
        pool.n_workers++;
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    pool.n_cpus = count_cpus();
    pool.avoided_cpu = AVOIDS_UNKNOWN;
}

/* ---- a call with workers ---- */

/* Frees the seats' scratch if it is too large to keep; lock held. */
static void trim_scratch(int seats) {
    for (int i = 0; i < seats; i++)
        cattn_scratch_trim(&pool.scratch[i]);
}

/* Offers the job to up to max_seats workers. False: no memory, nothing offered. */
static bool offer_seats(struct job *job, int max_seats, size_t scratch_size, unsigned *fork_count) {
    pthread_mutex_lock(&pool.lock);
    *fork_count = pool.fork_count;
    start_workers(max_seats);
    int seats = pool.n_workers < max_seats ? pool.n_workers : max_seats;
    bool ok = true;
    for (int i = 0; i < seats && ok; i++)
        ok = cattn_scratch_grow(&pool.scratch[i], scratch_size);
    if (ok) {
        place_workers(seats);
        pool.job = job;
        pool.open_seats = seats;
        if (seats == pool.n_workers)
            pthread_cond_broadcast(&pool.work);
        else
            for (int i = 0; i < seats; i++)
                pthread_cond_signal(&pool.work);
    } else {
        trim_scratch(seats);
    }
    pthread_mutex_unlock(&pool.lock);
    return ok;
}

/* Waits for the seated workers and polls. The lock is held before and after, not while waiting. In the child of a fork
 * it ends early. */
static void wait_for_workers(struct cattn_worker *caller, unsigned fork_count) {
    while (pool.taken_seats > 0 && pool.fork_count == fork_count) {
        if (caller->poll == NULL || atomic_load_explicit(caller->stop, memory_order_relaxed)) {
            pthread_cond_wait(&pool.done, &pool.lock);
            continue;
        }
        wait_until(&pool.done, &pool.lock, caller->next_poll);
        if (pool.taken_seats == 0)
            break;
        pthread_mutex_unlock(&pool.lock);
        cattn_should_stop(caller);
        pthread_mutex_lock(&pool.lock);
    }
}

/* Closes the open seats, waits for the seated workers and frees scratch that is too large to keep. False: the poll
 * forked, and this is the child, which has no such workers and does not own the pool. */
static bool close_seats(struct cattn_worker *caller, int max_seats, unsigned fork_count) {
    pthread_mutex_lock(&pool.lock);
    if (pool.fork_count == fork_count)
        pool.open_seats = 0;
    bool spin = pool.taken_seats > 0 && pool.avoided_cpu >= 0; /* no worker needs this thread's processor */
    if (spin) {
        pthread_mutex_unlock(&pool.lock);
        int64_t end = now_ns() + SPIN_NS;
        while (pool.taken_seats > 0 && now_ns() < end)
            ;
        pthread_mutex_lock(&pool.lock);
    }
    wait_for_workers(caller, fork_count);
    bool ours = pool.fork_count == fork_count;
    if (ours) {
        pool.job = NULL;
        trim_scratch(max_seats);
    }
    pthread_mutex_unlock(&pool.lock);
    return ours;
}

/* When the interpreter is gone, Python ends a daemon thread that calls it, here in the poll. The job is on that
 * thread's stack and must last until the workers have left their seats. */
static void abandon(void *job) {
    atomic_store_explicit(&((struct job *)job)->stop, true, memory_order_relaxed);
    pthread_mutex_lock(&pool.lock);
    pool.open_seats = 0;
    while (pool.taken_seats > 0)
        pthread_cond_wait(&pool.done, &pool.lock);
    pool.job = NULL;
    pthread_mutex_unlock(&pool.lock);
    unclaim_pool();
}

/* The caller has claimed the pool; this function unclaims it. */
static enum cattn_status run_with_workers(struct job *job, struct cattn_worker *caller, int num_threads,
                                          size_t scratch_size) {
    unsigned fork_count;
    bool ours;
    if (!offer_seats(job, num_threads - 1, scratch_size, &fork_count)) {
        unclaim_pool();
        return CATTN_NO_MEMORY;
    }
    pthread_cleanup_push(abandon, job);
    run_tasks(job, caller);
    ours = close_seats(caller, num_threads - 1, fork_count);
    pthread_cleanup_pop(false);
    if (!ours)
        return CATTN_INTERRUPTED;
    unclaim_pool();
    return CATTN_OK;
}

enum cattn_status cattn_parallel_for(int64_t n_tasks, int num_threads, size_t scratch_size, cattn_task_fn *fn,
                                     void *context, const struct cattn_poll *poll) {
    if (n_tasks <= 0)
        return CATTN_OK;
    num_threads = num_threads < CATTN_MAX_THREADS ? num_threads : CATTN_MAX_THREADS;
    num_threads = num_threads < n_tasks ? num_threads : (int)n_tasks;

    struct cattn_scratch scratch;
    if (!cattn_scratch_take(&scratch, scratch_size))
        return CATTN_NO_MEMORY;
    struct job job;
    job.fn = fn;
    job.context = context;
    job.n_tasks = n_tasks;
    atomic_init(&job.next_task, 0);
    atomic_init(&job.stop, false);
    struct cattn_worker caller = {.scratch = scratch.data, .stop = &job.stop};
    if (poll != NULL && poll->stop != NULL) {
        caller.poll = poll;
        caller.next_poll = now_ns() + POLL_INTERVAL_NS;
    }

    enum cattn_status status = CATTN_OK;
    caller.fp_saved = cattn_fp_enter();
    if (num_threads > 1 && claim_pool())
        status = run_with_workers(&job, &caller, num_threads, scratch_size);
    else
        run_tasks(&job, &caller);
    cattn_fp_leave(caller.fp_saved);

    cattn_scratch_give_back(&scratch);
    if (atomic_load_explicit(&job.stop, memory_order_relaxed))
        status = CATTN_INTERRUPTED;
    return status;
}

bool cattn_poll_between(const struct cattn_poll *poll, int64_t *next_poll) {
    if (poll->stop == NULL)
        return false;
    const int64_t now = now_ns();
    if (now < *next_poll)
        return false;
    const bool first = *next_poll == 0;
    *next_poll = now + POLL_INTERVAL_NS;
    return !first && poll->stop(poll->context);
}

bool cattn_release(void) {
    pthread_once(&pool_once, init_pool);
    if (atomic_exchange_explicit(&pool.owned, true, memory_order_acquire))
        return false;
    pthread_mutex_lock(&pool.lock);
    pool.quit = true;
    int n_workers = pool.n_workers;
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < n_workers; i++)
        pthread_join(pool.worker[i], NULL);

    pthread_mutex_lock(&pool.lock);
    pool.quit = false;
    pool.n_workers = 0;
    for (int i = 0; i < MAX_WORKERS; i++)
        cattn_scratch_free(&pool.scratch[i]);
    pthread_mutex_unlock(&pool.lock);
    unclaim_pool();
    cattn_scratch_release();
    return true;
}
