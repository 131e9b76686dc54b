/* packed.h -- sequences of different lengths, packed into the same arrays.
 *
 * The arrays have the axes (total, heads, width), and the call is parsed as one batch entry of `total` queries and
 * keys, whose rows lie before its heads. When its results are allocated, cattn_packed_fill makes a batch of
 * sequences of it.
 */
#ifndef CATTN_PACKED_H
#define CATTN_PACKED_H

#include "key_ranges.h"

/* Several functions have these arguments, in different slots: the index counts from the first of them. */
#define VARLEN_EXTRA(A) A(cu_seqlens_q) A(cu_seqlens_k) A(max_seqlen_q) A(max_seqlen_k) A(alignment)
#define VARLEN_SLOT(name) VARLEN_##name,
enum { VARLEN_EXTRA(VARLEN_SLOT) N_VARLEN_EXTRA };

/* The rows of one side of the call, queries or keys. */
struct cattn_edges {
    int64_t *edges;   /* owned, or NULL: sequence b has the rows edges[b] .. edges[b + 1] - 1 */
    int64_t *lengths; /* behind the edges, in the same memory */
    npy_intp n_sequences;
    int64_t longest;
};
struct cattn_packed {
    PyObject *const *args; /* of VARLEN_EXTRA */
    struct cattn_edges queries, keys;
};

/* Reads the edges of arrays with these numbers of rows, and refuses an rng that packed sequences cannot have. */
bool cattn_packed_parse(struct binding_state *state, struct cattn_packed *packed, int64_t total_q, int64_t total_k,
                        PyObject *rng);
/* Reads `alignment`, and warns if the alignment of a sequence is ambiguous. Comes between the two steps of
 * key_ranges.h. */
bool cattn_packed_align(struct binding_state *state, const struct cattn_packed *packed,
                        struct cattn_range_args *ranges);
void cattn_packed_fill(const struct cattn_packed *packed, struct cattn_attention_params *params);
/* packed may be NULL. */
void cattn_packed_clear(struct cattn_packed *packed);

#endif
