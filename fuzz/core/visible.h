/* visible.h -- which keys a query sees, computed as in cattn.reference and not as in csrc/core. */
#ifndef CATTN_FUZZ_VISIBLE_H
#define CATTN_FUZZ_VISIBLE_H

#include "problem.h"

/* Overwrites with NaN whatever no query sees: rows of queries, keys, values and their tangents, and elements of biases.
 * Scales become as large as a scale may be. */
void poison_hidden(struct problem *problem);
/* Whether explain counts the visible keys, which it does not if a mask hides some. */
bool explanation_is_right(const struct problem *problem);
/* Whether every element of a mask follows from the ranges. */
bool mask_is_right(const struct problem *problem);

#endif
