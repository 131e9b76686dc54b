/* rope_frequencies.c -- see rope_frequencies.h.
 *
 * The formulas come from Hugging Face transformers (modeling_rope_utils), computed in double instead of float. The
 * logarithm is our own, because the C library's differs between platforms in the last bit. It has some 90 bits,
 * so that a frequency is exact to less than an ULP however large its exponent is.
 */
#include "rope_frequencies.h"

#include <math.h>

#include "../kernels/fma.h"

#define TWO_PI 0x1.921fb54442d18p+2
/* ln 2 in two parts; the first has 42 bits, so that its product with an exponent is exact */
#define LN2_HIGH 0x1.62e42fefa3800p-1
#define LN2_LOW 0x1.ef35793c76730p-45

/* A number with twice the digits of a double: the sum of both. */
struct pair {
    double high, low;
};

static struct pair add(struct pair a, struct pair b) {
    double error, low;
    const double high = cattn_two_sum(a.high, b.high, &error);
    const double sum = cattn_two_sum(high, error + (a.low + b.low), &low);
    return (struct pair){sum, low};
}

static struct pair multiply(struct pair a, struct pair b) {
    double error, low;
    const double high = cattn_two_product(a.high, b.high, &error);
    const double product = cattn_two_sum(high, error + (a.high * b.low + a.low * b.high), &low);
    return (struct pair){product, low};
}

static struct pair divide(struct pair a, struct pair b) {
    double error, low;
    const double quotient = a.high / b.high, product = cattn_two_product(quotient, b.high, &error);
    const double rest = ((a.high - product) - error) + (a.low - quotient * b.low);
    const double high = cattn_two_sum(quotient, rest / b.high, &low);
    return (struct pair){high, low};
}

/* The natural logarithm of a positive normal number 2^e m with m from sqrt(1/2) to sqrt(2): e ln 2 + 2 atanh(s) with
 * s = (m - 1) / (m + 1). Then s^2 < 0.0295, and the terms of the series that are left out are below 2^-90. */
static struct pair logarithm(double x) {
    int exponent;
    double low, m = frexp(x, &exponent);
    if (m < 0x1.6a09e667f3bcdp-1) {
        m *= 2;
        exponent--;
    }
    const double high = cattn_two_sum(m, 1, &low);
    const struct pair s = divide((struct pair){m - 1, 0}, (struct pair){high, low}), z = multiply(s, s);
    struct pair series = {0, 0};
    for (int k = 35; k >= 1; k -= 2)
        series = add(multiply(series, z), divide((struct pair){1, 0}, (struct pair){k, 0}));
    const struct pair twice = {2 * s.high, 2 * s.low};
    const struct pair whole = add((struct pair){exponent * LN2_HIGH, 0}, (struct pair){exponent * LN2_LOW, 0});
    return add(whole, multiply(twice, series));
}

/* ---- scalings ---- */

/* The factor of the scores that makes up for a context that is `scale` times as long, as a factor of the rows. */
static double yarn_mscale(double scale, double mscale) {
    return scale <= 1 ? 1 : 0.1 * mscale * logarithm(scale).high + 1;
}

/* The index of the frequency that turns this often within the original length. */
static double yarn_index(const struct cattn_rope_params *p, double rotations) {
    const double turns = logarithm(p->scaling.original_length / (rotations * TWO_PI)).high;
    return (double)p->rotary_dim * turns / (2 * logarithm(p->theta).high);
}

static void settle_yarn(const struct cattn_rope_params *p, struct cattn_rope_law *law) {
    const struct cattn_rope_scaling *s = &p->scaling;
    double low = yarn_index(p, s->beta_fast), high = yarn_index(p, s->beta_slow);
    if (s->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    law->ramp_low = low > 0 ? low : 0;
    law->ramp_high = high < (double)p->rotary_dim - 1 ? high : (double)p->rotary_dim - 1;
    if (law->ramp_low == law->ramp_high)
        law->ramp_high += 0.001; /* as transformers does */
    if (s->attention_factor > 0)
        law->attention_factor = s->attention_factor;
    else if (s->mscale != 0 && s->mscale_all_dim != 0)
        law->attention_factor = yarn_mscale(s->factor, s->mscale) / yarn_mscale(s->factor, s->mscale_all_dim);
    else
        law->attention_factor = yarn_mscale(s->factor, 1);
}

/* What theta is multiplied by, to the power of rotary_dim / (rotary_dim - 2). */
static double dynamic_ratio(const struct cattn_rope_params *p) {
    const struct cattn_rope_scaling *s = &p->scaling;
    const double length = p->length > s->original_length ? p->length : s->original_length;
    return s->factor * length / s->original_length - (s->factor - 1);
}

void cattn_rope_settle(const struct cattn_rope_params *p, struct cattn_rope_law *law) {
    const double dim = (double)p->rotary_dim;
    *law = (struct cattn_rope_law){.n = p->rotary_dim / 2, .attention_factor = 1, .scaling = p->scaling};
    if (law->n == 0)
        return;
    struct pair base = logarithm(p->theta);
    if (p->scaling.type == CATTN_ROPE_DYNAMIC) {
        const struct pair power = divide((struct pair){dim, 0}, (struct pair){dim - 2, 0});
        base = add(base, multiply(power, logarithm(dynamic_ratio(p))));
    }
    const struct pair step = divide((struct pair){2 * base.high, 2 * base.low}, (struct pair){dim, 0});
    /* 26 bits move from the first part to the second: adding and subtracting rounds to the others */
    const double shifter = step.high * (0x1p26 + 1);
    law->step_high = shifter - (shifter - step.high);
    law->step_low = (step.high - law->step_high) + step.low;
    if (p->scaling.type == CATTN_ROPE_YARN)
        settle_yarn(p, law);
}

/* The frequency of a long wave is divided by the factor; of a short one it stays; between them lies a ramp. */
static double scale_llama3(const struct cattn_rope_scaling *s, double frequency) {
    const double wave = TWO_PI / frequency;
    if (wave > s->original_length / s->low_freq_factor)
        return frequency / s->factor;
    if (wave < s->original_length / s->high_freq_factor)
        return frequency;
    const double smooth = (s->original_length / wave - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return (1 - smooth) * frequency / s->factor + smooth * frequency;
}

static double scale_yarn(const struct cattn_rope_law *law, int64_t i, double frequency) {
    double ramp = ((double)i - law->ramp_low) / (law->ramp_high - law->ramp_low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return frequency / law->scaling.factor * ramp + frequency * (1 - ramp);
}

void cattn_rope_frequencies(const struct cattn_rope_law *law, const struct cattn_kernels *kernels,
                            double *frequencies) {
    kernels->rope_frequencies(law->n, law->step_high, law->step_low, frequencies);
    for (int64_t i = 0; i < law->n && law->scaling.type >= CATTN_ROPE_LINEAR; i++) {
        if (law->scaling.type == CATTN_ROPE_LINEAR)
            frequencies[i] /= law->scaling.factor;
        else if (law->scaling.type == CATTN_ROPE_YARN)
            frequencies[i] = scale_yarn(law, i, frequencies[i]);
        else if (law->scaling.type == CATTN_ROPE_LLAMA3)
            frequencies[i] = scale_llama3(&law->scaling, frequencies[i]);
    }
}
