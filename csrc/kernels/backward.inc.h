/* backward.inc.h -- the gradients of attention: one block of up to CATTN_TILE_ROWS queries against one block of keys.
 *
 * The weights P are recomputed from the scores and the rows' log-sum-exp. With grad_out dO, delta = dO . O (row by
 * row) less the gradient of the log-sum-exp, and Z = 1/(1-p) where dropout keeps a weight, else 0:
 *
 *     dV = (P Z)^T dO     dP = Z (dO V^T)     dS = P (dP - delta)     dQ = scale dS K     dK = scale dS^T Q
 *
 * Everything is stored transposed, [key][query]. score_panel computes S and dO V^T, value_block computes dQ; only the
 * sums over queries (dK, dV) are new here. docs/bit_contract.md ("Gradients") has the order of operations and the
 * treatment of hidden pairs.
 */

/* Adds a block's part to the first n <= LANES elements. Any NaN is written as the canonical one. */
INLINE void add_gradient(real *to, vf part, int n) {
    vf sum = (n == LANES ? vf_loadu(to) : vf_loadu_n(to, n)) + part;
    sum = with_one_nan(sum);
    if (n == LANES)
        vf_storeu(to, sum);
    else
        vf_storeu_n(to, sum, n);
}

/* Copies the rows of the queries or of grad_out, padded with zeros: to `cols` columns, and to a number of rows that is
 * a multiple of LANES and of 4, because the sums over queries take rows in fours (narrow). */
static void copy_rows(const struct cattn_rows *rows, real *to, int64_t cols) {
    const int64_t padded = cattn_round_up(cattn_round_up(rows->n_rows, LANES), 4), depth = rows->call.head_dim,
                  col = rows->call.query_col;
    const int64_t whole = rows->call.storage == CATTN_STORED_PLAIN && col == 1 ? depth / LANES * LANES : 0;
    for (int r = 0; r < rows->n_rows; r++, to += cols) {
        int64_t d = 0;
        for (; d < whole; d += LANES)
            vf_storeu(to + d, vf_loadu((const real *)rows->query[r] + d));
        for (; d < depth; d += LANES)
            vf_storeu(to + d,
                      load_stored(rows->call.storage, rows->query[r], d * col, col, (int)min64(LANES, depth - d)));
        for (; d < cols; d += LANES)
            vf_storeu(to + d, vf_set1(0));
    }
    memset(to, 0, (size_t)((padded - rows->n_rows) * cols) * sizeof(real));
}

/* With G the logistic function of the gate, and out the output that it has multiplied, the gradient of the gate is
 * dO * out * (1 - G), and dO G takes the place of dO: where a product of dO with out is a product of dO G with the
 * output before the gate, it stays. Of a row without visible keys the gradient is 0. */
static void gate_gradients(struct cattn_backward *b) {
    const struct cattn_rows *rows = &b->scores;
    const int64_t d_v = b->grads.call.head_dim, col = rows->call.out_col;
    real *grad = b->grad_rows;
    for (int r = 0; r < rows->n_rows; b->grad_out[r++] = grad, grad += b->grad_cols) {
        vf size = vf_set1(0), odd = vf_set1(0);
        real sizes[LANES];
        for (int64_t c = 0; c < d_v; c += LANES) {
            const int n = (int)min64(LANES, d_v - c);
            const vf g = vf_loadu(grad + c), out = load_stored(b->out_storage, rows->per_row->out[r], c * col, col, n);
            vf other, gate = gate_at(rows, r, c, n, &other), part = with_one_nan(g * out * other + vf_set1(0));
            size = size + vf_abs(g);
            odd = vf_fma(part, vf_set1(0), odd);
            store_strided((real *)b->grad_gate[r] + c, 1, part, n);
            vf_storeu(grad + c, g * gate);
        }
        vf_storeu(sizes, size);
        for (int i = 0; i < LANES; i++)
            b->fit.grad_size[r] += (double)sizes[i];
        if (vm_any(vm_not(vf_eq(odd, odd))) && !row_sees_any_key(rows, r))
            memset(b->grad_gate[r], 0, (size_t)d_v * sizeof(real));
    }
    b->grads.call.storage = CATTN_STORED_PLAIN;
    b->grads.call.query_col = 1;
}

/* The derivative of the lse with respect to a score is the weight, so its gradient joins delta. Rounded once. */
static void subtract_grad_lse(const struct cattn_backward *b) {
    real *delta = b->delta;
    for (int r = 0; r < b->scores.n_rows; r++)
        delta[r] = (real)((double)delta[r] - b->grad_lse[r]);
}

static void backward_begin(struct cattn_backward *b) {
    pack_query_tile(&b->scores);
    copy_rows(&b->scores, b->query_rows, b->query_cols);
    copy_rows(&b->grads, b->grad_rows, b->grad_cols);
    memset(&b->fit, 0, sizeof b->fit);
    sum_products(&b->grads, b->scores.per_row->out, b->out_storage, b->scores.call.out_col, b->delta, b->fit.delta,
                 b->fit.delta_magnitude);
    if (b->scores.call.has_gate)
        gate_gradients(b);
    pack_query_tile(&b->grads);
    if (b->has_grad_lse)
        subtract_grad_lse(b);
    const int padded = sums_begin(&b->scores, &b->lse, &b->keys);
    memset(b->bias_sum, 0, (size_t)padded * sizeof(real));
}

/* Scores, products dO V^T, lse and delta of LANES rows, and the block's parts of the sums in struct cattn_fit. */
struct lanes_to_weigh {
    real *score, *grad;
    struct lse_lanes lse;
    vf delta, weights, products, magnitudes;
    unsigned chains;
};

/* One vector of queries and one key: replaces the score by the weight after dropout, and the product dO V^T by dS. */
INLINE void weigh(struct lanes_to_weigh *lanes, int k, bool dropping, vm drop_bits) {
    real *score = lanes->score + k * CATTN_TILE_ROWS, *grad = lanes->grad + k * CATTN_TILE_ROWS;
    const vf zero = vf_set1(0), s = vf_loadu(score);
    const vm hidden = vf_eq(s, vf_set1(NEG_INF));
    vf dp = vf_loadu(grad), p = vf_select(hidden, zero, weight_of(s, lanes->lse));
    if (dropping)
        dp = vf_select(drop_bits, dp, zero);
    const vf product = vf_select(hidden, zero, p * dp);
    lanes->weights = lanes->weights + p;
    lanes->products = lanes->products + product;
    lanes->magnitudes = lanes->magnitudes + vf_abs(product);
    vf_storeu(grad, vf_select(hidden, zero, p * (dp - lanes->delta)));
    vf_storeu(score, dropping ? vf_select(drop_bits, p, zero) : p);
}

/* Keys of chains that no row sees come, too: their scores are not there. */
INLINE void weigh_dropping(void *context, int k, vm drop_bits) {
    struct lanes_to_weigh *lanes = context;
    if (has_chain(lanes->chains, k))
        weigh(lanes, k, true, drop_bits);
}

static void weigh_lanes(const struct tile *t, struct cattn_backward *b, const struct extent *e, int r) {
    const vf zero = vf_set1(0);
    struct lanes_to_weigh lanes = {.score = (real *)b->scores.scratch.score + r,
                                   .grad = (real *)b->grads.scratch.score + r,
                                   .lse = lse_lanes(&b->lse, r),
                                   .delta = vf_loadu((const real *)b->delta + r),
                                   .weights = zero,
                                   .products = zero,
                                   .magnitudes = zero,
                                   .chains = e->chains};
    const vm all = vf_eq(zero, zero);
    if (b->scores.scratch.drop_bits)
        each_stream_bits(t, e, r, weigh_dropping, &lanes);
    else if (b->scores.drop.enabled)
        each_philox_bits(t, e, r, weigh_dropping, &lanes);
    else
        for (int k = e->begin, end; k < e->end; k = end) {
            end = (int)min64(e->end, chain_run_end(e->chains, k));
            if (has_chain(e->chains, k))
#pragma GCC unroll 4
                for (int i = k; i < end; i++)
                    weigh(&lanes, i, false, all);
        }
    add_doubles(b->fit.weights + r, lanes.weights);
    add_doubles(b->fit.products + r, lanes.products);
    add_doubles(b->fit.magnitudes + r, lanes.magnitudes);
}

/* Weights and dS of the block. */
static void weigh_block(const struct tile *t, struct cattn_backward *b) {
    const struct planes planes = {{b->scores.scratch.score, b->grads.scratch.score}, 2};
    for (int v = 0; v < t->n_vectors; v++)
        weigh_lanes(t, b, &t->vector[v], v * LANES);
    zero_unseen(t, &planes);
}

static void backward_scores(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    /* both views have the same ranges, hence the same tile */
    tile_scores(&t);
    t.rows = &b->grads;
    tile_scores(&t);
    t.rows = &b->scores; /* whose dropout is drawn */
    weigh_block(&t, b);
}

/* ---- the bias ---- */

/* Adds dS of LANES rows to the gradient of the bias, which is stored row by row. */
static void add_bias_rows(const struct tile *t, const struct cattn_backward *b, int r) {
    const struct extent *e = &t->vector[r / LANES];
    for (int k = e->begin / LANES * LANES; k < e->end; k += LANES) {
        const int n = (int)min64(LANES, t->n_keys - k);
        vf v[LANES];
        if (n <= 0)
            break;
        for (int i = 0; i < LANES; i++)
            v[i] = vf_loadu((const real *)b->grads.scratch.score + (k + i) * CATTN_TILE_ROWS + r);
        vf_transpose(v);
        for (int i = 0; i < LANES && r + i < b->scores.n_rows; i++)
            add_gradient((real *)b->grad_bias[r + i] + t->k0 + k, v[i], n);
    }
}

/* Sums of dS over the rows, a dot product with ones; all lanes hold the same sum. */
static void sum_bias_rows(const struct tile *t, const struct cattn_backward *b) {
    real ones[LANES], *part = b->bias_part;
    for (int i = 0; i < LANES; i++)
        ones[i] = 1;
    for (int k = t->all.begin / MR * MR; k < t->all.end; k += MR) {
        vf acc[MR][WIDEST];
        /* not the padding rows of the last vector: their weight is 0, but their dS may be 0 * NaN */
        dot_tile(MR, 1, 0, b->scores.n_rows, (const real *)b->grads.scratch.score + k * CATTN_TILE_ROWS,
                 CATTN_TILE_ROWS, 1, ones, 0, acc);
        for (int m = 0; m < MR; m++)
            vf_storeu_n(part + k + m, acc[m][0], 1);
    }
}

/* Sums of dS over the keys: one chain a block, added to the blocks before. */
static void sum_bias_keys(const struct tile *t, const struct cattn_backward *b, int r) {
    const struct extent *e = &t->vector[r / LANES];
    real *total = (real *)b->bias_sum + r;
    vf part = vf_set1(0);
    for (int k = e->begin; k < e->end; k++)
        part = part + vf_loadu((const real *)b->grads.scratch.score + k * CATTN_TILE_ROWS + r);
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

/* With softcap, dS becomes the gradient of the uncapped scores first. That is why backward_bias comes before. */
static void backward_query(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    if (b->scores.call.score_options.softcap > 0)
        for (int v = 0; v < t.n_vectors; v++)
            for (int k = t.vector[v].begin; k < t.vector[v].end; k++) {
                const int64_t at = k * CATTN_TILE_ROWS + v * LANES;
                real *grad = (real *)b->grads.scratch.score + at;
                /* a hidden pair stays 0, even if its derivative is NaN */
                const vf g = vf_loadu(grad), derivative = vf_loadu((const real *)b->scores.scratch.cap_derivative + at);
                vf_storeu(grad, vf_select(vf_eq(g, vf_set1(0)), g, g * derivative));
            }
    if (b->keys.call.d_v)
        add_values(&t, &b->keys);
}

/* The operands of a sum over queries: to[key] += factor * sum over r of weights[key][r] * rows[r]. */
struct query_sum {
    const real *weights; /* [key][CATTN_TILE_ROWS] */
    const real *rows;    /* [query][stride] */
    int64_t stride, cols;
    vf factor;
    real *to;
    int64_t to_row;
};

/* Computes one vector again without the queries that may not see the key. */
static vf sum_over_queries_visible(const struct tile *t, const struct query_sum *q, int k, int64_t c, int first,
                                   int last) {
    vf sum = vf_set1(0);
    const int end = (int)min64(last, t->rows->n_rows);
    for (int r = first; r < end;) {
        vf chain = vf_set1(0);
        for (const int64_t stop = chain_end(r, end); r < stop; r++)
            if (key_visible(t->rows, r, t->k0 + k)) {
                vf w = vf_set1(q->weights[k * CATTN_TILE_ROWS + r]);
                chain = vf_fma(w, vf_loadu(q->rows + r * q->stride + c), chain);
            }
        sum = sum + chain;
    }
    return sum;
}

/* Sums over the rows first .. last-1 for mr keys from k on and the columns from c on. `chains` of rows are the constant
 * ALL_CHAINS unless some are missing. */
INLINE void sum_over_queries_tile(int mr, int nr, const struct tile *t, const struct query_sum *q, unsigned chains,
                                  int k, int64_t c, int first, int last) {
    vf sum[MR][WIDEST];
    const real *weights = q->weights + k * CATTN_TILE_ROWS + first, *from = q->rows + first * q->stride + c;
    if (chains == ALL_CHAINS)
        dot_tile(mr, nr, first, last, weights, CATTN_TILE_ROWS, 1, from, q->stride, sum);
    else
        dot_chains(mr, nr, chains, first, last, weights, CATTN_TILE_ROWS, 1, from, q->stride, sum);
    const bool finite = tile_is_finite(mr, nr, sum);
    const int left = (int)min64(q->cols - c, nr * LANES);
    const int64_t row = q->to_row;
    real *to = q->to + (t->k0 + k) * row + c;
    const vf factor = q->factor;
    if (__builtin_expect(!finite || k + mr > t->n_keys || left < nr * LANES, 0)) {
        for (int m = 0; m < mr && k + m < t->n_keys; m++)
            for (int n = 0; n < nr; n++)
                add_gradient(to + m * row + n * LANES,
                             (finite ? sum[m][n] : sum_over_queries_visible(t, q, k + m, c + n * LANES, first, last)) *
                                 factor,
                             (int)min64(LANES, left - n * LANES));
        return;
    }
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            add_gradient(to + m * row + n * LANES, sum[m][n] * factor, LANES);
}

/* Whether row r may see one of the `height` keys from k on. */
INLINE bool meets(const struct tile *t, int r, int k, int height) { return t->hi[r] > k && t->lo[r] < k + height; }

/* Narrows the rows [*first, *last) to those from the first to the last that see one of the keys. Returns false if none
 * does. The result is widened to multiples of 4; the rows that this adds have the weight 0. */
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

/* The chains of rows of which a vector sees the chain of key k. */
INLINE unsigned rows_that_see(const struct tile *t, int k) {
    unsigned chains = 0;
    for (int v = 0; v < t->n_vectors; v++) {
        const struct extent *e = &t->vector[v];
        if (e->begin < k / CATTN_CHAIN_TERMS * CATTN_CHAIN_TERMS + CATTN_CHAIN_TERMS && k < e->end &&
            has_chain(e->chains, k))
            chains |= 1u << v * LANES / CATTN_CHAIN_TERMS;
    }
    return chains;
}

/* sum_over_queries_block where chains are missing: keys that the same chains of rows see come together. */
NOINLINE void sum_over_queries_chains(const struct tile *t, const struct query_sum *q) {
    const int last_key = (int)min64(t->all.end, t->n_keys);
    for (int k = t->all.begin, end; k < last_key; k = end) {
        const unsigned chains = rows_that_see(t, k) & (ALL_CHAINS >> 1);
        for (end = (int)chain_end(k, t->all.end); end < last_key && rows_that_see(t, end) == chains;)
            end = (int)chain_end(end, t->all.end);
        for (int height; chains && k < min64(end, last_key); k += height) {
            int first = 0, last = t->rows->n_rows;
            height = key_height(MR, end - k);
            if (!narrow(t, k, height, &first, &last))
                continue;
            for (int64_t c = 0; c < q->cols; c += PANEL)
                AT_SIZE(MR, height, q->cols - c > LANES, sum_over_queries_tile, t, q, chains, k, c, first, last);
        }
    }
}

static void sum_over_queries_block(const struct tile *t, const struct query_sum *q) {
    if (t->has_chains) {
        sum_over_queries_chains(t, q);
        return;
    }
    for (int k = t->all.begin, height; k < min64(t->all.end, t->n_keys); k += height) {
        int first = 0, last = t->rows->n_rows;
        height = key_height(MR, t->all.end - k);
        if (!narrow(t, k, height, &first, &last))
            continue;
        for (int64_t c = 0; c < q->cols; c += PANEL)
            AT_SIZE(MR, height, q->cols - c > LANES, sum_over_queries_tile, t, q, ALL_CHAINS, k, c, first, last);
    }
}

static void backward_keys(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    const struct query_sum value = {.weights = b->scores.scratch.score,
                                    .rows = b->grad_rows,
                                    .stride = b->grad_cols,
                                    .cols = b->grads.call.head_dim,
                                    .factor = vf_set1((real)b->grads.call.score_options.scale),
                                    .to = b->grad_value,
                                    .to_row = b->grad_value_row};
    const struct query_sum key = {.weights = b->grads.scratch.score,
                                  .rows = b->query_rows,
                                  .stride = b->query_cols,
                                  .cols = b->scores.call.head_dim,
                                  .factor = vf_set1((real)b->scores.call.score_options.scale),
                                  .to = b->grad_key,
                                  .to_row = b->grad_key_row};
    sum_over_queries_block(&t, &value);
    sum_over_queries_block(&t, &key);
    if (b->grad_bias_keys)
        for (int k = t.all.begin; k < min64(t.all.end, t.n_keys); k++)
            add_gradient((real *)b->grad_bias_keys + k0 + k, vf_set1(((const real *)b->bias_part)[k]), 1);
}

/* ---- the end ---- */

static bool backward_sees(const struct cattn_backward *b, int r, double *sink_weight) {
    const struct cattn_rows *rows = &b->scores;
    *sink_weight = rows->call.has_sinks ? (double)weight_of_row((real)rows->per_row->sink[r], &b->lse, r) : 0;
    return row_sees_any_key(rows, r);
}

/* The sink's weight is exp(sink - lse). Of a row without visible keys only the lse depends on the sink. */
static double backward_sink(struct cattn_backward *b) {
    const struct cattn_rows *rows = &b->scores;
    real sum = 0;
    for (int r = 0; r < rows->n_rows; r++) {
        const real sink = (real)rows->per_row->sink[r];
        const bool sees = row_sees_any_key(rows, r);
        const real delta = !sees && b->has_grad_lse ? (real)-b->grad_lse[r] : ((const real *)b->delta)[r];
        if (!is_neg_inf(sink) && (sees || b->has_grad_lse))
            vf_storeu_n(&sum, vf_fma(vf_set1(weight_of_row(sink, &b->lse, r)), vf_set1(delta), vf_set1(sum)), 1);
    }
    return (double)sum;
}

static void backward_finish(struct cattn_backward *b) {
    const struct cattn_rows *keys = &b->keys;
    const vf scale = vf_set1((real)b->scores.call.score_options.scale), zero = vf_set1(0);
    for (int r = 0; r < keys->n_rows; r++) {
        const real *acc = (const real *)keys->scratch.acc + r * keys->call.acc_cols;
        for (int64_t c = 0; c < keys->call.d_v; c += LANES) {
            const vf v = with_one_nan(vf_loadu(acc + c) * scale + zero);
            store_strided((real *)b->grad_query[r] + c, 1, v, (int)min64(LANES, keys->call.d_v - c));
        }
        if (b->grad_bias_row[0]) {
            const real sum = ((const real *)b->bias_sum)[r];
            *(real *)b->grad_bias_row[r] = sum == sum ? sum : CANONICAL_NAN;
        }
    }
}
