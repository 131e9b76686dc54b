/* rng.h -- the arguments `rng` and dropout probability: a seed or a generator, a threshold and a scale. */
#ifndef CATTN_RNG_H
#define CATTN_RNG_H

#include "torch_stream.h"

/* Checks rng without drawing. */
bool cattn_rng_check(PyObject *rng);
/* A dropout probability, p in [0, 1], to all of `spec` but the seed or the generator. */
bool cattn_dropout_spec_from(PyObject *p, const char *name, struct cattn_dropout_spec *spec);

/* A draw lasts from the last check of a call until its result is complete, so that a call that raises leaves a
 * TorchGenerator where it was: clear it first, begin it where there is dropout, end it in any case. */
struct cattn_draw {
    bool is_torch;    /* bits come from a TorchGenerator; spec->seed is unused */
    PyObject *stream; /* the generator to end, borrowed; or NULL */
    struct cattn_torch_random random;
};
static inline void cattn_draw_clear(struct cattn_draw *draw) {
    draw->is_torch = false;
    draw->stream = NULL;
}
/* Draws the seed, or begins a draw from the TorchGenerator, and puts it into `spec`. */
bool cattn_draw_begin(struct binding_state *state, PyObject *rng, struct cattn_dropout_spec *spec,
                      struct cattn_draw *draw);
/* Advances the TorchGenerator if there is a result. Returns it, or NULL if a signal handler raises now. */
PyObject *cattn_draw_end(struct cattn_draw *draw, PyObject *result);

#endif
