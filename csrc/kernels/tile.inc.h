/* tile.inc.h -- the tile path: one block of up to CATTN_TILE_ROWS queries against one block of keys.
 *
 * Scores are stored transposed, score[key][query] (csrc/README.md, "Attention"). Each vector of queries, and each group
 * of MR queries in P V, has an extent (tile_scores.inc.h): the keys that at least one of its rows may see. Nothing
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
    if (t->rows->call.packed_block && matrix == &t->rows->value)
        return (struct source){t->rows->scratch.value_panels, PANEL};
    if (t->rows->call.packed_block && !is_plain(matrix))
        return (struct source){t->rows->scratch.block_copy, n_cols};
    /* keys that no row sees are not even converted */
    const struct cattn_matrix from = rows_from(*matrix, t->k0 + first);
    struct source rows = rows_of(&from, last - first, n_cols, (real *)t->rows->scratch.block_copy + first * n_cols);
    rows.first -= first * rows.row;
    return rows;
#endif
}

/* Scores, with every mask applied, of mr keys from k on and nr vectors of queries from vector v on, inside one panel.
 */
INLINE void score_tile(int mr, int nr, const struct tile *t, int v, int k, struct source key) {
    vf acc[MR][WIDEST];
    score_products(mr, nr, t->rows, v, key, acc);
    UNROLLED(n, nr)
        place_scores(mr, n, t, v + n, k, acc);
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

/* The keys that every row of the panel from vector v on sees, if nothing else changes its scores. */
INLINE struct key_half plain_keys(const struct tile *t, int v) {
    const struct cattn_rows *rows = t->rows;
    struct key_half keys = {0, t->n_keys};
    if (v + NR > t->n_vectors || changes_scores(&rows->call.score_options) || rows->scratch.cap_derivative ||
        rows->call.has_slopes)
        return (struct key_half){0, 0};
    UNROLLED(n, NR) {
        const struct extent *e = &t->vector[v + n];
        keys.begin = e->full_begin > keys.begin ? e->full_begin : keys.begin;
        keys.end = t->has_bias[v + n] ? 0 : e->full_end < keys.end ? e->full_end : keys.end;
    }
    return keys;
}

/* Scores of whole tiles of the keys k .. end-1, which are plain. Returns the first key that is left. */
NOINLINE int score_plain(const struct tile *t, int v, int k, int end) {
    const struct cattn_rows *rows = t->rows;
    real *block_max = (real *)rows->scratch.block_max + v * LANES;
    for (; k + SCORE_MR <= end && key_height(SCORE_MR, end - k) == SCORE_MR; k += SCORE_MR) {
        vf acc[MR][WIDEST];
        score_products(SCORE_MR, NR, rows, v, (struct source){t->key.first + k * t->key.row, t->key.row}, acc);
        real *score = score_at(rows, k, v * LANES);
        UNROLLED(n, NR) {
            vf max = vf_loadu(block_max + n * LANES);
            UNROLLED(m, SCORE_MR) {
                vf_storeu(score + m * SCORE_ROW + n * LANES, acc[m][n]);
                max = vf_max(acc[m][n], max);
            }
            vf_storeu(block_max + n * LANES, max);
        }
    }
    return k;
}

/* Scores of all keys of the block against the panel that begins with vector v. No score may be computed twice, because
 * a score overwrites its bias. */
static void score_panel(const struct tile *t, int v) {
    const struct key_half plain = plain_keys(t, v);
    int k = t->all.begin;
    while (k < t->all.end) {
        int first = v, last = (int)min64(v + NR, t->n_vectors);
        const int edge = next_edge(t, k, &first, &last);
        if (last - first == NR && k >= plain.begin && k < plain.end)
            k = score_plain(t, v, k, (int)min64(edge, plain.end));
        while (first < last && k < edge) {
            const int height = key_height(SCORE_MR, edge - k);
            const struct source key = key_rows(t->rows, t->key, k, height, t->n_keys);
            AT_SIZE(SCORE_MR, height, last - first == NR, score_tile, t, first, k, key);
            k += height;
        }
        k = edge;
    }
}

/* The chains of weights that are computed together: their sums and exponentials stay in registers. */
#if defined(BF16_PRODUCTS) || (REGISTERS >= 32 && !defined(FEW_CHAINS_AT_ONCE))
#define CHAINS_AT_ONCE CATTN_SUM_CHAINS
#else
#define CHAINS_AT_ONCE 2
#endif

/* The weights of CHAINS_AT_ONCE keys from key k on; pairs only of all chains. */
INLINE void store_weights(real *score, int k, bool paired, const vf w[CHAINS_AT_ONCE]) {
#ifdef BF16_PRODUCTS
    if (paired) {
        UNROLLED(c, CATTN_SUM_CHAINS / 2)
            store_pairs((void *)(score + (k / 2 + c) * CATTN_TILE_ROWS), vf_paired(w[2 * c], w[2 * c + 1]));
        return;
    }
#endif
    (void)paired;
    UNROLLED(c, CHAINS_AT_ONCE)
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
    for (int first = 0; first < CATTN_SUM_CHAINS; first += CHAINS_AT_ONCE) {
        vf part[CHAINS_AT_ONCE];
        UNROLLED(c, CHAINS_AT_ONCE)
            part[c] = vf_set1(0);
        for (int k = e->begin; k < e->end; k += CATTN_SUM_CHAINS) {
            vf w[CHAINS_AT_ONCE];
            UNROLLED(c, CHAINS_AT_ONCE)
                w[c] = vf_set1(0);
            if (has_chain(e->chains, k))
                UNROLLED(c, CHAINS_AT_ONCE) {
                    w[c] = vf_exp(vf_loadu(score + (k + first + c) * CATTN_TILE_ROWS) - shift);
                    part[c] = part[c] + w[c];
                }
            store_weights(score, k + first, paired, w);
        }
        UNROLLED(c, CHAINS_AT_ONCE)
            sum[first + c] = part[c];
    }
    vf alpha = vf_loadu((const real *)rows->scratch.alpha + r);
    vf_storeu(row_sum, vf_fma(vf_loadu(row_sum), alpha, SUM_TREE(sum)));
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
    vf block[MR][WIDEST];
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

/* value_tile of the groups first .. end-1, which see the same keys. */
NOINLINE void value_plain(const struct tile *t, int first, int end, int64_t c, struct key_half keys,
                          struct source value, const real *factor, int step) {
    for (int g = first; g < end; g++)
        value_tile(MR, NR, t, ALL_CHAINS, g * MR, c, false, keys, value, factor + (g - first) * step);
}

/* The keys of half i that some row of group g sees. */
INLINE struct key_half group_keys(const struct tile *t, int i, int g) {
    return key_half_of(i, t->group[g].begin, t->group[g].end);
}

/* Whether some row of the group does not see all of these keys. */
INLINE bool is_partial(const struct tile *t, int g, struct key_half keys) {
    const struct extent *e = &t->group[g];
    return !t->rows->call.fully_ranged || keys.begin < e->full_begin || min64(keys.end, t->n_keys) > e->full_end;
}

/* Sets end[g] to the end of the run of whole groups from g on whose rows all see the same keys of half i; to g itself
 * where some row of the group does not. */
static void find_plain_groups(const struct tile *t, int i, uint8_t end[N_GROUPS]) {
    for (int g = t->n_groups - 1; g >= 0; g--) {
        const struct key_half keys = group_keys(t, i, g);
        const bool plain = !t->has_chains && t->group[g].begin < t->group[g].end && !is_partial(t, g, keys) &&
                           tile_height(MR, t->rows->n_rows - g * MR) == MR;
        end[g] = (uint8_t)(plain ? g + 1 : g);
        if (plain && g + 1 < t->n_groups && end[g + 1] > g + 1) {
            const struct key_half next = group_keys(t, i, g + 1);
            end[g] = next.begin == keys.begin && next.end == keys.end ? end[g + 1] : end[g];
        }
    }
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
        uint8_t plain_end[N_GROUPS];
        if (i > 0 && key_half_is_empty(all))
            break;
        find_plain_groups(t, i, plain_end);
        for (int64_t c = 0; c < rows->call.d_v; c += PANEL) {
#ifdef BF16_PRODUCTS
            const struct source value = {t->value.first + all.begin / 2 * t->value.row + 2 * c, t->value.row};
            const int64_t per_row = 2; /* keys */
#else
            const struct source value = value_run(rows, t->value, all.begin, all.end, c);
            const int64_t per_row = 1;
#endif
            const bool wide = NR == 1 || rows->call.d_v - c > LANES;
            for (int g = 0, end; g < t->n_groups; g = end) {
                const struct key_half keys = group_keys(t, i, g);
                end = g + 1;
                if (t->group[g].begin == t->group[g].end || (i > 0 && key_half_is_empty(keys)))
                    continue;
                const real *factor = i == 0 ? (const real *)rows->scratch.alpha + g * MR : ones;
                const struct source from = {value.first + (keys.begin - all.begin) / per_row * value.row, value.row};
                if (wide && plain_end[g] > g) {
                    end = plain_end[g];
                    value_plain(t, g, end, c, keys, from, factor, i == 0 ? MR : 0);
                } else if (t->has_chains)
                    value_tile_of_chains(t, g, c, keys, from, factor);
                else
                    AT_SIZE(MR, tile_height(MR, rows->n_rows - g * MR), wide, value_tile, t, ALL_CHAINS, g * MR, c,
                            is_partial(t, g, keys), keys, from, factor);
            }
        }
    }
}

/* Prepares everything that score_panel reads. */
static void scores_begin(struct tile *t) {
    masks_begin(t);
    fill_biases(t, 0, t->n_vectors);
    t->key = rows_of_block(t, &t->rows->key, t->rows->call.head_dim);
}

/* Scores of the whole block, with every mask applied; the backward pass has no use for them panel by panel. */
static void tile_scores(struct tile *t) {
    scores_begin(t);
    for (int v = 0; v < t->n_vectors; v += NR)
        score_panel(t, v);
}

#ifndef BF16_PRODUCTS
/* V is copied in panels because its rows may lie so far apart that a panel finds few sets of the cache. */
static void pack_block(struct cattn_rows *rows, int64_t k0, int64_t k1) {
    const int n = (int)(k1 - k0);
    const struct cattn_matrix key = rows_from(rows->key, k0);
    if (rows->call.d_v) { /* before the keys, which need the same scratch */
        const struct cattn_matrix matrix = rows_from(rows->value, k0);
        const struct source value = rows_of(&matrix, n, rows->call.d_v, rows->scratch.block_copy);
        for (int64_t c = 0; c < rows->call.d_v; c += PANEL)
            copy_columns(rows, value, n, c, (real *)rows->scratch.value_panels + c * CATTN_BLOCK_KEYS);
    }
    rows_of(&key, n, rows->call.head_dim, rows->scratch.block_copy);
}
#endif

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
