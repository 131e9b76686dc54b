/* score_options.h -- numbers that act on every score of attention. The core hands them from the params of a call to the
 * kernels as one struct, so that a new one changes neither.
 */
#ifndef CATTN_SCORE_OPTIONS_H
#define CATTN_SCORE_OPTIONS_H

struct cattn_score_options {
    double scale;   /* factor of query . key */
    double softcap; /* > 0: softcap * tanh(score / softcap), before anything is added to the score; 0: none */
};

#endif
