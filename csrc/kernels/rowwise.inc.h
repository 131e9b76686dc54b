/* rowwise.inc.h -- softmax, dropout and the scores of a choice of keys over one row, lanes across the row, any strides.
 * docs/bit_contract.md ("Softmax") has the order of the sums. Columns out of range add nothing, so a
 * row's bits do not depend on their number.
 */

#define SUM_RUN 512

/* n columns from k on, scaled. Hidden columns and the lanes from n on are -inf. */
INLINE vf softmax_load(const struct cattn_softmax_row *row, int64_t k, int n, bool masked) {
    /* below + 16 - n starts with n ones, then zeros: the mask of a partial vector */
    static const uint8_t below[2 * 16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const vf neg_inf = vf_set1(NEG_INF);
    vf x = load_strided((const real *)row->x + k * row->x_stride, row->x_stride, n) * vf_set1((real)row->scale);
    if (masked && row->mask)
        x = vf_select(vf_eq(load_mask(row->mask + k * row->mask_stride, row->mask_stride, n), neg_inf), neg_inf, x);
    if (n < LANES)
        x = vf_select(vf_eq(vf_from_bytes(below + 16 - n), neg_inf), neg_inf, x);
    return x;
}

/* The maximum over [lo, hi). Also prefetches the lines that the exponentials will be written to. */
static real piece_max(const struct cattn_softmax_row *row, int64_t lo, int64_t hi, bool masked) {
    const uintptr_t out = (uintptr_t)(row->out_stride == 1 ? row->out : row->x);
    vf max = vf_set1(NEG_INF), odd = max; /* two maxima, so that their latencies overlap */
    int64_t k = lo;
    for (; k + 2 * LANES <= hi; k += 2 * LANES) {
        max = vf_max(softmax_load(row, k, LANES, masked), max);
        odd = vf_max(softmax_load(row, k + LANES, LANES, masked), odd);
        if (starts_line(k, sizeof(real)))
            prefetch(out, k, sizeof(real));
        if (starts_line(k + LANES, sizeof(real)))
            prefetch(out, k + LANES, sizeof(real));
    }
    for (; k < hi; k += LANES)
        max = vf_max(softmax_load(row, k, (int)min64(LANES, hi - k), masked), max);
    return largest_lane(vf_max(odd, max));
}

static real softmax_max(const struct cattn_softmax_row *row, int64_t lo, int64_t hi, bool masked) {
    real max = NEG_INF;
    PIECES(from, lo, hi, &row->stop) {
        const real next = piece_max(row, from, min64(hi, from + PIECE), masked);
        max = next > max ? next : max;
    }
    return max;
}

/* The chains of a sum, a GNU vector on every table: compilers keep an array of eight numbers in memory, and each
 * addition waits for it. */
typedef real sum_chains __attribute__((vector_size(CATTN_SUM_CHAINS * sizeof(real))));

/* The sum of n values in the fixed order. `at` is the column of the first one, which decides its chain. */
static real sum_run(const real *e, int64_t at, int64_t n) {
    real chain[CATTN_SUM_CHAINS] = {0};
    int64_t i = 0;
    for (; i < n && (at + i) % CATTN_SUM_CHAINS; i++)
        chain[(at + i) % CATTN_SUM_CHAINS] += e[i];
    sum_chains sums, next;
    memcpy(&sums, chain, sizeof sums);
    for (; i + CATTN_SUM_CHAINS <= n; i += CATTN_SUM_CHAINS) {
        memcpy(&next, e + i, sizeof next);
        sums += next;
    }
    memcpy(chain, &sums, sizeof sums);
    for (int c = 0; i < n; i++, c++)
        chain[c] += e[i];
    return SUM_TREE(chain);
}

/* out = exp(x - max) over [lo, hi). Returns the sum. Prefetches the next row meanwhile. */
static real softmax_exp(const struct cattn_softmax_row *row, int64_t lo, int64_t hi, real max, bool masked) {
    const vf shift = vf_set1(max);
    real buffer[SUM_RUN], total = 0; /* the buffer is for strided outputs, whose sum needs unit stride */
    for (int64_t run = lo / SUM_RUN * SUM_RUN; run < hi && !stops_at(&row->stop, run); run += SUM_RUN) {
        const int64_t from = max64(lo, run), to = min64(hi, run + SUM_RUN);
        real *out = (real *)row->out + from * row->out_stride;
        real *e = row->out_stride == 1 ? out : buffer;
        int64_t k = from;
        for (; k + LANES <= to; k += LANES) {
            vf_storeu(e + (k - from), vf_exp(softmax_load(row, k, LANES, masked) - shift));
            if (starts_line(k, sizeof(real)))
                prefetch((uintptr_t)row->next, k, sizeof(real));
        }
        if (k < to)
            vf_storeu_n(e + (k - from), vf_exp(softmax_load(row, k, (int)(to - k), masked) - shift), (int)(to - k));
        total += sum_run(e, from, to - from);
        if (row->out_stride != 1)
            for (int64_t i = 0; i < to - from; i++)
                out[i * row->out_stride] = buffer[i];
    }
    return total;
}

/* Sets the columns from .. to-1, which are out of range, to 0. */
static void row_clear(const struct cattn_softmax_row *row, int64_t from, int64_t to) {
    real *out = row->out;
    PIECES(first, from, to, &row->stop) {
        const int64_t end = min64(to, first + PIECE);
        if (row->out_stride == 1)
            memset(out + first, 0, (size_t)(end - first) * sizeof(real));
        for (int64_t k = first; k < end && row->out_stride != 1; k++)
            out[k * row->out_stride] = 0;
    }
}

static bool column_visible(const struct cattn_softmax_row *row, int64_t k) {
    return k >= row->lo && k < row->hi && (!row->mask || row->mask[k * row->mask_stride]);
}

/* out = out / sum over [lo, hi). If the sum is NaN or 0 (every visible score is -inf), exactly the visible columns
 * become NaN. */
static void divide_piece(const struct cattn_softmax_row *row, int64_t lo, int64_t hi, real sum) {
    real *out = row->out;
    const int64_t stride = row->out_stride;
    if (!(sum > 0)) { /* true for NaN as well */
        for (int64_t k = lo; k < hi; k++)
            out[k * stride] = column_visible(row, k) ? CANONICAL_NAN : 0;
        return;
    }
    int64_t k = lo;
    for (; stride == 1 && k + LANES <= hi; k += LANES)
        vf_storeu(out + k, vf_div(vf_loadu(out + k), vf_set1(sum)));
    for (; k < hi; k += LANES) {
        int n = (int)min64(LANES, hi - k);
        store_strided(out + k * stride, stride, vf_div(load_strided(out + k * stride, stride, n), vf_set1(sum)), n);
    }
}

static void softmax_divide(const struct cattn_softmax_row *row, int64_t lo, int64_t hi, real sum) {
    PIECES(from, lo, hi, &row->stop)
    divide_piece(row, from, min64(hi, from + PIECE), sum);
}

/* Whether a softmax over all columns gives the weights of the visible ones. It does not if a hidden score is NaN or
 * +inf, or exceeds every visible score so far that too little mass is left to divide by. */
static bool literal_works(const struct cattn_softmax_row *row, real max) {
    const vf inf = vf_set1((real)INFINITY);
    real largest[LANES]; /* the largest visible exponential, the same in every lane */
    vf_storeu(largest, vf_exp(vf_set1(softmax_max(row, row->lo, row->hi, true) - max)));
    if (!(largest[0] >= (real)0x1p-100))
        return false;
    for (int64_t k = 0; k < row->n && !stops_at(&row->stop, k); k += LANES) {
        vf x = softmax_load(row, k, (int)min64(LANES, row->n - k), false);
        if (vm_any(vm_not(vf_lt(x, inf))))
            return false;
    }
    return true;
}

/* Softmax over every column; then hidden columns become 0 and the others are divided by their sum. */
static void softmax_literal(const struct cattn_softmax_row *row, real max) {
    real *out = row->out;
    real sum = softmax_exp(row, 0, row->n, max, false), visible_sum = 0;
    const vf total = vf_set1(sum);
    row_clear(row, 0, row->lo);
    row_clear(row, row->hi, row->n);
    /* the weights are divided once by the sum of all columns, then by the sum of the visible ones */
    for (int64_t run = row->lo / SUM_RUN * SUM_RUN; run < row->hi && !stops_at(&row->stop, run); run += SUM_RUN) {
        const int64_t from = max64(row->lo, run), to = min64(row->hi, run + SUM_RUN);
        real weight[SUM_RUN];
        for (int64_t k = from; k < to; k += LANES) {
            int n = (int)min64(LANES, to - k);
            real *at = out + k * row->out_stride;
            store_strided(weight + (k - from), 1, vf_div(load_strided(at, row->out_stride, n), total), n);
        }
        for (int64_t k = from; k < to; k++) {
            if (!column_visible(row, k))
                weight[k - from] = 0;
            out[k * row->out_stride] = weight[k - from];
        }
        visible_sum += sum_run(weight, from, to - from);
    }
    softmax_divide(row, row->lo, row->hi, visible_sum);
}

static void softmax_row(const struct cattn_softmax_row *row) {
    if (row->renormalize) {
        /* decide before the first store, because out may be x */
        real max = softmax_max(row, 0, row->n, false);
        if (literal_works(row, max)) {
            softmax_literal(row, max);
            return;
        }
        /* otherwise use the visible scores alone, as the plain method does */
    }
    real max = softmax_max(row, row->lo, row->hi, true);
    real sum = softmax_exp(row, row->lo, row->hi, max, true); /* NaN if max is -inf: -inf - -inf */
    row_clear(row, 0, row->lo);
    row_clear(row, row->hi, row->n);
    softmax_divide(row, row->lo, row->hi, sum);
}

#ifdef HAS_STREAM
/* Streams whole cache lines, which are not read before they are written. The partial lines at both ends use ordinary
 * stores. */
static void stream_row(const void *from, int64_t n, void *to) {
    const real *row = from;
    real *out = to;
    const int64_t line = LINE_BYTES / sizeof(real), into = (int64_t)((uintptr_t)to % LINE_BYTES / sizeof(real));
    int64_t k = min64(n, (line - into) % line);
    memcpy(out, row, (size_t)k * sizeof(real));
    for (; k + line <= n; k += line)
        for (int64_t i = k; i < k + line; i += LANES)
            vf_stream(out + i, vf_loadu(row + i));
    memcpy(out + k, row + k, (size_t)(n - k) * sizeof(real));
}
#endif

/* Drop bits, one byte each, of the elements base .. base+127, which share c1 and c2. */
static void mask_run(const struct cattn_drop *drop, const uint32_t *words, uint64_t base, uint32_t c1, uint32_t c2,
                     uint8_t mask[128]) {
    for (int r = 0; r < 128; r += LANES) {
        vm drop_bits = philox_decide(drop, vu_digits(words, r), base + (uint64_t)r, 1, &c1, &c2);
        real lanes[LANES];
        vf_storeu(lanes, vf_select(drop_bits, vf_set1(1), vf_set1(0)));
        for (int i = 0; i < LANES; i++)
            mask[r + i] = lanes[i] != 0;
    }
}

/* Drop bits, one byte each, of the keys 0 .. n-1 of one row of an attention matrix. */
static void dropout_mask_row(const struct cattn_drop *drop, uint32_t position, uint32_t head, uint8_t *mask,
                             int64_t stride, int64_t n) {
    uint32_t words[64];
    uint8_t bytes[128];
    for (int64_t base = 0; base < n; base += 128) {
        philox_words(drop, (uint64_t)base, position, head, words);
        mask_run(drop, words, (uint64_t)base, position, head, bytes);
        for (int64_t k = base; k < min64(n, base + 128); k++)
            mask[k * stride] = bytes[k - base];
    }
}

/* Prefetch distances in elements. Computing the random bits takes so long that the processor's out-of-order window does
 * not reach the next loads. */
#define DROPOUT_FAR 1024
#define DROPOUT_MIDWAY 512
#define DROPOUT_NEAR 256
INLINE void dropout_prefetch(const real *here) {
    prefetch_thrice((uintptr_t)here, DROPOUT_FAR, DROPOUT_MIDWAY, DROPOUT_NEAR, sizeof(real));
}

/* Elements first .. first+n-1 of a flat array. Runs of 128 are counted from element 0, so both ends may be partial. */
static void dropout_row(const struct cattn_dropout_row *row) {
    const uint32_t domain = 0xd0d0; /* takes the place of the head: apart from the bits of attention */
    const uint64_t first = row->first, end = first + (uint64_t)row->n;
    const bool plain = row->x_stride == 1 && row->out_stride == 1 && !row->mask;
    const vf scale = vf_set1((real)row->keep_scale), zero = vf_set1(0);
    uint32_t words[64];
    for (uint64_t base = first / 128 * 128; base < end; base += 128) {
        const uint32_t high = (uint32_t)(base >> 35); /* of the counter 8*(j >> 6) */
        const real *x = row->x;
        real *out = row->out;
        philox_words(&row->drop, base, high, domain, words);
        if (plain && base >= first && base + 128 <= end) {
            x += base - first;
            out += base - first;
            for (int r = 0; r < 128; r += LANES) {
                if (starts_line(r, sizeof(real))) {
                    dropout_prefetch(x + r);
                    dropout_prefetch(out + r);
                }
                vm drop_bits = philox_decide(&row->drop, vu_digits(words, r), base + (uint64_t)r, 1, &high, &domain);
                vf_storeu(out + r, vf_select(drop_bits, vf_loadu(x + r) * scale, zero));
            }
            continue;
        }
        uint8_t bytes[128];
        mask_run(&row->drop, words, base, high, domain, bytes);
        for (uint64_t j = base > first ? base : first; j < end && j < base + 128; j++) {
            const int64_t at = (int64_t)(j - first);
            out[at * row->out_stride] = bytes[j - base] ? x[at * row->x_stride] * (real)row->keep_scale : 0;
            if (row->mask)
                row->mask[at * row->mask_stride] = bytes[j - base];
        }
    }
}

/* ---- gradients ---- */

/* n columns from k on: weights, gradients and their products. Where the weight is 0 the product is 0, whatever the
 * gradient is. */
INLINE vf gradient_load(const struct cattn_softmax_gradient *row, int64_t k, int n, vf *weights, vf *grad) {
    *weights = load_strided((const real *)row->weights + k * row->weights_stride, row->weights_stride, n);
    *grad = load_strided((const real *)row->grad + k * row->grad_stride, row->grad_stride, n);
    return vf_select(vf_eq(*weights, vf_set1(0)), vf_set1(0), *weights * *grad);
}

/* weights * (grad - sum of weights * grad) * scale, summed in the same order as softmax. */
static void softmax_gradient(const struct cattn_softmax_gradient *row) {
    const vf zero = vf_set1(0), scale = vf_set1((real)row->scale);
    real buffer[SUM_RUN], total = 0;
    vf weights, grad;
    for (int64_t run = 0; run < row->n && !stops_at(&row->stop, run); run += SUM_RUN) {
        const int64_t n = min64(SUM_RUN, row->n - run);
        for (int64_t k = 0; k < n; k += LANES)
            vf_storeu(buffer + k, gradient_load(row, run + k, (int)min64(LANES, n - k), &weights, &grad));
        total += sum_run(buffer, run, n);
    }
    for (int64_t k = 0; k < row->n && !stops_at(&row->stop, k); k += LANES) {
        const int n = (int)min64(LANES, row->n - k);
        gradient_load(row, k, n, &weights, &grad);
        vf v = with_one_nan(weights * (grad - vf_set1(total)) * scale);
        v = vf_select(vf_eq(weights, zero), zero, v);
        store_strided((real *)row->out + k * row->out_stride, row->out_stride, v, n);
    }
}

/* ---- the scores by which keys are chosen ---- */

/* The scores of `n` keys from key k on, n <= LANES: the heads are added in order. */
INLINE vf choice_scores(const struct cattn_choice_row *row, int64_t k, int n) {
    const vf scale = vf_set1((real)row->scale), zero = vf_set1(0);
    const real *product = (const real *)row->products + k, *weight = row->weights;
    vf sum = zero;
    for (int64_t h = 0; h < row->n_heads; h++, product += row->head) {
        vf x = (n == LANES ? vf_loadu(product) : vf_loadu_n(product, n)) * scale;
        if (row->relu)
            x = vf_select(vf_lt(x, zero), zero, x); /* NaN stays NaN */
        if (weight)
            sum = vf_fma(vf_set1(weight[h * row->weight_head]), x, sum);
        else
            sum = sum + x;
    }
    return sum + zero; /* no -0 */
}

static void choice_row(const struct cattn_choice_row *row) {
    real *const scores = row->scores;
    int64_t k = 0;
    for (; k + LANES <= row->n_keys; k += LANES)
        vf_storeu(scores + k, choice_scores(row, k, LANES));
    if (k < row->n_keys)
        vf_storeu_n(scores + k, choice_scores(row, k, (int)(row->n_keys - k)), (int)(row->n_keys - k));
}
