/* mask.c -- key ranges and tensor addressing; see mask.h. */
#include "mask.h"

/* Far beyond any array, and far enough from the type's end that position arithmetic cannot overflow. */
#define FAR ((int64_t)1 << 61)

int64_t cattn_lead_offset(const struct cattn_tensor *tensor, int n_lead, const int64_t *lead_shape, int64_t index) {
    int64_t offset = 0;
    for (int d = n_lead - 1; d >= 0 && index; d--) {
        offset += index % lead_shape[d] * tensor->lead[d];
        index /= lead_shape[d];
    }
    return offset;
}

int64_t cattn_query_offset(const struct cattn_tensor *offsets, int64_t value, int n_lead, const int64_t *lead_shape,
                           int64_t index) {
    if (offsets->data)
        value = ((const int64_t *)offsets->data)[cattn_lead_offset(offsets, n_lead, lead_shape, index)];
    return value < -FAR ? -FAR : value > FAR ? FAR : value;
}

struct cattn_range cattn_visible_keys(bool is_causal, int64_t position, int64_t n_keys) {
    struct cattn_range range = {0, n_keys};
    if (is_causal && position + 1 < n_keys)
        range.hi = position + 1 > 0 ? position + 1 : 0;
    return range;
}
