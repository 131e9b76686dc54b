/* backward.inc.h -- the gradients of attention: one block of up to CATTN_TILE_ROWS queries against one block of keys.
 *
 * The weights P are computed again from the scores and the rows' log-sum-exp. With grad_out dO, its product with the
 * output delta = dO . O, and Z = 1/(1-p) where dropout keeps a weight, else 0:
 *
 *     dV = (P Z)^T dO     dP = Z (dO V^T)     dS = P (dP - delta)     dQ = scale dS K     dK = scale dS^T Q
 *
 * Everything is kept transposed, [key][query]. S and dP^T come out of one kernel, score_panel, and dQ of value_block;
 * only the sums over queries are new. For S and dO V^T scale and 1/(1-p) are taken into Q and dO once; the other sums
 * are multiplied with them, so that subnormal terms are added with all their digits.
 *
 * Pairs that are hidden have P and dS exactly 0, by selection. In the products, where 0 * NaN would betray what
 * a hidden query or key holds, the vectors that are not finite are computed again without their hidden pairs.
 */

/* What one block adds to the first n <= LANES elements. NaN is written as the one NaN. */
INLINE void add_gradient(real *to, vf part, int n) {
    vf sum = (n == LANES ? vf_loadu(to) : vf_loadu_n(to, n)) + part;
    sum = with_one_nan(sum);
    if (n == LANES)
        vf_storeu(to, sum);
    else
        vf_storeu_n(to, sum, n);
}

/* Rows of queries or grad_out, zero behind the last row, up to a whole number of vectors and fours, and column. */
static void copy_rows(const struct cattn_rows *rows, real *to, int64_t cols) {
    const int64_t padded = round_up(round_up(rows->n_rows, LANES), 4), depth = rows->head_dim, col = rows->query_col;
    const int64_t whole = rows->storage == CATTN_STORED_PLAIN && col == 1 ? depth / LANES * LANES : 0;
    for (int r = 0; r < rows->n_rows; r++, to += cols) {
        int64_t d = 0;
        for (; d < whole; d += LANES)
            vf_storeu(to + d, vf_loadu((const real *)rows->query[r] + d));
        for (; d < depth; d += LANES)
            vf_storeu(to + d, load_stored(rows->storage, rows->query[r], d * col, col, (int)min64(LANES, depth - d)));
        for (; d < cols; d += LANES)
            vf_storeu(to + d, vf_set1(0));
    }
    memset(to, 0, (size_t)((padded - rows->n_rows) * cols) * sizeof(real));
}

/* Products of grad_out and output for LANES rows from r on, columns c on: v[i] holds column c + i. */
INLINE void delta_products(const struct cattn_backward *b, int r, int64_t c, vf v[LANES]) {
    const struct cattn_rows *rows = &b->scores, *grads = &b->grads;
    const int64_t out_col = rows->out_col, grad_col = grads->query_col;
    const int n = (int)max64(0, min64(LANES, rows->d_v - c));
    if (rows->storage == CATTN_STORED_PLAIN && n == LANES && r + LANES <= rows->n_rows && out_col == 1 &&
        grad_col == 1) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            v[i] = vf_loadu((const real *)grads->query[r + i] + c) * vf_loadu((const real *)rows->out[r + i] + c);
    } else {
        for (int i = 0; i < LANES; i++) {
            v[i] = vf_set1(0);
            if (n > 0 && r + i < rows->n_rows)
                v[i] = load_stored(rows->storage, grads->query[r + i], c * grad_col, grad_col, n) *
                       load_stored(rows->storage, rows->out[r + i], c * out_col, out_col, n);
        }
    }
    vf_transpose(v);
}

/* delta: products of grad_out and output, rounded, summed in eight chains by column and the tree. */
static void sum_deltas(const struct cattn_backward *b) {
    const int step = LANES > CATTN_SUM_CHAINS ? LANES : CATTN_SUM_CHAINS;
    for (int r = 0; r < b->scores.n_rows; r += LANES) {
        vf sum[CATTN_SUM_CHAINS];
#pragma GCC unroll 8
        for (int i = 0; i < CATTN_SUM_CHAINS; i++)
            sum[i] = vf_set1(0);
        for (int64_t c = 0; c < b->scores.d_v; c += step)
#pragma GCC unroll 8
            for (int part = 0; part < step; part += LANES) {
                vf v[LANES];
                delta_products(b, r, c + part, v);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    sum[(part + i) % CATTN_SUM_CHAINS] = sum[(part + i) % CATTN_SUM_CHAINS] + v[i];
            }
        vf_storeu((real *)b->delta + r, sum_tree(sum));
    }
}

/* The lse as a real, and what it lacks: little of it as a factor of the weights, for a difference of scores has few
 * digits to spare; much of it, beside scores above 2^18, whose differences are exact, as a part of that. */
static void load_lse(const struct cattn_backward *b, int r) {
    const struct cattn_rows *rows = &b->scores;
    double lse = (double)INFINITY; /* rows that are not there have weights exp(-inf) */
    if (r < rows->n_rows)
        lse = rows->double_lse ? *(const double *)rows->lse[r] : (double)*(const real *)rows->lse[r];
    const double lse_residual = (double)(real)lse - lse; /* NaN if that is infinite */
    const bool little = lse_residual > -1.0 / 64 && lse_residual < 1.0 / 64,
               much = !little && lse_residual - lse_residual == 0;
    ((real *)b->lse)[r] = (real)lse;
    ((real *)b->lse_residual)[r] = much ? (real)lse_residual : 0;
    /* exp(lack) - 1 by its series */
    ((real *)b->lse_factor)[r] =
        little ? (real)(lse_residual * (1 + lse_residual * (0.5 + lse_residual * (1.0 / 6)))) : 0;
}

static void backward_begin(struct cattn_backward *b) {
    pack_query_tile(&b->scores);
    pack_query_tile(&b->grads);
    copy_rows(&b->scores, b->query_rows, b->query_cols);
    copy_rows(&b->grads, b->grad_rows, b->grad_cols);
    sum_deltas(b);
    /* whole vectors, and whole groups of P V */
    const int padded = (int)max64(round_up(b->scores.n_rows, LANES), round_up(b->scores.n_rows, MR));
    for (int r = 0; r < padded; r++) {
        load_lse(b, r);
        ((real *)b->bias_sum)[r] = 0;
        ((real *)b->keys.alpha)[r] = 1;
    }
    if (b->keys.acc_cols)
        memset(b->keys.acc, 0, (size_t)padded * (size_t)b->keys.acc_cols * sizeof(real));
}

/* What LANES rows are known by. */
struct row_lanes {
    vf lse, lse_residual, factor, delta;
};

INLINE struct row_lanes row_lanes(const struct cattn_backward *b, int r) {
    return (struct row_lanes){vf_loadu((const real *)b->lse + r), vf_loadu((const real *)b->lse_residual + r),
                              vf_loadu((const real *)b->lse_factor + r), vf_loadu((const real *)b->delta + r)};
}

/* exp(score - lse), with all digits of the lse */
INLINE vf weight_of(vf score, struct row_lanes rows) {
    return vf_exp_of_difference(score, rows.lse, rows.lse_residual, rows.factor);
}

/* One vector of queries and one key: the score becomes the weight after dropout, the product dO V^T becomes dS. */
INLINE void weigh(real *score, real *grad, struct row_lanes rows, bool dropping, vm kept) {
    const vf zero = vf_set1(0), s = vf_loadu(score);
    const vm hidden = vf_eq(s, vf_set1(NEG_INF));
    vf dp = vf_loadu(grad), p = vf_select(hidden, zero, weight_of(s, rows));
    if (dropping)
        dp = vf_select(kept, dp, zero);
    vf_storeu(grad, vf_select(hidden, zero, p * (dp - rows.delta)));
    vf_storeu(score, dropping ? vf_select(kept, p, zero) : p);
}

static void weigh_lanes(const struct cattn_backward *b, const struct extent *e, int r) {
    real *score = (real *)b->scores.score + r, *grad = (real *)b->grads.score + r;
    const struct row_lanes rows = row_lanes(b, r);
    const vm all = vf_eq(vf_set1(0), vf_set1(0));
#pragma GCC unroll 4
    for (int k = e->begin; k < e->end; k++)
        weigh(score + k * CATTN_TILE_ROWS, grad + k * CATTN_TILE_ROWS, rows, false, all);
}

static void weigh_lanes_dropping(const struct tile *t, const struct cattn_backward *b, const struct extent *e, int r) {
    real *score = (real *)b->scores.score + r, *grad = (real *)b->grads.score + r;
    const struct row_lanes rows = row_lanes(b, r);
    const struct cattn_drop *drop = &b->scores.drop;
    const uint32_t *position = b->scores.drop_position + r, *head = b->scores.drop_head + r;
    for (int run = e->begin / 64 * 64; run < e->end; run += 64)
        for (int c = 0; c < 8; c++) {
            const uint64_t j = (uint64_t)(t->k0 + run + c);
            vu words[4];
            philox_lanes(drop, j, position, head, words);
            for (int d = 0; d < 8; d++) {
                const int k = run + 8 * d + c;
                if (k < e->begin || k >= e->end)
                    continue;
                vm kept = philox_lanes_keep(drop, words, d, j, position, head);
                weigh(score + k * CATTN_TILE_ROWS, grad + k * CATTN_TILE_ROWS, rows, true, kept);
            }
        }
}

/* The same with bits that were drawn beforehand. */
static void weigh_lanes_drop_bits(const struct tile *t, const struct cattn_backward *b, const struct extent *e, int r) {
    real *score = (real *)b->scores.score + r, *grad = (real *)b->grads.score + r;
    const struct row_lanes rows = row_lanes(b, r);
    for (int k = e->begin; k < e->end; k++) {
        real keep[LANES] = {0};
        for (int i = 0; i < LANES && r + i < b->scores.n_rows && k < t->n_keys; i++)
            keep[i] = key_kept(&b->scores, r + i, t->k0 + k);
        const vm kept = vf_lt(vf_set1(0), vf_loadu(keep));
        weigh(score + k * CATTN_TILE_ROWS, grad + k * CATTN_TILE_ROWS, rows, true, kept);
    }
}

/* Both arrays are 0 in LANES rows from r on, from key `begin` to `end`. */
static void zero_lanes(const struct cattn_backward *b, int r, int begin, int end) {
    for (int k = begin; k < end; k++) {
        vf_storeu((real *)b->scores.score + k * CATTN_TILE_ROWS + r, vf_set1(0));
        vf_storeu((real *)b->grads.score + k * CATTN_TILE_ROWS + r, vf_set1(0));
    }
}

/* What micro-tiles and transpositions may read outside a vector's own extent is 0. */
static void weigh_block(const struct tile *t, const struct cattn_backward *b) {
    const int step = MR > ROW_STEP ? MR : ROW_STEP;
    const int begin = (int)max64(0, t->all.begin - step), end = (int)min64(CATTN_BLOCK_KEYS, t->all.end + step);
    for (int v = 0; v < t->n_vectors; v++) {
        const struct extent *e = &t->vector[v];
        const int r = v * LANES;
        if (b->scores.drop_bits[0])
            weigh_lanes_drop_bits(t, b, e, r);
        else if (b->scores.drop.enabled)
            weigh_lanes_dropping(t, b, e, r);
        else
            weigh_lanes(b, e, r);
        zero_lanes(b, r, begin, e->begin == e->end ? end : e->begin);
        if (e->begin < e->end)
            zero_lanes(b, r, e->end, end);
    }
    for (int r = t->n_vectors * LANES; r < t->n_groups * MR; r += LANES)
        zero_lanes(b, r, begin, end);
}

static void backward_scores(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    tile_scores(&t);
    t.rows = &b->grads;
    tile_scores(&t);
    weigh_block(&t, b);
}

/* ---- the bias ---- */

/* dS of LANES rows, as it is stored: row by row. */
static void add_bias_rows(const struct tile *t, const struct cattn_backward *b, int r) {
    const struct extent *e = &t->vector[r / LANES];
    for (int k = e->begin / LANES * LANES; k < e->end; k += LANES) {
        const int n = (int)min64(LANES, t->n_keys - k);
        vf v[LANES];
        if (n <= 0)
            break;
        for (int i = 0; i < LANES; i++)
            v[i] = vf_loadu((const real *)b->grads.score + (k + i) * CATTN_TILE_ROWS + r);
        vf_transpose(v);
        for (int i = 0; i < LANES && r + i < b->scores.n_rows; i++)
            add_gradient((real *)b->grad_bias[r + i] + t->k0 + k, v[i], n);
    }
}

/* Sums over the rows; all lanes hold the same. */
static void sum_bias_rows(const struct tile *t, const struct cattn_backward *b) {
    real ones[LANES], *part = b->bias_part;
    for (int i = 0; i < LANES; i++)
        ones[i] = 1;
    for (int k = t->all.begin / MR * MR; k < t->all.end; k += MR) {
        vf acc[MR][NR];
        /* not the rows of the last vector that are not there: weight 0, but what they are given may be NaN */
        dot_tile(MR, 1, 0, b->scores.n_rows, (const real *)b->grads.score + k * CATTN_TILE_ROWS, CATTN_TILE_ROWS, 1,
                 ones, 0, acc);
        for (int m = 0; m < MR; m++)
            vf_storeu_n(part + k + m, acc[m][0], 1);
    }
}

/* Sums over the keys: a chain each block, added to what came before. */
static void sum_bias_keys(const struct tile *t, const struct cattn_backward *b, int r) {
    const struct extent *e = &t->vector[r / LANES];
    real *total = (real *)b->bias_sum + r;
    vf part = vf_set1(0);
    for (int k = e->begin; k < e->end; k++)
        part = part + vf_loadu((const real *)b->grads.score + k * CATTN_TILE_ROWS + r);
    vf_storeu(total, vf_loadu(total) + part);
}

static void backward_bias(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    if (b->grad_bias_keys)
        sum_bias_rows(&t, b);
    for (int v = 0; v < t.n_vectors; v++) {
        if (b->grad_bias[0])
            add_bias_rows(&t, b, v * LANES);
        if (b->grad_bias_row[0])
            sum_bias_keys(&t, b, v * LANES);
    }
}

/* ---- products ---- */

static void backward_query(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    if (b->scores.softcap > 0)
        for (int v = 0; v < t.n_vectors; v++)
            for (int k = t.vector[v].begin; k < t.vector[v].end; k++) {
                const int64_t at = k * CATTN_TILE_ROWS + v * LANES;
                real *grad = (real *)b->grads.score + at;
                /* what is hidden is 0 and stays it, whatever its score was */
                const vf g = vf_loadu(grad), slope = vf_loadu((const real *)b->scores.cap_slope + at);
                vf_storeu(grad, vf_select(vf_eq(g, vf_set1(0)), g, g * slope));
            }
    t.rows = &b->keys;
    if (b->keys.d_v) {
        t.value = block_rows(&t, b->keys.value, b->keys.value_row, b->keys.value_col, b->keys.d_v);
        value_block(&t);
    }
}

/* A sum over queries: of which array of weights, with which rows, to where. */
struct gather {
    const real *weights; /* [key][CATTN_TILE_ROWS] */
    const real *rows;    /* [query][stride] */
    int64_t stride, cols;
    vf factor; /* of the sum */
    real *to;
    int64_t to_row;
};

/* One vector again, leaving out the queries that may not see the key. */
static vf sum_over_queries_visible(const struct tile *t, const struct gather *g, int k, int64_t c, int first,
                                   int last) {
    vf sum = vf_set1(0);
    const int end = (int)min64(last, t->rows->n_rows);
    for (int r = first; r < end;) {
        vf chain = vf_set1(0);
        for (const int64_t stop = chain_end(r, end); r < stop; r++)
            if (key_visible(t->rows, r, t->k0 + k)) {
                vf w = vf_set1(g->weights[k * CATTN_TILE_ROWS + r]);
                chain = vf_fma(w, vf_loadu(g->rows + r * g->stride + c), chain);
            }
        sum = sum + chain;
    }
    return sum;
}

/* mr keys from k on, columns c on, the rows first .. last-1. */
INLINE void sum_over_queries_tile(int mr, int nr, const struct tile *t, const struct gather *g, int k, int64_t c,
                                  int first, int last) {
    vf sum[MR][NR];
    dot_tile(mr, nr, first, last, g->weights + k * CATTN_TILE_ROWS + first, CATTN_TILE_ROWS, 1,
             g->rows + first * g->stride + c, g->stride, sum);
    /* stay 0 as long as everything is finite */
    vf zero[4] = {vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0)};
#pragma GCC unroll 16
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
        for (int n = 0; n < nr; n++)
            zero[(m * NR + n) % 4] = vf_fma(sum[m][n], vf_set1(0), zero[(m * NR + n) % 4]);
    const bool again = vm_any(vm_not(finite_lanes((zero[0] + zero[1]) + (zero[2] + zero[3]))));
    const int left = (int)min64(g->cols - c, nr * LANES);
    const int64_t row = g->to_row;
    real *to = g->to + (t->k0 + k) * row + c;
    const vf factor = g->factor;
    if (__builtin_expect(again || k + mr > t->n_keys || left < nr * LANES, 0)) {
        for (int m = 0; m < mr && k + m < t->n_keys; m++)
            for (int n = 0; n < nr; n++)
                add_gradient(to + m * row + n * LANES,
                             (again ? sum_over_queries_visible(t, g, k + m, c + n * LANES, first, last) : sum[m][n]) *
                                 factor,
                             (int)min64(LANES, left - n * LANES));
        return;
    }
#pragma GCC unroll 16
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
        for (int n = 0; n < nr; n++)
            add_gradient(to + m * row + n * LANES, sum[m][n] * factor, LANES);
}

/* Does row r see one of the `height` keys from k on? */
INLINE bool meets(const struct tile *t, int r, int k, int height) { return t->hi[r] > k && t->lo[r] < k + height; }

/* Leaves of the rows [*first, *last) those from the first to the last that see one of the keys, if any; widened to
 * fours, which the loop over them takes at a time. */
INLINE bool narrow(const struct tile *t, int k, int height, int *first, int *last) {
    while (*first < *last && !meets(t, *first, k, height))
        ++*first;
    while (*first < *last && !meets(t, *last - 1, k, height))
        --*last;
    const bool any = *first < *last;
    *first = *first / 4 * 4;
    *last = (*last + 3) / 4 * 4;
    return any;
}

static void sum_over_queries_block(const struct tile *t, const struct gather *g) {
    for (int k = t->all.begin, height; k < min64(t->all.end, t->n_keys); k += height) {
        int first = 0, last = t->rows->n_rows;
        height = key_height(MR, t->all.end - k);
        if (!narrow(t, k, height, &first, &last))
            continue;
        for (int64_t c = 0; c < g->cols; c += PANEL)
            if (NR == 1 || g->cols - c > LANES)
                AT_HEIGHT(MR, height, sum_over_queries_tile, NR, t, g, k, c, first, last);
            else
                AT_HEIGHT(MR, height, sum_over_queries_tile, 1, t, g, k, c, first, last);
    }
}

static void backward_keys(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    const struct gather value = {.weights = b->scores.score,
                                 .rows = b->grad_rows,
                                 .stride = b->grad_cols,
                                 .cols = b->grads.head_dim,
                                 .factor = vf_set1((real)b->grads.scale),
                                 .to = b->grad_value,
                                 .to_row = b->grad_value_row};
    const struct gather key = {.weights = b->grads.score,
                               .rows = b->query_rows,
                               .stride = b->query_cols,
                               .cols = b->scores.head_dim,
                               .factor = vf_set1((real)b->scores.scale),
                               .to = b->grad_key,
                               .to_row = b->grad_key_row};
    sum_over_queries_block(&t, &value);
    sum_over_queries_block(&t, &key);
    if (b->grad_bias_keys)
        for (int k = t.all.begin; k < min64(t.all.end, t.n_keys); k++)
            add_gradient((real *)b->grad_bias_keys + k0 + k, vf_set1(((const real *)b->bias_part)[k]), 1);
}

/* ---- the end ---- */

static double backward_sink(struct cattn_backward *b) {
    const struct cattn_rows *rows = &b->scores;
    real sum = 0;
    for (int r = 0; r < rows->n_rows; r++) {
        const real sink = (real)rows->sink[r];
        const struct row_lanes row = {vf_set1(((const real *)b->lse)[r]), vf_set1(((const real *)b->lse_residual)[r]),
                                      vf_set1(((const real *)b->lse_factor)[r]), vf_set1(((const real *)b->delta)[r])};
        if (!is_neg_inf(sink) && row_sees_any_key(rows, r))
            vf_storeu_n(&sum, vf_fma(weight_of(vf_set1(sink), row), row.delta, vf_set1(sum)), 1);
    }
    return (double)sum;
}

static void backward_finish(struct cattn_backward *b) {
    const struct cattn_rows *keys = &b->keys;
    const vf scale = vf_set1((real)b->scores.scale), zero = vf_set1(0);
    for (int r = 0; r < keys->n_rows; r++) {
        const real *acc = (const real *)keys->acc + r * keys->acc_cols;
        for (int64_t c = 0; c < keys->d_v; c += LANES) {
            const vf v = with_one_nan(vf_loadu(acc + c) * scale + zero);
            store_strided((real *)b->grad_query[r] + c, 1, v, (int)min64(LANES, keys->d_v - c));
        }
        if (b->grad_bias_row[0]) {
            const real sum = ((const real *)b->bias_sum)[r];
            *(real *)b->grad_bias_row[r] = sum == sum ? sum : CANONICAL_NAN;
        }
    }
}
