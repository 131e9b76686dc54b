/* product_units.inc.h -- products of two matrices on units of tiles, for the tables of TABLE_BITS 17.
 *
 * The functions have the names of product.inc.h and product_few.inc.h, and the order of bf16_units.inc.h: a sum begins
 * with +0 and has all groups in order.
 */

/* Columns of a unit of A and of a unit of B that stay in the L1 cache. */
#define UNIT_SLAB 512
_Static_assert(CATTN_UNIT_TERMS % UNIT_SLAB == 0 && UNIT_SLAB % GROUP == 0, "slabs are whole groups");

/* A unit of B with the packed columns d .. d+n-1 of n_rows rows of A. */
struct unit_columns {
    int64_t d, n, n_rows;
    const void *left; /* [unit][group][UNIT][16 pairs] */
};

/* Packs n columns from d on of the UNIT rows of B from l on: [pair of columns][UNIT]. */
static void pack_panel(const struct cattn_product *p, int64_t l, int64_t d, int64_t n) {
    const struct cattn_matrix part = matrix_from(&p->b, 0, d);
    for (int64_t r = 0; r < UNIT; r += LANES)
        pack_right(&part, l + r, p->n_b - l - r, n, (uint16_t *)p->packed + 2 * r, 2 * UNIT);
}

/* The columns d .. d+n-1 of n_rows rows of A from `first` on, in whole units. */
static const void *left_columns(const struct cattn_product *p, int64_t first, int64_t n_rows, int64_t d, int64_t n) {
    const int64_t row = cattn_round_up(n, GROUP), rows = cattn_round_up(n_rows, UNIT);
    uint16_t *packed = p->a_copy;
    if (rows > n_rows)
        memset(packed + (rows - UNIT) * row, 0, (size_t)(UNIT * row) * sizeof *packed);
    const struct cattn_matrix part = matrix_from(&p->a, first, d);
    pack_left(&part, 0, n_rows, n, packed);
    return widen_left(packed, rows * row, p->converted);
}

/* Adds the products of the columns with a packed unit of B to the sums, which begin with the column 0. */
static void add_units(const struct cattn_product *p, struct unit_columns c, real *sums) {
    const int64_t row = cattn_round_up(c.n, GROUP);
    struct unit u = {.left_row = GROUP,
                     .left_group = UNIT * GROUP,
                     .right_row = 2 * UNIT,
                     .right_group = TILE * 2 * UNIT,
                     .sum_row = UNIT};
    int64_t s = 0;
    do {
        u.n_groups = groups_of(min64(UNIT_SLAB, c.n - s));
        u.right = (const uint16_t *)p->packed + s * UNIT;
        for (int64_t r = 0; r < c.n_rows; r += UNIT) {
            u.left = left_at(c.left, r * row + s * UNIT);
            u.sum = sums + r * UNIT;
            if (c.d + s > 0)
                unit_products(2, 2, true, u);
            else
                unit_products(2, 2, false, u);
        }
        s += UNIT_SLAB;
    } while (s < c.n);
}

/* Rows of B of the first unit: the next one begins at a cache line of a result that bypasses the caches. */
static int64_t first_width(const struct cattn_product *p) {
    const int64_t line = LINE_BYTES / (int64_t)sizeof(uint16_t), into = (int64_t)((uintptr_t)p->out % LINE_BYTES / 2);
    return p->streams && p->out_storage == CATTN_STORED_BF16 && p->out_a % line == 0 ? line - into : UNIT;
}
_Static_assert(LINE_BYTES == UNIT * sizeof(uint16_t), "a line holds a unit of results");

/* Adds and stores the products of these rows of A and all of B, unless the call stops. */
static void add_products(struct cattn_product *p, int64_t first, int64_t n_rows) {
    const int64_t size = p->depth > CATTN_UNIT_TERMS ? cattn_round_up(n_rows, UNIT) * UNIT : 0;
    struct unit_columns c = {.n_rows = n_rows};
    do {
        real *sums = p->sums;
        c.n = min64(CATTN_UNIT_TERMS, p->depth - c.d);
        c.left = left_columns(p, first, n_rows, c.d, c.n);
        for (int64_t l = 0, width = first_width(p); l < p->n_b; l += width, width = UNIT, sums += size) {
            if ((l > 0 || c.d > 0) && stops(&p->stop))
                return;
            pack_panel(p, l, c.d, c.n);
            add_units(p, c, sums);
            if (c.d + c.n == p->depth)
                store_sums(p, first, n_rows, l, min64(width, p->n_b - l), sums, UNIT);
        }
        c.d += c.n;
    } while (c.d < p->depth);
}

/* The rows first .. first + n_rows - 1 of A times all of B. */
static void product_tile(struct cattn_product *p, int64_t first, int64_t n_rows) {
    add_products(p, first, n_rows);
#ifdef HAS_STREAM
    if (p->streams)
        stream_end();
#endif
}

/* ---- few rows of B ---- */

/* Columns of B that are packed at a time, if it is packed by slabs. */
#define FEW_AT_ONCE ((int64_t)CATTN_FEW_SLABS * CATTN_SLAB_TERMS)

/* n columns of all rows of B from d on, as numbers of whole groups, and rows of zeros. */
static void pack_few(const struct cattn_product *p, int64_t d, int64_t n) {
    const struct cattn_matrix part = matrix_from(&p->b, 0, d);
    const int64_t row = cattn_round_up(n, GROUP);
    memset(p->packed, 0, (size_t)(CATTN_FEW_ROWS * row) * sizeof(real));
    for (int64_t r = 0; r < p->n_b; r++)
        round_terms(&part, r, n, (real *)p->packed + r * row);
}

/* Packs all rows of B. */
static void product_pack_few(struct cattn_product *p) { pack_few(p, 0, p->depth); }

/* The pairs of neighbouring columns from d on, in the lanes of LANES rows of A, of which n exist: n_cols columns, at
 * most 2 * LANES. */
INLINE void lane_pairs(const struct cattn_matrix *a, int n, int64_t d, int n_cols, vf pairs[LANES]) {
    if (a->col == 1 && !cattn_is_quantized(a->storage)) {
        key_pairs(a, n, d, n_cols, pairs);
        return;
    }
    const struct cattn_matrix columns = transposed(a);
    for (int i = 0; i < (n_cols + 1) / 2; i++) {
        const int64_t even = d + 2 * i;
        pairs[i] = vf_of_vu(vf_paired(load_columns(&columns, even, 0, n),
                                      2 * i + 1 < n_cols ? load_columns(&columns, even + 1, 0, n) : vf_set1(0)));
    }
}

/* Adds the products of the columns first_col .. end-1 of LANES rows of A, of which n exist, and packed B. */
INLINE void add_few(int many, const struct cattn_product *p, const struct cattn_matrix *a, int n, int64_t first_col,
                    int64_t end, struct lane_sums *s) {
    const int64_t b_row = cattn_round_up(end - first_col, GROUP);
    const struct cattn_matrix part = matrix_from(a, 0, first_col);
    for (int64_t d = 0; d < end - first_col; d += 2 * LANES) {
        const int n_cols = (int)min64(2 * LANES, end - first_col - d);
        vf pairs[LANES];
        lane_pairs(&part, n, d, n_cols, pairs);
        products_begin();
        keep_lane_sums(many, s); /* the compiler may not add before the mode is set */
        add_lane_pairs(many, s, d, (n_cols + 1) / 2, pairs, p->packed, b_row);
        keep_lane_sums(many, s);
        products_end();
    }
}

/* LANES rows of A from `first` on, of which n exist, times `many` rows of B. */
INLINE void few_lanes(int many, const struct cattn_product *p, int64_t first, int n) {
    const struct cattn_matrix a = rows_from(p->a, first);
    struct lane_sums s;
    begin_lane_sums(many, &s);
    for (int64_t d = 0, end; d < p->depth; d = end) {
        end = p->by_slabs ? min64(p->depth, d + FEW_AT_ONCE) : p->depth;
        if (p->by_slabs)
            pack_few(p, d, end - d);
        add_few(many, p, &a, n, d, end, &s);
        if (end < p->depth && stops(&p->stop))
            return;
    }
    finish_lane_sums(many, &s);
    for (int r = 0; r < many && r < p->n_b; r++)
        store_product(p, first, r, s.sum[r], n);
}

/* few_lanes with constants. */
NOINLINE void one_row(const struct cattn_product *p, int64_t first, int n) { few_lanes(1, p, first, n); }
NOINLINE void four_rows(const struct cattn_product *p, int64_t first, int n) { few_lanes(4, p, first, n); }
NOINLINE void eight_rows(const struct cattn_product *p, int64_t first, int n) { few_lanes(8, p, first, n); }

/* n_rows rows of A from `first` on. */
static void product_few(struct cattn_product *p, int64_t first, int n_rows) {
    for (int r = 0; r < n_rows; r += LANES)
        (p->n_b == 1 ? one_row : p->n_b <= 4 ? four_rows : eight_rows)(p, first + r, (int)min64(LANES, n_rows - r));
}
