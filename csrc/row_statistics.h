/* row_statistics.h -- the statistics of a row of attention weights. */
#ifndef CATTN_ROW_STATISTICS_H
#define CATTN_ROW_STATISTICS_H

enum cattn_row_statistic {
    CATTN_ROW_LSE,
    CATTN_ROW_MAX_SCORE,   /* the largest visible score, -inf without one */
    CATTN_ROW_ENTROPY,     /* in nats */
    CATTN_ROW_MAX_WEIGHT,  /* the largest weight */
    CATTN_ROW_SINK_WEIGHT, /* the share of the sink, 0 without one */
    CATTN_ROW_DISTANCE,    /* the mean distance between the query's position and a key, by weight */
    CATTN_N_ROW_STATISTICS
};

#endif
