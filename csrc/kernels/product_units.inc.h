/* product_units.inc.h -- products of two matrices on units of tiles, for the tables of TABLE_BITS 17.
 *
 * The functions have the names of product.inc.h and product_few.inc.h, and the order of bf16_units.inc.h: a sum begins
 * with +0 and has all groups in order.
 */

/* Columns of A that are packed at a time: those of a unit and of its rows of B stay in the L1 cache. */
#define UNIT_SLAB 256

/* Packs n columns of B from d on: [UNIT rows][pair of columns][UNIT]. */
static void pack_panels(const struct cattn_product *p, int64_t d, int64_t n) {
    const struct cattn_matrix part = matrix_from(&p->b, 0, d);
    const int64_t panel = groups_of(n) * TILE * 2 * UNIT;
    for (int64_t r = 0; r < cattn_round_up(p->n_b, UNIT); r += LANES)
        pack_right(&part, r, p->n_b - r, n, (uint16_t *)p->packed + r / UNIT * panel + 2 * (r % UNIT), 2 * UNIT);
}

/* The columns d .. d+n-1 of n_rows rows of A from `first` on, in whole units. */
static const void *left_slab(const struct cattn_product *p, int64_t first, int n_rows, int64_t d, int64_t n) {
    const struct cattn_matrix part = matrix_from(&p->a, first, d);
    const int64_t row = cattn_round_up(n, GROUP), all = cattn_round_up(n_rows, UNIT) * row;
    uint16_t *packed = p->converted;
    pack_left(&part, 0, n_rows, n, packed, row);
    memset(packed + n_rows * row, 0, (size_t)(all - n_rows * row) * sizeof *packed);
    return widen_left(packed, all, packed + (int64_t)CATTN_PRODUCT_ROWS * UNIT_SLAB);
}

/* Adds the products of n columns of B to the sums of n_rows rows of A; `adds` is false for the first ones. */
static void add_units(const struct cattn_product *p, bool adds, const void *left, int n_rows, real *sums, int64_t n) {
    const int64_t row = cattn_round_up(n, GROUP), panel = groups_of(n) * TILE * 2 * UNIT;
    struct unit u = {.n_groups = groups_of(n), .left_row = row, .left_group = GROUP, .right_row = 2 * UNIT};
    u.right_group = TILE * u.right_row;
    u.sum_row = CATTN_PRODUCT_SUMS_ROW(p->n_b);
    for (int64_t l = 0; l < p->n_b; l += UNIT)
        for (int r = 0; r < n_rows; r += UNIT) {
            u.left = left_at(left, r * row);
            u.right = (const uint16_t *)p->packed + l / UNIT * panel;
            u.sum = sums + r * u.sum_row + l;
            if (adds)
                unit_products(2, 2, true, u);
            else
                unit_products(2, 2, false, u);
        }
}

/* The rows first .. first + n_rows - 1 of A times all of B. */
static void product_tile(struct cattn_product *p, int64_t first, int64_t n_rows) {
    int64_t d = 0;
    do {
        const int64_t n = min64(UNIT_SLAB, p->depth - d);
        pack_panels(p, d, n);
        for (int64_t r = 0; r < n_rows; r += CATTN_PRODUCT_ROWS) {
            const int height = (int)min64(CATTN_PRODUCT_ROWS, n_rows - r);
            if ((r > 0 || d > 0) && stops(&p->stop))
                return;
            add_units(p, d > 0, left_slab(p, first + r, height, d, n), height,
                      (real *)p->sums + r * CATTN_PRODUCT_SUMS_ROW(p->n_b), n);
        }
        d += n;
    } while (d < p->depth);
    store_sums(p, first, n_rows);
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
