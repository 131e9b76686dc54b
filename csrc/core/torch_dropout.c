/* torch_dropout.c -- the two streams of dropout bits that builds of PyTorch have; see torch_dropout.h. */
#include "torch_dropout.h"

#include <math.h>

#include "dispatch.h"
#include "mt19937.h"

/* Words drawn at a time, two an element. */
#define DROPOUT_WORDS 1024

/* The multiplicative generator of L'Ecuyer (1999) that Intel's MKL calls MCG31m1. */
#define MCG_MODULUS 0x7fffffffu
#define MCG_MULTIPLIER 1132489760u

static uint32_t mcg_times(uint32_t x, uint32_t factor) { return (uint32_t)((uint64_t)x * factor % MCG_MODULUS); }

uint64_t cattn_torch_threshold(double p) { return (uint64_t)ceil(p * 0x1p53); }

void cattn_torch_dropout_begin(struct cattn_torch_dropout *cursor, const struct cattn_torch_random *random,
                               double keep_probability) {
    cursor->mt = random->mt;
    cursor->threshold = cattn_torch_threshold(keep_probability);
    cursor->probability = keep_probability;
    cursor->is_mkl = random->stream == CATTN_TORCH_MKL;
    cursor->mcg = 0;
    if (cursor->is_mkl) {
        cattn_mt19937_draw(&cursor->mt, 1, &cursor->mcg);
        cursor->mcg %= MCG_MODULUS;
        cursor->mcg += cursor->mcg == 0;
    }
}

void cattn_torch_dropout_next(struct cattn_torch_dropout *cursor, int64_t n, uint8_t *mask) {
    if (cursor->is_mkl) {
        for (int64_t i = 0; i < n; i++) {
            mask[i] = cursor->mcg / (double)MCG_MODULUS < cursor->probability;
            cursor->mcg = mcg_times(cursor->mcg, MCG_MULTIPLIER);
        }
        return;
    }
    const struct cattn_kernels *kernels = cattn_kernels_for(CATTN_F32);
    uint32_t words[DROPOUT_WORDS];
    for (int64_t at = 0; at < n; at += DROPOUT_WORDS / 2) {
        const int64_t count = n - at < DROPOUT_WORDS / 2 ? n - at : DROPOUT_WORDS / 2;
        cattn_mt19937_draw(&cursor->mt, 2 * count, words);
        kernels->torch_below(words, count, cursor->threshold, mask + at);
    }
}

void cattn_torch_dropout_skip(struct cattn_torch_dropout *cursor, int64_t n) {
    if (!cursor->is_mkl) {
        cattn_mt19937_draw(&cursor->mt, 2 * n, NULL);
        return;
    }
    uint32_t power = MCG_MULTIPLIER; /* to the 2^k */
    for (; n > 0; n >>= 1, power = mcg_times(power, power)) {
        if (n & 1)
            cursor->mcg = mcg_times(cursor->mcg, power);
    }
}

void cattn_torch_dropout_end(const struct cattn_torch_dropout *cursor, struct cattn_torch_random *random) {
    random->mt = cursor->mt;
}
