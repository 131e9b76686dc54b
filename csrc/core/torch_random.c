/* torch_random.c -- uniform, normal, integer and Bernoulli numbers from a stream of words; see torch_random.h.
 *
 * A "word" is 32 bits of the twister. Where PyTorch wants 64, the first word is the high one. Words come in chunks that
 * stay in the first cache, then one loop without branches turns them into numbers. All FMAs are written as such;
 * nothing else is contracted.
 */
#include "torch_random.h"

#include <math.h>
#include <string.h>

#include "parallel.h"
#include "variants.h"

/* Words of a chunk (a multiple of 32), and elements between two looks at the clock. */
#define CHUNK 1024
#define PIECE 16384

/* ---- words to numbers ---- */

CATTN_ALWAYS_INLINE float u24(uint32_t word) { return (float)(int32_t)(word & 0xffffffu) * 0x1p-24f; }

CATTN_ALWAYS_INLINE double u53(const uint32_t *words) {
    const uint64_t bits = (uint64_t)(words[0] & 0x1fffffu) << 32 | words[1];
    return (double)(int64_t)bits * 0x1p-53;
}

/* low + u (high - low), low where that rounds to high */
CATTN_ALWAYS_INLINE void uniform32_body(const uint32_t *words, int64_t n, float low, float high, float *out) {
    const float width = high - low;
    if (low == 0.0f) { /* one rounding either way */
        for (int64_t i = 0; i < n; i++) {
            const float x = u24(words[i]) * width;
            out[i] = x == high ? low : x;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const float x = fmaf(u24(words[i]), width, low);
        out[i] = x == high ? low : x;
    }
}
CATTN_VARIANTS(uniform32, (const uint32_t *words, int64_t n, float low, float high, float *out),
               (words, n, low, high, out))

CATTN_ALWAYS_INLINE void uniform64_body(const uint32_t *words, int64_t n, double low, double high, double *out) {
    const double width = high - low;
    if (low == 0.0) {
        for (int64_t i = 0; i < n; i++) {
            const double x = u53(words + 2 * i) * width;
            out[i] = x == high ? low : x;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const double x = fma(u53(words + 2 * i), width, low);
        out[i] = x == high ? low : x;
    }
}
CATTN_VARIANTS(uniform64, (const uint32_t *words, int64_t n, double low, double high, double *out),
               (words, n, low, high, out))

/* 53 bits < threshold, by halves: vectors of 32-bit lanes can do that. */
CATTN_ALWAYS_INLINE void below_body(const uint32_t *words, int64_t n, uint64_t threshold, uint8_t *out) {
    const uint32_t high = (uint32_t)(threshold >> 32), low = (uint32_t)threshold;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = words[2 * i] & 0x1fffffu;
        out[i] = (uint8_t)((u < high) | ((u == high) & (words[2 * i + 1] < low)));
    }
}
CATTN_VARIANTS(below, (const uint32_t *words, int64_t n, uint64_t threshold, uint8_t *out), (words, n, threshold, out))

/* The number of 53-bit integers k with k 2^-53 < p. */
static uint64_t threshold_of(double p) { return (uint64_t)ceil(p * 0x1p53); }

/* ---- normal numbers, 16 at a time: Box and Muller's, with the logarithm, sine and cosine of Moshier's Cephes ---- */

CATTN_ALWAYS_INLINE int32_t bits_of(float x) {
    union {
        float f;
        int32_t i;
    } u = {.f = x};
    return u.i;
}

CATTN_ALWAYS_INLINE float float_of(int32_t bits) {
    union {
        int32_t i;
        float f;
    } u = {.i = bits};
    return u.f;
}

/* Natural logarithm for 2^-24 <= x <= 1. Choices are made by masks here: a branch would cost the vectors. */
CATTN_ALWAYS_INLINE float log_cephes(float x) {
    float e = (float)((bits_of(x) >> 23) - 127) + 1.0f;
    x = float_of((bits_of(x) & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    const int32_t small = -(x < 0.707106781186547524f);
    const float once_more = float_of(bits_of(x) & small);
    x = x - 1.0f;
    e = e - float_of(bits_of(1.0f) & small);
    x = x + once_more;
    const float z = x * x;
    float y = 7.0376836292e-2f;
    y = fmaf(y, x, -1.1514610310e-1f);
    y = fmaf(y, x, 1.1676998740e-1f);
    y = fmaf(y, x, -1.2420140846e-1f);
    y = fmaf(y, x, 1.4249322787e-1f);
    y = fmaf(y, x, -1.6668057665e-1f);
    y = fmaf(y, x, 2.0000714765e-1f);
    y = fmaf(y, x, -2.4999993993e-1f);
    y = fmaf(y, x, 3.3333331174e-1f);
    y = fmaf(y * x, z, e * -2.12194440e-4f);
    y = fmaf(-z, 0.5f, y);
    return fmaf(e, 0.693359375f, x + y);
}

/* Sine and cosine for 0 <= x < 8192. */
CATTN_ALWAYS_INLINE void sincos_cephes(float x, float *sine, float *cosine) {
    const int32_t octant = ((int32_t)(x * 1.27323954473516f) + 1) & ~1;
    const float y = (float)octant;
    x = fmaf(y, -0.78515625f, x);
    x = fmaf(y, -2.4187564849853515625e-4f, x);
    x = fmaf(y, -3.77489497744594108e-8f, x);
    const float z = x * x;
    float c = 2.443315711809948e-5f;
    c = fmaf(c, z, -1.388731625493765e-3f);
    c = fmaf(c, z, 4.166664568298827e-2f);
    c = fmaf(c * z, z, -(z * 0.5f)) + 1.0f;
    float s = -1.9515295891e-4f;
    s = fmaf(s, z, 8.3321608736e-3f);
    s = fmaf(s, z, -1.6666654611e-1f);
    s = fmaf(s * z, x, x);
    const int32_t swap = -(octant >> 1 & 1), differ = (bits_of(s) ^ bits_of(c)) & swap;
    const int32_t sine_sign = (int32_t)((uint32_t)(octant & 4) << 29);
    const int32_t cosine_sign = (int32_t)((uint32_t)(~(octant - 2) & 4) << 29);
    *sine = float_of(bits_of(s) ^ differ ^ sine_sign);
    *cosine = float_of(bits_of(c) ^ differ ^ cosine_sign);
}

/* n (a multiple of 16, at most a chunk) words to normal numbers. The halves of the blocks of 16 are brought together
 * first, so that the loop that computes is a long one. A product of -0 becomes +0, as by PyTorch's "* deviation +
 * mean". */
CATTN_ALWAYS_INLINE void normal32_body(const uint32_t *words, int64_t n, float *out) {
    float first[CHUNK / 2], second[CHUNK / 2];
    for (int64_t i = 0; i < n / 2; i += 8) {
        for (int j = 0; j < 8; j++)
            first[i + j] = u24(words[2 * i + j]);
        for (int j = 0; j < 8; j++)
            second[i + j] = u24(words[2 * i + 8 + j]);
    }
    for (int64_t i = 0; i < n / 2; i++) {
        const float radius = sqrtf(-2.0f * log_cephes(1.0f - first[i]));
        float sine, cosine;
        sincos_cephes(6.283185307179586f * second[i], &sine, &cosine);
        first[i] = radius * cosine + 0.0f;
        second[i] = radius * sine + 0.0f;
    }
    for (int64_t i = 0; i < n / 2; i += 8) {
        memcpy(out + 2 * i, first + i, 8 * sizeof *out);
        memcpy(out + 2 * i + 8, second + i, 8 * sizeof *out);
    }
}
CATTN_VARIANTS(normal32, (const uint32_t *words, int64_t n, float *out), (words, n, out))

static void normal64(const uint32_t *words, int64_t n, double *out) {
    for (int64_t block = 0; block < n; block += 16) {
        for (int j = 0; j < 8; j++) {
            const uint32_t *w = words + 2 * (block + j);
            const double radius = sqrt(-2.0 * log(1.0 - u53(w))), theta = 6.283185307179586 * u53(w + 16);
            out[block + j] = radius * cos(theta) + 0.0;
            out[block + j + 8] = radius * sin(theta) + 0.0;
        }
    }
}

/* One of a pair; the other waits for the next call, which may be much later. */
static double normal_single(struct cattn_torch_random *random) {
    if (random->has_normal) {
        random->has_normal = false;
        return random->normal + 0.0;
    }
    uint32_t words[4];
    cattn_mt19937_draw(&random->mt, 4, words);
    const double radius = sqrt(-2.0 * log1p(-u53(words + 2))), theta = 6.283185307179586 * u53(words);
    random->normal = radius * sin(theta);
    random->has_normal = true;
    return radius * cos(theta) + 0.0;
}

/* ---- filling ---- */

struct fill_run {
    struct cattn_torch_random *random;
    const struct cattn_torch_fill *fill;
};

static void *element(const struct cattn_torch_fill *fill, void *base, int64_t i) {
    return (char *)base + i * (fill->dtype == CATTN_F32 ? 4 : 8);
}

static void integers(const uint32_t *words, int64_t n, uint64_t range, int64_t base, int64_t *out) {
    if (range < (uint64_t)1 << 28) {
        for (int64_t i = 0; i < n; i++)
            out[i] = (int64_t)(words[i] % (uint32_t)range) + base;
    } else {
        for (int64_t i = 0; i < n; i++) {
            const uint64_t r = ((uint64_t)words[2 * i] << 32 | words[2 * i + 1]) % range;
            out[i] = (int64_t)(r + (uint64_t)base);
        }
    }
}

static void bernoulli(const struct cattn_torch_fill *f, const uint32_t *words, int64_t at, int64_t n) {
    if (!f->probabilities) {
        uint8_t ones[CHUNK / 2];
        below(words, n, threshold_of(f->probability), ones);
        for (int64_t i = 0; i < n; i++) {
            if (f->dtype == CATTN_F32)
                ((float *)f->out)[at + i] = ones[i];
            else
                ((double *)f->out)[at + i] = ones[i];
        }
    } else if (f->dtype == CATTN_F32) {
        for (int64_t i = 0; i < n; i++)
            ((float *)f->out)[at + i] = u24(words[i]) < ((const float *)f->probabilities)[at + i] ? 1.0f : 0.0f;
    } else {
        for (int64_t i = 0; i < n; i++)
            ((double *)f->out)[at + i] = u53(words + 2 * i) < ((const double *)f->probabilities)[at + i] ? 1.0 : 0.0;
    }
}

static int words_each(const struct cattn_torch_fill *f) {
    switch (f->distribution) {
    case CATTN_TORCH_INTEGER:
        return f->range < (uint64_t)1 << 28 ? 1 : 2;
    case CATTN_TORCH_BERNOULLI:
        return f->probabilities && f->dtype == CATTN_F32 ? 1 : 2;
    default:
        return f->dtype == CATTN_F32 ? 1 : 2;
    }
}

/* Elements at .. at+n-1 from their words. */
static void convert(const struct cattn_torch_fill *f, const uint32_t *words, int64_t at, int64_t n) {
    void *out = element(f, f->out, at);
    const bool single = f->dtype == CATTN_F32;
    switch (f->distribution) {
    case CATTN_TORCH_UNIFORM:
        if (single)
            uniform32(words, n, (float)f->low, (float)f->high, out);
        else
            uniform64(words, n, f->low, f->high, out);
        return;
    case CATTN_TORCH_NORMAL:
        if (single)
            normal32(words, n, out);
        else
            normal64(words, n, out);
        return;
    case CATTN_TORCH_INTEGER:
        integers(words, n, f->range, f->base, (int64_t *)f->out + at);
        return;
    case CATTN_TORCH_BERNOULLI:
        bernoulli(f, words, at, n);
        return;
    case CATTN_TORCH_KEEP:
        return;
    }
}

/* Elements begin .. end-1; false: stopped. */
static bool fill_range(const struct fill_run *run, int64_t begin, int64_t end, struct cattn_worker *worker) {
    const int each = words_each(run->fill), chunk = CHUNK / each;
    uint32_t words[CHUNK];
    for (int64_t at = begin; at < end; at += chunk) {
        const int64_t n = end - at < chunk ? end - at : chunk;
        if (at % PIECE == 0 && cattn_should_stop(worker))
            return false;
        cattn_mt19937_draw(&run->random->mt, n * each, words);
        convert(run->fill, words, at, n);
    }
    return true;
}

/* Below 16 one by one. From 16 on whole blocks; PyTorch also draws for what is left over, throws that away and draws
 * the last 16 once more. */
static void fill_normal(const struct fill_run *run, struct cattn_worker *worker) {
    const struct cattn_torch_fill *f = run->fill;
    const int64_t rest = f->n % 16;
    if (f->n < 16) {
        for (int64_t i = 0; i < f->n; i++) {
            const double x = normal_single(run->random);
            if (f->dtype == CATTN_F32)
                ((float *)f->out)[i] = (float)x;
            else
                ((double *)f->out)[i] = x;
        }
    } else if (fill_range(run, 0, f->n - rest, worker) && rest > 0) {
        cattn_mt19937_skip(&run->random->mt, rest * words_each(f));
        fill_range(run, f->n - 16, f->n, worker);
    }
}

static void fill_keep(const struct fill_run *run, struct cattn_worker *worker) {
    const struct cattn_torch_fill *f = run->fill;
    struct cattn_torch_keep keep;
    cattn_torch_keep_begin(&keep, run->random, f->probability);
    cattn_torch_keep_skip(&keep, f->skip);
    for (int64_t at = 0; at < f->n && !cattn_should_stop(worker); at += PIECE)
        cattn_torch_keep_next(&keep, f->n - at < PIECE ? f->n - at : PIECE, (uint8_t *)f->out + at);
    cattn_torch_keep_end(&keep, run->random);
}

static void fill_task(void *context, int64_t task, struct cattn_worker *worker) {
    const struct fill_run *run = context;
    (void)task; /* the only one: the words come in sequence */
    if (run->fill->distribution == CATTN_TORCH_NORMAL)
        fill_normal(run, worker);
    else if (run->fill->distribution == CATTN_TORCH_KEEP)
        fill_keep(run, worker);
    else
        fill_range(run, 0, run->fill->n, worker);
}

enum cattn_status cattn_torch_fill(struct cattn_torch_random *random, const struct cattn_torch_fill *fill) {
    struct fill_run run = {random, fill};
    return cattn_parallel_for(fill->n > 0, 1, 0, fill_task, &run, &fill->poll);
}

/* ---- dropout masks ---- */

/* The multiplicative generator of L'Ecuyer (1999) that Intel's MKL calls MCG31m1. */
#define MCG_MODULUS 0x7fffffffu
#define MCG_MULTIPLIER 1132489760u

static uint32_t mcg_times(uint32_t x, uint32_t factor) { return (uint32_t)((uint64_t)x * factor % MCG_MODULUS); }

void cattn_torch_keep_begin(struct cattn_torch_keep *keep, const struct cattn_torch_random *random,
                            double keep_probability) {
    keep->mt = random->mt;
    keep->threshold = threshold_of(keep_probability);
    keep->probability = keep_probability;
    keep->is_mkl = random->stream == CATTN_TORCH_MKL;
    keep->mcg = 0;
    if (keep->is_mkl) {
        cattn_mt19937_draw(&keep->mt, 1, &keep->mcg);
        keep->mcg %= MCG_MODULUS;
        keep->mcg += keep->mcg == 0;
    }
}

void cattn_torch_keep_next(struct cattn_torch_keep *keep, int64_t n, uint8_t *kept) {
    if (keep->is_mkl) {
        for (int64_t i = 0; i < n; i++) {
            kept[i] = keep->mcg / (double)MCG_MODULUS < keep->probability;
            keep->mcg = mcg_times(keep->mcg, MCG_MULTIPLIER);
        }
        return;
    }
    uint32_t words[CHUNK];
    for (int64_t at = 0; at < n; at += CHUNK / 2) {
        const int64_t count = n - at < CHUNK / 2 ? n - at : CHUNK / 2;
        cattn_mt19937_draw(&keep->mt, 2 * count, words);
        below(words, count, keep->threshold, kept + at);
    }
}

void cattn_torch_keep_skip(struct cattn_torch_keep *keep, int64_t n) {
    if (!keep->is_mkl) {
        cattn_mt19937_skip(&keep->mt, 2 * n);
        return;
    }
    uint32_t power = MCG_MULTIPLIER; /* to the 2^k */
    for (; n > 0; n >>= 1, power = mcg_times(power, power)) {
        if (n & 1)
            keep->mcg = mcg_times(keep->mcg, power);
    }
}

void cattn_torch_keep_end(const struct cattn_torch_keep *keep, struct cattn_torch_random *random) {
    random->mt = keep->mt;
}

/* ---- seed and state ---- */

void cattn_torch_seed(struct cattn_torch_random *random, uint64_t seed) {
    cattn_mt19937_seed(&random->mt, (uint32_t)seed);
    random->seed = seed;
    random->has_normal = false;
    random->normal = 0.0;
    memset(random->reserved, 0, sizeof random->reserved);
}

/* What torch.get_rng_state() returns: the layout of torch 0.4, and a float's cache that CPU code never fills. */
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
