/* torch_dropout.h -- the mask of one dropout as PyTorch draws it, as a cursor in row-major order.
 *
 * A cursor is a plain value. PyTorch draws no mask for probabilities 0 and 1, nor for empty tensors: begin none there.
 */
#ifndef CATTN_TORCH_DROPOUT_H
#define CATTN_TORCH_DROPOUT_H

#include "../torch_random.h"

struct cattn_torch_dropout {
    struct cattn_mt19937 mt;
    uint64_t threshold; /* ATEN: an element is kept if its 53 bits are below this */
    double probability; /* MKL: an element is kept if its uniform number is below this */
    uint32_t mcg;       /* MKL: state of the MCG31m1 */
    bool is_mkl;
};

/* The number of 53-bit integers k with k 2^-53 < p. */
uint64_t cattn_torch_threshold(double p);

void cattn_torch_dropout_begin(struct cattn_torch_dropout *cursor, const struct cattn_torch_random *random,
                               double keep_probability);
/* The next n elements, 1 = kept. */
void cattn_torch_dropout_next(struct cattn_torch_dropout *cursor, int64_t n, uint8_t *mask);
void cattn_torch_dropout_skip(struct cattn_torch_dropout *cursor, int64_t n);
/* Moves the generator to where the cursor is, which has passed all elements. */
void cattn_torch_dropout_end(const struct cattn_torch_dropout *cursor, struct cattn_torch_random *random);

#endif
