/* visible.c -- which keys a query sees, computed as in cattn.reference and not as in csrc/core. */
#include <math.h>
#include <stdlib.h>

#include "problem.h"
#include "visible.h"

/* A row of scores: the ranges of its query, and the offsets of its masks. */
struct row {
    const struct problem *problem;
    int64_t query, n_queries, first_key, n_keys;
    double position; /* of the query among the keys; rounded beyond 2^62, far from any key */
    int64_t mask, bias[2];
};

static int64_t number_of(const struct problem *problem, int which, const int64_t *batch, int64_t common) {
    const struct array *numbers = &problem->inputs[which];
    return problem->has_input[which] ? (int64_t)number_at(numbers, offset_of(numbers, batch)) : common;
}

/* index: of the first score of the row */
static struct row row_at(const struct problem *problem, const int64_t *index) {
    const struct cattn_attention_params *p = &problem->back.forward;
    const struct cattn_ranges *r = &p->ranges;
    struct row row = {.problem = problem, .query = index[p->n_batch_dims + 1]};
    row.n_queries = number_of(problem, QUERY_LENGTHS, index, r->query_length);
    row.n_keys = number_of(problem, KEY_LENGTHS, index, r->key_length);
    row.first_key = number_of(problem, FIRST_KEYS, index, r->first_key);
    const int64_t offset = r->lower_right ? row.n_keys - row.n_queries : number_of(problem, OFFSETS, index, r->offset);
    row.position = (double)row.query + (double)offset;
    row.mask = offset_of(&problem->inputs[MASK], index);
    for (int b = 0; b < p->n_bias; b++)
        row.bias[b] = offset_of(&problem->inputs[BIAS_0 + b], index);
    return row;
}

static int64_t along_keys(const struct array *array, int64_t first, int64_t k) {
    return first + k * array->stride[array->n_axes - 1];
}

static bool sees(const struct row *row, int64_t k) {
    const struct problem *problem = row->problem;
    const struct cattn_attention_params *p = &problem->back.forward;
    const struct cattn_ranges *r = &p->ranges;
    const double before = row->position - (double)k; /* distance from this key to the query's position */
    if (!r->all_visible && (row->query >= row->n_queries || k < row->first_key || k >= row->n_keys ||
                            (r->left != CATTN_UNBOUNDED && before > (double)r->left) ||
                            (r->right != CATTN_UNBOUNDED && -before > (double)r->right)))
        return false;
    const struct array *mask = &problem->inputs[MASK];
    if (problem->has_input[MASK] && number_at(mask, along_keys(mask, row->mask, k)) == 0)
        return false;
    for (int b = 0; b < p->n_bias; b++) {
        const struct array *bias = &problem->inputs[BIAS_0 + b];
        if (number_at(bias, along_keys(bias, row->bias[b], k)) == (double)-INFINITY)
            return false;
    }
    return true;
}

/* Visits the rows in C order. `shape` must live as long as the cursor. */
static struct cursor walk_rows(const struct problem *problem, struct array *shape) {
    const struct cattn_attention_params *p = &problem->back.forward;
    *shape = (struct array){.n_axes = p->n_batch_dims + 2, .span = p->n_batch * p->num_heads * p->seqlen_q};
    axes_of(p, p->seqlen_q, 0, shape->dim);
    return walk(shape);
}

/* Marks a row of a tensor. Rows that share memory share all of it, so the first byte shows if it is marked. */
static void mark(const struct array *array, uint8_t *seen, int64_t first) {
    const int col = array->n_axes - 1;
    uint8_t *at = seen + array->low + first;
    if (array->dim[col] == 0 || *at)
        return;
    for (int64_t d = 0; d < array->dim[col]; d++)
        at[d * array->stride[col]] = 1;
}

/* Marks the keys, values and scales that this row sees, and its query if it sees any. */
static void mark_seen(const struct problem *problem, uint8_t *const *seen, const int64_t *index) {
    const struct cattn_attention_params *p = &problem->back.forward;
    const struct array *inputs = problem->inputs;
    const struct row row = row_at(problem, index);
    int64_t first_key[MAX_AXES] = {0}; /* of the row's key-value head */
    for (int axis = 0; axis < p->n_batch_dims; axis++)
        first_key[axis] = index[axis];
    first_key[p->n_batch_dims] = index[p->n_batch_dims] / p->group_size;
    static const int by_keys[] = {KEY, VALUE, KEY_SCALE, VALUE_SCALE};
    int64_t first[sizeof by_keys / sizeof *by_keys];
    for (size_t i = 0; i < sizeof by_keys / sizeof *by_keys; i++)
        first[i] = offset_of(&inputs[by_keys[i]], first_key);
    for (int64_t k = 0; k < p->seqlen_k; k++) {
        if (!sees(&row, k))
            continue;
        mark(&inputs[QUERY], seen[QUERY], offset_of(&inputs[QUERY], index));
        for (size_t i = 0; i < sizeof by_keys / sizeof *by_keys; i++) {
            const int which = by_keys[i];
            if (problem->has_input[which])
                mark(&inputs[which], seen[which], first[i] + k * inputs[which].stride[p->n_batch_dims + 1]);
        }
        for (int b = 0; b < p->n_bias; b++)
            seen[BIAS_0 + b][inputs[BIAS_0 + b].low + along_keys(&inputs[BIAS_0 + b], row.bias[b], k)] = 1;
    }
}

void poison_hidden(struct problem *problem) {
    static const int poisoned[] = {QUERY, KEY, VALUE, BIAS_0, BIAS_1, KEY_SCALE, VALUE_SCALE};
    uint8_t *seen[N_INPUTS] = {NULL};
    for (size_t i = 0; i < sizeof poisoned / sizeof *poisoned; i++)
        seen[poisoned[i]] = calloc(1, (size_t)problem->inputs[poisoned[i]].span + 1);
    struct array shape;
    for (struct cursor c = walk_rows(problem, &shape); c.more; step(&c))
        mark_seen(problem, seen, c.index);
    for (int b = BIAS_0; b < BIAS_0 + problem->back.forward.n_bias; b++) /* -inf must stay: it hides keys */
        for (int64_t i = 0; i < problem->inputs[b].span; i++)
            seen[b][i] |= number_at(&problem->inputs[b], i - problem->inputs[b].low) == (double)-INFINITY;
    for (size_t i = 0; i < sizeof poisoned / sizeof *poisoned; i++) {
        if (problem->has_input[poisoned[i]])
            poison(&problem->inputs[poisoned[i]], seen[poisoned[i]],
                   poisoned[i] >= KEY_SCALE ? (double)CATTN_LARGEST_SCALE : (double)NAN); /* no scale is NaN */
        free(seen[poisoned[i]]);
    }
}

void check_explanation(const struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    if (problem->has_input[MASK] || p->n_bias > 0)
        return;
    struct cattn_explanation explanation;
    if (cattn_attention_explain(p, &explanation) != CATTN_OK)
        finding("explain was interrupted");
    struct array shape;
    int64_t n = 0;
    for (struct cursor c = walk_rows(problem, &shape); c.more; step(&c)) {
        const struct row row = row_at(problem, c.index);
        for (int64_t k = 0; k < p->seqlen_k; k++)
            n += sees(&row, k);
    }
    if (n != explanation.n_keys)
        finding("explain counts other keys");
}
