/* scratch.c -- blocks of memory, and the one that each thread keeps between calls; see scratch.h.
 *
 * A thread's block is the value of a pthread key whose destructor, free(), runs when the thread ends. Only the size is
 * a thread-local variable: on macOS those may be gone before destructors run. A thread that cannot have a value (no
 * key, no memory) allocates in every call.
 */
#define _POSIX_C_SOURCE 200809L

#include "scratch.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

static pthread_key_t kept_key;
static bool has_key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static _Thread_local size_t kept_size; /* bytes of the key's value, if it has one */

bool cattn_scratch_grow(struct cattn_scratch *scratch, size_t size) {
    CATTN_ALLOW(scratch->data, scratch->size);
    if (size <= scratch->size)
        return true;
    cattn_scratch_free(scratch); /* first: the contents are lost anyway, so both blocks need not fit at once */
    if (size > SIZE_MAX - CATTN_SCRATCH_ALIGNMENT)
        return false;
    size = (size + CATTN_SCRATCH_ALIGNMENT - 1) / CATTN_SCRATCH_ALIGNMENT * CATTN_SCRATCH_ALIGNMENT;
    void *data;
    if (posix_memalign(&data, CATTN_SCRATCH_ALIGNMENT, size) != 0)
        return false;
    *scratch = (struct cattn_scratch){data, size};
    return true;
}

void cattn_scratch_trim(struct cattn_scratch *scratch) {
    if (scratch->size > CATTN_SCRATCH_KEEP)
        cattn_scratch_free(scratch);
}

void cattn_scratch_free(struct cattn_scratch *scratch) {
    free(scratch->data);
    *scratch = (struct cattn_scratch){NULL, 0};
}

static void create_key(void) { has_key = pthread_key_create(&kept_key, free) == 0; }

/* The calling thread's block, or NULL. */
static void *kept_block(void) {
    pthread_once(&key_once, create_key);
    return has_key ? pthread_getspecific(kept_key) : NULL;
}

bool cattn_scratch_take(struct cattn_scratch *scratch, size_t size) {
    *scratch = (struct cattn_scratch){NULL, 0};
    void *kept = kept_block();
    if (kept != NULL && pthread_setspecific(kept_key, NULL) == 0)
        *scratch = (struct cattn_scratch){kept, kept_size};
    return cattn_scratch_grow(scratch, size);
}

void cattn_scratch_give_back(struct cattn_scratch *scratch) {
    void *kept = kept_block(); /* a nested call may have left one: keep the larger */
    cattn_scratch_trim(scratch);
    if (scratch->data == NULL)
        return;
    bool is_larger = kept == NULL || kept_size < scratch->size;
    if (!is_larger || !has_key || pthread_setspecific(kept_key, scratch->data) != 0) {
        cattn_scratch_free(scratch);
        return;
    }
    free(kept);
    kept_size = scratch->size;
    *scratch = (struct cattn_scratch){NULL, 0};
}

void cattn_scratch_release(void) {
    struct cattn_scratch scratch;
    cattn_scratch_take(&scratch, 0);
    cattn_scratch_free(&scratch);
}
