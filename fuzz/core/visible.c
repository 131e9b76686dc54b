/* visible.c -- which keys a query sees, from ranges, masks, blocks and lists, and what no query sees. See visible.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "visible.h"

/* A row of scores: the ranges of its query, and its place in each mask. */
struct row {
    const struct problem *problem;
    const struct cattn_ranges *ranges;
    int64_t query, n_queries, first_key, n_keys;
    double position; /* of the query among the keys; rounded beyond 2^62, far from any key */
    int64_t mask, blocks, bias[2];
};

static const struct part *part_of(const struct problem *problem, int which) {
    return problem->parts[which].present ? &problem->parts[which] : NULL;
}

static int64_t number_of(const struct problem *problem, int which, const int64_t *batch, int64_t common) {
    const struct part *part = part_of(problem, which);
    return part ? (int64_t)number_at(&part->array, offset_of(&part->array, batch)) : common;
}

static const struct part *bias_of(const struct problem *problem, int b) {
    return part_of(problem, b == 0 ? OPERAND_bias : BIAS_1);
}

static int64_t start_of(const struct part *part, const int64_t *index) {
    return part ? offset_of(&part->array, index) : 0;
}

/* index: of the first score of the row */
static struct row row_at(const struct problem *problem, const int64_t *index) {
    const struct cattn_attention_params *p = &problem->back.forward;
    const struct cattn_ranges *r = &p->ranges;
    struct row row = {.problem = problem, .ranges = r, .query = index[p->n_batch_dims + 1]};
    row.n_queries = number_of(problem, OPERAND_query_seq_lengths, index, r->query_length);
    row.n_keys = number_of(problem, OPERAND_key_value_seq_lengths, index, r->key_length);
    row.first_key = number_of(problem, OPERAND_key_value_seq_starts, index, r->first_key);
    const int64_t common = number_of(problem, OPERAND_query_offset, index, r->offset);
    row.position = (double)row.query + (double)(r->lower_right ? row.n_keys - row.n_queries : common);
    int64_t block[MAX_AXES];
    memcpy(block, index, sizeof block);
    block[p->n_batch_dims + 1] /= p->block_size;
    row.blocks = start_of(part_of(problem, OPERAND_block_mask), block);
    row.mask = start_of(part_of(problem, OPERAND_attn_mask), index);
    for (int b = 0; b < 2; b++)
        row.bias[b] = start_of(bias_of(problem, b), index);
    return row;
}

static int64_t along_keys(const struct part *part, int64_t first, int64_t k) {
    return first + k * part->array.stride[part->array.n_axes - 1];
}

static bool in_range(const struct row *row, int64_t k) {
    const struct cattn_ranges *r = row->ranges;
    const double before = row->position - (double)k; /* distance from this key to the query's position */
    return r->all_visible || (row->query < row->n_queries && k >= row->first_key && k < row->n_keys &&
                              (r->left == CATTN_UNBOUNDED || before <= (double)r->left) &&
                              (r->right == CATTN_UNBOUNDED || -before <= (double)r->right));
}

static bool sees(const struct row *row, int64_t k) {
    const struct problem *problem = row->problem;
    const struct part *mask = part_of(problem, OPERAND_attn_mask), *blocks = part_of(problem, OPERAND_block_mask);
    const int64_t block = k / problem->back.forward.block_size;
    if (!in_range(row, k))
        return false;
    if (mask && number_at(&mask->array, along_keys(mask, row->mask, k)) == 0)
        return false;
    if (blocks && number_at(&blocks->array, along_keys(blocks, row->blocks, block)) == 0)
        return false;
    for (int b = 0; b < 2; b++) {
        const struct part *bias = bias_of(problem, b);
        if (bias && number_at(&bias->array, along_keys(bias, row->bias[b], k)) == (double)-INFINITY)
            return false;
    }
    return true;
}

/* Visits the rows in C order. `shape` must live as long as the cursor. */
static struct cursor walk_rows(const struct problem *problem, struct array *shape) {
    const struct cattn_attention_params *p = &problem->back.forward;
    const int n = p->n_batch_dims;
    *shape = (struct array){.n_axes = n + 2, .span = p->n_batch * p->num_heads * p->seqlen_q};
    memcpy(shape->dim, p->batch_shape, (size_t)n * sizeof *shape->dim);
    shape->dim[n] = p->num_heads;
    shape->dim[n + 1] = p->seqlen_q;
    return walk(shape);
}

/* ---- poison ---- */

static const int OF_KEYS[] = {OPERAND_key,         OPERAND_value, OPERAND_key_scale,
                              OPERAND_value_scale, KEY_TANGENT,   VALUE_TANGENT};
static const int OF_QUERIES[] = {OPERAND_query, OPERAND_gate, QUERY_TANGENT};
static const int OF_PAIRS[] = {OPERAND_bias, BIAS_1, BIAS_TANGENT};
#define N_OF(list) (sizeof(list) / sizeof *(list))

/* Marks a row of a tensor. Rows that share memory share all of it, so the first byte shows if it is marked. */
static void mark(const struct array *array, uint8_t *seen, int64_t first) {
    const int col = array->n_axes - 1;
    uint8_t *at = seen + array->low + first;
    if (array->dim[col] == 0 || *at)
        return;
    for (int64_t d = 0; d < array->dim[col]; d++)
        at[d * array->stride[col]] = 1;
}

static void mark_key(const struct problem *problem, uint8_t *const *seen, const int64_t *index, int64_t k) {
    const struct cattn_attention_params *p = &problem->back.forward;
    const int n = p->n_batch_dims;
    int64_t key[MAX_AXES] = {0};
    memcpy(key, index, (size_t)n * sizeof *key);
    key[n] = index[n] / p->group_size;
    key[n + 1] = k;
    const struct part *part;
    for (size_t i = 0; i < N_OF(OF_QUERIES); i++)
        if ((part = part_of(problem, OF_QUERIES[i])))
            mark(&part->array, seen[OF_QUERIES[i]], offset_of(&part->array, index));
    for (size_t i = 0; i < N_OF(OF_KEYS); i++)
        if ((part = part_of(problem, OF_KEYS[i])))
            mark(&part->array, seen[OF_KEYS[i]], offset_of(&part->array, key));
    for (size_t i = 0; i < N_OF(OF_PAIRS); i++)
        if ((part = part_of(problem, OF_PAIRS[i])))
            seen[OF_PAIRS[i]][part->array.low + along_keys(part, offset_of(&part->array, index), k)] = 1;
}

/* All keys of the ranges and masks, or of these the listed ones. */
static void mark_seen(const struct problem *problem, uint8_t *const *seen, const int64_t *index) {
    const struct row row = row_at(problem, index);
    const struct part *lists = part_of(problem, OPERAND_key_indices);
    const int64_t n = lists ? problem->back.forward.n_indices : problem->back.forward.seqlen_k;
    for (int64_t i = 0; i < n; i++) {
        const int64_t k =
            lists ? (int64_t)number_at(&lists->array, along_keys(lists, offset_of(&lists->array, index), i)) : i;
        if (k >= 0 && sees(&row, k))
            mark_key(problem, seen, index, k);
    }
}

void poison_hidden(struct problem *problem) {
    uint8_t *seen[N_PARTS] = {NULL};
    struct array shape;
    const int *const lists[] = {OF_KEYS, OF_QUERIES, OF_PAIRS};
    const size_t counts[] = {N_OF(OF_KEYS), N_OF(OF_QUERIES), N_OF(OF_PAIRS)};
    for (int i = 0; i < N_PARTS; i++)
        seen[i] = problem->parts[i].present ? calloc(1, (size_t)problem->parts[i].array.span + 1) : NULL;
    for (struct cursor c = walk_rows(problem, &shape); c.more; step(&c))
        mark_seen(problem, seen, c.index);
    for (int l = 0; l < 3; l++)
        for (size_t i = 0; i < counts[l]; i++) {
            struct part *part = &problem->parts[lists[l][i]];
            const bool is_scale = lists[l][i] == OPERAND_key_scale || lists[l][i] == OPERAND_value_scale;
            const bool is_bias = lists[l][i] == OPERAND_bias || lists[l][i] == BIAS_1;
            for (int64_t at = 0; part->present && at < part->array.span; at++) {
                const int64_t offset = at - part->array.low;
                const bool hides = is_bias && number_at(&part->array, offset) == (double)-INFINITY; /* must stay */
                if (!seen[lists[l][i]][at] && !hides)
                    set_number(&part->array, offset, is_scale ? (double)CATTN_LARGEST_SCALE : (double)NAN);
            }
            part->array.sum = part->present ? sum_of(&part->array) : 0;
        }
    for (int i = 0; i < N_PARTS; i++)
        free(seen[i]);
}

/* ---- counts and masks ---- */

bool explanation_is_right(const struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    if (part_of(problem, OPERAND_attn_mask) || p->n_bias > 0 || problem->lists != DENSE || problem->pass != FORWARD)
        return true;
    struct cattn_explanation explanation;
    if (cattn_attention_explain(p, &explanation) != CATTN_OK)
        return false;
    struct array shape;
    int64_t n = 0;
    for (struct cursor c = walk_rows(problem, &shape); c.more; step(&c)) {
        const struct row row = row_at(problem, c.index);
        for (int64_t k = 0; k < p->seqlen_k; k++)
            n += sees(&row, k);
    }
    return n == explanation.n_keys;
}

bool mask_is_right(const struct problem *problem) {
    const struct cattn_mask_params *p = &problem->of.mask;
    const struct cattn_ranges *r = &p->ranges;
    struct row row = {.problem = problem, .ranges = r, .n_queries = r->query_length, .n_keys = r->key_length};
    for (struct cursor c = walk(&problem->parts[0].array); c.more; step(&c)) {
        row.query = c.index[0];
        row.position = (double)row.query + (double)(r->lower_right ? row.n_keys - row.n_queries : r->offset);
        if (number_at(&problem->parts[0].array, c.offset) != (double)in_range(&row, c.index[1]))
            return false;
    }
    return true;
}
