/* scratch.c -- blocks of memory, and the one that each thread keeps between calls; see scratch.h.
 *
 * A thread's block is the value of a thread key, whose destructor frees it when the thread ends. Only the size is a
 * thread-local variable: on macOS those may be gone before destructors run. A thread that cannot have a value (no
 * key, no memory) allocates in every call.
 */
#include "scratch.h"
#include "os.h"

static cattn_thread_key kept_key;
static bool has_key;
static cattn_once key_once = CATTN_ONCE_INIT;
static _Thread_local cattn_size kept_size; /* bytes of the key's value, if it has one */

bool cattn_scratch_grow(struct cattn_scratch *scratch, cattn_size size) {
    CATTN_ALLOW(scratch->data, scratch->size);
    if (size <= scratch->size)
        return true;
    cattn_scratch_free(scratch); /* first: the contents are lost anyway, so both blocks need not fit at once */
    if (size > SIZE_MAX - CATTN_SCRATCH_ALIGNMENT)
        return false;
    size = (size + CATTN_SCRATCH_ALIGNMENT - 1) / CATTN_SCRATCH_ALIGNMENT * CATTN_SCRATCH_ALIGNMENT;
    void *data = cattn_aligned_alloc(CATTN_SCRATCH_ALIGNMENT, (size_t)size);
    if (data == NULL)
        return false;
    *scratch = (struct cattn_scratch){data, size};
    return true;
}

void cattn_scratch_trim(struct cattn_scratch *scratch) {
    if (scratch->size > CATTN_SCRATCH_KEEP)
        cattn_scratch_free(scratch);
}

void cattn_scratch_free(struct cattn_scratch *scratch) {
    cattn_aligned_free(scratch->data);
    *scratch = (struct cattn_scratch){NULL, 0};
}

static void create_key(void) { has_key = cattn_thread_key_create(&kept_key, cattn_aligned_free); }

/* The calling thread's block, or NULL. */
static void *kept_block(void) {
    cattn_run_once(&key_once, create_key);
    return has_key ? cattn_thread_key_get(kept_key) : NULL;
}

bool cattn_scratch_take(struct cattn_scratch *scratch, cattn_size size) {
    *scratch = (struct cattn_scratch){NULL, 0};
    void *kept = kept_block();
    if (kept != NULL && cattn_thread_key_set(kept_key, NULL))
        *scratch = (struct cattn_scratch){kept, kept_size};
    return cattn_scratch_grow(scratch, size);
}

void cattn_scratch_give_back(struct cattn_scratch *scratch) {
    void *kept = kept_block(); /* a nested call may have left one: keep the larger */
    cattn_scratch_trim(scratch);
    if (scratch->data == NULL)
        return;
    bool is_larger = kept == NULL || kept_size < scratch->size;
    if (!is_larger || !has_key || !cattn_thread_key_set(kept_key, scratch->data)) {
        cattn_scratch_free(scratch);
        return;
    }
    cattn_aligned_free(kept);
    kept_size = scratch->size;
    *scratch = (struct cattn_scratch){NULL, 0};
}

void cattn_scratch_release(void) {
    struct cattn_scratch scratch;
    cattn_scratch_take(&scratch, 0);
    cattn_scratch_free(&scratch);
}
