/* tile_scores.inc.h -- the tile path's scores and weights beside their products: masks, options, dropout. It serves the
 * micro-tiles of tile.inc.h and the units of tiles.inc.h.
 */

/* Writes the element-wise masks of LANES rows from r on to the place of their scores. */
static void fill_bias(const struct tile *t, const struct extent *e, int r) {
    const struct cattn_rows *rows = t->rows;
    /* whole squares of LANES keys by LANES rows, which are transposed in registers */
    for (int k = e->begin / LANES * LANES; k < e->end; k += LANES) {
        const int n = (int)max64(0, min64(LANES, t->n_keys - k));
        vf v[LANES];
        if (!has_chain(e->chains, k))
            continue;
        for (int i = 0; i < LANES; i++)
            v[i] = r + i < rows->n_rows ? element_bias(rows, r + i, t->k0 + k, n) : vf_set1(0);
        vf_transpose(v);
        for (int i = 0; i < LANES; i++)
            vf_storeu((real *)rows->scratch.score + (k + i) * CATTN_TILE_ROWS + r, v[i]);
    }
}

/* Applies every option and mask to the scores acc[][n] of mr keys from k on and of vector v of queries, stores them,
 * and updates the running maxima of the block. */
INLINE void place_scores(int mr, int n, const struct tile *t, int v, int k, vf acc[MR][NR]) {
    struct cattn_rows *rows = t->rows;
    const vf neg_inf = vf_set1(NEG_INF);
    const int r = v * LANES;
    const bool partial = k < t->vector[v].full_begin || k + mr > t->vector[v].full_end;
    real *score = (real *)rows->scratch.score + k * CATTN_TILE_ROWS + r;
    real *block_max = (real *)rows->scratch.block_max + r;
    vf max = vf_loadu(block_max);
    /* in the order of the bit contract: softcap, slope, bias; then the range, by selection */
    if (changes_scores(&rows->call.score_options))
        UNROLLED(m, mr)
            acc[m][n] = change_score(acc[m][n], &rows->call.score_options);
    if (rows->scratch.cap_derivative) /* before slope and bias change the capped scores */
        for (int m = 0; m < mr; m++)
            store_cap_derivatives(rows, (k + m) * CATTN_TILE_ROWS + r, acc[m][n]);
    if (rows->call.has_slopes)
        UNROLLED(m, mr)
            acc[m][n] =
                slope_score(acc[m][n], vf_loadu(t->slope + r), vf_loadu(t->position + r), vf_set1((real)(k + m)));
    if (t->has_bias[v])
        UNROLLED(m, mr)
            acc[m][n] = add_bias(acc[m][n], vf_loadu(score + m * CATTN_TILE_ROWS));
    if (partial)
        UNROLLED(m, mr) {
            vf at = vf_set1((real)(k + m));
            vm inside = vm_and(vf_lt(at, vf_loadu(t->last + r)), vm_not(vf_lt(at, vf_loadu(t->first + r))));
            acc[m][n] = vf_select(inside, acc[m][n], neg_inf);
        }
    UNROLLED(m, mr) {
        vf_storeu(score + m * CATTN_TILE_ROWS, acc[m][n]);
        max = vf_max(acc[m][n], max);
    }
    vf_storeu(block_max, max);
}

/* Stores the scores of LANES rows in the weights. `finish` turns them into weights once the lse is known. */
static void store_scores_of(const struct tile *t, const struct extent *e, int r) {
    const struct cattn_rows *rows = t->rows;
    const int64_t col = rows->call.weights_col;
    for (int k = e->begin / LANES * LANES; k < e->end; k += LANES) {
        const int n = (int)max64(0, min64(LANES, t->n_keys - k));
        vf v[LANES];
        for (int i = 0; i < LANES; i++)
            v[i] = vf_loadu((const real *)rows->scratch.score + (k + i) * CATTN_TILE_ROWS + r);
        vf_transpose(v);
        for (int i = 0; i < LANES && r + i < rows->n_rows; i++)
            store_strided((real *)rows->per_row->weights[r + i] + (t->k0 + k) * col, col, with_one_nan(v[i]), n);
    }
}

/* Whether softmax_lanes itself rounds the weights to pairs of bfloat16, in place: row j of the scores becomes pair j.
 * Otherwise they are numbers until pair_weights, because dropout or a second attempt changes them. */
INLINE bool pairs_at_once(const struct cattn_rows *rows) {
#ifdef BF16_PRODUCTS
    return !rows->drop.enabled && !rows->scratch.drop_bits && !rows->small_weights;
#else
    (void)rows;
    return false;
#endif
}

/* Receives the drop bits of LANES rows and key k of the block. */
typedef void use_drop_bits(void *context, int k, vm drop_bits);

/* Calls use(context, k, bits) for every key of the extent; inlined, so that `use` becomes part of the loop. One call of
 * Philox serves 8 keys of LANES rows, hence the order of the keys. */
INLINE void each_philox_bits(const struct tile *t, const struct extent *e, int r, use_drop_bits *use, void *context) {
    const struct cattn_drop *drop = &t->rows->drop;
    const uint32_t *position = t->rows->per_row->drop_position + r, *head = t->rows->per_row->drop_head + r;
    for (int run = e->begin / 64 * 64; run < e->end; run += 64) {
        if (!(e->chains & chains_of(run, run + 64)))
            continue;
        for (int c = 0; c < 8; c++) {
            const uint64_t j = (uint64_t)(t->k0 + run + c);
            vu words[4];
            philox_lanes(drop, j, position, head, words);
            for (int d = 0; d < 8; d++) {
                const int k = run + 8 * d + c;
                if (k >= e->begin && k < e->end)
                    use(context, k, philox_lanes_drop_bits(drop, words, d, j, position, head));
            }
        }
    }
}

/* each_philox_bits with the bits of a serial stream. Keys and rows that do not exist are dropped. */
INLINE void each_stream_bits(const struct tile *t, const struct extent *e, int r, use_drop_bits *use, void *context) {
    for (int k = e->begin; k < e->end; k++) {
        real drop_bits[LANES] = {0};
        for (int i = 0; i < LANES && r + i < t->rows->n_rows && k < t->n_keys; i++)
            drop_bits[i] = key_drop_bit(t->rows, r + i, t->k0 + k);
        use(context, k, vf_lt(vf_set1(0), vf_loadu(drop_bits)));
    }
}

/* Dropped weights become +0. */
INLINE void drop_weight(void *score, int k, vm drop_bits) {
    real *w = (real *)score + k * CATTN_TILE_ROWS;
    vf_storeu(w, vf_select(drop_bits, vf_loadu(w), vf_set1(0)));
}

static void drop_lanes(const struct tile *t, const struct extent *e, int r) {
    if (t->rows->scratch.drop_bits)
        each_stream_bits(t, e, r, drop_weight, (real *)t->rows->scratch.score + r);
    else if (t->rows->drop.enabled)
        each_philox_bits(t, e, r, drop_weight, (real *)t->rows->scratch.score + r);
}

/* Makes the weights of LANES rows small, for a second attempt. */
static void shrink_lanes(const struct tile *t, const struct extent *e, int r) {
    for (int k = e->begin; k < e->end; k++) {
        real *w = (real *)t->rows->scratch.score + k * CATTN_TILE_ROWS + r;
        vf_storeu(w, small_weight(vf_loadu(w)));
    }
}

/* Prepares what place_scores reads. */
static void masks_begin(struct tile *t) {
    struct cattn_rows *rows = t->rows;
    const int64_t k0 = t->k0;
    /* the lanes after the last row get an empty range, so that their scores are -inf */
    for (int r = 0; r < t->n_vectors * LANES; r++) {
        t->first[r] = r < rows->n_rows ? (real)t->lo[r] : 0;
        t->last[r] = r < rows->n_rows ? (real)t->hi[r] : 0;
        ((real *)rows->scratch.block_max)[r] = NEG_INF;
    }
    for (int r = 0; r < t->n_vectors * LANES && rows->call.has_slopes; r++) {
        t->slope[r] = r < rows->n_rows ? (real)rows->per_row->slope[r] : 0;
        t->position[r] = r < rows->n_rows ? (real)(rows->per_row->position[r] - k0) : 0;
    }
    for (int v = 0; v < t->n_vectors; v++) {
        t->has_bias[v] = !rows->call.fully_ranged || (rows->call.has_block_mask && t->has_holes[v]);
        if (t->has_bias[v])
            fill_bias(t, &t->vector[v], v * LANES);
    }
}
