/* clear_params.c -- empties a params struct before the binding fills it in; see CATTN_CLEAR in cattn.h. */
#include <string.h>

#include "../cattn.h"

/* Not inline: with constant sizes GCC clears by `rep stos`, whose start takes longer than these few bytes. */
void cattn_clear(void *params, size_t tensors, size_t end) {
    memset(params, 0, tensors);
    for (size_t at = tensors; at < end; at += sizeof(struct cattn_tensor))
        memset((char *)params + at, 0, offsetof(struct cattn_tensor, batch));
}
