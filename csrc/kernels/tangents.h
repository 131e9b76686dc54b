/* tangents.h -- the contract of the passes with tangents: the derivative of attention in a direction, and the gradients
 * of that derivative. Their kernels are in the tables of kernels.h.
 */
#ifndef CATTN_TANGENTS_H
#define CATTN_TANGENTS_H

#include "kernels.h"

/* The tangents of a block's scores. Two views compute the products of query tangents and keys, and of queries and key
 * tangents, which are added in one array [key][CATTN_TILE_ROWS]. */
struct cattn_score_tangents {
    bool has_query, has_key, has_bias, has_sink;
    struct cattn_rows query, key;
    const void *query_rows[CATTN_TILE_ROWS]; /* if has_query: the queries of `query` */
    const void *bias[CATTN_TILE_ROWS];       /* if has_bias */
    int64_t bias_col;
    double sink[CATTN_TILE_ROWS]; /* if has_sink */
    void *tangent;                /* scratch */
};

/* The derivative of a block of queries. `scores` has the results of the forward pass; `values` and `value_tangents`
 * have numbers of pairs as weights, and the values and their tangents as values. A driver calls
 *
 *     jvp_begin      once
 *       jvp_block    for each key block
 *     jvp_finish     once: writes the tangents of the output and of the log-sum-exp
 */
struct cattn_jvp {
    struct cattn_rows scores, values, value_tangents;
    bool has_value;
    struct cattn_score_tangents tangents;
    struct cattn_split_lse lse;
    void *mean; /* scratch, one a row: the sum of weight * tangent */
    /* results */
    void *out_tangent[CATTN_TILE_ROWS]; /* stored as out */
    int64_t out_tangent_col;
    void *lse_tangent[CATTN_TILE_ROWS]; /* in the table's own type; the first is NULL if nobody wants them */
};

/* What shows whether the tangents of out and lse belong to the tangents of the inputs (core/forward_fit.c). One number
 * a row: over the keys, sums of P (S' - mean) and of its magnitude, of the terms of grad_out * out_tangent and of their
 * magnitudes; over the columns, sums of grad_out * out_tangent and of its magnitude. */
struct cattn_tangent_fit {
    double centred[CATTN_TILE_ROWS], centred_magnitude[CATTN_TILE_ROWS];
    double products[CATTN_TILE_ROWS], magnitudes[CATTN_TILE_ROWS];
    double delta[CATTN_TILE_ROWS], delta_magnitude[CATTN_TILE_ROWS];
};

/* The gradients of that derivative. A driver calls the functions of the gradients (struct cattn_backward), with the
 * steps `jvp_backward` in place of `backward`. Beside the views of `backward`, `grads` has grad_out and the
 * tangents of the values, and `keys` has gradients of the score tangents as weights and the tangents of the keys as
 * values. */
struct cattn_jvp_backward {
    struct cattn_backward backward; /* the first member: the driver passes its address */
    struct cattn_tangent_fit fit;
    struct cattn_score_tangents tangents;
    bool has_value;
    struct cattn_rows grads, keys;
    void *query_rows;                   /* scratch: the query tangents, as backward.query_rows */
    void *delta;                        /* scratch, one a row: grad_out . out_tangent */
    void *mean;                         /* scratch, one a row: the tangent of the lse */
    void *out_tangent[CATTN_TILE_ROWS]; /* stored as backward.out_storage says */
    int64_t out_tangent_col;
    const void *lse_tangent[CATTN_TILE_ROWS]; /* in the table's own type */
};

#endif
