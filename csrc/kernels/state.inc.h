/* state.inc.h -- what the tile path and the row path share: visibility, loads of strided data, the running softmax
 * state of a block of rows, the merge of chunks, and the finished output.
 */

#define NEG_INF (-(real)INFINITY)
#define CANONICAL_NAN ((real)NAN) /* the one NaN that is ever written */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* a key's place in the block that starts at k0, cut to the block */
INLINE int relative(int64_t key, int64_t k0) { return (int)max64(0, min64(CATTN_BLOCK_KEYS, key - k0)); }

/* n <= LANES elements at any stride; other lanes 0 */
INLINE vf load_strided(const real *p, int64_t stride, int n) {
    if (stride == 1)
        return n == LANES ? vf_loadu(p) : vf_loadu_n(p, n);
    real lanes[LANES] = {0};
    for (int i = 0; i < n; i++)
        lanes[i] = p[i * stride];
    return vf_loadu(lanes);
}

INLINE void store_strided(real *p, int64_t stride, vf v, int n) {
    if (stride == 1) {
        if (n == LANES)
            vf_storeu(p, v);
        else
            vf_storeu_n(p, v, n);
        return;
    }
    real lanes[LANES];
    vf_storeu(lanes, v);
    for (int i = 0; i < n; i++)
        p[i * stride] = lanes[i];
}

/* ---- elements as they are stored: the kernels' own type, or halves of float ---- */

INLINE const void *stored_at(enum cattn_storage storage, const void *base, int64_t i) {
    if (storage == CATTN_STORED_PLAIN)
        return (const real *)base + i;
    return (const uint16_t *)base + i;
}

#if REAL_BITS == 32

/* n <= LANES halves at any stride; other lanes 0 */
INLINE vf load_half(enum cattn_storage storage, const uint16_t *p, int64_t stride, int n) {
    uint16_t lanes[LANES] = {0};
    vh h;
    if (stride == 1) {
        h = n == LANES ? vh_loadu(p) : vh_loadu_n(p, n);
    } else {
        for (int i = 0; i < n; i++)
            lanes[i] = p[i * stride];
        h = vh_loadu(lanes);
    }
    return storage == CATTN_STORED_F16 ? vf_from_f16(h) : vf_from_bf16(h);
}

INLINE void store_half(enum cattn_storage storage, uint16_t *p, int64_t stride, vf v, int n) {
    const vh h = storage == CATTN_STORED_F16 ? vh_f16(v) : vh_bf16(v);
    if (stride == 1 && n == LANES) {
        vh_storeu(p, h);
    } else if (stride == 1) {
        vh_storeu_n(p, h, n);
    } else {
        uint16_t lanes[LANES];
        vh_storeu(lanes, h);
        for (int i = 0; i < n; i++)
            p[i * stride] = lanes[i];
    }
}

#endif

/* n <= LANES elements from index i on, other lanes 0. */
INLINE vf load_stored(enum cattn_storage storage, const void *base, int64_t i, int64_t stride, int n) {
#if REAL_BITS == 32
    if (storage != CATTN_STORED_PLAIN)
        return load_half(storage, (const uint16_t *)base + i, stride, n);
#endif
    (void)storage;
    return load_strided((const real *)base + i, stride, n);
}

/* Any NaN becomes the canonical one. */
INLINE vf with_one_nan(vf v) { return vf_select(vf_eq(v, v), v, vf_set1(CANONICAL_NAN)); }

INLINE void store_stored(enum cattn_storage storage, void *base, int64_t i, int64_t stride, vf v, int n) {
    v = with_one_nan(v);
#if REAL_BITS == 32
    if (storage != CATTN_STORED_PLAIN) {
        store_half(storage, (uint16_t *)base + i, stride, v, n);
        return;
    }
#endif
    (void)storage;
    store_strided((real *)base + i, stride, v, n);
}

static void widen_row(enum cattn_storage storage, const void *from, int64_t stride, int64_t n, void *to) {
    int64_t k = 0;
    for (; k + LANES <= n && stride == 1; k += LANES)
        vf_storeu((real *)to + k, load_stored(storage, from, k, 1, LANES));
    for (; k < n; k += LANES) {
        const int left = (int)min64(LANES, n - k);
        vf_storeu_n((real *)to + k, load_stored(storage, from, k * stride, stride, left), left);
    }
}

static void narrow_row(enum cattn_storage storage, const void *from, int64_t n, void *to, int64_t stride) {
    int64_t k = 0;
    for (; k + LANES <= n && stride == 1; k += LANES)
        store_stored(storage, to, k, 1, vf_loadu((const real *)from + k), LANES);
    for (; k < n; k += LANES) {
        const int left = (int)min64(LANES, n - k);
        store_stored(storage, to, k * stride, stride, vf_loadu_n((const real *)from + k, left), left);
    }
}

INLINE size_t stored_size(enum cattn_storage storage) {
    return storage == CATTN_STORED_PLAIN ? sizeof(real) : sizeof(uint16_t);
}

/* Rows of keys or values in the kernels' own type, unit stride. */
struct source {
    const real *first;
    int64_t row;
};

/* n_rows rows of n_cols elements of a stored matrix from `first_row` on: where they lie if the kernels can read them
 * there, else copied to `scratch`, one after the other. */
static struct source rows_of(enum cattn_storage storage, const void *base, int64_t row, int64_t col, int64_t first_row,
                             int n_rows, int64_t n_cols, void *scratch) {
    const void *from = stored_at(storage, base, first_row * row);
    if (storage == CATTN_STORED_PLAIN && col == 1)
        return (struct source){from, row};
    if (col == 1 && row == n_cols) {
        widen_row(storage, from, 1, n_rows * n_cols, scratch);
        return (struct source){scratch, n_cols};
    }
    for (int r = 0; r < n_rows; r++)
        widen_row(storage, stored_at(storage, from, r * row), col, n_cols, (real *)scratch + r * n_cols);
    return (struct source){scratch, n_cols};
}

#define LINE_BYTES 64

/* Where p lies so many elements further on, as a number: behind the last row there is nothing to point at. Asking for
 * it is harmless. */
INLINE uintptr_t ahead(const void *p, int64_t elements, size_t size) {
    return (uintptr_t)p + (uintptr_t)(elements * (int64_t)size);
}
/* Asks for what is needed soon, into the nearest cache. */
INLINE void prefetch(uintptr_t base, int64_t element, size_t size) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): a hint, which nothing is read through */
    __builtin_prefetch((const void *)ahead((const void *)base, element, size), 0, 3);
}
/* Asks for what is needed later, into the second cache: more lines can be on their way there than to the nearest one,
 * whose few slots are then left to what is read. From memory that is twice as fast. */
INLINE void prefetch_far(uintptr_t base, int64_t element, size_t size) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): a hint, which nothing is read through */
    __builtin_prefetch((const void *)ahead((const void *)base, element, size), 0, 2);
}
/* Asks for what lies so far ahead of a line that is read now, and once more for what is closer. Processors drop
 * requests while too many are under way; a line asked for three times is there in time: up to 1.4 times as fast as
 * once. */
INLINE void prefetch_thrice(uintptr_t line, int64_t far, int64_t midway, int64_t near, size_t size) {
    prefetch_far(line, far, size);
    prefetch_far(line, midway, size);
    prefetch(line, near, size);
}
/* does every vector, or the one at this element, start a cache line? */
INLINE bool starts_line(int64_t element, size_t size) {
    return LANES * size >= LINE_BYTES || (size_t)element * size % LINE_BYTES == 0;
}

INLINE bool is_neg_inf(real x) { return x == NEG_INF; }

/* May row r see this key? The slow, plain form, for what vector code leaves over. */
static bool key_visible(const struct cattn_rows *rows, int r, int64_t key) {
    if (key < rows->lo[r] || key >= rows->hi[r])
        return false;
    if (rows->has_mask && !rows->mask[r][key * rows->mask_col])
        return false;
    for (int b = 0; b < rows->n_bias; b++)
        if (is_neg_inf(((const real *)rows->bias[b][r])[key * rows->bias_col[b]]))
            return false;
    return true;
}

/* What masks per element add to n keys of row r from `key` on: the sum of the biases, -inf where one of them or the
 * boolean mask hides the key. Lanes from n on are 0. */
INLINE vf element_bias(const struct cattn_rows *rows, int r, int64_t key, int n) {
    const vf neg_inf = vf_set1(NEG_INF);
    vf total = vf_set1(0);
    if (rows->has_mask) {
        const uint8_t *mask = rows->mask[r] + key * rows->mask_col;
        uint8_t lanes[LANES];
        if (rows->mask_col != 1) {
            for (int i = 0; i < n; i++)
                lanes[i] = mask[i * rows->mask_col];
            mask = lanes;
        }
        total = n == LANES ? vf_from_bytes(mask) : vf_from_bytes_n(mask, n);
    }
    vm hidden = vf_eq(total, neg_inf);
    for (int b = 0; b < rows->n_bias; b++) {
        int64_t col = rows->bias_col[b];
        vf bias = load_strided((const real *)rows->bias[b][r] + key * col, col, n);
        hidden = vm_or(hidden, vf_eq(bias, neg_inf));
        total = total + bias;
    }
    /* two finite biases may add up to -inf (finfo.min twice): that hides nothing */
    total = vf_select(vf_eq(total, neg_inf), vf_set1(-REAL_MAX), total);
    return vf_select(hidden, neg_inf, total);
}

static bool row_sees_any_key(const struct cattn_rows *rows, int r) {
    int64_t key = rows->lo[r];
    if (rows->fully_ranged)
        return key < rows->hi[r];
    for (; key + LANES <= rows->hi[r]; key += LANES)
        if (vm_any(vm_not(vf_eq(element_bias(rows, r, key, LANES), vf_set1(NEG_INF)))))
            return true;
    for (; key < rows->hi[r]; key++)
        if (key_visible(rows, r, key))
            return true;
    return false;
}

/* Has a dropout drawn beforehand kept this key for row r? */
INLINE bool key_kept(const struct cattn_rows *rows, int r, int64_t key) {
    return rows->drop_bits[r][key >> 3] >> (key & 7) & 1;
}

/* What softcap makes of raw scores. Out of line: it is long, and rarely asked for. */
static __attribute__((noinline)) vf cap_score(vf score, double softcap) {
    const vf cap = vf_set1((real)softcap);
    return cap * vf_tanh(vf_div(score, cap));
}

/* What the derivative of softcap is where it has made this of a score. */
static __attribute__((noinline)) vf cap_slope(vf capped, double softcap) {
    const vf t = vf_div(capped, vf_set1((real)softcap));
    return vf_fma(-t, t, vf_set1(1));
}

/* ALiBi: the score sinks by slope for each key between the query and this one. Both places count from the block's
 * first key, so that they are exact wherever the block lies. */
INLINE vf slope_score(vf score, vf slope, vf query, vf key) {
    const vf distance = query - key;
    return vf_fma(-slope, vf_max(distance, -distance), score);
}

/* score + bias, but exactly -inf where the bias hides the key, whatever the score is */
INLINE vf add_bias(vf score, vf bias) {
    const vf neg_inf = vf_set1(NEG_INF);
    return vf_select(vf_eq(bias, neg_inf), neg_inf, score + bias);
}

static void chunk_begin(struct cattn_rows *rows) {
    int n = (int)round_up(rows->n_rows, CATTN_FEW_ROWS);
    real *row_max = rows->row_max, *row_sum = rows->row_sum;
    for (int r = 0; r < n; r++) {
        row_max[r] = NEG_INF;
        row_sum[r] = 0;
    }
    if (rows->acc_cols)
        memset(rows->acc, 0, (size_t)n * (size_t)rows->acc_cols * sizeof(real));
}

/* For LANES rows from r on: the running maximum takes in the block's, alpha is the correction of what was summed
 * before. Leaves in block_max what to subtract from the scores: the maximum, or 0 where it is -inf, so that rows that
 * have seen nothing give exp(-inf) = 0 and not NaN. */
INLINE void update_max(struct cattn_rows *rows, int r) {
    real *row_max = (real *)rows->row_max + r, *block_max = (real *)rows->block_max + r;
    vf old = vf_loadu(row_max), now = vf_max(old, vf_loadu(block_max));
    vf shift = vf_select(vf_eq(now, vf_set1(NEG_INF)), vf_set1(0), now);
    vf_storeu(row_max, now);
    vf_storeu(block_max, shift);
    vf_storeu((real *)rows->alpha + r, vf_exp(old - shift));
}

/* Fixed tree over the eight chains of a block sum. */
INLINE vf sum_tree(const vf s[CATTN_SUM_CHAINS]) {
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

/* Any lane not finite? x - x is 0 for finite x, NaN otherwise. */
INLINE vm finite_lanes(vf x) { return vf_eq(x - x, vf_set1(0)); } /* NOLINT(misc-redundant-expression) */

/* The part of the keys begin .. end-1 of a block that lies in one run of P V. */
struct key_half {
    int begin, end;
};
INLINE struct key_half run_of(int run, int begin, int end) {
    struct key_half r = {(int)max64(begin, run * CATTN_RUN_KEYS), (int)min64(end, (run + 1) * CATTN_RUN_KEYS)};
    if (r.begin >= r.end)
        r.end = r.begin;
    return r;
}
INLINE bool run_is_empty(struct key_half r) { return r.begin == r.end; }

/* acc = acc * factor + block: the first run of a block corrects what was summed before, by alpha, later ones add, with
 * 1
 */
INLINE void fold_block(real *acc, vf factor, vf block) { vf_storeu(acc, vf_fma(vf_loadu(acc), factor, block)); }

static void chunk_merge(struct cattn_rows *rows) {
    const real *m2 = rows->row_max, *l2 = rows->row_sum, *o2 = rows->acc;
    real *m1 = rows->total_max, *l1 = rows->total_sum, *o1 = rows->total_acc;
    real a1[LANES], a2[LANES];
    for (int r0 = 0; r0 < rows->n_rows; r0 += LANES) {
        vf max1 = vf_loadu(m1 + r0), max2 = vf_loadu(m2 + r0), now = vf_max(max1, max2);
        vf shift = vf_select(vf_eq(now, vf_set1(NEG_INF)), vf_set1(0), now);
        vf scale1 = vf_exp(max1 - shift), scale2 = vf_exp(max2 - shift);
        vf_storeu(m1 + r0, now);
        vf_storeu(l1 + r0, vf_fma(vf_loadu(l2 + r0), scale2, vf_loadu(l1 + r0) * scale1));
        vf_storeu(a1, scale1);
        vf_storeu(a2, scale2);
        for (int i = 0; i < LANES && r0 + i < rows->n_rows; i++)
            for (int64_t c = 0; c < rows->acc_cols; c += LANES) {
                int64_t at = (r0 + i) * rows->acc_cols + c;
                vf old = vf_loadu(o1 + at) * vf_set1(a1[i]);
                vf_storeu(o1 + at, vf_fma(vf_loadu(o2 + at), vf_set1(a2[i]), old));
            }
    }
}

/* Output rows: acc / l + 0 (so no -0 betrays a path), any NaN the canonical one. */
INLINE void finish_out(const struct cattn_rows *rows, enum cattn_storage storage, const real *factor) {
    const int64_t d_v = rows->d_v, col = rows->out_col, acc_cols = rows->acc_cols;
    const int n_rows = rows->has_out ? rows->n_rows : 0;
    const real *acc = rows->total_acc;
    for (int r = 0; r < n_rows; r++, acc += acc_cols) {
        void *out = rows->out[r];
        const vf scale = vf_set1(factor[r]);
        int64_t c = 0;
        if (!out)
            continue;
        for (; col == 1 && c + LANES <= d_v; c += LANES)
            store_stored(storage, out, c, 1, vf_loadu(acc + c) * scale + vf_set1(0), LANES);
        for (; c < d_v; c += LANES)
            store_stored(storage, out, c * col, col, vf_loadu(acc + c) * scale + vf_set1(0),
                         (int)min64(LANES, d_v - c));
    }
}

/* The raw scores of one row become weights, in place; keys out of range get 0, or -inf where scores are asked for. */
static void finish_weights(const struct cattn_rows *rows, int r, real max, real inverse) {
    real *w = rows->weights[r];
    const int64_t col = rows->weights_col, lo = rows->lo[r], hi = rows->hi[r];
    const vf shift = vf_set1(max), factor = vf_set1(inverse);
    const vf outside = vf_set1(rows->store_scores ? NEG_INF : 0);
    for (int64_t k = 0; k < lo; k += LANES)
        store_strided(w + k * col, col, outside, (int)min64(LANES, lo - k));
    for (int64_t k = max64(lo, hi); k < rows->seqlen_k; k += LANES)
        store_strided(w + k * col, col, outside, (int)min64(LANES, rows->seqlen_k - k));
    if (rows->store_scores)
        return;
    if (!(inverse < (real)INFINITY)) { /* NaN, or no mass at all: only the masks tell 0 from NaN */
        for (int64_t k = lo; k < hi; k++)
            w[k * col] = key_visible(rows, r, k) ? CANONICAL_NAN : 0;
        return;
    }
    for (int64_t k = lo; k < hi; k += LANES) {
        int n = (int)min64(LANES, hi - k);
        vf p = vf_exp(load_strided(w + k * col, col, n) - shift);
        store_strided(w + k * col, col, p * factor, n);
    }
}

static double log_sum_exp(real max, real sum) {
    if (sum == 0)
        return (double)NEG_INF;
    return sum > 0 ? (double)max + log_positive((double)sum) : (double)CANONICAL_NAN;
}

static void store_lse(const struct cattn_rows *rows, int r, double lse) {
    if (rows->double_lse)
        *(double *)rows->lse[r] = lse;
    else
        *(real *)rows->lse[r] = (real)lse;
}

/* A sink is one more key that has a score but no value. Takes it into maximum and sum; returns what the accumulator is
 * to be multiplied with. */
static real take_sink(real sink, real *max, real *sum) {
    if (is_neg_inf(sink))
        return 1;
    real scale, own, now = sink > *max ? sink : *max;
    vf_storeu_n(&scale, vf_exp(vf_set1(*max) - vf_set1(now)), 1);
    vf_storeu_n(&own, vf_exp(vf_set1(sink) - vf_set1(now)), 1);
    vf_storeu_n(sum, vf_fma(vf_set1(*sum), vf_set1(scale), vf_set1(own)), 1);
    *max = now;
    return scale;
}

/* What the accumulator of each row is to be multiplied with; sinks are in total_max and total_sum afterwards. */
static void finish_factors(struct cattn_rows *rows, real factor[CATTN_TILE_ROWS]) {
    real *max = rows->total_max, *sum = rows->total_sum;
    for (int r = 0; r < rows->n_rows && rows->has_sinks; r++)
        factor[r] = take_sink((real)rows->sink[r], &max[r], &sum[r]);
    bool empty = false;
    for (int r = 0; r < rows->n_rows; r += LANES) {
        vf f = vf_div(vf_set1(1), vf_loadu(sum + r)) * vf_set1((real)rows->keep_scale);
        /* behind the last row there may be anything */
        empty = empty || r + LANES > rows->n_rows || vm_any(vf_eq(vf_loadu(sum + r), vf_set1(0)));
        if (rows->has_sinks)
            f = f * vf_loadu(factor + r);
        vf_storeu(factor + r, f);
    }
    /* nothing summed: 0 for a row without keys, NaN for one whose visible scores are all -inf */
    for (int r = 0; r < rows->n_rows && empty; r++)
        if (sum[r] == 0)
            factor[r] = row_sees_any_key(rows, r) ? CANONICAL_NAN : 0;
}

static void finish(struct cattn_rows *rows) {
    const real *max = rows->total_max, *sum = rows->total_sum;
    real factor[CATTN_TILE_ROWS];
    finish_factors(rows, factor);
    if (rows->storage == CATTN_STORED_PLAIN)
        finish_out(rows, CATTN_STORED_PLAIN, factor);
    else if (rows->storage == CATTN_STORED_F16)
        finish_out(rows, CATTN_STORED_F16, factor);
    else
        finish_out(rows, CATTN_STORED_BF16, factor);
    for (int r = 0; r < rows->n_rows && rows->has_lse; r++)
        if (rows->lse[r])
            store_lse(rows, r, log_sum_exp(max[r], sum[r]));
    for (int r = 0; r < rows->n_rows && rows->has_weights; r++) {
        finish_weights(rows, r, max[r], 1 / sum[r]);
        if (rows->storage != CATTN_STORED_PLAIN)
            narrow_row(rows->storage, rows->weights[r], rows->seqlen_k, rows->weights_out[r], rows->weights_out_col);
    }
}
