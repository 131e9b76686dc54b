/* turns.c -- turns at places; see turns.h. */
#include "tickets.h"

#include <stdlib.h>
#include <time.h>

/* How long a task waits for its turn before it asks whether the call has been stopped. */
#define WAIT_NANOSECONDS 10000000L
/* Looks at a place before sleeping: some ten microseconds, what waking up costs. */
#define LOOKS 2000

bool cattn_tickets_begin(struct cattn_tickets *tickets, int64_t n_places) {
    /* at least one, for nothing may be NULL; no more than there are, for AddressSanitizer to see one too many */
    tickets->next = calloc(n_places > 0 ? (size_t)n_places : 1, sizeof *tickets->next);
    if (!tickets->next)
        return false;
    pthread_mutex_init(&tickets->lock, NULL);
    pthread_cond_init(&tickets->passed, NULL);
    tickets->fork_count = cattn_fork_count();
    return true;
}

void cattn_tickets_end(struct cattn_tickets *tickets) {
    if (tickets->fork_count == cattn_fork_count()) {
        pthread_cond_destroy(&tickets->passed);
        pthread_mutex_destroy(&tickets->lock);
    }
    free(tickets->next);
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

static bool has_ticket(struct cattn_tickets *tickets, int64_t place, int64_t ticket) {
    return atomic_load_explicit(&tickets->next[place], memory_order_acquire) == (int)ticket;
}

bool cattn_tickets_wait(struct cattn_tickets *tickets, int64_t place, int64_t ticket, struct cattn_worker *worker) {
    for (int look = 0; look < LOOKS; look++)
        if (has_ticket(tickets, place, ticket))
            return true;
    pthread_mutex_lock(&tickets->lock);
    while (!has_ticket(tickets, place, ticket))
        if (!cattn_wait_briefly(&tickets->passed, &tickets->lock, worker))
            return false;
    pthread_mutex_unlock(&tickets->lock);
    return true;
}

void cattn_tickets_pass(struct cattn_tickets *tickets, int64_t place) {
    pthread_mutex_lock(&tickets->lock);
    atomic_fetch_add_explicit(&tickets->next[place], 1, memory_order_release);
    pthread_cond_broadcast(&tickets->passed);
    pthread_mutex_unlock(&tickets->lock);
}
