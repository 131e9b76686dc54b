/* scratch.h -- working memory that a thread keeps between its calls, and its division into slices. */
#ifndef CATTN_SCRATCH_H
#define CATTN_SCRATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include "../types.h"

/* ---- working memory that a thread keeps between its calls ---- */

/* Scratch is a 64-byte aligned block that grows on demand, loses its contents then, and is never cleared: to allocate
 * and clear memory in each call would cost more than a small attention. A call takes the block of its thread and gives
 * it back at the end. So a nested call (a Python signal handler may compute) finds none, works in a block of its own
 * and cannot disturb the outer call.
 */

/* One cache line, and the widest vector. */
#define CATTN_SCRATCH_ALIGNMENT 64

/* Bytes of the largest block that is kept; a larger one is freed at the end of the call. */
#define CATTN_SCRATCH_KEEP ((cattn_size)4 << 20)

/* Under AddressSanitizer the slices of a block (scratch.h) have zones between them that may not be touched. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define CATTN_RED_ZONE CATTN_SCRATCH_ALIGNMENT
#define CATTN_FORBID(memory, size) ASAN_POISON_MEMORY_REGION(memory, size)
#define CATTN_ALLOW(memory, size) ASAN_UNPOISON_MEMORY_REGION(memory, size)
#else
#define CATTN_RED_ZONE 0
#define CATTN_FORBID(memory, size) ((void)(memory), (void)(size))
#define CATTN_ALLOW(memory, size) ((void)(memory), (void)(size))
#endif

/* All zero is a valid, empty block. */
struct cattn_scratch {
    void *data;
    cattn_size size; /* bytes at data */
};

/* Makes room for at least `size` bytes; the contents are lost. False: no memory, and the block is empty. */
bool cattn_scratch_grow(struct cattn_scratch *scratch, cattn_size size);
/* Frees the block if it is too large to keep. */
void cattn_scratch_trim(struct cattn_scratch *scratch);
/* Leaves an empty block. */
void cattn_scratch_free(struct cattn_scratch *scratch);

/* Moves the calling thread's block to *scratch and makes room. False: no memory, and nothing to give back. */
bool cattn_scratch_take(struct cattn_scratch *scratch, cattn_size size);
/* Gives the block back to the calling thread, which frees it at its end. */
void cattn_scratch_give_back(struct cattn_scratch *scratch);
/* Frees the calling thread's block. */
void cattn_scratch_release(void);

/* ---- memory of one call, which free() frees ---- */

/* NULL: no memory, or more than addresses can tell apart. */
static inline void *cattn_allocate(cattn_size size) { return (size_t)size == size ? malloc((size_t)size) : NULL; }
static inline void *cattn_allocate_zeros(cattn_size n, size_t element) {
    return (size_t)n == n ? calloc((size_t)n, element) : NULL;
}

/* ---- an arena: cuts one piece of scratch into aligned slices, or only counts their bytes ---- */

/* Under AddressSanitizer each slice is followed by a poisoned zone, so that an overrun of a slice is an error.
 */

struct cattn_arena {
    char *memory; /* NULL: slices are only counted */
    cattn_size used;
    bool guarded; /* slices are followed by poisoned zones */
};

/* An arena over `size` bytes. Do not guard the stack: its poison would outlive the function. */
static inline struct cattn_arena cattn_arena(void *memory, cattn_size size, bool guarded) {
    if (memory && guarded)
        CATTN_ALLOW(memory, size);
    return (struct cattn_arena){memory, 0, memory && guarded};
}

static inline void *cattn_carve(struct cattn_arena *arena, cattn_size bytes) {
    void *slice = arena->memory ? arena->memory + arena->used : NULL;
    const cattn_size aligned =
        (bytes + CATTN_SCRATCH_ALIGNMENT - 1) / CATTN_SCRATCH_ALIGNMENT * CATTN_SCRATCH_ALIGNMENT;
    if (arena->guarded)
        CATTN_FORBID((char *)slice + bytes, aligned + CATTN_RED_ZONE - bytes);
    arena->used += aligned + CATTN_RED_ZONE;
    return slice;
}

#endif
