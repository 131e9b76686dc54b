/* product.inc.h -- products of two matrices, C[i][j] = sum over d of A[i][d] * B[j][d]: linear and its gradients.
 *
 * A sum is cut into slabs of CATTN_SLAB_TERMS terms, and a slab into 16 chains of FMAs: chain c has the terms with
 * index c mod 16. The chains are added to the sum in order (csrc/README.md, "Products of matrices"). So a vector of 16
 * neighbouring terms holds one term of each chain, and a few rows of B need no transposed copy of A.
 *
 * Tiles: lanes are rows of B, which is packed; A is read in place and broadcast. For few rows of B see
 * product_few.inc.h.
 */

#define SLAB CATTN_SLAB_TERMS
#define CHAINS CATTN_PRODUCT_CHAINS
#define CHAIN_VECTORS (CHAINS / LANES)

/* A matrix in the table's own type. */
struct plain_matrix {
    const real *first;
    int64_t row, col;
};

INLINE struct cattn_matrix transposed(const struct cattn_matrix *m) {
    return (struct cattn_matrix){m->storage, m->first, m->col, m->row, m->scale, m->scale_col, m->scale_row};
}

/* The matrix from this row and column on. */
INLINE struct cattn_matrix matrix_from(const struct cattn_matrix *matrix, int64_t row, int64_t col) {
    const struct cattn_matrix rows = rows_from(*matrix, row), columns = transposed(&rows);
    const struct cattn_matrix rest = rows_from(columns, col);
    return transposed(&rest);
}

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

/* vf_transpose as a call, which compiles once: with vectors that the processor does not have it is long. */
NOINLINE void transpose_square(vf v[LANES]) { vf_transpose(v); }

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

/* load_square of a whole square whose rows lie in memory without gaps. */
INLINE void load_whole_square(const struct plain_matrix *m, int64_t r, int64_t c, vf v[LANES]) {
    const real *first = m->first + r * m->row + c;
    UNROLLED(i, LANES)
        v[i] = vf_loadu(first + i * m->row);
    transpose_square(v);
}

/* ---- tiles ---- */

/* The place of term d in a packed slab of n terms: chain after chain. */
INLINE int64_t packed_term(int64_t d, int64_t n) {
    const int64_t chain = d % CHAINS;
    return chain * (n / CHAINS) + min64(chain, n % CHAINS) + d / CHAINS;
}

/* Packs n columns of a slab for LANES rows from r on, of which n_rows exist. */
static void pack_lanes(const struct plain_matrix *m, int64_t r, int n_rows, int64_t n, real *panel) {
    for (int64_t d = 0; d < n; d += LANES) {
        const int n_cols = (int)min64(LANES, n - d);
        vf v[LANES];
        if (m->col == 1 && n_rows == LANES && n_cols == LANES)
            load_whole_square(m, r, d, v);
        else
            load_square(m, r, n_rows, d, n_cols, v);
        for (int i = 0; i < n_cols; i++)
            vf_storeu(panel + packed_term(d + i, n) * PANEL, v[i]);
    }
}

/* The same for all panels of a slab, if rows lie side by side: memory is read in its order. */
static void pack_columns(const struct plain_matrix *m, int64_t n_rows, int64_t padded, int64_t n, real *slab) {
    for (int64_t d = 0; d < n; d++) {
        const real *from = m->first + d * m->col;
        real *to = slab + packed_term(d, n) * PANEL;
        for (int64_t r = 0; r < padded; r += LANES) {
            const int64_t left = n_rows - r;
            vf_storeu(to + r / PANEL * PANEL * n + r % PANEL, left >= LANES ? vf_loadu(from + r)
                                                              : left > 0    ? vf_loadu_n(from + r, (int)left)
                                                                            : vf_set1(0));
        }
    }
}

/* Packs all of B: slabs of panels [term][PANEL]. */
static void product_pack(struct cattn_product *p) {
    const int64_t padded = cattn_round_up(p->n_b, PANEL);
    for (int64_t d = 0; d < p->depth; d += SLAB) {
        const int64_t n = min64(SLAB, p->depth - d);
        real *slab = (real *)p->packed + padded * d;
        const struct cattn_matrix part = matrix_from(&p->b, 0, d);
        const struct plain_matrix from = plain_part(&part, (int)p->n_b, (int)n, p->converted);
        if (from.row == 1) {
            pack_columns(&from, p->n_b, padded, n, slab);
            continue;
        }
        for (int64_t r = 0; r < padded; r += LANES) {
            const int n_rows = (int)max64(0, min64(LANES, p->n_b - r));
            pack_lanes(&from, r, n_rows, n, slab + r / PANEL * PANEL * n + r % PANEL);
        }
    }
}

/* The part of A at hand: n_rows rows by the n terms of a slab, with unit column stride. */
struct product_slab {
    struct source a;
    int64_t n;
    const real *packed; /* of B */
    bool first;         /* of the sum */
    int n_rows;
};

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

/* `height` rows of A from r on: A itself, or past the last row a copy padded with rows of zeros. */
static struct source a_rows(const struct cattn_product *p, const struct product_slab *s, int r, int height) {
    const struct source from = {s->a.first + r * s->a.row, s->a.row};
    if (r + height <= s->n_rows)
        return from;
    real *copy = p->edge;
    for (int m = 0; m < height; m++)
        for (int64_t d = 0; d < s->n; d++)
            copy[m * SLAB + d] = r + m < s->n_rows ? from.first[m * from.row + d] : 0;
    return (struct source){copy, SLAB};
}

/* Adds the chains of a slab to the sums of mr rows of A and one panel of B. */
INLINE void slab_tile(int mr, int nr, const struct cattn_product *p, const struct product_slab *s, int r, int64_t l,
                      struct source a, const real *b) {
    const int64_t whole = s->n / CHAINS, longer = s->n % CHAINS, sums_row = CATTN_PRODUCT_LANES;
    real *sums = (real *)p->sums + r * sums_row + l;
    vf sum[MR][NR], chain[MR][NR];
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            sum[m][n] = s->first ? vf_set1(0) : vf_loadu(sums + m * sums_row + n * LANES);
    if (s->n == SLAB) /* a constant length is faster */
        for (int c = 0; c < CHAINS; c++) {
            micro_tile(mr, nr, SLAB / CHAINS, a.first + c, a.row, CHAINS, b + c * (SLAB / CHAINS) * PANEL, PANEL,
                       chain);
            add_tile(mr, nr, sum, chain);
        }
    else
        for (int64_t c = 0, n; c < CHAINS; c++, b += n * PANEL) {
            n = whole + (c < longer);
            micro_tile(mr, nr, n, a.first + c, a.row, CHAINS, b, PANEL, chain);
            add_tile(mr, nr, sum, chain);
        }
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            vf_storeu(sums + m * sums_row + n * LANES, sum[m][n]);
}

static void add_slab(const struct cattn_product *p, const struct product_slab *s) {
    for (int64_t l = 0; l < p->n_b; l += PANEL)
        for (int r = 0; r < s->n_rows;) {
            const int height = tile_height(SCORE_MR, s->n_rows - r);
            const struct source a = a_rows(p, s, r, height);
            AT_SIZE(SCORE_MR, height, p->n_b - l > LANES, slab_tile, p, s, r, l, a, s->packed + l * s->n);
            r += height;
        }
}

/* ---- results ---- */

/* Stores n elements of the row of B with index l, from the row i of A on: sums + bias, rounded once. */
INLINE void store_product(const struct cattn_product *p, int64_t i, int64_t l, vf sum, int n) {
    if (p->bias)
        sum = sum + (p->bias_a ? load_strided((const real *)p->bias + i * p->bias_a, p->bias_a, n)
                               : vf_set1(((const real *)p->bias)[l * p->bias_b]));
    store_stored(p->out_storage, p->out, i * p->out_a + l * p->out_b, p->out_a, sum, n);
}

/* The same for n elements of the row i of A, from the row l of B on. */
INLINE void store_product_row(const struct cattn_product *p, int64_t i, int64_t l, vf sum, int n) {
    if (p->bias)
        sum = sum + (p->bias_b ? load_strided((const real *)p->bias + l * p->bias_b, p->bias_b, n)
                               : vf_set1(((const real *)p->bias)[i * p->bias_a]));
    store_stored(p->out_storage, p->out, i * p->out_a + l * p->out_b, p->out_b, sum, n);
}

static void store_sums(const struct cattn_product *p, int64_t first, int n_rows) {
    const real *sums = p->sums;
    for (int64_t l = 0; l < p->n_b; l += LANES) {
        const int width = (int)min64(LANES, p->n_b - l);
        for (int r = 0; r < n_rows; r += LANES) {
            const int height = (int)min64(LANES, n_rows - r);
            vf v[LANES];
            for (int i = 0; i < LANES; i++)
                v[i] = i < height ? vf_loadu(sums + (r + i) * CATTN_PRODUCT_LANES + l) : vf_set1(0);
            if (p->out_b == 1) {
                for (int i = 0; i < height; i++)
                    store_product_row(p, first + r + i, l, v[i], width);
                continue;
            }
            transpose_square(v);
            for (int i = 0; i < width; i++)
                store_product(p, first + r, l + i, v[i], height);
        }
    }
}

/* The rows first .. first + n_rows - 1 of A, at most CATTN_PRODUCT_ROWS, times all of packed B. */
static void product_tile(struct cattn_product *p, int64_t first, int n_rows) {
    int64_t d = 0;
    do {
        const int64_t n = min64(SLAB, p->depth - d);
        const struct product_slab s = {.a = slab_of_a(p, first, n_rows, d, n),
                                       .n = n,
                                       .packed = (const real *)p->packed + cattn_round_up(p->n_b, PANEL) * d,
                                       .first = d == 0,
                                       .n_rows = n_rows};
        add_slab(p, &s);
        d += n;
    } while (d < p->depth);
    store_sums(p, first, n_rows);
}
