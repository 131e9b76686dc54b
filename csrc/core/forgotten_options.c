/* forgotten_options.c -- whether lse and out of a call of gradients can be the results of its forward pass.
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
 *
 * The tangents of lse and out show in two more sums: with the tangent of lse as the mean, the sum of P (S' - mean) is
 * 0, and the sum of P ((S' - mean) dP + dP') is the sum of grad_out * out_tangent. They may have been rounded to
 * bfloat16, and as the weights of one row are off together, by no more than their sum is, 2^-6 of the terms is enough.
 */
#include "../kernels/kernels.h"
#include "attention.h"

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

static double magnitude(double x) { return x < 0 ? -x : x; }

/* A lower bound of exp(x) for x >= 0, within a relative x * x / 2048: (1 + x / 1024)^1024, without libm, so that it is
 * the same on every machine. */
static double exp_below(double x) {
    double power = 1 + x / 1024;
    for (int i = 0; i < 10; i++)
        power *= power;
    return power;
}

/* The sum of the magnitudes of a row of grad_out, whose copy is multiplied by a gate. */
static double size_of_grad(const struct cattn_backward *b, enum cattn_dtype dtype, int r) {
    double size = 0;
    if (b->scores.call.has_gate)
        return b->fit.grad_size[r];
    for (int64_t i = r * b->grad_cols; i < (r + 1) * b->grad_cols; i++)
        size += magnitude(cattn_number_at(dtype, b->grad_rows, i));
    return size;
}

/* Comparisons with NaN are false: NaN in the arguments is not an error. */
static bool row_fits(const struct cattn_backward *b, const struct cattn_attention_params *p,
                     const struct cattn_kernels *kernels, int r, struct cattn_misfit *found) {
    const struct cattn_fit *fit = &b->fit;
    const double lse = cattn_number_at(p->dtype, b->lse.value, r);
    const double tolerance = TOLERANCE * (1 + magnitude(lse) + log_above(b->scores.n_keys));
    if (!(tolerance < MOST_TOLERANCE)) /* also infinite or NaN: a row without keys, or one without numbers */
        return true;
    const double most = exp_below(tolerance);
    double sink = 0;
    if (p->sinks.data)
        kernels->backward_sees(b, r, &sink);
    const double total = fit->weights[r] + sink;
    found->weights = total;
    found->kind = CATTN_MISFIT_LSE;
    if (total > most || total * most < 1) /* the lse of a row without visible keys may be any number */
        return !kernels->backward_sees(b, r, &sink);
    found->kind = CATTN_MISFIT_OUT;
    const double off = magnitude(fit->products[r] / total - fit->delta[r]);
    if (!(off > tolerance * (fit->magnitudes[r] / total + fit->delta_magnitude[r])))
        return true;
    /* An output that was float16, whatever its type is now, is off by up to 2^-25 if it is less than 2^-14. */
    return !(off > 0x1p-24 * size_of_grad(b, p->dtype, r));
}

/* The numbers of a row of tangents that the two sums are compared with. */
struct tangent_row {
    double mean, sink_weight, relative; /* relative: by how much of the terms a sum may be off */
    double smallest;                    /* what underflow may change of a sum */
    double rounding;                    /* of a tangent of a score, from the largest sum of terms of size 1 */
};

/* Whether the sum of P (S' - mean) can be 0. A tangent of a score may be the small sum of large products. */
static bool lse_tangent_fits(const struct cattn_jvp_backward *j, const struct cattn_kernels *kernels, int r,
                             const struct tangent_row *t) {
    const double of_sink = j->tangents.has_sink ? j->tangents.sink[r] : 0;
    const double sink = t->sink_weight > 0 ? t->sink_weight * (of_sink - t->mean) : 0;
    const double terms = j->fit.centred_magnitude[r] + magnitude(sink) + magnitude(t->mean);
    const double off = magnitude(j->fit.centred[r] + sink) - t->relative * terms - t->smallest;
    return !(off > 0) || !(off > t->rounding * kernels->jvp_backward_terms(&j->backward, r));
}

/* Whether the sum of P ((S' - mean) dP + dP') can be the sum of grad_out * out_tangent. */
static bool out_tangent_fits(const struct cattn_jvp_backward *j, const struct cattn_attention_params *p,
                             const struct cattn_kernels *kernels, int r, const struct tangent_row *t) {
    const struct cattn_fit *fit = &j->backward.fit;
    /* out_tangent is a difference of sums, whose terms have the size of out times tangents */
    const double tangents = j->fit.centred_magnitude[r] + magnitude(t->mean);
    const double terms = j->fit.magnitudes[r] + j->fit.delta_magnitude[r] + tangents * fit->delta_magnitude[r] +
                         magnitude(t->mean) * fit->magnitudes[r];
    double off = magnitude(j->fit.products[r] - j->fit.delta[r]) - t->relative * terms - t->smallest * (1 + tangents);
    if (!(off > 0))
        return true;
    /* outputs, one of them times the mean, may be subnormal numbers of their storage */
    const double smallest = p->storage == CATTN_STORED_F16    ? 0x1p-24
                            : p->storage == CATTN_STORED_BF16 ? 0x1p-133
                                                              : t->smallest;
    off -= smallest * (1 + magnitude(t->mean)) * size_of_grad(&j->backward, p->dtype, r);
    return !(off > 0) || !(off > t->rounding * kernels->jvp_backward_terms(&j->backward, r) * fit->magnitudes[r]);
}

/* Whether the tangents of lse and out of a row that fits belong to the tangents of the inputs. */
static bool tangents_fit(const struct cattn_jvp_backward *j, const struct cattn_attention_params *p,
                         const struct cattn_kernels *kernels, int r, struct cattn_misfit *found) {
    const bool single = p->dtype == CATTN_F32;
    const double number = single ? 0x1p-140 : 0x1p-1060;
    struct tangent_row t = {.mean =
                                single ? (double)*(const float *)j->lse_tangent[r] : *(const double *)j->lse_tangent[r],
                            .smallest = number * (double)(j->backward.scores.n_keys + p->head_dim + p->d_v),
                            .rounding = (single ? 0x1p-18 : 0x1p-47) * magnitude(p->score_options.scale)};
    /* weights below 2^-126 are 0; beside a sink they may be the only ones */
    if (!kernels->backward_sees(&j->backward, r, &t.sink_weight) || j->backward.fit.weights[r] < 0x1p-100)
        return true;
    /* scores of the size of lse have been rounded, too */
    t.relative = 0x1p-6 + magnitude(j->backward.fit.weights[r] + t.sink_weight - 1) +
                 magnitude(cattn_number_at(p->dtype, j->backward.lse.value, r)) * (single ? 0x1p-20 : 0x1p-49);
    found->kind = CATTN_MISFIT_LSE_TANGENT;
    if (!lse_tangent_fits(j, kernels, r, &t))
        return false;
    found->kind = CATTN_MISFIT_OUT_TANGENT;
    return out_tangent_fits(j, p, kernels, r, &t);
}

bool cattn_find_misfit(const struct cattn_backward *b, const struct cattn_backward_params *params,
                       const struct cattn_kernels *kernels, struct cattn_misfit *found) {
    const struct cattn_attention_params *p = &params->forward;
    const struct cattn_jvp_backward *j = params->of_tangents ? (const struct cattn_jvp_backward *)b : NULL;
    for (int r = 0; r < b->scores.n_rows; r++)
        if (!row_fits(b, p, kernels, r, found) || (j && !tangents_fit(j, p, kernels, r, found))) {
            found->found = true;
            found->row = r;
            return true;
        }
    return false;
}
