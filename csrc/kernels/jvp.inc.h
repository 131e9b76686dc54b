/* jvp.inc.h -- the derivative of attention in the direction of tangents, and the gradients of that derivative.
 *
 * A block of up to CATTN_TILE_ROWS queries meets a block of keys, after the forward pass. The
 * weights P are computed again from the scores and the log-sum-exp. With tangents S' of the scores, and Z the dropout's
 * factors:
 *
 *     mean = sum of P S'     O' = (P Z S') V + (P Z) V' - mean O     lse' = mean
 *
 * Everything is stored transposed, [key][query]. The kernels of the tile path compute all products.
 */

/* ---- tangents of the scores ---- */

/* The products of a view, in the place of its scores; or added to what stands there. */
static void tile_products(struct tile *t, struct cattn_rows *view, bool adds) {
    struct cattn_rows *own = t->rows;
    t->rows = view;
    scores_begin(t);
    for (int v = 0; v < t->n_vectors && adds; v++)
        t->has_bias[v] = true;
    for (int v = 0; v < t->n_vectors; v += NR)
        score_panel(t, v);
    t->rows = own;
}

/* The tangents of the products become tangents of the capped scores. The second derivative is multiplied with them. */
static void cap_tangents(const struct tile *t, const struct cattn_row_scratch *scratch, real *tangents) {
    const real *derivatives = scratch->cap_derivative;
    real *curvatures = scratch->cap_curvature;
    for (int v = 0; v < t->n_vectors; v++)
        for (int k = t->vector[v].begin; k < t->vector[v].end; k++) {
            const int64_t at = k * CATTN_TILE_ROWS + v * LANES;
            const vf raw = vf_loadu(tangents + at);
            if (!has_chain(t->vector[v].chains, k))
                continue;
            vf_storeu(tangents + at, raw * vf_loadu(derivatives + at));
            if (curvatures)
                vf_storeu(curvatures + at, raw * vf_loadu(curvatures + at));
        }
}

/* Adds the tangents of the bias of LANES rows from r on. */
static void add_bias_tangents(const struct tile *t, const struct cattn_score_tangents *s, int r) {
    const struct extent *e = &t->vector[r / LANES];
    for (int k = e->begin / LANES * LANES; k < e->end; k += LANES) {
        const int n = (int)max64(0, min64(LANES, t->n_keys - k));
        vf v[LANES];
        if (!has_chain(e->chains, k))
            continue;
        for (int i = 0; i < LANES; i++)
            v[i] = r + i < t->rows->n_rows
                       ? load_strided((const real *)s->bias[r + i] + (t->k0 + k) * s->bias_col, s->bias_col, n)
                       : vf_set1(0);
        vf_transpose(v);
        for (int i = 0; i < LANES; i++) {
            real *to = (real *)s->tangent + (k + i) * CATTN_TILE_ROWS + r;
            if (k + i >= e->begin && k + i < e->end)
                vf_storeu(to, vf_loadu(to) + v[i]);
        }
    }
}

/* The tangents of all scores of the block; of hidden pairs any number. t->rows has the scores. */
static void score_tangents(struct tile *t, struct cattn_score_tangents *s) {
    const struct planes planes = {{s->tangent}, 1};
    if (s->has_query)
        tile_products(t, &s->query, false);
    if (s->has_key)
        tile_products(t, &s->key, s->has_query);
    if (!s->has_query && !s->has_key)
        for (int v = 0; v < t->n_vectors; v++)
            zero_lanes(&planes, v * LANES, t->vector[v].begin, t->vector[v].end);
    if (t->rows->call.score_options.softcap > 0)
        cap_tangents(t, &t->rows->scratch, s->tangent);
    for (int v = 0; v < t->n_vectors && s->has_bias; v++)
        add_bias_tangents(t, s, v * LANES);
}

/* Packs the query tangents. */
static void score_tangents_begin(struct cattn_score_tangents *s) {
    if (s->has_query)
        pack_query_tile(&s->query);
}

/* ---- weights ---- */

/* Replaces the scores of LANES rows by weight * tangent, which is added to the rows' means in chains of keys, and the
 * tangents by the weights. */
static void weigh_tangents(const struct cattn_jvp *j, const struct extent *e, int r) {
    const struct lse_lanes lse = lse_lanes(&j->lse, r);
    real *scores = (real *)j->scores.scratch.score + r, *tangents = (real *)j->tangents.tangent + r;
    real *mean = (real *)j->mean + r;
    const vf zero = vf_set1(0);
    vf total = zero;
    for (int k = e->begin, end; k < e->end; k = end) {
        vf chain = zero;
        end = (int)chain_end(k, e->end);
        if (!has_chain(e->chains, k))
            continue;
        for (int i = k; i < end; i++) {
            const vf score = vf_loadu(scores + i * CATTN_TILE_ROWS), tangent = vf_loadu(tangents + i * CATTN_TILE_ROWS);
            const vm hidden = vf_eq(score, vf_set1(NEG_INF));
            const vf weight = vf_select(hidden, zero, weight_of(score, lse));
            const vf product = vf_select(hidden, zero, weight * tangent);
            chain = chain + product;
            vf_storeu(scores + i * CATTN_TILE_ROWS, product);
            vf_storeu(tangents + i * CATTN_TILE_ROWS, weight);
        }
        total = total + chain;
    }
    vf_storeu(mean, vf_loadu(mean) + total);
}

/* Two arrays of LANES rows, of which the dropped pairs become +0. */
INLINE void drop_pair(void *context, int k, vm drop_bits) {
    real *const *planes = context;
    for (int i = 0; i < 2; i++) {
        real *w = planes[i] + k * CATTN_TILE_ROWS;
        vf_storeu(w, vf_select(drop_bits, vf_loadu(w), vf_set1(0)));
    }
}

static void jvp_begin(struct cattn_jvp *j) {
    pack_query_tile(&j->scores);
    score_tangents_begin(&j->tangents);
    const int padded = sums_begin(&j->scores, &j->lse, &j->values);
    memset(j->mean, 0, (size_t)padded * sizeof(real));
}

static void jvp_block(struct cattn_jvp *j, int64_t k0, int64_t k1) {
    const struct planes planes = {{j->scores.scratch.score, j->tangents.tangent}, 2};
    struct tile t;
    if (!tile_begin(&t, &j->scores, k0, k1))
        return;
    tile_scores(&t);
    score_tangents(&t, &j->tangents);
    for (int v = 0; v < t.n_vectors; v++) {
        weigh_tangents(j, &t.vector[v], v * LANES);
        if (j->scores.drop.enabled) {
            real *pair[2] = {(real *)planes.of[0] + v * LANES, (real *)planes.of[1] + v * LANES};
            each_philox_bits(&t, &t.vector[v], v * LANES, drop_pair, pair);
        }
    }
    zero_unseen(&t, &planes);
    if (!j->values.call.d_v)
        return;
    add_values(&t, &j->values);
    if (j->has_value)
        add_values(&t, &j->value_tangents);
}

/* ---- the end ---- */

/* out_tangent = acc * keep_scale - mean * out, of one row. */
static void finish_out_tangent(const struct cattn_jvp *j, int r, real mean) {
    const struct cattn_call_shape *call = &j->scores.call;
    const real *acc = (const real *)j->values.scratch.acc + r * call->acc_cols;
    const vf factor = vf_set1((real)call->keep_scale), minus = vf_set1(-mean);
    for (int64_t c = 0; c < call->d_v; c += LANES) {
        const int n = (int)min64(LANES, call->d_v - c);
        const vf out = load_stored(call->storage, j->scores.per_row->out[r], c * call->out_col, call->out_col, n);
        const vf v = vf_fma(minus, out, vf_loadu(acc + c) * factor) + vf_set1(0);
        store_stored(call->storage, j->out_tangent[r], c * j->out_tangent_col, j->out_tangent_col, with_one_nan(v), n);
    }
}

static void jvp_finish(struct cattn_jvp *j) {
    const struct cattn_rows *rows = &j->scores;
    for (int r = 0; r < rows->n_rows; r++) {
        real mean = ((const real *)j->mean)[r];
        const real sink = rows->call.has_sinks ? (real)rows->per_row->sink[r] : NEG_INF;
        if (j->tangents.has_sink && !is_neg_inf(sink))
            vf_storeu_n(
                &mean,
                vf_fma(vf_set1(weight_of_row(sink, &j->lse, r)), vf_set1((real)j->tangents.sink[r]), vf_set1(mean)), 1);
        finish_out_tangent(j, r, mean);
        if (j->lse_tangent[0])
            *(real *)j->lse_tangent[r] = mean == mean ? mean : CANONICAL_NAN;
    }
}

/* ---- the gradients of the derivative ---- */

/* With the gradient dO' of the output's tangent O', w = Z (dO' V^T), w' = Z (dO' V'^T), delta = dO' . O less the
 * gradient of the tangent of the log-sum-exp, and delta' = dO' . O':
 *
 *     dS' = P (w - delta)     dS = P ((S' - mean) (w - delta) + w' - delta')
 *     dQ = scale (dS K + dS' K')     dK = scale (dS^T Q + dS'^T Q')     dV = (P Z (S' - mean))^T dO'
 *
 * dS' is what the gradients of attention call dS. The sums over queries and the gradient of the bias have their
 * kernels.
 */

/* The whole struct, of which a driver passes the first member. */
INLINE struct cattn_jvp_backward *of_second_order(struct cattn_backward *b) { return (struct cattn_jvp_backward *)b; }

static void jvp_backward_begin(struct cattn_backward *b) {
    struct cattn_jvp_backward *j = of_second_order(b);
    backward_begin(b);
    score_tangents_begin(&j->tangents);
    if (j->tangents.has_query)
        copy_rows(&j->tangents.query, j->query_rows, b->query_cols);
    memset(&j->fit, 0, sizeof j->fit);
    sum_products(&b->grads, j->out_tangent, b->out_storage, j->out_tangent_col, j->delta, j->fit.delta,
                 j->fit.delta_magnitude);
    for (int r = 0; r < cattn_round_up(b->scores.n_rows, LANES); r++)
        ((real *)j->mean)[r] = r < b->scores.n_rows ? *(const real *)j->lse_tangent[r] : 0;
}

/* What LANES rows read and write, and the block's parts of the sums in cattn_fit and cattn_tangent_fit. */
struct lanes_to_derive {
    real *score, *grad, *tangent;
    const real *grad_tangent; /* or NULL */
    struct lse_lanes lse;
    vf delta, delta_tangent, mean, weights, products, magnitudes;
    vf centred, centred_magnitude, tangent_products, tangent_magnitudes;
    unsigned chains;
};

/* One vector of queries and one key: replaces the score by the weight of dV, the product dO' V^T by dS, and the tangent
 * by dS'. */
INLINE void derive(struct lanes_to_derive *lanes, int k, bool dropping, vm drop_bits) {
    const int at = k * CATTN_TILE_ROWS;
    const vf zero = vf_set1(0), s = vf_loadu(lanes->score + at);
    const vm hidden = vf_eq(s, vf_set1(NEG_INF));
    const vf p = vf_select(hidden, zero, weight_of(s, lanes->lse));
    vf w = vf_loadu(lanes->grad + at), moved = lanes->grad_tangent ? vf_loadu(lanes->grad_tangent + at) : zero;
    if (dropping) {
        w = vf_select(drop_bits, w, zero);
        moved = vf_select(drop_bits, moved, zero);
    }
    const vf product = vf_select(hidden, zero, p * w), centred = vf_loadu(lanes->tangent + at) - lanes->mean,
             slope = w - lanes->delta;
    lanes->weights = lanes->weights + p;
    lanes->products = lanes->products + product;
    lanes->magnitudes = lanes->magnitudes + vf_abs(product);
    const vf change = vf_fma(centred, slope, moved - lanes->delta_tangent);
    const vf of_value = vf_select(hidden, zero, p * centred);
    const vf term = vf_select(hidden, zero, vf_fma(of_value, w, p * moved));
    lanes->centred = lanes->centred + of_value;
    lanes->centred_magnitude = lanes->centred_magnitude + vf_abs(of_value);
    lanes->tangent_products = lanes->tangent_products + term;
    lanes->tangent_magnitudes = lanes->tangent_magnitudes + vf_abs(term);
    vf_storeu(lanes->grad + at, vf_select(hidden, zero, p * change));
    vf_storeu(lanes->tangent + at, vf_select(hidden, zero, p * slope));
    vf_storeu(lanes->score + at, dropping ? vf_select(drop_bits, of_value, zero) : of_value);
}

INLINE void derive_dropping(void *context, int k, vm drop_bits) {
    struct lanes_to_derive *lanes = context;
    if (has_chain(lanes->chains, k))
        derive(lanes, k, true, drop_bits);
}

static void derive_lanes(const struct tile *t, struct cattn_jvp_backward *j, const struct extent *e, int r) {
    struct cattn_backward *b = &j->backward;
    const vf zero = vf_set1(0);
    struct lanes_to_derive lanes = {.score = (real *)b->scores.scratch.score + r,
                                    .grad = (real *)b->grads.scratch.score + r,
                                    .tangent = (real *)j->tangents.tangent + r,
                                    .grad_tangent = j->has_value ? (const real *)j->grads.scratch.score + r : NULL,
                                    .lse = lse_lanes(&b->lse, r),
                                    .delta = vf_loadu((const real *)b->delta + r),
                                    .delta_tangent = vf_loadu((const real *)j->delta + r),
                                    .mean = vf_loadu((const real *)j->mean + r),
                                    .weights = zero,
                                    .products = zero,
                                    .magnitudes = zero,
                                    .centred = zero,
                                    .centred_magnitude = zero,
                                    .tangent_products = zero,
                                    .tangent_magnitudes = zero,
                                    .chains = e->chains};
    const vm all = vf_eq(zero, zero);
    if (b->scores.drop.enabled)
        each_philox_bits(t, e, r, derive_dropping, &lanes);
    else
        for (int k = e->begin, end; k < e->end; k = end) {
            end = (int)min64(e->end, chain_run_end(e->chains, k));
            if (has_chain(e->chains, k))
                for (int i = k; i < end; i++)
                    derive(&lanes, i, false, all);
        }
    add_doubles(b->fit.weights + r, lanes.weights);
    add_doubles(b->fit.products + r, lanes.products);
    add_doubles(b->fit.magnitudes + r, lanes.magnitudes);
    add_doubles(j->fit.centred + r, lanes.centred);
    add_doubles(j->fit.centred_magnitude + r, lanes.centred_magnitude);
    add_doubles(j->fit.products + r, lanes.tangent_products);
    add_doubles(j->fit.magnitudes + r, lanes.tangent_magnitudes);
}

static void jvp_backward_scores(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct cattn_jvp_backward *j = of_second_order(b);
    const struct planes planes = {{b->scores.scratch.score, b->grads.scratch.score, j->tangents.tangent}, 3};
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    tile_scores(&t);
    score_tangents(&t, &j->tangents);
    tile_products(&t, &b->grads, false);
    if (j->has_value)
        tile_products(&t, &j->grads, false);
    for (int v = 0; v < t.n_vectors; v++)
        derive_lanes(&t, j, &t.vector[v], v * LANES);
    zero_unseen(&t, &planes);
}

/* With softcap, dS and dS' become the gradients of the uncapped scores and of their tangents. A hidden pair stays 0. */
static void uncap(const struct tile *t, const struct cattn_jvp_backward *j) {
    const struct cattn_row_scratch *scratch = &j->backward.scores.scratch;
    const real *derivatives = scratch->cap_derivative, *curvatures = scratch->cap_curvature;
    real *grads = j->backward.grads.scratch.score, *tangents = j->tangents.tangent;
    const vf zero = vf_set1(0);
    for (int v = 0; v < t->n_vectors; v++)
        for (int k = t->vector[v].begin; k < t->vector[v].end; k++) {
            const int64_t at = k * CATTN_TILE_ROWS + v * LANES;
            const vf g = vf_loadu(grads + at), of_tangent = vf_loadu(tangents + at),
                     derivative = vf_loadu(derivatives + at);
            const vf bent = vf_select(vf_eq(of_tangent, zero), zero, of_tangent * vf_loadu(curvatures + at));
            vf_storeu(grads + at, vf_select(vf_eq(g, zero), zero, g * derivative) + bent);
            vf_storeu(tangents + at, vf_select(vf_eq(of_tangent, zero), zero, of_tangent * derivative));
        }
}

static void jvp_backward_query(struct cattn_backward *b, int64_t k0, int64_t k1) {
    struct cattn_jvp_backward *j = of_second_order(b);
    struct tile t;
    if (!tile_begin(&t, &b->scores, k0, k1))
        return;
    if (b->scores.call.score_options.softcap > 0)
        uncap(&t, j);
    if (!b->keys.call.d_v)
        return;
    add_values(&t, &b->keys);
    if (j->tangents.has_key)
        add_values(&t, &j->keys);
}

static void jvp_backward_keys(struct cattn_backward *b, int64_t k0, int64_t k1) {
    const struct cattn_jvp_backward *j = of_second_order(b);
    struct tile t;
    backward_keys(b, k0, k1);
    if (!j->tangents.has_query || !tile_begin(&t, &b->scores, k0, k1))
        return;
    const struct query_sum key = {.weights = j->tangents.tangent,
                                  .rows = j->query_rows,
                                  .stride = b->query_cols,
                                  .cols = b->scores.call.head_dim,
                                  .factor = vf_set1((real)b->scores.call.score_options.scale),
                                  .to = b->grad_key,
                                  .to_row = b->grad_key_row};
    sum_over_queries_block(&t, &key);
}

/* The sum over the rows of the sink's weight times (sink' - mean) delta + delta'. Where no key is visible, the lse is
 * the sink itself. */
static double jvp_backward_sink(struct cattn_backward *b) {
    const struct cattn_jvp_backward *j = of_second_order(b);
    const struct cattn_rows *rows = &b->scores;
    real sum = 0;
    for (int r = 0; r < rows->n_rows; r++) {
        const real sink = (real)rows->per_row->sink[r], moved = j->tangents.has_sink ? (real)j->tangents.sink[r] : 0;
        if (is_neg_inf(sink) || !row_sees_any_key(rows, r))
            continue;
        const vf centred = vf_set1(moved) - vf_set1(((const real *)j->mean)[r]);
        const vf change = vf_fma(centred, vf_set1(((const real *)b->delta)[r]), vf_set1(((const real *)j->delta)[r]));
        vf_storeu_n(&sum, vf_fma(vf_set1(weight_of_row(sink, &b->lse, r)), change, vf_set1(sum)), 1);
    }
    return (double)sum;
}

/* The sum of |a * b| over the columns, of a row that is padded with zeros and a row of a matrix. */
static double sum_of_magnitudes(const real *a, const struct cattn_matrix *b, int64_t row, int64_t cols) {
    double sums[LANES] = {0}, sum = 0;
    for (int64_t c = 0; c < cols; c += LANES) {
        const vf v = load_stored(b->storage, b->first, row * b->row + c * b->col, b->col, (int)min64(LANES, cols - c));
        add_doubles(sums, vf_abs(vf_loadu(a + c) * v));
    }
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    return sum;
}

static double jvp_backward_terms(const struct cattn_backward *b, int r) {
    const struct cattn_jvp_backward *j = (const struct cattn_jvp_backward *)b;
    const struct cattn_rows *rows = &b->scores;
    const int64_t at = r * b->query_cols, cols = rows->call.head_dim;
    double most = 0;
    for (int64_t key = rows->per_row->lo[r]; key < rows->per_row->hi[r]; key++) {
        double sum = 0;
        if (!key_visible(rows, r, key))
            continue;
        if (j->tangents.has_query)
            sum += sum_of_magnitudes((const real *)j->query_rows + at, &rows->key, key, cols);
        if (j->tangents.has_key)
            sum += sum_of_magnitudes((const real *)b->query_rows + at, &j->tangents.key.key, key, cols);
        most = sum <= most ? most : sum; /* NaN, too */
    }
    return most;
}
