/* visible.h -- which keys a query sees in a problem. */
#ifndef CATTN_FUZZ_VISIBLE_H
#define CATTN_FUZZ_VISIBLE_H

struct problem;

/* Writes NaN where it must not matter: to keys and values that no query sees, to queries that see no key, and to a bias
 * where something else hides the key. */
void poison_hidden(struct problem *problem);
/* The counts of cattn_explain must be those of the visible keys. */
void check_explanation(const struct problem *problem);

#endif
