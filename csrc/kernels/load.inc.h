/* load.inc.h -- loads and stores at any stride and in any storage, and the conversion of halves.
 *
 * A partial vector never touches memory after its last element. `storage` is nearly always a constant after inlining,
 * so that each loop is compiled for one storage.
 */

#define NEG_INF (-(real)INFINITY)
#define CANONICAL_NAN ((real)NAN) /* the only NaN that is ever written */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* n <= LANES elements at any stride. The other lanes are 0. */
INLINE vf load_strided(const real *p, int64_t stride, int n) {
    if (stride == 1)
        return n == LANES ? vf_loadu(p) : vf_loadu_n(p, n);
    real lanes[LANES] = {0};
    for (int i = 0; i < n; i++)
        lanes[i] = p[i * stride];
    return vf_loadu(lanes);
}

INLINE void store_strided(real *p, int64_t stride, vf v, int n) {
    if (stride == 1) {
        if (n == LANES)
            vf_storeu(p, v);
        else
            vf_storeu_n(p, v, n);
        return;
    }
    real lanes[LANES];
    vf_storeu(lanes, v);
    for (int i = 0; i < n; i++)
        p[i * stride] = lanes[i];
}

/* ---- elements in their storage: the table's own type, or halves of float ---- */

INLINE const void *stored_at(enum cattn_storage storage, const void *base, int64_t i) {
    if (storage == CATTN_STORED_PLAIN)
        return (const real *)base + i;
    return (const uint16_t *)base + i;
}

#if REAL_BITS == 32

/* n <= LANES halves at any stride, widened. The other lanes are 0. */
INLINE vf load_half(enum cattn_storage storage, const uint16_t *p, int64_t stride, int n) {
    uint16_t lanes[LANES] = {0};
    vh h;
    if (stride == 1) {
        h = n == LANES ? vh_loadu(p) : vh_loadu_n(p, n);
    } else {
        for (int i = 0; i < n; i++)
            lanes[i] = p[i * stride];
        h = vh_loadu(lanes);
    }
    return storage == CATTN_STORED_F16 ? vf_from_f16(h) : vf_from_bf16(h);
}

/* Rounded to nearest even. */
INLINE void store_half(enum cattn_storage storage, uint16_t *p, int64_t stride, vf v, int n) {
    const vh h = storage == CATTN_STORED_F16 ? vh_f16(v) : vh_bf16(v);
    if (stride == 1 && n == LANES) {
        vh_storeu(p, h);
    } else if (stride == 1) {
        vh_storeu_n(p, h, n);
    } else {
        uint16_t lanes[LANES];
        vh_storeu(lanes, h);
        for (int i = 0; i < n; i++)
            p[i * stride] = lanes[i];
    }
}

#endif

/* n <= LANES elements from index i on. The other lanes are 0. */
INLINE vf load_stored(enum cattn_storage storage, const void *base, int64_t i, int64_t stride, int n) {
#if REAL_BITS == 32
    if (storage != CATTN_STORED_PLAIN)
        return load_half(storage, (const uint16_t *)base + i, stride, n);
#endif
    (void)storage;
    return load_strided((const real *)base + i, stride, n);
}

/* Replaces any NaN by the canonical one: payload and sign of a NaN would depend on the instruction set. */
INLINE vf with_one_nan(vf v) { return vf_select(vf_eq(v, v), v, vf_set1(CANONICAL_NAN)); }

INLINE void store_stored(enum cattn_storage storage, void *base, int64_t i, int64_t stride, vf v, int n) {
    v = with_one_nan(v);
#if REAL_BITS == 32
    if (storage != CATTN_STORED_PLAIN) {
        store_half(storage, (uint16_t *)base + i, stride, v, n);
        return;
    }
#endif
    (void)storage;
    store_strided((real *)base + i, stride, v, n);
}

/* Converts n stored elements to the table's own type, with unit stride. */
static void widen_row(enum cattn_storage storage, const void *from, int64_t stride, int64_t n, void *to) {
    int64_t k = 0;
    for (; k + LANES <= n && stride == 1; k += LANES)
        vf_storeu((real *)to + k, load_stored(storage, from, k, 1, LANES));
    for (; k < n; k += LANES) {
        const int left = (int)min64(LANES, n - k);
        vf_storeu_n((real *)to + k, load_stored(storage, from, k * stride, stride, left), left);
    }
}

/* The inverse of widen_row, rounded to nearest even. */
static void narrow_row(enum cattn_storage storage, const void *from, int64_t n, void *to, int64_t stride) {
    int64_t k = 0;
    for (; k + LANES <= n && stride == 1; k += LANES)
        store_stored(storage, to, k, 1, vf_loadu((const real *)from + k), LANES);
    for (; k < n; k += LANES) {
        const int left = (int)min64(LANES, n - k);
        store_stored(storage, to, k * stride, stride, vf_loadu_n((const real *)from + k, left), left);
    }
}

INLINE size_t stored_size(enum cattn_storage storage) {
    return storage == CATTN_STORED_PLAIN ? sizeof(real) : sizeof(uint16_t);
}

/* Rows of keys or values in the table's own type, with unit stride. */
struct source {
    const real *first;
    int64_t row;
};

/* n_rows rows of n_cols elements of a stored matrix from `first_row` on: in place if the kernels can read them there,
 * else copied to `scratch` without gaps. */
static struct source rows_of(enum cattn_storage storage, const void *base, int64_t row, int64_t col, int64_t first_row,
                             int n_rows, int64_t n_cols, void *scratch) {
    const void *from = stored_at(storage, base, first_row * row);
    if (storage == CATTN_STORED_PLAIN && col == 1)
        return (struct source){from, row};
    if (col == 1 && row == n_cols) { /* rows without gaps form one long row */
        widen_row(storage, from, 1, n_rows * n_cols, scratch);
        return (struct source){scratch, n_cols};
    }
    for (int r = 0; r < n_rows; r++)
        widen_row(storage, stored_at(storage, from, r * row), col, n_cols, (real *)scratch + r * n_cols);
    return (struct source){scratch, n_cols};
}
