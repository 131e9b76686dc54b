/* mask.inc.h -- which keys a row may see, and what masks, softcap and slopes do to its scores.
 *
 * A key is hidden by the row's range lo .. hi, by the boolean mask, by the block mask, or by a bias of -inf. A hidden
 * score is set to -inf by selection, never by adding -inf: a score that is NaN or +inf must not leak through.
 */

/* ---- what a block mask leaves of one key block ---- */

/* A row's visible keys are nearly always one interval of the key block, and then the block mask is nothing but a
 * narrower range. Blocks are cut from key 0 of the array, so they may begin before the first valid key. Where it is
 * not, whole chains of keys that no row sees are left out: a chain of weights that are +0 adds nothing
 * (docs/bit_contract.md, "Functions"). A bit set has one bit for each chain of the block.
 */

#define ALL_CHAINS (~0u)
_Static_assert(CATTN_BLOCK_KEYS / CATTN_CHAIN_TERMS < 16,
               "a bit set of chains fits in 16 bits, and a shift stays in 32");

/* The chains that hold the keys begin .. end-1 of a block; begin < end. */
INLINE unsigned chains_of(int begin, int end) {
    return (2u << (end - 1) / CATTN_CHAIN_TERMS) - (1u << begin / CATTN_CHAIN_TERMS);
}

/* Whether the set has the chain of key k of the block. */
INLINE bool has_chain(unsigned chains, int64_t k) { return chains >> k / CATTN_CHAIN_TERMS & 1; }

/* The first key after k at which has_chain changes its answer; far away if it does not. */
INLINE int chain_run_end(unsigned chains, int k) {
    const int chain = k / CATTN_CHAIN_TERMS;
    const unsigned rest = chains >> chain, change = rest & 1 ? ~rest : rest;
    return change ? (chain + __builtin_ctz(change)) * CATTN_CHAIN_TERMS : 2 * CATTN_BLOCK_KEYS;
}

/* The chains of one row: those with a key that it sees, and those with a key that is hidden between two that it sees.
 */
struct row_chains {
    uint16_t seen, holed;
};

/* Narrows the keys *lo .. *hi - 1, counted from k0, to the smallest range that holds all keys of them that the block
 * mask shows to row r; {0, 0} if there are none. */
static struct row_chains narrow_to_blocks(const struct cattn_rows *rows, int r, int64_t k0, int *lo, int *hi) {
    const int64_t size = rows->call.block_size, first_key = rows->first_key + k0;
    struct row_chains chains = {0, 0};
    int first = 0, last = 0; /* of the range; equal until a block is visible */
    int64_t block = (first_key + *lo) / size;
    for (int k = *lo, end; k < *hi; k = end, block++) {
        end = (int)min64(*hi, (block + 1) * size - first_key);
        if (!rows->per_row->block_mask[r][block * rows->call.block_mask_col])
            continue;
        if (first == last)
            first = k;
        else if (last < k)
            chains.holed |= (uint16_t)chains_of(last, k);
        chains.seen |= (uint16_t)chains_of(k, end);
        last = end;
    }
    *lo = first;
    *hi = last;
    return chains;
}

/* The end of the run of blocks that contains `key`, which row r sees all or none of. */
static int64_t block_run_end(const struct cattn_rows *rows, int r, int64_t key, int64_t hi, bool *visible) {
    const int64_t size = rows->call.block_size, col = rows->call.block_mask_col;
    const uint8_t *mask = rows->per_row->block_mask[r];
    int64_t block = (rows->first_key + key) / size;
    *visible = mask[block * col] != 0;
    do
        block++;
    while (block * size - rows->first_key < hi && (mask[block * col] != 0) == *visible);
    return min64(hi, block * size - rows->first_key);
}

/* A key's place in the block that starts at k0, clamped to the block. */
INLINE int relative(int64_t key, int64_t k0) { return (int)max64(0, min64(CATTN_BLOCK_KEYS, key - k0)); }

INLINE bool is_neg_inf(real x) { return x == NEG_INF; }

/* Whether the block mask lets row r see this key. */
INLINE bool block_visible(const struct cattn_rows *rows, int r, int64_t key) {
    return rows->per_row->block_mask[r][(rows->first_key + key) / rows->call.block_size * rows->call.block_mask_col];
}

/* Whether row r may see this key. Slow: for single keys and rare cases that the vector code leaves over. */
static bool key_visible(const struct cattn_rows *rows, int r, int64_t key) {
    if (key < rows->per_row->lo[r] || key >= rows->per_row->hi[r])
        return false;
    if (rows->call.has_mask && !rows->per_row->mask[r][key * rows->call.mask_col])
        return false;
    if (rows->call.has_block_mask && !block_visible(rows, r, key))
        return false;
    for (int b = 0; b < rows->call.n_bias; b++)
        if (is_neg_inf(((const real *)rows->per_row->bias[b][r])[key * rows->call.bias_col[b]]))
            return false;
    return true;
}

/* The block mask for n keys of row r from `key` on, as load_mask. */
NOINLINE vf load_blocks(const struct cattn_rows *rows, int r, int64_t key, int n) {
    uint8_t lanes[LANES];
    for (int i = 0; i < n; i++)
        lanes[i] = block_visible(rows, r, key + i);
    return load_mask(lanes, 1, n);
}

/* The element-wise masks of n keys of row r from `key` on, and the block mask, as one bias: the sum of the biases, or
 * -inf where one of them or a mask hides the key. Without a bias it is -0, which added to a score changes no bit of it;
 * +0 would change a score of -0. The lanes from n on are zeros. */
INLINE vf element_bias(const struct cattn_rows *rows, int r, int64_t key, int n) {
    const vf neg_inf = vf_set1(NEG_INF);
    vf total = vf_set1((real)-0.0), mask = total;
    if (rows->call.has_mask)
        mask = load_mask(rows->per_row->mask[r] + key * rows->call.mask_col, rows->call.mask_col, n);
    vm hidden = vf_eq(mask, neg_inf);
    if (rows->call.has_block_mask)
        hidden = vm_or(hidden, vf_eq(load_blocks(rows, r, key, n), neg_inf));
    /* -inf is remembered apart from the sum: +inf in another bias would turn the sum into NaN */
    for (int b = 0; b < rows->call.n_bias; b++) {
        int64_t col = rows->call.bias_col[b];
        vf bias = load_strided((const real *)rows->per_row->bias[b][r] + key * col, col, n);
        hidden = vm_or(hidden, vf_eq(bias, neg_inf));
        total = total + bias;
    }
    /* two finite biases may add up to -inf (finfo.min twice), which must not hide the key */
    total = vf_select(vf_eq(total, neg_inf), vf_set1(-REAL_MAX), total);
    return vf_select(hidden, neg_inf, total);
}

/* Whether row r sees any key. If its sum is 0, the result is NaN if it does, else 0. */
static bool row_sees_any_key(const struct cattn_rows *rows, int r) {
    int64_t key = rows->per_row->lo[r];
    if (rows->call.fully_ranged) {
        bool visible = !rows->call.has_block_mask;
        while (!visible && key < rows->per_row->hi[r])
            key = block_run_end(rows, r, key, rows->per_row->hi[r], &visible);
        return visible && rows->per_row->lo[r] < rows->per_row->hi[r];
    }
    for (; key + LANES <= rows->per_row->hi[r]; key += LANES)
        if (vm_any(vm_not(vf_eq(element_bias(rows, r, key, LANES), vf_set1(NEG_INF)))))
            return true;
    for (; key < rows->per_row->hi[r]; key++)
        if (key_visible(rows, r, key))
            return true;
    return false;
}

/* 1 if the weight of this key in row r is kept. The bits come from a serial stream. */
INLINE bool key_drop_bit(const struct cattn_rows *rows, int r, int64_t key) {
    return rows->per_row->drop_bits[r][key >> 3] >> (key & 7) & 1;
}

/* softcap * tanh(score / softcap). Not inlined: it is long and rarely used. */
NOINLINE vf cap_score(vf score, double softcap) {
    const vf cap = vf_set1((real)softcap);
    return cap * vf_tanh(vf_div(score, cap));
}

/* Whether an option changes single scores before slope and bias; and the change. */
INLINE bool changes_scores(const struct cattn_score_options *options) { return options->softcap > 0; }
INLINE vf change_score(vf score, const struct cattn_score_options *options) {
    return cap_score(score, options->softcap);
}

/* The derivative of softcap, from the capped score, to its place in the scratch; and the second one, if wanted. */
NOINLINE void store_cap_derivatives(const struct cattn_rows *rows, int64_t at, vf capped) {
    const vf cap = vf_set1((real)rows->call.score_options.softcap), t = vf_div(capped, cap);
    const vf derivative = vf_fma(-t, t, vf_set1(1));
    vf_storeu((real *)rows->scratch.cap_derivative + at, derivative);
    if (rows->scratch.cap_curvature)
        vf_storeu((real *)rows->scratch.cap_curvature + at, vf_div(vf_set1(-2) * t * derivative, cap));
}

/* ALiBi: score - slope * |query - key|. Both positions count from the block's first key, so that they are exact in
 * float32 even in long sequences. */
INLINE vf slope_score(vf score, vf slope, vf query, vf key) {
    const vf distance = query - key;
    return vf_fma(-slope, vf_max(distance, -distance), score);
}

/* score + bias, but exactly -inf where the bias hides the key, even if the score is NaN or +inf. */
INLINE vf add_bias(vf score, vf bias) {
    const vf neg_inf = vf_set1(NEG_INF);
    return vf_select(vf_eq(bias, neg_inf), neg_inf, score + bias);
}
