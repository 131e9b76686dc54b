/* gil.h -- how the binding runs the core: with or without the GIL, and with an eye on signals. */
#ifndef CATTN_GIL_H
#define CATTN_GIL_H

#include "binding.h"

/* Below this many multiply-adds, or elements of a softmax or dropout, a call keeps the GIL (a few microseconds). */
#define CATTN_GIL_WORK 2e5
#define CATTN_GIL_ELEMENTS 20000

/* Runs pending signal handlers, as PyErr_CheckSignals does. False with the exception that one of them raised. */
bool cattn_check_signals(void);
/* Releases the GIL and lets `poll` look for signals; `thread` must outlive the call into the core. */
void cattn_gil_release(struct cattn_poll *poll, PyThreadState **thread);
/* Calls into the core, with the GIL if the call is `brief`, else without it; `poll` is the member of `params`. */
enum cattn_status cattn_compute(bool brief, struct cattn_poll *poll, enum cattn_status (*compute)(const void *),
                                const void *params);

#endif
