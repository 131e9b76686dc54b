/* mask.h -- which keys a query may see, as far as that is one range of keys; and how strided tensors are addressed.
 *
 * Every mask that is a range per query (causal, windows, lengths) becomes numbers lo and hi. Nothing below knows what
 * kind of mask they came from.
 */
#ifndef CATTN_MASK_H
#define CATTN_MASK_H

#include "../cattn.h"

struct cattn_range {
    int64_t lo, hi; /* keys lo <= k < hi */
};

/* Elements from a tensor's start to its part for one index into the flattened leading dimensions. */
int64_t cattn_batch_offset(const struct cattn_tensor *tensor, int n_batch_dims, const int64_t *batch_shape,
                           int64_t index);

/* The number of one leading index, or `common` where the tensor is absent. */
int64_t cattn_batch_number(const struct cattn_tensor *numbers, int64_t common, int n_batch_dims,
                           const int64_t *batch_shape, int64_t index);

/* struct cattn_ranges for one leading index. */
struct cattn_batch_range {
    int64_t offset, n_queries, n_keys, left, right;
};
void cattn_batch_range(const struct cattn_ranges *ranges, int n_batch_dims, const int64_t *batch_shape, int64_t index,
                       struct cattn_batch_range *batch_range);

/* The keys that query i sees. */
struct cattn_range cattn_visible_keys(const struct cattn_batch_range *batch_range, int64_t i);
/* The same of queries i .. i+n-1, as arrays. */
void cattn_visible_ranges(const struct cattn_batch_range *batch_range, int64_t i, int n, int64_t *lo, int64_t *hi);

#endif
