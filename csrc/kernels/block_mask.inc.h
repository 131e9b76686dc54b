/* block_mask.inc.h -- what a block mask leaves of one key block.
 *
 * A row's visible keys are nearly always one interval of the key block, and then the block mask is nothing but a
 * narrower range. Blocks are cut from key 0 of the array, so they may begin before the first valid key. Where it is
 * not, whole chains of keys that no row sees are left out: a chain of weights that are +0 adds nothing (csrc/README.md,
 * "The bit contract"). A bit set has one bit for each chain of the block.
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
