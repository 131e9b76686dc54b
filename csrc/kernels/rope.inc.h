/* rope.inc.h -- rotary positions: inverse frequencies, sines and cosines (tables of float64), and rotated rows.
 *
 * Products and sums are rounded one by one, never by an FMA: the bits are the same as of x * cos + rotate_half(x) * sin
 * with NumPy, from the same cosines and sines. docs/bit_contract.md ("Rotary positions and norms") has the law.
 */

/* ---- sine, cosine and powers in double, for the angles of rotary positions: the tables of float64 only ---- */

/* Nothing here uses an FMA, so the bits are the same on every table, also on those without that instruction. Bounds of
 * the errors of sine, cosine and powers are in docs/accuracy.md.
 *
 * An angle x is reduced to x - n pi/2 = high + low with n = round(x 2/pi). Up to SINCOS_NEAR, n has at most 20 bits and
 * pi/2 is cut into three parts of 33 bits and a fourth of 53: the first three products are exact, and the errors of the
 * subtractions are kept. 152 bits of pi/2 are enough, because no double of this size is closer than 2^-61 to a multiple
 * of pi/2. Farther out, `reduce_far` multiplies the integer x with 192 bits of 2/pi in integers (M. Payne and R. Hanek,
 * "Radian reduction for trigonometric functions", SIGNUM Newsletter 18, 1983). Then follow minimax polynomials (Remez)
 * of the sine's relative and the cosine's absolute error, on |high| <= pi/4: 2^-58 and 2^-64.
 */

#if REAL_BITS == 64

#define SINCOS_NEAR 0x1p20
#define SINCOS_FAR 0x1p53 /* the largest angle */
#define TWO_OVER_PI 0x1.45f306dc9c883p-1
static const real pi_half[] = {0x1.921fb544p+0, 0x1.0b4611a6p-34, 0x1.3198a2ep-69, 0x1.b839a252049c1p-104};
static const real sin_poly[] = {-0x1.5555555555549p-3, 0x1.111111110f87ap-7,   -0x1.a01a019c11996p-13,
                                0x1.71de3577b6ac2p-19, -0x1.ae5e663a9d3b1p-26, 0x1.5d9300ffafae1p-33};
static const real cos_poly[] = {0x1.555555555554cp-5,   -0x1.6c16c16c1517ep-10, 0x1.a01a019cb1bdap-16,
                                -0x1.27e4f809f09efp-22, 0x1.1ee9ebe931b32p-29,  -0x1.8fae9c7b1e002p-37};

/* An angle without its whole quarter turns. */
struct reduced {
    vf quarters; /* their number, or a number that differs by a multiple of 4 */
    vf high, low;
};

/* a + b and the rounding error of it, as cattn_two_sum. */
INLINE vf vf_two_sum(vf a, vf b, vf *error) {
    const vf sum = a + b, b_part = sum - a;
    *error = (a - (sum - b_part)) + (b - b_part);
    return sum;
}

/* The nearest integer, ties to even, of a number below 2^51. */
INLINE vf nearest(vf x) {
    const vf magic = vf_set1(0x1.8p52);
    return (x + magic) - magic;
}

INLINE struct reduced reduce_near(vf x) {
    const vf n = nearest(x * vf_set1(TWO_OVER_PI));
    vf error, more, low, high = x - n * vf_set1(pi_half[0]);
    high = vf_two_sum(high, -(n * vf_set1(pi_half[1])), &error);
    high = vf_two_sum(high, -(n * vf_set1(pi_half[2])), &more);
    high = vf_two_sum(high, (error + more) - n * vf_set1(pi_half[3]), &low);
    return (struct reduced){n, high, low};
}

/* One angle x with SINCOS_NEAR <= |x| <= SINCOS_FAR. */
static void reduce_far(real x, real *quarters, real *high, real *low) {
    /* the first 192 bits after the point, the lowest limb first */
    static const uint32_t two_over_pi[6] = {0x3c439041, 0xdb629599, 0xf534ddc0, 0xfc2757d1, 0x4e441529, 0xa2f9836e};
    int exponent;
    const uint64_t mantissa = (uint64_t)ldexp(frexp(fabs(x), &exponent), 53);
    /* |x| as an integer in units of 2^-32: the mantissa, shifted by up to 33 bits */
    const int words = (exponent - 21) / 32, bits = (exponent - 21) % 32;
    const uint64_t lower = (mantissa & 0xffffffff) << bits, upper = ((mantissa >> 32) << bits) + (lower >> 32);
    uint32_t factor[4] = {0}, product[9] = {0};
    factor[words] = (uint32_t)lower;
    factor[words + 1] = (uint32_t)upper;
    factor[words + 2] = (uint32_t)(upper >> 32);
    for (int i = 0; i < 3; i++) {
        uint64_t carry = 0;
        for (int j = 0; j < 6; j++) {
            carry += (uint64_t)factor[i] * two_over_pi[j] + product[i + j];
            product[i + j] = (uint32_t)carry;
            carry >>= 32;
        }
        product[i + 6] = (uint32_t)carry;
    }
    /* Quarter turns have their point below product[7]. The nearest multiple of pi/2 may be the next one: then the
     * fraction is 1 minus what it was, to 2^-128. */
    const bool next = product[6] >> 31;
    const uint32_t flip = next ? 0xffffffff : 0;
    real part[4], low_error, high_error, rest, error;
    for (int i = 0; i < 4; i++)
        part[i] = (real)(product[6 - i] ^ flip);
    const real first = cattn_two_sum(part[0] * 0x1p-32, part[1] * 0x1p-64, &high_error);
    const real second = cattn_two_sum(part[2] * 0x1p-96, part[3] * 0x1p-128, &low_error);
    const real fraction = cattn_two_sum(first, second, &rest);
    rest += high_error + low_error;
    const real turned = cattn_two_product(fraction, 0x1.921fb54442d18p+0, &error); /* with pi/2 in two parts */
    error += fraction * 0x1.1a62633145c07p-54 + rest * 0x1.921fb54442d18p+0;
    *high = cattn_two_sum(turned, error, low);
    *quarters = (real)(product[7] & 3) + (real)next;
    if (next != (x < 0)) {
        *high = -*high;
        *low = -*low;
    }
    if (x < 0)
        *quarters = -*quarters;
}

/* Replaces the lanes that are far. Takes no vectors, which have no fixed calling convention (simd_gnu.h). */
NOINLINE void reduce_far_lanes(const real *angle, real *quarters, real *high, real *low) {
    for (int i = 0; i < LANES; i++)
        if (fabs(angle[i]) >= SINCOS_NEAR)
            reduce_far(angle[i], &quarters[i], &high[i], &low[i]);
}

INLINE struct reduced reduce_angles(vf x) {
    struct reduced r = reduce_near(x);
    if (vm_any(vm_not(vf_lt(vf_max(x, -x), vf_set1(SINCOS_NEAR))))) {
        real angle[LANES], quarters[LANES], high[LANES], low[LANES];
        vf_storeu(angle, x);
        vf_storeu(quarters, r.quarters);
        vf_storeu(high, r.high);
        vf_storeu(low, r.low);
        reduce_far_lanes(angle, quarters, high, low);
        r = (struct reduced){vf_loadu(quarters), vf_loadu(high), vf_loadu(low)};
    }
    return r;
}

/* A polynomial with 6 coefficients, without an FMA. */
INLINE vf poly6(const real *c, vf z) {
    vf p = vf_set1(c[5]);
    UNROLLED(i, 5)
        p = p * z + vf_set1(c[4 - i]);
    return p;
}

/* For |x| <= SINCOS_FAR. */
INLINE void vf_sincos(vf x, vf *sine, vf *cosine) {
    const struct reduced r = reduce_angles(x);
    const vf one = vf_set1(1), half = vf_set1((real)0.5), z = r.high * r.high;
    /* sin(high + low) = high + (high^3 P + low cos(high)), where 1 - z/2 is enough of that cosine */
    const vf near_cosine = one - z * half;
    const vf s = r.high + (r.high * z * poly6(sin_poly, z) + r.low * near_cosine);
    /* cos(high + low) = 1 - z/2 + (z^2 P - high low), and what rounding 1 - z/2 lost */
    const vf lost = (one - near_cosine) - z * half;
    const vf c = near_cosine + (lost + (z * z * poly6(cos_poly, z) - r.high * r.low));
    /* from -2 to 2; both ends are half a turn */
    const vf turn = r.quarters - vf_set1(4) * nearest(r.quarters * vf_set1((real)0.25));
    const vm odd = vf_eq(turn * turn, one);
    const vm sine_negative = vm_or(vf_lt(turn, -half), vf_lt(vf_set1((real)1.5), turn));
    const vm cosine_negative = vm_or(vf_lt(half, turn), vf_lt(turn, vf_set1((real)-1.5)));
    const vf swapped_sine = vf_select(odd, c, s), swapped_cosine = vf_select(odd, s, c);
    *sine = vf_select(sine_negative, -swapped_sine, swapped_sine);
    *cosine = vf_select(cosine_negative, -swapped_cosine, swapped_cosine);
}

/* exp(-(high + low)) for high >= 0 and a low that is small beside it. Results below about 2^-1021 are +0. */
INLINE vf vf_exp_of_pair(vf high, vf low) {
    const int last = sizeof exp_poly / sizeof *exp_poly - 1;
    const vf one = vf_set1(1), n = nearest(high * vf_set1(-EXP_LOG2E));
    vf r_low, rest, p = vf_set1(exp_poly[last]);
    const vf rounded = vf_set1(0) - low - n * vf_set1(EXP_LN2_LO);
    const vf r = vf_two_sum(vf_set1(0) - high - n * vf_set1(EXP_LN2_HI), rounded, &r_low);
    for (int i = last - 1; i >= 1; i--)
        p = p * r + vf_set1(exp_poly[i]);
    const vf sum = vf_two_sum(one, r, &rest);
    const vf power = sum + (rest + (r * r * p + r_low * sum));
    return vf_scale2_unless(vf_lt(n, vf_set1(-1021)), power, n);
}

#endif

#if REAL_BITS == 64

/* frequencies[i] = exp(-i * step). step_high has at most 27 bits, so that its product with i is exact. */
static void rope_frequencies(int64_t n, double step_high, double step_low, double *frequencies) {
    for (int64_t first = 0; first < n; first += LANES) {
        real index[LANES];
        for (int i = 0; i < LANES; i++)
            index[i] = (real)(first + i);
        const vf i = vf_loadu(index);
        const vf power = vf_exp_of_pair(i * vf_set1(step_high), i * vf_set1(step_low));
        store_strided(frequencies + first, 1, power, (int)min64(LANES, n - first));
    }
}

/* Writes number `at` of a table, rounded once to its type. */
INLINE void put_angle(const struct cattn_rope_angles *angles, void *table, int64_t at, real value) {
    if (angles->dtype == CATTN_F32)
        ((float *)table)[at] = (float)value;
    else
        ((double *)table)[at] = value;
}

static void rope_angles(const struct cattn_rope_angles *angles) {
    for (int64_t first = 0; first < angles->n; first += LANES) {
        const int n = (int)min64(LANES, angles->n - first);
        vf sine, cosine;
        real sines[LANES], cosines[LANES];
        vf_sincos(load_strided(angles->frequencies + first, 1, n) * vf_set1(angles->position), &sine, &cosine);
        vf_storeu(sines, sine * vf_set1(angles->sine_factor));
        vf_storeu(cosines, cosine * vf_set1(angles->cosine_factor));
        for (int i = 0; i < n; i++) {
            const int64_t at = angles->interleaved ? 2 * (first + i) : first + i;
            put_angle(angles, angles->cosines, at, cosines[i]);
            put_angle(angles, angles->sines, at, angles->interleaved ? -sines[i] : sines[i]);
            if (angles->interleaved) {
                put_angle(angles, angles->cosines, at + 1, cosines[i]);
                put_angle(angles, angles->sines, at + 1, sines[i]);
            }
        }
    }
}

#endif

/* ---- one row ---- */

/* A row of x and out, and its sines and cosines. */
struct rotation {
    const struct cattn_rope_rows *rows;
    const void *x;
    void *out;
    const real *cosines, *sines;
};

/* n pairs whose first elements are `first`, `first` + step, ... and whose second ones are `partner` elements farther.
 * Both are loaded before the first store, because out may be x. */
INLINE void rotate_pairs(const struct rotation *r, enum cattn_storage storage, int64_t first, int64_t partner,
                         int64_t step, int64_t x_col, int64_t out_col, vf cosine, vf sine, int n) {
    const int64_t second = first + partner;
    const vf a = load_stored(storage, r->x, first * x_col, step * x_col, n);
    const vf b = load_stored(storage, r->x, second * x_col, step * x_col, n);
    store_stored(storage, r->out, first * out_col, step * out_col, a * cosine - b * sine, n);
    store_stored(storage, r->out, second * out_col, step * out_col, b * cosine + a * sine, n);
}

/* Element i of the first half and element i of the second half form a pair. */
INLINE void rotate_halves(const struct rotation *r, enum cattn_storage storage, int64_t x_col, int64_t out_col) {
    const int64_t half = r->rows->rotary_dim / 2;
    int64_t k = 0;
    for (; k + LANES <= half; k += LANES)
        rotate_pairs(r, storage, k, half, 1, x_col, out_col, vf_loadu(r->cosines + k), vf_loadu(r->sines + k), LANES);
    if (k < half) {
        const int n = (int)(half - k);
        rotate_pairs(r, storage, k, half, 1, x_col, out_col, vf_loadu_n(r->cosines + k, n), vf_loadu_n(r->sines + k, n),
                     n);
    }
}

/* Neighbours form a pair. The tables have every cosine twice, and every sine with both signs. */
INLINE void rotate_neighbours(const struct rotation *r, enum cattn_storage storage, int64_t x_col, int64_t out_col) {
    const int64_t n_cols = r->rows->rotary_dim;
#if LANES > 1
    if (x_col == 1 && out_col == 1) {
        int64_t k = 0;
        for (; k < n_cols; k += LANES) {
            const int n = (int)min64(LANES, n_cols - k);
            const vf x = load_stored(storage, r->x, k, 1, n);
            const vf cosine = load_strided(r->cosines + k, 1, n), sine = load_strided(r->sines + k, 1, n);
            store_stored(storage, r->out, k, 1, x * cosine + vf_swap_pairs(x) * sine, n);
        }
        return;
    }
#endif
    for (int64_t k = 0; k < n_cols; k += 2 * LANES) {
        const int n = (int)min64(LANES, (n_cols - k) / 2);
        rotate_pairs(r, storage, k, 1, 2, x_col, out_col, load_strided(r->cosines + k, 2, n),
                     load_strided(r->sines + k + 1, 2, n), n);
    }
}

INLINE void rotate(const struct rotation *r, enum cattn_storage storage, int64_t x_col, int64_t out_col) {
    if (r->rows->interleaved)
        rotate_neighbours(r, storage, x_col, out_col);
    else
        rotate_halves(r, storage, x_col, out_col);
}

/* The columns from rotary_dim on, bit for bit. */
static void rope_rest(const struct rotation *r) {
    const struct cattn_rope_rows *rows = r->rows;
    const size_t size = stored_size(rows->storage);
    const int64_t first = rows->rotary_dim;
    if (r->out == r->x)
        return;
    if (rows->x_col == 1 && rows->out_col == 1) {
        const int64_t at = first * (int64_t)size;
        memcpy((char *)r->out + at, (const char *)r->x + at, (size_t)(rows->n_cols - first) * size);
        return;
    }
    for (int64_t k = first; k < rows->n_cols; k++)
        memcpy((char *)r->out + k * rows->out_col * (int64_t)size, (const char *)r->x + k * rows->x_col * (int64_t)size,
               size);
}

static void rope_rows(const struct cattn_rope_rows *rows) {
    const int64_t size = (int64_t)stored_size(rows->storage);
    const bool plain = rows->x_col == 1 && rows->out_col == 1;
    for (int64_t i = 0; i < rows->n_rows; i++) {
        const struct rotation r = {.rows = rows,
                                   .x = (const char *)rows->x + i * rows->x_row * size,
                                   .out = (char *)rows->out + i * rows->out_row * size,
                                   .cosines = (const real *)rows->cosines + i * rows->table_row,
                                   .sines = (const real *)rows->sines + i * rows->table_row};
        if (!plain)
            rotate(&r, rows->storage, rows->x_col, rows->out_col);
        else if (rows->storage == CATTN_STORED_PLAIN)
            rotate(&r, CATTN_STORED_PLAIN, 1, 1);
#if REAL_BITS == 32
        else if (rows->storage == CATTN_STORED_F16)
            rotate(&r, CATTN_STORED_F16, 1, 1);
        else
            rotate(&r, CATTN_STORED_BF16, 1, 1);
#endif
        rope_rest(&r);
    }
}
