/* product_terms.inc.h -- the terms of a product of two matrices, and their places in packed operands.
 *
 * A term is the product of two elements. In the tables for products of bfloat16 it is the product of two pairs of
 * elements, which are neighbours in memory. All terms fill a lane.
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

INLINE struct cattn_matrix transposed(const struct cattn_matrix *m) {
    return (struct cattn_matrix){m->storage, m->first, m->col, m->row, m->scale, m->scale_col, m->scale_row};
}

/* The matrix from this row and column on. */
INLINE struct cattn_matrix matrix_from(const struct cattn_matrix *matrix, int64_t row, int64_t col) {
    const struct cattn_matrix rows = rows_from(*matrix, row), columns = transposed(&rows);
    const struct cattn_matrix rest = rows_from(columns, col);
    return transposed(&rest);
}

/* vf_transpose as a call, which compiles once: with vectors that the processor does not have it is long. */
NOINLINE void transpose_square(vf v[LANES]) { vf_transpose(v); }
