/* bf16_units.inc.h -- products of bfloat16 in tiles (AMX), for the tables of TABLE_BITS 17, and their operands.
 *
 * The order of the sums is the order of the instruction TDPBF16PS.
 *
 * Terms of a sum are cut into groups of 32 by index. A group is two chains of 16 FMAs that start with +0; the second
 * chain is added to the first one, and then both to the sum. Operands and results that are subnormal count as zeros, as
 * in bf16_products.inc.h. The instruction has the terms of one chain in the even elements of its rows and the terms of
 * the other chain in the odd ones, hence the layout of packed operands: the terms i and i + 16 of a group are a pair.
 *
 *     left     a row is a row of A: 16 pairs for each group, beside the same group of the other rows of its unit
 *     right    a row is a pair of terms: one pair for each row of B, in CATTN_UNIT or more lanes
 *
 * unit_products computes up to 2 x 2 tiles of 16 rows of A by 16 rows of B. It is defined twice: by the instructions,
 * and by vectors, which read the rows of A as numbers that `widen_left` has made of the pairs.
 */

#define GROUP CATTN_GROUP_TERMS
#define UNIT CATTN_UNIT
#define TILE (UNIT / 2) /* rows and lanes of a tile, and pairs of a group */
_Static_assert(TILE % LANES == 0 && TILE == CATTN_CHAIN_TERMS, "a tile has whole vectors, and a chain for each half");

INLINE int64_t groups_of(int64_t n_terms) { return cattn_ceil_div(n_terms, GROUP); }

/* ---- packed operands ---- */

INLINE vf values_or_zeros(const struct cattn_matrix *matrix, enum cattn_storage storage, int64_t r, int64_t c,
                          int64_t left) {
    if (left >= LANES)
        return values_at(matrix, storage, r, c, LANES);
    return left > 0 ? values_at(matrix, storage, r, c, (int)left) : vf_set1(0);
}

/* LANES pairs of the row r: of the elements from c on and the elements from c + 16 on. The columns after the last one
 * are zeros. */
INLINE vu pairs_of_group(const struct cattn_matrix *matrix, enum cattn_storage storage, int64_t r, int64_t c,
                         int64_t n_cols) {
#ifdef HAS_HALF_PAIRS
    if (storage == CATTN_STORED_BF16 && LANES == TILE && n_cols - c >= GROUP)
        return vu_half_pairs((const uint16_t *)matrix->first + r * matrix->row + c);
#endif
    return paired_values(storage, values_or_zeros(matrix, storage, r, c, n_cols - c),
                         values_or_zeros(matrix, storage, r, c + TILE, n_cols - c - TILE));
}

/* Calls function(matrix, storage, ...) with the storage as a constant in the common cases. */
#define BY_STORAGE(function, matrix, ...)                                                                              \
    do {                                                                                                               \
        if (direct_storage(matrix) == CATTN_STORED_BF16)                                                               \
            function(matrix, CATTN_STORED_BF16, __VA_ARGS__);                                                          \
        else if (direct_storage(matrix) == CATTN_STORED_PLAIN)                                                         \
            function(matrix, CATTN_STORED_PLAIN, __VA_ARGS__);                                                         \
        else                                                                                                           \
            function(matrix, CATTN_STORED_F8, __VA_ARGS__);                                                            \
    } while (0)

INLINE void pack_left_rows(const struct cattn_matrix *matrix, enum cattn_storage storage, int64_t begin, int64_t end,
                           int64_t n_cols, uint16_t *to) {
    const int64_t row = cattn_round_up(n_cols, GROUP);
    for (int64_t r = begin; r < end; r++) {
        uint16_t *first = to + r / UNIT * UNIT * row + r % UNIT * GROUP;
        for (int64_t c = 0; c < n_cols; c += GROUP)
            for (int p = 0; p < TILE; p += LANES)
                store_pairs(first + c * UNIT + 2 * p, pairs_of_group(matrix, storage, r, c + p, n_cols));
    }
}

/* The rows begin .. end-1 as rows of A: [unit][group][UNIT][16 pairs], where `to` has row 0. */
static void pack_left(const struct cattn_matrix *matrix, int64_t begin, int64_t end, int64_t n_cols, uint16_t *to) {
    BY_STORAGE(pack_left_rows, matrix, begin, end, n_cols, to);
}

INLINE void pack_transposed_rows(const struct cattn_matrix *matrix, enum cattn_storage storage, int64_t begin,
                                 int64_t end, int64_t n_cols, uint16_t *to) {
    const int64_t padded = cattn_round_up(n_cols, UNIT);
    for (int64_t k = begin; k < end; k += GROUP, to += GROUP * padded)
        for (int64_t c = 0; c < padded; c += LANES)
            for (int p = 0; p < TILE; p += LANES) {
                vf v[LANES];
                for (int i = 0; i < LANES; i++) {
                    const int64_t even = k + p + i, odd = even + TILE;
                    v[i] = vf_of_vu(paired_values(
                        storage, even < end ? values_or_zeros(matrix, storage, even, c, n_cols - c) : vf_set1(0),
                        odd < end ? values_or_zeros(matrix, storage, odd, c, n_cols - c) : vf_set1(0)));
                }
                vf_transpose(v);
                for (int i = 0; i < LANES; i++)
                    store_pairs(to + (c + i) * GROUP + 2 * p, vu_of_vf(v[i]));
            }
}

/* The columns of the rows begin .. end-1 as rows of A, whose terms are the rows: [group][column][16 pairs], with zeros
 * up to whole groups and units. `begin` is the first row of a group, which `to` has. */
static void pack_transposed(const struct cattn_matrix *matrix, int64_t begin, int64_t end, int64_t n_cols,
                            uint16_t *to) {
    BY_STORAGE(pack_transposed_rows, matrix, begin, end, n_cols, to);
}

static void pack_keys(const struct cattn_matrix *key, int64_t begin, int64_t end, int64_t n_cols, uint16_t *to) {
    pack_left(key, begin, end, n_cols, to);
}
static void pack_values(const struct cattn_matrix *value, int64_t begin, int64_t end, int64_t n_cols, uint16_t *to) {
    pack_transposed(value, begin, end, n_cols, to + begin * cattn_packed_value_cols(CATTN_BF16_TILES, n_cols));
}

/* A query, as a matrix of one row; queries are never quantized. */
INLINE struct cattn_matrix query_row(const struct cattn_rows *rows, int r) {
    static const float none = 1;
    return (struct cattn_matrix){
        .storage = rows->call.storage, .first = rows->query[r], .col = rows->call.query_col, .scale = &none};
}

/* Packs LANES rows, of which n_rows exist, as lanes of a right operand: [pair][row elements]. */
INLINE void pack_right_lanes(const struct cattn_matrix *matrix, enum cattn_storage storage, int64_t r, int64_t n_rows,
                             int64_t n_cols, uint16_t *to, int64_t row) {
    for (int64_t c = 0; c < n_cols; c += GROUP)
        for (int p = 0; p < TILE; p += LANES) {
            vf v[LANES];
            if (n_rows >= LANES && n_cols - c >= GROUP)
                UNROLLED(i, LANES)
                    v[i] = vf_of_vu(pairs_of_group(matrix, storage, r + i, c + p, c + GROUP));
            else
                for (int i = 0; i < LANES; i++)
                    v[i] = i < n_rows ? vf_of_vu(pairs_of_group(matrix, storage, r + i, c + p, n_cols)) : vf_set1(0);
            vf_transpose(v);
            UNROLLED(i, LANES)
                store_pairs(to + (c / 2 + p + i) * row, vu_of_vf(v[i]));
        }
}
NOINLINE void pack_right(const struct cattn_matrix *matrix, int64_t r, int64_t n_rows, int64_t n_cols, uint16_t *to,
                         int64_t row) {
    BY_STORAGE(pack_right_lanes, matrix, r, n_rows, n_cols, to, row);
}

/* ---- products ---- */

/* The operands of a unit: rows of A and rows of pairs of B, and where their next groups are. */
struct unit {
    int64_t n_groups;
    const void *left; /* what widen_left returns */
    int64_t left_row, left_group;
    const uint16_t *right;
    int64_t right_row, right_group;
    real *sum; /* [2 * TILE][sum_row] */
    int64_t sum_row;
};

#ifdef TILE_INSTRUCTIONS

/* All tiles have 16 rows of 64 bytes. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

static void tiles_begin(void) {
    static const struct tile_config config = {
        .palette = 1,
        .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
    };
    _tile_loadconfig(&config);
}
static void tiles_end(void) { _tile_release(); }

/* Rows of A are read as they are packed. */
INLINE const void *widen_left(const uint16_t *packed, int64_t n_terms, void *wide) {
    (void)n_terms, (void)wide;
    return packed;
}
INLINE const void *left_at(const void *left, int64_t term) { return (const uint16_t *)left + term; }
INLINE real left_term(const void *left, int i) {
    const uint16_t *pairs = left;
    return from_bits((uint32_t)pairs[2 * (i % TILE) + i / TILE] << 16);
}

/* The intrinsics do not tell the compiler what memory they read. */
#define MEMORY_IS_READ __asm__ volatile("" ::: "memory")

/* Sums of n_left x n_right tiles, which start with +0 or, if `adds`, with what is there. Rows of A leave the nearest
 * cache to the sums and to B, which come again sooner. */
INLINE void unit_products(int n_left, int n_right, bool adds, struct unit u) {
    const int64_t a_bytes = 2 * u.left_row, b_bytes = 2 * u.right_row, c_bytes = 4 * u.sum_row;
    const uint16_t *a = u.left, *b = u.right;
    real *below = u.sum + TILE * u.sum_row;
    MEMORY_IS_READ;
    if (adds) {
        _tile_loadd(0, u.sum, c_bytes);
        if (n_left > 1)
            _tile_loadd(1, below, c_bytes);
        if (n_right > 1)
            _tile_loadd(2, u.sum + TILE, c_bytes);
        if (n_left > 1 && n_right > 1)
            _tile_loadd(3, below + TILE, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t g = 0; g < u.n_groups; g++, a += u.left_group, b += u.right_group) {
        _tile_stream_loadd(4, a, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (n_left > 1) {
            _tile_stream_loadd(5, a + TILE * u.left_row, a_bytes);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (n_right > 1) {
            _tile_loadd(7, b + 2 * TILE, b_bytes);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (n_left > 1 && n_right > 1)
            _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, u.sum, c_bytes);
    if (n_left > 1)
        _tile_stored(1, below, c_bytes);
    if (n_right > 1)
        _tile_stored(2, u.sum + TILE, c_bytes);
    if (n_left > 1 && n_right > 1)
        _tile_stored(3, below + TILE, c_bytes);
}

#else

INLINE void tiles_begin(void) {}
INLINE void tiles_end(void) {}

/* The packed rows of A, n_terms in all, as numbers in the order of the terms: a broadcast then loads a factor. */
static const void *widen_left(const uint16_t *packed, int64_t n_terms, void *wide) {
    real *to = wide;
    for (int64_t d = 0; d < n_terms; d += GROUP)
        for (int p = 0; p < TILE; p += LANES) {
            const vu pairs = load_pair_vector(packed + d + 2 * p);
            vf_storeu(to + d + p, vf_half(pairs, 0));
            vf_storeu(to + d + TILE + p, vf_half(pairs, 1));
        }
    return wide;
}
INLINE const void *left_at(const void *left, int64_t term) { return (const real *)left + term; }
INLINE real left_term(const void *left, int i) { return ((const real *)left)[i]; }

INLINE_UNLESS_QUICK vf add_term(vf a, vf b, vf chain) { return flushed_fma(a, b, chain); }

/* One chain of each sum of a micro-tile: the even (0) or odd (1) elements of the pairs of B. */
INLINE void unit_chain(int mr, int nr, int odd, const real *a, int64_t a_row, const uint16_t *b, int64_t b_row,
                       vf chain[MR][WIDEST]) {
    clear_tile(mr, nr, chain);
#pragma GCC unroll 2
    for (int p = 0; p < TILE; p++) {
        vf b_p[NR];
        UNROLLED(n, nr)
            b_p[n] = vf_half(load_pair_vector(b + p * b_row + 2 * n * LANES), odd);
        UNROLLED(m, mr) {
            const vf a_mp = vf_set1(a[m * a_row + p]);
            UNROLLED(n, nr)
                chain[m][n] = add_term(a_mp, b_p[n], chain[m][n]);
        }
    }
}

/* Sums of mr rows of A from r on and nr vectors of lanes from l on. */
INLINE void unit_tile(int mr, int nr, bool adds, const struct unit *u, int r, int l) {
    const real *a = (const real *)u->left + r * u->left_row;
    const uint16_t *b = u->right + 2 * l;
    real *to = u->sum + r * u->sum_row + l;
    vf sum[MR][WIDEST], first[MR][WIDEST], second[MR][WIDEST];
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            sum[m][n] = adds ? vf_loadu(to + m * u->sum_row + n * LANES) : vf_set1(0);
    for (int64_t g = 0; g < u->n_groups; g++, a += u->left_group, b += u->right_group) {
        unit_chain(mr, nr, 0, a, u->left_row, b, u->right_row, first);
        unit_chain(mr, nr, 1, a + TILE, u->left_row, b, u->right_row, second);
        UNROLLED(m, mr)
            UNROLLED(n, nr)
                sum[m][n] = flushed_sum(sum[m][n], flushed_sum(first[m][n], second[m][n]));
    }
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            vf_storeu(to + m * u->sum_row + n * LANES, sum[m][n]);
}

/* Tiles of height 4 in the place of one that is hardly used: the rows are a multiple of 8. */
INLINE int unit_height(int left) { return left > MR && left < MR + 4 ? 4 : tile_height(MR, left); }

/* Sums of n_left x n_right tiles, which start with +0 or, if `adds`, with what is there. */
NOINLINE void unit_by_vectors(int n_left, int n_right, bool adds, const struct unit *u) {
    products_begin();
    for (int l = 0; l < n_right * TILE; l += PANEL)
        for (int r = 0, height; r < n_left * TILE; r += height) {
            height = unit_height(n_left * TILE - r);
            if (adds)
                AT_SIZE(MR, height, n_right * TILE - l > LANES, unit_tile, true, u, r, l);
            else
                AT_SIZE(MR, height, n_right * TILE - l > LANES, unit_tile, false, u, r, l);
        }
    products_end();
}
INLINE void unit_products(int n_left, int n_right, bool adds, struct unit u) {
    unit_by_vectors(n_left, n_right, adds, &u);
}

#endif

/* Whether processor and compiler keep the arithmetic of units; as keeps_pair_arithmetic. Each row of A has one kind of
 * sum, in two groups. */
static bool keeps_unit_arithmetic(void) {
    /* the terms 0, 1, 16 and 32 of a row; their factors are 1 */
    static const volatile float rows[][4] = {
        {0x1p24f, 1, 1, 0},              /* 1 is lost in its chain, and then beside it */
        {1, 0, 0x1p24f, 1},              /* the chains lose 1 beside each other, the groups another one */
        {0x1p-133f, 0, 0, 0},            /* a subnormal element */
        {0x1p-126f, -0x1.8p-126f, 0, 0}, /* sums below 2^-126: of a chain, */
        {0x1p-126f, 0, -0x1.8p-126f, 0}, /* of two chains, */
        {0x1p-126f, 0, 0, -0x1.8p-126f}, /* and of two groups */
    };
    static const float results[] = {0x1p24f, 0x1p24f, 0, 0, 0, -0.0f};
    enum { N_ROWS = sizeof results / sizeof *results };
    static const int places[] = {0, 2, 1, 32}; /* of the terms in a packed row */
    uint16_t left[UNIT * 2 * GROUP] = {0}, right[2 * TILE * 2 * UNIT] = {0};
    real wide[UNIT * 2 * GROUP], sum[UNIT * UNIT];
    for (int r = 0; r < N_ROWS; r++)
        for (int i = 0; i < 4; i++)
            left[r * 2 * GROUP + places[i]] = (uint16_t)(to_bits(rows[r][i]) >> 16);
    for (int l = 0; l < UNIT; l++)
        for (int i = 0; i < 4; i++)
            right[places[i] / 2 * 2 * UNIT + 2 * l + places[i] % 2] = 0x3f80; /* 1 */
    tiles_begin();
    unit_products(2, 2, false,
                  (struct unit){2, widen_left(left, UNIT * 2 * GROUP, wide), 2 * GROUP, GROUP, right, 2 * UNIT,
                                TILE * 2 * UNIT, sum, UNIT});
    tiles_end();
    bool kept = keeps_pair_arithmetic();
    for (int r = 0; r < N_ROWS; r++)
        for (int l = 0; l < UNIT; l++)
            kept &= to_bits(sum[r * UNIT + l]) == to_bits(results[r]);
    return kept;
}

/* ---- the same sums for few rows of B ---- */

/* The terms of one row, rounded, as numbers of whole groups. */
static void round_terms(const struct cattn_matrix *matrix, int64_t r, int64_t n_cols, real *to) {
    for (int64_t c = 0; c < cattn_round_up(n_cols, GROUP); c += LANES)
        vf_storeu(to + c, rounded_bf16(values_or_zeros(matrix, CATTN_STORED_F8, r, c, n_cols - c)));
}

/* Sums of which each lane has one, for `many` rows of B: the sum so far, and the chains of the current group. */
struct lane_sums {
    vf sum[CATTN_FEW_ROWS], first[CATTN_FEW_ROWS], chain[CATTN_FEW_ROWS];
};

INLINE void begin_lane_sums(int many, struct lane_sums *s) {
    UNROLLED(r, many)
        s->sum[r] = s->first[r] = s->chain[r] = vf_set1(0);
}

/* Ends the chain whose last term is `last`; a group ends with its second chain. */
INLINE void end_lane_chain(int many, struct lane_sums *s, int64_t last) {
    const bool is_first = last % GROUP < TILE;
    UNROLLED(r, many) {
        if (is_first)
            s->first[r] = s->chain[r];
        else {
            s->sum[r] = flushed_sum(s->sum[r], flushed_sum(s->first[r], s->chain[r]));
            s->first[r] = vf_set1(0);
        }
        s->chain[r] = vf_set1(0);
    }
}

INLINE void keep_lane_sums(int many, struct lane_sums *s) {
    UNROLLED(r, many) {
        keep_sum(&s->sum[r]);
        keep_sum(&s->first[r]);
        keep_sum(&s->chain[r]);
    }
}

/* Adds n_pairs pairs of neighbouring terms from term d on, which is even. The rows of B are numbers, b_row apart. */
INLINE void add_lane_pairs(int many, struct lane_sums *s, int64_t d, int n_pairs, const vf *pairs, const real *b,
                           int64_t b_row) {
    for (int i = 0, n; i < n_pairs; i += n) {
        const int64_t at = d + 2 * i;
        n = (int)min64(n_pairs - i, (TILE - at % TILE) / 2);
        for (int j = 0; j < n; j++)
            for (int odd = 0; odd < 2; odd++) {
                const vf a = vf_half(vu_of_vf(pairs[i + j]), odd);
                UNROLLED(r, many)
                    s->chain[r] = flushed_fma(vf_set1(b[r * b_row + at + 2 * j + odd]), a, s->chain[r]);
            }
        if ((at + 2 * n) % TILE == 0)
            end_lane_chain(many, s, at + 2 * n - 1);
    }
}

/* The sums of all terms, of which the last one has been added. Missing terms are zeros. */
INLINE void end_lane_sums(int many, struct lane_sums *s) {
    UNROLLED(r, many)
        s->sum[r] = flushed_sum(s->sum[r], flushed_sum(s->first[r], s->chain[r]));
}
/* The same outside of products_begin and products_end. */
INLINE void finish_lane_sums(int many, struct lane_sums *s) {
    products_begin();
    keep_lane_sums(many, s); /* the compiler may not add before the mode is set */
    end_lane_sums(many, s);
    keep_lane_sums(many, s);
    products_end();
}
