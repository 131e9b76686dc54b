/* tile_scores.inc.h -- the tile path beside its products: extents of keys, masks, options, dropout.
 *
 * It serves the micro-tiles of tile.inc.h and the units of tile_units.inc.h.
 */

/* ---- extents: the keys of a block that each row, each vector of queries (scores) and each group of rows (P V) sees
 * ---- */

#define N_VECTORS (CATTN_TILE_ROWS / LANES)
/* Rows of a group, rows whose scores are there together, and the keys whose multiples bound the extents of vectors. In
 * tables of tiles the scores of a group stay in the L1 cache until P V has read its weights. */
#ifdef BF16_TILES
#define GROUP_ROWS CATTN_UNIT
#define SCORE_ROW CATTN_UNIT
#define EXTENT_STEP CATTN_CHAIN_TERMS
#else
#define GROUP_ROWS MR
#define SCORE_ROW CATTN_TILE_ROWS
#define EXTENT_STEP CATTN_SUM_CHAINS
#endif
#define N_GROUPS (CATTN_TILE_ROWS / GROUP_ROWS)

/* Keys relative to the first of the block. [begin, end): keys that some row may see; for vectors of queries widened to
 * multiples of EXTENT_STEP. [full_begin, full_end): keys that every row sees. */
struct extent {
    int begin, end;
    int full_begin, full_end;
    unsigned chains; /* the chains that some row may see; all of them without a block mask */
};

struct tile {
    struct cattn_rows *rows;
    int64_t k0;
    int n_keys;
    struct source key, value; /* indexed by the key relative to k0 */
    int n_vectors, n_groups;
    struct extent all; /* of all rows */
    struct extent vector[N_VECTORS], group[N_GROUPS];
    int lo[CATTN_TILE_ROWS], hi[CATTN_TILE_ROWS]; /* the rows' ranges, relative to k0 */
    bool ascending;                               /* lo and hi never decrease */
    bool has_bias[N_VECTORS];                     /* element-wise masks stand in the place of the scores */
    /* Only with a block mask: the chains of each row, and the first row after it that sees other keys. A vector has
     * holes if a chain that it sees has a hole in one of its rows. */
    struct row_chains chains[CATTN_TILE_ROWS];
    uint8_t next[CATTN_TILE_ROWS];
    bool has_holes[N_VECTORS];
    bool has_chains;                                        /* some row hides keys between keys that it sees */
    real first[CATTN_TILE_ROWS], last[CATTN_TILE_ROWS];     /* lo and hi as reals, for vectors; exact in either type */
    real slope[CATTN_TILE_ROWS], position[CATTN_TILE_ROWS]; /* only with slopes; position relative to k0 */
};

/* The next row after r that may see other keys. */
INLINE int next_row(const struct tile *t, int r) { return t->rows->call.has_block_mask ? t->next[r] : r + 1; }

/* The extent of up to n rows from `first` on, not widened. */
INLINE struct extent range_of_rows(const struct tile *t, int first, int n) {
    const int end_row = (int)min64(first + n, t->rows->n_rows);
    int begin = CATTN_BLOCK_KEYS, end = 0, full_begin = 0, full_end = CATTN_BLOCK_KEYS;
    if (t->ascending) { /* rows that see nothing in this block come first or last and do not change the result */
        begin = t->lo[first];
        end = t->hi[end_row - 1];
        full_begin = t->lo[end_row - 1];
        full_end = t->hi[first];
    } else {
        for (int r = first; r < end_row; r = next_row(t, r)) {
            const bool sees = t->lo[r] < t->hi[r];
            begin = sees && t->lo[r] < begin ? t->lo[r] : begin;
            end = sees && t->hi[r] > end ? t->hi[r] : end;
            full_begin = t->lo[r] > full_begin ? t->lo[r] : full_begin;
            full_end = t->hi[r] < full_end ? t->hi[r] : full_end;
        }
    }
    return begin < end ? (struct extent){begin, end, full_begin, full_end, ALL_CHAINS} : (struct extent){0};
}

/* range_of_rows, widened to multiples of EXTENT_STEP. */
INLINE struct extent extent_of_rows(const struct tile *t, int first, int n) {
    struct extent e = range_of_rows(t, first, n);
    e.begin = e.begin / EXTENT_STEP * EXTENT_STEP;
    e.end = (int)cattn_round_up(e.end, EXTENT_STEP);
    return e;
}

static void find_extents(struct tile *t) {
    /* every row sees every key of t->all: the common case, which saves the search */
    const bool full = t->all.full_begin <= t->all.begin && t->all.full_end >= t->all.end;
    t->n_vectors = (t->rows->n_rows + LANES - 1) / LANES;
    t->n_groups = (t->rows->n_rows + GROUP_ROWS - 1) / GROUP_ROWS;
    for (int v = 0; v < t->n_vectors; v++)
        t->vector[v] = full || t->n_vectors == 1 ? t->all : extent_of_rows(t, v * LANES, LANES);
    for (int g = 0; g < t->n_groups; g++) {
        t->group[g] = full ? t->all : range_of_rows(t, g * GROUP_ROWS, GROUP_ROWS);
        t->group[g].end = (int)min64(t->group[g].end, t->n_keys); /* t->all was widened past the last key */
#ifdef BF16_PRODUCTS                                              /* whole pairs: the value of a missing key is 0 */
        t->group[g].begin = t->group[g].begin / 2 * 2;
        t->group[g].end = (int)cattn_round_up(t->group[g].end, 2);
#endif
    }
}

/* Narrows the rows' ranges to what the block mask shows. Rows of the same block of queries come one after the other. */
static void narrow_rows_to_blocks(struct tile *t) {
    const uint8_t *const *mask = t->rows->per_row->block_mask;
    const int n = t->rows->n_rows;
    for (int r = 0, next; r < n; r = next) {
        int lo = t->lo[r], hi = t->hi[r];
        const struct row_chains chains = narrow_to_blocks(t->rows, r, t->k0, &lo, &hi);
        for (next = r + 1; next < n && mask[next] == mask[r] && t->lo[next] == t->lo[r] && t->hi[next] == t->hi[r];)
            next++;
        for (int i = next - 1; i >= r; i--) {
            t->lo[i] = lo;
            t->hi[i] = hi;
            t->chains[i] = chains;
            t->next[i] = (uint8_t)next;
        }
    }
}

/* Sets the extent's chains to those that one of up to n rows from `first` on sees. Returns whether one of these has a
 * hole. */
static bool find_chains(struct tile *t, struct extent *e, int first, int n) {
    const int end_row = (int)min64(first + n, t->rows->n_rows);
    unsigned seen = 0, holed = 0;
    for (int r = first; r < end_row; r = t->next[r]) {
        seen |= t->chains[r].seen;
        holed |= t->chains[r].holed;
    }
    e->chains = seen;
    t->has_chains |= (seen & holed) != 0 || (e->begin < e->end && (chains_of(e->begin, e->end) & ~seen) != 0);
    return (seen & holed) != 0;
}

static void find_all_chains(struct tile *t) {
    for (int v = 0; v < t->n_vectors; v++)
        t->has_holes[v] = find_chains(t, &t->vector[v], v * LANES, LANES);
    for (int g = 0; g < t->n_groups; g++)
        find_chains(t, &t->group[g], g * GROUP_ROWS, GROUP_ROWS);
}

/* Returns false if no row sees a key of the block. */
static bool tile_begin(struct tile *t, struct cattn_rows *rows, int64_t k0, int64_t k1) {
    t->rows = rows;
    t->k0 = k0;
    t->n_keys = (int)(k1 - k0);
    for (int r = 0; r < rows->n_rows; r++) {
        t->lo[r] = relative(rows->per_row->lo[r], k0);
        t->hi[r] = relative(rows->per_row->hi[r], k0);
    }
    t->ascending = rows->ascending && !rows->call.has_block_mask;
    t->has_chains = false;
    if (rows->call.has_block_mask)
        narrow_rows_to_blocks(t);
    t->all = extent_of_rows(t, 0, rows->n_rows);
    /* the driver skips blocks by the range of the whole task; with several heads a block in between may be empty */
    if (t->all.begin == t->all.end)
        return false;
    find_extents(t);
    if (rows->call.has_block_mask)
        find_all_chains(t);
    return true;
}

/* The score of key k and of row r. */
INLINE real *score_at(const struct cattn_rows *rows, int k, int r) {
    return (real *)rows->scratch.score + k * SCORE_ROW + (SCORE_ROW < CATTN_TILE_ROWS ? r % SCORE_ROW : r);
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
            vf_storeu(score_at(rows, k + i, r), v[i]);
    }
}

/* Applies every option and mask to the scores acc[][n] of mr keys from k on and of vector v of queries, stores them,
 * and updates the running maxima of the block. */
INLINE void place_scores(int mr, int n, const struct tile *t, int v, int k, vf acc[MR][WIDEST]) {
    struct cattn_rows *rows = t->rows;
    const vf neg_inf = vf_set1(NEG_INF);
    const int r = v * LANES;
    const bool partial = k < t->vector[v].full_begin || k + mr > t->vector[v].full_end;
    real *score = score_at(rows, k, r);
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
            acc[m][n] = add_bias(acc[m][n], vf_loadu(score + m * SCORE_ROW));
    if (partial)
        UNROLLED(m, mr) {
            vf at = vf_set1((real)(k + m));
            vm inside = vm_and(vf_lt(at, vf_loadu(t->last + r)), vm_not(vf_lt(at, vf_loadu(t->first + r))));
            acc[m][n] = vf_select(inside, acc[m][n], neg_inf);
        }
    UNROLLED(m, mr) {
        vf_storeu(score + m * SCORE_ROW, acc[m][n]);
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
            v[i] = vf_loadu(score_at(rows, k + i, r));
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
    real *w = (real *)score + k * SCORE_ROW;
    vf_storeu(w, vf_select(drop_bits, vf_loadu(w), vf_set1(0)));
}

static void drop_lanes(const struct tile *t, const struct extent *e, int r) {
    if (t->rows->scratch.drop_bits)
        each_stream_bits(t, e, r, drop_weight, score_at(t->rows, 0, r));
    else if (t->rows->drop.enabled)
        each_philox_bits(t, e, r, drop_weight, score_at(t->rows, 0, r));
}

/* Makes the weights of LANES rows small, for a second attempt. */
static void shrink_lanes(const struct tile *t, const struct extent *e, int r) {
    for (int k = e->begin; k < e->end; k++) {
        real *w = score_at(t->rows, k, r);
        vf_storeu(w, small_weight(vf_loadu(w)));
    }
}

/* Prepares what place_scores reads, but for the masks per element. */
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
    for (int v = 0; v < t->n_vectors; v++)
        t->has_bias[v] = !rows->call.fully_ranged || (rows->call.has_block_mask && t->has_holes[v]);
}

/* Writes the masks per element of the vectors begin .. end-1 to the place of their scores. */
static void fill_biases(const struct tile *t, int begin, int end) {
    for (int v = begin; v < end && v < t->n_vectors; v++)
        if (t->has_bias[v])
            fill_bias(t, &t->vector[v], v * LANES);
}
