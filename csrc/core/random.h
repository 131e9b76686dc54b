/* random.h -- random bits of dropout by position, in a sequence and as PyTorch draws them; the Mersenne Twister. */
#ifndef CATTN_RANDOM_H
#define CATTN_RANDOM_H

#include "../kernels/kernels.h"
#include "../torch_random.h"
#include "parallel.h"

/* ---- dropout by position: from a seed and a probability to counters and thresholds of the kernels ---- */

/* For one batch entry. A disabled spec keeps every element. */
void cattn_drop_fill(const struct cattn_dropout_spec *spec, int64_t batch, struct cattn_drop *drop);

/* ---- the mask of one dropout as PyTorch draws it, as a cursor in row-major order ---- */

/* A cursor is a plain value. PyTorch draws no mask for probabilities 0 and 1, nor for empty tensors: begin none there.
 */

struct cattn_torch_dropout {
    struct cattn_mt19937 mt;
    uint64_t threshold; /* ATEN: an element is kept if its 53 bits are below this */
    double probability; /* MKL: an element is kept if its uniform number is below this */
    uint32_t mcg;       /* MKL: state of the MCG31m1 */
    bool is_mkl;
};

void cattn_torch_dropout_begin(struct cattn_torch_dropout *cursor, const struct cattn_torch_random *random,
                               double keep_probability);
/* The next n elements, 1 = kept. */
void cattn_torch_dropout_next(struct cattn_torch_dropout *cursor, int64_t n, uint8_t *mask);
void cattn_torch_dropout_skip(struct cattn_torch_dropout *cursor, int64_t n);
/* Moves the generator to where the cursor is, which has passed all elements. */
void cattn_torch_dropout_end(const struct cattn_torch_dropout *cursor, struct cattn_torch_random *random);

/* ---- a dropout whose bits come in sequence (PyTorch's generator), for tasks that run in parallel ---- */

/* The bits belong to the elements of (batch, head, query, key) in row-major order, hidden ones included. So tasks draw
 * the bits of their own rows one after the other, in order, and compute with them in parallel afterwards. Tasks must be
 * numbered in row-major order and started in ascending order (parallel.h promises the second).
 */

struct cattn_dropout_stream {
    struct cattn_tickets tickets; /* one place: the cursor */
    struct cattn_torch_dropout cursor;
};

/* Keys that are drawn at a time. */
#define CATTN_STREAM_KEYS 1024
/* Draws keys k0, k0 + 1, ... of a row: a byte each, 1 = kept. Returns their number, or 0 if the call was stopped. */
int64_t cattn_dropout_stream_keys(struct cattn_torch_dropout *cursor, int64_t k0, int64_t n_keys, uint8_t *kept,
                                  struct cattn_worker *worker);

/* Bytes of one row of bits. */
static inline cattn_size cattn_dropout_stream_row_bytes(int64_t n_keys) { return (cattn_size)(n_keys / 8 + 1); }

void cattn_dropout_stream_begin(struct cattn_dropout_stream *stream, const struct cattn_torch_random *random,
                                double keep_probability);
/* After the last task. Moves `random` past all bits; NULL: the call failed, and the generator stays as it was. */
void cattn_dropout_stream_end(struct cattn_dropout_stream *stream, struct cattn_torch_random *random);

/* Waits for this task's ticket, then draws the drop bits of the task's rows: lowest bit first, from the first valid key
 * on, in rows that are cattn_dropout_stream_row_bytes apart. Returns false if the call was stopped. worker: NULL if
 * nothing is parallel. */
bool cattn_dropout_stream_take(struct cattn_dropout_stream *stream, int64_t task, const struct cattn_rows *rows,
                               struct cattn_worker *worker);

#endif
