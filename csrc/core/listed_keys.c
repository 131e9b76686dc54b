/* listed_keys.c -- copies of the keys and values that a list of key_indices names. */
#include <string.h>

#include "attention.h"

/* Rows that are prefetched before they are copied: they lie anywhere, so that processors do not foresee them. */
#define ROWS_AHEAD 8
#define LINE_BYTES 64

#define COPY_ELEMENTS(type)                                                                                            \
    for (int64_t c = 0; c < n; c++)                                                                                    \
    memcpy((type *)to + c, (const type *)from + c * stride, sizeof(type))

/* n elements, which become contiguous. */
static void copy_elements(void *to, const void *from, int64_t stride, int64_t n, size_t element) {
    if (stride == 1)
        memcpy(to, from, (size_t)n * element);
    else if (element == 1)
        COPY_ELEMENTS(uint8_t);
    else if (element == 2)
        COPY_ELEMENTS(uint16_t);
    else if (element == 4)
        COPY_ELEMENTS(uint32_t);
    else
        COPY_ELEMENTS(uint64_t);
}

/* n rows of keys, values or scales, of n_cols elements: rows[k] becomes row k of `to`. */
static void gather_rows(const void *first, int64_t row, int64_t col, const int64_t *rows, int64_t first_row, int64_t n,
                        int64_t n_cols, size_t element, void *to) {
    const char *from = first;
    const int64_t row_bytes = row * (int64_t)element, bytes = col == 1 ? n_cols * (int64_t)element : 0;
    for (int64_t k = 0; k < n; k++) {
        const char *ahead = from + (rows[cattn_min(k + ROWS_AHEAD, n - 1)] - first_row) * row_bytes;
        for (int64_t byte = 0; byte < bytes; byte += LINE_BYTES)
            __builtin_prefetch(ahead + byte);
        copy_elements((char *)to + (cattn_size)(k * n_cols) * element, from + (rows[k] - first_row) * row_bytes, col,
                      n_cols, element);
    }
}

/* Copies of rows of a matrix. Scales that rows share are left where they are. */
static struct cattn_matrix gather_matrix(const struct cattn_matrix *from, const int64_t *rows, int64_t n,
                                         int64_t n_cols, size_t element, void *to, float *scales) {
    struct cattn_matrix copy = *from;
    gather_rows(from->first, from->row, from->col, rows, from->first_row, n, n_cols, element, to);
    copy.first = to;
    copy.row = n_cols;
    copy.col = 1;
    copy.first_row = 0;
    if (!cattn_is_quantized(from->storage) || from->scale_row == 0 || n_cols == 0)
        return copy;
    copy.scale = scales;
    copy.scale_row = from->scale_col ? n_cols : 1;
    copy.scale_col = from->scale_col ? 1 : 0;
    gather_rows(from->scale, from->scale_row, from->scale_col, rows, from->first_row, n, copy.scale_row, sizeof *scales,
                scales);
    return copy;
}

/* The copies of the values. Where they are columns of the keys, as in multi-head latent attention, the copy of the keys
 * has them. */
static struct cattn_matrix gather_values(const struct cattn_attention_params *p, const struct cattn_key_list *list,
                                         const int64_t *rows, int64_t n, const struct cattn_key_copies *copies) {
    const struct cattn_matrix *key = &list->key, *value = &list->value;
    const int64_t size = (int64_t)cattn_stored_size(p->dtype, value->storage);
    const int64_t bytes = (int64_t)((uintptr_t)value->first - (uintptr_t)key->first);
    const bool are_columns = !p->quantized_key && !p->quantized_value && key->col == 1 && value->col == 1 &&
                             key->row == value->row && bytes % size == 0 && bytes >= 0 &&
                             bytes / size <= p->head_dim - p->d_v;
    if (!are_columns)
        return gather_matrix(value, rows, n, p->d_v, (size_t)size, copies->value, copies->value_scale);
    return (struct cattn_matrix){
        .storage = value->storage, .first = (const char *)copies->key + bytes, .row = p->head_dim, .col = 1};
}

void cattn_copy_listed_keys(const struct cattn_attention_params *p, const struct cattn_key_list *list, int64_t k0,
                            int64_t k1, const struct cattn_key_copies *copies, struct cattn_matrix *key,
                            struct cattn_matrix *value) {
    const int64_t *rows = list->rows + k0;
    *key = gather_matrix(&list->key, rows, k1 - k0, p->head_dim, cattn_stored_size(p->dtype, list->key.storage),
                         copies->key, copies->key_scale);
    *value = list->value;
    if (list->value.first)
        *value = gather_values(p, list, rows, k1 - k0, copies);
    key->first_row = value->first_row = k0;
}
