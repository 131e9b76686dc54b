/* metadata.h -- what XLA asks when it registers a handler, and which XLA asks. */
#ifndef CATTN_XLA_METADATA_H
#define CATTN_XLA_METADATA_H

#include <stdbool.h>

#include "ffi.h"

/* Whether the frame has the layout of ffi.h. */
bool cattn_xla_has_known_layout(const struct xla_frame *frame);
/* Whether the frame only asks for the handler's metadata, which it then gets. XLA does so when JAX starts its CPU. */
bool cattn_xla_describe(const struct xla_frame *frame);
/* Whether XLA has asked for metadata, every time by a frame of the known layout. */
bool cattn_xla_is_known(void);

#endif
