/* product_pairs.inc.h -- the operands of products of two matrices as pairs of bfloat16.
 *
 * The functions have the names of product_reals.inc.h. A column of terms is a pair of columns; the element that the
 * last pair lacks is 0.
 */

#define OPERAND_STORAGE CATTN_STORED_BF16

/* LANES pairs of row r from the column c on: n <= 2 * LANES elements, and zeros. */
INLINE vu pairs_of_row(const struct cattn_matrix *m, int64_t r, int64_t c, int n) {
    uint16_t halves[2 * LANES] = {0};
    if (!cattn_is_quantized(m->storage))
        return load_pairs(m->storage, m->first, r * m->row + c * m->col, m->col, n);
    for (int i = 0; i < n; i += LANES) {
        const int width = (int)min64(LANES, n - i);
        store_rounded(halves + i, load_columns(m, r, c + i, width), width);
    }
    return load_pair_vector(halves);
}

/* Packs n terms of a slab for LANES rows from r on, of which n_rows exist, into a panel of `row` lanes; the slab has
 * n_elements columns. */
static void pack_lanes(const struct cattn_matrix *m, int64_t r, int n_rows, int64_t n, int64_t n_elements,
                       uint16_t *panel, int64_t row) {
    for (int64_t d = 0; d < n; d += LANES) {
        const int n_terms = (int)min64(LANES, n - d), width = (int)min64(2 * LANES, n_elements - 2 * d);
        vf v[LANES];
        for (int i = 0; i < LANES; i++)
            v[i] = i < n_rows ? vf_of_vu(pairs_of_row(m, r + i, 2 * d, width)) : vf_set1(0);
        transpose_square(v);
        for (int i = 0; i < n_terms; i++)
            store_pairs(panel + 2 * packed_term(d + i, n) * row, vu_of_vf(v[i]));
    }
}

/* The pairs of term d of `width` rows from r on, which lie side by side. */
INLINE vu paired_columns(const struct cattn_matrix *columns, int64_t d, int64_t n_elements, int64_t r, int width) {
    const vf even = load_columns(columns, 2 * d, r, width);
    return vf_paired(even, 2 * d + 1 < n_elements ? load_columns(columns, 2 * d + 1, r, width) : vf_set1(0));
}

/* The same for all panels, if rows lie side by side: memory is read in its order. */
static void pack_columns(const struct cattn_matrix *m, int64_t n_rows, int widest, int64_t n, int64_t n_elements,
                         uint16_t *slab) {
    const struct cattn_matrix columns = transposed(m);
    for (int64_t d = 0; d < n; d++) {
        const int64_t term = packed_term(d, n);
        PACKED_LANES(r, n_rows, widest, first, row)
        store_pairs(slab + 2 * (first * n + term * row + r - first),
                    paired_columns(&columns, d, n_elements, r, (int)min64(LANES, n_rows - r)));
    }
}

static void pack_operand(const struct cattn_product *p, const struct cattn_matrix *matrix, int64_t first_row,
                         int64_t n_rows, int widest, int64_t d, int64_t n, uint16_t *slab) {
    const struct cattn_matrix part = matrix_from(matrix, first_row, 2 * d);
    const int64_t n_elements = min64(2 * n, p->depth - 2 * d);
    if (part.row == 1 && part.col != 1) {
        pack_columns(&part, n_rows, widest, n, n_elements, slab);
        return;
    }
    PACKED_LANES(r, n_rows, widest, first, row)
    pack_lanes(&part, r, (int)min64(LANES, n_rows - r), n, n_elements, slab + 2 * (first * n + r - first), row);
}

/* Whether the rows of A consist of pairs as they are. */
static bool rows_in_place(const struct cattn_product *p) {
    return p->a.storage == CATTN_STORED_BF16 && p->a.col == 1 && p->depth % 2 == 0;
}

static struct source slab_of_a(const struct cattn_product *p, int64_t first, int n_rows, int64_t d, int64_t n) {
    const struct cattn_matrix part = matrix_from(&p->a, first, 2 * d);
    if (rows_in_place(p))
        return (struct source){part.first, part.row};
    const int64_t n_elements = min64(2 * n, p->depth - 2 * d);
    uint16_t *copy = p->converted;
    for (int r = 0; r < n_rows; r++) {
        round_row_to(&part, r, n_elements, copy + r * 2 * SLAB);
        if (n_elements % 2)
            copy[r * 2 * SLAB + n_elements] = 0;
    }
    return (struct source){copy, 2 * SLAB};
}

/* ---- few rows of B ---- */

/* The first n elements of a row. */
static void pack_row(const struct cattn_matrix *row, int64_t n, uint16_t *packed) { round_row_to(row, 0, n, packed); }

/* Whether the rows of A are rounded as they are loaded; otherwise they are rounded once, for all rows of B. */
static bool few_rows_in_place(const struct cattn_product *p) {
#ifdef HALVES_ARE_QUICK
    if (p->a.storage == CATTN_STORED_PLAIN && p->a.col == 1 && p->depth % 2 == 0)
        return true;
#endif
    return rows_in_place(p);
}

/* n <= LANES terms of row r from term d on, as vectors that add_product takes; the other ones are 0. */
INLINE vf terms_of_row(const struct cattn_matrix *a, int64_t r, int64_t d, int n) {
    return vf_of_vu(load_pairs(a->storage, a->first, r * a->row + 2 * d, 1, 2 * n));
}

/* Term d of `width` rows of A from l on, which lie side by side, in a slab of n_elements columns. */
INLINE vf terms_of_column(const struct cattn_matrix *a, enum cattn_storage storage, int64_t d, int64_t n_elements,
                          int l, int width) {
    struct cattn_matrix columns = transposed(a);
    columns.storage = storage;
    columns.col = 1;
    return vf_of_vu(paired_columns(&columns, d, n_elements, l, width));
}

INLINE vf packed_terms(const uint16_t *b) { return vf_of_vu(load_pair_vector(b)); }
INLINE vf packed_term_in_all_lanes(const uint16_t *b) { return vf_of_vu(vu_set1(load_pair(b))); }
INLINE vf add_product(vf a, vf b, vf sum) { return vf_pair_dot(vu_of_vf(a), vu_of_vf(b), sum); }
