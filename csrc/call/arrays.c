/* arrays.c -- shapes of arrays, walks over their elements, and the text of errors. See check.h. */
#include "functions.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool cattn_fail(const struct cattn_door *door, enum cattn_fault fault, const char *format, ...) {
    char text[2 * sizeof(struct cattn_shape_text) + 512];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    door->fail(door->context, fault, text);
    return false;
}

struct cattn_shape_text cattn_show_shape(int nd, const int64_t *dims) {
    struct cattn_shape_text shape = {"("};
    size_t used = 1;
    for (int axis = 0; axis < nd; axis++)
        used += (size_t)snprintf(shape.text + used, sizeof shape.text - used, "%s%" PRId64, axis > 0 ? ", " : "",
                                 dims[axis]);
    (void)snprintf(shape.text + used, sizeof shape.text - used, nd == 1 ? ",)" : ")");
    return shape;
}

bool cattn_broadcasts(const struct cattn_array *array, int nd, const int64_t *dims) {
    const int own = array->nd;
    bool fits = own <= nd;
    for (int back = 1; fits && back <= own; back++)
        fits = array->dims[own - back] == 1 || array->dims[own - back] == dims[nd - back];
    return fits;
}

bool cattn_check_broadcast(const struct cattn_door *door, const struct cattn_array *array, int nd, const int64_t *dims,
                           const char *meaning, const char *hint) {
    return cattn_broadcasts(array, nd, dims) ||
           cattn_fail(door, CATTN_WRONG_VALUE, "%s has shape %s, which does not broadcast to %s %s%s", array->name,
                      cattn_show_shape(array->nd, array->dims).text, meaning, cattn_show_shape(nd, dims).text, hint);
}

bool cattn_check_shape(const struct cattn_door *door, const struct cattn_array *array, const char *whose, int nd,
                       const int64_t *dims) {
    bool fits = array->nd == nd;
    for (int axis = 0; fits && axis < nd; axis++)
        fits = array->dims[axis] == dims[axis];
    return fits || cattn_fail(door, CATTN_WRONG_VALUE, "%s has shape %s, %s has %s", array->name,
                              cattn_show_shape(array->nd, array->dims).text, whose, cattn_show_shape(nd, dims).text);
}

bool cattn_check_batch(const struct cattn_door *door, const struct cattn_array *const *arrays, int n_arrays, int nd,
                       int n_axes, int64_t *sizes) {
    for (int axis = 0; axis < n_axes; axis++) {
        const struct cattn_array *owner = arrays[0];
        sizes[axis] = 1;
        for (int i = 0; i < n_arrays; i++) {
            const int64_t own = cattn_size_of(arrays[i], nd - axis);
            if (own == 1 || own == sizes[axis])
                continue;
            if (sizes[axis] != 1)
                return cattn_fail(door, CATTN_WRONG_VALUE,
                                  "leading dimensions do not broadcast: on axis %d %s has size %" PRId64
                                  ", %s has %" PRId64,
                                  axis - nd, owner->name, sizes[axis], arrays[i]->name, own);
            sizes[axis] = own;
            owner = arrays[i];
        }
    }
    return true;
}

int64_t cattn_count(int nd, const int64_t *dims) {
    int64_t count = 1;
    for (int axis = 0; axis < nd; axis++) {
        if (dims[axis] == 0)
            return 0;
        if (count > INT64_MAX / dims[axis])
            return -1;
        count *= dims[axis];
    }
    return count;
}

/* Strides are whole elements, so the shift is exact; compilers shift negative numbers arithmetically. */
static int64_t stride_of(const struct cattn_array *array, int axis) {
    const int shift = array->size == 8 ? 3 : array->size == 4 ? 2 : array->size == 2 ? 1 : 0;
    return axis >= 0 && array->dims[axis] != 1 ? array->strides[axis] >> shift : 0;
}

void cattn_view(struct cattn_tensor *tensor, const struct cattn_array *array, int n_batch_dims, int axes) {
    int axis = array->nd;
    tensor->data = array->data;
    tensor->col = axes & CATTN_AXIS_COL ? stride_of(array, --axis) : 0;
    tensor->row = axes & CATTN_AXIS_ROW ? stride_of(array, --axis) : 0;
    tensor->head = axes & CATTN_AXIS_HEAD ? stride_of(array, --axis) : 0;
    for (int i = n_batch_dims - 1; i >= 0; i--)
        tensor->batch[i] = stride_of(array, --axis);
}

void cattn_view_rows(struct cattn_tensor *tensor, const struct cattn_array *array, int nd, int col_axis) {
    const int missing = nd - array->nd;
    tensor->data = array->data;
    tensor->head = tensor->row = 0;
    tensor->col = stride_of(array, col_axis - missing);
    for (int axis = 0, batch = 0; axis < nd; axis++)
        if (axis != col_axis)
            tensor->batch[batch++] = stride_of(array, axis - missing);
}

bool cattn_rows_are_even(const struct cattn_array *array, int64_t *row) {
    int64_t length = 0; /* of the axes so far, in bytes */
    bool first = true;
    *row = 0;
    for (int axis = array->nd - 2; axis >= 0; axis--) {
        const int64_t n = array->dims[axis], stride = array->strides[axis];
        if (n == 1)
            continue;
        if (first)
            *row = stride / array->size;
        else if (stride != length)
            return false;
        first = false;
        length = stride * n;
    }
    return true;
}

/* ---- arrays of functions ---- */

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

/* ---- elements ---- */

void cattn_walk_begin(struct cattn_walk *walk, const struct cattn_array *array, bool repeated) {
    bool empty = false;
    for (int axis = 0; axis < array->nd; axis++)
        empty = empty || array->dims[axis] == 0;
    walk->run = array->data;
    walk->nd = 0;
    walk->dims[0] = !empty;
    walk->strides[0] = 0;
    for (int axis = array->nd - 1; axis >= 0 && !empty; axis--) { /* the last axis becomes axis 0 */
        const int64_t dim = array->dims[axis], stride = array->strides[axis];
        if (dim <= 1 || (stride == 0 && !repeated))
            continue;
        const int last = walk->nd - 1;
        if (walk->nd > 0 && stride == walk->dims[last] * walk->strides[last]) {
            walk->dims[last] *= dim;
            continue;
        }
        walk->dims[walk->nd] = dim;
        walk->strides[walk->nd] = stride;
        walk->index[walk->nd++] = 0;
    }
    walk->n = walk->dims[0];
    walk->stride = walk->strides[0];
}

bool cattn_walk_next(struct cattn_walk *walk) {
    for (int axis = 1; axis < walk->nd; axis++) { /* as an odometer counts */
        walk->run += walk->strides[axis];
        if (++walk->index[axis] < walk->dims[axis])
            return true;
        walk->run -= walk->dims[axis] * walk->strides[axis];
        walk->index[axis] = 0;
    }
    return false;
}
