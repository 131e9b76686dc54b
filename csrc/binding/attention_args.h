/* attention_args.h -- all of attention's arguments, and their way into the core's params. */
#ifndef CATTN_ATTENTION_ARGS_H
#define CATTN_ATTENTION_ARGS_H

#include "attention_call.h"

/* Clears params and fills in all inputs. rng, the outputs and the three flags of extras are left to the caller. */
bool cattn_call_parse(struct cattn_call *call, PyObject *const *args);
/* Comes after the allocation of the results: makes a batch of packed sequences. */
bool cattn_call_begin(struct cattn_call *call);

#endif
