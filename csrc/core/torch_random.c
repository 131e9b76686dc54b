/* torch_random.c -- the random numbers of PyTorch: words of a Mersenne Twister, numbers, and the mask of a dropout. */
#include "../torch_random.h"

#include <math.h>
#include <string.h>

#include "dispatch.h"
#include "random.h"

/* ---- the Mersenne Twister MT19937 of Matsumoto and Nishimura (1998), seeded by one 32-bit number ----
 *
 * The same words as numpy.random.RandomState(seed) and PyTorch's CPU generator. They are made in blocks of 624, one
 * block from the one before: to skip words costs about half of what it costs to draw them.
 */

static void seed_words(struct cattn_mt19937 *mt, uint32_t seed) {
    mt->state[0] = seed;
    for (uint32_t i = 1; i < CATTN_MT19937_WORDS; i++)
        mt->state[i] = 1812433253u * (mt->state[i - 1] ^ (mt->state[i - 1] >> 30)) + i;
    mt->next = 0;
}

/* The next n words; words: NULL skips them. */
static void draw_words(struct cattn_mt19937 *mt, int64_t n, uint32_t *words) {
    const struct cattn_row_kernels *kernels = cattn_row_kernels_for(CATTN_F32);
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

/* ---- uniform, normal, integer and Bernoulli numbers from a stream of words ---- */

/* Words come in chunks that stay in the nearest cache; a loop of the kernel table then turns them into numbers.
 */

/* Words of a chunk. */
#define CHUNK CATTN_TORCH_CHUNK
/* Elements between two checks for an interrupt. */
#define PIECE 16384

struct fill_job {
    struct cattn_torch_random *random;
    const struct cattn_torch_fill *fill;
};

static const struct cattn_row_kernels *kernels_of(const struct cattn_torch_fill *fill) {
    return cattn_row_kernels_for(fill->dtype);
}

/* ---- words to numbers ---- */

/* PyTorch makes normal numbers in pairs: the second one waits in the generator, maybe for a later call. */
static double normal_single(struct cattn_torch_random *random) {
    if (random->has_normal) {
        random->has_normal = false;
        return random->normal + 0.0;
    }
    uint32_t words[4];
    double u[2];
    draw_words(&random->mt, 4, words);
    cattn_row_kernels_for(CATTN_F64)->torch_uniform(words, 2, 0, 1, u);
    const double radius = sqrt(-2.0 * log1p(-u[1])), theta = 6.283185307179586 * u[0];
    random->normal = radius * sin(theta);
    random->has_normal = true;
    return radius * cos(theta) + 0.0;
}

/* Ranges below 2^28 take one word a number, as in PyTorch. */
static bool is_narrow(uint64_t range) { return range < (uint64_t)1 << 28; }

static void integers(const uint32_t *words, int64_t n, uint64_t range, int64_t base, int64_t *out) {
    if (is_narrow(range)) {
        for (int64_t i = 0; i < n; i++)
            out[i] = (int64_t)(words[i] % (uint32_t)range) + base;
    } else {
        for (int64_t i = 0; i < n; i++) {
            const uint64_t r = ((uint64_t)words[2 * i] << 32 | words[2 * i + 1]) % range;
            out[i] = (int64_t)(r + (uint64_t)base);
        }
    }
}

/* The number of 53-bit integers k with k 2^-53 < p. */
static uint64_t threshold_of(double p) { return (uint64_t)ceil(p * 0x1p53); }

/* If p is a number, 53 random bits decide, as in PyTorch; if p is an array, a uniform number of its dtype does. p and
 * out may be the same array. */
static void bernoulli(const struct cattn_torch_fill *f, const uint32_t *words, int64_t at, int64_t n) {
    float *const singles = (float *)f->out + at;
    double *const doubles = (double *)f->out + at;
    if (!f->probabilities) {
        uint8_t ones[CHUNK / 2];
        kernels_of(f)->torch_below(words, n, threshold_of(f->probability), ones);
        for (int64_t i = 0; i < n; i++) {
            if (f->dtype == CATTN_F32)
                singles[i] = ones[i];
            else
                doubles[i] = ones[i];
        }
        return;
    }
    union {
        float single[CHUNK];
        double twice[CHUNK / 2];
    } u;
    kernels_of(f)->torch_uniform(words, n, 0, 1, &u);
    for (int64_t i = 0; i < n; i++) {
        if (f->dtype == CATTN_F32)
            singles[i] = u.single[i] < ((const float *)f->probabilities)[at + i] ? 1.0f : 0.0f;
        else
            doubles[i] = u.twice[i] < ((const double *)f->probabilities)[at + i] ? 1.0 : 0.0;
    }
}

static int words_each(const struct cattn_torch_fill *f) {
    switch (f->distribution) {
    case CATTN_TORCH_INTEGER:
        return is_narrow(f->range) ? 1 : 2;
    case CATTN_TORCH_BERNOULLI:
        return f->probabilities && f->dtype == CATTN_F32 ? 1 : 2;
    default:
        return f->dtype == CATTN_F32 ? 1 : 2;
    }
}

/* Elements at .. at+n-1 from their words. */
static void convert(const struct cattn_torch_fill *f, const uint32_t *words, int64_t at, int64_t n) {
    switch (f->distribution) {
    case CATTN_TORCH_UNIFORM:
        kernels_of(f)->torch_uniform(words, n, f->low, f->high,
                                     (char *)f->out + at * (int64_t)cattn_element_size(f->dtype));
        return;
    case CATTN_TORCH_NORMAL:
        kernels_of(f)->torch_normal(words, n, (char *)f->out + at * (int64_t)cattn_element_size(f->dtype));
        return;
    case CATTN_TORCH_INTEGER:
        integers(words, n, f->range, f->base, (int64_t *)f->out + at);
        return;
    case CATTN_TORCH_BERNOULLI:
        bernoulli(f, words, at, n);
        return;
    case CATTN_TORCH_DROPOUT_MASK:
        return; /* see fill_mask */
    }
}

/* ---- filling ---- */

/* Elements begin .. end-1. False: asked to stop. */
static bool fill_range(const struct fill_job *job, int64_t begin, int64_t end, struct cattn_worker *worker) {
    const int each = words_each(job->fill), chunk = CHUNK / each;
    uint32_t words[CHUNK];
    for (int64_t at = begin; at < end; at += chunk) {
        const int64_t n = end - at < chunk ? end - at : chunk;
        if (at % PIECE == 0 && cattn_should_stop(worker))
            return false;
        draw_words(&job->random->mt, n * each, words);
        convert(job->fill, words, at, n);
    }
    return true;
}

/* Fewer than 16 numbers are made one by one. From 16 on they come in blocks of 16. If the last block is not full,
 * PyTorch draws its words, does not use them, and makes the last 16 numbers anew: so do we. */
static void fill_normal(const struct fill_job *job, struct cattn_worker *worker) {
    const struct cattn_torch_fill *f = job->fill;
    const int64_t rest = f->n % 16;
    if (f->n < 16) {
        for (int64_t i = 0; i < f->n; i++) {
            const double x = normal_single(job->random);
            if (f->dtype == CATTN_F32)
                ((float *)f->out)[i] = (float)x;
            else
                ((double *)f->out)[i] = x;
        }
    } else if (fill_range(job, 0, f->n - rest, worker) && rest > 0) {
        draw_words(&job->random->mt, rest * words_each(f), NULL);
        fill_range(job, f->n - 16, f->n, worker);
    }
}

static void fill_mask(const struct fill_job *job, struct cattn_worker *worker) {
    const struct cattn_torch_fill *f = job->fill;
    struct cattn_torch_dropout cursor;
    cattn_torch_dropout_begin(&cursor, job->random, f->probability);
    cattn_torch_dropout_skip(&cursor, f->skip);
    for (int64_t at = 0; at < f->n && !cattn_should_stop(worker); at += PIECE)
        cattn_torch_dropout_next(&cursor, f->n - at < PIECE ? f->n - at : PIECE, (uint8_t *)f->out + at);
    cattn_torch_dropout_end(&cursor, job->random);
}

static void fill_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct fill_job *job = context;
    (void)task; /* the only one: words come in sequence */
    if (job->fill->distribution == CATTN_TORCH_NORMAL)
        fill_normal(job, worker);
    else if (job->fill->distribution == CATTN_TORCH_DROPOUT_MASK)
        fill_mask(job, worker);
    else
        fill_range(job, 0, job->fill->n, worker);
}

enum cattn_status cattn_torch_fill(struct cattn_torch_random *random, const struct cattn_torch_fill *fill) {
    struct fill_job job = {random, fill};
    return cattn_parallel_for(fill->n > 0, 1, 0, fill_task, &job, &fill->poll);
}

/* ---- seed and state ---- */

void cattn_torch_seed(struct cattn_torch_random *random, uint64_t seed) {
    seed_words(&random->mt, (uint32_t)seed);
    random->seed = seed;
    random->has_normal = false;
    random->normal = 0.0;
    memset(random->reserved, 0, sizeof random->reserved);
}

/* The bytes of torch.get_rng_state(): the layout of torch 0.4. The reserved ones are a cache of a float that CPU code
 * never fills. */
struct torch_state {
    uint64_t seed;
    int32_t left, seeded; /* left: words until a new block, counting the draw that makes it */
    uint64_t next;
    uint64_t words[CATTN_MT19937_WORDS];
    double normal_x, normal, normal_rho;
    int32_t has_normal, padding;
    uint8_t reserved[8];
};
_Static_assert(sizeof(struct torch_state) == CATTN_TORCH_STATE_BYTES, "torch's state has this size");

void cattn_torch_export(const struct cattn_torch_random *random, uint8_t *bytes) {
    const int32_t next = random->mt.next;
    struct torch_state state = {
        .seed = random->seed,
        .left = next == 0 ? 1 : CATTN_MT19937_WORDS + 1 - next,
        .seeded = 1,
        .next = (uint64_t)next,
        .normal = random->has_normal ? random->normal : 0.0,
        .has_normal = random->has_normal,
    };
    for (int i = 0; i < CATTN_MT19937_WORDS; i++)
        state.words[i] = random->mt.state[i];
    memcpy(state.reserved, random->reserved, sizeof state.reserved);
    memcpy(bytes, &state, sizeof state);
}

bool cattn_torch_import(struct cattn_torch_random *random, const uint8_t *bytes) {
    struct torch_state state;
    memcpy(&state, bytes, sizeof state);
    if (!state.seeded || state.next > CATTN_MT19937_WORDS)
        return false;
    if (state.left != (state.next == 0 ? 1 : CATTN_MT19937_WORDS + 1 - (int32_t)state.next))
        return false;
    for (int i = 0; i < CATTN_MT19937_WORDS; i++) {
        if (state.words[i] > UINT32_MAX)
            return false;
    }
    random->seed = state.seed;
    random->mt.next = (int32_t)state.next;
    for (int i = 0; i < CATTN_MT19937_WORDS; i++)
        random->mt.state[i] = (uint32_t)state.words[i];
    random->has_normal = state.has_normal != 0;
    random->normal = state.normal;
    memcpy(random->reserved, state.reserved, sizeof state.reserved);
    return true;
}

/* ---- the two streams of dropout bits that builds of PyTorch have ---- */

/* Words drawn at a time, two an element. */
#define DROPOUT_WORDS 1024

/* The multiplicative generator of L'Ecuyer (1999) that Intel's MKL calls MCG31m1. */
#define MCG_MODULUS 0x7fffffffu
#define MCG_MULTIPLIER 1132489760u

static uint32_t mcg_times(uint32_t x, uint32_t factor) { return (uint32_t)((uint64_t)x * factor % MCG_MODULUS); }

void cattn_torch_dropout_begin(struct cattn_torch_dropout *cursor, const struct cattn_torch_random *random,
                               double keep_probability) {
    cursor->mt = random->mt;
    cursor->threshold = threshold_of(keep_probability);
    cursor->probability = keep_probability;
    cursor->is_mkl = random->stream == CATTN_TORCH_MKL;
    cursor->mcg = 0;
    if (cursor->is_mkl) {
        draw_words(&cursor->mt, 1, &cursor->mcg);
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
    const struct cattn_row_kernels *kernels = cattn_row_kernels_for(CATTN_F32);
    uint32_t words[DROPOUT_WORDS];
    for (int64_t at = 0; at < n; at += DROPOUT_WORDS / 2) {
        const int64_t count = n - at < DROPOUT_WORDS / 2 ? n - at : DROPOUT_WORDS / 2;
        draw_words(&cursor->mt, 2 * count, words);
        kernels->torch_below(words, count, cursor->threshold, mask + at);
    }
}

void cattn_torch_dropout_skip(struct cattn_torch_dropout *cursor, int64_t n) {
    if (!cursor->is_mkl) {
        draw_words(&cursor->mt, 2 * n, NULL);
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
