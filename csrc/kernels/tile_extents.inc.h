/* tile_extents.inc.h -- the keys of a block that the queries of a tile see: of each row, of each vector of queries for
 * the scores, and of each group of MR queries for P V.
 */

#define N_VECTORS (CATTN_TILE_ROWS / LANES)
#ifdef BF16_TILES /* rows of a group, and the keys whose multiples bound the extents of vectors */
#define GROUP_ROWS CATTN_UNIT
#define EXTENT_STEP CATTN_CHAIN_TERMS
#else
#define GROUP_ROWS MR
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
    bool has_chains;                                    /* some extent lacks chains, or a vector or group has holes */
    real first[CATTN_TILE_ROWS], last[CATTN_TILE_ROWS]; /* lo and hi as reals, for vectors; exact in either type */
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
