/* mt19937.h -- the Mersenne Twister MT19937 of Matsumoto and Nishimura (1998), seeded by one 32-bit number.
 *
 * The same words as numpy.random.RandomState(seed) and PyTorch's CPU generator, made a block of 624 at a time. It
 * is sequential by nature: to skip words costs about half of what it costs to draw them. A generator is a plain value:
 * assignment copies it.
 */
#ifndef CATTN_MT19937_H
#define CATTN_MT19937_H

#include <stdint.h>

#define CATTN_MT19937_WORDS 624

struct cattn_mt19937 {
    uint32_t state[CATTN_MT19937_WORDS];
    int32_t next; /* words of this block that are used: 0 (just seeded) and 624 ask for a new block */
};

void cattn_mt19937_seed(struct cattn_mt19937 *mt, uint32_t seed);
/* The next n words. */
void cattn_mt19937_draw(struct cattn_mt19937 *mt, int64_t n, uint32_t *out);
/* As if n words had been drawn. */
void cattn_mt19937_skip(struct cattn_mt19937 *mt, int64_t n);

#endif
