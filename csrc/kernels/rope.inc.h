/* rope.inc.h -- rotary positions: inverse frequencies, sines and cosines (tables of float64), and rotated rows.
 *
 * Products and sums are rounded one by one, never by an FMA: the bits are the same as of x * cos + rotate_half(x) * sin
 * with NumPy, from the same cosines and sines. csrc/README.md ("Rotary positions and norms") has the law.
 */
#include "sincos.inc.h"

#if REAL_BITS == 64

/* frequencies[i] = exp(-i * step). step_high has at most 27 bits, so that its product with i is exact. */
static void rope_frequencies(int64_t n, double step_high, double step_low, double *frequencies) {
    for (int64_t first = 0; first < n; first += LANES) {
        real index[LANES];
        for (int i = 0; i < LANES; i++)
            index[i] = (real)(first + i);
        const vf i = vf_loadu(index);
        const vf power = vf_exp_of_pair(i * vf_set1(step_high), i * vf_set1(step_low));
        store_strided(frequencies + first, 1, power, (int)min64(LANES, n - first));
    }
}

/* Writes number `at` of a table, rounded once to its type. */
INLINE void put_angle(const struct cattn_rope_angles *angles, void *table, int64_t at, real value) {
    if (angles->dtype == CATTN_F32)
        ((float *)table)[at] = (float)value;
    else
        ((double *)table)[at] = value;
}

static void rope_angles(const struct cattn_rope_angles *angles) {
    for (int64_t first = 0; first < angles->n; first += LANES) {
        const int n = (int)min64(LANES, angles->n - first);
        vf sine, cosine;
        real sines[LANES], cosines[LANES];
        vf_sincos(load_strided(angles->frequencies + first, 1, n) * vf_set1(angles->position), &sine, &cosine);
        vf_storeu(sines, sine * vf_set1(angles->sine_factor));
        vf_storeu(cosines, cosine * vf_set1(angles->cosine_factor));
        for (int i = 0; i < n; i++) {
            const int64_t at = angles->interleaved ? 2 * (first + i) : first + i;
            put_angle(angles, angles->cosines, at, cosines[i]);
            put_angle(angles, angles->sines, at, angles->interleaved ? -sines[i] : sines[i]);
            if (angles->interleaved) {
                put_angle(angles, angles->cosines, at + 1, cosines[i]);
                put_angle(angles, angles->sines, at + 1, sines[i]);
            }
        }
    }
}

#endif

/* ---- one row ---- */

/* A row of x and out, and its sines and cosines. */
struct rotation {
    const struct cattn_rope_rows *rows;
    const void *x;
    void *out;
    const real *cosines, *sines;
};

/* n pairs whose first elements are `first`, `first` + step, ... and whose second ones are `partner` elements farther.
 * Both are loaded before the first store, because out may be x. */
INLINE void rotate_pairs(const struct rotation *r, enum cattn_storage storage, int64_t first, int64_t partner,
                         int64_t step, int64_t x_col, int64_t out_col, vf cosine, vf sine, int n) {
    const int64_t second = first + partner;
    const vf a = load_stored(storage, r->x, first * x_col, step * x_col, n);
    const vf b = load_stored(storage, r->x, second * x_col, step * x_col, n);
    store_stored(storage, r->out, first * out_col, step * out_col, a * cosine - b * sine, n);
    store_stored(storage, r->out, second * out_col, step * out_col, b * cosine + a * sine, n);
}

/* Element i of the first half and element i of the second half form a pair. */
INLINE void rotate_halves(const struct rotation *r, enum cattn_storage storage, int64_t x_col, int64_t out_col) {
    const int64_t half = r->rows->rotary_dim / 2;
    int64_t k = 0;
    for (; k + LANES <= half; k += LANES)
        rotate_pairs(r, storage, k, half, 1, x_col, out_col, vf_loadu(r->cosines + k), vf_loadu(r->sines + k), LANES);
    if (k < half) {
        const int n = (int)(half - k);
        rotate_pairs(r, storage, k, half, 1, x_col, out_col, vf_loadu_n(r->cosines + k, n), vf_loadu_n(r->sines + k, n),
                     n);
    }
}

/* Neighbours form a pair. The tables have every cosine twice, and every sine with both signs. */
INLINE void rotate_neighbours(const struct rotation *r, enum cattn_storage storage, int64_t x_col, int64_t out_col) {
    const int64_t n_cols = r->rows->rotary_dim;
#if LANES > 1
    if (x_col == 1 && out_col == 1) {
        int64_t k = 0;
        for (; k < n_cols; k += LANES) {
            const int n = (int)min64(LANES, n_cols - k);
            const vf x = load_stored(storage, r->x, k, 1, n);
            const vf cosine = load_strided(r->cosines + k, 1, n), sine = load_strided(r->sines + k, 1, n);
            store_stored(storage, r->out, k, 1, x * cosine + vf_swap_pairs(x) * sine, n);
        }
        return;
    }
#endif
    for (int64_t k = 0; k < n_cols; k += 2 * LANES) {
        const int n = (int)min64(LANES, (n_cols - k) / 2);
        rotate_pairs(r, storage, k, 1, 2, x_col, out_col, load_strided(r->cosines + k, 2, n),
                     load_strided(r->sines + k + 1, 2, n), n);
    }
}

INLINE void rotate(const struct rotation *r, enum cattn_storage storage, int64_t x_col, int64_t out_col) {
    if (r->rows->interleaved)
        rotate_neighbours(r, storage, x_col, out_col);
    else
        rotate_halves(r, storage, x_col, out_col);
}

/* The columns from rotary_dim on, bit for bit. */
static void rope_rest(const struct rotation *r) {
    const struct cattn_rope_rows *rows = r->rows;
    const size_t size = stored_size(rows->storage);
    const int64_t first = rows->rotary_dim;
    if (r->out == r->x)
        return;
    if (rows->x_col == 1 && rows->out_col == 1) {
        const int64_t at = first * (int64_t)size;
        memcpy((char *)r->out + at, (const char *)r->x + at, (size_t)(rows->n_cols - first) * size);
        return;
    }
    for (int64_t k = first; k < rows->n_cols; k++)
        memcpy((char *)r->out + k * rows->out_col * (int64_t)size, (const char *)r->x + k * rows->x_col * (int64_t)size,
               size);
}

static void rope_rows(const struct cattn_rope_rows *rows) {
    const int64_t size = (int64_t)stored_size(rows->storage);
    const bool plain = rows->x_col == 1 && rows->out_col == 1;
    for (int64_t i = 0; i < rows->n_rows; i++) {
        const struct rotation r = {.rows = rows,
                                   .x = (const char *)rows->x + i * rows->x_row * size,
                                   .out = (char *)rows->out + i * rows->out_row * size,
                                   .cosines = (const real *)rows->cosines + i * rows->table_row,
                                   .sines = (const real *)rows->sines + i * rows->table_row};
        if (!plain)
            rotate(&r, rows->storage, rows->x_col, rows->out_col);
        else if (rows->storage == CATTN_STORED_PLAIN)
            rotate(&r, CATTN_STORED_PLAIN, 1, 1);
#if REAL_BITS == 32
        else if (rows->storage == CATTN_STORED_F16)
            rotate(&r, CATTN_STORED_F16, 1, 1);
        else
            rotate(&r, CATTN_STORED_BF16, 1, 1);
#endif
        rope_rest(&r);
    }
}
