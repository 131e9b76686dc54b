/* rows.inc.h -- the row path: up to CATTN_FEW_ROWS queries while keys and values stream by. Decoding, and tiny inputs.
 *
 * For the scores lanes run across keys: LANES rows of K are transposed in registers, LANES columns at a time, and every
 * query takes its chains of FMAs over d from there. For the output lanes run across the columns of V. Rows are padded
 * to 1, 2, 4 or 8 so that all accumulators live in registers.
 */

/* keys of a block are visited in steps of this, so that every table leaves the same elements defined */
#define ROW_STEP 16
/* chains of P V side by side: as many as leave registers for the operands; their sums may lie in memory */
#define VALUE_ACCS (MR >= 12 ? 16 : 8)
/* So many rows ahead K and V are asked for: first a whole run of V, whose rows are passed several times, a few columns
 * at a time; at last a tile of K. */
#define ROWS_FAR CATTN_RUN_KEYS
#define ROWS_MIDWAY (CATTN_RUN_KEYS / 2)
#define ROWS_NEAR ROW_STEP

static void pack_query_rows(struct cattn_rows *rows) {
    const int64_t depth = rows->head_dim;
    const real scale = (real)rows->scale;
    real *packed = rows->packed_query;
    for (int r = 0; r < CATTN_FEW_ROWS; r++, packed += depth) {
        const real *query = r < rows->n_rows ? rows->query[r] : NULL;
        int64_t col = rows->query_col;
        if (query && rows->storage != CATTN_STORED_PLAIN) {
            widen_row(rows->storage, query, col, depth, packed);
            query = packed;
            col = 1;
        }
        for (int64_t d = 0; d < depth; d++)
            packed[d] = query ? query[d * col] * scale : 0;
    }
}

/* Rows of keys or values, unit stride: where they lie, in whatever storage, or copied. A constant `storage`, once
 * everything is inlined. */
struct stored {
    enum cattn_storage storage;
    const void *first;
    int64_t row;
};

INLINE vf load_row(struct stored from, int64_t r, int64_t c, int n) {
    return load_stored(from.storage, from.first, r * from.row + c, 1, n);
}

/* Rows that will be read, asked for a line after the other as they lie in memory, whatever columns of them a tile or a
 * pass takes. */
struct rows_ahead {
    uintptr_t line, end; /* of a row that is read now: the next line, and where the row ends */
    int64_t row, gap;    /* bytes from row to row, and from its end to the next one */
};

INLINE struct rows_ahead rows_ahead(struct stored from, int64_t n_cols) {
    const int64_t size = (int64_t)stored_size(from.storage), row = from.row * size, cols = n_cols * size;
    const uintptr_t first = (uintptr_t)from.first;
    /* without gaps it is one long row */
    return (struct rows_ahead){first, row == cols ? UINTPTR_MAX : first + (uintptr_t)cols, row, row - cols};
}

INLINE void ask_for_line(uintptr_t line, int64_t row) {
    prefetch_thrice(line, ROWS_FAR * row, ROWS_MIDWAY * row, ROWS_NEAR * row, 1);
}

/* Asks for the next n bytes: whole lines, or less than one. A row that begins within a line ends in one more. */
INLINE void ask_ahead(struct rows_ahead *next, size_t n) {
#pragma GCC unroll 16
    for (size_t asked = 0; asked < n; asked += LINE_BYTES) {
        ask_for_line(next->line, next->row);
        next->line += n < LINE_BYTES ? n : LINE_BYTES;
        if (__builtin_expect(next->line >= next->end, 0)) {
            ask_for_line(next->end - 1, next->row);
            next->line = next->end + (uintptr_t)next->gap;
            next->end += (uintptr_t)next->row;
        }
    }
}

/* `direct` is the storage that the caller was made for: plain for copies too. */
INLINE struct stored find_rows(const struct cattn_rows *rows, enum cattn_storage direct, const void *base, int64_t row,
                               int64_t col, int64_t first_row, int n_rows, int64_t n_cols, void *scratch) {
    if (direct != CATTN_STORED_PLAIN)
        return (struct stored){direct, stored_at(direct, base, first_row * row), row};
    const struct source from = rows_of(rows->storage, base, row, col, first_row, n_rows, n_cols, scratch);
    return (struct stored){CATTN_STORED_PLAIN, from.first, from.row};
}

/* A tile of K, LANES keys by LANES columns from d on: kt[i] has column d + i of all keys. Addresses go from row to row:
 * computed beforehand, as the compiler would, they are more than there are registers for. */
INLINE void key_tile(struct stored key, int64_t d, vf kt[LANES]) {
    int64_t at = d;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++, at += key.row) {
        OPAQUE(at);
        kt[i] = load_stored(key.storage, key.first, at, 1, LANES);
    }
    vf_transpose(kt);
}

/* The same where only the first n keys and nd columns are there, others 0. A function of its own: its branches would
 * cost whole tiles their registers. */
NOINLINE void key_tile_part(struct stored key, int n, int64_t d, int nd, vf kt[LANES]) {
    for (int i = 0; i < LANES; i++)
        kt[i] = i < n ? load_row(key, i, d, nd) : vf_set1(0);
    vf_transpose(kt);
}

/* The columns d .. d+n-1 of a tile of K, a constant number of them, are the next terms of the chains of `many` rows. A
 * chain that ends with them is added to the scores. */
INLINE void score_columns(const struct cattn_rows *rows, int many, int64_t d, int n, const vf *kt,
                          vf chain[CATTN_FEW_ROWS], vf score[CATTN_FEW_ROWS]) {
    const int64_t depth = rows->head_dim;
    const real *query = rows->packed_query;
#pragma GCC unroll 16
    for (int i = 0; i < n; i++)
#pragma GCC unroll 8
        for (int r = 0; r < many; r++)
            chain[r] = vf_fma(vf_set1(query[r * depth + d + i]), kt[i], chain[r]);
    if ((d + n) % CATTN_CHAIN_TERMS != 0 && d + n != depth)
        return;
#pragma GCC unroll 8
    for (int r = 0; r < many; r++) {
        score[r] = score[r] + chain[r];
        chain[r] = vf_set1(0);
    }
}

/* Scores of LANES keys, the first n of them real, for `many` rows. */
INLINE void score_keys(const struct cattn_rows *rows, int many, struct stored key, int n, vf score[CATTN_FEW_ROWS]) {
    const int64_t depth = rows->head_dim;
    struct rows_ahead next = rows_ahead(key, depth);
    vf kt[LANES], chain[CATTN_FEW_ROWS];
    int64_t d = 0;
#pragma GCC unroll 8
    for (int r = 0; r < many; r++) {
        chain[r] = vf_set1(0);
        score[r] = vf_set1(depth > 0 ? (real)-0.0 : 0); /* -0 + x is x, also where x is -0 */
    }
    for (; n == LANES && d + LANES <= depth; d += LANES) {
        key_tile(key, d, kt);
        ask_ahead(&next, LANES * LANES * stored_size(key.storage));
        score_columns(rows, many, d, LANES, kt, chain, score);
    }
    for (; d < depth; d += LANES) {
        vf part[LANES];
        const int nd = (int)min64(LANES, depth - d);
        key_tile_part(key, n, d, nd, part);
        for (int i = 0; i < nd; i++)
            score_columns(rows, many, d + i, 1, part + i, chain, score);
    }
}

/* Out of line: it is long, and would be there once for each of the rows. */
NOINLINE vf mask_elements(const struct cattn_rows *rows, int r, int64_t key, int n, vf score) {
    return add_bias(score, element_bias(rows, r, key, n));
}

/* Caps, slopes and masks one vector of scores: keys k0+k .. of row r, n of them real. */
INLINE vf mask_keys(const struct cattn_rows *rows, int r, int64_t k0, int k, int n, vf score, vf index) {
    const vf neg_inf = vf_set1(NEG_INF);
    if (rows->softcap > 0)
        score = cap_score(score, rows->softcap);
    if (rows->has_slopes)
        score = slope_score(score, vf_set1((real)rows->slope[r]), vf_set1((real)(rows->position[r] - k0)),
                            index + vf_set1((real)k));
    if (!rows->fully_ranged)
        score = mask_elements(rows, r, k0 + k, n, score);
    const int lo = relative(rows->lo[r], k0), hi = relative(rows->hi[r], k0);
    if (lo <= k && k + LANES <= hi)
        return score;
    vf at = index + vf_set1((real)k);
    vm inside = vm_and(vf_lt(at, vf_set1((real)hi)), vm_not(vf_lt(at, vf_set1((real)lo))));
    return vf_select(inside, score, neg_inf);
}

/* Scores of the keys begin .. end-1 of the block, masked, -inf behind the last key; block maxima. */
INLINE void score_rows(struct cattn_rows *rows, enum cattn_storage direct, int many, int64_t k0, int n_keys, int begin,
                       int end) {
    real lane[LANES], *score = rows->score, *block_max = rows->block_max;
    for (int i = 0; i < LANES; i++)
        lane[i] = (real)i;
    const vf index = vf_loadu(lane), neg_inf = vf_set1(NEG_INF);
    vf max[CATTN_FEW_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < many; r++)
        max[r] = neg_inf;
    for (int k = begin; k < end; k += LANES) {
        const int n = (int)max64(0, min64(LANES, n_keys - k));
        vf acc[CATTN_FEW_ROWS];
        const struct stored key =
            find_rows(rows, direct, rows->key, rows->key_row, rows->key_col, k0 + k, n, rows->head_dim, rows->key_rows);
        score_keys(rows, many, key, n, acc);
#pragma GCC unroll 8
        for (int r = 0; r < many; r++) {
            vf s = neg_inf;
            if (n > 0 && r < rows->n_rows)
                s = mask_keys(rows, r, k0, k, n, acc[r], index);
            max[r] = vf_max(s, max[r]);
            vf_storeu(score + r * CATTN_BLOCK_KEYS + k, s);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < many; r++) {
        real lanes[LANES], best = NEG_INF;
        vf_storeu(lanes, max[r]);
        for (int i = 0; i < LANES; i++)
            best = lanes[i] > best ? lanes[i] : best;
        block_max[r] = best;
    }
}

/* One row of scores becomes exp(score - shift); returns the block's sum: eight chains by key index, one tree. */
static real softmax_keys(real *score, int begin, int end, real shift) {
    real chain[CATTN_SUM_CHAINS] = {0};
    for (int k = begin; k < end; k += LANES)
        vf_storeu(score + k, vf_exp(vf_loadu(score + k) - vf_set1(shift)));
    for (int k = begin; k < end; k += CATTN_SUM_CHAINS)
        for (int c = 0; c < CATTN_SUM_CHAINS; c++)
            chain[c] += score[k + c];
    return ((chain[0] + chain[4]) + (chain[2] + chain[6])) + ((chain[1] + chain[5]) + (chain[3] + chain[7]));
}

static void drop_keys(const struct cattn_rows *rows, int r, int64_t k0, real *score, int begin, int end) {
    const uint32_t *position = &rows->drop_position[r], *head = &rows->drop_head[r];
    uint32_t words[64];
    for (int run = begin / 64 * 64; run < end; run += 128) {
        philox_words(&rows->drop, (uint64_t)(k0 + run), *position, *head, words);
        for (int k = (int)max64(begin, run); k < min64(end, run + 128); k += LANES) {
            vm kept = philox_decide(&rows->drop, vu_digits(words, k - run), (uint64_t)(k0 + k), 1, position, head);
            vf_storeu(score + k, vf_select(kept, vf_loadu(score + k), vf_set1(0)));
        }
    }
}

/* The same from bits that were drawn beforehand. */
static void drop_keys_drop_bits(const struct cattn_rows *rows, int r, int64_t k0, real *score, int begin, int end) {
    for (int k = begin; k < end; k++)
        if (!key_kept(rows, r, k0 + k))
            score[k] = 0;
}

/* One vector of P V again, leaving out the keys that the row may not see: 0 * NaN must not betray them. `value` starts
 * at the run's first key; the vector has n columns from c on. */
static vf value_vector_visible(const struct cattn_rows *rows, int r, struct stored value, int64_t c, int n,
                               struct key_half run, int64_t k0) {
    vf block = vf_set1(0);
    for (int k = run.begin; k < run.end;) {
        vf chain = vf_set1(0);
        for (const int64_t end = chain_end(k, run.end); k < end; k++)
            if (key_visible(rows, r, k0 + k)) {
                vf w = vf_set1(((const real *)rows->score)[r * CATTN_BLOCK_KEYS + k]);
                chain = vf_fma(w, load_row(value, k - run.begin, c, n), chain);
            }
        block = block + chain;
    }
    return block;
}

/* P V of one run for `many` rows and `vectors` vectors of columns from c on; the last vector holds n columns. `value`
 * starts at the run's first key; factor is of each row. */
INLINE void value_rows(struct cattn_rows *rows, int many, int vectors, int n, struct stored value,
                       struct rows_ahead *next, struct key_half run, int64_t k0, int64_t c, const real *factor) {
    const real *score = rows->score;
    vf block[CATTN_FEW_ROWS][CATTN_FEW_ROWS], chain[CATTN_FEW_ROWS][CATTN_FEW_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < many; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            block[r][v] = vf_set1(0);
    for (int k = run.begin; k < run.end;) {
#pragma GCC unroll 8
        for (int r = 0; r < many; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                chain[r][v] = vf_set1(0);
        for (const int end = (int)chain_end(k, run.end); k < end; k++) {
            vf val[CATTN_FEW_ROWS];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                val[v] = load_row(value, k - run.begin, c + v * LANES, v == vectors - 1 ? n : LANES);
            ask_ahead(next, (size_t)((vectors - 1) * LANES + n) * stored_size(value.storage));
#pragma GCC unroll 8
            for (int r = 0; r < many; r++) {
                vf w = vf_set1(score[r * CATTN_BLOCK_KEYS + k]);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++)
                    chain[r][v] = vf_fma(w, val[v], chain[r][v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < many; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                block[r][v] = block[r][v] + chain[r][v];
    }
#pragma GCC unroll 8
    for (int r = 0; r < many; r++) {
        real *acc = (real *)rows->acc + r * rows->acc_cols + c;
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            if (__builtin_expect(vm_any(vm_not(finite_lanes(block[r][v]))), 0) && r < rows->n_rows)
                block[r][v] =
                    value_vector_visible(rows, r, value, c + v * LANES, v == vectors - 1 ? n : LANES, run, k0);
            fold_block(acc + v * LANES, vf_set1(factor[r]), block[r][v]);
        }
    }
}

/* All columns of V, as many vectors at a time as there are registers for. */
INLINE void value_columns(struct cattn_rows *rows, int many, struct stored value, struct key_half run, int64_t k0,
                          const real *factor) {
    int64_t c = 0, left = rows->d_v;
    struct rows_ahead next = rows_ahead(value, rows->d_v);
#define WHILE_FULL(vectors)                                                                                            \
    if (many * (vectors) <= VALUE_ACCS)                                                                                \
        for (; left >= (vectors) * LANES; c += (vectors) * LANES, left -= (vectors) * LANES)                           \
            value_rows(rows, many, vectors, LANES, value, &next, run, k0, c, factor);
    WHILE_FULL(8)
    WHILE_FULL(4)
    WHILE_FULL(2)
    WHILE_FULL(1)
#undef WHILE_FULL
    if (left > 0)
        value_rows(rows, many, 1, (int)left, value, &next, run, k0, c, factor);
}

/* Run by run: copies, where V cannot be read where it lies, stay in the nearest cache. */
INLINE void value_keys(struct cattn_rows *rows, enum cattn_storage direct, int many, int64_t k0, int begin, int end) {
    static const real ones[CATTN_FEW_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int i = 0; i < 2; i++) {
        const struct key_half run = run_of(i, begin, end);
        if (i > 0 && run_is_empty(run))
            break;
        const struct stored value = find_rows(rows, direct, rows->value, rows->value_row, rows->value_col,
                                              k0 + run.begin, run.end - run.begin, rows->d_v, rows->value_panel);
        value_columns(rows, many, value, run, k0, i == 0 ? rows->alpha : ones);
    }
}

INLINE void rows_block_many(struct cattn_rows *rows, enum cattn_storage direct, int many, int64_t k0, int n_keys,
                            int begin, int end) {
    real *score = rows->score, *row_sum = rows->row_sum, sum[CATTN_PAD] = {0};
    score_rows(rows, direct, many, k0, n_keys, begin, end);
    if (rows->has_weights)
        for (int r = 0; r < rows->n_rows; r++)
            for (int k = begin; k < min64(end, n_keys); k += LANES)
                store_strided((real *)rows->weights[r] + (k0 + k) * rows->weights_col, rows->weights_col,
                              with_one_nan(vf_loadu(score + r * CATTN_BLOCK_KEYS + k)), (int)min64(LANES, n_keys - k));
    for (int r = 0; r < many; r += LANES)
        update_max(rows, r);
    for (int r = 0; r < many; r++) {
        real *s = score + r * CATTN_BLOCK_KEYS;
        sum[r] = softmax_keys(s, begin, end, ((const real *)rows->block_max)[r]);
        if (r < rows->n_rows && rows->drop_bits[0])
            drop_keys_drop_bits(rows, r, k0, s, begin, (int)min64(end, n_keys));
        else if (r < rows->n_rows && rows->drop.enabled)
            drop_keys(rows, r, k0, s, begin, end);
    }
    for (int r = 0; r < many; r += LANES)
        vf_storeu(row_sum + r, vf_fma(vf_loadu(row_sum + r), vf_loadu((real *)rows->alpha + r), vf_loadu(sum + r)));
    if (rows->d_v)
        value_keys(rows, direct, many, k0, begin, (int)min64(end, n_keys));
}

/* The same with constants in place of `direct` and `many`. Each is a function of its own: all in one, they would be
 * given registers badly. */
typedef void rows_block_of(struct cattn_rows *rows, int64_t k0, int n_keys, int begin, int end);
#define ROWS_BLOCK(name, direct, many)                                                                                 \
    NOINLINE void name(struct cattn_rows *rows, int64_t k0, int n_keys, int begin, int end) {                          \
        rows_block_many(rows, direct, many, k0, n_keys, begin, end);                                                   \
    }
ROWS_BLOCK(rows_block_1, CATTN_STORED_PLAIN, 1)
ROWS_BLOCK(rows_block_2, CATTN_STORED_PLAIN, 2)
ROWS_BLOCK(rows_block_4, CATTN_STORED_PLAIN, 4)
ROWS_BLOCK(rows_block_8, CATTN_STORED_PLAIN, 8)
#ifdef HALVES_ARE_QUICK /* else it is better to convert once, to scratch */
ROWS_BLOCK(rows_block_f16_1, CATTN_STORED_F16, 1)
ROWS_BLOCK(rows_block_f16_4, CATTN_STORED_F16, 4)
ROWS_BLOCK(rows_block_f16_8, CATTN_STORED_F16, 8)
ROWS_BLOCK(rows_block_bf16_1, CATTN_STORED_BF16, 1)
ROWS_BLOCK(rows_block_bf16_4, CATTN_STORED_BF16, 4)
ROWS_BLOCK(rows_block_bf16_8, CATTN_STORED_BF16, 8)
#endif

static rows_block_of *find_rows_block(const struct cattn_rows *rows) {
    const int n = rows->n_rows;
#ifdef HALVES_ARE_QUICK
    const bool direct = rows->key_col == 1 && (rows->value_col == 1 || !rows->d_v);
    if (direct && rows->storage == CATTN_STORED_F16)
        return n == 1 ? rows_block_f16_1 : n <= 4 ? rows_block_f16_4 : rows_block_f16_8;
    if (direct && rows->storage == CATTN_STORED_BF16)
        return n == 1 ? rows_block_bf16_1 : n <= 4 ? rows_block_bf16_4 : rows_block_bf16_8;
#endif
    return n == 1 ? rows_block_1 : n == 2 ? rows_block_2 : n <= 4 ? rows_block_4 : rows_block_8;
}

static void rows_block(struct cattn_rows *rows, int64_t k0, int64_t k1) {
    int64_t lo = INT64_MAX, hi = 0;
    for (int r = 0; r < rows->n_rows; r++)
        if (rows->lo[r] < rows->hi[r]) {
            lo = min64(lo, rows->lo[r]);
            hi = max64(hi, rows->hi[r]);
        }
    const int n_keys = (int)(k1 - k0), begin = relative(lo, k0) / ROW_STEP * ROW_STEP;
    const int end = (int)round_up(relative(min64(hi, k1), k0), ROW_STEP);
    if (begin >= end)
        return;
    find_rows_block(rows)(rows, k0, n_keys, begin, end);
}
