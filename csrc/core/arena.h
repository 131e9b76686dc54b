/* arena.h -- cuts one piece of scratch into aligned slices, or only counts what they need. */
#ifndef CATTN_ARENA_H
#define CATTN_ARENA_H

#include <stddef.h>

#define CATTN_ALIGNMENT 64

/* Hands out `memory`, or only counts where it is NULL. */
struct cattn_arena {
    char *memory;
    size_t used;
};

static inline void *cattn_carve(struct cattn_arena *arena, size_t bytes) {
    void *slice = arena->memory ? arena->memory + arena->used : NULL;
    arena->used += (bytes + CATTN_ALIGNMENT - 1) / CATTN_ALIGNMENT * CATTN_ALIGNMENT;
    return slice;
}

#endif
