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
#include "parallel.h"

#include <string.h>

#include "../fp_mode.h"
#include "os.h"
#include "scratch.h"

#define MAX_WORKERS (CATTN_MAX_THREADS - 1)
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
    cattn_mutex lock;
    cattn_condition work;                      /* parked workers wait for seats, or for quit */
    cattn_condition done;                      /* the owner waits for the last seated worker */
    int n_workers;                             /* started threads */
    cattn_thread worker[MAX_WORKERS];          /* the first n_workers */
    struct cattn_scratch scratch[MAX_WORKERS]; /* one for each seat */
    struct job *job;                           /* valid while seats are open or taken */
    int open_seats;
    atomic_int taken_seats;   /* written under the lock; the owner spins on it without */
    int n_cpus;               /* processors of the caller when workers were last started or placed; 0: unknown */
    int avoided_cpu;          /* the processor that no worker may use */
    struct cattn_cpus placed; /* the processors that workers may use, once avoided_cpu is known */
    bool quit;
    unsigned fork_count; /* see cattn_fork_count */
} pool = {.lock = CATTN_MUTEX_INIT, .avoided_cpu = AVOIDS_NONE};

static cattn_once pool_once = CATTN_ONCE_INIT;
static bool pool_works; /* set by pool_once; false: every call runs on its own thread */

/* ---- fork ---- */

static void before_fork(void) { cattn_mutex_lock(&pool.lock); }

static void after_fork_parent(void) { cattn_mutex_unlock(&pool.lock); }

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
    pool_works = cattn_condition_init(&pool.work) && cattn_condition_init(&pool.done);
    atomic_store_explicit(&pool.owned, false, memory_order_relaxed);
    cattn_mutex_unlock(&pool.lock);
}

static void init_pool(void) {
    pool_works = cattn_condition_init(&pool.work) && cattn_condition_init(&pool.done) &&
                 cattn_at_fork(before_fork, after_fork_parent, after_fork_child);
}

unsigned cattn_fork_count(void) {
    cattn_run_once(&pool_once, init_pool);
    return pool.fork_count;
}

/* ---- the pool's owner ---- */

/* True if the pool is now the caller's. Never waits. */
static bool claim_pool(void) {
    cattn_run_once(&pool_once, init_pool);
    return pool_works && !atomic_exchange_explicit(&pool.owned, true, memory_order_acquire);
}

static void unclaim_pool(void) { atomic_store_explicit(&pool.owned, false, memory_order_release); }

/* ---- tasks ---- */

bool cattn_worker_poll(struct cattn_worker *worker) {
    if (cattn_now_ns() < worker->next_poll)
        return false;
    cattn_fp_leave(worker->fp_saved); /* the poll runs signal handlers, which expect the thread's own mode */
    if (worker->poll->stop(worker->poll->context))
        atomic_store_explicit(worker->stop, true, memory_order_relaxed);
    worker->fp_saved = cattn_fp_enter();
    worker->next_poll = cattn_now_ns() + POLL_INTERVAL_NS;
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

static void worker_main(void) {
    cattn_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.open_seats == 0 && !pool.quit)
            cattn_condition_wait(&pool.work, &pool.lock);
        if (pool.quit)
            break;
        struct job *job = pool.job;
        pool.taken_seats++;
        pool.open_seats--;
        struct cattn_worker worker = {.scratch = pool.scratch[pool.open_seats].data, .stop = &job->stop};
        cattn_mutex_unlock(&pool.lock);

        worker.fp_saved = cattn_fp_enter();
        run_tasks(job, &worker);
        cattn_fp_leave(worker.fp_saved);

        cattn_mutex_lock(&pool.lock);
        pool.open_seats = 0; /* no task is left: no other worker needs a seat */
        pool.taken_seats--;
        if (pool.taken_seats == 0)
            cattn_condition_signal(&pool.done);
    }
    cattn_mutex_unlock(&pool.lock);
}

/* Keeps all workers off the calling thread's processor if there are enough others for this many seats. Otherwise they
 * may use the caller's processors. Lock held. System calls are made only if the caller has moved since the last time,
 * or if there are not enough processors. A hint to the scheduler: errors are ignored. */
static void place_workers(int seats) {
    const int cpu = seats < pool.n_cpus ? cattn_current_cpu() : AVOIDS_NONE;
    struct cattn_cpus cpus;
    if (cpu >= 0 && cpu == pool.avoided_cpu)
        return;
    const int n_cpus = cattn_thread_cpus(&cpus, cpu);
    if (n_cpus == 0)
        return;
    const bool known = pool.avoided_cpu != AVOIDS_UNKNOWN && memcmp(&cpus, &pool.placed, sizeof cpus) == 0;
    for (int i = 0; i < pool.n_workers && !known; i++)
        cattn_thread_place(pool.worker[i], &cpus);
    pool.n_cpus = n_cpus;
    pool.avoided_cpu = cpu;
    pool.placed = cpus;
}

/* Starts workers until there are `wanted` or the system refuses; lock held. */
static void start_workers(int wanted) {
    struct cattn_cpus unused;
    if (pool.n_workers >= wanted)
        return;
    while (pool.n_workers < wanted && cattn_thread_start(&pool.worker[pool.n_workers], worker_main))
        pool.n_workers++;
    pool.n_cpus = cattn_thread_cpus(&unused, -1); /* the workers inherit them */
    pool.avoided_cpu = AVOIDS_UNKNOWN;
}

/* ---- a call with workers ---- */

/* Frees the seats' scratch if it is too large to keep; lock held. */
static void trim_scratch(int seats) {
    for (int i = 0; i < seats; i++)
        cattn_scratch_trim(&pool.scratch[i]);
}

/* Offers the job to up to max_seats workers. False: no memory, nothing offered. */
static bool offer_seats(struct job *job, int max_seats, cattn_size scratch_size, unsigned *fork_count) {
    cattn_mutex_lock(&pool.lock);
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
            cattn_condition_broadcast(&pool.work);
        else
            for (int i = 0; i < seats; i++)
                cattn_condition_signal(&pool.work);
    } else {
        trim_scratch(seats);
    }
    cattn_mutex_unlock(&pool.lock);
    return ok;
}

/* Waits for the seated workers and polls. The lock is held before and after, not while waiting. In the child of a fork
 * it ends early. */
static void wait_for_workers(struct cattn_worker *caller, unsigned fork_count) {
    while (pool.taken_seats > 0 && pool.fork_count == fork_count) {
        if (caller->poll == NULL || atomic_load_explicit(caller->stop, memory_order_relaxed)) {
            cattn_condition_wait(&pool.done, &pool.lock);
            continue;
        }
        cattn_condition_wait_until(&pool.done, &pool.lock, caller->next_poll);
        if (pool.taken_seats == 0)
            break;
        cattn_mutex_unlock(&pool.lock);
        cattn_should_stop(caller);
        cattn_mutex_lock(&pool.lock);
    }
}

/* Closes the open seats, waits for the seated workers and frees scratch that is too large to keep. False: the poll
 * forked, and this is the child, which has no such workers and does not own the pool. */
static bool close_seats(struct cattn_worker *caller, int max_seats, unsigned fork_count) {
    cattn_mutex_lock(&pool.lock);
    if (pool.fork_count == fork_count)
        pool.open_seats = 0;
    bool spin = pool.taken_seats > 0 && pool.avoided_cpu >= 0; /* no worker needs this thread's processor */
    if (spin) {
        cattn_mutex_unlock(&pool.lock);
        int64_t end = cattn_now_ns() + SPIN_NS;
        while (pool.taken_seats > 0 && cattn_now_ns() < end)
            ;
        cattn_mutex_lock(&pool.lock);
    }
    wait_for_workers(caller, fork_count);
    bool ours = pool.fork_count == fork_count;
    if (ours) {
        pool.job = NULL;
        trim_scratch(max_seats);
    }
    cattn_mutex_unlock(&pool.lock);
    return ours;
}

/* When the interpreter is gone, Python ends a daemon thread that calls it, here in the poll. The job is on that
 * thread's stack and must last until the workers have left their seats. */
static void abandon(void *job) {
    atomic_store_explicit(&((struct job *)job)->stop, true, memory_order_relaxed);
    cattn_mutex_lock(&pool.lock);
    pool.open_seats = 0;
    while (pool.taken_seats > 0)
        cattn_condition_wait(&pool.done, &pool.lock);
    pool.job = NULL;
    cattn_mutex_unlock(&pool.lock);
    unclaim_pool();
}

/* The caller has claimed the pool; this function unclaims it. */
static enum cattn_status run_with_workers(struct job *job, struct cattn_worker *caller, int num_threads,
                                          cattn_size scratch_size) {
    unsigned fork_count;
    bool ours;
    if (!offer_seats(job, num_threads - 1, scratch_size, &fork_count)) {
        unclaim_pool();
        return CATTN_NO_MEMORY;
    }
    CATTN_CLEANUP_PUSH(abandon, job);
    run_tasks(job, caller);
    ours = close_seats(caller, num_threads - 1, fork_count);
    CATTN_CLEANUP_POP();
    if (!ours)
        return CATTN_INTERRUPTED;
    unclaim_pool();
    return CATTN_OK;
}

enum cattn_status cattn_parallel_for(int64_t n_tasks, int num_threads, cattn_size scratch_size, cattn_task_fn *fn,
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
        caller.next_poll = cattn_now_ns() + POLL_INTERVAL_NS;
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
    const int64_t now = cattn_now_ns();
    if (now < *next_poll)
        return false;
    const bool first = *next_poll == 0;
    *next_poll = now + POLL_INTERVAL_NS;
    return !first && poll->stop(poll->context);
}

bool cattn_release(void) {
    cattn_run_once(&pool_once, init_pool);
    if (atomic_exchange_explicit(&pool.owned, true, memory_order_acquire))
        return false;
    cattn_mutex_lock(&pool.lock);
    pool.quit = true;
    int n_workers = pool.n_workers;
    cattn_condition_broadcast(&pool.work);
    cattn_mutex_unlock(&pool.lock);
    for (int i = 0; i < n_workers; i++)
        cattn_thread_join(pool.worker[i]);

    cattn_mutex_lock(&pool.lock);
    pool.quit = false;
    pool.n_workers = 0;
    for (int i = 0; i < MAX_WORKERS; i++)
        cattn_scratch_free(&pool.scratch[i]);
    cattn_mutex_unlock(&pool.lock);
    unclaim_pool();
    cattn_scratch_release();
    return true;
}
