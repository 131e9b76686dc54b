/* engine.h -- a call of a function that is a row of call/functions.h. */
#ifndef CATTN_ENGINE_H
#define CATTN_ENGINE_H

#include "args.h"

enum { CATTN_MOST_ARRAYS = 8, CATTN_MOST_RESULTS = 6 };

/* The params of functions whose own code has more to remember. */
struct cattn_dropout_memory {
    struct cattn_dropout_params params;
    struct cattn_draw draw;
};
struct cattn_linear_memory {
    union {
        struct cattn_linear_attention_params forward;
        struct cattn_linear_attention_backward_params backward;
    } params;
    struct cattn_linear_shape shape;
};

/* A row, and where its object is. */
struct cattn_slot {
    const struct cattn_argument *row;
    int slot;      /* -1: a result that is no argument */
    int condition; /* the slot of what it depends on, or -1 */
    enum cattn_relation relation;
};

struct cattn_function_call {
    struct binding_state *state;
    const struct cattn_function *function;
    PyObject *const *args; /* by slots */
    void *params;
    int n_arrays, n_results;
    int type;        /* NumPy's type number of the STORED arrays */
    int half_type;   /* of arrays that were widened; NPY_BOOL (0): none */
    int own_nd;      /* axes of the main array; of the frozen one at least as many as its letters, and one */
    int axis;        /* of the columns */
    unsigned wishes; /* bits of the slots of WISH that are true */
    const struct cattn_array *main; /* frozen; or NULL: the function's own code checks all axes */
    /* the arrays that are given, in the order of their slots */
    const struct cattn_slot *slots[CATTN_MOST_ARRAYS];
    PyArrayObject *arrays[CATTN_MOST_ARRAYS]; /* owned */
    int types[CATTN_MOST_ARRAYS];             /* NumPy's type numbers of them */
    struct cattn_array *frozen;
    struct cattn_output results[CATTN_MOST_RESULTS];
    struct cattn_draw *draw; /* NULL: nothing is drawn */
    /* what the function's own code keeps until the end: an object, and memory of PyMem; or NULL */
    PyObject *kept;
    struct cattn_edges edges;
    struct cattn_linear_shape *shape; /* of linear attention */
};

struct cattn_function {
    const char *name, *main_name;
    const struct cattn_argument *arguments, *returned;
    int n_arguments, n_returned;
    struct cattn_places places;
    void (*clear)(void *params);
    /* Takes an array of the kind WEIGHT; or NULL if there is none. */
    bool (*take)(struct cattn_function_call *call, const struct cattn_slot *slot);
    /* Reads what the engine does not, when all arrays are frozen and the params have their sizes; or NULL. */
    bool (*settle)(struct cattn_function_call *call);
    /* Makes the results whose shape does not follow from the main array; or NULL if there are none. */
    bool (*make)(struct cattn_function_call *call);
    bool (*run)(struct cattn_function_call *call); /* or NULL: cattn_run_core */
    enum cattn_status (*compute)(const void *params);
    double (*work)(const void *params); /* in multiply-adds; or NULL: the elements of the first result */
    PyObject *(*build)(struct cattn_function_call *call); /* or NULL: the result, or a tuple */
    size_t over_axes; /* of the helper in struct binding_state for an `axis` that is no int; or 0 */
    bool widens;      /* halves are computed in float32, and the results are rounded */
    /* found by cattn_prepare_functions */
    int main;       /* the slot of the main array, whose axes the call has; or -1 */
    int least_axes; /* of the main array */
    int axis;       /* its slot, or -1 */
    int n_arrays, n_numbers, n_results;
    char counted[64]; /* the names of the arrays that count where NumPy promotes, as "x, weight and bias" */
    struct cattn_slot arrays[CATTN_MOST_ARRAYS], numbers[CATTN_MOST_ARRAYS], results[CATTN_MOST_RESULTS];
};
/* Comes before the first call. */
bool cattn_prepare_functions(void);

PyObject *cattn_run_function(struct binding_state *state, PyObject *const *args, const struct cattn_function *function);
extern struct cattn_function cattn_functions[N_FUNCTIONS];

/* ---- for the functions' own code ---- */

/* Gives an array to the call, which frees it. False for NULL, with an exception. */
bool cattn_append_array(struct cattn_function_call *call, const struct cattn_slot *slot, PyArrayObject *array);
/* A frozen array; NULL if it is not given. */
struct cattn_array *cattn_frozen(const struct cattn_function_call *call, int slot);
/* Computes, with the GIL if there is little work. */
bool cattn_run_core(struct cattn_function_call *call);
/* Functions with a state (states.c): reads cu_seqlens and seq_lengths of `total` rows. */
bool cattn_settle_edges(struct cattn_function_call *call, PyObject *cu_seqlens, PyObject *seq_lengths, int64_t total);
/* Reads seq_lengths, and keeps them. */
bool cattn_settle_lengths(struct cattn_function_call *call, PyObject *seq_lengths, int64_t seqlen, int n_batch_dims,
                          const int64_t *batch, int64_t *length, struct cattn_tensor *lengths);
/* Makes results[0], the state after the last token, if somebody wants it: a NULL array is none. results[1] is `out`. */
bool cattn_make_state(struct cattn_function_call *call, bool is_wanted, int nd, const int64_t *dims, int slot_of_state,
                      int n_batch_dims, int axes, struct cattn_tensor *view);
/* `out`, or with return_state a LinearAttentionOutput. */
PyObject *cattn_build_with_state(struct cattn_function_call *call, bool returns_state);

/* ---- their own code ---- */

bool cattn_settle_rope(struct cattn_function_call *call);
bool cattn_settle_masked_softmax(struct cattn_function_call *call);
bool cattn_settle_dropout(struct cattn_function_call *call);
bool cattn_run_dropout(struct cattn_function_call *call);
bool cattn_take_weight(struct cattn_function_call *call, const struct cattn_slot *slot);
bool cattn_settle_linear(struct cattn_function_call *call);
bool cattn_make_linear(struct cattn_function_call *call);
bool cattn_settle_product(struct cattn_function_call *call);
bool cattn_make_product(struct cattn_function_call *call);
double cattn_work_of_product(const void *params);
bool cattn_settle_conv(struct cattn_function_call *call);
bool cattn_make_conv(struct cattn_function_call *call);
double cattn_work_of_conv(const void *params);
PyObject *cattn_build_conv(struct cattn_function_call *call);
bool cattn_settle_linear_attention(struct cattn_function_call *call);
bool cattn_make_linear_attention(struct cattn_function_call *call);
double cattn_work_of_linear_attention(const void *params);
PyObject *cattn_build_linear_attention(struct cattn_function_call *call);
bool cattn_settle_linear_gradients(struct cattn_function_call *call);
bool cattn_make_linear_gradients(struct cattn_function_call *call);
double cattn_work_of_linear_gradients(const void *params);

#endif
