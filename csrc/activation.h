/* activation.h -- the functions of single elements. */
#ifndef CATTN_ACTIVATION_H
#define CATTN_ACTIVATION_H

enum cattn_activation {
    CATTN_GELU = 0,  /* x times the normal distribution function of x */
    CATTN_GELU_TANH, /* its approximation by a tanh */
    CATTN_SILU       /* x times the logistic function of x */
};

#endif
