/* state.inc.h -- the online softmax of a block of rows: running state, merge of chunks, finished results.
 *
 * The state of a chunk is maximum, sum and accumulator; the results are output, log-sum-exp and weights. The tile path
 * and the row path share it.
 */

/* Whether each lane is finite: x - x is 0 for finite x, else NaN. */
INLINE vm finite_lanes(vf x) { return vf_eq(x - x, vf_set1(0)); } /* NOLINT(misc-redundant-expression) */

/* Rows are padded to CATTN_FEW_ROWS, because the row path computes that many. */
static void chunk_begin(struct cattn_rows *rows) {
    const int n = (int)cattn_round_up(rows->n_rows, CATTN_FEW_ROWS);
    real *row_max = rows->scratch.row_max, *row_sum = rows->scratch.row_sum;
    for (int r = 0; r < n; r++) {
        row_max[r] = NEG_INF;
        row_sum[r] = 0;
    }
    void *acc = rows->scratch.acc;
    int n_acc = n;
#ifdef BF16_TILES
    if (rows->scratch.acc_columns) { /* of which chunk_end makes the others */
        acc = rows->scratch.acc_columns;
        n_acc = (int)cattn_round_up(n, CATTN_UNIT);
    }
#endif
    if (rows->call.acc_cols)
        memset(acc, 0, (size_t)n_acc * (size_t)rows->call.acc_cols * sizeof(real));
}

/* Merges the block's maxima of LANES rows from r on into the running maxima. alpha = exp(old maximum - new maximum)
 * corrects what was summed before. block_max becomes the number to subtract from the scores: the maximum, or 0 if that
 * is -inf, so that rows without a visible key get exp(-inf) = 0 and not exp(NaN). */
INLINE void update_max(struct cattn_rows *rows, int r) {
    real *row_max = (real *)rows->scratch.row_max + r, *block_max = (real *)rows->scratch.block_max + r;
    vf old = vf_loadu(row_max), now = vf_max(old, vf_loadu(block_max));
    vf shift = vf_select(vf_eq(now, vf_set1(NEG_INF)), vf_set1(0), now);
    vf_storeu(row_max, now);
    vf_storeu(block_max, shift);
    vf_storeu((real *)rows->scratch.alpha + r, vf_exp(old - shift));
}

/* The keys of a block that lie in one half of it: P V adds the halves one after the other. */
struct key_half {
    int begin, end;
};
/* The part of begin .. end-1 in half 0 or 1; begin == end if it is empty. */
INLINE struct key_half key_half_of(int half, int begin, int end) {
    struct key_half keys = {(int)max64(begin, half * CATTN_HALF_BLOCK), (int)min64(end, (half + 1) * CATTN_HALF_BLOCK)};
    if (keys.begin >= keys.end)
        keys.end = keys.begin;
    return keys;
}
INLINE bool key_half_is_empty(struct key_half keys) { return keys.begin == keys.end; }

/* acc = acc * factor + block. The factor is alpha for the first half of a block, which corrects what was summed before,
 * and 1 for the second half. */
INLINE void fold_block(real *acc, vf factor, vf block) { vf_storeu(acc, vf_fma(vf_loadu(acc), factor, block)); }

/* total = total * a1 + chunk * a2, row by row. A chunk without visible keys changes nothing: a1 is 1, a2 is 0. */
static void chunk_merge(struct cattn_rows *rows) {
    const real *m2 = rows->scratch.row_max, *l2 = rows->scratch.row_sum, *o2 = rows->scratch.acc;
    real *m1 = rows->scratch.total_max, *l1 = rows->scratch.total_sum, *o1 = rows->scratch.total_acc;
    real a1[LANES], a2[LANES];
    for (int r0 = 0; r0 < rows->n_rows; r0 += LANES) {
        vf max1 = vf_loadu(m1 + r0), max2 = vf_loadu(m2 + r0), now = vf_max(max1, max2);
        vf shift = vf_select(vf_eq(now, vf_set1(NEG_INF)), vf_set1(0), now);
        vf scale1 = vf_exp(max1 - shift), scale2 = vf_exp(max2 - shift);
        vf_storeu(m1 + r0, now);
        vf_storeu(l1 + r0, vf_fma(vf_loadu(l2 + r0), scale2, vf_loadu(l1 + r0) * scale1));
        vf_storeu(a1, scale1);
        vf_storeu(a2, scale2);
        /* statistics have rows as lanes, accumulators columns: hence the factors go through memory */
        for (int i = 0; i < LANES && r0 + i < rows->n_rows; i++)
            for (int64_t c = 0; c < rows->call.acc_cols; c += LANES) {
                int64_t at = (r0 + i) * rows->call.acc_cols + c;
                vf old = vf_loadu(o1 + at) * vf_set1(a1[i]);
                vf_storeu(o1 + at, vf_fma(vf_loadu(o2 + at), vf_set1(a2[i]), old));
            }
    }
}

/* Elements of the output, and what shows that one is not finite: then `odd` becomes NaN, otherwise it stays 0. Adding 0
 * turns -0 into +0, because the sign of a zero depends on the path. Halves have NaN in the place of inf, because finite
 * numbers may be rounded to inf; needs_second_attempt tells them apart. */
INLINE vf out_elements(enum cattn_storage storage, vf acc, vf factor, vf *odd) {
    vf v = acc * factor + vf_set1(0);
    *odd = vf_fma(v, vf_set1(0), *odd);
    if (storage != CATTN_STORED_PLAIN)
        v = v + v * vf_set1(0);
    return v;
}

/* Whether the first attempt could not compute stored elements of the output. */
INLINE vm needs_second_attempt(enum cattn_storage storage, vf out) {
    return vm_not(storage == CATTN_STORED_PLAIN ? finite_lanes(out) : vf_eq(out, out)); /* a half may be inf */
}

/* The logistic function of n <= LANES elements of row r of the gate from column c on. */
INLINE vf gate_at(const struct cattn_rows *rows, int r, int64_t c, int n, vf *other) {
    const int64_t col = rows->call.gate_col;
    return vf_logistic(load_stored(rows->call.storage, rows->per_row->gate[r], c * col, col, n), other);
}

/* An output row times the logistic function of its gate, rounded to its storage once. Without a visible key it is 0,
 * also where the gate or the sink is NaN. Returns whether an element was not finite before. */
NOINLINE bool finish_gated_row(const struct cattn_rows *rows, int r, const real *acc, vf factor) {
    const enum cattn_storage storage = rows->call.storage;
    const int64_t d_v = rows->call.d_v, col = rows->call.out_col;
    void *out = rows->per_row->out[r];
    vf odd = vf_set1(0), undefined = vf_set1(0), other;
    for (int64_t c = 0; c < d_v; c += LANES) {
        const int n = (int)min64(LANES, d_v - c);
        const vf gate = gate_at(rows, r, c, n, &other);
        store_stored(storage, out, c * col, col, out_elements(storage, vf_loadu(acc + c), factor, &odd) * gate, n);
        undefined = vf_fma(gate, vf_set1(0), undefined);
    }
    const bool is_odd = vm_any(vm_not(vf_eq(odd, odd)));
    if ((is_odd || vm_any(vm_not(vf_eq(undefined, undefined)))) && !row_sees_any_key(rows, r))
        for (int64_t c = 0; c < d_v; c += LANES)
            store_stored(storage, out, c * col, col, vf_set1(0), (int)min64(LANES, d_v - c));
    return is_odd;
}

/* Output rows: acc * factor, times the gate if there is one. */
INLINE void finish_out(struct cattn_rows *rows, enum cattn_storage storage, const real *factor) {
    const int64_t d_v = rows->call.d_v, col = rows->call.out_col, acc_cols = rows->call.acc_cols;
    const int n_rows = rows->call.has_out ? rows->n_rows : 0;
    const real *acc = rows->scratch.total_acc;
    for (int r = 0; r < n_rows; r++, acc += acc_cols) {
        void *out = rows->per_row->out[r];
        const vf scale = vf_set1(factor[r]);
        vf odd = vf_set1(0);
        int64_t c = 0;
        if (!out)
            continue;
        if (rows->call.has_gate) {
            rows->overflowed |= finish_gated_row(rows, r, acc, scale) && factor[r] == factor[r];
            continue;
        }
        for (; col == 1 && c + LANES <= d_v; c += LANES)
            store_stored(storage, out, c, 1, out_elements(storage, vf_loadu(acc + c), scale, &odd), LANES);
        for (; c < d_v; c += LANES)
            store_stored(storage, out, c * col, col, out_elements(storage, vf_loadu(acc + c), scale, &odd),
                         (int)min64(LANES, d_v - c));
        if (__builtin_expect(vm_any(vm_not(vf_eq(odd, odd))), 0) && factor[r] == factor[r])
            rows->overflowed = true;
    }
}

/* ---- the second attempt ----
 *
 * Sums of finite weights and values may overflow although the output would not. With small weights they cannot: there
 * are less than 2^64 keys. The power of two is exact, but for weights that become subnormal, which are too small to
 * matter beside a sum that overflowed.
 */
#define SMALL_WEIGHT ((real)0x1p-64)
#ifdef BF16_PRODUCTS
#define LEAST_REAL 0x1p-126f /* products flush what is smaller */
#elif REAL_BITS == 32
#define LEAST_REAL 0x1p-149f
#else
#define LEAST_REAL 0x1p-1074
#endif

/* A weight that is not 0 does not become 0, or the product with an infinite value would be NaN instead of inf. */
INLINE vf small_weight(vf w) {
    const vf small = vf_max(w * vf_set1(SMALL_WEIGHT), vf_set1(LEAST_REAL));
    return vf_select(vf_lt(vf_set1(0), w), small, w);
}

/* Replaces the elements of the output that need it. acc * factor is at most REAL_MAX * SMALL_WEIGHT but for
 * rounding, which must not turn the mean of finite values into inf; with dropout's factor the output itself may be
 * that large. */
static void finish_small_out(const struct cattn_rows *rows, const real *factor) {
    const enum cattn_storage storage = rows->call.storage;
    const int64_t col = rows->call.out_col;
    const vf largest = vf_set1(REAL_MAX);
    const real *acc = rows->scratch.total_acc;
    for (int r = 0; r < rows->n_rows; r++, acc += rows->call.acc_cols) {
        void *out = rows->per_row->out[r];
        for (int64_t c = 0; out && c < rows->call.d_v; c += LANES) {
            const int n = (int)min64(LANES, rows->call.d_v - c);
            const vf old = load_stored(storage, out, c * col, col, n), small = vf_loadu(acc + c) * vf_set1(factor[r]);
            vf v = small * vf_set1(1 / SMALL_WEIGHT) + vf_set1(0), other;
            if (rows->call.keep_scale == 1) {
                const vf within = -vf_max(-vf_max(v, -largest), -largest);
                v = vf_select(finite_lanes(small), within, v);
            }
            if (rows->call.has_gate)
                v = v * gate_at(rows, r, c, n, &other);
            store_stored(storage, out, c * col, col, vf_select(needs_second_attempt(storage, old), v, old), n);
        }
    }
}

/* The stored scores of row r that the block mask hides become -inf: key blocks without a visible key were left out. */
static void hide_blocks(const struct cattn_rows *rows, int r) {
    real *w = rows->per_row->weights[r];
    const int64_t col = rows->call.weights_col, hi = rows->per_row->hi[r];
    bool visible;
    for (int64_t key = rows->per_row->lo[r], end; key < hi; key = end) {
        end = block_run_end(rows, r, key, hi, &visible);
        for (int64_t k = key; k < end && !visible; k += LANES)
            store_strided(w + k * col, col, vf_set1(NEG_INF), (int)min64(LANES, end - k));
    }
}

/* Turns the stored scores of one row into weights, in place. Keys out of range, and all before the first valid one, get
 * 0, or -inf with store_scores. */
static void finish_weights(const struct cattn_rows *rows, int r, real max, real inverse) {
    real *w = rows->per_row->weights[r];
    const int64_t col = rows->call.weights_col, lo = rows->per_row->lo[r], hi = rows->per_row->hi[r];
    const vf shift = vf_set1(max), factor = vf_set1(inverse);
    const vf outside = vf_set1(rows->call.store_scores ? NEG_INF : 0);
    const int64_t end = rows->call.seqlen_k - rows->first_key;
    for (int64_t k = -rows->first_key; k < lo; k += LANES)
        store_strided(w + k * col, col, outside, (int)min64(LANES, lo - k));
    for (int64_t k = max64(lo, hi); k < end; k += LANES)
        store_strided(w + k * col, col, outside, (int)min64(LANES, end - k));
    if (rows->call.has_block_mask)
        hide_blocks(rows, r);
    if (rows->call.store_scores)
        return;                        /* the scores in range are there already */
    if (!(inverse < (real)INFINITY)) { /* the sum is NaN or 0: the masks decide between 0 and NaN */
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

/* -inf for a sum of 0, NaN for a sum of NaN. */
static double log_sum_exp(real max, real sum) {
    if (sum == 0)
        return (double)NEG_INF;
    return sum > 0 ? (double)max + log_positive((double)sum) : (double)CANONICAL_NAN;
}

static void store_lse(const struct cattn_rows *rows, int r, double lse) {
    if (rows->call.double_lse)
        *(double *)rows->per_row->lse[r] = lse;
    else
        *(real *)rows->per_row->lse[r] = (real)lse;
}

/* A sink is one more key with a score but without a value. Merges it into maximum and sum and returns the factor of the
 * accumulator: exp(old maximum - new maximum). */
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

/* The factor of each row's accumulator. Afterwards total_max and total_sum include the sinks. */
static void finish_factors(struct cattn_rows *rows, real factor[CATTN_TILE_ROWS]) {
    real *max = rows->scratch.total_max, *sum = rows->scratch.total_sum;
    if (rows->call.has_sinks)
        for (int r = 0; r < rows->n_rows; r++)
            factor[r] = take_sink((real)rows->per_row->sink[r], &max[r], &sum[r]);
    bool may_have_empty_rows = false;
    for (int r = 0; r < rows->n_rows; r += LANES) {
        vf f = vf_div(vf_set1(1), vf_loadu(sum + r)) * vf_set1((real)rows->call.keep_scale);
        /* the lanes after the last row are arbitrary, so test a partial vector row by row */
        may_have_empty_rows |= r + LANES > rows->n_rows || vm_any(vf_eq(vf_loadu(sum + r), vf_set1(0)));
        if (rows->call.has_sinks)
            f = f * vf_loadu(factor + r);
        vf_storeu(factor + r, f);
    }
    /* a sum of 0: 0 for a row without visible keys, NaN for one whose visible scores are all -inf */
    if (may_have_empty_rows)
        for (int r = 0; r < rows->n_rows; r++)
            if (sum[r] == 0)
                factor[r] = row_sees_any_key(rows, r) ? CANONICAL_NAN : 0;
}

static void finish(struct cattn_rows *rows) {
    const real *max = rows->scratch.total_max, *sum = rows->scratch.total_sum;
    real factor[CATTN_TILE_ROWS];
    finish_factors(rows, factor);
    if (rows->small_weights)
        finish_small_out(rows, factor);
    else if (rows->call.storage == CATTN_STORED_PLAIN)
        finish_out(rows, CATTN_STORED_PLAIN, factor);
    else if (rows->call.storage == CATTN_STORED_F16)
        finish_out(rows, CATTN_STORED_F16, factor);
    else
        finish_out(rows, CATTN_STORED_BF16, factor);
    if (rows->call.has_lse)
        for (int r = 0; r < rows->n_rows; r++)
            if (rows->per_row->lse[r])
                store_lse(rows, r, log_sum_exp(max[r], sum[r]));
    const int n_weights = rows->call.has_weights ? rows->n_rows : 0;
    for (int r = 0; r < n_weights; r++) {
        finish_weights(rows, r, max[r], 1 / sum[r]);
        if (rows->call.storage != CATTN_STORED_PLAIN)
            narrow_row(rows->call.storage, (const real *)rows->per_row->weights[r] - rows->first_key,
                       rows->call.seqlen_k, rows->per_row->weights_out[r], rows->call.weights_out_col);
    }
}
