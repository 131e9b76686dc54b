/* tile_units.inc.h -- the tile path of the tables of TABLE_BITS 17: units of tiles in the place of micro-tiles.
 *
 * Scores are K Q^T: a row of A is a key, read where it is packed; B is the packed queries. They are stored as in
 * tile.inc.h, so that masks, options and softmax are the same. P V is V^T P^T: a row of A is a column of V, and the
 * weights of the keys k and k + 16 of a group are a pair of B, in the place of the scores. Its sums lie transposed
 * until the end of a chunk. A group of rows has CATTN_UNIT of them.
 */

#define RIGHT_ROW (2 * UNIT)       /* of packed queries, in bfloat16 */
#define WEIGHT_ROW (2 * SCORE_ROW) /* of pairs of weights */

/* Packs Q^T: [group of rows][pair of columns][UNIT], with lanes of zeros up to a whole tile. */
static void pack_query_tile(struct cattn_rows *rows) {
    const int64_t depth = rows->call.head_dim, group = groups_of(depth) * TILE * RIGHT_ROW;
    for (int r = 0; r < cattn_round_up(rows->n_rows, TILE); r += LANES) {
        uint16_t *to = (uint16_t *)rows->scratch.packed_query + r / UNIT * group + 2 * (r % UNIT);
        for (int64_t c = 0; c < depth; c += GROUP)
            for (int p = 0; p < TILE; p += LANES) {
                vf v[LANES];
                for (int i = 0; i < LANES; i++) {
                    v[i] = vf_set1(0);
                    if (r + i >= rows->n_rows)
                        continue;
                    const struct cattn_matrix query = query_row(rows, r + i);
                    v[i] = vf_of_vu(pairs_of_group(&query, direct_storage(&query), 0, c + p, depth));
                }
                vf_transpose(v);
                for (int i = 0; i < LANES; i++)
                    store_pairs(to + (c / 2 + p + i) * RIGHT_ROW, vu_of_vf(v[i]));
            }
    }
}

/* Copies of keys and values stand side by side. */
static uint16_t *value_copy(const struct cattn_rows *rows) {
    return (uint16_t *)rows->scratch.block_copy +
           CATTN_BLOCK_KEYS * cattn_packed_key_cols(CATTN_BF16_TILES, rows->call.head_dim);
}
static real *wide_values(const struct cattn_rows *rows) {
    return (real *)rows->scratch.wide + CATTN_BLOCK_KEYS * cattn_packed_key_cols(CATTN_BF16_TILES, rows->call.head_dim);
}

/* The keys of the units begin .. end-1 of the block as rows of A; indexed by the key relative to k0, in whole units. */
static const void *left_keys(const struct tile *t, int begin, int end) {
    const struct cattn_rows *rows = t->rows;
    const int64_t row = cattn_packed_key_cols(CATTN_BF16_TILES, rows->call.head_dim);
    const struct cattn_matrix key = rows_from(rows->key, t->k0);
    const uint16_t *packed = key.first;
    if (!rows->call.packed_keys) {
        uint16_t *copy = rows->scratch.block_copy;
        pack_left(&key, begin, min64(end, t->n_keys), rows->call.head_dim, copy);
        packed = copy;
    }
    /* without head_dim there is nothing to read */
    const void *left = widen_left(packed + begin * row, (end - begin) * row, rows->scratch.wide);
    return left_at(left, -begin * row);
}

/* The values of the groups of keys begin .. end-1 of the block as terms of the columns of V. */
static const void *left_values(const struct tile *t, int begin, int end) {
    const struct cattn_rows *rows = t->rows;
    const int64_t row = cattn_packed_value_cols(CATTN_BF16_TILES, rows->call.d_v);
    const struct cattn_matrix value = rows_from(rows->value, t->k0);
    const uint16_t *packed = value.first;
    if (!rows->call.packed_keys) {
        uint16_t *copy = value_copy(rows);
        pack_transposed(&value, begin, min64(end, t->n_keys), rows->call.d_v, copy + begin * row);
        packed = copy;
    }
    const void *left = widen_left(packed + begin * row, (end - begin) * row, wide_values(rows));
    return left_at(left, -begin * row);
}

/* ---- scores ---- */

/* The chains of keys that a vector of queries sees. A vector after the last row sees none. */
INLINE unsigned live_chains(const struct tile *t, int v) {
    const struct extent *e = &t->vector[v];
    return v < t->n_vectors && e->begin < e->end ? e->chains & chains_of(e->begin, e->end) : 0;
}

/* The number of tiles of the queries of a group. */
INLINE int lanes_of_group(const struct tile *t, int g) { return t->rows->n_rows - g * UNIT > TILE ? 2 : 1; }

/* Scales 16 sums of a vector of queries, from key k on, and places them as scores with every option and mask. Adding 0
 * turns -0 into +0. */
static void place_chain(const struct tile *t, int v, int k, const real *sum) {
    const vf scale = vf_set1((real)t->rows->call.score_options.scale), zero = vf_set1(0);
    enum { AT_ONCE = 4 };
    for (int i = 0; i < TILE; i += AT_ONCE) {
        vf score[MR][WIDEST];
        UNROLLED(m, AT_ONCE)
            score[m][0] = vf_fma(vf_loadu(sum + (i + m) * UNIT), scale, zero);
        place_scores(AT_ONCE, 0, t, v, k + i, score);
    }
}

/* The same for n_chains chains of which all rows see every key, without options. */
INLINE void place_plain(int n_chains, const struct tile *t, int v, int k, const real *sum) {
    const struct cattn_rows *rows = t->rows;
    const vf scale = vf_set1((real)rows->call.score_options.scale), zero = vf_set1(0);
    real *score = score_at(rows, k, v * LANES), *block_max = (real *)rows->scratch.block_max + v * LANES;
    vf max[4]; /* so that the comparisons overlap */
    UNROLLED(i, 4)
        max[i] = vf_loadu(block_max);
    for (int c = 0; c < n_chains; c++, sum += TILE * UNIT, score += TILE * SCORE_ROW)
        UNROLLED(i, TILE) {
            const vf s = vf_fma(vf_loadu(sum + i * UNIT), scale, zero);
            vf_storeu(score + i * SCORE_ROW, s);
            max[i % 4] = vf_max(s, max[i % 4]);
        }
    vf_storeu(block_max, vf_max(vf_max(max[0], max[1]), vf_max(max[2], max[3])));
}

/* The sums of a unit of scores: of the chains of keys from k on. */
struct score_unit {
    int k, n_chains;
    real *sum;
};

static void place_unit(const struct tile *t, int g, const struct score_unit *u) {
    if (u->n_chains == 0)
        return;
    const struct cattn_rows *rows = t->rows;
    const bool changes = rows->call.has_slopes || changes_scores(&rows->call.score_options);
    const int end = u->k + u->n_chains * TILE;
    for (int l = 0; l < lanes_of_group(t, g) * TILE; l += LANES) {
        const int v = (g * UNIT + l) / LANES;
        const struct extent *e = &t->vector[v];
        const unsigned live = live_chains(t, v), all = chains_of(u->k, end);
        if ((live & all) == all && !changes && !t->has_bias[v] && u->k >= e->full_begin && end <= e->full_end)
            place_plain(u->n_chains, t, v, u->k, u->sum + l);
        else
            for (int c = 0; c < u->n_chains; c++)
                if (has_chain(live, u->k + c * TILE))
                    place_chain(t, v, u->k + c * TILE, u->sum + c * TILE * UNIT + l);
    }
}

/* The chains that some vector of a group of rows sees. */
INLINE unsigned live_chains_of_group(const struct tile *t, int g) {
    unsigned live = 0;
    for (int v = g * UNIT / LANES; v < (g + 1) * UNIT / LANES; v++)
        live |= live_chains(t, v);
    return live;
}

/* Scores of a group of rows. The products of a unit begin before the one before it is placed, so that tiles and vectors
 * work side by side. */
static void score_group(const struct tile *t, int g, unsigned live, const void *keys) {
    const struct cattn_rows *rows = t->rows;
    const int64_t row = cattn_packed_key_cols(CATTN_BF16_TILES, rows->call.head_dim);
    const int64_t n_groups = groups_of(rows->call.head_dim), group = TILE * RIGHT_ROW;
    struct unit u = {
        n_groups,  NULL,  GROUP, UNIT * GROUP, (const uint16_t *)rows->scratch.packed_query + g * n_groups * group,
        RIGHT_ROW, group, NULL,  UNIT};
    struct score_unit before = {0, 0, NULL};
    int n_units = 0;
    for (int k = 0; k < CATTN_BLOCK_KEYS; k += GROUP) {
        const unsigned chains = live >> k / TILE & 3;
        if (chains == 0)
            continue;
        const struct score_unit now = {k + (chains == 2 ? TILE : 0), chains == 3 ? 2 : 1,
                                       (real *)rows->scratch.units + n_units++ % 2 * UNIT * UNIT};
        u.left = left_at(keys, k * row + (now.k - k) * GROUP);
        u.sum = now.sum;
        if (chains == 3 && lanes_of_group(t, g) == 2)
            unit_products(2, 2, false, u);
        else if (chains == 3)
            unit_products(2, 1, false, u);
        else if (lanes_of_group(t, g) == 2)
            unit_products(1, 2, false, u);
        else
            unit_products(1, 1, false, u);
        place_unit(t, g, &before);
        before = now;
    }
    place_unit(t, g, &before);
}

/* ---- weights ---- */

/* The weights of a group of keys from their scores: exp(score - shift) of the chains that are live, else 0. Eight keys
 * at a time come from each of four places, in whose order the sums take them. */
INLINE void softmax_group(unsigned live, bool at_once, real *score, vf shift, vf sum[CATTN_SUM_CHAINS],
                          uint16_t *pairs) {
    UNROLLED(c, CATTN_SUM_CHAINS) {
        vf w[4];
        UNROLLED(i, 4) {
            w[i] = vf_set1(0);
            if (live >> i / 2 & 1) {
                w[i] = vf_exp(vf_loadu(score + (c + i * CATTN_SUM_CHAINS) * SCORE_ROW) - shift);
                sum[c] = sum[c] + w[i];
            }
        }
        if (at_once) {
            store_pairs(pairs + c * WEIGHT_ROW, vf_paired(w[0], w[2]));
            store_pairs(pairs + (c + CATTN_SUM_CHAINS) * WEIGHT_ROW, vf_paired(w[1], w[3]));
        } else {
            UNROLLED(i, 4)
                vf_storeu(score + (c + i * CATTN_SUM_CHAINS) * SCORE_ROW, w[i]);
        }
    }
}

/* Replaces the scores of LANES rows by weights, which are pairs already if nothing changes them. A pair has the place
 * of a score that was read before. `extent` has the keys that P V reads. */
static void softmax_vector(const struct tile *t, const struct extent *extent, int v) {
    struct cattn_rows *rows = t->rows;
    const unsigned live = live_chains(t, v);
    const bool at_once = pairs_at_once(rows);
    real *score = score_at(rows, 0, v * LANES), *row_sum = (real *)rows->scratch.row_sum + v * LANES;
    vf sum[CATTN_SUM_CHAINS], shift = vf_set1(0);
    UNROLLED(c, CATTN_SUM_CHAINS)
        sum[c] = vf_set1(0);
    if (v < t->n_vectors) {
        update_max(rows, v * LANES);
        shift = vf_loadu((const real *)rows->scratch.block_max + v * LANES);
    }
    for (int k = extent->begin / GROUP * GROUP; k < extent->end; k += GROUP) {
        real *at = score + k * SCORE_ROW;
        uint16_t *pairs = (uint16_t *)(void *)(score + k / 2 * SCORE_ROW);
        const unsigned chains = live >> k / TILE & 3;
        if (chains == 3 && at_once)
            softmax_group(3, true, at, shift, sum, pairs);
        else
            softmax_group(chains, at_once, at, shift, sum, pairs);
    }
    if (v < t->n_vectors) {
        const vf alpha = vf_loadu((const real *)rows->scratch.alpha + v * LANES);
        vf_storeu(row_sum, vf_fma(vf_loadu(row_sum), alpha, SUM_TREE(sum)));
    }
}

/* Makes pairs of the weights of LANES rows, in place. */
static void pair_weights(const struct tile *t, const struct extent *extent, int v) {
    real *score = score_at(t->rows, 0, v * LANES);
    for (int k = extent->begin / GROUP * GROUP; k < extent->end; k += GROUP)
        for (int c = 0; c < CATTN_SUM_CHAINS; c++) {
            const real *from = score + (k + c) * SCORE_ROW;
            vf w[4];
            for (int i = 0; i < 4; i++)
                w[i] = vf_loadu(from + i * CATTN_SUM_CHAINS * SCORE_ROW);
            for (int i = 0; i < 2; i++)
                store_pairs((void *)(score + (k / 2 + c + i * CATTN_SUM_CHAINS) * SCORE_ROW),
                            vf_paired(w[i], w[i + 2]));
        }
}

/* The weights of a group of rows, from their scores. */
static void weigh_group(const struct tile *t, int g) {
    const struct cattn_rows *rows = t->rows;
    for (int v = g * UNIT / LANES; v < (g * UNIT + lanes_of_group(t, g) * TILE) / LANES; v++) {
        const struct extent *e = &t->vector[v];
        if (v < t->n_vectors && rows->call.has_weights)
            store_scores_of(t, e, v * LANES);
        softmax_vector(t, &t->group[g], v);
        if (pairs_at_once(rows))
            continue;
        if (v < t->n_vectors)
            drop_lanes(t, e, v * LANES);
        if (v < t->n_vectors && rows->small_weights)
            shrink_lanes(t, e, v * LANES);
        pair_weights(t, &t->group[g], v);
    }
}

/* ---- P V ---- */

/* The groups of keys of one half of the block. */
struct half_groups {
    int begin, end;
};
INLINE struct half_groups half_groups_of(int half, const struct extent *e, int n_keys) {
    const int groups = CATTN_HALF_BLOCK / GROUP, last = (int)groups_of(min64(e->end, n_keys));
    return (struct half_groups){(int)max64(e->begin / GROUP, half * groups), (int)min64(last, (half + 1) * groups)};
}

/* Sums of 32 columns of V from c on and a group of rows over the keys of one half. Returns false if there are none. */
static bool value_unit(const struct tile *t, int g, int64_t c, struct half_groups keys, const void *values, real *sum) {
    const struct cattn_rows *rows = t->rows;
    const int64_t group = cattn_packed_value_cols(CATTN_BF16_TILES, rows->call.d_v) * GROUP;
    const uint16_t *weights = rows->scratch.score;
    const int64_t right_group = TILE * (int64_t)WEIGHT_ROW;
    if (keys.begin >= keys.end)
        return false;
    const struct unit u = {keys.end - keys.begin,
                           left_at(values, keys.begin * group + c * GROUP),
                           GROUP,
                           group,
                           weights + keys.begin * right_group,
                           WEIGHT_ROW,
                           right_group,
                           sum,
                           UNIT};
    if (lanes_of_group(t, g) == 2)
        unit_products(2, 2, false, u);
    else
        unit_products(2, 1, false, u);
    return true;
}

/* One vector of those sums again, of column c, without the hidden keys of each row: 0 * NaN must not leak their values.
 */
static vf weighted_sum(const struct tile *t, int r, int64_t c, struct half_groups keys, const void *values) {
    const struct cattn_rows *rows = t->rows;
    const int64_t group = cattn_packed_value_cols(CATTN_BF16_TILES, rows->call.d_v) * GROUP;
    vf sum = vf_set1(0);
    for (int k = keys.begin; k < keys.end; k++) {
        vf chain[2] = {vf_set1(0), vf_set1(0)};
        for (int i = 0; i < GROUP; i++) {
            const int key = k * GROUP + i;
            real seen[LANES] = {0};
            for (int l = 0; l < LANES && r + l < rows->n_rows && key < t->n_keys; l++)
                seen[l] = key_visible(rows, r + l, t->k0 + key);
            const vu pairs = load_pair_vector((const uint16_t *)(const void *)score_at(rows, k * TILE + i % TILE, r));
            const vf w = vf_half(pairs, i / TILE), v = vf_set1(left_term(left_at(values, k * group + c * GROUP), i));
            vf longer = chain[i / TILE];
            products_begin();
            keep_sum(&longer); /* keeps the compiler from moving products before the change of mode */
            longer = flushed_fma(w, v, longer);
            keep_sum(&longer);
            products_end();
            chain[i / TILE] = vf_select(vf_lt(vf_set1(0), vf_loadu(seen)), longer, chain[i / TILE]);
        }
        products_begin();
        keep_sum(&chain[0]);
        keep_sum(&sum);
        sum = flushed_sum(sum, flushed_sum(chain[0], chain[1]));
        keep_sum(&sum);
        products_end();
    }
    return sum;
}

static bool unit_is_finite(int n_lanes, const real *sum) {
    vf zero = vf_set1(0);
    for (int i = 0; i < UNIT; i++)
        for (int l = 0; l < n_lanes; l += LANES)
            zero = vf_fma(vf_loadu(sum + i * UNIT + l), vf_set1(0), zero);
    return !vm_any(vm_not(finite_lanes(zero)));
}

/* Computes sums that are not finite again. The keys of the groups may be hidden from all rows. */
static void check_unit(const struct tile *t, int g, int64_t c, struct half_groups keys, const void *values, real *sum) {
    const struct extent *e = &t->group[g];
    const bool whole = keys.begin * GROUP >= e->full_begin && min64(keys.end * GROUP, t->n_keys) <= e->full_end;
    if ((t->rows->call.fully_ranged && !t->rows->call.has_block_mask && whole) ||
        unit_is_finite(lanes_of_group(t, g) * TILE, sum))
        return;
    for (int i = 0; i < UNIT; i++)
        for (int l = 0; l < lanes_of_group(t, g) * TILE; l += LANES)
            vf_storeu(sum + i * UNIT + l, weighted_sum(t, g * UNIT + l, c + i, keys, values));
}

/* What a unit of P V adds to the accumulator, and where. */
struct value_sums {
    int g;
    int64_t c;
    bool has[2];
    const real *sum; /* of both halves */
};

/* acc = acc * alpha + first half + second half. */
static void fold_unit(const struct tile *t, const struct value_sums *u) {
    const struct cattn_row_scratch *s = &t->rows->scratch;
    const int n_lanes = u->sum ? lanes_of_group(t, u->g) * TILE : 0;
    for (int l = 0; l < n_lanes; l += LANES) {
        const vf alpha = vf_loadu((const real *)s->alpha + u->g * UNIT + l);
        real *acc = (real *)s->acc_columns + (u->g * t->rows->call.acc_cols + u->c) * UNIT + l;
        const real *sum = u->sum + l;
        if (u->has[0] && u->has[1])
            UNROLLED(i, TILE) {
                for (int h = 0; h < 2; h++) {
                    const int at = h * TILE + i;
                    const vf first = vf_fma(vf_loadu(acc + at * UNIT), alpha, vf_loadu(sum + at * UNIT));
                    vf_storeu(acc + at * UNIT, first + vf_loadu(sum + (UNIT + at) * UNIT));
                }
            }
        else
            for (int i = 0; i < UNIT; i++) {
                vf v = vf_fma(vf_loadu(acc + i * UNIT), alpha, u->has[0] ? vf_loadu(sum + i * UNIT) : vf_set1(0));
                if (u->has[1])
                    v = v + vf_loadu(sum + (UNIT + i) * UNIT);
                vf_storeu(acc + i * UNIT, v);
            }
    }
}

/* P V of a group of rows. The products of a unit begin before the sums of the one before it are added, as for scores.
 */
static void value_group(const struct tile *t, int g, const void *values) {
    const struct cattn_rows *rows = t->rows;
    const struct extent *e = &t->group[g];
    struct value_sums before = {g, 0, {false, false}, NULL};
    if (e->begin >= e->end)
        return;
    for (int64_t c = 0; c < rows->call.d_v; c += UNIT) {
        real *sum = (real *)rows->scratch.units + c / UNIT % 2 * 2 * UNIT * UNIT;
        struct value_sums now = {g, c, {false, false}, sum};
        for (int i = 0; i < 2; i++)
            now.has[i] = value_unit(t, g, c, half_groups_of(i, e, t->n_keys), values, sum + i * UNIT * UNIT);
        for (int i = 0; i < 2; i++)
            if (now.has[i])
                check_unit(t, g, c, half_groups_of(i, e, t->n_keys), values, sum + i * UNIT * UNIT);
        fold_unit(t, &before);
        before = now;
    }
    fold_unit(t, &before);
}

/* ---- a block, and the end of a chunk ---- */

/* One group of rows after the other: its scores are in the L1 cache until P V has read its weights. */
static void tile_block(struct cattn_rows *rows, int64_t k0, int64_t k1) {
    struct tile t;
    if (!tile_begin(&t, rows, k0, k1))
        return;
    masks_begin(&t);
    const int begin = t.all.begin / GROUP * GROUP, end = (int)cattn_round_up(t.all.end, GROUP);
    const void *keys = left_keys(&t, begin, end), *values = rows->call.d_v ? left_values(&t, begin, end) : NULL;
    for (int g = 0; g < t.n_groups; g++) {
        const unsigned live = live_chains_of_group(&t, g);
        fill_biases(&t, g * UNIT / LANES, (g + 1) * UNIT / LANES);
        if (live)
            score_group(&t, g, live, keys);
        weigh_group(&t, g);
        value_group(&t, g, values);
    }
}

/* Transposes the chunk's sums to where the row path has them, and empties them for the next chunk. */
static void chunk_end(struct cattn_rows *rows) {
    const int64_t acc_cols = rows->call.acc_cols;
    real *acc = rows->scratch.acc;
    for (int64_t c = 0; c < rows->call.d_v; c += LANES)
        for (int r = 0; r < rows->n_rows; r += LANES) {
            const real *columns = (const real *)rows->scratch.acc_columns + (r / UNIT * acc_cols + c) * UNIT + r % UNIT;
            vf v[LANES];
            for (int i = 0; i < LANES; i++)
                v[i] = vf_loadu(columns + i * UNIT);
            vf_transpose(v);
            for (int i = 0; i < LANES && r + i < rows->n_rows; i++)
                vf_storeu(acc + (r + i) * acc_cols + c, v[i]);
        }
}
