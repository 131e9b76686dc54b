/* activation.inc.h -- gelu, its approximation by tanh, silu, and their slopes, for a run of elements.
 *
 * Each is x times a probability that falls to 0 where x is negative. It is computed from its own exponential there, not
 * as 1 - ..., so that no digit cancels: relative errors stay small down to the smallest subnormal number. Infinities
 * get the limits of the functions. docs/bit_contract.md ("Activations") has the formulas.
 */

#if REAL_BITS == 32
#define CUBIC_FAR 12.0f /* the cubic polynomial below exceeds LOGISTIC_FAR there */
#define CUBIC_1 0x1.988454p+0f
#define CUBIC_1_LOW -0x1.857936p-25f
#define CUBIC_3 0x1.2444f2p-4f
#define CUBIC_3_LOW 0x1.49b16ap-29f
#define THREE_CUBIC_3 0x1.b6676cp-3f
#define DENSITY_0 0x1.988454p-2f /* 1 / sqrt(2 pi) */
#else
#define CUBIC_FAR 22.0
#define CUBIC_1 0x1.9884533d43651p+0 /* 2 sqrt(2 / pi) */
#define CUBIC_1_LOW -0x1.cbc0d30ebfd15p-54
#define CUBIC_3 0x1.2444f2a4d8b4bp-4 /* 0.044715 times that */
#define CUBIC_3_LOW -0x1.6c843a29d1c70p-61
#define THREE_CUBIC_3 0x1.b6676bf7450f0p-3
#define DENSITY_0 0x1.9884533d43651p-2
#endif

/* Vectors that are computed side by side, step by step: each step of one waits for the step before it. */
#define ACTIVATION_WAYS (REGISTERS == 32 ? 4 : 2)

/* A vector of elements on its way. e = exp(-v) = (1 + m) * 2^n, where v is not negative. */
struct activation {
    vf x;
    vm negative; /* where x is */
    vf inside;   /* x, -|x| or |x|, up to where the functions have reached their limits */
    vf r, n, m;  /* -v = n ln 2 + r, and m = e^r - 1 */
    vf divisor;
};

/* ---- silu, and gelu by tanh: x / (1 + exp(-v)), where v is x or a cubic polynomial of it ---- */

INLINE void begin_silu(struct activation *a) {
    a->inside = vf_max(vf_set1(-LOGISTIC_FAR), vf_select(a->negative, a->x, -a->x));
    a->r = reduce(a->inside, &a->n);
}

/* The polynomial is 2 sqrt(2 / pi) (x + 0.044715 x^3). `low` has the digits that v lacks: an absolute error of an
 * exponent is a relative one of the power. */
INLINE void begin_gelu_tanh(struct activation *a) {
    const vf c1 = vf_set1(CUBIC_1), c3 = vf_set1(CUBIC_3), least = vf_set1(-CUBIC_FAR);
    const vf x = -vf_max(least, -vf_max(least, a->x)), s = x * x, s_low = product_error(x, x, s);
    const vf p = c3 * s, p_low = product_error(c3, s, p) + vf_fma(c3, s_low, vf_set1(CUBIC_3_LOW) * s);
    const vf sum = p + c1, c1_part = sum - p;
    const vf sum_low = ((p - (sum - c1_part)) + (c1 - c1_part)) + (p_low + vf_set1(CUBIC_1_LOW));
    const vf v = x * sum, low = vf_fma(x, sum_low, product_error(x, sum, v));
    const vf r = reduce(vf_select(a->negative, v, -v), &a->n);
    a->r = r + vf_select(a->negative, low, -low);
    a->inside = x;
}

INLINE vf times_logistic(const struct activation *a) {
    vf e;
    const vf over = vf_select(a->negative, vf_fma(a->inside, a->m, a->inside), a->x);
    return scale_far(vf_div(over, logistic_divisor(a->m, a->n, &e)), vf_select(a->negative, a->n, vf_set1(0)));
}

/* The derivative of that, where z is x times the derivative of v: with p the logistic function, p (1 + z (1 - p)). */
INLINE vf logistic_slope(const struct activation *a, vf z) {
    const vf one = vf_set1(1);
    vf e;
    const vf inverse = vf_div(one, logistic_divisor(a->m, a->n, &e));
    const vf other = vf_select(a->negative, inverse, e * inverse);
    const vf p = vf_select(a->negative, vf_fma(inverse, a->m, inverse), inverse);
    return scale_far(p * vf_fma(z, other, one), vf_select(a->negative, a->n, vf_set1(0)));
}

INLINE vf silu_slope(const struct activation *a) {
    return logistic_slope(a, vf_select(a->negative, a->inside, -a->inside));
}

INLINE vf gelu_tanh_slope(const struct activation *a) {
    const vf rate = vf_fma(a->inside * a->inside, vf_set1(THREE_CUBIC_3), vf_set1(CUBIC_1));
    return logistic_slope(a, a->inside * rate);
}

/* ---- gelu: x times the normal distribution function; its tail beyond |x| is e / divisor ---- */

INLINE void begin_gelu(struct activation *a) {
    const vf minus_half = vf_set1((real)-0.5), x = vf_min(vf_set1(TAIL_FAR), vf_abs(a->x)), square = x * x;
    const vf r = reduce(square * minus_half, &a->n);
    a->r = vf_fma(product_error(x, x, square), minus_half, r);
    a->inside = x;
}

/* The larger one of x and 0, less |x| times the tail. Zeros are negative, but for x = +0. */
INLINE vf gelu(const struct activation *a) {
    const vf tail = scale_far(vf_div(vf_fma(a->inside, a->m, a->inside), a->divisor), a->n);
    return vf_max(vf_set1((real)-0.0), a->x) - tail;
}

/* The distribution function plus x times the density; for negative x that is 1 minus the value for -x. */
INLINE vf gelu_slope(const struct activation *a) {
    const vf sum = vf_fma(a->inside, vf_set1(-DENSITY_0), vf_div(vf_set1(1), a->divisor));
    const vf scaled_sum = scale_far(vf_fma(sum, a->m, sum), a->n);
    return vf_select(a->negative, scaled_sum, vf_set1(1) - scaled_sum);
}

/* ---- a run of elements ---- */

INLINE void activation_begin(enum cattn_activation which, struct activation *a) {
    a->negative = vf_lt(a->x, vf_set1(0));
    if (which == CATTN_GELU)
        begin_gelu(a);
    else if (which == CATTN_GELU_TANH)
        begin_gelu_tanh(a);
    else
        begin_silu(a);
}

INLINE vf activation_end(enum cattn_activation which, bool slope, const struct activation *a) {
    if (which == CATTN_GELU)
        return slope ? gelu_slope(a) : gelu(a);
    if (!slope)
        return times_logistic(a);
    return which == CATTN_GELU_TANH ? gelu_tanh_slope(a) : silu_slope(a);
}

/* n elements from k on, in `ways` vectors. All arguments but k and n are constants. */
INLINE void activate(const struct cattn_activation_row *row, enum cattn_activation which, bool slope, int ways,
                     int64_t k, int n) {
    const real *x = (const real *)row->x + k, *grad = slope ? (const real *)row->grad + k : NULL;
    struct activation a[ACTIVATION_WAYS];
    UNROLLED(i, ways) {
        a[i].x = load_strided(x + i * LANES, 1, n);
        activation_begin(which, &a[i]);
    }
    UNROLLED(i, ways)
        a[i].m = exp_rest(a[i].r);
    if (which == CATTN_GELU) {
        UNROLLED(i, ways)
            a[i].divisor = inverse_tail(a[i].inside);
    }
    UNROLLED(i, ways) {
        vf y = activation_end(which, slope, &a[i]);
        if (slope)
            y = load_strided(grad + i * LANES, 1, n) * y;
        store_strided((real *)row->out + k + i * LANES, 1, with_one_nan(y), n);
    }
}

INLINE void activate_run(const struct cattn_activation_row *row, enum cattn_activation which, bool slope) {
    int64_t k = 0;
    for (; k + ACTIVATION_WAYS * LANES <= row->n; k += ACTIVATION_WAYS * LANES)
        activate(row, which, slope, ACTIVATION_WAYS, k, LANES);
    for (; k < row->n; k += LANES)
        activate(row, which, slope, 1, k, (int)min64(LANES, row->n - k));
}

/* One copy of the loops for each function. */
#define ACTIVATION(which, name)                                                                                        \
    NOINLINE void name##_forward(const struct cattn_activation_row *row) { activate_run(row, which, false); }          \
    NOINLINE void name##_backward(const struct cattn_activation_row *row) { activate_run(row, which, true); }
ACTIVATION(CATTN_GELU, gelu)
ACTIVATION(CATTN_GELU_TANH, gelu_tanh)
ACTIVATION(CATTN_SILU, silu)

static void activation_row(const struct cattn_activation_row *row) {
    static void (*const runs[][2])(const struct cattn_activation_row *) = {
        [CATTN_GELU] = {gelu_forward, gelu_backward},
        [CATTN_GELU_TANH] = {gelu_tanh_forward, gelu_tanh_backward},
        [CATTN_SILU] = {silu_forward, silu_backward},
    };
    runs[row->which][row->grad != NULL](row);
}
