/* numbers.c -- the bounds of numbers that hold for a whole call. See check.h. */
#include "check.h"

#include <math.h>

/* Is a positive number neither 0 nor inf in float32, rounded to nearest whatever mode the caller has set? */
static bool rounds_to_float(double number) { return number > 0x1p-150 && number < 0x1.ffffffp127; }

const char *cattn_number_fault(enum cattn_number_kind kind, double number, enum cattn_dtype dtype) {
    const bool is_single = dtype == CATTN_F32;
    switch (kind) {
    case REAL:
        if (!isfinite(number))
            return "must be finite";
        /* it rounds to infinity in every rounding mode */
        return is_single && fabs(number) >= 0x1.ffffffp127 ? "must round to a finite float32" : NULL;
    case BOUND:
        if (!(number >= 0))
            return "must be positive, or None or 0 for none";
        return is_single && number != 0 && !rounds_to_float(number) ? "must round to a positive finite float32" : NULL;
    case PROBABILITY:
        return number >= 0 && number <= 1 ? NULL : "must be in [0, 1]";
    default:
        return NULL;
    }
}
