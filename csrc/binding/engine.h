/* engine.h -- a call of a function that is a row of call/functions.h. */
#ifndef CATTN_ENGINE_H
#define CATTN_ENGINE_H

#include "args.h"

enum { CATTN_MOST_ARRAYS = 8, CATTN_MOST_RESULTS = 3 };

/* A row, and where its object is. */
struct cattn_slot {
    const struct cattn_argument *row;
    int slot; /* -1: a result that is no argument */
    enum cattn_relation relation;
};

struct cattn_function_call {
    struct binding_state *state;
    const struct cattn_function *function;
    PyObject *const *args; /* by slots */
    void *params;
    int n_arrays, n_results;
    int type;      /* NumPy's type number of the STORED arrays */
    int half_type; /* of arrays that were widened; NPY_BOOL (0): none */
    int own_nd;    /* axes of the main array; of the frozen one at least as many as its letters, and one */
    int axis;      /* of the columns */
    const struct cattn_array *main; /* frozen */
    /* the arrays that are given, in the order of their slots */
    const struct cattn_slot *slots[CATTN_MOST_ARRAYS];
    PyArrayObject *arrays[CATTN_MOST_ARRAYS]; /* owned */
    struct cattn_array *frozen;
    struct cattn_output results[CATTN_MOST_RESULTS];
    PyObject *kept; /* what the function's own code keeps until the end, or NULL */
};

struct cattn_function {
    const char *name;
    const struct cattn_argument *arguments, *returned;
    int n_arguments, n_returned;
    int main; /* the slot of the array whose axes are those of the call */
    struct cattn_places places;
    void (*clear)(void *params);
    /* Reads what the engine does not, when all arrays are frozen and the params have their sizes; or NULL. */
    bool (*settle)(struct cattn_function_call *call);
    enum cattn_status (*compute)(const void *params);
    bool widens; /* halves are computed in float32, and the results are rounded */
    /* found by cattn_prepare_functions */
    int least_axes; /* of the main array */
    int n_arrays, n_numbers, n_results;
    struct cattn_slot arrays[CATTN_MOST_ARRAYS], numbers[CATTN_MOST_ARRAYS], results[CATTN_MOST_RESULTS];
};
/* Comes before the first call. */
void cattn_prepare_functions(void);

/* The functions' own code. */
bool cattn_settle_rope(struct cattn_function_call *call);

#endif
