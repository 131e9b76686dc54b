/* arena.h -- cuts one piece of scratch into aligned slices, or only counts what they need.
 *
 * Under AddressSanitizer each slice is followed by a poisoned zone, so that an overrun of a slice is an error.
 */
#ifndef CATTN_ARENA_H
#define CATTN_ARENA_H

#include "scratch.h"

struct cattn_arena {
    char *memory; /* NULL: slices are only counted */
    size_t used;
    bool guarded; /* slices are followed by poisoned zones */
};

/* An arena over `size` bytes. Do not guard the stack: its poison would outlive the function. */
static inline struct cattn_arena cattn_arena(void *memory, size_t size, bool guarded) {
    if (memory && guarded)
        CATTN_ALLOW(memory, size);
    return (struct cattn_arena){memory, 0, memory && guarded};
}

static inline void *cattn_carve(struct cattn_arena *arena, size_t bytes) {
    void *slice = arena->memory ? arena->memory + arena->used : NULL;
    const size_t aligned = (bytes + CATTN_SCRATCH_ALIGNMENT - 1) / CATTN_SCRATCH_ALIGNMENT * CATTN_SCRATCH_ALIGNMENT;
    if (arena->guarded)
        CATTN_FORBID((char *)slice + bytes, aligned + CATTN_RED_ZONE - bytes);
    arena->used += aligned + CATTN_RED_ZONE;
    return slice;
}

#endif
