/* product_terms.inc.h -- the terms of a product of two matrices, their places in packed operands, and the results.
 *
 * A term is what one instruction adds to one lane: the product of two elements, or in the tables for products of
 * bfloat16 of two pairs of elements, which are neighbours in memory.
 */

#ifdef BF16_PRODUCTS
#define TERM_ELEMENTS 2
#else
#define TERM_ELEMENTS 1
#endif
#define SLAB CATTN_SLAB_TERMS
#define CHAINS CATTN_PRODUCT_CHAINS
#define CHAIN_VECTORS (CHAINS / LANES)

INLINE int64_t terms_of(int64_t n_elements) { return cattn_ceil_div(n_elements, TERM_ELEMENTS); }

/* The place of term d in a packed slab of n terms: chain after chain. */
INLINE int64_t packed_term(int64_t d, int64_t n) {
    const int64_t chain = d % CHAINS;
    return chain * (n / CHAINS) + min64(chain, n % CHAINS) + d / CHAINS;
}

/* Vectors of a panel, of which `left` are left: four of them are two panels, because a panel of one vector is slow. */
INLINE int panel_vectors(int widest, int64_t left) { return widest > 2 && left == 4 ? 2 : (int)min64(widest, left); }

/* A loop over the first lane r of every vector of n packed rows, with the first lane and the lanes of its panel. */
#define PACKED_LANES(r, n, widest, first, row)                                                                         \
    for (int64_t first = 0, row; first < (n); first += (row))                                                          \
        for (int64_t r = (row = LANES * panel_vectors(widest, cattn_ceil_div((n) - first, LANES)), first);             \
             r < min64((n), first + (row)); r += LANES)

INLINE struct cattn_matrix transposed(const struct cattn_matrix *m) {
    return (struct cattn_matrix){.storage = m->storage,
                                 .first = m->first,
                                 .row = m->col,
                                 .col = m->row,
                                 .scale = m->scale,
                                 .scale_row = m->scale_col,
                                 .scale_col = m->scale_row};
}

/* The matrix from this row and column on. */
INLINE struct cattn_matrix matrix_from(const struct cattn_matrix *matrix, int64_t row, int64_t col) {
    const struct cattn_matrix rows = rows_from(*matrix, row), columns = transposed(&rows);
    const struct cattn_matrix rest = rows_from(columns, col);
    return transposed(&rest);
}

/* vf_transpose as a call, which compiles once: with vectors that the processor does not have it is long. */
NOINLINE void transpose_square(vf v[LANES]) { vf_transpose(v); }

/* ---- results ---- */

/* A sum of zero as +0. Only units of tiles have sums of -0. */
INLINE vf without_sign(vf sum) {
#ifdef BF16_TILES
    sum = sum + vf_set1(0);
#endif
    return sum;
}

/* Stores n elements of the row of B with index l, from the row i of A on: sums + bias, rounded once. */
INLINE void store_product(const struct cattn_product *p, int64_t i, int64_t l, vf sum, int n) {
    sum = without_sign(sum);
    if (p->bias)
        sum = sum + (p->bias_a ? load_strided((const real *)p->bias + i * p->bias_a, p->bias_a, n)
                               : vf_set1(((const real *)p->bias)[l * p->bias_b]));
    store_stored(p->out_storage, p->out, i * p->out_a + l * p->out_b, p->out_a, sum, n);
}

/* Sums + bias of n elements of the row i of A, from the row l of B on. */
INLINE vf product_row(const struct cattn_product *p, int64_t i, int64_t l, vf sum, int n) {
    sum = without_sign(sum);
    if (!p->bias)
        return sum;
    return sum + (p->bias_b ? load_strided((const real *)p->bias + l * p->bias_b, p->bias_b, n)
                            : vf_set1(((const real *)p->bias)[i * p->bias_a]));
}

/* store_product for such elements. */
INLINE void store_product_row(const struct cattn_product *p, int64_t i, int64_t l, vf sum, int n) {
    store_stored(p->out_storage, p->out, i * p->out_a + l * p->out_b, p->out_b, product_row(p, i, l, sum, n), n);
}

/* store_product_row for whole vectors of a row; `storage` is a constant. */
INLINE void store_vectors(const struct cattn_product *p, enum cattn_storage storage, int64_t i, int64_t l,
                          int64_t n_lanes, const real *sums) {
    struct cattn_product plain = *p;
    plain.out_storage = storage;
    plain.out_b = 1;
#if defined(BF16_TILES) && defined(HAS_STREAM)
    uint16_t *to = (uint16_t *)p->out + i * p->out_a + l;
    if (storage == CATTN_STORED_BF16 && p->streams && n_lanes == CATTN_UNIT && (uintptr_t)to % LINE_BYTES == 0) {
        for (int j = 0; j < CATTN_UNIT; j += 2 * LANES) {
            vh half[2];
            for (int h = 0; h < 2; h++)
                half[h] = vh_bf16(
                    with_one_nan(product_row(&plain, i, l + j + h * LANES, vf_loadu(sums + j + h * LANES), LANES)));
            vf_stream((real *)(void *)(to + j), vf_of_vu(vu_joined(half[0], half[1])));
        }
        return;
    }
#endif
    for (int64_t j = 0; j < n_lanes; j += LANES)
        store_product_row(&plain, i, l + j, vf_loadu(sums + j), LANES);
}

/* Writes the results of n_rows rows of A and n_lanes rows of B from their sums in scratch. */
static void store_sums(const struct cattn_product *p, int64_t first, int64_t n_rows, int64_t lane, int64_t n_lanes,
                       const real *sums, int64_t row) {
    const int64_t whole = n_lanes / LANES * LANES;
    for (int64_t r = 0; r < n_rows && p->out_b == 1; r++) {
        const real *from = sums + r * row;
        if (p->out_storage == CATTN_STORED_BF16)
            store_vectors(p, CATTN_STORED_BF16, first + r, lane, whole, from);
        else if (p->out_storage == CATTN_STORED_PLAIN)
            store_vectors(p, CATTN_STORED_PLAIN, first + r, lane, whole, from);
        else
            store_vectors(p, CATTN_STORED_F16, first + r, lane, whole, from);
        if (whole < n_lanes)
            store_product_row(p, first + r, lane + whole, load_strided(from + whole, 1, (int)(n_lanes - whole)),
                              (int)(n_lanes - whole));
    }
    for (int64_t r = 0; r < n_rows && p->out_b != 1; r += LANES)
        for (int64_t l = 0; l < n_lanes; l += LANES) {
            const int width = (int)min64(LANES, n_lanes - l), height = (int)min64(LANES, n_rows - r);
            vf v[LANES];
            for (int i = 0; i < LANES; i++)
                v[i] = i < height ? vf_loadu(sums + (r + i) * row + l) : vf_set1(0);
            transpose_square(v);
            for (int i = 0; i < width; i++)
                store_product(p, first + r, lane + l + i, v[i], height);
        }
}
