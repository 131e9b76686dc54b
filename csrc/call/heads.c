/* heads.c -- numbers of each query head, slopes and sinks, in the type of the computation; and scales. See check.h. */
#include "check.h"

#include <float.h>
#include <math.h>
#include <string.h>

static double real_at(const struct cattn_array *array, const char *at) {
    if (array->size == sizeof(double)) {
        double number;
        memcpy(&number, at, sizeof number);
        return number;
    }
    float number;
    memcpy(&number, at, sizeof number);
    return (double)number;
}

bool cattn_check_heads(const struct cattn_door *door, const struct cattn_array *array, enum cattn_operand_kind kind,
                       enum cattn_dtype dtype, void *to) {
    const double least = kind == SLOPES ? 0 : -HUGE_VAL;
    struct cattn_walk walk;
    int64_t n = 0;
    cattn_walk_begin(&walk, array, true);
    do {
        for (int64_t i = 0; i < walk.n; i++, n++) {
            const double x = real_at(array, walk.run + i * walk.stride);
            if (!(x >= least && x < HUGE_VAL)) {
                return cattn_fail(door, CATTN_WRONG_VALUE, "%s must be %s, got %s", array->name,
                                  kind == LOGITS ? "finite, or -inf for none" : "finite and not negative",
                                  cattn_show_real(x, array->size == sizeof(float)).text);
            }
            const bool is_large = dtype == CATTN_F32 && !isinf(x) && fabs(x) > (double)FLT_MAX; /* it stays finite */
            if (to != NULL && dtype == CATTN_F32)
                ((float *)to)[n] = (float)(is_large ? copysign((double)FLT_MAX, x) : x);
            else if (to != NULL)
                ((double *)to)[n] = x;
        }
    } while (cattn_walk_next(&walk));
    return true;
}

bool cattn_are_scales(const struct cattn_array *array, float *wrong) {
    struct cattn_walk walk;
    cattn_walk_begin(&walk, array, false);
    do {
        int bad = 0;
        if (walk.stride == sizeof(float)) /* a loop of its own becomes vector code */
            for (int64_t i = 0; i < walk.n; i++)
                bad |= !cattn_is_scale(((const float *)(const void *)walk.run)[i]);
        else
            for (int64_t i = 0; i < walk.n; i++)
                bad |= !cattn_is_scale(*(const float *)(const void *)(walk.run + i * walk.stride));
        for (int64_t i = 0; bad && i < walk.n; i++) {
            *wrong = *(const float *)(const void *)(walk.run + i * walk.stride);
            if (!cattn_is_scale(*wrong))
                return false;
        }
    } while (cattn_walk_next(&walk));
    return true;
}
