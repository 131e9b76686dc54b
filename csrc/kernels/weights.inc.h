/* weights.inc.h -- attention weights, computed again from scores and the log-sum-exp of a finished forward pass. The
 * gradients and the statistics share it. csrc/README.md ("Gradients", 1) has the order of operations.
 */

/* Splits the lse of row r into (real)lse and a residual. Below 1/64 the residual becomes a factor of the weight,
 * because adding it to score - lse would lose digits. Above, it is added to that difference: such a residual occurs
 * only with scores above 2^18, whose differences are exact. */
static void split_lse(const struct cattn_rows *rows, const struct cattn_split_lse *split, int r) {
    double lse = (double)INFINITY; /* padding rows get the weights exp(-inf) = 0 */
    if (r < rows->n_rows)
        lse = rows->call.double_lse ? *(const double *)rows->per_row->lse[r]
                                    : (double)*(const real *)rows->per_row->lse[r];
    const double residual = (double)(real)lse - lse; /* NaN if lse is infinite: neither little nor much */
    const bool little = residual > -1.0 / 64 && residual < 1.0 / 64, much = !little && residual - residual == 0;
    ((real *)split->value)[r] = (real)lse;
    ((real *)split->residual)[r] = much ? (real)residual : 0;
    /* exp(residual) - 1 by its series */
    ((real *)split->factor)[r] = little ? (real)(residual * (1 + residual * (0.5 + residual * (1.0 / 6)))) : 0;
}

/* The lse of LANES rows. */
struct lse_lanes {
    vf value, residual, factor;
};

INLINE struct lse_lanes lse_lanes(const struct cattn_split_lse *split, int r) {
    return (struct lse_lanes){vf_loadu((const real *)split->value + r), vf_loadu((const real *)split->residual + r),
                              vf_loadu((const real *)split->factor + r)};
}

/* exp(score - lse) with all digits of the lse. */
INLINE vf weight_of(vf score, struct lse_lanes lse) {
    vf log;
    return vf_exp_of_difference(score, lse.value, lse.residual, lse.factor, &log);
}

/* The weight of one score of row r; a sink, for example. */
static real weight_of_row(real score, const struct cattn_split_lse *split, int r) {
    const struct lse_lanes lse = {vf_set1(((const real *)split->value)[r]), vf_set1(((const real *)split->residual)[r]),
                                  vf_set1(((const real *)split->factor)[r])};
    real weight;
    vf_storeu_n(&weight, weight_of(vf_set1(score), lse), 1);
    return weight;
}
