/* load.inc.h -- loads, stores and prefetches: any stride, any storage, conversion of halves, quantized keys and values.
 *
 * A partial vector never touches memory after its last element. `storage` is nearly always a constant after inlining,
 * so that each loop is compiled for one storage.
 */

#define NEG_INF (-(real)INFINITY)
#define CANONICAL_NAN ((real)NAN) /* the only NaN that is ever written */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE real largest_lane(vf v) {
    real lanes[LANES], largest = NEG_INF;
    vf_storeu(lanes, v);
    for (int i = 0; i < LANES; i++)
        largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

/* The fixed tree over the CATTN_SUM_CHAINS chains of a block sum, for arrays of vf or real. */
#define SUM_TREE(s) ((((s)[0] + (s)[4]) + ((s)[2] + (s)[6])) + (((s)[1] + (s)[5]) + ((s)[3] + (s)[7])))

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

/* ---- elements in their storage: the table's own type, halves of float, or quantized ---- */

INLINE const void *stored_at(enum cattn_storage storage, const void *base, int64_t i) {
    if (storage == CATTN_STORED_PLAIN)
        return (const real *)base + i;
    if (cattn_is_quantized(storage))
        return (const uint8_t *)base + i;
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

/* n <= LANES quantized elements at any stride, divided by LOADED_OVER(storage). The other lanes are 0. */
INLINE vf load_quantized(enum cattn_storage storage, const uint8_t *p, int64_t stride, int n) {
    uint8_t lanes[LANES] = {0};
    vb b;
    if (stride == 1) {
        b = n == LANES ? vb_loadu(p) : vb_loadu_n(p, n);
    } else {
        for (int i = 0; i < n; i++)
            lanes[i] = p[i * stride];
        b = vb_loadu(lanes);
    }
    return storage == CATTN_STORED_I8 ? vf_from_i8(b) : vf_from_f8(b);
}

#endif

/* n <= LANES elements from index i on; quantized ones as load_quantized returns them. The other lanes are 0. */
INLINE vf load_stored(enum cattn_storage storage, const void *base, int64_t i, int64_t stride, int n) {
#if REAL_BITS == 32
    if (cattn_is_quantized(storage))
        return load_quantized(storage, (const uint8_t *)base + i, stride, n);
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

/* Whether a loop over a long row ends here. */
INLINE bool stops(const struct cattn_stop *stop) { return stop->wanted && stop->wanted(stop->worker); }

/* The loops over rows of any length run over pieces of this many columns, a multiple of every vector and run, between
 * which they look at a stop. After a stop every such loop ends at its next piece. */
#define PIECE ((int64_t)1 << 16)
#define PIECES(from, lo, hi, stop)                                                                                     \
    for (int64_t from = (lo); from < (hi) && (from == (lo) || !stops(stop)); from += PIECE)
/* The same for a loop with shorter steps. */
INLINE bool stops_at(const struct cattn_stop *stop, int64_t k) { return k % PIECE == 0 && k > 0 && stops(stop); }

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
    return cattn_stored_size(REAL_BITS == 32 ? CATTN_F32 : CATTN_F64, storage);
}

/* The first n <= LANES bytes of a mask: -inf where 0, +0 elsewhere and in the lanes from n on. */
INLINE vf load_mask(const uint8_t *mask, int64_t stride, int n) {
    uint8_t lanes[LANES];
    if (stride != 1) {
        for (int i = 0; i < n; i++)
            lanes[i] = mask[i * stride];
        mask = lanes;
    }
    return n == LANES ? vf_from_bytes(mask) : vf_from_bytes_n(mask, n);
}

/* ---- keys and values ---- */

/* The matrix without its first rows. */
INLINE struct cattn_matrix rows_from(struct cattn_matrix matrix, int64_t first_row) {
    first_row -= matrix.first_row;
    matrix.first_row = 0;
    matrix.first = stored_at(matrix.storage, matrix.first, first_row * matrix.row);
    if (cattn_is_quantized(matrix.storage))
        matrix.scale += first_row * matrix.scale_row;
    return matrix;
}

#if REAL_BITS == 32
/* What quantized numbers are divided by when they are loaded. A power of two, which multiplies the scale instead: the
 * product of number and scale is the same, and rounded once. CATTN_LEAST_SCALE and CATTN_LARGEST_SCALE leave room. */
#define LOADED_OVER(storage) ((storage) == CATTN_STORED_F8 ? 256.0f : 1.0f)

/* n <= LANES scales of loaded numbers; one for all of them if the stride is 0. */
INLINE vf scales_at(enum cattn_storage storage, const float *scale, int64_t stride, int n) {
    if (stride == 0)
        return vf_set1(*scale * LOADED_OVER(storage));
    return load_strided(scale, stride, n) * vf_set1(LOADED_OVER(storage));
}
#endif

/* A quantized vector of n elements of row r from column c on, times the scales of those elements. */
INLINE vf scaled(const struct cattn_matrix *matrix, vf v, int64_t r, int64_t c, int n) {
#if REAL_BITS == 32
    const float *scale = matrix->scale + r * matrix->scale_row + c * matrix->scale_col;
    return v * scales_at(matrix->storage, scale, matrix->scale_col, n);
#else
    (void)matrix, (void)r, (void)c, (void)n;
    return v;
#endif
}

/* n <= LANES elements of row r from column c on. The other lanes are 0. */
INLINE vf load_columns(const struct cattn_matrix *matrix, int64_t r, int64_t c, int n) {
    const vf v = load_stored(matrix->storage, matrix->first, r * matrix->row + c * matrix->col, matrix->col, n);
    return cattn_is_quantized(matrix->storage) ? scaled(matrix, v, r, c, n) : v;
}

/* The whole vectors of a row with unit column stride. storage and scale_col are constants, which makes it fast. Returns
 * the first column that is left. */
INLINE int64_t dequantize_vectors(struct cattn_matrix matrix, enum cattn_storage storage, int64_t scale_col, int64_t r,
                                  int64_t n_cols, real *to) {
    int64_t c = 0;
    matrix.storage = storage;
    matrix.col = 1;
    matrix.scale_col = scale_col;
    for (; c + LANES <= n_cols; c += LANES)
        vf_storeu(to + c, load_columns(&matrix, r, c, LANES));
    return c;
}

static void dequantize_row(const struct cattn_matrix *matrix, int64_t r, int64_t n_cols, real *to) {
    const bool i8 = matrix->storage == CATTN_STORED_I8;
    int64_t c = 0;
    if (matrix->col == 1 && matrix->scale_col == 0)
        c = i8 ? dequantize_vectors(*matrix, CATTN_STORED_I8, 0, r, n_cols, to)
               : dequantize_vectors(*matrix, CATTN_STORED_F8, 0, r, n_cols, to);
    else if (matrix->col == 1 && matrix->scale_col == 1)
        c = i8 ? dequantize_vectors(*matrix, CATTN_STORED_I8, 1, r, n_cols, to)
               : dequantize_vectors(*matrix, CATTN_STORED_F8, 1, r, n_cols, to);
    for (; c < n_cols; c += LANES) {
        const int n = (int)min64(LANES, n_cols - c);
        vf_storeu_n(to + c, load_columns(matrix, r, c, n), n);
    }
}

/* Rows of keys or values as the micro-kernel reads them, with unit stride. */
#ifdef BF16_PRODUCTS
typedef uint16_t operand;
#else
typedef real operand;
#endif
struct source {
    const operand *first;
    int64_t row;
};

/* Whether the kernels can read the matrix in place. */
INLINE bool is_plain(const struct cattn_matrix *matrix) {
    return matrix->storage == CATTN_STORED_PLAIN && matrix->col == 1;
}

/* The first n_rows rows of n_cols elements of a matrix: in place if the kernels can read them there, else copied to
 * `scratch` without gaps. */
static struct source rows_of(const struct cattn_matrix *matrix, int n_rows, int64_t n_cols, void *scratch) {
    const enum cattn_storage storage = matrix->storage;
    const int64_t row = matrix->row, col = matrix->col;
    if (is_plain(matrix))
        return (struct source){matrix->first, row};
    const struct source copy = {scratch, n_cols};
    if (cattn_is_quantized(storage)) {
        for (int r = 0; r < n_rows; r++)
            dequantize_row(matrix, r, n_cols, (real *)scratch + r * n_cols);
    } else if (col == 1 && row == n_cols) { /* rows without gaps form one long row */
        widen_row(storage, matrix->first, 1, n_rows * n_cols, scratch);
    } else {
        for (int r = 0; r < n_rows; r++)
            widen_row(storage, stored_at(storage, matrix->first, r * row), col, n_cols, (real *)scratch + r * n_cols);
    }
    return copy;
}

/* ---- prefetches: they change the speed only, never a result ---- */

/* Addresses are integers here: a hint may reach past the end of an array, where forming a pointer is undefined. The
 * prefetch itself is harmless there.
 */

#define LINE_BYTES 64

/* The address `elements` elements after p. */
INLINE uintptr_t address_ahead(uintptr_t p, int64_t elements, size_t size) {
    return p + (uintptr_t)(elements * (int64_t)size);
}

/* Prefetches what is needed soon into the L1 cache. */
INLINE void prefetch(uintptr_t base, int64_t element, size_t size) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): a hint, nothing is read through it */
    __builtin_prefetch((const void *)address_ahead(base, element, size), 0, 3);
}

/* Prefetches what is needed later into the L2 cache. More lines can be in flight to it than to the L1 cache, whose few
 * slots are then free for loads: reading from memory becomes twice as fast. */
INLINE void prefetch_far(uintptr_t base, int64_t element, size_t size) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): a hint, nothing is read through it */
    __builtin_prefetch((const void *)address_ahead(base, element, size), 0, 2);
}

/* Prefetches at three distances from the line that is read now. Processors drop prefetches while too many are pending;
 * with three attempts a line arrives in time, up to 1.4 times as fast as with one. */
INLINE void prefetch_thrice(uintptr_t line, int64_t far, int64_t midway, int64_t near, size_t size) {
    prefetch_far(line, far, size);
    prefetch_far(line, midway, size);
    prefetch(line, near, size);
}

/* Whether a vector at this element starts a cache line. Every vector does if it is as long as a line. */
INLINE bool starts_line(int64_t element, size_t size) {
    return LANES * size >= LINE_BYTES || (size_t)element * size % LINE_BYTES == 0;
}
