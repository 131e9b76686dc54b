/* rms_norm.inc.h -- RMS norm over one row and its gradient, lanes across the row, any strides.
 * csrc/README.md ("Rotary positions and RMS norm") has the order of the sums, which is that of softmax. No FMA.
 */

/* 1 / sqrt(mean of squares + eps) */
INLINE real rms_factor(const struct cattn_rms_norm_row *row, enum cattn_storage storage, int64_t x_col) {
    real buffer[SUM_RUN], total = 0;
    for (int64_t run = 0; run < row->n; run += SUM_RUN) {
        const int64_t n = min64(SUM_RUN, row->n - run);
        for (int64_t k = 0; k < n; k += LANES) {
            const vf x = load_stored(storage, row->x, (run + k) * x_col, x_col, (int)min64(LANES, n - k));
            vf_storeu(buffer + k, x * x);
        }
        total += sum_run(buffer, run, n);
    }
    return 1 / REAL_SQRT(total / (real)row->n + (real)row->eps);
}

INLINE void rms_norm_stored(const struct cattn_rms_norm_row *row, enum cattn_storage storage, int64_t x_col,
                            int64_t out_col) {
    const vf factor = vf_set1(rms_factor(row, storage, x_col));
    for (int64_t k = 0; k < row->n; k += LANES) {
        const int n = (int)min64(LANES, row->n - k);
        vf v = load_stored(storage, row->x, k * x_col, x_col, n) * factor;
        if (row->weight)
            v = v * load_strided((const real *)row->weight + k * row->weight_stride, row->weight_stride, n);
        store_stored(storage, row->out, k * out_col, out_col, v, n);
    }
}

static void rms_norm_row(const struct cattn_rms_norm_row *row) {
    if (row->x_stride != 1 || row->out_stride != 1)
        rms_norm_stored(row, row->storage, row->x_stride, row->out_stride);
    else if (row->storage == CATTN_STORED_PLAIN)
        rms_norm_stored(row, CATTN_STORED_PLAIN, 1, 1);
#if REAL_BITS == 32
    else if (row->storage == CATTN_STORED_F16)
        rms_norm_stored(row, CATTN_STORED_F16, 1, 1);
    else
        rms_norm_stored(row, CATTN_STORED_BF16, 1, 1);
#endif
}

/* n columns from k on: x * factor, and the gradient of that. */
INLINE vf rms_load(const struct cattn_rms_norm_gradient *row, int64_t k, int n, vf factor, vf *grad) {
    *grad = load_strided((const real *)row->grad + k * row->grad_stride, row->grad_stride, n);
    return load_strided((const real *)row->forward.x + k * row->forward.x_stride, row->forward.x_stride, n) * factor;
}

INLINE vf rms_weighted(const struct cattn_rms_norm_row *row, int64_t k, int n, vf grad) {
    if (!row->weight)
        return grad;
    return grad * load_strided((const real *)row->weight + k * row->weight_stride, row->weight_stride, n);
}

/* With y = x * factor and g = grad * weight: factor * (g - y * mean(g * y)). grad * y is added to the gradient of the
 * weight, before the first store, because out may be an input. */
static void rms_norm_gradient(const struct cattn_rms_norm_gradient *row) {
    const struct cattn_rms_norm_row *forward = &row->forward;
    const vf factor = vf_set1(rms_factor(forward, CATTN_STORED_PLAIN, forward->x_stride));
    real buffer[SUM_RUN], total = 0, *sums = row->weight_sums;
    vf grad;
    for (int64_t run = 0; run < forward->n; run += SUM_RUN) {
        const int64_t n = min64(SUM_RUN, forward->n - run);
        for (int64_t k = 0; k < n; k += LANES) {
            const int lanes = (int)min64(LANES, n - k);
            const vf y = rms_load(row, run + k, lanes, factor, &grad);
            if (sums)
                store_strided(sums + run + k, 1, load_strided(sums + run + k, 1, lanes) + grad * y, lanes);
            vf_storeu(buffer + k, rms_weighted(forward, run + k, lanes, grad) * y);
        }
        total += sum_run(buffer, run, n);
    }
    const vf mean = vf_set1(total / (real)forward->n);
    for (int64_t k = 0; k < forward->n; k += LANES) {
        const int n = (int)min64(LANES, forward->n - k);
        const vf y = rms_load(row, k, n, factor, &grad);
        const vf v = factor * (rms_weighted(forward, k, n, grad) - y * mean);
        store_stored(CATTN_STORED_PLAIN, forward->out, k * forward->out_stride, forward->out_stride, v, n);
    }
}
