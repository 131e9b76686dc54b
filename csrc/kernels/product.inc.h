/* product.inc.h -- products of two matrices, C[i][j] = sum over d of A[i][d] * B[j][d]: linear and its gradients.
 *
 * A sum is cut into slabs of CATTN_SLAB_TERMS terms, and a slab into 16 chains of FMAs: chain c has the terms with
 * index c mod 16. The chains are added to the sum in order (csrc/README.md, "Products of matrices"). So a vector of 16
 * neighbouring terms holds one term of each chain, and a few rows of B need no transposed copy of A.
 *
 * Tiles: lanes are rows of B, which is packed slab by slab; elements of A are broadcast. A is read in place, or packed
 * where so many rows of B use it that reading in order is worth a copy. The sums rest in the result between slabs if
 * its rows are lanes and its elements have the table's own type. For few rows of B see product_few.inc.h.
 */

/* The part of A at hand, n_rows rows by the n terms of a slab, with its sums, and a block of rows of B. */
struct product_slab {
    const struct cattn_product *p;
    int64_t first_row, first_lane; /* of A, of B */
    int n_rows;
    int64_t n_b;
    int64_t n;
    bool first, last;      /* of the sum */
    struct source a;       /* rows with unit column stride; or */
    const operand *a_pack; /* packed, as B */
    const operand *b_pack;
    real *sums;
    int64_t sums_row, n_lanes; /* the lanes after n_lanes have no place in a row */
};

/* `height` rows of A from r on: A itself, or past the last row a copy padded with rows of zeros. */
static struct source a_rows(const struct product_slab *s, int r, int height) {
    const struct source from = {s->a.first + r * s->a.row, s->a.row};
    if (r + height <= s->n_rows)
        return from;
    const int64_t row = SLAB * TERM_ELEMENTS;
    operand *copy = s->p->edge;
    for (int m = 0; m < height; m++)
        for (int64_t d = 0; d < s->n * TERM_ELEMENTS; d++)
            copy[m * row + d] = r + m < s->n_rows ? from.first[m * from.row + d] : 0;
    return (struct source){copy, row};
}

INLINE int lanes_at(const struct product_slab *s, int64_t l) { return (int)min64(LANES, s->n_lanes - l); }

/* The sums of a micro-tile: in their place, or at the edges a copy of them. After the last slab they become the results
 * of row r and lane l on, if they are in their place. */
struct tile_sums {
    real *first;
    int64_t row;
    bool finishes;
    int r;
    int64_t l;
};

/* What is fetched meanwhile: so many lines with each chain, of n_rows rows. */
struct fetch {
    uintptr_t first;
    int64_t row; /* bytes */
    int n_rows;
    int64_t n_lines;
};

INLINE void fetch_lines(struct fetch f, int64_t chain) {
    for (int m = 0; m < f.n_rows; m++)
        for (int64_t i = 0; i < f.n_lines; i++)
            prefetch(f.first, m * f.row + (chain * f.n_lines + i) * LINE_BYTES, 1);
}

/* The results of mr rows of A and nr vectors of B from their sums. */
INLINE void finish_tile(int mr, int nr, const struct product_slab *s, struct tile_sums place, vf sum[MR][WIDEST]) {
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            sum[m][n] = with_one_nan(
                product_row(s->p, s->first_row + place.r + m, s->first_lane + place.l + n * LANES, sum[m][n], LANES));
}

/* Adds the chains of a slab to the sums of mr rows of A and nr vectors of B. */
INLINE void slab_tile(int mr, int nr, bool packs, const struct product_slab *s, struct source a, const operand *b,
                      struct tile_sums sums, struct fetch next) {
    const int64_t whole = s->n / CHAINS, longer = s->n % CHAINS, b_row = (int64_t)nr * LANES * TERM_ELEMENTS;
    const int64_t a_row = packs ? 1 : a.row, a_col = packs ? LANES : CHAINS * TERM_ELEMENTS;
    vf sum[MR][WIDEST], chain[MR][WIDEST];
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            sum[m][n] = s->first ? vf_set1(0) : vf_loadu(sums.first + m * sums.row + n * LANES);
    for (int64_t c = 0, at = 0, length; c < CHAINS; c++, at += length) {
        length = whole + (c < longer);
        const operand *a_c = a.first + (packs ? at * a_col : c * TERM_ELEMENTS);
        if (PRODUCT_PACKS_FROM < INT64_MAX)
            fetch_lines(next, c);
        if (length == SLAB / CHAINS) /* a constant length is faster */
            micro_tile(mr, nr, SLAB / CHAINS, a_c, a_row, a_col, b + at * b_row, b_row, chain);
        else
            micro_tile(mr, nr, length, a_c, a_row, a_col, b + at * b_row, b_row, chain);
        add_tile(mr, nr, sum, chain);
    }
    if (sums.finishes)
        finish_tile(mr, nr, s, sums, sum);
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            vf_storeu(sums.first + m * sums.row + n * LANES, sum[m][n]);
}

/* Copies sums of n_rows rows and n_lanes lanes. */
NOINLINE void copy_sums(struct tile_sums from, struct tile_sums to, int64_t n_rows, int64_t n_lanes) {
    for (int64_t m = 0; m < n_rows; m++)
        memcpy(to.first + m * to.row, from.first + m * from.row, (size_t)n_lanes * sizeof(real));
}

/* Writes results in the place of the sums of n_rows rows of A from r on and n lanes from l on. */
NOINLINE void finish_in_place(const struct product_slab *s, int r, int n_rows, int64_t l, int64_t n) {
    for (int m = r; m < r + n_rows; m++)
        for (int64_t j = l; j < l + n; j += LANES)
            store_product_row(s->p, s->first_row + m, s->first_lane + j,
                              load_strided(s->sums + m * s->sums_row + j, 1, lanes_at(s, j)), lanes_at(s, j));
}

#define AT_WIDTH(nr, height, ...)                                                                                      \
    do {                                                                                                               \
        if (PRODUCT_NR > 2 && (nr) > 2)                                                                                \
            AT_HEIGHT(PRODUCT_MR, height, slab_tile, PRODUCT_NR, __VA_ARGS__);                                         \
        else if (PRODUCT_NR > 1 && (nr) == 2)                                                                          \
            AT_HEIGHT(PRODUCT_MR, height, slab_tile, PRODUCT_NR > 2 ? 2 : PRODUCT_NR, __VA_ARGS__);                    \
        else                                                                                                           \
            AT_HEIGHT(PRODUCT_MR, height, slab_tile, 1, __VA_ARGS__);                                                  \
    } while (0)

/* The rows of A after the ones at hand, which the first panel reads from memory. */
INLINE struct fetch next_rows(const struct product_slab *s, int r, int64_t l) {
    const int64_t size = (int64_t)sizeof *s->a.first, bytes = s->n * TERM_ELEMENTS * size;
    return (struct fetch){address_ahead((uintptr_t)s->a.first, r * s->a.row, (size_t)size), s->a.row * size,
                          l == 0 ? PRODUCT_MR : 0, cattn_ceil_div(bytes, CHAINS * LINE_BYTES)};
}

/* Adds a slab of a panel of PRODUCT_NR vectors from lane l on to the sums of all whole micro-tiles of rows, which are
 * packed: add_panel without its questions. All chains have `length` terms, a constant. Returns the first row that is
 * left. */
INLINE int add_plain_panel(int64_t length, const struct product_slab *s, int64_t l) {
    const int mr = PRODUCT_MR, nr = PRODUCT_NR;
    const int64_t row = (int64_t)nr * LANES, a_row = LANES;
    const operand *b = s->b_pack + l * length * CHAINS;
    const int64_t n_lines = cattn_ceil_div(length * CHAINS * row * (int64_t)sizeof *b, LINE_BYTES);
    const int64_t of_tile = cattn_ceil_div(n_lines * mr, s->n_rows), of_chain = of_tile / CHAINS;
    struct fetch next = {(uintptr_t)(b + length * CHAINS * row), 0, 1, 1};
    int r = 0;
    for (; r + mr <= s->n_rows; r += mr) {
        const operand *a = s->a_pack + r / LANES * LANES * s->n + r % LANES;
        const struct tile_sums place = {s->sums + r * s->sums_row + l, s->sums_row, s->last, r, l};
        vf sum[MR][WIDEST], chain[MR][WIDEST];
        UNROLLED(m, mr)
            UNROLLED(n, nr)
                sum[m][n] = s->first ? vf_set1(0) : vf_loadu(place.first + m * place.row + n * LANES);
        for (int64_t c = 0; c < CHAINS; c++) {
            for (int64_t i = c < of_tile % CHAINS ? -1 : 0; i < of_chain; i++, next.first += LINE_BYTES)
                fetch_lines(next, 0);
            micro_tile(mr, nr, length, a + c * length * a_row, 1, a_row, b + c * length * row, row, chain);
            add_tile(mr, nr, sum, chain);
        }
        if (s->last)
            finish_tile(mr, nr, s, place, sum);
        UNROLLED(m, mr)
            UNROLLED(n, nr)
                vf_storeu(place.first + m * place.row + n * LANES, sum[m][n]);
    }
    return r;
}

/* The lengths of chains that products of models have. */
#define PLAIN_LENGTHS(use) use(4) use(8) use(16) use(24) use(32)
#define PLAIN_PANEL(length)                                                                                            \
    NOINLINE int plain_panel_##length(const struct product_slab *s, int64_t l) { return add_plain_panel(length, s, l); }
PLAIN_LENGTHS(PLAIN_PANEL)

/* add_plain_panel, if the chains have such a length; else 0. */
static int add_plain_rows(const struct product_slab *s, int64_t l) {
#define IF_PLAIN(length)                                                                                               \
    if (s->n == (length) * CHAINS)                                                                                     \
        return plain_panel_##length(s, l);
    PLAIN_LENGTHS(IF_PLAIN)
    return 0;
}

/* Adds a slab of a panel of nr vectors from lane l on to the sums of all rows at hand. */
INLINE void add_panel(bool packs, const struct product_slab *s, int64_t l, int nr) {
    const operand *b = s->b_pack + l * s->n * TERM_ELEMENTS;
    const int64_t bytes = nr * LANES * s->n * (int64_t)sizeof(real), n_lanes = min64(nr * LANES, s->n_lanes - l);
    const int64_t share = cattn_ceil_div(bytes * PRODUCT_MR, (int64_t)s->n_rows * CHAINS * LINE_BYTES);
    struct fetch next_b = {(uintptr_t)b + (uintptr_t)bytes, 0, 1, share};
    real edge[MR * WIDEST * LANES];
    const int plain = packs && nr == PRODUCT_NR && n_lanes == nr * LANES ? add_plain_rows(s, l) : 0;
    for (int r = plain, height; r < s->n_rows; r += height, next_b.first += (uintptr_t)(share * CHAINS * LINE_BYTES)) {
        height = tile_height(PRODUCT_MR, s->n_rows - r);
        const int n_rows = (int)min64(height, s->n_rows - r);
        const bool whole = n_rows == height && n_lanes == nr * LANES;
        const struct tile_sums place = {s->sums + r * s->sums_row + l, s->sums_row, s->last, r, l},
                               copy = {.first = edge, .row = WIDEST * LANES};
        const struct tile_sums sums = whole ? place : copy;
        if (!whole && !s->first)
            copy_sums(place, copy, n_rows, n_lanes);
        if (packs) {
            const struct source a = {s->a_pack + r / LANES * LANES * s->n + r % LANES, 0};
            AT_WIDTH(nr, height, true, s, a, b, sums, next_b);
        } else {
            const struct fetch next_a = next_rows(s, r + height, l);
            AT_WIDTH(nr, height, false, s, a_rows(s, r, height), b, sums, next_a);
        }
        if (!whole) {
            copy_sums(copy, place, n_rows, n_lanes);
            if (s->last)
                finish_in_place(s, r, n_rows, l, n_lanes);
        }
    }
}

static void add_slab(const struct product_slab *s) {
    const int64_t n_lanes = cattn_round_up(s->n_b, LANES);
    for (int64_t l = 0, nr; l < n_lanes; l += nr * LANES) {
        nr = panel_vectors(PRODUCT_NR, (n_lanes - l) / LANES);
        if (s->a_pack && PRODUCT_PACKS_FROM < INT64_MAX)
            add_panel(true, s, l, (int)nr);
        else
            add_panel(false, s, l, (int)nr);
    }
}

/* Packs a slab of n_rows rows of A from `first` on, in the pieces that add_block reads. */
static void pack_rows(const struct cattn_product *p, int64_t first, int64_t n_rows, int64_t d, int64_t n) {
    for (int64_t r = 0; r < n_rows; r += CATTN_PRODUCT_ROWS)
        pack_operand(p, &p->a, first + r, min64(CATTN_PRODUCT_ROWS, n_rows - r), 1, d, n, (operand *)p->a_copy + r * n);
}

/* Adds a slab from term d on of n_rows rows of A from `first` on, times the block of B at hand. False after a stop. */
static bool add_block(const struct cattn_product *p, struct product_slab *s, int64_t first, int64_t n_rows, int64_t d,
                      real *sums) {
    for (int64_t r = 0; r < n_rows; r += s->n_rows) {
        if ((r > 0 || d > 0 || s->first_lane > 0) && stops(&p->stop))
            return false;
        s->first_row = first + r;
        s->n_rows = (int)min64(CATTN_PRODUCT_ROWS, n_rows - r);
        s->sums = sums + r * s->sums_row;
        if (p->n_b >= PRODUCT_PACKS_FROM)
            s->a_pack = (const operand *)p->a_copy + r * s->n;
        else
            s->a = slab_of_a(p, s->first_row, s->n_rows, d, s->n);
        add_slab(s);
    }
    return true;
}

/* The rows first .. first + n_rows - 1 of A times all of B. */
static void product_tile(struct cattn_product *p, int64_t first, int64_t n_rows) {
    const int64_t n_terms = terms_of(p->depth), block = cattn_product_block(p->n_b);
    const bool in_place = cattn_sums_in_place(p);
    real *sums = in_place ? (real *)p->out + first * p->out_a : p->sums;
    struct product_slab s = {
        .p = p, .b_pack = p->packed, .sums_row = in_place ? p->out_a : CATTN_PRODUCT_SUMS_ROW(p->n_b)};
    int64_t d = 0;
    do {
        s.n = min64(SLAB, n_terms - d);
        s.first = d == 0;
        s.last = in_place && d + s.n == n_terms;
        if (p->n_b >= PRODUCT_PACKS_FROM)
            pack_rows(p, first, n_rows, d, s.n);
        for (int64_t l = 0; l < p->n_b; l += block) {
            s.first_lane = l;
            s.n_b = min64(block, p->n_b - l);
            s.n_lanes = in_place ? s.n_b : INT64_MAX;
            pack_operand(p, &p->b, l, s.n_b, PRODUCT_NR, d, s.n, p->packed);
            if (!add_block(p, &s, first, n_rows, d, sums + l))
                return;
        }
        d += s.n;
    } while (d < n_terms);
    if (!in_place)
        store_sums(p, first, n_rows, 0, p->n_b, sums, s.sums_row);
}
