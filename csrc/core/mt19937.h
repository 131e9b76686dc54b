/* mt19937.h -- the Mersenne Twister MT19937 of Matsumoto and Nishimura (1998), seeded by one 32-bit number.
 *
 * The same words as numpy.random.RandomState(seed) and PyTorch's CPU generator. They are made in blocks of 624, one
 * block from the one before: to skip words costs about half of what it costs to draw them.
 */
#ifndef CATTN_MT19937_H
#define CATTN_MT19937_H

#include "../torch_random.h"

void cattn_mt19937_seed(struct cattn_mt19937 *mt, uint32_t seed);
/* The next n words; words: NULL skips them. */
void cattn_mt19937_draw(struct cattn_mt19937 *mt, int64_t n, uint32_t *words);

#endif
