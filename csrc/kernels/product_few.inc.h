/* product_few.inc.h -- products of two matrices with up to CATTN_FEW_ROWS rows of B. A is read once.
 *
 *     rows     lanes are chains: the rows of A lie in memory without gaps between their terms
 *     columns  lanes are rows of A, which lie side by side: a weight that is stored transposed
 */

/* Most rows of B, and of A, whose chains are in registers together. With few rows of B, several rows of A are read side
 * by side: their chains are independent, so that many FMAs are in flight. A quarter of the registers is left for
 * operands. */
#define FIT(a, b) ((a) * (b) * CHAIN_VECTORS <= REGISTERS * 3 / 4)
#define MOST_TOGETHER (FIT(1, 8) ? 8 : FIT(1, 4) ? 4 : FIT(1, 2) ? 2 : 1)
#define MOST_BESIDE (LANES < 8 ? LANES : 8)

INLINE int rows_beside(int together) {
    return MOST_BESIDE >= 8 && FIT(8, together)   ? 8
           : MOST_BESIDE >= 4 && FIT(4, together) ? 4
           : MOST_BESIDE >= 2 && FIT(2, together) ? 2
                                                  : 1;
}
/* A number of rows of B, as far as their chains fit. */
INLINE int at_most_together(int n) { return n < MOST_TOGETHER ? n : MOST_TOGETHER; }

/* The chains of LANES rows of A: of a few slabs, for each row of B. */
struct few_chains {
    real of[CATTN_FEW_SLABS][CATTN_FEW_ROWS][LANES][CHAINS];
};

/* Rows of A and of B from the first term of a few slabs on. The rows of A have unit column stride and one scale each;
 * the rows of B are packed, with zeros up to the end of the last chain. */
struct few_rows {
    struct cattn_matrix a;
    int n_a, n_b;
    const operand *b;
    int64_t b_row;
    int first_b; /* in `chains` */
    struct few_chains *chains;
};

/* Adds n terms from term d on, at most one for each chain, of `beside` rows of A with the indices `row`. */
INLINE void add_few_terms(int together, int beside, const struct few_rows *few, const int64_t *row, int64_t d, int n,
                          vf chain[MOST_BESIDE][MOST_TOGETHER * CHAIN_VECTORS]) {
    const operand *row_b[MOST_TOGETHER];
    UNROLLED(b, together)
        row_b[b] = few->b + min64(b, few->n_b - 1) * few->b_row; /* the last row again, as in A */
    UNROLLED(v, CHAIN_VECTORS) {
        const int width = n == CHAINS ? LANES : (int)max64(0, min64(LANES, n - v * LANES));
        const int64_t at = d + v * LANES;
        UNROLLED(i, beside) {
            const vf a = terms_of_row(&few->a, row[i], at, width);
            UNROLLED(b, together)
                chain[i][v * together + b] =
                    add_product(a, packed_terms(row_b[b] + at * TERM_ELEMENTS), chain[i][v * together + b]);
        }
    }
}

/* The chains of all n terms of `beside` rows of A from r on. */
INLINE void sum_few_chains(int together, int beside, const struct few_rows *few, int r, int64_t n) {
    int64_t row[MOST_BESIDE];
    UNROLLED(i, beside)
        row[i] = min64(r + i, few->n_a - 1); /* past the last row: the last one again, whose chains are not used */
    for (int64_t d = 0, slab = 0; d < n; slab++) {
        const int64_t end = min64(n, d + SLAB);
        vf chain[MOST_BESIDE][MOST_TOGETHER * CHAIN_VECTORS];
        UNROLLED(i, beside)
            UNROLLED(c, together * CHAIN_VECTORS)
                chain[i][c] = vf_set1(0);
        for (; d + CHAINS <= end; d += CHAINS)
            add_few_terms(together, beside, few, row, d, CHAINS, chain);
        if (d < end)
            add_few_terms(together, beside, few, row, d, (int)(end - d), chain);
        d = end;
        UNROLLED(i, beside)
            UNROLLED(v, CHAIN_VECTORS)
                UNROLLED(b, together)
                    vf_storeu(&few->chains->of[slab][few->first_b + b][r + i][v * LANES], chain[i][v * together + b]);
    }
}

INLINE void sum_few_together(int together, const struct few_rows *few, int64_t n) {
    for (int r = 0; r < few->n_a; r += rows_beside(together))
        sum_few_chains(together, rows_beside(together), few, r, n);
}

/* The chains of n terms for n_b rows of B. `storage` is a constant. */
INLINE void sum_few_stored(enum cattn_storage storage, struct few_rows few, int n_b, int64_t n) {
    few.a.storage = storage;
    few.a.scale_col = 0;
    for (; few.first_b < n_b; few.first_b += MOST_TOGETHER, few.b += MOST_TOGETHER * few.b_row) {
        const int left = few.n_b = n_b - few.first_b;
        if (left == 1)
            sum_few_together(1, &few, n);
        else if (left == 2)
            sum_few_together(at_most_together(2), &few, n);
        else if (left <= 4)
            sum_few_together(at_most_together(4), &few, n);
        else
            sum_few_together(MOST_TOGETHER, &few, n);
    }
}

static void sum_few(const struct few_rows *few, int n_b, int64_t n) {
    if (few->a.storage == OPERAND_STORAGE)
        sum_few_stored(OPERAND_STORAGE, *few, n_b, n);
#if defined(BF16_PRODUCTS) && defined(HALVES_ARE_QUICK)
    else
        sum_few_stored(CATTN_STORED_PLAIN, *few, n_b, n);
#elif defined(HALVES_ARE_QUICK)
    else if (few->a.storage == CATTN_STORED_F16)
        sum_few_stored(CATTN_STORED_F16, *few, n_b, n);
    else if (few->a.storage == CATTN_STORED_BF16)
        sum_few_stored(CATTN_STORED_BF16, *few, n_b, n);
    else
        sum_few_stored(CATTN_STORED_I8, *few, n_b, n);
#endif
}

/* Adds the chains of a slab to the sums of LANES rows of A. */
INLINE vf add_few_chains(const real chains[LANES][CHAINS], vf sum) {
    for (int v = 0; v < CHAIN_VECTORS; v++) {
        vf chain[LANES];
        UNROLLED(i, LANES)
            chain[i] = vf_loadu(chains[i] + v * LANES);
        transpose_square(chain);
        UNROLLED(c, LANES)
            sum = sum + chain[c];
    }
    return sum;
}

/* Packs n terms of all rows of B from term d on, piece by piece: rows of whole chains, with zeros after the last
 * column. Returns the length of a row. */
static int64_t pack_few(const struct cattn_product *p, int64_t d, int64_t n_terms) {
    const int64_t first = d * TERM_ELEMENTS, cols = cattn_round_up(n_terms, CHAINS) * TERM_ELEMENTS;
    operand *to = p->packed;
    for (int64_t r = 0; r < p->n_b; r++)
        PIECES(c, 0, cols, &p->stop) {
            const int64_t n = min64(PIECE, cols - c), given = min64(n, p->depth - first - c);
            const struct cattn_matrix row = matrix_from(&p->b, r, first + c);
            pack_row(&row, given, to + r * cols + c);
            memset(to + r * cols + c + given, 0, (size_t)(n - given) * sizeof *to);
        }
    return cols;
}

static void product_pack_few(struct cattn_product *p) { pack_few(p, 0, terms_of(p->depth)); }

/* The first packed row of B from term d on. By slabs these n terms are packed first. */
static const operand *packed_few(const struct cattn_product *p, int64_t d, int64_t n, int64_t *b_row) {
    if (!p->by_slabs)
        return (const operand *)p->packed + d * TERM_ELEMENTS;
    *b_row = pack_few(p, d, n);
    return p->packed;
}

/* ---- columns ---- */

/* Terms of one chain that are read side by side: as many streams as processors follow. */
#define COLUMN_TERMS 8

/* Rows of A from the first of the n terms of a slab on, and the chains of this slab: [row of B][CHAINS][n_a]. */
struct few_columns {
    struct cattn_matrix a;
    int n_a, n_b;
    const operand *b;
    int64_t b_row, n, n_elements;
    real *chains;
};

/* Adds n_terms terms from d on, each the next one of the same chain, to the chains of `width` rows of A from l on. */
INLINE void add_column_terms(enum cattn_storage storage, int n_terms, const struct few_columns *few, int64_t d, int l,
                             int width) {
    real *chain = few->chains + d % CHAINS * few->n_a + l;
    vf a[COLUMN_TERMS];
    UNROLLED(t, n_terms)
        a[t] = terms_of_column(&few->a, storage, d + t * CHAINS, few->n_elements, l, width);
    for (int r = 0; r < few->n_b; r++, chain += CHAINS * few->n_a) {
        const operand *b = few->b + r * few->b_row + d * TERM_ELEMENTS;
        vf sum = d < CHAINS ? vf_set1(0) : load_strided(chain, 1, width);
        UNROLLED(t, n_terms)
            sum = add_product(a[t], packed_term_in_all_lanes(b + t * CHAINS * TERM_ELEMENTS), sum);
        store_strided(chain, 1, sum, width);
    }
}

INLINE void add_columns(enum cattn_storage storage, int n_terms, const struct few_columns *few, int64_t d) {
    int l = 0;
    for (; l + LANES <= few->n_a; l += LANES)
        add_column_terms(storage, n_terms, few, d, l, LANES);
    if (l < few->n_a)
        add_column_terms(storage, n_terms, few, d, l, few->n_a - l);
}

INLINE void sum_column_chains(enum cattn_storage storage, const struct few_columns *few) {
    for (int c = 0; c < CHAINS; c++) {
        int64_t d = c;
        for (; d + (COLUMN_TERMS - 1) * CHAINS < few->n; d += COLUMN_TERMS * CHAINS)
            add_columns(storage, COLUMN_TERMS, few, d);
        for (; d < few->n; d += CHAINS)
            add_columns(storage, 1, few, d);
    }
}

/* Adds the chains of a slab of n terms in order; the chains without a term are left out, which changes no bit. */
static void add_column_chains(const struct few_columns *few, real *sums) {
    const int n_chains = (int)min64(few->n, CHAINS);
    for (int r = 0; r < few->n_b; r++)
        for (int l = 0; l < few->n_a; l += LANES) {
            const int width = (int)min64(LANES, few->n_a - l);
            const real *chain = few->chains + (int64_t)r * CHAINS * few->n_a + l;
            vf sum = load_strided(sums + r * few->n_a + l, 1, width);
            for (int c = 0; c < n_chains; c++)
                sum = sum + load_strided(chain + c * few->n_a, 1, width);
            store_strided(sums + r * few->n_a + l, 1, sum, width);
        }
}

NOINLINE void sum_plain_columns(const struct few_columns *few) { sum_column_chains(CATTN_STORED_PLAIN, few); }
#ifdef HALVES_ARE_QUICK
NOINLINE void sum_f16_columns(const struct few_columns *few) { sum_column_chains(CATTN_STORED_F16, few); }
NOINLINE void sum_bf16_columns(const struct few_columns *few) { sum_column_chains(CATTN_STORED_BF16, few); }
#endif

/* The function for rows of A that lie side by side, or NULL if they do not, or are quantized. */
typedef void sum_columns_of(const struct few_columns *few);
static sum_columns_of *find_columns(const struct cattn_matrix *a) {
    if (a->row != 1 || a->col == 1)
        return NULL;
#ifdef HALVES_ARE_QUICK
    if (a->storage == CATTN_STORED_F16)
        return sum_f16_columns;
    if (a->storage == CATTN_STORED_BF16)
        return sum_bf16_columns;
#endif
    return a->storage == CATTN_STORED_PLAIN ? sum_plain_columns : NULL;
}

/* n_a rows of A from `first` on; n_a * n_b is at most CATTN_FEW_COLUMNS. */
static void few_columns_tile(const struct cattn_product *p, sum_columns_of *sum_columns, int64_t first, int n_a) {
    const int64_t n_terms = terms_of(p->depth), b_row = cattn_round_up(n_terms, CHAINS) * TERM_ELEMENTS;
    struct few_columns few = {.n_a = n_a, .n_b = (int)p->n_b, .b_row = b_row, .chains = p->sums};
    real *sums = (real *)p->sums + CHAINS * CATTN_FEW_COLUMNS;
    memset(sums, 0, CATTN_FEW_COLUMNS * sizeof *sums);
    for (int64_t d = 0; d < n_terms; d += SLAB) {
        if (d > 0 && stops(&p->stop))
            return;
        few.a = matrix_from(&p->a, first, d * TERM_ELEMENTS);
        few.n = min64(SLAB, n_terms - d);
        few.b = packed_few(p, d, few.n, &few.b_row);
        few.n_elements = min64(SLAB * TERM_ELEMENTS, p->depth - d * TERM_ELEMENTS);
        products_begin();
        sum_columns(&few);
        products_end();
        add_column_chains(&few, sums);
    }
    for (int r = 0; r < few.n_b; r++)
        for (int l = 0; l < n_a; l += LANES) {
            const int width = (int)min64(LANES, n_a - l);
            store_product(p, first + l, r, load_strided(sums + r * n_a + l, 1, width), width);
        }
}

/* ---- both ---- */

/* LANES rows of A from `first` on, of which n_rows exist, times the few rows of packed B. */
static void few_tile(const struct cattn_product *p, int64_t first, int n_rows) {
    const int64_t n_terms = terms_of(p->depth), b_row = cattn_round_up(n_terms, CHAINS) * TERM_ELEMENTS;
    const int64_t most = (int64_t)CATTN_FEW_SLABS * SLAB;
    const bool in_place = few_rows_in_place(p);
    struct few_chains *chains = p->sums;
    vf sum[CATTN_FEW_ROWS];
    for (int r = 0; r < p->n_b; r++)
        sum[r] = vf_set1(0);
    for (int64_t d = 0, n; d < n_terms; d += n) {
        if (d > 0 && stops(&p->stop))
            return;
        n = min64(in_place ? most : SLAB, n_terms - d);
        struct few_rows few = {.n_a = n_rows, .b_row = b_row, .chains = chains};
        few.a = matrix_from(&p->a, first, d * TERM_ELEMENTS);
        few.b = packed_few(p, d, n, &few.b_row);
        if (!in_place) {
            const struct source from = slab_of_a(p, first, n_rows, d, n);
            few.a = (struct cattn_matrix){.storage = OPERAND_STORAGE, .first = from.first, .row = from.row, .col = 1};
        }
        products_begin();
        sum_few(&few, (int)p->n_b, n);
        products_end();
        for (int r = 0; r < p->n_b; r++)
            for (int64_t slab = 0; slab * SLAB < n; slab++)
                sum[r] = add_few_chains((const real(*)[CHAINS])chains->of[slab][r], sum[r]);
    }
    for (int r = 0; r < p->n_b; r++)
        store_product(p, first, r, sum[r], n_rows);
}

/* n_rows rows of A from `first` on. */
static void product_few(struct cattn_product *p, int64_t first, int n_rows) {
    sum_columns_of *const sum_columns = find_columns(&p->a);
    if (sum_columns) {
        const int most = CATTN_FEW_COLUMNS / (int)p->n_b;
        for (int r = 0; r < n_rows; r += most)
            few_columns_tile(p, sum_columns, first + r, (int)min64(most, n_rows - r));
        return;
    }
    for (int r = 0; r < n_rows; r += LANES)
        few_tile(p, first + r, (int)min64(LANES, n_rows - r));
}
