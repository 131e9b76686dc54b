/* functions.c -- the laws of the arrays of a function: their axes, the sizes of a call, and views. See functions.h. */
#include "functions.h"

#include <string.h>

bool cattn_check_main(const struct cattn_door *door, const struct cattn_argument *row, struct cattn_array *array) {
    const int least = (int)strlen(row->axes) - 1;
    if (array->nd < least) {
        char axes[64] = "...";
        for (const char *letter = row->axes + 1; *letter != '\0'; letter++)
            (void)strcat(strcat(axes, ", "), (char[]){*letter, '\0'});
        return cattn_fail(door, CATTN_WRONG_VALUE, "%s must have at least %d dimension%s (%s), got %d", row->name,
                          least, least == 1 ? "" : "s", axes, array->nd);
    }
    if (array->nd == 0) {
        array->nd = 1;
        array->dims[0] = 1;
        array->strides[0] = 0;
    }
    return true;
}

bool cattn_check_relation(const struct cattn_door *door, enum cattn_relation relation, const struct cattn_array *array,
                          const struct cattn_array *main, int own_nd) {
    const int64_t *n = &main->dims[main->nd - 1];
    switch (relation) {
    case CATTN_ALIKE:
        return cattn_check_shape(door, array, main->name, own_nd, main->dims);
    case CATTN_COLUMN:
        return (array->nd == 1 && array->dims[0] == *n) ||
               cattn_fail(door, CATTN_WRONG_VALUE,
                          "%s must have one number for each column of %s, shape %s, got shape %s", array->name,
                          main->name, cattn_show_shape(1, n).text, cattn_show_shape(array->nd, array->dims).text);
    default:
        return true;
    }
}

#define AT(type, params, place) (*(type *)(void *)((char *)(params) + (place)))

void cattn_fill_sizes(const struct cattn_places *places, const struct cattn_array *main, int axis, void *params) {
    const bool has_rows = places->rows != NOWHERE;
    const int row_axis = has_rows ? main->nd - 2 : -1;
    int64_t *batch = &AT(int64_t, params, places->batch_shape);
    uint64_t count = 1; /* unsigned: beside a size of 0 the others may be so large that their product wraps */
    bool is_empty = false;
    for (int i = 0; i < main->nd; i++) {
        const int64_t n = main->dims[i];
        is_empty |= n == 0;
        if (i == axis || i == row_axis)
            continue;
        *batch++ = n;
        count *= (uint64_t)n;
    }
    AT(int, params, places->n_batch_dims) = main->nd - 1 - has_rows;
    AT(int64_t, params, places->count) = is_empty ? 0 : (int64_t)count;
    AT(int64_t, params, places->cols) = main->dims[axis];
    if (has_rows)
        AT(int64_t, params, places->rows) = main->dims[row_axis];
}

void cattn_view_related(const struct cattn_places *places, enum cattn_relation relation, const struct cattn_array *main,
                        int axis, const struct cattn_array *array, void *tensor) {
    struct cattn_tensor *view = tensor;
    if (relation == CATTN_COLUMN)
        cattn_view(view, array, 0, CATTN_AXIS_COL);
    else if (places->rows == NOWHERE)
        cattn_view_rows(view, array, main->nd, axis);
    else
        cattn_view(view, array, main->nd - 2, CATTN_AXIS_COL | CATTN_AXIS_ROW);
    if (main->dims[axis] == 1 && relation != CATTN_SPREAD)
        view->col = 1; /* an axis of one element has any stride; with 1 kernels read it in place */
}
