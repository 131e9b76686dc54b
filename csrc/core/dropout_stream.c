/* dropout_stream.c -- tasks take tickets at a sequence of dropout bits; see dropout_stream.h. */
#include "dropout_stream.h"

#include <string.h>

/* Keys of a long row between two checks for an interrupt; a multiple of CATTN_STREAM_KEYS. */
#define LOOK_KEYS (1 << 16)

void cattn_dropout_stream_begin(struct cattn_dropout_stream *stream, const struct cattn_torch_random *random,
                                double keep_probability) {
    cattn_tickets_begin(&stream->tickets, 1);
    cattn_torch_dropout_begin(&stream->cursor, random, keep_probability);
}

void cattn_dropout_stream_end(struct cattn_dropout_stream *stream, struct cattn_torch_random *random) {
    if (random)
        cattn_torch_dropout_end(&stream->cursor, random);
    cattn_tickets_end(&stream->tickets);
}

int64_t cattn_dropout_stream_keys(struct cattn_torch_dropout *cursor, int64_t k0, int64_t n_keys, uint8_t *kept,
                                  struct cattn_worker *worker) {
    if (worker && k0 % LOOK_KEYS == 0 && cattn_should_stop(worker))
        return 0;
    const int64_t n = cattn_min(n_keys - k0, CATTN_STREAM_KEYS);
    cattn_torch_dropout_next(cursor, n, kept);
    return n;
}

/* Keeps the bits from key `first` on, as keys 0, 1, ... Returns false if the call was stopped. */
static bool draw_row(struct cattn_torch_dropout *cursor, int64_t first, int64_t n_keys, uint8_t *bits,
                     struct cattn_worker *worker) {
    uint8_t kept[CATTN_STREAM_KEYS];
    memset(bits, 0, cattn_dropout_stream_row_bytes(n_keys));
    for (int64_t k0 = 0, n; k0 < n_keys; k0 += n) {
        n = cattn_dropout_stream_keys(cursor, k0, n_keys, kept, worker);
        if (n == 0)
            return false;
        for (int64_t k = first > k0 ? first - k0 : 0; k < n; k++) {
            const int64_t key = k0 + k - first;
            bits[key >> 3] |= (uint8_t)(kept[k] << (key & 7));
        }
    }
    return true;
}

bool cattn_dropout_stream_take(struct cattn_dropout_stream *stream, int64_t task, const struct cattn_rows *rows,
                               struct cattn_worker *worker) {
    const int64_t n_keys = rows->call.seqlen_k;
    if (worker && !cattn_tickets_wait(&stream->tickets, 0, task, worker))
        return false;
    /* the cursor is this task's until it passes the ticket on */
    for (int r = 0; r < rows->n_rows; r++) {
        uint8_t *bits = rows->scratch.drop_bits + (size_t)r * cattn_dropout_stream_row_bytes(n_keys);
        if (!draw_row(&stream->cursor, rows->first_key, n_keys, bits, worker))
            return false; /* the whole call stops: no task waits for the next ticket for long */
    }
    cattn_tickets_pass(&stream->tickets, 0);
    return true;
}
