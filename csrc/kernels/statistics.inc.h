/* statistics.inc.h -- statistics of attention weights, on top of the tile path: a block of queries, a block of keys.
 *
 * The scores are computed as in the forward pass, and the weights are computed from them and the log-sum-exp as the
 * gradients do it. Sums over the keys run down the lanes. Sums over the queries of a block are COLUMN_CHAINS chains by
 * row and a tree. docs/bit_contract.md ("Statistics") has the order of operations.
 */

/* A multiple of every table's lanes. */
#define COLUMN_CHAINS 16
_Static_assert(COLUMN_CHAINS % LANES == 0 && CATTN_BLOCK_KEYS % LANES == 0, "whole vectors of rows and keys");

/* ---- the largest scores of a row ---- */

/* A row's top_k scores and their keys form a heap. Its root is the pair that a better one replaces: the lowest score,
 * and of equal scores the highest key. */
struct top_heap {
    real *score;
    int64_t *key;
};

static bool comes_after(const struct top_heap *heap, int64_t i, int64_t j) {
    return heap->score[i] < heap->score[j] || (heap->score[i] == heap->score[j] && heap->key[i] > heap->key[j]);
}

static void swap_pairs(const struct top_heap *heap, int64_t i, int64_t j) {
    const real score = heap->score[i];
    const int64_t key = heap->key[i];
    heap->score[i] = heap->score[j];
    heap->key[i] = heap->key[j];
    heap->score[j] = score;
    heap->key[j] = key;
}

/* Restores the heap of n pairs after a change of its root. */
static void sift_down(const struct top_heap *heap, int64_t n) {
    for (int64_t i = 0, child = 1; child < n; i = child, child = 2 * i + 1) {
        if (child + 1 < n && comes_after(heap, child + 1, child))
            child++;
        if (!comes_after(heap, child, i))
            return;
        swap_pairs(heap, i, child);
    }
}

/* Turns a heap of n pairs into descending order: the root goes last. */
static void sort_heap(const struct top_heap *heap, int64_t n) {
    for (int64_t last = n - 1; last > 0; last--) {
        swap_pairs(heap, 0, last);
        sift_down(heap, last);
    }
}

static struct top_heap top_of_row(const struct cattn_statistics *s, int r) {
    return (struct top_heap){(real *)s->top_weights + r * s->top_k, s->top_keys + r * s->top_k};
}

/* Keys come in ascending order, so of equal scores the lower keys stay. NaN never enters. */
static void keep_top(const struct tile *t, const struct cattn_statistics *s, const struct extent *e, int r) {
    real *root = (real *)s->top_root + r, score[LANES];
    vf least = vf_loadu(root);
    for (int k = e->begin; k < e->end; k++) {
        const vf v = vf_loadu((const real *)s->rows.scratch.score + k * CATTN_TILE_ROWS + r);
        if (!has_chain(e->chains, k))
            continue;
        if (__builtin_expect(!vm_any(vf_lt(least, v)), 1))
            continue;
        vf_storeu(score, v);
        for (int i = 0; i < LANES; i++) {
            if (!(root[i] < score[i]))
                continue;
            const struct top_heap heap = top_of_row(s, r + i);
            heap.score[0] = score[i];
            heap.key[0] = s->rows.first_key + t->k0 + k;
            sift_down(&heap, s->top_k);
            root[i] = heap.score[0];
        }
        least = vf_loadu(root);
    }
}

/* ---- sums over the keys ---- */

/* Whether the weights of a row are NaN, as in the forward pass: a score is NaN or inf, or all visible ones are -inf. */
static bool row_is_undefined(const struct cattn_rows *rows, int r, double lse) {
    return lse != lse || (lse == -(double)INFINITY && row_sees_any_key(rows, r));
}

static double lse_of(const struct cattn_rows *rows, int r) { return *(const double *)rows->per_row->lse[r]; }

static void statistics_begin(struct cattn_statistics *s) {
    const struct cattn_rows *rows = &s->rows;
    pack_query_tile(&s->rows);
    s->any_undefined = false;
    for (int r = 0; r < cattn_round_up(rows->n_rows, LANES); r++) {
        const bool exists = r < rows->n_rows;
        split_lse(rows, &s->lse, r);
        s->undefined[r] = exists && row_is_undefined(rows, r, lse_of(rows, r));
        s->any_undefined |= s->undefined[r];
        /* any finite number: then a hidden score, -inf, has the weight 0 in such rows too */
        if (exists && !(lse_of(rows, r) > -(double)INFINITY))
            ((real *)s->lse.value)[r] = 0;
        ((real *)s->log_sum)[r] = ((real *)s->distance)[r] = 0;
        ((real *)s->max_score)[r] = NEG_INF;
        ((real *)s->top_root)[r] = exists && !s->undefined[r] ? NEG_INF : (real)INFINITY;
    }
    for (int64_t i = 0; i < rows->n_rows * s->top_k; i++) {
        ((real *)s->top_weights)[i] = NEG_INF;
        s->top_keys[i] = -1;
    }
}

/* The scores that an undefined row among LANES rows sees become NaN, and so do its weights. */
static void spoil_undefined(const struct tile *t, const struct cattn_statistics *s, const struct extent *e, int r) {
    for (int i = 0; i < LANES && r + i < s->rows.n_rows; i++)
        for (int k = e->begin; s->undefined[r + i] && k < min64(e->end, t->n_keys); k++)
            if (key_visible(&s->rows, r + i, t->k0 + k))
                ((real *)s->rows.scratch.score)[k * CATTN_TILE_ROWS + r + i] = CANONICAL_NAN;
}

static void raise_max(const struct cattn_statistics *s, int r) {
    real *max = (real *)s->max_score + r;
    vf_storeu(max, vf_max(vf_loadu((const real *)s->rows.scratch.block_max + r), vf_loadu(max)));
}

/* Replaces the scores of LANES rows by weights, and adds w ln w and w |position - key| to the rows' sums. */
static void weigh_and_sum(const struct tile *t, const struct cattn_statistics *s, const struct extent *e, int r) {
    const struct lse_lanes lse = lse_lanes(&s->lse, r);
    real *log_sum = (real *)s->log_sum + r, *distance = (real *)s->distance + r, relative_position[LANES];
    for (int i = 0; i < LANES; i++)
        relative_position[i] = r + i < s->rows.n_rows ? (real)(s->rows.per_row->position[r + i] - t->k0) : 0;
    const vf position = vf_loadu(relative_position), zero = vf_set1(0);
    vf log_total = zero, distance_total = zero;
    for (int k = e->begin; k < e->end;) {
        vf log_chain = zero, distance_chain = zero;
        const int end = (int)chain_end(k, e->end);
        for (; k < end && !has_chain(e->chains, k); k++)
            vf_storeu((real *)s->rows.scratch.score + k * CATTN_TILE_ROWS + r, zero);
        for (; k < end; k++) {
            real *score = (real *)s->rows.scratch.score + k * CATTN_TILE_ROWS + r;
            const vf away = position - vf_set1((real)k);
            vf log;
            const vf weight = vf_exp_of_difference(vf_loadu(score), lse.value, lse.residual, lse.factor, &log);
            /* the logarithm of a weight of 0 may be -inf or NaN: then any finite number will do */
            log_chain = vf_fma(weight, vf_max(log, vf_set1(-REAL_MAX)), log_chain);
            distance_chain = vf_fma(weight, vf_max(away, -away), distance_chain);
            vf_storeu(score, weight);
        }
        log_total = log_total + log_chain;
        distance_total = distance_total + distance_chain;
    }
    vf_storeu(log_sum, vf_loadu(log_sum) + log_total);
    vf_storeu(distance, vf_loadu(distance) + distance_total);
}

/* ---- sums over the rows ---- */

/* Zeroes the weights of LANES rows that do not count: of keys outside the extent, of rows before first_received,
 * and of lanes after the last row, which may be NaN. */
static void zero_uncounted(const struct tile *t, const struct cattn_statistics *s, const struct extent *e, int r) {
    real *score = (real *)s->rows.scratch.score + r;
    const int begin = t->all.begin / LANES * LANES, end = (int)cattn_round_up(t->all.end, LANES);
    const int first = (int)max64(0, s->first_received - r), last = (int)min64(LANES, s->rows.n_rows - r);
    const bool none = first >= last || e->begin == e->end;
    for (int k = begin; k < (none ? end : e->begin); k++)
        vf_storeu(score + k * CATTN_TILE_ROWS, vf_set1(0));
    for (int k = none ? end : e->end; k < end; k++)
        vf_storeu(score + k * CATTN_TILE_ROWS, vf_set1(0));
    if (none || (first == 0 && last == LANES))
        return;
    for (int k = e->begin; k < e->end; k++)
        for (int i = 0; i < LANES; i++)
            if (i < first || i >= last)
                score[k * CATTN_TILE_ROWS + i] = 0;
}

/* The chains of LANES keys from k on, of LANES of the COLUMN_CHAINS rows from `first` on; [chain][key]. */
INLINE void column_chains(const struct tile *t, int k, int first, vf sum[LANES], vf max[LANES]) {
    for (int i = 0; i < LANES; i++) {
        const real *weight = (const real *)t->rows->scratch.score + (k + i) * CATTN_TILE_ROWS;
        vf key_sum = vf_set1(0), key_max = vf_set1(0);
        for (int r = first; r < t->n_vectors * LANES; r += COLUMN_CHAINS) {
            const vf w = vf_loadu(weight + r);
            key_sum = key_sum + w;
            key_max = vf_max(w, key_max);
        }
        sum[i] = key_sum;
        max[i] = key_max;
    }
    vf_transpose(sum);
    vf_transpose(max);
}

/* Sums and maxima over the rows, of all keys of the block. A maximum is NaN where the sum is. */
static void sum_columns(const struct tile *t, const struct cattn_statistics *s) {
    real *to_sum = s->column_sum, *to_max = s->column_max;
    for (int k = t->all.begin / LANES * LANES; k < t->all.end; k += LANES) {
        vf sum[COLUMN_CHAINS], max[COLUMN_CHAINS];
        UNROLLED(j, COLUMN_CHAINS / LANES)
            column_chains(t, k, j * LANES, sum + j * LANES, max + j * LANES);
        UNROLLED(c, CATTN_SUM_CHAINS) {
            sum[c] = sum[c] + sum[c + CATTN_SUM_CHAINS];
            max[c] = vf_max(max[c], max[c + CATTN_SUM_CHAINS]);
        }
        for (int c = 1; c < CATTN_SUM_CHAINS; c++)
            max[0] = vf_max(max[0], max[c]);
        const vf total = with_one_nan(SUM_TREE(sum));
        vf_storeu(to_sum + k, total);
        vf_storeu(to_max + k, vf_select(vf_eq(total, total), max[0], total));
    }
}

static void statistics_block(struct cattn_statistics *s, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, &s->rows, k0, k1))
        return;
    scores_begin(&t);
    for (int v = 0; v < t.n_vectors; v++) {
        const struct extent *e = &t.vector[v];
        const int r = v * LANES;
        if (v % NR == 0) /* a panel at a time, while its scores are in the L1 cache */
            score_panel(&t, v);
        raise_max(s, r);
        if (s->any_undefined)
            spoil_undefined(&t, s, e, r);
        if (s->top_k > 0)
            keep_top(&t, s, e, r);
        weigh_and_sum(&t, s, e, r);
        if (s->wants_received)
            zero_uncounted(&t, s, e, r);
    }
    if (!s->wants_received)
        return;
    sum_columns(&t, s);
    s->columns_begin = t.all.begin;
    s->columns_end = (int)min64(t.all.end, t.n_keys);
}

static void statistics_add(const struct cattn_statistics *s, int64_t k0) {
    const real *sum = s->column_sum, *max = s->column_max;
    real *received = s->received, *received_max = s->received_max;
    for (int k = s->columns_begin; k < s->columns_end; k++) {
        if (received)
            received[k0 + k] += sum[k];
        if (received_max && (sum[k] != sum[k] || max[k] > received_max[k0 + k]))
            received_max[k0 + k] = max[k];
    }
}

/* ---- the end ---- */

INLINE void put(const struct cattn_statistics *s, enum cattn_row_statistic which, int r, real value) {
    if (s->row_results[which])
        ((real *)s->row_results[which])[r] = value == value ? value : CANONICAL_NAN;
}

/* Rounding can take a weight above 1, and an entropy below 0. */
INLINE real at_most_one(real weight) { return weight > 1 ? 1 : weight; }

static void finish_top(const struct cattn_statistics *s, int r) {
    const struct top_heap heap = top_of_row(s, r);
    sort_heap(&heap, s->top_k);
    for (int64_t i = 0; i < s->top_k; i++) {
        const real score = heap.score[i], weight = is_neg_inf(score) ? 0 : weight_of_row(score, &s->lse, r);
        heap.score[i] = s->undefined[r] ? CANONICAL_NAN : at_most_one(weight);
    }
}

static void statistics_finish(struct cattn_statistics *s) {
    const struct cattn_rows *rows = &s->rows;
    for (int r = 0; r < rows->n_rows; r++) {
        const real lse = (real)lse_of(rows, r), log_sum = ((const real *)s->log_sum)[r];
        const real max = lse == lse ? ((const real *)s->max_score)[r] : CANONICAL_NAN;
        const real sink = rows->call.has_sinks ? (real)rows->per_row->sink[r] : NEG_INF;
        const bool undefined = s->undefined[r];
        put(s, CATTN_ROW_LSE, r, lse);
        put(s, CATTN_ROW_MAX_SCORE, r, max);
        put(s, CATTN_ROW_ENTROPY, r, log_sum > 0 ? 0 : 0 - log_sum); /* never -0 */
        put(s, CATTN_ROW_DISTANCE, r, ((const real *)s->distance)[r]);
        put(s, CATTN_ROW_MAX_WEIGHT, r,
            undefined         ? CANONICAL_NAN
            : is_neg_inf(max) ? 0
                              : at_most_one(weight_of_row(max, &s->lse, r)));
        put(s, CATTN_ROW_SINK_WEIGHT, r,
            undefined          ? CANONICAL_NAN
            : is_neg_inf(sink) ? 0
                               : at_most_one(weight_of_row(sink, &s->lse, r)));
        if (s->top_k > 0)
            finish_top(s, r);
    }
}
