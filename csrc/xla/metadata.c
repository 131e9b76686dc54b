/* metadata.c -- what XLA asks when it registers a handler, and which XLA asks. See metadata.h. */
#include "metadata.h"

#include <stdatomic.h>

bool cattn_xla_has_known_layout(const struct xla_frame *frame) {
    return frame->head.size == XLA_SIZE(xla_frame, attributes) &&
           frame->arguments.head.size == XLA_SIZE(xla_items, items) &&
           frame->results.head.size == XLA_SIZE(xla_items, items) &&
           frame->attributes.head.size == XLA_SIZE(xla_attributes, items) && frame->api->version.major == XLA_MAJOR;
}

static atomic_bool was_asked, was_asked_by_another_layout;

bool cattn_xla_is_known(void) { return was_asked && !was_asked_by_another_layout; }

bool cattn_xla_describe(const struct xla_frame *frame) {
    const struct xla_extension *extension = frame->head.extensions;
    while (extension != NULL && extension->type != XLA_METADATA)
        extension = extension->next;
    if (extension == NULL)
        return false;
    struct xla_metadata *metadata = ((const struct xla_metadata_extension *)extension)->metadata;
    was_asked = true;
    if (!cattn_xla_has_known_layout(frame))
        was_asked_by_another_layout = true;
    /* A handler with a version that XLA refuses would leave JAX without a CPU. So the answer is XLA's own version, and
     * cattn.integrations.jax does not call a handler whose frame has another layout. */
    metadata->version.major = frame->api->version.major;
    metadata->version.minor = frame->api->version.minor;
    metadata->traits = 0;
    return true;
}
