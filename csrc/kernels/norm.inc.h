/* norm.inc.h -- RMS norm and layer norm over one row and their gradients, lanes across the row, any strides.
 * docs/bit_contract.md ("Rotary positions and norms") has the order of the sums, the same as in a softmax. No FMA.
 */

/* A row before weight and bias is (x[k] - rest) * factor. x points to the row itself or to a copy in scratch. */
struct normed {
    const real *x;
    real rest, factor;
};

/* The mean of n numbers. */
static real mean_of(const real *numbers, int64_t n, const struct cattn_stop *stop) {
    real total = 0;
    for (int64_t run = 0; run < n && !stops_at(stop, run); run += SUM_RUN)
        total += sum_run(numbers + run, run, min64(SUM_RUN, n - run));
    return total / (real)n;
}

/* The sums of x - mean over a run of n numbers and of the squares of that, each in the order of sum_run. `differences`,
 * if it is not NULL, receives x - mean; it may be x. */
INLINE void sum_differences(const real *x, real mean, int64_t n, real *differences, real *sum, real *square_sum) {
    sum_chains values = {0}, squares = {0}, next;
    real value[CATTN_SUM_CHAINS], square[CATTN_SUM_CHAINS];
    int64_t i = 0;
    for (; i + CATTN_SUM_CHAINS <= n; i += CATTN_SUM_CHAINS) {
        memcpy(&next, x + i, sizeof next);
        next -= mean;
        if (differences)
            memcpy(differences + i, &next, sizeof next);
        values += next;
        squares += next * next;
    }
    memcpy(value, &values, sizeof values);
    memcpy(square, &squares, sizeof squares);
    for (int c = 0; i < n; i++, c++) {
        const real d = x[i] - mean;
        if (differences)
            differences[i] = d;
        value[c] += d;
        square[c] += d * d;
    }
    *sum = SUM_TREE(value);
    *square_sum = SUM_TREE(square);
}

static real mean_of_squares(const real *x, int64_t n, const struct cattn_stop *stop) {
    real sum, square_sum, total = 0;
    for (int64_t run = 0; run < n && !stops_at(stop, run); run += SUM_RUN) {
        sum_differences(x + run, 0, min64(SUM_RUN, n - run), NULL, &sum, &square_sum);
        total += square_sum;
    }
    return total / (real)n;
}

/* differences[k] = x[k] - mean, where the two may be the same. Returns the variance. The mean of the differences is the
 * rounding error of `mean`: it is left in *rest, so that a row far from 0 keeps its digits. */
static real variance(const real *x, real mean, int64_t n, const struct cattn_stop *stop, real *differences,
                     real *rest) {
    real sum, square_sum, total = 0, square_total = 0;
    for (int64_t run = 0; run < n && !stops_at(stop, run); run += SUM_RUN) {
        sum_differences(x + run, mean, min64(SUM_RUN, n - run), differences + run, &sum, &square_sum);
        total += sum;
        square_total += square_sum;
    }
    *rest = total / (real)n;
    const real v = square_total / (real)n - *rest * *rest;
    return v < 0 ? 0 : v; /* a NaN stays */
}

static struct normed prepare_row(const struct cattn_norm_row *row) {
    struct normed result = {row->x, 0, 0};
    real square;
    if (row->storage != CATTN_STORED_PLAIN || row->x_stride != 1) {
        PIECES(k, 0, row->n, &row->stop)
        widen_row(row->storage, stored_at(row->storage, row->x, k * row->x_stride), row->x_stride,
                  min64(PIECE, row->n - k), (real *)row->scratch + k);
        result.x = row->scratch;
    }
    if (row->centred) {
        const real mean = mean_of(result.x, row->n, &row->stop);
        square = variance(result.x, mean, row->n, &row->stop, row->scratch, &result.rest);
        result.x = row->scratch;
    } else {
        square = mean_of_squares(result.x, row->n, &row->stop);
    }
    result.factor = 1 / REAL_SQRT(square + (real)row->eps);
    return result;
}

/* n columns from k on of the norm before weight and bias. */
INLINE vf norm_load(const struct normed *row, int64_t k, int n) {
    return (load_strided(row->x + k, 1, n) - vf_set1(row->rest)) * vf_set1(row->factor);
}

/* n columns from k on of a weight or bias. */
INLINE vf column_load(const void *numbers, int64_t stride, int64_t k, int n) {
    return load_strided((const real *)numbers + k * stride, stride, n);
}

INLINE void norm_stored(const struct cattn_norm_row *row, enum cattn_storage storage, int64_t out_col) {
    const struct normed normed = prepare_row(row);
    for (int64_t k = 0; k < row->n && !stops_at(&row->stop, k); k += LANES) {
        const int n = (int)min64(LANES, row->n - k);
        vf v = norm_load(&normed, k, n);
        if (row->weight)
            v = v * column_load(row->weight, row->weight_stride, k, n);
        if (row->bias)
            v = v + column_load(row->bias, row->bias_stride, k, n);
        store_stored(storage, row->out, k * out_col, out_col, v, n);
    }
}

static void norm_row(const struct cattn_norm_row *row) {
    if (row->out_stride != 1)
        norm_stored(row, row->storage, row->out_stride);
    else if (row->storage == CATTN_STORED_PLAIN)
        norm_stored(row, CATTN_STORED_PLAIN, 1);
#if REAL_BITS == 32
    else if (row->storage == CATTN_STORED_F16)
        norm_stored(row, CATTN_STORED_F16, 1);
    else
        norm_stored(row, CATTN_STORED_BF16, 1);
#endif
}

/* ---- gradients ---- */

/* n columns from k on: the gradient of the result and, times the weight, the gradient of the norm. */
INLINE vf gradient_of_norm(const struct cattn_norm_gradient *row, int64_t k, int n, vf *grad) {
    const struct cattn_norm_row *forward = &row->forward;
    *grad = column_load(row->grad, row->grad_stride, k, n);
    if (!forward->weight)
        return *grad;
    return *grad * column_load(forward->weight, forward->weight_stride, k, n);
}

/* sums[k] += v for n columns from k on, if there are sums. */
INLINE void add_to_sums(void *sums, int64_t k, vf v, int n) {
    if (sums)
        store_strided((real *)sums + k, 1, load_strided((real *)sums + k, 1, n) + v, n);
}

/* With y the norm and g = grad * weight: factor * (g - mean(g) - y * mean(g * y)); an RMS norm is without mean(g). The
 * sums over the rows are added to before the first store, because out may be an input. */
static void norm_gradient(const struct cattn_norm_gradient *row) {
    const struct cattn_norm_row *forward = &row->forward;
    real products[SUM_RUN], gradients[SUM_RUN], product_sum = 0, gradient_sum = 0;
    const struct normed normed = prepare_row(forward);
    vf grad;
    for (int64_t run = 0; run < forward->n && !stops_at(&forward->stop, run); run += SUM_RUN) {
        const int64_t n = min64(SUM_RUN, forward->n - run);
        for (int64_t k = 0; k < n; k += LANES) {
            const int lanes = (int)min64(LANES, n - k);
            const vf y = norm_load(&normed, run + k, lanes);
            const vf g = gradient_of_norm(row, run + k, lanes, &grad);
            add_to_sums(row->weight_sums, run + k, grad * y, lanes);
            add_to_sums(row->bias_sums, run + k, grad, lanes);
            vf_storeu(products + k, g * y);
            vf_storeu(gradients + k, g);
        }
        product_sum += sum_run(products, run, n);
        if (forward->centred)
            gradient_sum += sum_run(gradients, run, n);
    }
    const vf mean = vf_set1(product_sum / (real)forward->n), shift = vf_set1(gradient_sum / (real)forward->n);
    for (int64_t k = 0; k < forward->n && !stops_at(&forward->stop, k); k += LANES) {
        const int n = (int)min64(LANES, forward->n - k);
        vf g = gradient_of_norm(row, k, n, &grad);
        if (forward->centred)
            g = g - shift;
        const vf y = norm_load(&normed, k, n);
        store_stored(CATTN_STORED_PLAIN, forward->out, k * forward->out_stride, forward->out_stride,
                     vf_set1(normed.factor) * (g - y * mean), n);
    }
}
