/* torch.inc.h -- the loops of PyTorch's CPU generator: blocks of the Mersenne Twister, words to numbers, dropout.
 *
 * Plain loops without branches, which compilers turn into vectors for the table's instruction set. Every FMA is written
 * as such and nothing else is contracted, so all tables give the same bits as PyTorch's AVX2 build. A "word" is
 * 32 bits of the twister; where PyTorch wants 64, the first word is the high one.
 */

/* ---- MT19937 ---- */

#define TWISTER_WORDS 624
#define TWISTER_MIDDLE 397

INLINE uint32_t twist(uint32_t upper, uint32_t lower, uint32_t far) {
    const uint32_t y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
    return far ^ (y >> 1) ^ ((0u - (lower & 1u)) & 0x9908b0dfu);
}

static void mt19937_block(uint32_t *s) {
    const int n = TWISTER_WORDS, m = TWISTER_MIDDLE;
    for (int i = 0; i < n - m; i++)
        s[i] = twist(s[i], s[i + 1], s[i + m]);
    for (int i = n - m; i < n - 1; i++)
        s[i] = twist(s[i], s[i + 1], s[i + m - n]);
    s[n - 1] = twist(s[n - 1], s[0], s[m - 1]);
}

static void mt19937_temper(const uint32_t *state, int n, uint32_t *words) {
    for (int i = 0; i < n; i++) {
        uint32_t y = state[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        words[i] = y ^ (y >> 18);
    }
}

/* ---- words to uniform numbers ---- */

/* The number in [0, 1) of one word (float32: 24 bits) or of two (float64: 53 bits). */
#if REAL_BITS == 32
#define WORDS_EACH 1
INLINE real unit(const uint32_t *words) { return (real)(int32_t)(words[0] & 0xffffffu) * 0x1p-24f; }
#else
#define WORDS_EACH 2
INLINE real unit(const uint32_t *words) {
    const uint64_t bits = (uint64_t)(words[0] & 0x1fffffu) << 32 | words[1];
    return (real)(int64_t)bits * 0x1p-53;
}
#endif

/* low + unit * (high - low); low where that rounds to high. */
static void torch_uniform(const uint32_t *words, int64_t n, double from, double to, void *numbers) {
    const real low = (real)from, high = (real)to, width = high - low;
    real *out = numbers;
    if (low == 0) { /* adding 0 changes nothing: the product alone is quicker where an FMA is a call */
        for (int64_t i = 0; i < n; i++) {
            const real x = unit(words + WORDS_EACH * i) * width;
            out[i] = x == high ? low : x;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const real x = REAL_FMA(unit(words + WORDS_EACH * i), width, low);
        out[i] = x == high ? low : x;
    }
}

/* 53 bits < threshold. High and low halves are compared apart, since vectors of 32-bit lanes can do that. */
static void torch_below(const uint32_t *words, int64_t n, uint64_t threshold, uint8_t *out) {
    const uint32_t high = (uint32_t)(threshold >> 32), low = (uint32_t)threshold;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = words[2 * i] & 0x1fffffu;
        out[i] = (uint8_t)((u < high) | ((u == high) & (words[2 * i + 1] < low)));
    }
}

/* ---- normal numbers: Box and Muller's method on blocks of 16 ---- */

#if REAL_BITS == 32

INLINE int32_t bits_of(float x) { return (int32_t)to_bits(x); }
INLINE float float_of(int32_t bits) { return from_bits((uint32_t)bits); }

/* Natural logarithm for 2^-24 <= x <= 1, from Moshier's Cephes. Choices are made by masks: a branch would keep
 * compilers from vectors. */
INLINE float log_cephes(float x) {
    float e = (float)((bits_of(x) >> 23) - 127) + 1.0f;
    x = float_of((bits_of(x) & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    const int32_t small = -(x < 0.707106781186547524f);
    const float once_more = float_of(bits_of(x) & small);
    x = x - 1.0f;
    e = e - float_of(bits_of(1.0f) & small);
    x = x + once_more;
    const float z = x * x;
    float y = 7.0376836292e-2f;
    y = cattn_fmaf(y, x, -1.1514610310e-1f);
    y = cattn_fmaf(y, x, 1.1676998740e-1f);
    y = cattn_fmaf(y, x, -1.2420140846e-1f);
    y = cattn_fmaf(y, x, 1.4249322787e-1f);
    y = cattn_fmaf(y, x, -1.6668057665e-1f);
    y = cattn_fmaf(y, x, 2.0000714765e-1f);
    y = cattn_fmaf(y, x, -2.4999993993e-1f);
    y = cattn_fmaf(y, x, 3.3333331174e-1f);
    y = cattn_fmaf(y * x, z, e * -2.12194440e-4f);
    y = cattn_fmaf(-z, 0.5f, y);
    return cattn_fmaf(e, 0.693359375f, x + y);
}

/* Sine and cosine for 0 <= x < 8192, from the same. */
INLINE void sincos_cephes(float x, float *sine, float *cosine) {
    const int32_t octant = ((int32_t)(x * 1.27323954473516f) + 1) & ~1;
    const float y = (float)octant;
    x = cattn_fmaf(y, -0.78515625f, x);
    x = cattn_fmaf(y, -2.4187564849853515625e-4f, x);
    x = cattn_fmaf(y, -3.77489497744594108e-8f, x);
    const float z = x * x;
    float c = 2.443315711809948e-5f;
    c = cattn_fmaf(c, z, -1.388731625493765e-3f);
    c = cattn_fmaf(c, z, 4.166664568298827e-2f);
    c = cattn_fmaf(c * z, z, -(z * 0.5f)) + 1.0f;
    float s = -1.9515295891e-4f;
    s = cattn_fmaf(s, z, 8.3321608736e-3f);
    s = cattn_fmaf(s, z, -1.6666654611e-1f);
    s = cattn_fmaf(s * z, x, x);
    const int32_t swap = -(octant >> 1 & 1), differ = (bits_of(s) ^ bits_of(c)) & swap;
    const int32_t sine_sign = (int32_t)((uint32_t)(octant & 4) << 29);
    const int32_t cosine_sign = (int32_t)((uint32_t)(~(octant - 2) & 4) << 29);
    *sine = float_of(bits_of(s) ^ differ ^ sine_sign);
    *cosine = float_of(bits_of(c) ^ differ ^ cosine_sign);
}

/* The first halves of all blocks of 16 are collected, and so are the second halves, so that the loop that computes is a
 * long one. Adding 0 turns a product of -0 into +0, as PyTorch's "* deviation + mean" does. */
static void torch_normal(const uint32_t *words, int64_t n, void *numbers) {
    float first[CATTN_TORCH_CHUNK / 2], second[CATTN_TORCH_CHUNK / 2], *out = numbers;
    for (int64_t i = 0; i < n / 2; i += 8) {
        for (int j = 0; j < 8; j++)
            first[i + j] = unit(words + 2 * i + j);
        for (int j = 0; j < 8; j++)
            second[i + j] = unit(words + 2 * i + 8 + j);
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

#else

/* The C library's logarithm, sine and cosine, as in PyTorch. */
static void torch_normal(const uint32_t *words, int64_t n, void *numbers) {
    double *out = numbers;
    for (int64_t block = 0; block < n; block += 16) {
        for (int j = 0; j < 8; j++) {
            const uint32_t *w = words + 2 * (block + j);
            const double radius = sqrt(-2.0 * log(1.0 - unit(w))), theta = 6.283185307179586 * unit(w + 16);
            out[block + j] = radius * cos(theta) + 0.0;
            out[block + j + 8] = radius * sin(theta) + 0.0;
        }
    }
}

#endif

/* ---- dropout ---- */

/* Dropped elements are +0 whatever they were. With unit strides that is the product's bits AND a mask, which compilers
 * make vectors of, in place so that they need not ask whether x and out overlap. */
static void torch_drop(int64_t n, const void *from, int64_t x_stride, const uint8_t *mask, double keep_scale, void *to,
                       int64_t out_stride) {
    const real *x = from, scale = (real)keep_scale;
    real *out = to;
    if (x_stride != 1 || out_stride != 1) {
        for (int64_t i = 0; i < n; i++)
            out[i * out_stride] = mask[i] ? x[i * x_stride] * scale : 0;
        return;
    }
    if (out != x)
        memcpy(out, x, (size_t)n * sizeof *out);
    for (int64_t i = 0; i < n; i++)
        out[i] = from_bits(to_bits(out[i] * scale) & ((real_bits)0 - mask[i]));
}
