/* axes.c -- shapes of results, and views of all arrays of a call, by the letters of their axes. See check.h. */
#include "check.h"

#include <string.h>

static bool is_head(char letter) { return letter == 'N' || letter == 'K'; }

/* Whether these axes end with vectors: such arrays have the layout of query, key and value, all others the heads first.
 */
static bool have_vectors(const char *axes) {
    char last = '\0';
    for (; *axes != '\0'; axes++)
        last = *axes;
    return last == 'H' || last == 'D';
}

static int64_t size_of(const struct cattn_shape *shape, const struct cattn_attention_params *params, char letter) {
    switch (letter) {
    case 'N':
        return params->num_heads;
    case 'K':
        return shape->kv_heads;
    case 'T':
        return shape->dims[shape->nd - 2];
    case 'S':
        return shape->dims[shape->nd - 1];
    case 'H':
        return params->head_dim;
    case 'D':
        return params->d_v;
    case 'X':
        return cattn_ceil_div(shape->dims[shape->nd - 2], params->block_size);
    case 'Y':
        return cattn_ceil_div(shape->dims[shape->nd - 1], params->block_size);
    case 'L':
        return shape->listed;
    default:
        return shape->n_top;
    }
}

int cattn_axes_shape(const struct cattn_shape *shape, const struct cattn_attention_params *params, const char *axes,
                     int64_t *dims) {
    const bool swaps = shape->tokens_first && have_vectors(axes);
    int nd = 0;
    for (; nd < shape->n_batch_dims; nd++)
        dims[nd] = shape->dims[nd];
    for (; *axes != '\0'; axes++)
        if (shape->has_heads || !is_head(*axes))
            dims[nd++] = size_of(shape, params, *axes);
    if (swaps) {
        const int64_t heads = dims[nd - 3];
        dims[nd - 3] = dims[nd - 2];
        dims[nd - 2] = heads;
    }
    if (!shape->is_packed)
        return nd;
    memmove(dims, dims + 1, (size_t)(nd - 1) * sizeof *dims);
    return nd - 1;
}

void cattn_axes_view(const struct cattn_shape *shape, const char *axes, enum cattn_fits fits,
                     const struct cattn_array *array, struct cattn_tensor *tensor) {
    const bool of_heads = axes[0] != '\0' && axes[1] == '\0'; /* one number for each, even without an axis of heads */
    int own = 0;
    for (const char *letter = axes; *letter != '\0'; letter++)
        own |= is_head(*letter)                      ? (shape->has_heads || of_heads ? CATTN_AXIS_HEAD : 0)
               : *letter == 'T' || letter[1] != '\0' ? CATTN_AXIS_ROW
                                                     : CATTN_AXIS_COL;
    cattn_view(tensor, array, shape->n_batch_dims, own);
    if (shape->tokens_first && have_vectors(axes)) {
        const int64_t heads = tensor->row;
        tensor->row = tensor->head;
        tensor->head = heads;
    }
    if (fits == EXACTLY && (own & CATTN_AXIS_COL) && array->dims[array->nd - 1] == 1)
        tensor->col = 1;
}
