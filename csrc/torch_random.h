/* torch_random.h -- the random numbers of PyTorch 2.13's CPU generator, bit for bit, and its dropout masks.
 *
 * Nothing here locks: a generator belongs to one thread at a time. It is a plain value, which assignment copies: a
 * caller that must leave it unchanged on failure works on a copy. Conversions, multiply-adds and the polynomials of
 * normal numbers are the numbers of PyTorch's AVX2 build, spelled out, on every machine. Only the float64 logarithms,
 * sines and cosines come from the C library, in PyTorch as well.
 */
#ifndef CATTN_TORCH_RANDOM_H
#define CATTN_TORCH_RANDOM_H

#include "cattn.h"

/* The Mersenne Twister MT19937: a block of words, and how many of them are used. */
#define CATTN_MT19937_WORDS 624
struct cattn_mt19937 {
    uint32_t state[CATTN_MT19937_WORDS];
    int32_t next; /* 0 (just seeded) and 624 need a new block */
};

/* Which bits decide a dropout. ATEN: every current build. MKL: older x86 builds, where one word seeds an MCG31m1. */
enum cattn_torch_stream { CATTN_TORCH_ATEN = 0, CATTN_TORCH_MKL };

struct cattn_torch_random {
    struct cattn_mt19937 mt;
    uint64_t seed;   /* as given; the twister takes its low half */
    bool has_normal; /* `normal` is the second of a pair of normal numbers, not handed out yet */
    double normal;
    uint8_t reserved[8]; /* the end of PyTorch's state, handed through */
    enum cattn_torch_stream stream;
};

/* torch.manual_seed: everything but the stream starts anew. */
void cattn_torch_seed(struct cattn_torch_random *random, uint64_t seed);

/* torch.get_rng_state and torch.set_rng_state. import returns false, and changes nothing, if the bytes are no state. */
#define CATTN_TORCH_STATE_BYTES 5056
void cattn_torch_export(const struct cattn_torch_random *random, uint8_t *bytes);
bool cattn_torch_import(struct cattn_torch_random *random, const uint8_t *bytes);

enum cattn_torch_distribution {
    CATTN_TORCH_UNIFORM,     /* low + (high - low) u */
    CATTN_TORCH_NORMAL,      /* mean 0, deviation 1 */
    CATTN_TORCH_INTEGER,     /* int64: word mod range + base */
    CATTN_TORCH_BERNOULLI,   /* u < p, as 0 or 1 in dtype */
    CATTN_TORCH_DROPOUT_MASK /* bytes, 1 = kept */
};

/* n numbers, in the order of memory. Members that a distribution does not name are not read. */
struct cattn_torch_fill {
    enum cattn_torch_distribution distribution;
    enum cattn_dtype dtype; /* UNIFORM, NORMAL, BERNOULLI */
    int64_t n;
    void *out;
    double low, high;          /* UNIFORM: finite in dtype, as is their difference */
    uint64_t range;            /* INTEGER: not 0 */
    int64_t base;              /* INTEGER */
    int64_t skip;              /* DROPOUT_MASK: elements of the mask before the first one wanted */
    double probability;        /* BERNOULLI, DROPOUT_MASK: of a 1 */
    const void *probabilities; /* BERNOULLI: n of them in dtype, or NULL */
    struct cattn_poll poll;
};
enum cattn_status cattn_torch_fill(struct cattn_torch_random *random, const struct cattn_torch_fill *fill);

#endif
