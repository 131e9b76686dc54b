/* product.inc.h -- products of two matrices, C[i][j] = sum over d of A[i][d] * B[j][d]: linear and its gradients.
 *
 * A sum is cut into slabs of CATTN_SLAB_TERMS terms, and a slab into 16 chains of FMAs: chain c has the terms with
 * index c mod 16. The chains are added to the sum in order (csrc/README.md, "Products of matrices"). So a vector of 16
 * neighbouring terms holds one term of each chain, and a few rows of B need no transposed copy of A.
 *
 * Tiles: lanes are rows of B, which is packed; A is read in place and broadcast. For few rows of B see
 * product_few.inc.h.
 */

/* Packs all of B, slab after slab. */
static void product_pack(struct cattn_product *p) {
    const int64_t padded = cattn_round_up(p->n_b, PANEL), n_terms = terms_of(p->depth);
    for (int64_t d = 0; d < n_terms && (d == 0 || !stops(&p->stop)); d += SLAB)
        pack_slab(p, d, min64(SLAB, n_terms - d), padded, (operand *)p->packed + padded * d * TERM_ELEMENTS);
}

/* The part of A at hand: n_rows rows by the n terms of a slab, with unit column stride. */
struct product_slab {
    struct source a;
    int64_t n;
    const operand *packed; /* of B */
    bool first;            /* of the sum */
    int n_rows;
};

/* `height` rows of A from r on: A itself, or past the last row a copy padded with rows of zeros. */
static struct source a_rows(const struct cattn_product *p, const struct product_slab *s, int r, int height) {
    const struct source from = {s->a.first + r * s->a.row, s->a.row};
    if (r + height <= s->n_rows)
        return from;
    const int64_t row = SLAB * TERM_ELEMENTS;
    operand *copy = p->edge;
    for (int m = 0; m < height; m++)
        for (int64_t d = 0; d < s->n * TERM_ELEMENTS; d++)
            copy[m * row + d] = r + m < s->n_rows ? from.first[m * from.row + d] : 0;
    return (struct source){copy, row};
}

/* Adds the chains of a slab to the sums of mr rows of A and one panel of B. */
INLINE void slab_tile(int mr, int nr, const struct cattn_product *p, const struct product_slab *s, int r, int64_t l,
                      struct source a, const operand *b) {
    const int64_t whole = s->n / CHAINS, longer = s->n % CHAINS, sums_row = CATTN_PRODUCT_LANES;
    const int64_t a_col = CHAINS * TERM_ELEMENTS, b_row = PANEL * TERM_ELEMENTS;
    real *sums = (real *)p->sums + r * sums_row + l;
    vf sum[MR][NR], chain[MR][NR];
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            sum[m][n] = s->first ? vf_set1(0) : vf_loadu(sums + m * sums_row + n * LANES);
    if (s->n == SLAB) /* a constant length is faster */
        for (int c = 0; c < CHAINS; c++) {
            micro_tile(mr, nr, SLAB / CHAINS, a.first + c * TERM_ELEMENTS, a.row, a_col,
                       b + c * (SLAB / CHAINS) * b_row, b_row, chain);
            add_tile(mr, nr, sum, chain);
        }
    else
        for (int64_t c = 0, n; c < CHAINS; c++, b += n * b_row) {
            n = whole + (c < longer);
            micro_tile(mr, nr, n, a.first + c * TERM_ELEMENTS, a.row, a_col, b, b_row, chain);
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
            AT_SIZE(SCORE_MR, height, p->n_b - l > LANES, slab_tile, p, s, r, l, a,
                    s->packed + l * s->n * TERM_ELEMENTS);
            r += height;
        }
}

/* The rows first .. first + n_rows - 1 of A, at most CATTN_PRODUCT_ROWS, times all of packed B. */
static void product_tile(struct cattn_product *p, int64_t first, int n_rows) {
    const int64_t padded = cattn_round_up(p->n_b, PANEL), n_terms = terms_of(p->depth);
    int64_t d = 0;
    do {
        const int64_t n = min64(SLAB, n_terms - d);
        operand *packed = (operand *)p->packed + (p->by_slabs ? 0 : padded * d * TERM_ELEMENTS);
        if (p->by_slabs) /* before slab_of_a, which may use the same scratch */
            pack_slab(p, d, n, padded, packed);
        const struct product_slab s = {
            .a = slab_of_a(p, first, n_rows, d, n), .n = n, .packed = packed, .first = d == 0, .n_rows = n_rows};
        add_slab(p, &s);
        d += n;
        if (d < n_terms && stops(&p->stop))
            return;
    } while (d < n_terms);
    store_sums(p, first, n_rows);
}
