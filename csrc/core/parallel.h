/* parallel.h -- runs the tasks of one call on several threads; tickets for tasks that do something in order. */
#ifndef CATTN_PARALLEL_H
#define CATTN_PARALLEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../cattn.h"
#include "../kernels/kernels.h"
#include "os.h"

/* ---- runs the tasks of one call on several threads ---- */

/* cattn_parallel_for() calls fn(context, task, worker) once for each task 0 .. n_tasks - 1, on the calling thread and
 * up to num_threads - 1 workers of a process-wide pool, and returns when all have finished. Tasks are started in
 * ascending order, each by the first free thread, so no result may depend on which thread that is. Every task sees
 * memory that was written before the call, and the caller sees memory that tasks wrote.
 *
 * The calling thread always takes part and never waits for another call: if the pool is in use (by another thread, or
 * by the call whose own task calls again), it runs all of its tasks itself.
 */

/* Most threads of one call, including the calling one. */
#define CATTN_MAX_THREADS 256

/* The thread that runs a task. The members belong to parallel.c; tasks use the functions below. */
struct cattn_worker {
    void *scratch;
    atomic_bool *stop;             /* of the whole call */
    const struct cattn_poll *poll; /* NULL on workers, and if the call has no poll */
    int64_t next_poll;             /* by cattn_now_ns() */
    unsigned fp_saved;             /* the thread's own floating-point mode */
};

typedef void cattn_task_fn(void *context, int64_t task, struct cattn_worker *worker);

/* At least scratch_size bytes, 64-byte aligned and uninitialised, which no other thread uses until the task returns. */
static inline void *cattn_worker_scratch(struct cattn_worker *worker) { return worker->scratch; }

/* The rest of cattn_should_stop() on the calling thread: calls the poll if its time has come. */
bool cattn_worker_poll(struct cattn_worker *worker);

/* True: return soon, the results will not be used. A worker loads a flag, the calling thread reads the clock. A task
 * that runs for more than a few milliseconds calls this between its inner blocks. */
static inline bool cattn_should_stop(struct cattn_worker *worker) {
    if (atomic_load_explicit(worker->stop, memory_order_relaxed))
        return true;
    return worker->poll != NULL && cattn_worker_poll(worker);
}

/* The same for kernels, and as the poll of a call within a task. */
static inline bool cattn_stop_wanted(void *worker) { return cattn_should_stop(worker); }
static inline struct cattn_stop cattn_stop_of(struct cattn_worker *worker) {
    return (struct cattn_stop){cattn_stop_wanted, worker};
}

/* Every task runs in the default floating-point mode. All scratch is allocated before the first task starts, so
 * CATTN_NO_MEMORY means that nothing ran. num_threads below 1 counts as 1.
 *
 * poll may be NULL, or have a NULL stop. It is called on the calling thread only, about every 20 ms, in that thread's
 * own floating-point mode and without a lock held. If it returns true, no further task starts, cattn_should_stop() is
 * true for running tasks, and when these have returned the call returns CATTN_INTERRUPTED. It returns the same in the
 * child of a fork() that the poll made while workers were busy: their results stayed in the parent. */
enum cattn_status cattn_parallel_for(int64_t n_tasks, int num_threads, cattn_size scratch_size, cattn_task_fn *fn,
                                     void *context, const struct cattn_poll *poll);

/* For a driver that makes many short calls of cattn_parallel_for, each of which ends before its first poll: polls
 * between them if the time has come. *next_poll is 0 before the first call. True: stop. */
bool cattn_poll_between(const struct cattn_poll *poll, int64_t *next_poll);

/* ---- parallel tasks that must do something in order, at one or many places ---- */

/* Tasks at a place have the tickets 0, 1, 2, ...; each waits for its ticket, does its work there and passes the place
 * on. Tasks must be started in an order in which none waits for a task that starts later (parallel.h starts them in
 * ascending order).
 */

struct cattn_tickets {
    cattn_mutex lock;
    cattn_condition passed;
    atomic_int *next;    /* [n_places]: the ticket that is served now, modulo 2^32 */
    atomic_int single;   /* where there is one place, `next` points here: that needs no memory */
    unsigned fork_count; /* cattn_fork_count() when the lock was made */
};

/* Returns false without memory, which one place does not need. Do not move the struct before cattn_tickets_end. */
bool cattn_tickets_begin(struct cattn_tickets *tickets, int64_t n_places);
void cattn_tickets_end(struct cattn_tickets *tickets);
/* Returns false if the call was stopped. */
bool cattn_tickets_wait(struct cattn_tickets *tickets, int64_t place, int64_t ticket, struct cattn_worker *worker);
void cattn_tickets_pass(struct cattn_tickets *tickets, int64_t place);

#endif
