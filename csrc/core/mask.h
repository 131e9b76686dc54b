/* mask.h -- which keys a query may see, as far as that is one range of keys; and how strided tensors are addressed.
 *
 * Every mask that is a range per query (causal here; windows and lengths have their place here too) becomes numbers lo
 * and hi. Nothing below knows what kind of mask they came from.
 */
#ifndef CATTN_MASK_H
#define CATTN_MASK_H

#include "../cattn.h"

struct cattn_range {
    int64_t lo, hi; /* keys lo <= k < hi */
};

/* Elements from a tensor's start to its part for one index into the flattened leading dimensions. */
int64_t cattn_lead_offset(const struct cattn_tensor *tensor, int n_lead, const int64_t *lead_shape, int64_t index);

/* The offset that turns query i into position i + offset, for one leading index. */
int64_t cattn_query_offset(const struct cattn_tensor *offsets, int64_t value, int n_lead, const int64_t *lead_shape,
                           int64_t index);

/* Keys 0 .. n_keys-1 that the query at `position` sees. */
struct cattn_range cattn_visible_keys(bool is_causal, int64_t position, int64_t n_keys);

#endif
