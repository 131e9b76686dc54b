/* tile.inc.h -- the tile path: one block of up to CATTN_TILE_ROWS queries against one block of keys.
 *
 * Scores are kept transposed, score[key][query], so softmax runs down the lanes without a horizontal step and P is
 * already the broadcast operand of P V. Each panel of queries has an extent, the keys that at least one of its rows may
 * see: nothing outside is computed. Inside, a micro-tile is full (no mask code) or partial.
 */

#define N_PANELS (CATTN_TILE_ROWS / PANEL)

/* Keys of this block, relative to its first, that some row may see: [begin, end), widened to multiples of the sum
 * chains; and those that every row sees. */
struct extent {
    int begin, end;
    int full_begin, full_end;
};

struct tile {
    struct cattn_rows *rows;
    int64_t k0;
    int n_keys;
    struct extent all; /* of the whole block */
    struct extent panel[N_PANELS];
    real lo[CATTN_TILE_ROWS], hi[CATTN_TILE_ROWS];          /* the rows' ranges, relative: exact in any element type */
    real slope[CATTN_TILE_ROWS], position[CATTN_TILE_ROWS]; /* if there are slopes; position relative */
};

static struct extent extent_of_rows(const struct cattn_rows *rows, int64_t k0, int first, int last) {
    int64_t lo_min = INT64_MAX, lo_max = 0, hi_min = INT64_MAX, hi_max = 0;
    for (int r = first; r < last; r++) {
        if (rows->lo[r] < rows->hi[r]) {
            lo_min = min64(lo_min, rows->lo[r]);
            hi_max = max64(hi_max, rows->hi[r]);
        }
        lo_max = max64(lo_max, rows->lo[r]);
        hi_min = min64(hi_min, rows->hi[r]);
    }
    struct extent e = {relative(lo_min, k0), relative(hi_max, k0), relative(lo_max, k0), relative(hi_min, k0)};
    e.begin = e.begin / CATTN_SUM_CHAINS * CATTN_SUM_CHAINS;
    e.end = (int)round_up(e.end, CATTN_SUM_CHAINS);
    if (e.begin >= e.end)
        e.begin = e.end = 0;
    return e;
}

/* Puts the masks per element where the scores of this panel will go. */
static void fill_bias(const struct tile *t, int p) {
    const struct cattn_rows *rows = t->rows;
    const struct extent *e = &t->panel[p];
    const int first = e->begin / LANES * LANES;
    for (int r0 = p * PANEL; r0 < (p + 1) * PANEL; r0 += LANES)
        for (int k = first; k < e->end; k += LANES) {
            const int n = (int)max64(0, min64(LANES, t->n_keys - k));
            vf v[LANES];
            for (int i = 0; i < LANES; i++)
                v[i] = r0 + i < rows->n_rows ? element_bias(rows, r0 + i, t->k0 + k, n) : vf_set1(0);
            vf_transpose(v);
            for (int i = 0; i < LANES; i++)
                vf_storeu((real *)rows->score + (k + i) * CATTN_TILE_ROWS + r0, v[i]);
        }
}

/* MR keys from k on against one panel of queries: scores with every mask applied, and the running block maximum. */
INLINE void score_tile(const struct tile *t, int p, int nr, int k, const real *key, int64_t key_stride) {
    struct cattn_rows *rows = t->rows;
    const struct extent *e = &t->panel[p];
    const bool partial = k < e->full_begin || k + MR > e->full_end;
    const vf neg_inf = vf_set1(NEG_INF);
    vf acc[MR][NR];
    micro_tile(nr, rows->head_dim, key, key_stride, 1, (const real *)rows->packed_query + p * rows->head_dim * PANEL,
               acc);
#pragma GCC unroll 2
    for (int n = 0; n < nr; n++) {
        const int r = p * PANEL + n * LANES;
        real *score = (real *)rows->score + k * CATTN_TILE_ROWS + r;
        real *block_max = (real *)rows->block_max + r;
        vf max = vf_loadu(block_max);
        if (rows->softcap > 0)
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++)
                acc[m][n] = cap_score(acc[m][n], rows->softcap);
        if (rows->has_slopes)
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++)
                acc[m][n] =
                    slope_score(acc[m][n], vf_loadu(t->slope + r), vf_loadu(t->position + r), vf_set1((real)(k + m)));
        if (!rows->fully_ranged)
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++)
                acc[m][n] = add_bias(acc[m][n], vf_loadu(score + m * CATTN_TILE_ROWS));
        if (partial)
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++) {
                vf at = vf_set1((real)(k + m));
                vm inside = vm_and(vf_lt(at, vf_loadu(t->hi + r)), vm_not(vf_lt(at, vf_loadu(t->lo + r))));
                acc[m][n] = vf_select(inside, acc[m][n], neg_inf);
            }
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
            vf_storeu(score + m * CATTN_TILE_ROWS, acc[m][n]);
            max = vf_max(acc[m][n], max);
        }
        vf_storeu(block_max, max);
    }
}

/* A panel's last vector is left out where no row lives in it. */
INLINE int panel_vectors(int64_t columns_left) { return columns_left > LANES ? NR : 1; }

static void score_block(const struct tile *t) {
    struct cattn_rows *rows = t->rows;
    const int n_panels = (int)(round_up(rows->n_rows, PANEL) / PANEL);
    for (int k = t->all.begin / MR * MR; k < t->all.end; k += MR) {
        int64_t stride;
        const real *key = key_rows(rows, t->k0 + k, t->k0 + t->n_keys, &stride);
        for (int p = 0; p < n_panels; p++) {
            if (k + MR <= t->panel[p].begin || k >= t->panel[p].end)
                continue;
            if (panel_vectors(rows->n_rows - p * PANEL) == NR)
                score_tile(t, p, NR, k, key, stride);
            else
                score_tile(t, p, 1, k, key, stride);
        }
    }
}

/* The raw scores of one panel, as they will be needed for the weights. */
static void keep_scores(const struct tile *t, int p) {
    const struct cattn_rows *rows = t->rows;
    const struct extent *e = &t->panel[p];
    for (int r0 = p * PANEL; r0 < (p + 1) * PANEL; r0 += LANES)
        for (int k = e->begin / LANES * LANES; k < e->end; k += LANES) {
            const int n = (int)max64(0, min64(LANES, t->n_keys - k));
            vf v[LANES];
            for (int i = 0; i < LANES; i++)
                v[i] = vf_loadu((const real *)rows->score + (k + i) * CATTN_TILE_ROWS + r0);
            vf_transpose(v);
            for (int i = 0; i < LANES && r0 + i < rows->n_rows; i++)
                store_strided((real *)rows->weights[r0 + i] + (t->k0 + k) * rows->weights_col, rows->weights_col, v[i],
                              n);
        }
}

/* LANES rows: scores become exp(score - max), summed down the keys in eight chains. */
static void softmax_lanes(const struct tile *t, const struct extent *e, int r) {
    struct cattn_rows *rows = t->rows;
    update_max(rows, r);
    const vf shift = vf_loadu((const real *)rows->block_max + r);
    real *score = (real *)rows->score + r, *row_sum = (real *)rows->row_sum + r;
    vf sum[CATTN_SUM_CHAINS];
#pragma GCC unroll 8
    for (int c = 0; c < CATTN_SUM_CHAINS; c++)
        sum[c] = vf_set1(0);
    for (int k = e->begin; k < e->end; k += CATTN_SUM_CHAINS)
#pragma GCC unroll 8
        for (int c = 0; c < CATTN_SUM_CHAINS; c++) {
            real *s = score + (k + c) * CATTN_TILE_ROWS;
            vf w = exp_lean(vf_loadu(s) - shift);
            vf_storeu(s, w);
            sum[c] = sum[c] + w;
        }
    vf alpha = vf_loadu((const real *)rows->alpha + r);
    vf_storeu(row_sum, vf_fma(vf_loadu(row_sum), alpha, sum_tree(sum)));
}

/* Dropped weights become +0. One call of Philox serves 8 keys of LANES rows. */
static void drop_lanes(const struct tile *t, const struct extent *e, int r) {
    struct cattn_rows *rows = t->rows;
    const struct cattn_drop *drop = &rows->drop;
    const uint32_t *position = rows->drop_position + r, *head = rows->drop_head + r;
    for (int run = e->begin / 64 * 64; run < e->end; run += 64)
        for (int c = 0; c < 8; c++) {
            const uint64_t j = (uint64_t)(t->k0 + run + c);
            vu words[4] = {vu_set1((uint32_t)((j >> 6) << 3) + (uint32_t)c), vu_loadu(position), vu_loadu(head),
                           vu_set1(drop->lead2)};
            philox(words, drop->key);
            for (int d = 0; d < 8; d++) {
                const int k = run + 8 * d + c;
                if (k < e->begin || k >= e->end)
                    continue;
                vu digits = d & 1 ? vu_shr16(words[d >> 1]) : vu_and(words[d >> 1], vu_set1(0xffff));
                vm kept = philox_decide(drop, digits, j + (uint64_t)(8 * d), 0, position, head);
                real *w = (real *)rows->score + k * CATTN_TILE_ROWS + r;
                vf_storeu(w, vf_select(kept, vf_loadu(w), vf_set1(0)));
            }
        }
}

/* The same from bits that were drawn beforehand. */
static void drop_lanes_drawn(const struct tile *t, const struct extent *e, int r) {
    struct cattn_rows *rows = t->rows;
    const int n = (int)min64(LANES, rows->n_rows - r);
    for (int k = e->begin; k < min64(e->end, t->n_keys); k++) {
        real *w = (real *)rows->score + k * CATTN_TILE_ROWS + r;
        for (int i = 0; i < n; i++)
            if (!key_kept(rows, r + i, t->k0 + k))
                w[i] = 0;
    }
}

/* Weights of a panel outside its own extent, but inside its neighbours': micro-tiles of P V may straddle panels. */
static void zero_outside(const struct tile *t, int p) {
    const struct extent *e = &t->panel[p];
    real *score = (real *)t->rows->score + p * PANEL;
    for (int k = t->all.begin; k < t->all.end; k++)
        if (k < e->begin || k >= e->end)
            memset(score + k * CATTN_TILE_ROWS, 0, PANEL * sizeof(real));
}

/* One row of P V again, leaving out the keys that the row may not see: 0 * NaN must not betray them. */
static void value_row_visible(const struct tile *t, int r, int nr, int begin, int end, vf *block) {
    const struct cattn_rows *rows = t->rows;
    for (int n = 0; n < nr; n++)
        block[n] = vf_set1(0);
    for (int k = begin; k < end; k++) {
        if (!key_visible(rows, r, t->k0 + k))
            continue;
        vf w = vf_set1(((const real *)rows->score)[k * CATTN_TILE_ROWS + r]);
        for (int n = 0; n < nr; n++)
            block[n] = vf_fma(w, vf_loadu((const real *)rows->value_panel + k * PANEL + n * LANES), block[n]);
    }
}

/* MR rows from r on, columns c on: acc = acc * alpha + P V. */
INLINE void value_tile(const struct tile *t, const struct extent *e, int r, int64_t c, int nr) {
    struct cattn_rows *rows = t->rows;
    real *acc = (real *)rows->acc + r * rows->acc_cols + c;
    const real *alpha = (const real *)rows->alpha + r;
    const bool partial = !rows->fully_ranged || e->begin < e->full_begin || e->end > e->full_end;
    for (int i = 0; i < 2; i++) {
        const struct run run = run_of(i, e->begin, e->end);
        if (i > 0 && run_is_empty(run))
            break;
        vf block[MR][NR];
        micro_tile(nr, run.end - run.begin, (const real *)rows->score + run.begin * CATTN_TILE_ROWS + r, 1,
                   CATTN_TILE_ROWS, (const real *)rows->value_panel + run.begin * PANEL, block);
        if (partial) {
            vm finite = finite_lanes(block[0][0]);
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
                for (int n = 0; n < nr; n++)
                    finite = vm_and(finite, finite_lanes(block[m][n]));
            if (__builtin_expect(vm_any(vm_not(finite)), 0)) {
                for (int m = 0; m < MR && r + m < rows->n_rows; m++) {
                    vf again[NR];
                    value_row_visible(t, r + m, nr, run.begin, run.end, again);
                    for (int n = 0; n < nr; n++)
                        fold_block(acc + m * rows->acc_cols + n * LANES, fold_factor(i, alpha[m]), again[n]);
                }
                continue;
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
            for (int n = 0; n < nr; n++)
                fold_block(acc + m * rows->acc_cols + n * LANES, fold_factor(i, alpha[m]), block[m][n]);
    }
}

static void value_block(const struct tile *t) {
    struct cattn_rows *rows = t->rows;
    for (int64_t c = 0; c < rows->d_v; c += PANEL) {
        pack_value_panel(rows, t->k0, t->all.begin, (int)min64(t->all.end, t->n_keys), c);
        const int nr = panel_vectors(rows->d_v - c);
        for (int r = 0; r < rows->n_rows; r += MR) {
            struct extent e = extent_of_rows(rows, t->k0, r, (int)min64(r + MR, rows->n_rows));
            if (e.begin == e.end)
                continue;
            e.end = (int)min64(e.end, t->n_keys); /* widened beyond the last key there is */
            if (nr == NR)
                value_tile(t, &e, r, c, NR);
            else
                value_tile(t, &e, r, c, 1);
        }
    }
}

static void tile_block(struct cattn_rows *rows, int64_t k0, int64_t k1) {
    struct tile t = {.rows = rows, .k0 = k0, .n_keys = (int)(k1 - k0)};
    const int n_panels = (int)(round_up(rows->n_rows, PANEL) / PANEL);
    t.all = extent_of_rows(rows, k0, 0, rows->n_rows);
    if (t.all.begin == t.all.end)
        return;
    for (int r = 0; r < n_panels * PANEL; r++) {
        t.lo[r] = r < rows->n_rows ? (real)relative(rows->lo[r], k0) : 0;
        t.hi[r] = r < rows->n_rows ? (real)relative(rows->hi[r], k0) : 0;
        ((real *)rows->block_max)[r] = NEG_INF;
    }
    for (int r = 0; r < n_panels * PANEL && rows->has_slopes; r++) {
        t.slope[r] = r < rows->n_rows ? (real)rows->slope[r] : 0;
        t.position[r] = r < rows->n_rows ? (real)(rows->position[r] - k0) : 0;
    }
    for (int p = 0; p < n_panels; p++) {
        t.panel[p] = extent_of_rows(rows, k0, p * PANEL, (int)min64((p + 1) * PANEL, rows->n_rows));
        if (!rows->fully_ranged)
            fill_bias(&t, p);
    }
    score_block(&t);
    for (int p = 0; p < n_panels; p++) {
        const int rows_left = rows->n_rows - p * PANEL;
        if (rows->weights[0])
            keep_scores(&t, p);
        for (int n = 0; n < panel_vectors(rows_left); n++) {
            softmax_lanes(&t, &t.panel[p], p * PANEL + n * LANES);
            if (rows->kept[0])
                drop_lanes_drawn(&t, &t.panel[p], p * PANEL + n * LANES);
            else if (rows->drop.enabled)
                drop_lanes(&t, &t.panel[p], p * PANEL + n * LANES);
        }
        zero_outside(&t, p);
    }
    if (rows->d_v)
        value_block(&t);
}
