/* torch_random.h -- the random numbers of PyTorch 2.13's CPU generator, bit for bit, and its dropout masks.
 *
 * Nothing here locks: a generator belongs to one thread at a time. It is a plain value; whoever wants a call to leave
 * it as it was on failure works on a copy. Conversions, multiply-adds and the polynomials behind normal numbers are
 * those of PyTorch's AVX2 build, spelled out, on every machine; only the float64 logarithms, sines and cosines come
 * from the C library, in both.
 */
#ifndef CATTN_TORCH_RANDOM_H
#define CATTN_TORCH_RANDOM_H

#include "../cattn.h"
#include "mt19937.h"

/* Which bits decide a dropout: ATEN is every current build; MKL older x86 builds (one word seeds an MCG31m1). */
enum cattn_torch_stream { CATTN_TORCH_ATEN = 0, CATTN_TORCH_MKL };

struct cattn_torch_random {
    struct cattn_mt19937 mt;
    uint64_t seed;       /* as given; the twister takes its low half */
    bool has_normal;     /* the second of a pair of normal numbers waits */
    double normal;       /* that one */
    uint8_t reserved[8]; /* the end of PyTorch's state, handed through */
    enum cattn_torch_stream stream;
};

/* torch.manual_seed: everything but the stream starts anew. */
void cattn_torch_seed(struct cattn_torch_random *random, uint64_t seed);

/* torch.get_rng_state, torch.set_rng_state. import: false, and nothing changed, if the bytes are no state. */
#define CATTN_TORCH_STATE_BYTES 5056
void cattn_torch_export(const struct cattn_torch_random *random, uint8_t *bytes);
bool cattn_torch_import(struct cattn_torch_random *random, const uint8_t *bytes);

enum cattn_torch_distribution {
    CATTN_TORCH_UNIFORM,   /* low + (high - low) u */
    CATTN_TORCH_NORMAL,    /* mean 0, deviation 1 */
    CATTN_TORCH_INTEGER,   /* int64: word mod range + base */
    CATTN_TORCH_BERNOULLI, /* u < p; dtype of out */
    CATTN_TORCH_KEEP       /* bytes: the mask of a dropout */
};

/* n numbers, in the order of memory. What a distribution does not name is not read. */
struct cattn_torch_fill {
    enum cattn_torch_distribution distribution;
    enum cattn_dtype dtype;
    int64_t n;
    void *out;
    double low, high;          /* UNIFORM: finite in dtype, and so is their difference */
    uint64_t range;            /* INTEGER: not 0 */
    int64_t base;              /* INTEGER */
    int64_t skip;              /* KEEP: elements of the mask before the first */
    double probability;        /* BERNOULLI, KEEP: of a 1 */
    const void *probabilities; /* BERNOULLI: n of them in dtype, or NULL */
    struct cattn_poll poll;
};
enum cattn_status cattn_torch_fill(struct cattn_torch_random *random, const struct cattn_torch_fill *fill);

/* A cursor in the mask of one dropout, whose elements are drawn in row-major order. It is a value as well: to hand rows
 * to threads, give each a copy that has skipped what comes before. */
struct cattn_torch_keep {
    struct cattn_mt19937 mt;
    uint64_t threshold; /* kept: 53 bits below this */
    double probability; /* kept (MKL): uniform number below this */
    uint32_t mcg;       /* state of the MCG31m1 */
    bool is_mkl;
};
/* PyTorch draws no mask for probabilities 0 and 1, nor for empty tensors: do not begin one. */
void cattn_torch_keep_begin(struct cattn_torch_keep *keep, const struct cattn_torch_random *random,
                            double keep_probability);
/* The next n elements, 1 = kept. */
void cattn_torch_keep_next(struct cattn_torch_keep *keep, int64_t n, uint8_t *kept);
void cattn_torch_keep_skip(struct cattn_torch_keep *keep, int64_t n);
/* The generator goes on where the cursor, past all elements, stands. */
void cattn_torch_keep_end(const struct cattn_torch_keep *keep, struct cattn_torch_random *random);

#endif
