/* turns.c -- turns at places; see turns.h. */
#include "turns.h"

#include <stdlib.h>
#include <time.h>

/* How long a task waits for its turn before it asks whether the call has been stopped. */
#define WAIT_NANOSECONDS 10000000L
/* Looks at a place before sleeping: some ten microseconds, what waking up costs. */
#define LOOKS 2000

bool cattn_turns_begin(struct cattn_turns *turns, int64_t n_places) {
    /* at least one, for nothing may be NULL; no more than there are, for AddressSanitizer to see one too many */
    turns->next = calloc(n_places > 0 ? (size_t)n_places : 1, sizeof *turns->next);
    if (!turns->next)
        return false;
    pthread_mutex_init(&turns->lock, NULL);
    pthread_cond_init(&turns->passed, NULL);
    turns->fork_count = cattn_fork_count();
    return true;
}

void cattn_turns_end(struct cattn_turns *turns) {
    if (turns->fork_count == cattn_fork_count()) {
        pthread_cond_destroy(&turns->passed);
        pthread_mutex_destroy(&turns->lock);
    }
    free(turns->next);
}

bool cattn_wait_briefly(pthread_cond_t *condition, pthread_mutex_t *lock, struct cattn_worker *worker) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WAIT_NANOSECONDS;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_cond_timedwait(condition, lock, &until);
    /* the poll may run Python: not under the lock; and it may fork while another thread holds it: no look back */
    pthread_mutex_unlock(lock);
    if (cattn_should_stop(worker))
        return false;
    pthread_mutex_lock(lock);
    return true;
}

static bool has_turn(struct cattn_turns *turns, int64_t place, int64_t turn) {
    return atomic_load_explicit(&turns->next[place], memory_order_acquire) == (int)turn;
}

bool cattn_turns_wait(struct cattn_turns *turns, int64_t place, int64_t turn, struct cattn_worker *worker) {
    for (int look = 0; look < LOOKS; look++)
        if (has_turn(turns, place, turn))
            return true;
    pthread_mutex_lock(&turns->lock);
    while (!has_turn(turns, place, turn))
        if (!cattn_wait_briefly(&turns->passed, &turns->lock, worker))
            return false;
    pthread_mutex_unlock(&turns->lock);
    return true;
}

void cattn_turns_pass(struct cattn_turns *turns, int64_t place) {
    pthread_mutex_lock(&turns->lock);
    atomic_fetch_add_explicit(&turns->next[place], 1, memory_order_release);
    pthread_cond_broadcast(&turns->passed);
    pthread_mutex_unlock(&turns->lock);
}
