/* row_scores.inc.h -- the row path's products of a few queries and the keys that stream by.
 *
 * Lanes are keys: LANES rows of K are transposed in registers, some columns at a time, and each query computes its
 * chains of FMAs over d from there. Quantized keys and bfloat16 are transposed before they are converted.
 */

/* The keys of a block are visited in steps of this, so that every table defines the same elements of the scores. */
#define ROW_STEP 16
/* Prefetch distances, in rows of K or V. The far one is a whole half block, because the rows of V are visited several
 * times, a few columns at a time. The near one is a tile of K. */
#define ROWS_FAR CATTN_HALF_BLOCK
#define ROWS_MIDWAY (CATTN_HALF_BLOCK / 2)
#define ROWS_NEAR ROW_STEP
/* A table may define STREAM_AHEAD instead: one distance in bytes. */

#ifndef BF16_PRODUCTS
static void pack_query_rows(struct cattn_rows *rows) {
    const int64_t depth = rows->call.head_dim;
    const real scale = (real)rows->call.score_options.scale;
    real *packed = rows->scratch.packed_query;
    /* rows that do not exist are 0: the kernels compute up to CATTN_FEW_ROWS rows */
    for (int r = 0; r < CATTN_FEW_ROWS; r++, packed += depth) {
        const real *query = r < rows->n_rows ? rows->query[r] : NULL;
        int64_t col = rows->call.query_col;
        if (query && rows->call.storage != CATTN_STORED_PLAIN) {
            widen_row(rows->call.storage, query, col, depth, packed);
            query = packed;
            col = 1;
        }
        for (int64_t d = 0; d < depth; d++)
            packed[d] = query ? query[d * col] * scale : 0;
    }
}
#endif

/* The prefetch position. Rows are prefetched line by line in memory order, whatever columns a tile or a pass reads. */
struct rows_ahead {
    uintptr_t line, end; /* the next line of the current row, and the end of that row */
    int64_t row, gap;    /* bytes from row to row, and from the end of a row to the next one */
};

INLINE struct rows_ahead rows_ahead(const struct cattn_matrix *from, int64_t n_cols) {
    const int64_t size = (int64_t)stored_size(from->storage), row = from->row * size, cols = n_cols * size;
    const uintptr_t first = (uintptr_t)from->first;
    /* rows without gaps form one long row */
    return (struct rows_ahead){first, row == cols ? UINTPTR_MAX : first + (uintptr_t)cols, row, row - cols};
}

INLINE void prefetch_line(uintptr_t line, int64_t row) {
#ifdef STREAM_AHEAD
    (void)row;
    prefetch(line, STREAM_AHEAD, 1);
#else
    prefetch_thrice(line, ROWS_FAR * row, ROWS_MIDWAY * row, ROWS_NEAR * row, 1);
#endif
}

/* Prefetches the next n bytes: whole lines, or less than one line. A row that starts inside a line spans one line more,
 * hence the extra prefetch of the row's last byte. */
INLINE void prefetch_ahead(struct rows_ahead *next, size_t n) {
#pragma GCC unroll 16
    for (size_t done = 0; done < n; done += LINE_BYTES) {
        prefetch_line(next->line, next->row);
        next->line += n < LINE_BYTES ? n : LINE_BYTES;
        if (__builtin_expect(next->line >= next->end, 0)) {
            prefetch_line(next->end - 1, next->row);
            next->line = next->end + (uintptr_t)next->gap;
            next->end += (uintptr_t)next->row;
        }
    }
}

#ifdef BF16_TILES

/* Rows of whole groups, as numbers. */
static void pack_query_rows(struct cattn_rows *rows) {
    const int64_t depth = rows->call.head_dim, row = cattn_packed_key_cols(CATTN_BF16_TILES, depth);
    real *packed = rows->scratch.packed_query;
    memset(packed, 0, (size_t)(CATTN_FEW_ROWS * row) * sizeof *packed);
    for (int r = 0; r < rows->n_rows; r++) {
        const struct cattn_matrix query = query_row(rows, r);
        round_terms(&query, 0, depth, packed + r * row);
    }
}

/* Scores of LANES keys, of which the first n exist, for `many` rows: groups of two chains, then the scale. */
INLINE void score_keys(const struct cattn_rows *rows, int many, const struct cattn_matrix *key, int n,
                       vf score[CATTN_FEW_ROWS]) {
    const int64_t depth = rows->call.head_dim, row = cattn_packed_key_cols(CATTN_BF16_TILES, depth);
    const vf scale = vf_set1((real)rows->call.score_options.scale);
    struct rows_ahead next = rows_ahead(key, depth);
    struct lane_sums s;
    begin_lane_sums(many, &s);
    for (int64_t d = 0; d < depth; d += 2 * LANES) {
        const int n_cols = (int)min64(2 * LANES, depth - d);
        vf kt[LANES];
        key_pairs(key, n, d, n_cols, kt);
        if (n == LANES && n_cols == 2 * LANES)
            prefetch_ahead(&next, 2 * LANES * LANES * stored_size(key->storage));
        products_begin();
        keep_lane_sums(many, &s); /* the compiler may not add before the mode is set */
        add_lane_pairs(many, &s, d, (n_cols + 1) / 2, kt, rows->scratch.packed_query, row);
        keep_lane_sums(many, &s);
        products_end();
    }
    finish_lane_sums(many, &s);
    UNROLLED(r, many)
        score[r] = vf_fma(s.sum[r], scale, vf_set1(0));
}

#elif defined(BF16_PRODUCTS)

/* Scores of LANES keys, of which the first n exist, for `many` rows: one chain of pairs, then the scale. */
INLINE void score_keys(const struct cattn_rows *rows, int many, const struct cattn_matrix *key, int n,
                       vf score[CATTN_FEW_ROWS]) {
    const int64_t depth = rows->call.head_dim, padded = 2 * pairs_of(depth);
    const vf scale = vf_set1((real)rows->call.score_options.scale);
    const uint16_t *query = rows->scratch.packed_query;
    struct rows_ahead next = rows_ahead(key, depth);
    UNROLLED(r, many)
        score[r] = vf_set1(0);
    for (int64_t d = 0; d < depth; d += 2 * LANES) {
        const int n_cols = (int)min64(2 * LANES, depth - d), n_pairs = (n_cols + 1) / 2;
        vf kt[LANES];
        key_pairs(key, n, d, n_cols, kt);
        if (n == LANES && n_cols == 2 * LANES)
            prefetch_ahead(&next, 2 * LANES * LANES * stored_size(key->storage));
        products_begin();
        for (int i = 0; i < n_pairs; i++)
            UNROLLED(r, many)
                score[r] = vf_pair_dot(vu_set1(load_pair(query + r * padded + d + 2 * i)), vu_of_vf(kt[i]), score[r]);
        UNROLLED(r, many)
            keep_sum(&score[r]);
        products_end();
    }
    UNROLLED(r, many)
        score[r] = vf_fma(score[r], scale, vf_set1(0));
}

#else

/* A tile of K, LANES keys by LANES columns from d on: kt[i] holds column d + i of all keys. OPAQUE makes the address
 * advance from row to row: the compiler would precompute all addresses, which do not fit into the registers. */
INLINE void key_tile(const struct cattn_matrix *key, int64_t d, vf kt[LANES]) {
    int64_t at = d;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++, at += key->row) {
        OPAQUE(at);
        kt[i] = load_stored(key->storage, key->first, at, 1, LANES);
    }
    vf_transpose(kt);
}

/* key_tile at the edges: only the first n keys and nd columns exist, the rest is 0. Not inlined: its branches would
 * make whole tiles spill registers. */
NOINLINE void key_tile_part(const struct cattn_matrix *key, int n, int64_t d, int nd, vf kt[LANES]) {
    for (int i = 0; i < LANES; i++)
        kt[i] = i < n ? load_stored(key->storage, key->first, i * key->row + d, 1, nd) : vf_set1(0);
    vf_transpose(kt);
}

/* The scales of n <= LANES keys, read in place, whose numbers come divided by `over`; 1 if they have none. */
INLINE vf scales_of_keys(const struct cattn_matrix *key, int n, real over) {
#if REAL_BITS == 32
    if (cattn_is_quantized(key->storage))
        return load_strided(key->scale, key->scale_row, n) * vf_set1(over);
#endif
    (void)key, (void)n, (void)over;
    return vf_set1(1);
}

/* One column of those keys, times their scales if they are quantized. */
INLINE vf scale_column(const struct cattn_matrix *key, vf scales, vf column) {
    if (cattn_is_quantized(key->storage))
        column = column * scales;
    return column;
}

/* Adds the columns d .. d+n-1 of a tile of K (n is a constant) as the next terms to the chains of `many` rows. A chain
 * that ends with them is added to the scores. */
INLINE void score_columns(const struct cattn_rows *rows, int many, int64_t d, int n, const vf *kt,
                          vf chain[CATTN_FEW_ROWS], vf score[CATTN_FEW_ROWS]) {
    const int64_t depth = rows->call.head_dim;
    const real *query = rows->scratch.packed_query;
    UNROLLED(i, n)
        UNROLLED(r, many)
            chain[r] = vf_fma(vf_set1(query[r * depth + d + i]), kt[i], chain[r]);
    if ((d + n) % CATTN_CHAIN_TERMS != 0 && d + n != depth)
        return;
    UNROLLED(r, many) {
        score[r] = score[r] + chain[r];
        chain[r] = vf_set1(0);
    }
}

#ifdef HALVES_ARE_QUICK
/* Tiles of K may be transposed before they are converted: a lane then holds several columns, which saves shuffles. */

/* 1: this storage is converted first. With fewer than 32 registers the spills would cost what the shuffles save. */
INLINE int columns_per_lane(enum cattn_storage storage) {
    return storage == CATTN_STORED_I8 ? 4 : storage == CATTN_STORED_BF16 && REGISTERS >= 32 ? 2 : 1;
}

/* LANES keys, whole vectors of columns from d on: packed[i] holds the i-th lane of all keys. */
INLINE void key_tile_packed(const struct cattn_matrix *key, int64_t d, vf packed[LANES]) {
    int64_t at = d;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++, at += key->row) {
        OPAQUE(at);
        packed[i] = vf_loadu((const real *)stored_at(key->storage, key->first, at));
    }
    vf_transpose(packed);
}

/* Column j of those in the lanes of a packed vector, divided by UNPACKED_OVER. */
#define UNPACKED_OVER (real)0x1p-24
INLINE vf unpack(enum cattn_storage storage, vf packed, int j) {
    return storage == CATTN_STORED_I8 ? vf_quarter_i8(packed, j) : vf_half_bf16(packed, j);
}

/* Adds the chains of a packed tile, whose first column is d, to the scores of `many` rows. With few rows, several
 * chains are computed side by side: an FMA takes four cycles, and each waits for the one before it in its chain. */
INLINE void score_packed(const struct cattn_rows *rows, int many, const struct cattn_matrix *key, vf scales, int64_t d,
                         const vf packed[LANES], vf score[CATTN_FEW_ROWS]) {
    enum { MOST_CHAINS = 4 };
    const int per_lane = columns_per_lane(key->storage), vectors = CATTN_CHAIN_TERMS / per_lane;
    const int n_chains = LANES / vectors;
    const int wanted = many >= REGISTERS / 4 ? 1 : many >= REGISTERS / 8 ? 2 : MOST_CHAINS;
    const int side_by_side = wanted < n_chains ? wanted : n_chains;
    const int64_t depth = rows->call.head_dim;
    for (int first = 0; first < n_chains; first += side_by_side) {
        const real *query = (const real *)rows->scratch.packed_query + d + first * CATTN_CHAIN_TERMS;
        vf chain[MOST_CHAINS][CATTN_FEW_ROWS];
        UNROLLED(c, side_by_side)
            UNROLLED(r, many)
                chain[c][r] = vf_set1(0);
        UNROLLED(i, vectors)
            UNROLLED(c, side_by_side)
                UNROLLED(j, per_lane) {
                    const int at = c * CATTN_CHAIN_TERMS + i * per_lane + j;
                    const vf stored = unpack(key->storage, packed[(first + c) * vectors + i], j);
                    const vf column = scale_column(key, scales, stored);
                    UNROLLED(r, many)
                        chain[c][r] = vf_fma(vf_set1(query[r * depth + at]), column, chain[c][r]);
                }
        UNROLLED(c, side_by_side)
            UNROLLED(r, many)
                score[r] = score[r] + chain[c][r];
    }
}
#endif

/* Scores of LANES keys, of which the first n exist, for `many` rows. */
INLINE void score_keys(const struct cattn_rows *rows, int many, const struct cattn_matrix *key, int n,
                       vf score[CATTN_FEW_ROWS]) {
    const int64_t depth = rows->call.head_dim;
    struct rows_ahead next = rows_ahead(key, depth);
    vf kt[LANES], chain[CATTN_FEW_ROWS];
    int64_t d = 0;
    UNROLLED(r, many) {
        chain[r] = vf_set1(0);
        score[r] = vf_set1(depth > 0 ? (real)-0.0 : 0); /* -0 + x is x even if x is -0; +0 would change that sign */
    }
#ifdef HALVES_ARE_QUICK
    const int packed_columns = LANES * columns_per_lane(key->storage);
    vf scales = scales_of_keys(key, n, UNPACKED_OVER);
    for (; packed_columns > LANES && n == LANES && d + packed_columns <= depth; d += packed_columns) {
        vf packed[LANES];
        key_tile_packed(key, d, packed);
        prefetch_ahead(&next, LANES * sizeof *packed);
        score_packed(rows, many, key, scales, d, packed, score);
    }
    scales = scales_of_keys(key, n, LOADED_OVER(key->storage));
#else
    const vf scales = scales_of_keys(key, n, 1);
#endif
    for (; n == LANES && d + LANES <= depth; d += LANES) {
        key_tile(key, d, kt);
        UNROLLED(i, LANES)
            kt[i] = scale_column(key, scales, kt[i]);
        prefetch_ahead(&next, LANES * LANES * stored_size(key->storage));
        score_columns(rows, many, d, LANES, kt, chain, score);
    }
    for (; d < depth; d += LANES) {
        vf part[LANES];
        const int nd = (int)min64(LANES, depth - d);
        key_tile_part(key, n, d, nd, part);
        for (int i = 0; i < nd; i++) {
            part[i] = scale_column(key, scales, part[i]);
            score_columns(rows, many, d + i, 1, part + i, chain, score);
        }
    }
}

#endif
