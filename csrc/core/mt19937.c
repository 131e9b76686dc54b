/* mt19937.c -- the Mersenne Twister; see mt19937.h. The loops have no branches, so that compilers make vectors of them.
 */
#include "mt19937.h"

#include "variants.h"

#define N CATTN_MT19937_WORDS
#define M 397

void cattn_mt19937_seed(struct cattn_mt19937 *mt, uint32_t seed) {
    mt->state[0] = seed;
    for (uint32_t i = 1; i < N; i++)
        mt->state[i] = 1812433253u * (mt->state[i - 1] ^ (mt->state[i - 1] >> 30)) + i;
    mt->next = 0;
}

CATTN_ALWAYS_INLINE uint32_t twist(uint32_t upper, uint32_t lower, uint32_t far) {
    const uint32_t y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
    return far ^ (y >> 1) ^ ((0u - (lower & 1u)) & 0x9908b0dfu);
}

CATTN_ALWAYS_INLINE void new_block(uint32_t *s) {
    for (int i = 0; i < N - M; i++)
        s[i] = twist(s[i], s[i + 1], s[i + M]);
    for (int i = N - M; i < N - 1; i++)
        s[i] = twist(s[i], s[i + 1], s[i + M - N]);
    s[N - 1] = twist(s[N - 1], s[0], s[M - 1]);
}

CATTN_ALWAYS_INLINE void temper(const uint32_t *s, int n, uint32_t *out) {
    for (int i = 0; i < n; i++) {
        uint32_t y = s[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        out[i] = y ^ (y >> 18);
    }
}

/* n words, tempered into out; without out they are skipped. */
CATTN_ALWAYS_INLINE void advance_body(struct cattn_mt19937 *mt, int64_t n, uint32_t *out) {
    while (n > 0) {
        if (mt->next == 0 || mt->next == N) {
            new_block(mt->state);
            mt->next = 0;
        }
        const int left = N - mt->next, count = n < left ? (int)n : left;
        if (out) {
            temper(mt->state + mt->next, count, out);
            out += count;
        }
        mt->next += count;
        n -= count;
    }
}
CATTN_VARIANTS(advance, (struct cattn_mt19937 * mt, int64_t n, uint32_t *out), (mt, n, out))

void cattn_mt19937_draw(struct cattn_mt19937 *mt, int64_t n, uint32_t *out) { advance(mt, n, out); }

void cattn_mt19937_skip(struct cattn_mt19937 *mt, int64_t n) { advance(mt, n, 0); }
