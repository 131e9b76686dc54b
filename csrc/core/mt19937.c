/* mt19937.c -- words of the Mersenne Twister, block by block; see mt19937.h. */
#include "mt19937.h"

#include "dispatch.h"

void cattn_mt19937_seed(struct cattn_mt19937 *mt, uint32_t seed) {
    mt->state[0] = seed;
    for (uint32_t i = 1; i < CATTN_MT19937_WORDS; i++)
        mt->state[i] = 1812433253u * (mt->state[i - 1] ^ (mt->state[i - 1] >> 30)) + i;
    mt->next = 0;
}

void cattn_mt19937_draw(struct cattn_mt19937 *mt, int64_t n, uint32_t *words) {
    const struct cattn_kernels *kernels = cattn_kernels_for(CATTN_F32);
    while (n > 0) {
        if (mt->next == 0 || mt->next == CATTN_MT19937_WORDS) {
            kernels->mt19937_block(mt->state);
            mt->next = 0;
        }
        const int left = CATTN_MT19937_WORDS - mt->next, count = n < left ? (int)n : left;
        if (words) {
            kernels->mt19937_temper(mt->state + mt->next, count, words);
            words += count;
        }
        mt->next += count;
        n -= count;
    }
}
