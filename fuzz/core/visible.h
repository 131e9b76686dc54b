/* visible.h -- which keys a query sees in a problem. */
#ifndef CATTN_FUZZ_VISIBLE_H
#define CATTN_FUZZ_VISIBLE_H

struct problem;

/* NaN wherever it must not matter: in keys and values that nobody sees, in queries that see nothing, and in a bias
 * where something else hides the key. */
void poison_hidden(struct problem *problem);
/* What explain counts is what there is. */
void check_explanation(const struct problem *problem);

#endif
