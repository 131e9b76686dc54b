/* second_pass.inc.h -- weights from scores and lse, sums, zeros of hidden pairs: for gradients, tangents, statistics.
 */

/* ---- weights from scores and the log-sum-exp: docs/bit_contract.md ("Gradients", 1) has the order of operations ----
 */

/* Splits the lse of row r into (real)lse and a residual. Below 1/64 the residual becomes a factor of the weight,
 * because adding it to score - lse would lose digits. Above, it is added to that difference: such a residual occurs
 * only with scores above 2^18, whose differences are exact. */
static void split_lse(const struct cattn_rows *rows, const struct cattn_split_lse *split, int r) {
    double lse = (double)INFINITY; /* padding rows get the weights exp(-inf) = 0 */
    if (r < rows->n_rows)
        lse = rows->call.double_lse ? *(const double *)rows->per_row->lse[r]
                                    : (double)*(const real *)rows->per_row->lse[r];
    const double residual = (double)(real)lse - lse; /* NaN if lse is infinite: neither little nor much */
    const bool little = residual > -1.0 / 64 && residual < 1.0 / 64, much = !little && residual - residual == 0;
    ((real *)split->value)[r] = (real)lse;
    ((real *)split->residual)[r] = much ? (real)residual : 0;
    /* exp(residual) - 1 by its series */
    ((real *)split->factor)[r] = little ? (real)(residual * (1 + residual * (0.5 + residual * (1.0 / 6)))) : 0;
}

/* The lse of LANES rows. */
struct lse_lanes {
    vf value, residual, factor;
};

INLINE struct lse_lanes lse_lanes(const struct cattn_split_lse *split, int r) {
    return (struct lse_lanes){vf_loadu((const real *)split->value + r), vf_loadu((const real *)split->residual + r),
                              vf_loadu((const real *)split->factor + r)};
}

/* exp(score - lse) with all digits of the lse. */
INLINE vf weight_of(vf score, struct lse_lanes lse) {
    vf log;
    return vf_exp_of_difference(score, lse.value, lse.residual, lse.factor, &log);
}

/* The weight of one score of row r; a sink, for example. */
static real weight_of_row(real score, const struct cattn_split_lse *split, int r) {
    const struct lse_lanes lse = {vf_set1(((const real *)split->value)[r]), vf_set1(((const real *)split->residual)[r]),
                                  vf_set1(((const real *)split->factor)[r])};
    real weight;
    vf_storeu_n(&weight, weight_of(vf_set1(score), lse), 1);
    return weight;
}

/* The products a * b of LANES rows from r on, for LANES columns from c on: v[i] holds column c + i. `a` is the queries
 * of a view. */
INLINE void column_products(const struct cattn_rows *a, void *const *b, enum cattn_storage storage, int64_t b_col,
                            int r, int64_t c, vf v[LANES]) {
    const int64_t a_col = a->call.query_col;
    const int n = (int)max64(0, min64(LANES, a->call.head_dim - c));
    if (a->call.storage == CATTN_STORED_PLAIN && n == LANES && r + LANES <= a->n_rows && b_col == 1 && a_col == 1) {
        UNROLLED(i, LANES)
            v[i] = vf_loadu((const real *)a->query[r + i] + c) * vf_loadu((const real *)b[r + i] + c);
    } else {
        for (int i = 0; i < LANES; i++) {
            v[i] = vf_set1(0);
            if (n > 0 && r + i < a->n_rows)
                v[i] = load_stored(a->call.storage, a->query[r + i], c * a_col, a_col, n) *
                       load_stored(storage, b[r + i], c * b_col, b_col, n);
        }
    }
    vf_transpose(v);
}

/* Adds a vector to numbers in double. */
INLINE void add_doubles(double *to, vf v) {
    real numbers[LANES];
    vf_storeu(numbers, v);
    for (int i = 0; i < LANES; i++)
        to[i] += (double)numbers[i];
}

/* Sums of the rounded products of grad_out, the queries of a view, and rows of the output or its tangent: eight chains
 * by column and the tree. Also adds the sums, and sums of the products' magnitudes, to numbers in double. */
static void sum_products(const struct cattn_rows *grads, void *const *out, enum cattn_storage storage, int64_t out_col,
                         void *to, double *total, double *magnitude) {
    /* at least CATTN_SUM_CHAINS columns a step, so that the chain of each column is a constant */
    const int step = LANES > CATTN_SUM_CHAINS ? LANES : CATTN_SUM_CHAINS;
    for (int r = 0; r < grads->n_rows; r += LANES) {
        vf sum[CATTN_SUM_CHAINS], magnitudes = vf_set1(0);
        UNROLLED(i, CATTN_SUM_CHAINS)
            sum[i] = vf_set1(0);
        for (int64_t c = 0; c < grads->call.head_dim; c += step)
#pragma GCC unroll 8
            for (int part = 0; part < step; part += LANES) {
                vf v[LANES];
                column_products(grads, out, storage, out_col, r, c + part, v);
                UNROLLED(i, LANES) {
                    sum[(part + i) % CATTN_SUM_CHAINS] = sum[(part + i) % CATTN_SUM_CHAINS] + v[i];
                    magnitudes = magnitudes + vf_abs(v[i]);
                }
            }
        vf_storeu((real *)to + r, SUM_TREE(sum));
        add_doubles(total + r, SUM_TREE(sum));
        add_doubles(magnitude + r, magnitudes);
    }
}

/* Prepares the lse of the rows, and the accumulators of a view's sums. Returns the number of rows up to whole vectors
 * and whole groups of P V, which are read too. */
static int sums_begin(const struct cattn_rows *rows, const struct cattn_split_lse *lse, const struct cattn_rows *view) {
    const int padded = (int)max64(cattn_round_up(rows->n_rows, LANES), cattn_round_up(rows->n_rows, MR));
    for (int r = 0; r < padded; r++) {
        split_lse(rows, lse, r);
        ((real *)view->scratch.alpha)[r] = 1;
    }
    if (view->call.acc_cols)
        memset(view->scratch.acc, 0, (size_t)padded * (size_t)view->call.acc_cols * sizeof(real));
    return padded;
}

/* Adds the products of a view's weights and values to its accumulators. Overwrites the copy of other rows. */
static void add_values(struct tile *t, struct cattn_rows *view) {
    t->rows = view;
    t->value = rows_of_block(t, &view->value, view->call.d_v);
    value_block(t);
}

/* ---- arrays of pairs ---- */

/* Arrays [key][CATTN_TILE_ROWS] of numbers of pairs. */
struct planes {
    void *of[3];
    int n;
};

/* Zeroes them for LANES rows from r on and the keys begin .. end-1. */
static void zero_lanes(const struct planes *planes, int r, int begin, int end) {
    for (int i = 0; i < planes->n; i++)
        for (int k = begin; k < end; k++)
            vf_storeu((real *)planes->of[i] + k * CATTN_TILE_ROWS + r, vf_set1(0));
}

/* Zeroes them for LANES rows from r on and the chains of the extent that none of these rows sees. */
static void zero_unseen_chains(const struct planes *planes, const struct extent *e, int r) {
    for (int k = e->begin, end; k < e->end; k = end) {
        end = (int)min64(e->end, chain_run_end(e->chains, k));
        if (!has_chain(e->chains, k))
            zero_lanes(planes, r, k, end);
    }
}

/* Zeroes what micro-tiles and transpositions may read outside a vector's own extent. */
static void zero_unseen(const struct tile *t, const struct planes *planes) {
    const int step = MR > ROW_STEP ? MR : ROW_STEP;
    const int begin = (int)max64(0, t->all.begin - step), end = (int)min64(CATTN_BLOCK_KEYS, t->all.end + step);
    for (int v = 0; v < t->n_vectors; v++) {
        const struct extent *e = &t->vector[v];
        const int r = v * LANES;
        zero_unseen_chains(planes, e, r);
        zero_lanes(planes, r, begin, e->begin == e->end ? end : e->begin);
        if (e->begin < e->end)
            zero_lanes(planes, r, e->end, end);
    }
    for (int r = t->n_vectors * LANES; r < t->n_groups * MR; r += LANES)
        zero_lanes(planes, r, begin, end);
}
