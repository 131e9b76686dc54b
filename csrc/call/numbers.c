/* numbers.c -- the bounds of numbers that hold for a whole call. See check.h. */
#include "check.h"

#include <math.h>

/* Is a positive number neither 0 nor inf in float32, rounded to nearest whatever mode the caller has set? */
static bool rounds_to_float(double number) { return number > 0x1p-150 && number < 0x1.ffffffp127; }

const char *cattn_scale_fault(double scale, enum cattn_dtype dtype) {
    if (!isfinite(scale))
        return "must be finite";
    /* it rounds to infinity in every rounding mode */
    return dtype == CATTN_F32 && fabs(scale) >= 0x1.ffffffp127 ? "must round to a finite float32" : NULL;
}

const char *cattn_softcap_fault(double softcap, enum cattn_dtype dtype) {
    if (!(softcap >= 0))
        return "must be positive, or None or 0 for none";
    return dtype == CATTN_F32 && softcap != 0 && !rounds_to_float(softcap) ? "must round to a positive finite float32"
                                                                           : NULL;
}

const char *cattn_probability_fault(double p) { return p >= 0 && p <= 1 ? NULL : "must be in [0, 1]"; }
