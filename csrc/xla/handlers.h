/* handlers.h -- the functions that XLA calls: attention and its derivatives.
 *
 * XLA calls them on its own threads and without the GIL. cattn.integrations.jax knows their arguments.
 */
#ifndef CATTN_XLA_HANDLERS_H
#define CATTN_XLA_HANDLERS_H

#include "ffi.h"

typedef struct xla_error *cattn_xla_handler(struct xla_frame *frame);
cattn_xla_handler cattn_xla_forward, cattn_xla_backward, cattn_xla_jvp, cattn_xla_jvp_backward;

#endif
