/* turns.h -- tasks that run in parallel take turns at places: a place is visited by its first task, then its second.
 *
 * Tasks must be started in an order in which nobody waits for a task that starts later (parallel.h starts them in
 * ascending order).
 */
#ifndef CATTN_TICKETS_H
#define CATTN_TICKETS_H

#include <pthread.h>

#include "parallel.h"

struct cattn_tickets {
    pthread_mutex_t lock;
    pthread_cond_t passed;
    atomic_int *next;    /* of each place: whose turn it is */
    unsigned fork_count; /* when the condition was made */
};

bool cattn_tickets_begin(struct cattn_tickets *tickets, int64_t n_places);
void cattn_tickets_end(struct cattn_tickets *tickets);
/* False: asked to stop. */
bool cattn_tickets_wait(struct cattn_tickets *tickets, int64_t place, int64_t ticket, struct cattn_worker *worker);
void cattn_tickets_pass(struct cattn_tickets *tickets, int64_t place);

/* For a lock that guards what is waited for: sleeps until the condition is signalled, at most some milliseconds; then
 * asks, without the lock, whether the call has been stopped. False: it has, and the lock is not held any more. */
bool cattn_wait_briefly(pthread_cond_t *condition, pthread_mutex_t *lock, struct cattn_worker *worker);

#endif
