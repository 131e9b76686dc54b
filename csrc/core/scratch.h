/* scratch.h -- working memory that outlives a call.
 *
 * An arena is a 64-byte aligned block that grows on demand, keeps no contents when it does, and is never cleared:
 * allocating and clearing per call costs more than a small attention. Every thread owns one arena between its calls. It
 * is taken for the length of a call and given back afterwards, so a nested call (a Python signal handler may compute
 * too) finds none, works in a block of its own and cannot disturb the outer one.
 */
#ifndef CATTN_SCRATCH_H
#define CATTN_SCRATCH_H

#include <stdbool.h>
#include <stddef.h>

/* One cache line, and the widest vector. */
#define CATTN_SCRATCH_ALIGNMENT 64

/* An arena above this size goes back to the system at the end of the call that needed it. */
#define CATTN_SCRATCH_KEEP ((size_t)4 << 20)

/* Under AddressSanitizer the parts of an arena lie apart, and what is between them may not be touched. */
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

/* All zero is a valid, empty arena. */
struct cattn_scratch {
    void *data;
    size_t size; /* bytes at data */
};

/* Makes room for at least `size` bytes; the contents are lost. False: no memory, and the arena is empty. */
bool cattn_scratch_grow(struct cattn_scratch *scratch, size_t size);
/* Frees the arena if it is too large to keep. */
void cattn_scratch_trim(struct cattn_scratch *scratch);
/* Leaves an empty arena. */
void cattn_scratch_free(struct cattn_scratch *scratch);

/* Moves the calling thread's arena into *scratch and makes room. False: no memory, nothing to give back. */
bool cattn_scratch_take(struct cattn_scratch *scratch, size_t size);
/* Returns what was taken to the calling thread, which frees it when the thread ends. */
void cattn_scratch_give_back(struct cattn_scratch *scratch);
/* Frees what the calling thread keeps. */
void cattn_scratch_release(void);

#endif
