/* drawn.c -- turns at a serial stream of dropout bits; see drawn.h. */
#include "dropout_stream.h"

#include <string.h>

#include "tickets.h"

/* So often a long row looks whether it is asked to stop; a multiple of what is drawn at a time. */
#define LOOK_KEYS (1 << 16)

void cattn_dropout_stream_begin(struct cattn_dropout_stream *stream, const struct cattn_torch_random *random,
                                double keep_probability) {
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->passed, NULL);
    stream->next = 0;
    stream->fork_count = cattn_fork_count();
    cattn_torch_keep_begin(&stream->cursor, random, keep_probability);
}

void cattn_dropout_stream_end(struct cattn_dropout_stream *stream, struct cattn_torch_random *random) {
    if (random)
        cattn_torch_keep_end(&stream->cursor, random);
    if (stream->fork_count == cattn_fork_count()) {
        pthread_cond_destroy(&stream->passed);
        pthread_mutex_destroy(&stream->lock);
    }
}

/* False: asked to stop. */
static bool draw_row(struct cattn_torch_keep *cursor, int64_t n_keys, uint8_t *bits, struct cattn_worker *worker) {
    uint8_t kept[1024];
    memset(bits, 0, cattn_dropout_stream_row_bytes(n_keys));
    for (int64_t k0 = 0; k0 < n_keys; k0 += (int64_t)sizeof kept) {
        if (worker && k0 % LOOK_KEYS == 0 && cattn_should_stop(worker))
            return false;
        const int64_t left = n_keys - k0, n = left < (int64_t)sizeof kept ? left : (int64_t)sizeof kept;
        cattn_torch_keep_next(cursor, n, kept);
        for (int64_t k = 0; k < n; k++)
            bits[(k0 + k) >> 3] |= (uint8_t)(kept[k] << (k & 7));
    }
    return true;
}

bool cattn_dropout_stream_take(struct cattn_dropout_stream *stream, int64_t task, int n_rows, int64_t n_keys,
                               uint8_t *bits, struct cattn_worker *worker) {
    pthread_mutex_lock(&stream->lock);
    while (worker && stream->next != task)
        if (!cattn_wait_briefly(&stream->passed, &stream->lock, worker))
            return false;
    pthread_mutex_unlock(&stream->lock);
    /* nobody else touches the cursor until the turn is passed on */
    for (int r = 0; r < n_rows; r++) {
        if (!draw_row(&stream->cursor, n_keys, bits + (size_t)r * cattn_dropout_stream_row_bytes(n_keys), worker))
            return false; /* all are asked to stop: nobody waits for the next turn */
    }
    pthread_mutex_lock(&stream->lock);
    stream->next = task + 1;
    pthread_cond_broadcast(&stream->passed);
    pthread_mutex_unlock(&stream->lock);
    return true;
}
