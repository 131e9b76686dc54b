/* tickets.c -- waiting for a ticket, first busily and then asleep; see parallel.h. */
#include "parallel.h"

#include <stdlib.h>

#include "scratch.h"

/* A task that waits asks this often whether the call was stopped. */
#define WAIT_NS INT64_C(10000000)
/* Looks at a place before sleeping: some ten microseconds, about what waking up costs. */
#define LOOKS 2000

bool cattn_tickets_begin(struct cattn_tickets *tickets, int64_t n_places) {
    tickets->next = &tickets->single;
    atomic_init(&tickets->single, 0);
    /* at least one, because calloc(0) may return NULL; no more, so that ASan sees an index that is one too large */
    if (n_places != 1)
        tickets->next = cattn_allocate_zeros(n_places > 0 ? (cattn_size)n_places : 1, sizeof *tickets->next);
    if (!tickets->next)
        return false;
    cattn_mutex_init(&tickets->lock);
    cattn_condition_init(&tickets->passed);
    tickets->fork_count = cattn_fork_count();
    return true;
}

void cattn_tickets_end(struct cattn_tickets *tickets) {
    /* in the child of a fork a thread that is gone may hold the lock: leave it */
    if (tickets->fork_count == cattn_fork_count()) {
        cattn_condition_destroy(&tickets->passed);
        cattn_mutex_destroy(&tickets->lock);
    }
    if (tickets->next != &tickets->single)
        free(tickets->next);
}

/* Sleeps until a place is passed on, at most WAIT_NS, then asks whether the call was stopped. The lock is held
 * before and after. Returns false if the call was stopped; then the lock is not held. */
static bool wait_briefly(struct cattn_tickets *tickets, struct cattn_worker *worker) {
    cattn_condition_wait_until(&tickets->passed, &tickets->lock, cattn_now_ns() + WAIT_NS);
    /* The poll may run Python: release the lock first. It may fork while another thread holds the lock: if stopped,
     * never touch the lock again. */
    cattn_mutex_unlock(&tickets->lock);
    if (cattn_should_stop(worker))
        return false;
    cattn_mutex_lock(&tickets->lock);
    return true;
}

static bool has_ticket(struct cattn_tickets *tickets, int64_t place, int64_t ticket) {
    return atomic_load_explicit(&tickets->next[place], memory_order_acquire) == (int)ticket;
}

bool cattn_tickets_wait(struct cattn_tickets *tickets, int64_t place, int64_t ticket, struct cattn_worker *worker) {
    for (int look = 0; look < LOOKS; look++)
        if (has_ticket(tickets, place, ticket))
            return true;
    cattn_mutex_lock(&tickets->lock);
    while (!has_ticket(tickets, place, ticket))
        if (!wait_briefly(tickets, worker))
            return false;
    cattn_mutex_unlock(&tickets->lock);
    return true;
}

void cattn_tickets_pass(struct cattn_tickets *tickets, int64_t place) {
    cattn_mutex_lock(&tickets->lock);
    atomic_fetch_add_explicit(&tickets->next[place], 1, memory_order_release);
    cattn_condition_broadcast(&tickets->passed);
    cattn_mutex_unlock(&tickets->lock);
}
