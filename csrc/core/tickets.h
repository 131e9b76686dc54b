/* tickets.h -- parallel tasks that must do something in order, at one or many places.
 *
 * Tasks at a place have the tickets 0, 1, 2, ...; each waits for its ticket, does its work there and passes the place
 * on. Tasks must be started in an order in which none waits for a task that starts later (parallel.h starts them in
 * ascending order).
 */
#ifndef CATTN_TICKETS_H
#define CATTN_TICKETS_H

#include "os.h"
#include "parallel.h"

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
