/* parallel.h -- runs the tasks of one call on several threads.
 *
 * cattn_parallel_for() calls fn(context, task, worker) once for each task 0 .. n_tasks - 1, on the calling thread and
 * up to num_threads - 1 workers of a process-wide pool, and returns when all have finished. Tasks are started in
 * ascending order, each by the thread that is free first: nothing that a task computes may depend on which thread that
 * is. Memory written before the call is seen by every task, and memory written by tasks is seen after it.
 *
 * The calling thread always takes part and never waits for another call: if the pool is in use (by another thread, or
 * by the very call whose task asks for more), it runs all of its tasks itself.
 */
#ifndef CATTN_PARALLEL_H
#define CATTN_PARALLEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../cattn.h"

/* Threads in one call, the calling one included. */
#define CATTN_MAX_THREADS 256

/* What a task sees of the thread that runs it. The fields belong to parallel.c; tasks use the functions below. */
struct cattn_worker {
    void *scratch;
    atomic_bool *stop;             /* the whole call's */
    const struct cattn_poll *poll; /* on the calling thread, where there is one to ask; else NULL */
    int64_t next_poll;             /* nanoseconds, CLOCK_MONOTONIC */
    unsigned fp_saved;             /* floating-point mode to leave with */
};

typedef void cattn_task_fn(void *context, int64_t task, struct cattn_worker *worker);

/* At least scratch_size bytes, 64-byte aligned, uninitialised, this thread's alone until the task returns. */
static inline void *cattn_worker_scratch(struct cattn_worker *worker) { return worker->scratch; }

/* The rest of cattn_should_stop() on the calling thread: asks the poll if its time has come. */
bool cattn_worker_poll(struct cattn_worker *worker);

/* True: return soon, the results will not be used. Costs a load on workers and reads the clock on the calling thread;
 * a task that runs for more than a few milliseconds asks between its inner blocks. */
static inline bool cattn_should_stop(struct cattn_worker *worker) {
    if (atomic_load_explicit(worker->stop, memory_order_relaxed))
        return true;
    return worker->poll != NULL && cattn_worker_poll(worker);
}

/* Every task runs in the default floating-point mode, with scratch_size bytes of scratch that exist before the first
 * task starts: CATTN_NO_MEMORY means that nothing ran. num_threads below 1 counts as 1.
 *
 * poll (NULL, or with stop NULL: none) is called on the calling thread alone, about every 20 ms, in that thread's own
 * floating-point mode and without any lock held. When it returns true, no further task starts, cattn_should_stop() is
 * true for the running ones, and once these have returned so does the call, with CATTN_INTERRUPTED. The same status
 * comes back in the child of a fork() made by the poll while workers were busy: their results stayed in the parent. */
enum cattn_status cattn_parallel_for(int64_t n_tasks, int num_threads, size_t scratch_size, cattn_task_fn *fn,
                                     void *context, const struct cattn_poll *poll);

/* For a driver that makes many short calls of cattn_parallel_for, each over before its first poll: polls between them
 * when the time has come. *next_poll is 0 before the first call. True: stop. */
bool cattn_poll_between(const struct cattn_poll *poll, int64_t *next_poll);

#endif
