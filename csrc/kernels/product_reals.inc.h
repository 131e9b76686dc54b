/* product_reals.inc.h -- the operands of products of two matrices in the table's own type. product_pairs.inc.h has the
 * same functions for products of bfloat16.
 */

#define OPERAND_STORAGE CATTN_STORED_PLAIN

/* A matrix in the table's own type. */
struct plain_matrix {
    const real *first;
    int64_t row, col;
};

/* The first rows and columns of a matrix; converted in `scratch` if they are stored otherwise. */
static struct plain_matrix plain_part(const struct cattn_matrix *matrix, int n_rows, int n_cols, void *scratch) {
    if (matrix->storage == CATTN_STORED_PLAIN)
        return (struct plain_matrix){matrix->first, matrix->row, matrix->col};
    if (matrix->row == 1 && matrix->col != 1) {
        const struct cattn_matrix flipped = transposed(matrix);
        const struct source from = rows_of(&flipped, n_cols, n_rows, scratch);
        return (struct plain_matrix){from.first, 1, from.row};
    }
    const struct source from = rows_of(matrix, n_rows, n_cols, scratch);
    return (struct plain_matrix){from.first, from.row, 1};
}

/* Column c + i of n_rows rows in the lanes of v[i], for i < n_cols. Both counts are at most LANES; the lanes after the
 * last row are 0. */
NOINLINE void load_square(const struct plain_matrix *m, int64_t r, int n_rows, int64_t c, int n_cols, vf v[LANES]) {
    const real *first = m->first + r * m->row + c * m->col;
    if (m->row == 1) {
        for (int i = 0; i < n_cols; i++)
            v[i] = load_strided(first + i * m->col, 1, n_rows);
        return;
    }
    for (int i = 0; i < LANES; i++)
        v[i] = i < n_rows ? load_strided(first + i * m->row, m->col, n_cols) : vf_set1(0);
    transpose_square(v);
}

/* load_square of a whole square whose rows lie in memory without gaps. The second square below it is
 * fetched. */
INLINE void load_whole_square(const struct plain_matrix *m, int64_t r, int64_t c, vf v[LANES]) {
    const real *first = m->first + r * m->row + c;
    UNROLLED(i, LANES) {
        v[i] = vf_loadu(first + i * m->row);
        prefetch_far((uintptr_t)first, (2 * LANES + i) * m->row, sizeof(real));
    }
    vf_transpose(v);
}

/* Packs the whole squares of n columns of a slab for LANES rows from r on into a panel of `row` lanes, and returns the
 * first column that is left. */
static int64_t pack_squares(const struct plain_matrix *m, int64_t r, int64_t n, real *panel, int64_t row) {
    int64_t place[CHAINS], d = 0;
    for (int c = 0; c < CHAINS; c++)
        place[c] = packed_term(c, n) * row;
    for (; d + LANES <= n; d += LANES) {
        real *to = panel + d / CHAINS * row;
        vf v[LANES];
        load_whole_square(m, r, d, v);
        UNROLLED(i, LANES)
            vf_storeu(to + place[d % CHAINS + i], v[i]);
    }
    return d;
}

/* Packs n columns of a slab for LANES rows from r on, of which n_rows exist, into a panel of `row` lanes. */
static void pack_lanes(const struct plain_matrix *m, int64_t r, int n_rows, int64_t n, real *panel, int64_t row) {
    int64_t d = m->col == 1 && n_rows == LANES ? pack_squares(m, r, n, panel, row) : 0;
    for (; d < n; d += LANES) {
        const int n_cols = (int)min64(LANES, n - d);
        vf v[LANES];
        load_square(m, r, n_rows, d, n_cols, v);
        for (int i = 0; i < n_cols; i++)
            vf_storeu(panel + packed_term(d + i, n) * row, v[i]);
    }
}

/* The same for all panels, if rows lie side by side: each panel is written in its order, and the columns that come two
 * terms later in a chain are fetched. */
static void pack_columns(const struct plain_matrix *m, int64_t n_rows, int widest, int64_t n, real *slab) {
    int64_t term = 0;
    for (int c = 0; c < CHAINS; c++)
        for (int64_t d = c; d < n; d += CHAINS, term++) {
            const real *from = m->first + d * m->col;
            PACKED_LANES(r, n_rows, widest, first, row) {
                const int64_t left = n_rows - r;
                prefetch_far((uintptr_t)(from + r), 2 * CHAINS * m->col, sizeof(real));
                vf_storeu(slab + first * n + term * row + r - first,
                          left >= LANES ? vf_loadu(from + r) : vf_loadu_n(from + r, (int)left));
            }
        }
}

/* Packs the n terms from term d on of n_rows rows from `first` on: panels of up to `widest` vectors, and lanes of zeros
 * up to whole vectors. */
static void pack_operand(const struct cattn_product *p, const struct cattn_matrix *matrix, int64_t first_row,
                         int64_t n_rows, int widest, int64_t d, int64_t n, real *slab) {
    const struct cattn_matrix part = matrix_from(matrix, first_row, d);
    const struct plain_matrix from = plain_part(&part, (int)n_rows, (int)n, p->converted);
    if (from.row == 1) {
        pack_columns(&from, n_rows, widest, n, slab);
        return;
    }
    PACKED_LANES(r, n_rows, widest, first, row)
    pack_lanes(&from, r, (int)min64(LANES, n_rows - r), n, slab + first * n + r - first, row);
}

/* Copies n_rows rows into `copy`, row after row. */
static struct source copy_rows_of(const struct plain_matrix *m, int n_rows, int64_t n, real *copy) {
    const struct plain_matrix flipped = {m->first, m->col, m->row};
    for (int64_t d = 0; d < n; d += LANES) {
        const int n_cols = (int)min64(LANES, n - d);
        for (int r = 0; r < n_rows; r += LANES) {
            const int height = (int)min64(LANES, n_rows - r);
            vf v[LANES];
            if (m->row == 1 && n_cols == LANES && height == LANES)
                load_whole_square(&flipped, d, r, v);
            else
                load_square(&flipped, d, n_cols, r, height, v);
            for (int i = 0; i < height; i++)
                vf_storeu_n(copy + (r + i) * SLAB + d, v[i], n_cols);
        }
    }
    return (struct source){copy, SLAB};
}

static struct source slab_of_a(const struct cattn_product *p, int64_t first, int n_rows, int64_t d, int64_t n) {
    const struct cattn_matrix part = matrix_from(&p->a, first, d);
    const struct plain_matrix from = plain_part(&part, n_rows, (int)n, p->converted);
    if (from.col == 1)
        return (struct source){from.first, from.row};
    return copy_rows_of(&from, n_rows, n, p->a_copy);
}

/* ---- few rows of B ---- */

/* The first n elements of a row. */
static void pack_row(const struct cattn_matrix *row, int64_t n, real *packed) {
    if (cattn_is_quantized(row->storage))
        dequantize_row(row, 0, n, packed);
    else
        widen_row(row->storage, row->first, row->col, n, packed);
}

/* Whether the rows of A are converted as they are loaded; otherwise they are converted once, for all rows of B. */
static bool few_rows_in_place(const struct cattn_product *p) {
#ifdef HALVES_ARE_QUICK
    const bool quick = p->a.storage != CATTN_STORED_F8;
#else
    const bool quick = p->a.storage == CATTN_STORED_PLAIN;
#endif
    return quick && p->a.col == 1 && p->a.scale_col == 0;
}

/* n <= LANES terms of row r from column d on; the other ones are 0. */
INLINE vf terms_of_row(const struct cattn_matrix *a, int64_t r, int64_t d, int n) {
    const vf v = load_stored(a->storage, a->first, r * a->row + d, 1, n);
    return cattn_is_quantized(a->storage) ? scaled(a, v, r, 0, LANES) : v;
}

/* Column d of `width` rows of A from l on, which lie side by side. */
INLINE vf terms_of_column(const struct cattn_matrix *a, enum cattn_storage storage, int64_t d, int64_t n_elements,
                          int l, int width) {
    (void)n_elements;
    return load_stored(storage, a->first, d * a->col + l, 1, width);
}

INLINE vf packed_terms(const real *b) { return vf_loadu(b); }
INLINE vf packed_term_in_all_lanes(const real *b) { return vf_set1(*b); }
INLINE vf add_product(vf a, vf b, vf sum) { return vf_fma(a, b, sum); }
