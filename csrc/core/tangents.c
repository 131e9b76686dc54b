/* tangents.c -- fills the views of a task with pointers to tangents; see tangents.h. */
#include "tangents.h"

#include "plan.h"

void cattn_tangent_calls_fill(const struct cattn_call_shape *scores, const struct cattn_tangents *tangents,
                              struct cattn_tangent_calls *calls) {
    calls->query = calls->key = cattn_call_of_products(scores);
    calls->query.query_col = tangents->query.data ? tangents->query.col : 0;
}

void *cattn_tangent_row(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                        const struct cattn_place *place, int r, bool may_be_half) {
    if (!tensor->data)
        return NULL;
    const int64_t at = cattn_head_start(p, tensor, place->batch, place->head) + (place->first_row + r) * tensor->row;
    return may_be_half ? cattn_stored_at(p, tensor, at) : cattn_tensor_at(p, tensor, at);
}

struct cattn_matrix cattn_tangent_matrix(const struct cattn_attention_params *p, const struct cattn_tensor *tensor,
                                         const struct cattn_rows *rows, const struct cattn_place *place) {
    struct cattn_matrix matrix = {.storage = p->storage};
    if (!tensor->data)
        return matrix;
    const int64_t start = cattn_head_start(p, tensor, place->batch, place->head / p->group_size);
    matrix.first = cattn_stored_at(p, tensor, start + rows->first_key * tensor->row);
    matrix.row = tensor->row;
    matrix.col = tensor->col;
    return matrix;
}

static double sink_tangent(const struct cattn_attention_params *p, const struct cattn_tensor *sinks,
                           const struct cattn_place *place) {
    const void *number = cattn_tensor_at(p, sinks, cattn_head_start(p, sinks, place->batch, place->head));
    return p->dtype == CATTN_F32 ? (double)*(const float *)number : *(const double *)number;
}

void cattn_score_tangents_fill(struct cattn_score_tangents *s, const struct cattn_attention_params *p,
                               const struct cattn_tangents *tangents, const struct cattn_tangent_calls *calls,
                               const struct cattn_rows *rows, const struct cattn_place *place) {
    const struct cattn_matrix key = cattn_tangent_matrix(p, &tangents->key, rows, place);
    s->has_query = tangents->query.data;
    s->has_key = tangents->key.data;
    s->has_bias = tangents->bias.data;
    s->has_sink = tangents->sinks.data;
    s->bias_col = s->has_bias ? tangents->bias.col : 0;
    cattn_rows_view(&s->query, &calls->query, rows, &rows->key, NULL);
    cattn_rows_view(&s->key, &calls->key, rows, &key, NULL);
    for (int r = 0; r < rows->n_rows; r++) {
        s->query_rows[r] = cattn_tangent_row(p, &tangents->query, place, r, true);
        if (s->has_bias) /* a tensor without this axis has stride 0 */
            s->bias[r] = (const char *)cattn_tangent_row(p, &tangents->bias, place, r, false) +
                         rows->first_key * s->bias_col * (int64_t)cattn_element_size(p->dtype);
        if (s->has_sink)
            s->sink[r] = sink_tangent(p, &tangents->sinks, place);
    }
}
