/* visible_keys.h -- the range of keys that a query sees.
 *
 * Causality, windows, lengths and a first valid key all leave each query one range: keys lo <= k < hi, counted from the
 * first valid key of the batch entry. Nothing else in core/ or kernels/ knows which of them made it.
 */
#ifndef CATTN_VISIBLE_KEYS_H
#define CATTN_VISIBLE_KEYS_H

#include "../cattn.h"

struct cattn_range {
    int64_t lo, hi; /* keys lo <= k < hi */
};

/* The smallest range that holds both. Empty ranges do not count. */
static inline struct cattn_range cattn_range_union(struct cattn_range a, struct cattn_range b) {
    if (a.lo >= a.hi || b.lo >= b.hi)
        return b.lo < b.hi ? b : a;
    return (struct cattn_range){cattn_min(a.lo, b.lo), a.hi > b.hi ? a.hi : b.hi};
}

/* struct cattn_ranges for one batch entry: what its queries share. Everything but first_key counts keys from the first
 * valid one: key k is the array's key first_key + k. So padding on the left moves no key to another block. */
struct cattn_batch_range {
    int64_t first_key;                              /* of the array; 0 if all keys are visible */
    int64_t offset, n_queries, n_keys, left, right; /* n_keys is 0 if no key is valid */
};
void cattn_batch_range(const struct cattn_ranges *ranges, int n_batch_dims, const int64_t *batch_shape, int64_t index,
                       struct cattn_batch_range *batch_range);

/* The keys that query i sees. */
struct cattn_range cattn_visible_keys(const struct cattn_batch_range *batch_range, int64_t i);
/* The same for queries i .. i+n-1, as arrays. */
void cattn_visible_ranges(const struct cattn_batch_range *batch_range, int64_t i, int n, int64_t *lo, int64_t *hi);

#endif
