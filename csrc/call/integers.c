/* integers.c -- integers of any type, copied to int64 and checked: lengths, offsets, edges, lists of keys. See check.h.
 */
#include "check.h"

#include <inttypes.h>
#include <string.h>

/* Numbers that are read between two looks at signals: some milliseconds. */
#define PIECE ((int64_t)1 << 20)

/* The native integer of an array at this place, of uint64 its bits. */
static int64_t integer_at(const struct cattn_array *array, const char *at) {
    char bytes[sizeof(int64_t)];
    for (int i = 0; array->is_swapped && i < array->size; i++)
        bytes[i] = at[array->size - 1 - i];
    const char *from = array->is_swapped ? bytes : at;
    const bool is_signed = array->kind == 'i';
#define AS(type)                                                                                                       \
    do {                                                                                                               \
        type number;                                                                                                   \
        memcpy(&number, from, sizeof number); /* it need not be aligned */                                             \
        return (int64_t)number;                                                                                        \
    } while (0)
    switch (array->size) {
    case 1:
        if (is_signed)
            AS(int8_t);
        AS(uint8_t);
    case 2:
        if (is_signed)
            AS(int16_t);
        AS(uint16_t);
    case 4:
        if (is_signed)
            AS(int32_t);
        AS(uint32_t);
    default:
        AS(int64_t);
    }
#undef AS
}

/* Copies all numbers and counts them; *beyond is 0, or the largest number of uint64 that int64 lacks. */
static bool copy(const struct cattn_door *door, const struct cattn_array *array, int64_t *to, int64_t *n,
                 uint64_t *beyond) {
    const bool is_u64 = array->kind == 'u' && array->size == 8;
    struct cattn_walk walk;
    int64_t left = PIECE;
    *n = 0;
    *beyond = 0;
    cattn_walk_begin(&walk, array, false);
    if (walk.n > 0 && array->kind != 'i' && array->kind != 'u')
        return cattn_fail(door, CATTN_WRONG_TYPE, "%s must be integers", array->name);
    do {
        for (int64_t i = 0; i < walk.n; i++) {
            int64_t number = integer_at(array, walk.run + i * walk.stride);
            if (is_u64 && number < 0) {
                *beyond = (uint64_t)number > *beyond ? (uint64_t)number : *beyond;
                number = INT64_MAX;
            }
            to[(*n)++] = number;
            if (--left == 0) {
                left = PIECE;
                if (door->goes_on != NULL && !door->goes_on(door->context))
                    return false;
            }
        }
    } while (cattn_walk_next(&walk));
    return true;
}

bool cattn_read_integers(const struct cattn_door *door, const struct cattn_array *array, int64_t least, int64_t most,
                         enum cattn_beyond beyond, int64_t *to) {
    int64_t n, low = most, high = least;
    uint64_t huge;
    if (!copy(door, array, to, &n, &huge))
        return false;
    for (int64_t i = 0; i < n; i++) {
        low = to[i] < low ? to[i] : low;
        high = to[i] > high ? to[i] : high;
        if (beyond == CATTN_CLIPPED)
            to[i] = to[i] < least ? least : to[i] > most ? most : to[i];
    }
    if (beyond == CATTN_CLIPPED || (low >= least && high <= most && huge == 0))
        return true;
    return cattn_fail(door, CATTN_WRONG_VALUE, "%s must be between %" PRId64 " and %" PRId64 ", got %s%" PRIu64,
                      array->name, least, most, low < least ? "-" : "",
                      low < least ? 0 - (uint64_t)low
                      : huge > 0  ? huge
                                  : (uint64_t)high);
}

bool cattn_read_key_indices(const struct cattn_door *door, const struct cattn_array *array, int64_t n_keys,
                            int64_t *to) {
    int64_t n;
    uint64_t huge;
    if (!copy(door, array, to, &n, &huge))
        return false;
    for (int64_t i = 0; i < n; i++)
        if (to[i] < -1 || to[i] >= n_keys)
            return cattn_fail(door, CATTN_WRONG_VALUE,
                              "key_indices has the index %" PRId64 ", but key has %" PRId64
                              " keys: pass 0 to T_k - 1, or -1",
                              to[i], n_keys);
    return true;
}
