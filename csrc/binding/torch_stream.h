/* torch_stream.h -- the type TorchStream, base of cattn.TorchGenerator, and how a call draws from one.
 *
 * begin waits until no other thread draws, and hands out a copy of the generator; commit puts the copy back, abort
 * leaves the generator where it was. The GIL may be released in between. begin fails if this thread is drawing already
 * (a signal handler can try), or if the process was forked while another thread was drawing.
 */
#ifndef CATTN_TORCH_STREAM_H
#define CATTN_TORCH_STREAM_H

#include "binding.h"
#include "torch_random.h"

PyObject *cattn_torch_type(PyObject *module);
bool cattn_torch_check(const struct binding_state *state, PyObject *rng);
bool cattn_torch_begin(PyObject *stream, struct cattn_torch_random *random);
/* False, and as abort, if a signal handler raises: the call raises then. */
bool cattn_torch_commit(PyObject *stream, const struct cattn_torch_random *random);
void cattn_torch_abort(PyObject *stream);

#endif
