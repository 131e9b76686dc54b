/* key_ranges.h -- which keys a query sees: from is_causal, query_offset, window_size, lengths and first valid keys to
 * struct cattn_ranges.
 *
 * In two steps, because the arguments are checked before the sizes of the call are known: parse, then settle.
 */
#ifndef CATTN_KEY_RANGES_H
#define CATTN_KEY_RANGES_H

#include "binding.h"

struct cattn_range_args {
    bool is_causal, lower_right;
    bool bare;           /* no argument says how queries and keys are aligned */
    int64_t left, right; /* of the window */
    int64_t offset;      /* of every query; unused if there are offsets */
    /* owned, or NULL; int64 once they are settled: until then only their dtype was looked at */
    PyArrayObject *offsets, *query_lengths, *key_lengths, *first_keys;
};
bool cattn_arg_ranges(struct binding_state *state, PyObject *is_causal, PyObject *query_offset, PyObject *window_size,
                      struct cattn_range_args *args);

struct cattn_range_sizes {
    npy_intp seqlen_q, seqlen_k;
    int n_batch_dims;
    const npy_intp *batch;
    PyObject *query_lengths, *key_lengths, *first_keys; /* the arguments, or None */
};
/* Fills in `ranges`, which is cleared. Lengths and first keys are checked against the sizes; warns if the alignment is
 * ambiguous. */
bool cattn_ranges_settle(struct binding_state *state, struct cattn_range_args *args,
                         const struct cattn_range_sizes *sizes, struct cattn_ranges *ranges);
void cattn_ranges_clear(struct cattn_range_args *args);

#endif
