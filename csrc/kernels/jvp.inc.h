/* jvp.inc.h -- the derivative of attention in the direction of tangents: one block of up to CATTN_TILE_ROWS queries
 * against one block of keys, after the forward pass.
 *
 * The weights P are computed again from the scores and the log-sum-exp. With tangents S' of the scores, and Z the
 * dropout's factors:
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
