/* rows.inc.h -- the row path: up to CATTN_FEW_ROWS queries while keys and values stream by.
 *
 * It serves decoding and tiny inputs. row_scores.inc.h has its products of queries and keys.
 *
 * For the output, lanes are the columns of V. The number of rows is padded to 1, 2, 4 or 8, so that all accumulators
 * stay in registers.
 */

/* Chains of P V in flight: as many as leave registers for the operands. Their sums may be spilled to memory. */
#define VALUE_ACCS (REGISTERS / 2)

/* Rows in the table's own type with unit stride. */
INLINE struct cattn_matrix plain_rows(struct source from) {
    return (struct cattn_matrix){.storage = CATTN_STORED_PLAIN, .first = from.first, .row = from.row, .col = 1};
}

/* n_rows rows of K or V from first_row on, with unit stride. `direct` is the storage that the caller is specialised
 * for, a constant after inlining. PLAIN callers also get other storages and strides: as a copy in `scratch`. */
INLINE struct cattn_matrix find_rows(const struct cattn_matrix *matrix, enum cattn_storage direct, int64_t first_row,
                                     int n_rows, int64_t n_cols, void *scratch) {
    struct cattn_matrix from = *matrix;
    if (direct != CATTN_STORED_PLAIN) {
        from.storage = direct;
        from.col = 1;
        return rows_from(from, first_row);
    }
    from = rows_from(from, first_row);
    return plain_rows(rows_of(&from, n_rows, n_cols, scratch));
}

/* Not inlined: it is long and would be repeated for each row of the unrolled loop. */
NOINLINE vf mask_elements(const struct cattn_rows *rows, int r, int64_t key, int n, vf score) {
    return add_bias(score, element_bias(rows, r, key, n));
}

/* Applies softcap, slope and masks to one vector of scores: keys k0+k .. of row r, of which n exist. */
INLINE vf mask_keys(const struct cattn_rows *rows, int r, int64_t k0, int k, int n, vf score, vf index) {
    const vf neg_inf = vf_set1(NEG_INF);
    if (changes_scores(&rows->call.score_options))
        score = change_score(score, &rows->call.score_options);
    if (rows->call.has_slopes)
        score = slope_score(score, vf_set1((real)rows->per_row->slope[r]),
                            vf_set1((real)(rows->per_row->position[r] - k0)), index + vf_set1((real)k));
    if (!rows->call.fully_ranged || has_chain(rows->masked_chains, k))
        score = mask_elements(rows, r, k0 + k, n, score);
    /* most vectors are inside the range, which saves the comparison of lanes */
    const int lo = relative(rows->per_row->lo[r], k0), hi = relative(rows->per_row->hi[r], k0);
    if (lo <= k && k + LANES <= hi)
        return score;
    vf at = index + vf_set1((real)k);
    vm inside = vm_and(vf_lt(at, vf_set1((real)hi)), vm_not(vf_lt(at, vf_set1((real)lo))));
    return vf_select(inside, score, neg_inf);
}

/* Scores of the keys begin .. end-1 of the block, without masks, where some row sees them; and their maxima. */
INLINE void score_rows(struct cattn_rows *rows, enum cattn_storage direct, int many, int64_t k0, int n_keys, int begin,
                       int end) {
    real *score = rows->scratch.score, *block_max = rows->scratch.block_max;
    vf max[CATTN_FEW_ROWS];
    UNROLLED(r, many)
        max[r] = vf_set1(NEG_INF);
    for (int k = begin; k < min64(end, n_keys); k += LANES) {
        const int n = (int)min64(LANES, n_keys - k);
        vf acc[CATTN_FEW_ROWS];
        if (!has_chain(rows->seen_chains, k))
            continue;
        const struct cattn_matrix key =
            find_rows(&rows->key, direct, k0 + k, n, rows->call.head_dim, rows->scratch.key_copy);
        score_keys(rows, many, &key, n, acc);
        UNROLLED(r, many) {
            max[r] = vf_max(acc[r], max[r]);
            vf_storeu(score + r * CATTN_BLOCK_KEYS + k, acc[r]);
        }
    }
    UNROLLED(r, many)
        block_max[r] = largest_lane(max[r]);
}

/* Whether mask_row would change no score of row r. */
INLINE bool is_plain_row(const struct cattn_rows *rows, int r, int64_t k0, int n_keys, int begin, int end) {
    return rows->call.fully_ranged && rows->seen_chains == ALL_CHAINS && !rows->masked_chains &&
           !rows->call.has_slopes && !changes_scores(&rows->call.score_options) && r < rows->n_rows && end <= n_keys &&
           relative(rows->per_row->lo[r], k0) <= begin && relative(rows->per_row->hi[r], k0) >= end;
}

/* Applies the masks to the scores of row r: -inf also after the last key. Returns the largest. */
INLINE real mask_row(const struct cattn_rows *rows, int r, int64_t k0, int n_keys, int begin, int end, vf index) {
    real *score = (real *)rows->scratch.score + r * CATTN_BLOCK_KEYS;
    vf max = vf_set1(NEG_INF);
    for (int k = begin; k < end; k += LANES) {
        const int n = (int)min64(LANES, n_keys - k);
        vf s = vf_set1(NEG_INF);
        if (n > 0 && r < rows->n_rows && has_chain(rows->seen_chains, k))
            s = mask_keys(rows, r, k0, k, n, vf_loadu(score + k), index);
        max = vf_max(s, max);
        vf_storeu(score + k, s);
    }
    return largest_lane(max);
}

/* Replaces one row of scores by exp(score - shift). Returns the block's sum: 8 chains by key index, then the tree. */
static real softmax_keys(real *score, int begin, int end, real shift) {
    real chain[CATTN_SUM_CHAINS] = {0};
    for (int k = begin; k < end; k += LANES)
        vf_storeu(score + k, vf_exp(vf_loadu(score + k) - vf_set1(shift)));
    for (int k = begin; k < end; k += CATTN_SUM_CHAINS)
        for (int c = 0; c < CATTN_SUM_CHAINS; c++)
            chain[c] += score[k + c];
    return SUM_TREE(chain);
}

/* Dropped weights become +0. One call of philox_words serves 128 keys. */
static void drop_keys(const struct cattn_rows *rows, int r, int64_t k0, real *score, int begin, int end) {
    const uint32_t *position = &rows->per_row->drop_position[r], *head = &rows->per_row->drop_head[r];
    uint32_t words[64];
    for (int run = begin / 64 * 64; run < end; run += 128) {
        philox_words(&rows->drop, (uint64_t)(k0 + run), *position, *head, words);
        for (int k = (int)max64(begin, run); k < min64(end, run + 128); k += LANES) {
            vm drop_bits = philox_decide(&rows->drop, vu_digits(words, k - run), (uint64_t)(k0 + k), 1, position, head);
            vf_storeu(score + k, vf_select(drop_bits, vf_loadu(score + k), vf_set1(0)));
        }
    }
}

/* drop_keys with the bits of a serial stream. */
static void drop_keys_by_stream(const struct cattn_rows *rows, int r, int64_t k0, real *score, int begin, int end) {
    for (int k = begin; k < end; k++)
        if (!key_drop_bit(rows, r, k0 + k))
            score[k] = 0;
}

/* Makes the weights of one row small, for a second attempt. */
static void shrink_keys(real *score, int begin, int end) {
    for (int k = begin; k < end; k += LANES)
        vf_storeu(score + k, small_weight(vf_loadu(score + k)));
}

#ifdef BF16_TILES

/* A vector of n values, rounded. */
INLINE vf rounded_values(const struct cattn_matrix *value, int64_t at, int n) {
    const vf v = load_stored(value->storage, value->first, at, 1, n);
    return value->storage == CATTN_STORED_BF16 ? v : rounded_bf16(v);
}

/* The weight of a key, which is bfloat16. */
INLINE vf weight_at(const uint16_t *weights, int64_t k) { return vf_set1(from_bits((uint32_t)weights[k] << 16)); }

/* Computes one vector of P V again without the row's hidden keys: 0 * NaN must not leak their values. */
static vf value_vector_visible(const struct cattn_rows *rows, int r, int64_t c, int n, struct key_half keys, int64_t k0,
                               const uint16_t *weights) {
    const struct cattn_matrix value = rows_from(rows->value, k0);
    struct lane_sums s;
    begin_lane_sums(1, &s);
    for (int k = keys.begin, end; k < keys.end; k = end) {
        end = (int)chain_end(k, keys.end);
        for (int i = k; i < end; i++)
            if (key_visible(rows, r, k0 + i)) {
                const vf v = rounded_bf16(load_columns(&value, i, c, n));
                products_begin();
                s.chain[0] = flushed_fma(weight_at(weights, i), v, s.chain[0]);
                keep_lane_sums(1, &s);
                products_end();
            }
        products_begin();
        keep_lane_sums(1, &s); /* the compiler may not add before the mode is set */
        end_lane_chain(1, &s, end - 1);
        keep_lane_sums(1, &s);
        products_end();
    }
    finish_lane_sums(1, &s);
    return s.sum[0];
}

/* P V of one half of a block for `many` rows and `vectors` vectors of columns from c on; the last vector holds n
 * columns. `value` starts at keys.begin. factor[r] corrects what row r has accumulated so far. */
INLINE void value_rows(struct cattn_rows *rows, int many, int vectors, int n, const struct cattn_matrix *value,
                       struct rows_ahead *next, struct key_half keys, int64_t k0, int64_t c, const real *factor) {
    const uint16_t *weights = rows->scratch.score;
    struct lane_sums s[CATTN_FEW_ROWS];
    UNROLLED(v, vectors)
        begin_lane_sums(many, &s[v]);
    products_begin();
    for (int k = keys.begin, end; k < keys.end; k = end) {
        end = (int)chain_end(k, keys.end);
        for (int i = k; i < end && has_chain(rows->seen_chains, k); i++) {
            int64_t at = c + (i - keys.begin) * value->row;
            vf val[CATTN_FEW_ROWS];
            OPAQUE(at);
            UNROLLED(v, vectors)
                val[v] = rounded_values(value, at + v * LANES, v == vectors - 1 ? n : LANES);
            prefetch_ahead(next, (size_t)((vectors - 1) * LANES + n) * stored_size(value->storage));
            UNROLLED(r, many) {
                const vf w = weight_at(weights + 2 * r * CATTN_BLOCK_KEYS, i);
                UNROLLED(v, vectors)
                    s[v].chain[r] = flushed_fma(w, val[v], s[v].chain[r]);
            }
        }
        UNROLLED(v, vectors)
            end_lane_chain(many, &s[v], end - 1);
    }
    UNROLLED(v, vectors) {
        end_lane_sums(many, &s[v]);
        keep_lane_sums(many, &s[v]);
    }
    products_end();
    UNROLLED(r, many) {
        real *acc = (real *)rows->scratch.acc + r * rows->call.acc_cols + c;
        UNROLLED(v, vectors) {
            if (__builtin_expect(vm_any(vm_not(finite_lanes(s[v].sum[r]))), 0) && r < rows->n_rows)
                s[v].sum[r] = value_vector_visible(rows, r, c + v * LANES, v == vectors - 1 ? n : LANES, keys, k0,
                                                   weights + 2 * r * CATTN_BLOCK_KEYS);
            fold_block(acc + v * LANES, vf_set1(factor[r]), s[v].sum[r]);
        }
    }
}

#elif defined(BF16_PRODUCTS)

/* P V of one half of a block for `many` rows and `vectors` vectors of columns from c on; the last vector holds n
 * columns. `value` starts at keys.begin. factor[r] corrects what row r has accumulated so far. */
INLINE void value_rows(struct cattn_rows *rows, int many, int vectors, int n, const struct cattn_matrix *value,
                       struct rows_ahead *next, struct key_half keys, int64_t k0, int64_t c, const real *factor) {
    const uint16_t *weights = rows->scratch.score;
    vf sum[CATTN_FEW_ROWS][CATTN_FEW_ROWS];
    UNROLLED(r, many)
        UNROLLED(v, vectors)
            sum[r][v] = vf_set1(0);
    products_begin();
    for (int k = keys.begin; k < keys.end; k += 2) {
        vu pairs[CATTN_FEW_ROWS];
        int64_t at = c + (k - keys.begin) * value->row;
        if (!has_chain(rows->seen_chains, k))
            continue;
        OPAQUE(at);
        UNROLLED(v, vectors) {
            const int left = v == vectors - 1 ? n : LANES;
            const vf even = load_stored(value->storage, value->first, at + v * LANES, 1, left);
            vf odd = vf_set1(0);
            if (k + 1 < keys.end)
                odd = load_stored(value->storage, value->first, at + value->row + v * LANES, 1, left);
            pairs[v] = paired_values(value->storage, even, odd);
        }
        UNROLLED(i, 2)
            prefetch_ahead(next, (size_t)((vectors - 1) * LANES + n) * stored_size(value->storage));
        UNROLLED(r, many) {
            const vu w = vu_set1(load_pair(weights + 2 * r * CATTN_BLOCK_KEYS + k));
            UNROLLED(v, vectors)
                sum[r][v] = vf_pair_dot(w, pairs[v], sum[r][v]);
        }
    }
    UNROLLED(r, many)
        UNROLLED(v, vectors)
            keep_sum(&sum[r][v]);
    products_end();
    UNROLLED(r, many) {
        real *acc = (real *)rows->scratch.acc + r * rows->call.acc_cols + c;
        UNROLLED(v, vectors) {
            if (__builtin_expect(vm_any(vm_not(finite_lanes(sum[r][v]))), 0) && r < rows->n_rows)
                sum[r][v] = value_vector_visible(rows, r, c + v * LANES, v == vectors - 1 ? n : LANES, keys, k0,
                                                 weights + 2 * r * CATTN_BLOCK_KEYS, 2);
            fold_block(acc + v * LANES, vf_set1(factor[r]), sum[r][v]);
        }
    }
}

#else

/* Computes one vector of P V again without the row's hidden keys: 0 * NaN must not leak their values. `value` starts at
 * keys.begin; the vector has n columns from c on. The weight of key k is weights[k * weight_col]. */
static vf value_vector_visible(const struct cattn_rows *rows, int r, const struct cattn_matrix *value, int64_t c, int n,
                               struct key_half keys, int64_t k0, const real *weights, int64_t weight_col) {
    vf block = vf_set1(0);
    for (int k = keys.begin; k < keys.end;) {
        vf chain = vf_set1(0);
        for (const int64_t end = chain_end(k, keys.end); k < end; k++)
            if (key_visible(rows, r, k0 + k)) {
                const vf w = vf_set1(weights[k * weight_col]);
                chain = vf_fma(w, load_columns(value, k - keys.begin, c, n), chain);
            }
        block = block + chain;
    }
    return block;
}

/* The scale of one value, read in place; 1 if it has none. */
INLINE vf scale_of_value(const struct cattn_matrix *value, int64_t r) {
#if REAL_BITS == 32
    if (cattn_is_quantized(value->storage))
        return scales_at(value->storage, value->scale + r * value->scale_row, 0, 1);
#endif
    (void)value, (void)r;
    return vf_set1(1);
}

/* P V of one half of a block for `many` rows and `vectors` vectors of columns from c on; the last vector holds n
 * columns. `value` starts at keys.begin. factor[r] corrects what row r has accumulated so far. */
INLINE void value_rows(struct cattn_rows *rows, int many, int vectors, int n, const struct cattn_matrix *value,
                       struct rows_ahead *next, struct key_half keys, int64_t k0, int64_t c, const real *factor) {
    const real *score = rows->scratch.score;
    /* [row][vector]; only many * vectors <= VALUE_ACCS of them are used */
    vf block[CATTN_FEW_ROWS][CATTN_FEW_ROWS], chain[CATTN_FEW_ROWS][CATTN_FEW_ROWS];
    UNROLLED(r, many)
        UNROLLED(v, vectors)
            block[r][v] = vf_set1(0);
    int64_t at = c;
    for (int k = keys.begin; k < keys.end;) {
        if (!has_chain(rows->seen_chains, k)) { /* not skipped by the prefetches, which fetch its rows */
            const int64_t end = chain_end(k, keys.end);
            at += (end - k) * value->row;
            k = (int)end;
            continue;
        }
        UNROLLED(r, many)
            UNROLLED(v, vectors)
                chain[r][v] = vf_set1(0);
        for (const int end = (int)chain_end(k, keys.end); k < end; k++, at += value->row) {
            vf val[CATTN_FEW_ROWS];
            const vf scale = scale_of_value(value, k - keys.begin);
            OPAQUE(at);
            UNROLLED(v, vectors) {
                const int left = v == vectors - 1 ? n : LANES;
                val[v] = load_stored(value->storage, value->first, at + v * LANES, 1, left);
                if (cattn_is_quantized(value->storage))
                    val[v] = val[v] * scale;
            }
            prefetch_ahead(next, (size_t)((vectors - 1) * LANES + n) * stored_size(value->storage));
            UNROLLED(r, many) {
                vf w = vf_set1(score[r * CATTN_BLOCK_KEYS + k]);
                UNROLLED(v, vectors)
                    chain[r][v] = vf_fma(w, val[v], chain[r][v]);
            }
        }
        UNROLLED(r, many)
            UNROLLED(v, vectors)
                block[r][v] = block[r][v] + chain[r][v];
    }
    UNROLLED(r, many) {
        real *acc = (real *)rows->scratch.acc + r * rows->call.acc_cols + c;
        UNROLLED(v, vectors) {
            if (__builtin_expect(vm_any(vm_not(finite_lanes(block[r][v]))), 0) && r < rows->n_rows)
                block[r][v] = value_vector_visible(rows, r, value, c + v * LANES, v == vectors - 1 ? n : LANES, keys,
                                                   k0, score + r * CATTN_BLOCK_KEYS, 1);
            fold_block(acc + v * LANES, vf_set1(factor[r]), block[r][v]);
        }
    }
}

#endif

/* All columns of V, as many vectors at a time as the registers hold. */
INLINE void value_columns(struct cattn_rows *rows, int many, const struct cattn_matrix *value, struct key_half keys,
                          int64_t k0, const real *factor) {
    int64_t c = 0, left = rows->call.d_v;
    struct rows_ahead next = rows_ahead(value, rows->call.d_v);
#define WHILE_FULL(vectors)                                                                                            \
    if (many * (vectors) <= VALUE_ACCS)                                                                                \
        for (; left >= (vectors) * LANES; c += (vectors) * LANES, left -= (vectors) * LANES)                           \
            value_rows(rows, many, vectors, LANES, value, &next, keys, k0, c, factor);
    WHILE_FULL(8)
    WHILE_FULL(4)
    WHILE_FULL(2)
    WHILE_FULL(1)
#undef WHILE_FULL
    if (left > 0)
        value_rows(rows, many, 1, (int)left, value, &next, keys, k0, c, factor);
}

/* P V of a block, half by half: where V must be copied, the copy of a half stays in the L1 cache. */
INLINE void value_keys(struct cattn_rows *rows, enum cattn_storage direct, int many, int64_t k0, int begin, int end) {
    static const real ones[CATTN_FEW_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1};
    /* The first half runs even without keys, because it multiplies the accumulators with alpha. */
    for (int i = 0; i < 2; i++) {
        const struct key_half keys = key_half_of(i, begin, end);
        if (i > 0 && key_half_is_empty(keys))
            break;
        const struct cattn_matrix value = find_rows(&rows->value, direct, k0 + keys.begin, keys.end - keys.begin,
                                                    rows->call.d_v, rows->scratch.value_panel);
        const real *factor = i == 0 ? rows->scratch.alpha : ones;
        value_columns(rows, many, &value, keys, k0, factor);
    }
}

/* Masks, softmax and dropout of the rows' scores; `many` is the number of rows padded to 1, 2, 4 or 8. Nobody reads the
 * results of padding. Not inlined: it is long, and the same for each storage and number of rows. */
NOINLINE void weigh_rows(struct cattn_rows *rows, int many, int64_t k0, int n_keys, int begin, int end) {
    real *score = rows->scratch.score, *row_sum = rows->scratch.row_sum, *block_max = rows->scratch.block_max;
    real lane[LANES], sum[CATTN_PAD] = {0};
    for (int i = 0; i < LANES; i++)
        lane[i] = (real)i;
    const vf index = vf_loadu(lane);
    for (int r = 0; r < rows->n_rows; r++)
        if (!is_plain_row(rows, r, k0, n_keys, begin, end))
            block_max[r] = mask_row(rows, r, k0, n_keys, begin, end, index);
    /* the scores are stored now, before softmax overwrites them; `finish` turns them into weights */
    if (rows->call.has_weights)
        for (int r = 0; r < rows->n_rows; r++)
            for (int k = begin; k < min64(end, n_keys); k += LANES)
                store_strided((real *)rows->per_row->weights[r] + (k0 + k) * rows->call.weights_col,
                              rows->call.weights_col, with_one_nan(vf_loadu(score + r * CATTN_BLOCK_KEYS + k)),
                              (int)min64(LANES, n_keys - k));
    for (int r = 0; r < many; r += LANES)
        update_max(rows, r);
    for (int r = 0; r < rows->n_rows; r++) {
        real *s = score + r * CATTN_BLOCK_KEYS;
        sum[r] = softmax_keys(s, begin, end, block_max[r]);
        if (rows->scratch.drop_bits)
            drop_keys_by_stream(rows, r, k0, s, begin, (int)min64(end, n_keys));
        else if (rows->drop.enabled)
            drop_keys(rows, r, k0, s, begin, end);
        if (rows->small_weights)
            shrink_keys(s, begin, end);
#ifdef BF16_PRODUCTS /* in place: pairs of keys, which P V reads */
        for (int k = begin; k < end; k += LANES)
            store_rounded((uint16_t *)(void *)s + k, vf_loadu(s + k), LANES);
#endif
    }
    for (int r = 0; r < many; r += LANES)
        vf_storeu(row_sum + r,
                  vf_fma(vf_loadu(row_sum + r), vf_loadu((real *)rows->scratch.alpha + r), vf_loadu(sum + r)));
}

INLINE void rows_block_many(struct cattn_rows *rows, enum cattn_storage direct, int many, int64_t k0, int n_keys,
                            int begin, int end) {
    score_rows(rows, direct, many, k0, n_keys, begin, end);
    weigh_rows(rows, many, k0, n_keys, begin, end);
    if (rows->call.d_v)
        value_keys(rows, direct, many, k0, begin, (int)min64(end, n_keys));
}

/* rows_block_many with constants for `direct` and `many`. They are separate functions because GCC allocates registers
 * badly if all are inlined into one. */
typedef void rows_block_of(struct cattn_rows *rows, int64_t k0, int n_keys, int begin, int end);
#define ROWS_BLOCK(name, direct, many)                                                                                 \
    NOINLINE void name(struct cattn_rows *rows, int64_t k0, int n_keys, int begin, int end) {                          \
        rows_block_many(rows, direct, many, k0, n_keys, begin, end);                                                   \
    }
ROWS_BLOCK(rows_block_1, CATTN_STORED_PLAIN, 1)
ROWS_BLOCK(rows_block_2, CATTN_STORED_PLAIN, 2)
ROWS_BLOCK(rows_block_4, CATTN_STORED_PLAIN, 4)
ROWS_BLOCK(rows_block_8, CATTN_STORED_PLAIN, 8)
#ifdef HALVES_ARE_QUICK /* otherwise it is faster to convert once, to scratch */
ROWS_BLOCK(rows_block_bf16_1, CATTN_STORED_BF16, 1)
ROWS_BLOCK(rows_block_bf16_4, CATTN_STORED_BF16, 4)
ROWS_BLOCK(rows_block_bf16_8, CATTN_STORED_BF16, 8)
#ifndef BF16_PRODUCTS /* there is no float16, and integers are rounded on the way to scratch */
ROWS_BLOCK(rows_block_f16_1, CATTN_STORED_F16, 1)
ROWS_BLOCK(rows_block_f16_4, CATTN_STORED_F16, 4)
ROWS_BLOCK(rows_block_f16_8, CATTN_STORED_F16, 8)
ROWS_BLOCK(rows_block_i8_1, CATTN_STORED_I8, 1)
ROWS_BLOCK(rows_block_i8_2, CATTN_STORED_I8, 2)
ROWS_BLOCK(rows_block_i8_4, CATTN_STORED_I8, 4)
ROWS_BLOCK(rows_block_i8_8, CATTN_STORED_I8, 8)
#endif
#endif

#ifdef HALVES_ARE_QUICK
static bool is_in_place(const struct cattn_matrix *matrix) {
    return matrix->col == 1 && (!cattn_is_quantized(matrix->storage) || matrix->scale_col == 0);
}

/* Whether rows_block can read keys and values in place: with one storage, unit column strides, and scales of tokens. */
static bool reads_in_place(const struct cattn_rows *rows) {
    return is_in_place(&rows->key) &&
           (!rows->call.d_v || (is_in_place(&rows->value) && rows->value.storage == rows->key.storage));
}
#endif

/* The function for this number of rows and this storage. */
static rows_block_of *find_rows_block(const struct cattn_rows *rows) {
    const int n = rows->n_rows;
#ifdef HALVES_ARE_QUICK
    if (reads_in_place(rows))
        switch (rows->key.storage) {
        case CATTN_STORED_BF16:
            return n == 1 ? rows_block_bf16_1 : n <= 4 ? rows_block_bf16_4 : rows_block_bf16_8;
#ifndef BF16_PRODUCTS
        case CATTN_STORED_F16:
            return n == 1 ? rows_block_f16_1 : n <= 4 ? rows_block_f16_4 : rows_block_f16_8;
        case CATTN_STORED_I8:
            return n == 1 ? rows_block_i8_1 : n == 2 ? rows_block_i8_2 : n <= 4 ? rows_block_i8_4 : rows_block_i8_8;
#endif
        default: /* the other rows are plain, or faster to convert once */
            break;
        }
#endif
    return n == 1 ? rows_block_1 : n == 2 ? rows_block_2 : n <= 4 ? rows_block_4 : rows_block_8;
}

/* The keys that some row sees by its range, counted from k0, and by the block mask. */
static struct key_half find_seen_keys(struct cattn_rows *rows, int64_t k0) {
    int begin = CATTN_BLOCK_KEYS, end = 0;
    rows->seen_chains = rows->call.has_block_mask ? 0 : ALL_CHAINS;
    rows->masked_chains = 0;
    for (int r = 0; r < rows->n_rows; r++) {
        int lo = relative(rows->per_row->lo[r], k0), hi = relative(rows->per_row->hi[r], k0);
        if (rows->call.has_block_mask && lo < hi) {
            const int first = lo, last = hi;
            const struct row_chains chains = narrow_to_blocks(rows, r, k0, &lo, &hi);
            rows->seen_chains |= chains.seen;
            rows->masked_chains |= chains.holed;
            rows->masked_chains |= first < lo ? chains_of(first, lo) : 0;
            rows->masked_chains |= hi < last ? chains_of(hi, last) : 0;
        }
        if (lo < hi) {
            begin = (int)min64(begin, lo);
            end = (int)max64(end, hi);
        }
    }
    return (struct key_half){begin, end};
}

/* The keys that some row sees, rounded outwards to ROW_STEP. Rows that see fewer are masked in mask_keys. */
static void rows_block(struct cattn_rows *rows, int64_t k0, int64_t k1) {
    const struct key_half seen = find_seen_keys(rows, k0);
    const int n_keys = (int)(k1 - k0), begin = seen.begin / ROW_STEP * ROW_STEP;
    const int end = (int)cattn_round_up(min64(seen.end, n_keys), ROW_STEP);
    if (begin >= end)
        return;
    find_rows_block(rows)(rows, k0, n_keys, begin, end);
}
