/* tile.inc.h -- the tile path: one block of up to CATTN_TILE_ROWS queries against one block of keys.
 *
 * Scores are stored transposed, score[key][query] (csrc/README.md, "Attention"). Each vector of queries, and each group
 * of MR queries in P V, has an extent (tile_extents.inc.h): the keys that at least one of its rows may see. Nothing
 * outside the extent is computed. Inside it, a micro-tile is either full (every row sees every key, no mask code) or
 * partial.
 */

/* The visible rows of K or V of this key block, indexed by the key relative to k0. K and V share the scratch for
 * copies, so the copy of V overwrites the copy of K. */
static struct source rows_of_block(const struct tile *t, const struct cattn_matrix *matrix, int64_t n_cols) {
    const int first = t->all.begin, last = (int)min64(t->all.end, t->n_keys);
#ifdef BF16_PRODUCTS
    (void)n_cols;
    return matrix == &t->rows->key ? keys_of_block(t->rows, t->k0, first, last)
                                   : values_of_block(t->rows, t->k0, first, last);
#else
    /* keys that no row sees are not even converted */
    const struct cattn_matrix from = rows_from(*matrix, t->k0 + first);
    struct source rows = rows_of(&from, last - first, n_cols, (real *)t->rows->scratch.block_copy + first * n_cols);
    rows.first -= first * rows.row;
    return rows;
#endif
}

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

/* Scores, with every mask applied, of mr keys from k on and nr vectors of queries from vector v on, inside one panel.
 * Updates the running maxima of the block. */
INLINE void score_tile(int mr, int nr, const struct tile *t, int v, int k, struct source key) {
    struct cattn_rows *rows = t->rows;
    const vf neg_inf = vf_set1(NEG_INF);
    vf acc[MR][NR];
    score_products(mr, nr, rows, v, key, acc);
    UNROLLED(n, nr) {
        const int r = (v + n) * LANES;
        const bool partial = k < t->vector[v + n].full_begin || k + mr > t->vector[v + n].full_end;
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
        if (t->has_bias[v + n])
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
}

/* Narrows [*first, *last) to the vectors that see key k; empty if none does. Returns the first key after k at which the
 * answer may change. */
INLINE int next_edge(const struct tile *t, int k, int *first, int *last) {
    int edge = t->all.end, begin = *last, end = *first;
    for (int v = *first; v < *last; v++) {
        const struct extent *e = &t->vector[v];
        if (k < e->begin) {
            edge = (int)min64(edge, e->begin);
        } else if (k < e->end) {
            edge = (int)min64(edge, min64(e->end, chain_run_end(e->chains, k)));
            if (has_chain(e->chains, k)) {
                begin = (int)min64(begin, v);
                end = v + 1;
            }
        }
    }
    *first = begin;
    *last = end;
    return edge;
}

/* The number of keys of the next tile. The keys left are a multiple of 8 in total, so two tiles of 4 are better than
 * one of 6 followed by a rest of 2. */
INLINE int key_height(int tallest, int left) {
    const bool leaves_little = left > tallest && left < tallest + 4;
    return leaves_little ? 4 : tile_height(tallest, left);
}

/* Scores of all keys of the block against the panel that begins with vector v. No score may be computed twice, because
 * a score overwrites its bias. */
static void score_panel(const struct tile *t, int v) {
    int k = t->all.begin;
    while (k < t->all.end) {
        int first = v, last = (int)min64(v + NR, t->n_vectors);
        const int edge = next_edge(t, k, &first, &last);
        while (first < last && k < edge) {
            const int height = key_height(SCORE_MR, edge - k);
            const struct source key = key_rows(t->rows, t->key, k, height, t->n_keys);
            AT_SIZE(SCORE_MR, height, last - first == NR, score_tile, t, first, k, key);
            k += height;
        }
        k = edge;
    }
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

/* The weights of 8 keys from key k on. */
INLINE void store_weights(real *score, int k, bool paired, const vf w[CATTN_SUM_CHAINS]) {
#ifdef BF16_PRODUCTS
    if (paired) {
        UNROLLED(c, CATTN_SUM_CHAINS / 2)
            store_pairs((void *)(score + (k / 2 + c) * CATTN_TILE_ROWS), vf_paired(w[2 * c], w[2 * c + 1]));
        return;
    }
#endif
    (void)paired;
    UNROLLED(c, CATTN_SUM_CHAINS)
        vf_storeu(score + (k + c) * CATTN_TILE_ROWS, w[c]);
}

/* Replaces the scores of LANES rows by exp(score - max) and sums them over the keys in eight chains. */
static void softmax_lanes(const struct tile *t, const struct extent *e, int r) {
    const bool paired = pairs_at_once(t->rows);
    struct cattn_rows *rows = t->rows;
    update_max(rows, r);
    const vf shift = vf_loadu((const real *)rows->scratch.block_max + r);
    real *score = (real *)rows->scratch.score + r, *row_sum = (real *)rows->scratch.row_sum + r;
    vf sum[CATTN_SUM_CHAINS];
    UNROLLED(c, CATTN_SUM_CHAINS)
        sum[c] = vf_set1(0);
    for (int k = e->begin; k < e->end; k += CATTN_SUM_CHAINS) {
        vf w[CATTN_SUM_CHAINS];
        UNROLLED(c, CATTN_SUM_CHAINS)
            w[c] = vf_set1(0);
        if (has_chain(e->chains, k))
            UNROLLED(c, CATTN_SUM_CHAINS) {
                w[c] = vf_exp(vf_loadu(score + (k + c) * CATTN_TILE_ROWS) - shift);
                sum[c] = sum[c] + w[c];
            }
        store_weights(score, k, paired, w);
    }
    vf alpha = vf_loadu((const real *)rows->scratch.alpha + r);
    vf_storeu(row_sum, vf_fma(vf_loadu(row_sum), alpha, SUM_TREE(sum)));
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

/* Zeroes the weights of LANES rows outside their own extent e that P V reads: a group of MR rows may span two vectors,
 * and its extent covers both. */
static void zero_outside(const struct tile *t, const struct extent *e, int r) {
    real *score = (real *)t->rows->scratch.score + r;
    const int step = pairs_at_once(t->rows) ? 2 : 1; /* keys of a row of the scores */
    for (int g = r / MR; g < t->n_groups && g * MR < r + LANES; g++) {
        const struct extent *group = &t->group[g];
        for (int k = group->begin; k < min64(e->begin, group->end); k += step)
            vf_storeu(score + k / step * CATTN_TILE_ROWS, vf_set1(0));
        for (int k = (int)max64(e->end, group->begin); k < group->end; k += step)
            vf_storeu(score + k / step * CATTN_TILE_ROWS, vf_set1(0));
    }
}

/* Rounds the weights of LANES rows that P V reads to pairs of bfloat16, unless that is done. */
static void pair_weights(const struct tile *t, const struct extent *e, int r) {
#ifdef BF16_PRODUCTS
    if (pairs_at_once(t->rows))
        return;
    real *score = (real *)t->rows->scratch.score + r;
    int begin = e->begin < e->end ? e->begin : CATTN_BLOCK_KEYS, end = e->end;
    for (int g = r / MR; g < t->n_groups && g * MR < r + LANES; g++)
        if (t->group[g].begin < t->group[g].end) {
            begin = (int)min64(begin, t->group[g].begin);
            end = (int)max64(end, t->group[g].end);
        }
    for (int k = begin; k < end; k += 2) {
        const real *w = score + k * CATTN_TILE_ROWS;
        store_pairs((void *)(score + k / 2 * CATTN_TILE_ROWS), vf_paired(vf_loadu(w), vf_loadu(w + CATTN_TILE_ROWS)));
    }
#else
    (void)t, (void)e, (void)r;
#endif
}

/* One vector of P V of a row without its hidden keys: the columns from c on, which are `column` columns from the start
 * of `value`. */
static vf tile_value_visible(const struct tile *t, int r, int64_t c, int column, struct key_half keys,
                             struct source value) {
#ifdef BF16_PRODUCTS
    const int n = (int)max64(0, min64(LANES, t->rows->call.d_v - c));
    (void)column, (void)value;
    return value_vector_visible(t->rows, r, c, n, keys, t->k0, (const uint16_t *)t->rows->scratch.score + 2 * r,
                                2 * CATTN_TILE_ROWS);
#else
    const struct cattn_matrix plain = plain_rows(value);
    (void)c;
    return value_vector_visible(t->rows, r, &plain, column, LANES, keys, t->k0,
                                (const real *)t->rows->scratch.score + r, CATTN_TILE_ROWS);
#endif
}

/* acc = acc * factor + P V for mr rows from r on, the columns from c on and the keys of one half of the block. `chains`
 * is the constant ALL_CHAINS unless some are missing. */
INLINE void value_tile(int mr, int nr, const struct tile *t, unsigned chains, int r, int64_t c, bool partial,
                       struct key_half keys, struct source value, const real *factor) {
    struct cattn_rows *rows = t->rows;
    real *acc = (real *)rows->scratch.acc + r * rows->call.acc_cols + c;
    vf block[MR][NR];
    value_products(mr, nr, rows, chains, r, keys, value, block);
    if (partial && __builtin_expect(!tile_is_finite(mr, nr, block), 0)) {
        for (int m = 0; m < mr && r + m < rows->n_rows; m++)
            for (int n = 0; n < nr; n++)
                fold_block(acc + m * rows->call.acc_cols + n * LANES, vf_set1(factor[m]),
                           tile_value_visible(t, r + m, c + n * LANES, n * LANES, keys, value));
        return;
    }
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            fold_block(acc + m * rows->call.acc_cols + n * LANES, vf_set1(factor[m]), block[m][n]);
}

/* value_tile where chains are missing. Not inlined, so that the common tiles keep their registers. */
NOINLINE void value_tile_of_chains(const struct tile *t, int g, int64_t c, struct key_half keys, struct source value,
                                   const real *factor) {
    const unsigned chains =
        t->group[g].chains & (ALL_CHAINS >> 1); /* lets the compiler see that it is not ALL_CHAINS */
    AT_SIZE(MR, tile_height(MR, t->rows->n_rows - g * MR), t->rows->call.d_v - c > LANES, value_tile, t, chains, g * MR,
            c, true, keys, value, factor);
}

/* P V of the block, half by half, so that a panel of V stays in the L1 cache while all rows use it. */
static void value_block(const struct tile *t) {
    struct cattn_rows *rows = t->rows;
    real ones[MR];
    for (int m = 0; m < MR; m++)
        ones[m] = 1;
    /* The first half runs even without keys, because it multiplies the accumulators with alpha. */
    for (int i = 0; i < 2; i++) {
        const struct key_half all = key_half_of(i, t->all.begin, (int)min64(t->all.end, t->n_keys));
        if (i > 0 && key_half_is_empty(all))
            break;
        for (int64_t c = 0; c < rows->call.d_v; c += PANEL) {
#ifdef BF16_PRODUCTS
            const struct source value = {t->value.first + all.begin / 2 * t->value.row + 2 * c, t->value.row};
            const int64_t per_row = 2; /* keys */
#else
            const struct source value = value_run(rows, t->value, all.begin, all.end, c);
            const int64_t per_row = 1;
#endif
            for (int g = 0; g < t->n_groups; g++) {
                const struct extent *e = &t->group[g];
                const struct key_half keys = key_half_of(i, e->begin, e->end);
                if (e->begin == e->end || (i > 0 && key_half_is_empty(keys)))
                    continue;
                const bool partial = !rows->call.fully_ranged || e->begin < e->full_begin || e->end > e->full_end;
                const real *factor = i == 0 ? (const real *)rows->scratch.alpha + g * MR : ones;
                const struct source from = {value.first + (keys.begin - all.begin) / per_row * value.row, value.row};
                if (t->has_chains)
                    value_tile_of_chains(t, g, c, keys, from, factor);
                else
                    AT_SIZE(MR, tile_height(MR, rows->n_rows - g * MR), rows->call.d_v - c > LANES, value_tile, t,
                            ALL_CHAINS, g * MR, c, partial, keys, from, factor);
            }
        }
    }
}

/* Prepares everything that score_panel reads. */
static void scores_begin(struct tile *t) {
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
    t->key = rows_of_block(t, &rows->key, rows->call.head_dim);
}

/* Scores of the whole block, with every mask applied; the backward pass has no use for them panel by panel. */
static void tile_scores(struct tile *t) {
    scores_begin(t);
    for (int v = 0; v < t->n_vectors; v += NR)
        score_panel(t, v);
}

static void tile_block(struct cattn_rows *rows, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, rows, k0, k1))
        return;
    scores_begin(&t);
    for (int v = 0; v < t.n_vectors; v++) {
        const struct extent *e = &t.vector[v];
        if (v % NR == 0) /* a panel at a time, so that softmax finds the scores in the L1 cache */
            score_panel(&t, v);
        if (rows->call.has_weights)
            store_scores_of(&t, e, v * LANES);
        softmax_lanes(&t, e, v * LANES);
        drop_lanes(&t, e, v * LANES);
        if (rows->small_weights)
            shrink_lanes(&t, e, v * LANES);
        zero_outside(&t, e, v * LANES);
        pair_weights(&t, e, v * LANES);
    }
    /* The last group's tile may read rows after the last vector. Zero them: an earlier block may have left numbers
     * there that are not finite. */
    const int last = (t.n_groups - 1) * MR, end = last + tile_height(MR, rows->n_rows - last);
    for (int r = t.n_vectors * LANES; r < end; r += LANES) {
        zero_outside(&t, &(struct extent){0}, r);
        pair_weights(&t, &(struct extent){0}, r);
    }
    if (rows->call.d_v) {
        t.value = rows_of_block(&t, &rows->value, rows->call.d_v);
        value_block(&t);
    }
}
