/* problem.h -- what bits.c prints of a problem: description, and the hash on which all ways agree. Included once. */
#ifndef PROBLEM_H
#define PROBLEM_H

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "inputs.h"

static char what[512];

static __attribute__((format(printf, 1, 2))) void say(const char *format, ...) {
    const size_t used = strlen(what);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what + used, sizeof what - used, format, arguments);
    va_end(arguments);
}

static uint64_t first_hash;
static bool has_hash, agree = true;

/* Compares the outputs of one more way with the outputs of the first. */
static void compare(enum cattn_status status, const char *way, int num_threads) {
    const uint64_t hash = status == CATTN_OK ? hash_of_outputs() : 0;
    if (status != CATTN_OK || (has_hash && hash != first_hash)) {
        fprintf(stderr, "%s: %s with %d threads gave %016" PRIx64 " (status %d), not %016" PRIx64 "\n", what, way,
                num_threads, hash, (int)status, first_hash);
        agree = false;
    }
    if (!has_hash)
        first_hash = hash;
    has_hash = true;
}

static void begin(const char *kind, int64_t index) {
    source = (uint64_t)index * 8;
    for (const char *c = kind; *c; c++)
        source = source * 31 + (uint64_t)*c;
    snprintf(what, sizeof what, "%s %" PRId64, kind, index);
    has_hash = false;
}

static void end_line(void) { printf("%s: %016" PRIx64 "\n", what, first_hash); }

#endif
