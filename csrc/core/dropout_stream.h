/* drawn.h -- a dropout whose bits come from a serial stream (PyTorch's generator) handed to tasks that run in parallel.
 *
 * The stream belongs to the elements of (lead, head, query, key) in row-major order, hidden ones included, so tasks
 * take turns: each expands the bits of its own rows, in the order of the tasks, and computes with them afterwards.
 * Tasks must be numbered in that order and started in it (parallel.h promises the second).
 */
#ifndef CATTN_DROPOUT_STREAM_H
#define CATTN_DROPOUT_STREAM_H

#include <pthread.h>

#include "parallel.h"
#include "torch_random.h"

struct cattn_dropout_stream {
    pthread_mutex_t lock;
    pthread_cond_t passed;
    int64_t next;        /* the task whose turn it is */
    unsigned fork_count; /* when the condition was made */
    struct cattn_torch_keep cursor;
};

/* Bytes of one row of bits. */
static inline size_t cattn_dropout_stream_row_bytes(int64_t n_keys) { return (size_t)(n_keys / 8 + 1); }

void cattn_dropout_stream_begin(struct cattn_dropout_stream *stream, const struct cattn_torch_random *random,
                                double keep_probability);
/* All tasks have drawn: `random` goes on behind them. NULL: leave the generator as it was. */
void cattn_dropout_stream_end(struct cattn_dropout_stream *stream, struct cattn_torch_random *random);

/* Waits for this task's turn, then draws n_rows rows of n_keys bits, lowest bit first, rows cattn_drawn_row_bytes
 * apart. False: asked to stop. worker: NULL where tasks run one after the other. */
bool cattn_dropout_stream_take(struct cattn_dropout_stream *stream, int64_t task, int n_rows, int64_t n_keys,
                               uint8_t *bits, struct cattn_worker *worker);

#endif
