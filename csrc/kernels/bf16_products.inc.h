/* bf16_products.inc.h -- products of pairs of bfloat16 with sums in float32, for the tables of TABLE_BITS 16.
 *
 * The tables of TABLE_BITS 17 share a part of it (bf16_units.inc.h, tile_units.inc.h).
 *
 * A lane holds a pair of bfloat16, the element with the even index in its low half. The one operation on pairs is the
 * instruction VDPBF16PS of x86: vf_pair_dot(a, b, c) adds the product of the odd elements to c, then the product of
 * the even ones, each as an FMA that is rounded to nearest even. Operands that are subnormal count as zeros of their
 * sign, and so do sums that are below 2^-126 after rounding to 24 bits. No floating-point mode changes that.
 *
 * Elsewhere the same bits come from two FMAs: in the processor's mode for subnormals, where it has the same rule, or
 * with sums that are tested one by one. The instruction for tiles, TDPBF16PS, has the same rules, in another order.
 */

#define LEAST_NORMAL 0x1p-126f

/* Zeros of the same sign where an element is subnormal. */
INLINE vf flushed(vf x) { return vf_select(vf_lt(vf_abs(x), vf_set1(LEAST_NORMAL)), x * vf_set1(0), x); }

#ifndef HAS_PAIR_DOT
#ifdef FLUSHES_BY_MODE

/* c + a * b, and a + b, in the mode that products_begin sets. */
INLINE vf flushed_fma(vf a, vf b, vf c) { return vf_fma(a, b, c); }
INLINE vf flushed_sum(vf a, vf b) { return a + b; }

#else

/* A sum just below the smallest normal number has been rounded up to it, with fewer than 24 bits, where the
 * instruction flushes it. In double the sum is exact enough to tell. */
NOINLINE vf flushed_edge(vf a, vf b, vf c, vf sum) {
    real as[LANES], bs[LANES], cs[LANES], sums[LANES];
    vf_storeu(as, a);
    vf_storeu(bs, b);
    vf_storeu(cs, c);
    vf_storeu(sums, sum);
    for (int i = 0; i < LANES; i++) {
        const double exact = (double)as[i] * (double)bs[i] + (double)cs[i];
        if (fabsf(sums[i]) == LEAST_NORMAL && fabs(exact) < 0x1p-126 - 0x1p-151)
            sums[i] *= 0;
    }
    return vf_loadu(sums);
}

/* c + a * b for a c that is flushed. */
INLINE vf flushed_fma(vf a, vf b, vf c) {
    a = flushed(a);
    b = flushed(b);
    const vf sum = flushed(vf_fma(a, b, c));
    if (__builtin_expect(vm_any(vf_eq(vf_abs(sum), vf_set1(LEAST_NORMAL))), 0))
        return flushed_edge(a, b, c, sum);
    return sum;
}

/* a + b for numbers that are flushed. A sum that is below 2^-126 is exact. */
INLINE vf flushed_sum(vf a, vf b) { return flushed(a + b); }

#endif

/* The elements of pairs with even (0) or odd indices (1). */
INLINE vf vf_half(vu pairs, int odd) { return vf_of_vu(odd ? vu_and(pairs, vu_set1(0xffff0000)) : vu_shl16(pairs)); }

/* A call in the tables for which its time does not count: inlined everywhere it takes a minute to compile. */
#ifdef QUICK_TO_COMPILE
#define INLINE_UNLESS_QUICK NOINLINE
#else
#define INLINE_UNLESS_QUICK INLINE
#endif
INLINE_UNLESS_QUICK vf vf_pair_dot(vu a, vu b, vf c) {
    return flushed_fma(vf_half(a, 0), vf_half(b, 0), flushed_fma(vf_half(a, 1), vf_half(b, 1), c));
}
#endif

/* Between products_begin and products_end the processor flushes subnormals. Put only products and roundings to bfloat16
 * there. The compiler may move other arithmetic across these calls, so pass each sum through keep_sum before
 * products_end. */
#if defined(FLUSHES_BY_MODE) && !defined(HAS_PAIR_DOT)
#define FLUSHING_MODE (CATTN_FP_DEFAULT | 0x8040u) /* with FTZ and DAZ */
INLINE void products_begin(void) {
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(FLUSHING_MODE);
    __asm__ volatile("" ::: "memory");
}
INLINE void keep_sum(vf *sum) { __asm__ volatile("" : "+x"(*sum)); }
INLINE void products_end(void) {
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(CATTN_FP_DEFAULT);
    __asm__ volatile("" ::: "memory");
}
#else
INLINE void products_begin(void) {}
INLINE void keep_sum(vf *sum) { (void)sum; }
INLINE void products_end(void) {}
#endif

/* Pairs of elements that are bfloat16 already. */
INLINE vu joined(vf even, vf odd) { return vu_xor(vu_shr16(vu_of_vf(even)), vu_of_vf(odd)); }

/* Whether the processor and the compiler keep this arithmetic; as keeps_arithmetic. */
static bool keeps_pair_arithmetic(void) {
    static const volatile float operands[] = {1, 0x1p24f, 0x1p-100f, 0x1p-133f};
    const vf one = vf_set1(operands[0]), large = vf_set1(operands[1]), small = vf_set1(operands[2]);
    const vu ones = joined(one, one), tiny = joined(vf_set1(operands[3]), vf_set1(0));
    products_begin();
    vf rounded_twice = vf_pair_dot(ones, ones, large);         /* not 2^24 + 2 */
    vf odd_first = vf_pair_dot(joined(one, large), ones, one); /* not 2^24 + 2 */
    vf flushed_total = vf_pair_dot(joined(small, small), joined(small, vf_set1(0)), vf_set1(0));
    vf flushed_element = vf_pair_dot(tiny, joined(large, large), vf_set1(0));
    keep_sum(&rounded_twice);
    keep_sum(&odd_first);
    keep_sum(&flushed_total);
    keep_sum(&flushed_element);
    products_end();
    return keeps_arithmetic() && lanes_are(rounded_twice, 0x1p24f) && lanes_are(odd_first, 0x1p24f) &&
           lanes_are(flushed_total, 0) && lanes_are(flushed_element, 0);
}

/* Pairs are consecutive bfloat16 in memory. */
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
INLINE vu swapped(vu pairs) { return vu_xor(vu_shl16(pairs), vu_shr16(pairs)); }
INLINE uint32_t swapped_pair(uint32_t pair) { return pair << 16 | pair >> 16; }
#else
INLINE vu swapped(vu pairs) { return pairs; }
INLINE uint32_t swapped_pair(uint32_t pair) { return pair; }
#endif
INLINE uint32_t load_pair(const uint16_t *p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    return swapped_pair(pair);
}
INLINE vu load_pair_vector(const uint16_t *p) {
    vf pairs; /* an array would be copied in parts, and loads of a vector that was stored in parts are slow */
    memcpy(&pairs, p, sizeof pairs);
    return swapped(vu_of_vf(pairs));
}
INLINE void store_pairs(uint16_t *p, vu pairs) {
    const vf stored = vf_of_vu(swapped(pairs));
    memcpy(p, &stored, sizeof stored);
}

/* Rounding to bfloat16, to nearest even. Subnormal elements become zeros first, as the conversions of x86 have it. */
#ifdef HAS_BF16_ROUNDING
INLINE vf rounded_bf16(vf v) { return vf_from_bf16(vh_rounded(v)); }
#else
INLINE vf rounded_bf16(vf v) {
    const vu w = vu_of_vf(with_one_nan(flushed(v)));
    const vu half = vu_add(vu_and(vu_shr16(w), vu_set1(1)), vu_set1(0x7fff));
    return vf_of_vu(vu_and(vu_add(w, half), vu_set1(0xffff0000)));
}
INLINE vh vh_rounded(vf v) { return vh_bf16(with_one_nan(flushed(v))); }
INLINE vu vf_paired(vf even, vf odd) { return joined(rounded_bf16(even), rounded_bf16(odd)); }
INLINE vu vu_rounded(vf low, vf high) { return swapped(vu_joined(vh_rounded(low), vh_rounded(high))); }
#endif

/* n <= LANES elements, rounded. */
INLINE void store_rounded(uint16_t *to, vf v, int n) {
    if (n == LANES)
        vh_storeu(to, vh_rounded(v));
    else
        vh_storeu_n(to, vh_rounded(v), n);
}

/* n elements from index i on, rounded, to consecutive bfloat16. */
INLINE void round_to_from(enum cattn_storage storage, const void *base, int64_t i, int64_t stride, int64_t n,
                          uint16_t *to) {
    int64_t k = 0;
#ifdef HAS_BF16_ROUNDING
    for (; storage == CATTN_STORED_PLAIN && stride == 1 && k + 2 * LANES <= n; k += 2 * LANES)
        store_pairs(to + k,
                    vu_rounded(vf_loadu((const real *)base + i + k), vf_loadu((const real *)base + i + k + LANES)));
#endif
    for (; stride == 1 && k + LANES <= n; k += LANES)
        store_rounded(to + k, load_stored(storage, base, i + k, 1, LANES), LANES);
    for (; k < n; k += LANES) {
        const int left = (int)min64(LANES, n - k);
        store_rounded(to + k, load_stored(storage, base, i + k * stride, stride, left), left);
    }
}

/* round_to_from, with the constants of the common case. */
static void round_to(enum cattn_storage storage, const void *base, int64_t i, int64_t stride, int64_t n, uint16_t *to) {
    if (storage == CATTN_STORED_PLAIN && stride == 1)
        round_to_from(CATTN_STORED_PLAIN, base, i, 1, n, to);
    else
        round_to_from(storage, base, i, stride, n, to);
}

/* The elements of row r of a matrix, rounded, to consecutive bfloat16. */
INLINE void round_row_to(const struct cattn_matrix *matrix, int64_t r, int64_t n_cols, uint16_t *to) {
    if (!cattn_is_quantized(matrix->storage)) {
        round_to(matrix->storage, matrix->first, r * matrix->row, matrix->col, n_cols, to);
        return;
    }
    for (int64_t c = 0; c < n_cols; c += LANES) {
        const int n = (int)min64(LANES, n_cols - c);
        store_rounded(to + c, load_columns(matrix, r, c, n), n);
    }
}

/* LANES pairs: n <= 2 * LANES elements from index i on, rounded; the other ones are 0. */
INLINE vu load_pairs(enum cattn_storage storage, const void *base, int64_t i, int64_t stride, int n) {
    uint16_t halves[2 * LANES] = {0};
    if (storage == CATTN_STORED_PLAIN && stride == 1 && n == 2 * LANES)
        return vu_rounded(vf_loadu((const real *)base + i), vf_loadu((const real *)base + i + LANES));
    if (storage == CATTN_STORED_BF16 && stride == 1 && n == 2 * LANES)
        return load_pair_vector((const uint16_t *)base + i);
    if (storage == CATTN_STORED_BF16 && stride == 1)
        memcpy(halves, (const uint16_t *)base + i, (size_t)n * sizeof *halves);
    else
        round_to(storage, base, i, stride, n, halves);
    return load_pair_vector(halves);
}

INLINE int64_t pairs_of(int64_t n) { return (n + 1) / 2; }

INLINE void clear_tile(int mr, int nr, vf sum[MR][WIDEST]) {
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            sum[m][n] = vf_set1(0);
}

INLINE void keep_tile(int mr, int nr, vf sum[MR][WIDEST]) {
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            keep_sum(&sum[m][n]);
}

/* One vector of values of row k from column c on; `storage` is a constant in the common cases. */
INLINE vf values_at(const struct cattn_matrix *value, enum cattn_storage storage, int64_t k, int64_t c, int n) {
    if (storage == CATTN_STORED_BF16)
        return load_half(storage, (const uint16_t *)value->first + k * value->row + c, 1, n);
    if (storage == CATTN_STORED_PLAIN)
        return load_strided((const real *)value->first + k * value->row + c, 1, n);
    return load_columns(value, k, c, n);
}
/* A pair of rows of such vectors. */
INLINE vu paired_values(enum cattn_storage storage, vf even, vf odd) {
    return storage == CATTN_STORED_BF16 ? joined(even, odd) : vf_paired(even, odd);
}
/* What values_at takes for the matrix. */
INLINE enum cattn_storage direct_storage(const struct cattn_matrix *matrix) {
    if (matrix->col == 1 && (matrix->storage == CATTN_STORED_BF16 || matrix->storage == CATTN_STORED_PLAIN))
        return matrix->storage;
    return CATTN_STORED_F8; /* this stands for all other storages and strides */
}

#ifndef BF16_TILES

static void pack_keys(const struct cattn_matrix *key, int64_t begin, int64_t end, int64_t n_cols, uint16_t *to) {
    for (int64_t r = begin; r < end; r++)
        round_row_to(key, r, n_cols, to + r * n_cols);
}
static void pack_values(const struct cattn_matrix *value, int64_t begin, int64_t end, int64_t n_cols, uint16_t *to) {
    pack_keys(value, begin, end, n_cols, to);
}

/* ---- the tile path: queries, weights and values are packed as pairs, keys are read where they are if they can ---- */

/* Adds n pairs to the sums of a micro-tile; as micro_tile, with strides in bfloat16. */
INLINE void add_pairs(int mr, int nr, int64_t n, const uint16_t *a, int64_t a_row, int64_t a_col, const uint16_t *b,
                      int64_t b_row, vf sum[MR][WIDEST]) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < n; k++) {
        vu b_k[NR];
        UNROLLED(i, nr)
            b_k[i] = load_pair_vector(b + k * b_row + 2 * i * LANES);
        UNROLLED(m, mr) {
            const vu a_mk = vu_set1(load_pair(a + m * a_row + k * a_col));
            UNROLLED(i, nr)
                sum[m][i] = vf_pair_dot(a_mk, b_k[i], sum[m][i]);
        }
    }
}

/* The sums of n pairs. */
INLINE void micro_tile(int mr, int nr, int64_t n, const uint16_t *a, int64_t a_row, int64_t a_col, const uint16_t *b,
                       int64_t b_row, vf sum[MR][WIDEST]) {
    clear_tile(mr, nr, sum);
    products_begin();
    add_pairs(mr, nr, n, a, a_row, a_col, b, b_row, sum);
    keep_tile(mr, nr, sum);
    products_end();
}

/* Packs Q^T: panels [pairs of columns][PANEL]. The last vector's lanes after the last row are 0. */
static void pack_query_tile(struct cattn_rows *rows) {
    const int64_t depth = rows->call.head_dim, n_pairs = pairs_of(depth), col = rows->call.query_col;
    for (int r0 = 0; r0 < rows->n_rows; r0 += LANES) {
        uint16_t *panel = (uint16_t *)rows->scratch.packed_query + 2 * (r0 / PANEL * n_pairs * PANEL + r0 % PANEL);
        for (int64_t p = 0; p < n_pairs; p += LANES) {
            const int n = (int)min64(2 * LANES, depth - 2 * p);
            vf v[LANES];
            for (int i = 0; i < LANES; i++)
                v[i] = r0 + i < rows->n_rows
                           ? vf_of_vu(load_pairs(rows->call.storage, rows->query[r0 + i], 2 * p * col, col, n))
                           : vf_set1(0);
            vf_transpose(v);
            for (int i = 0; i < min64(LANES, n_pairs - p); i++)
                store_pairs(panel + 2 * (p + i) * PANEL, vu_of_vf(v[i]));
        }
    }
}

/* The visible keys of the block, as rows of whole pairs, indexed by the key relative to its first one. */
static struct source keys_of_block(const struct cattn_rows *rows, int64_t k0, int begin, int end) {
    const struct cattn_matrix key = rows_from(rows->key, k0);
    const int64_t depth = rows->call.head_dim, padded = 2 * pairs_of(depth);
    if (key.storage == CATTN_STORED_BF16 && key.col == 1 && padded == depth)
        return (struct source){key.first, key.row};
    uint16_t *copy = rows->scratch.block_copy;
    for (int k = begin; k < end; k++) {
        if (padded > depth)
            copy[(k + 1) * padded - 1] = 0;
        round_row_to(&key, k, depth, copy + k * padded);
    }
    return (struct source){copy, padded};
}

/* The values of the keys begin .. end-1: pair j of keys has a row with a pair for each column, in whole panels. */
INLINE void pair_values(const struct cattn_matrix *value, enum cattn_storage storage, int begin, int end, int64_t d_v,
                        uint16_t *to, int64_t to_row) {
    for (int k = begin; k < end; k += 2) {
        uint16_t *pair = to + k / 2 * to_row;
        int64_t c = 0;
        for (; k + 1 < end && c + LANES <= d_v; c += LANES)
            store_pairs(pair + 2 * c, paired_values(storage, values_at(value, storage, k, c, LANES),
                                                    values_at(value, storage, k + 1, c, LANES)));
        for (; c < d_v; c += LANES) {
            const int n = (int)min64(LANES, d_v - c);
            const vf odd = k + 1 < end ? values_at(value, storage, k + 1, c, n) : vf_set1(0);
            store_pairs(pair + 2 * c, paired_values(storage, values_at(value, storage, k, c, n), odd));
        }
        for (; c % PANEL != 0; c += LANES)
            store_pairs(pair + 2 * c, vu_set1(0));
    }
}

/* The visible values of the block, as pairs of keys. */
static struct source values_of_block(const struct cattn_rows *rows, int64_t k0, int begin, int end) {
    const struct cattn_matrix value = rows_from(rows->value, k0);
    const int64_t d_v = rows->call.d_v, row = 2 * rows->call.acc_cols;
    uint16_t *copy = rows->scratch.block_copy;
    if (value.col == 1 && value.storage == CATTN_STORED_BF16)
        pair_values(&value, CATTN_STORED_BF16, begin, end, d_v, copy, row);
    else if (value.col == 1 && value.storage == CATTN_STORED_PLAIN)
        pair_values(&value, CATTN_STORED_PLAIN, begin, end, d_v, copy, row);
    else /* this stands for all other storages and strides */
        pair_values(&value, CATTN_STORED_F8, begin, end, d_v, copy, row);
    return (struct source){copy, row};
}

/* `height` keys of the block from k on: in their place, or past the last key a copy padded with rows of zeros. */
static struct source key_rows(const struct cattn_rows *rows, struct source key, int k, int height, int n_keys) {
    const int64_t padded = 2 * pairs_of(rows->call.head_dim);
    const struct source from = {key.first + k * key.row, key.row};
    if (k + height <= n_keys)
        return from;
    uint16_t *copy = rows->scratch.key_copy;
    for (int m = 0; m < height; m++)
        for (int64_t d = 0; d < padded; d++)
            copy[m * padded + d] = k + m < n_keys ? from.first[m * from.row + d] : 0;
    return (struct source){copy, padded};
}

/* Scaled scores of mr keys and nr vectors of queries from vector v on. Adding 0 turns -0 into +0. */
INLINE void score_products(int mr, int nr, const struct cattn_rows *rows, int v, struct source key,
                           vf score[MR][WIDEST]) {
    const int64_t n_pairs = pairs_of(rows->call.head_dim);
    const vf scale = vf_set1((real)rows->call.score_options.scale);
    const uint16_t *query = rows->scratch.packed_query;
    micro_tile(mr, nr, n_pairs, key.first, key.row, 2, query + 2 * (v / NR * n_pairs * PANEL + v % NR * LANES),
               2 * PANEL, score);
    UNROLLED(m, mr)
        UNROLLED(n, nr)
            score[m][n] = vf_fma(score[m][n], scale, vf_set1(0));
}

/* P V of the keys begin .. end-1, which are whole pairs, without the chains that are missing. */
INLINE void value_products(int mr, int nr, const struct cattn_rows *rows, unsigned chains, int r, struct key_half keys,
                           struct source value, vf sum[MR][WIDEST]) {
    const int64_t row = 2 * CATTN_TILE_ROWS;
    const uint16_t *weights = (const uint16_t *)rows->scratch.score + 2 * r;
    clear_tile(mr, nr, sum);
    products_begin();
    if (chains == ALL_CHAINS)
        add_pairs(mr, nr, (keys.end - keys.begin) / 2, weights + keys.begin / 2 * row, 2, row, value.first, value.row,
                  sum);
    for (int64_t k = keys.begin, next; chains != ALL_CHAINS && k < keys.end; k = next) {
        next = chain_end(k, keys.end);
        if (has_chain(chains, k))
            add_pairs(mr, nr, (next - k) / 2, weights + k / 2 * row, 2, row,
                      value.first + (k - keys.begin) / 2 * value.row, value.row, sum);
    }
    keep_tile(mr, nr, sum);
    products_end();
}

/* Computes one vector of P V again without the row's hidden keys: 0 * NaN must not leak their values. The vector has n
 * columns from c on. The weights of a pair of keys are weight_row apart. */
static vf value_vector_visible(const struct cattn_rows *rows, int r, int64_t c, int n, struct key_half keys, int64_t k0,
                               const uint16_t *weights, int64_t weight_row) {
    const struct cattn_matrix value = rows_from(rows->value, k0);
    vf sum = vf_set1(0);
    for (int k = keys.begin; k < keys.end; k += 2) {
        vf element[2] = {vf_set1(0), vf_set1(0)};
        uint16_t weight[2] = {0, 0};
        for (int i = 0; i < 2 && k + i < keys.end; i++)
            if (key_visible(rows, r, k0 + k + i)) {
                element[i] = load_columns(&value, k + i, c, n);
                weight[i] = weights[k / 2 * weight_row + i];
            }
        const vu pairs = vf_paired(element[0], element[1]), w = vu_set1(load_pair(weight));
        products_begin();
        sum = vf_pair_dot(w, pairs, sum);
        keep_sum(&sum);
        products_end();
    }
    return sum;
}

/* ---- the row path ---- */

/* Rows of whole pairs. */
static void pack_query_rows(struct cattn_rows *rows) {
    const int64_t depth = rows->call.head_dim, padded = 2 * pairs_of(depth);
    uint16_t *packed = rows->scratch.packed_query;
    memset(packed, 0, (size_t)(CATTN_FEW_ROWS * padded) * sizeof *packed);
    for (int r = 0; r < rows->n_rows; r++)
        round_to(rows->call.storage, rows->query[r], 0, rows->call.query_col, depth, packed + r * padded);
}

#endif

/* LANES keys, of which n exist, by LANES pairs of columns from d on: kt[i] holds the i-th pair of all keys. */
INLINE void key_pairs(const struct cattn_matrix *key, int n, int64_t d, int n_cols, vf kt[LANES]) {
    int64_t at = d;
    const bool whole = n == LANES && n_cols == 2 * LANES && LANES > 1;
    if (whole && (key->storage == CATTN_STORED_BF16 || key->storage == CATTN_STORED_PLAIN)) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++, at += key->row) {
            OPAQUE(at);
            kt[i] = vf_of_vu(load_pairs(key->storage, key->first, at, 1, 2 * LANES));
        }
    } else {
        for (int i = 0; i < LANES; i++, at += key->row)
            kt[i] = i < n ? vf_of_vu(load_pairs(key->storage, key->first, at, 1, n_cols)) : vf_set1(0);
    }
    vf_transpose(kt);
}
