/* numbers.c -- the bounds of numbers that hold for a whole call, and numbers in messages. See check.h. */
#include "../fp_mode.h"
#include "functions.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Is a positive number neither 0 nor inf in float32, rounded to nearest whatever mode the caller has set? */
static bool rounds_to_float(double number) { return number > 0x1p-150 && number < 0x1.ffffffp127; }

const char *cattn_number_fault(int kind, double number, enum cattn_dtype dtype) {
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
    case NOT_NEGATIVE:
        return number >= 0 ? NULL : "must not be negative";
    case BASE:
        return number >= 1 ? NULL : "must be at least 1";
    default:
        return NULL;
    }
}

void cattn_default_scale(const int64_t *width, double *scale) {
    const unsigned mode = cattn_fp_enter();
    *scale = *width > 0 ? 1.0 / sqrt((double)*width) : 1.0;
    cattn_fp_leave(mode);
}

/* ---- in messages ---- */

/* printf's decimal sign is one of the locale, of one or several bytes. */
static void use_point(char *text) {
    char *to = text;
    for (const char *from = text; *from != '\0'; from++)
        if (strchr("0123456789+-aefin", *from) != NULL)
            *to++ = *from;
        else if (to > text && to[-1] != '.')
            *to++ = '.';
    *to = '\0';
}

struct cattn_number_text cattn_show_number(double x, int digits) {
    struct cattn_number_text shown;
    (void)snprintf(shown.text, sizeof shown.text, "%.*g", digits, x);
    use_point(shown.text);
    return shown;
}

struct cattn_number_text cattn_show_real(double x, bool is_single) {
    struct cattn_number_text shown = {""};
    char *const text = shown.text;
    int digits = 1;
    for (; digits < 17; digits++) {
        (void)snprintf(text, sizeof shown.text, "%.*e", digits - 1, x);
        if (is_single ? strtof(text, NULL) == (float)x : strtod(text, NULL) == x)
            break;
    }
    if (isnan(x))
        (void)snprintf(text, sizeof shown.text, "nan");
    else if (fabs(x) >= 1e-4 && fabs(x) < 1e16) {
        const int decimals = digits - 1 - (int)strtol(strchr(text, 'e') + 1, NULL, 10);
        (void)snprintf(text, sizeof shown.text, "%.*f", decimals > 1 ? decimals : 1, x);
    } else if (!isinf(x) && x != 0) {
        return cattn_show_number(x, digits);
    }
    use_point(text);
    return shown;
}
