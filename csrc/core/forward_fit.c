/* forward_fit.c -- whether lse and out of a call of gradients can be the results of its forward pass.
 *
 * A call that lacks an option of the forward pass, causality for example, would get wrong gradients. It shows in two
 * sums that the backward pass has at hand: the weights of a row, computed from its lse, sum to 1 (with the sink's), and
 * so the sum of P dP over the keys is the sum of grad_out * out over the columns.
 *
 * lse and out may come from other software, which may have rounded scores, lse and output to bfloat16: each is then off
 * by up to 2^-8 of itself. An error of the scores or of the lse is one of the logarithm of a weight. The scores that
 * matter lie between lse - log(number of keys) and lse. So the logarithm of the sum may be off by 2^-7 of
 * 1 + |lse| + log(number of keys), and P dP relative to its magnitude by as much. What rounding in float32 adds is far
 * less: the kernels compute the scores in the order of the forward pass, and blocks are added in double.
 */
#include "forward_fit.h"

#define TOLERANCE 0x1p-7
/* Beyond such a factor of exp(64) weights that are off by so much may be 0 or infinite in float32, and show nothing. */
#define MOST_TOLERANCE 64

/* The natural logarithm of n, up to the next multiple of log(2). */
static double log_above(int64_t n) {
    double log = 0;
    for (; n > 0; n >>= 1)
        log += 0.6931471805599453;
    return log;
}

/* exp(x) for x >= 0, rather too small than too large by a part of x * x / 1024: close to 1 where it decides. */
static double exp_below(double x) {
    double power = 1 + x / 1024;
    for (int i = 0; i < 10; i++)
        power *= power;
    return power;
}

/* The sum of the magnitudes of a row of grad_out. */
static double size_of_grad(const struct cattn_backward *b, enum cattn_dtype dtype, int r) {
    double size = 0;
    for (int64_t i = r * b->grad_cols; i < (r + 1) * b->grad_cols; i++) {
        const double x =
            dtype == CATTN_F32 ? (double)((const float *)b->grad_rows)[i] : ((const double *)b->grad_rows)[i];
        size += x < 0 ? -x : x;
    }
    return size;
}

/* Comparisons with NaN are false: NaN in the arguments is not an error. */
static bool row_fits(const struct cattn_backward *b, const struct cattn_attention_params *p,
                     const struct cattn_kernels *kernels, int r, struct cattn_misfit *found) {
    const struct cattn_fit *fit = &b->fit;
    const double lse =
        p->dtype == CATTN_F32 ? (double)((const float *)b->lse.value)[r] : ((const double *)b->lse.value)[r];
    const double tolerance = TOLERANCE * (1 + (lse < 0 ? -lse : lse) + log_above(b->scores.n_keys));
    if (!(tolerance < MOST_TOLERANCE)) /* also infinite or NaN: a row without keys, or one without numbers */
        return true;
    const double most = exp_below(tolerance);
    double sink = 0;
    if (p->sinks.data)
        kernels->backward_sees(b, r, &sink);
    const double total = fit->weights[r] + sink;
    found->weights = total;
    found->of_out = false;
    if (total > most || total * most < 1) /* the lse of a row without visible keys may be any number */
        return !kernels->backward_sees(b, r, &sink);
    found->of_out = true;
    const double difference = fit->products[r] / total - fit->delta[r], off = difference < 0 ? -difference : difference;
    if (!(off > tolerance * (fit->magnitudes[r] / total + fit->delta_magnitude[r])))
        return true;
    /* An output that was float16, whatever its type is now, is off by up to 2^-25 if it is less than 2^-14. */
    return !(off > 0x1p-24 * size_of_grad(b, p->dtype, r));
}

bool cattn_find_misfit(const struct cattn_backward *b, const struct cattn_attention_params *p,
                       const struct cattn_kernels *kernels, struct cattn_misfit *found) {
    for (int r = 0; r < b->scores.n_rows; r++)
        if (!row_fits(b, p, kernels, r, found)) {
            found->found = true;
            found->row = r;
            return true;
        }
    return false;
}
