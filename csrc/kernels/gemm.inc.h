/* gemm.inc.h -- packing and the one micro-kernel of the tile path.
 *
 * Both products of attention run through micro_tile: up to MR rows by up to NR vectors. Operand `a` is read in place
 * and broadcast; the rows of operand `b` are vectors, packed or read in place:
 *
 *     S^T[key][query] = sum over d   of K[key][d]   * Q^T[d][query]      lanes are queries
 *     O[query][col]   = sum over key of P^T[key][query] * V[key][col]    lanes are columns of V
 *
 * Every element is a sum of chains of FMAs (docs/bit_contract.md, "Sums"). Chains are cut at
 * multiples of CATTN_CHAIN_TERMS, wherever the sum itself begins or ends.
 */

#define PANEL (NR * LANES) /* width of a packed panel */

/* Micro-tiles of products of two matrices, and the rows of B from which on rows of A are packed; a table may define
 * other ones than in attention. */
#ifndef PRODUCT_MR
#define PRODUCT_MR SCORE_MR
#define PRODUCT_NR NR
#define PRODUCT_PACKS_FROM INT64_MAX
#endif
#define WIDEST (PRODUCT_NR > NR ? PRODUCT_NR : NR) /* vectors of the widest micro-tile */

/* Tiles are `tallest` rows high. At the edges they are 8 or 4 rows high, so that few unused rows are computed. */
INLINE int tile_height(int tallest, int64_t n_rows) {
    return tallest > 4 && n_rows <= 4 ? 4 : tallest > 8 && n_rows <= 8 ? 8 : tallest;
}

/* Calls tile(mr, ...) with mr as a compile-time constant, so that the accumulators stay in registers. Branches that are
 * never taken are compiled as well, so mr must not exceed `tallest` (the array bound) in those either. */
#define AT_HEIGHT(tallest, height, tile, ...)                                                                          \
    do {                                                                                                               \
        if ((tallest) > 4 && (height) == 4)                                                                            \
            tile(4, __VA_ARGS__);                                                                                      \
        else if ((tallest) > 8 && (height) == 8)                                                                       \
            tile((tallest) > 8 ? 8 : (tallest), __VA_ARGS__);                                                          \
        else                                                                                                           \
            tile(tallest, __VA_ARGS__);                                                                                \
    } while (0)

/* AT_HEIGHT with the width nr as a constant too: NR vectors, or 1 where the second one would be unused. */
#define AT_SIZE(tallest, height, needs_all, tile, ...)                                                                 \
    do {                                                                                                               \
        if (NR == 1 || (needs_all))                                                                                    \
            AT_HEIGHT(tallest, height, tile, NR, __VA_ARGS__);                                                         \
        else                                                                                                           \
            AT_HEIGHT(tallest, height, tile, 1, __VA_ARGS__);                                                          \
    } while (0)

/* Rows of a tile of scores. A row is a key that is read from memory: few enough that memory keeps up with all rows of K
 * that are read at the same time. */
#ifdef BF16_PRODUCTS /* a row is half as long */
#define SCORE_MR (MR > 8 ? 8 : MR)
#else
#define SCORE_MR (MR > 6 ? 6 : MR)
#endif

/* Whether every element of a tile is finite: x * 0 is NaN otherwise. Four sums, so that the FMAs overlap. */
INLINE bool tile_is_finite(int mr, int nr, vf tile[MR][WIDEST]) {
    vf zero[4] = {vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0)};
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            zero[(m * NR + n) % 4] = vf_fma(tile[m][n], vf_set1(0), zero[(m * NR + n) % 4]);
    return !vm_any(vm_not(finite_lanes((zero[0] + zero[1]) + (zero[2] + zero[3]))));
}

/* The end of the chain that contains `term`, in a sum whose last term is end - 1. */
INLINE int64_t chain_end(int64_t term, int64_t end) {
    return min64(end, (term / CATTN_CHAIN_TERMS + 1) * CATTN_CHAIN_TERMS);
}

INLINE void add_tile(int mr, int nr, vf sum[MR][WIDEST], vf chain[MR][WIDEST]) {
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            sum[m][n] = sum[m][n] + chain[m][n];
}

#ifndef BF16_PRODUCTS /* bf16_products.inc.h has the products of pairs */

/* Nothing to do before and after products of the table's own type. */
INLINE void products_begin(void) {}
INLINE void products_end(void) {}

#ifdef HAS_LANES
/* The terms of micro_tile whose elements of A fill vectors: LANES terms of each row, or LANES rows of each term.
 * Returns the first term that is left. */
INLINE int64_t add_lanes(int mr, int nr, int64_t depth, const real *a, int64_t a_row, int64_t a_col, const real *b,
                         int64_t b_row, vf acc[MR][WIDEST]) {
    const bool by_terms = a_col == 1;
    const int step = by_terms ? LANES : 1, vectors = by_terms ? mr : mr / LANES;
    int64_t k = 0;
    if (!by_terms && (a_row != 1 || mr % LANES != 0))
        return 0;
#if REAL_BITS == 64 /* a whole chain */
#pragma GCC unroll 8
#else
#pragma GCC unroll 2
#endif
    for (; k + step <= depth; k += step) {
        vf v[MR];
        UNROLLED(i, vectors)
            v[i] = vf_loadu(by_terms ? a + i * a_row + k : a + k * a_col + i * LANES);
        UNROLLED(i, step) {
            __asm__ volatile("" ::: "memory"); /* GCC loads all of B first, and lacks registers for it */
            vf b_k[WIDEST];
            UNROLLED(n, nr)
                b_k[n] = vf_loadu(b + (k + i) * b_row + n * LANES);
            UNROLLED(m, mr)
                UNROLLED(n, nr)
                    acc[m][n] =
                        vf_fma(by_terms ? vf_lane(v[m], i) : vf_lane(v[m / LANES], m % LANES), b_k[n], acc[m][n]);
        }
    }
    return k;
}
#endif

/* mr and nr are constants after inlining. Set the accumulators one by one and unroll every loop over them: with `= {0}`
 * or a plain loop GCC keeps them in memory instead of registers. */
INLINE void micro_tile(int mr, int nr, int64_t depth, const real *a, int64_t a_row, int64_t a_col, const real *b,
                       int64_t b_row, vf acc[MR][WIDEST]) {
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            acc[m][n] = vf_set1(0);
    int64_t k = 0;
#ifdef HAS_LANES
    k = add_lanes(mr, nr, depth, a, a_row, a_col, b, b_row, acc);
#endif
#pragma GCC unroll 2
    for (; k < depth; k++) {
        vf b_k[WIDEST];
        UNROLLED(n, nr)
            b_k[n] = vf_loadu(b + k * b_row + n * LANES);
        UNROLLED(m, mr) {
            vf a_mk = vf_set1(a[m * a_row + k * a_col]);
            UNROLLED(n, nr)
                acc[m][n] = vf_fma(a_mk, b_k[n], acc[m][n]);
        }
    }
}

/* The terms begin .. end-1 of a sum; a and b point at the term `begin`. In tiles of 12 x 1 vectors both the chain and
 * the sum of each element fit into 32 registers. In larger tiles the sums are spilled to memory, once a chain, which
 * costs less than the loads of smaller tiles. Whole chains have calls of their own because a constant length is faster.
 */
INLINE void dot_tile(int mr, int nr, int64_t begin, int64_t end, const real *a, int64_t a_row, int64_t a_col,
                     const real *b, int64_t b_row, vf sum[MR][WIDEST]) {
    const int64_t terms = CATTN_CHAIN_TERMS, n = chain_end(begin, end) - begin, depth = end - begin;
    vf chain[MR][WIDEST];
    if (n == terms)
        micro_tile(mr, nr, terms, a, a_row, a_col, b, b_row, sum);
    else
        micro_tile(mr, nr, n, a, a_row, a_col, b, b_row, sum);
    int64_t d = n; /* the first chain initialised the sum, which saves the addition to zero */
    for (; d + terms <= depth; d += terms) {
        micro_tile(mr, nr, terms, a + d * a_col, a_row, a_col, b + d * b_row, b_row, chain);
        add_tile(mr, nr, sum, chain);
    }
    if (d < depth) {
        micro_tile(mr, nr, depth - d, a + d * a_col, a_row, a_col, b + d * b_row, b_row, chain);
        add_tile(mr, nr, sum, chain);
    }
}

/* dot_tile without the chains that are missing in a bit set. The terms of those are +0 times a finite number. */
INLINE void dot_chains(int mr, int nr, unsigned chains, int64_t begin, int64_t end, const real *a, int64_t a_row,
                       int64_t a_col, const real *b, int64_t b_row, vf sum[MR][WIDEST]) {
    vf chain[MR][WIDEST];
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            sum[m][n] = vf_set1(0);
    for (int64_t k = begin, next; k < end; k = next) {
        const int64_t d = k - begin;
        next = chain_end(k, end);
        if (!has_chain(chains, k))
            continue;
        if (next - k == CATTN_CHAIN_TERMS)
            micro_tile(mr, nr, CATTN_CHAIN_TERMS, a + d * a_col, a_row, a_col, b + d * b_row, b_row, chain);
        else
            micro_tile(mr, nr, next - k, a + d * a_col, a_row, a_col, b + d * b_row, b_row, chain);
        add_tile(mr, nr, sum, chain);
    }
}

/* Packs LANES columns of LANES queries, scaled, into the panel. All loads come first, so that their cache misses
 * overlap. OPAQUE keeps the row addresses scalar: GCC would build a vector of them and unpack it again. */
INLINE void pack_square(enum cattn_storage storage, const void *const *query, int64_t d, vf scale, real *panel) {
    vf v[LANES];
    UNROLLED(i, LANES) {
        const void *from = query[i];
        OPAQUE(from);
        v[i] = load_stored(storage, from, d, 1, LANES) * scale;
    }
    vf_transpose(v);
    UNROLLED(i, LANES)
        vf_storeu(panel + i * PANEL, v[i]);
}

/* pack_square at the edges: n_rows queries (the other lanes are 0) and n columns, `col` elements apart. */
NOINLINE void pack_part(enum cattn_storage storage, const void *const *query, int n_rows, int64_t d, int64_t col, int n,
                        vf scale, real *panel) {
    vf v[LANES];
    for (int i = 0; i < LANES; i++) {
        v[i] = vf_set1(0);
        if (i < n_rows)
            v[i] = load_stored(storage, query[i], d * col, col, n) * scale;
    }
    vf_transpose(v);
    for (int i = 0; i < n; i++)
        vf_storeu(panel + i * PANEL, v[i]);
}

/* Packs Q^T, scaled (rounded once): panels [head_dim][PANEL]. The last vector's lanes after the last row are 0. */
static void pack_query_tile(struct cattn_rows *rows) {
    const int64_t depth = rows->call.head_dim, col = rows->call.query_col;
    const vf scale = vf_set1((real)rows->call.score_options.scale);
    const int padded = (int)cattn_round_up(rows->n_rows, LANES);
    for (int r0 = 0; r0 < padded; r0 += LANES) {
        real *panel = (real *)rows->scratch.packed_query + (r0 / PANEL) * depth * PANEL + r0 % PANEL;
        const void *const *query = rows->query + r0;
        const int n_rows = (int)min64(LANES, rows->n_rows - r0);
        for (int64_t d = 0; d < depth; d += LANES, panel += LANES * PANEL) {
            const int n = (int)min64(LANES, depth - d);
            if (col != 1 || n < LANES || n_rows < LANES)
                pack_part(rows->call.storage, query, n_rows, d, col, n, scale, panel);
            else if (rows->call.storage == CATTN_STORED_PLAIN)
                pack_square(CATTN_STORED_PLAIN, query, d, scale, panel);
            else if (rows->call.storage == CATTN_STORED_F16)
                pack_square(CATTN_STORED_F16, query, d, scale, panel);
            else
                pack_square(CATTN_STORED_BF16, query, d, scale, panel);
        }
    }
}

/* `height` keys of the block from k on: K itself, or past the last key a copy padded with rows of zeros. */
static struct source key_rows(const struct cattn_rows *rows, struct source key, int k, int height, int n_keys) {
    const int64_t depth = rows->call.head_dim;
    const struct source from = {key.first + k * key.row, key.row};
    if (k + height <= n_keys)
        return from;
    real *copy = rows->scratch.key_copy;
    for (int m = 0; m < height; m++)
        for (int64_t d = 0; d < depth; d++)
            copy[m * depth + d] = k + m < n_keys ? from.first[m * from.row + d] : 0;
    return (struct source){copy, depth};
}

/* A panel of the columns c .. c+PANEL-1 of n_keys rows of V, with zeros after the last column. */
static void copy_columns(const struct cattn_rows *rows, struct source value, int n_keys, int64_t c, real *panel) {
    const int64_t n = rows->call.d_v - c;
    for (int k = 0; k < n_keys; k++)
        UNROLLED(i, NR) {
            const int64_t left = n - i * LANES;
            const real *v = value.first + k * value.row + c + i * LANES;
            vf_storeu(panel + k * PANEL + i * LANES,
                      left > 0 ? load_strided(v, 1, (int)min64(LANES, left)) : vf_set1(0));
        }
}

/* Columns c .. c+PANEL-1 of V for the keys begin .. end-1 of the block, as whole vectors: V itself if the columns are
 * whole vectors, else a copy with zeros after the last column, because reading V past its end is not allowed. */
static struct source value_run(const struct cattn_rows *rows, struct source value, int begin, int end, int64_t c) {
    const int64_t n = rows->call.d_v - c;
    if (rows->call.packed_block)
        return (struct source){value.first + c * CATTN_BLOCK_KEYS + begin * PANEL, PANEL};
    const struct source from = {value.first + begin * value.row + c, value.row};
    if (n >= PANEL || n == LANES)
        return from;
    real *panel = rows->scratch.value_panel;
    copy_columns(rows, (struct source){value.first + begin * value.row, value.row}, end - begin, c, panel);
    return (struct source){panel, PANEL};
}

/* Scaled scores of mr keys and nr vectors of queries from vector v on: the scale is in the packed queries. */
INLINE void score_products(int mr, int nr, const struct cattn_rows *rows, int v, struct source key,
                           vf score[MR][WIDEST]) {
    const int64_t depth = rows->call.head_dim;
    dot_tile(mr, nr, 0, depth, key.first, key.row, 1,
             (const real *)rows->scratch.packed_query + v / NR * depth * PANEL + v % NR * LANES, PANEL, score);
}

/* P V of the keys begin .. end-1. `chains` is the constant ALL_CHAINS unless some are missing. */
INLINE void value_products(int mr, int nr, const struct cattn_rows *rows, unsigned chains, int r, struct key_half keys,
                           struct source value, vf sum[MR][WIDEST]) {
    const real *weights = (const real *)rows->scratch.score + keys.begin * CATTN_TILE_ROWS + r;
    if (chains == ALL_CHAINS)
        dot_tile(mr, nr, keys.begin, keys.end, weights, 1, CATTN_TILE_ROWS, value.first, value.row, sum);
    else
        dot_chains(mr, nr, chains, keys.begin, keys.end, weights, 1, CATTN_TILE_ROWS, value.first, value.row, sum);
}

#endif
