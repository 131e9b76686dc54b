/* engine.c -- the functions of call/functions.h: take, promote, freeze, check, allocate, run, return. */
#include "engine.h"
#include "fp_mode.h"

/* ---- the table ---- */

#define ARRAY_ARGUMENT(name, axes, kind, fits, need, view) {#name, ARRAY_ROLE, axes, kind, fits, need, view},
#define NUMBER_ARGUMENT(name, kind, place) {#name, NUMBER_ROLE, NULL, kind, 0, 0, place},
#define WORD_ARGUMENT(name, words, place) {#name, WORD_ROLE, words, 0, 0, 0, place},
#define WISH_ARGUMENT(name) {#name, WISH_ROLE, NULL, 0, 0, 0, NOWHERE},
#define RESULT_ARGUMENT(name, axes, kind, where, view) {#name, RESULT_ROLE, axes, kind, where, ALWAYS, view},
#define RETURNED(name, axes, kind, condition, view) {#name, RESULT_ROLE, axes, kind, APART, condition, view},
#define NOT_RETURNED(...)

#define FUNCTION_ROWS(name, TABLE, params_of, function, set, ...)                                                      \
    static const struct cattn_argument name##_arguments[] = {                                                          \
        TABLE(ARRAY_ARGUMENT, NUMBER_ARGUMENT, WORD_ARGUMENT, WISH_ARGUMENT, RESULT_ARGUMENT, NO_SLOT)};               \
    /* and an empty row, because most tables return nothing else */                                                    \
    static const struct cattn_argument name##_returned[] = {                                                           \
        TABLE(NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, RETURNED){0}};                                              \
    static void clear_##name(void *params) {                                                                           \
        struct cattn_##params_of##_params *p = params;                                                                 \
        cattn_clear_##params_of(p);                                                                                    \
        set;                                                                                                           \
    }                                                                                                                  \
    static enum cattn_status compute_##name(const void *params) { return function(params); }                           \
    _Static_assert(sizeof(struct cattn_##params_of##_params) <= sizeof(union params), "room for the params");
#define COUNT_OF(rows) ((int)(sizeof(rows) / sizeof *(rows)))
#define FUNCTION(name_of, TABLE, params, function, set, ...)                                                           \
    [FUNCTION_##name_of] = {.name = #name_of,                                                                          \
                            .arguments = name_of##_arguments,                                                          \
                            .n_arguments = COUNT_OF(name_of##_arguments),                                              \
                            .returned = name_of##_returned,                                                            \
                            .n_returned = COUNT_OF(name_of##_returned) - 1,                                            \
                            .clear = clear_##name_of,                                                                  \
                            .compute = compute_##name_of,                                                              \
                            __VA_ARGS__},

union params {
    struct cattn_norm_params norm;
    struct cattn_norm_backward_params norm_backward;
    struct cattn_activation_params activation;
    struct cattn_rope_params rope;
};

FUNCTIONS(FUNCTION_ROWS)
static struct cattn_function functions[N_FUNCTIONS] = {FUNCTIONS(FUNCTION)};

static enum cattn_relation relation_of(const struct cattn_argument *row, const char *main) {
    const bool is_last = row->axes[0] == main[strlen(main) - 1] && row->axes[1] == '\0';
    if (strcmp(row->axes, main) == 0)
        return row->role == ARRAY_ROLE && row->fits == BROADCASTS ? CATTN_SPREAD : CATTN_ALIKE;
    return is_last ? CATTN_COLUMN : CATTN_OTHER;
}

static void prepare(struct cattn_function *function) {
    const char *main = function->arguments[function->main].axes;
    function->least_axes = (int)strlen(main) - 1; /* without `*` */
    for (int i = 0; i < function->n_arguments + function->n_returned; i++) {
        const bool is_argument = i < function->n_arguments;
        const struct cattn_argument *row =
            is_argument ? &function->arguments[i] : &function->returned[i - function->n_arguments];
        struct cattn_slot slot = {.row = row, .slot = is_argument ? i : -1};
        if (row->role == ARRAY_ROLE || row->role == RESULT_ROLE)
            slot.relation = relation_of(row, main);
        if (row->role == ARRAY_ROLE && row->kind < POSITIONS)
            function->arrays[function->n_arrays++] = slot;
        else if (row->role == RESULT_ROLE)
            function->results[function->n_results++] = slot;
        else if (row->role != ARRAY_ROLE && row->place != NOWHERE)
            function->numbers[function->n_numbers++] = slot;
    }
}

void cattn_prepare_functions(void) {
    for (int i = 0; i < N_FUNCTIONS; i++)
        if (functions[i].n_arrays == 0) /* another module of the process may have done it */
            prepare(&functions[i]);
}

/* ---- take ---- */

static bool take_arrays(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    for (int i = 0; i < function->n_arrays; i++) {
        const struct cattn_slot *slot = &function->arrays[i];
        PyObject *object = call->args[slot->slot];
        if (slot->row->need == OPTIONAL && object == Py_None)
            continue;
        PyArrayObject *array = cattn_arg_floats(call->state, object, slot->row->name);
        if (array == NULL)
            return false;
        call->slots[call->n_arrays] = slot;
        call->arrays[call->n_arrays++] = array;
    }
    return true;
}

/* ---- promote ---- */

static bool counts(const struct cattn_argument *row) {
    return row->role == ARRAY_ROLE && (row->kind == STORED || row->kind == PROMOTED);
}

/* The names of the arrays that count, as "x, weight and bias". */
static void name_counted(const struct cattn_function *function, char *text, size_t size) {
    int n = 0, left = 0;
    text[0] = '\0';
    for (int slot = 0; slot < function->n_arguments; slot++)
        left += counts(&function->arguments[slot]);
    for (int slot = 0; slot < function->n_arguments; slot++) {
        if (!counts(&function->arguments[slot]))
            continue;
        left--;
        const size_t used = strlen(text);
        PyOS_snprintf(text + used, size - used, "%s%s",
                      n == 0     ? ""
                      : left > 0 ? ", "
                                 : " and ",
                      function->arguments[slot].name);
        n++;
    }
}

static int type_of(const struct cattn_function_call *call, const struct cattn_argument *row) {
    return row->kind == STORED ? call->type : row->kind == BOOLS ? NPY_BOOL : cattn_arg_compute_type(call->type);
}

/* Converts arrays of several types, or of halves. */
static __attribute__((noinline)) bool convert(struct cattn_function_call *call) {
    PyArrayObject *counted[CATTN_MOST_ARRAYS];
    char names[256];
    for (int i = 0; i < call->n_arrays; i++)
        counted[i] = counts(call->slots[i]->row) ? call->arrays[i] : NULL;
    name_counted(call->function, names, sizeof names);
    call->type = cattn_arg_common_type(call->state, counted, call->n_arrays, names);
    if (call->type < 0)
        return false;
    if (call->function->widens && cattn_arg_storage(call->type) != CATTN_STORED_PLAIN) {
        call->half_type = call->type;
        call->type = NPY_FLOAT;
    }
    for (int i = 0; i < call->n_arrays; i++)
        if (!cattn_arg_widen(call->state, &call->arrays[i], type_of(call, call->slots[i]->row)))
            return false;
    return true;
}

static bool promote(struct cattn_function_call *call) {
    call->type = PyArray_TYPE(call->arrays[0]);
    bool alike = call->type == NPY_FLOAT || call->type == NPY_DOUBLE;
    for (int i = 1; i < call->n_arrays; i++)
        alike = alike && PyArray_TYPE(call->arrays[i]) == call->type;
    return alike || convert(call);
}

/* ---- freeze and check ---- */

static bool freeze(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    struct cattn_array *main = NULL;
    for (int i = 0; i < call->n_arrays; i++) {
        const struct cattn_argument *row = call->slots[i]->row;
        if (!cattn_freeze_unchanged(call->arrays[i], type_of(call, row), row->name, row->name, &call->frozen[i]))
            return false;
        if (call->slots[i]->slot == function->main)
            main = &call->frozen[i];
    }
    call->main = main;
    call->own_nd = main->nd;
    if (main->nd >= function->least_axes && main->nd > 0) {
        call->axis = main->nd - 1;
        return true;
    }
    call->axis = 0;
    return cattn_check_main(cattn_python, &function->arguments[function->main], main);
}

/* Checks the arrays against the main one, and fills in what the params have of them. */
static bool check(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    const struct cattn_places *places = &function->places;
    char *const params = call->params;
    for (int i = 0; i < call->n_arrays; i++) {
        const struct cattn_array *array = &call->frozen[i];
        const enum cattn_relation relation = call->slots[i]->relation;
        if (array != call->main && !cattn_check_relation(cattn_python, relation, array, call->main, call->own_nd))
            return false;
        cattn_view_related(places, relation, call->main, call->axis, array, params + call->slots[i]->row->place);
    }
    *(enum cattn_dtype *)(void *)(params + places->dtype) = cattn_arg_dtype(call->type);
    if (places->storage != NOWHERE)
        *(enum cattn_storage *)(void *)(params + places->storage) = cattn_arg_storage(call->type);
    cattn_fill_sizes(places, call->main, call->axis, params);
    return true;
}

/* ---- numbers and words ---- */

/* ValueError "<name> must be '<word>', '<word>' or '<word>', got <the object>". Always false. */
static bool error_word(const struct cattn_argument *row, PyObject *object) {
    char wanted[128] = "";
    for (const char *word = row->axes, *end; word != NULL; word = end != NULL ? end + 1 : NULL) {
        const size_t used = strlen(wanted);
        end = strchr(word, '|');
        PyOS_snprintf(wanted + used, sizeof wanted - used, "%s'%.*s'",
                      used == 0     ? ""
                      : end != NULL ? ", "
                                    : " or ",
                      end != NULL ? (int)(end - word) : (int)strlen(word), word);
    }
    return cattn_error_value(object, "%s must be %s", row->name, wanted);
}

static bool take_word(const struct cattn_argument *row, PyObject *object, int *index) {
    Py_ssize_t length = 0;
    const char *given = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    if (given == NULL)
        PyErr_Clear(); /* of a str that is no text */
    *index = 0;
    for (const char *word = row->axes; given != NULL; (*index)++) {
        const size_t n = strcspn(word, "|");
        if (n == (size_t)length && memcmp(word, given, n) == 0)
            return true;
        if (word[n] == '\0')
            break;
        word += n + 1;
    }
    return error_word(row, object);
}

static bool take_number(const struct cattn_function_call *call, const struct cattn_argument *row, PyObject *object,
                        void *place) {
    if (row->kind == FLAG) {
        *(bool *)place = object == Py_True;
        return object == Py_True || object == Py_False || cattn_arg_bool(object, row->name, place);
    }
    double *number = place;
    if (!cattn_arg_real(object, row->name, number))
        return false;
    const char *fault = cattn_number_fault(row->kind, *number, cattn_arg_dtype(call->type));
    return fault == NULL || cattn_error_value(object, "%s %s", row->name, fault);
}

static bool take_numbers(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    for (int i = 0; i < function->n_numbers; i++) {
        const struct cattn_argument *row = function->numbers[i].row;
        PyObject *object = call->args[function->numbers[i].slot];
        void *place = (char *)call->params + row->place;
        if (row->role == NUMBER_ROLE ? !take_number(call, row, object, place) : !take_word(row, object, place))
            return false;
    }
    return true;
}

/* ---- results ---- */

/* The input that may be overwritten by a result: one with its axes, the result itself if the caller passed one. */
static PyArrayObject *overwritten(const struct cattn_function_call *call, PyObject *given) {
    PyArrayObject *found = NULL;
    for (int i = 0; i < call->n_arrays; i++)
        if (call->slots[i]->relation == CATTN_ALIKE && (PyObject *)found != given)
            found = call->arrays[i];
    return found;
}

static bool make_result(struct cattn_function_call *call, const struct cattn_slot *slot, PyObject *given,
                        struct cattn_output *result) {
    const struct cattn_argument *row = slot->row;
    const struct cattn_array *main = call->main;
    const bool is_column = slot->relation == CATTN_COLUMN;
    struct cattn_array frozen;
    const struct cattn_output_spec spec = {.name = row->name,
                                           .type = type_of(call, row),
                                           .nd = is_column ? 1 : call->own_nd,
                                           .dims = is_column ? &main->dims[main->nd - 1] : main->dims,
                                           .inputs = call->arrays,
                                           .n_inputs = call->n_arrays,
                                           .in_place = row->fits == IN_PLACE ? overwritten(call, given) : NULL};
    if (!cattn_arg_output(call->state, given, &spec, result))
        return false;
    cattn_freeze(result->array, row->name, &frozen);
    cattn_view_related(&call->function->places, slot->relation, main, call->axis, &frozen,
                       (char *)call->params + row->place);
    return true;
}

static bool make_results(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    for (int i = 0; i < function->n_results; i++) {
        const struct cattn_slot *slot = &function->results[i];
        const int condition = slot->row->need;
        call->results[i] = (struct cattn_output){NULL, NULL};
        call->n_results = i + 1;
        if ((condition == ALWAYS || call->args[condition] != Py_None) &&
            !make_result(call, slot, slot->slot >= 0 ? call->args[slot->slot] : NULL, &call->results[i]))
            return false;
    }
    return true;
}

static bool run(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    char *const params = call->params;
    const bool brief = PyArray_SIZE(call->results[0].array) <= CATTN_GIL_ELEMENTS;
    *(int *)(void *)(params + function->places.num_threads) = cattn_get_num_threads();
    struct cattn_poll *poll = (struct cattn_poll *)(void *)(params + function->places.poll);
    return cattn_error_status(cattn_compute(brief, poll, function->compute, call->params));
}

/* A result, rounded if its inputs were widened; a new reference. */
static PyObject *finish(struct cattn_function_call *call, struct cattn_output *result) {
    if (call->half_type == NPY_BOOL)
        return cattn_output_finish(result) ? cattn_output_result(result) : NULL;
    PyArray_Descr *descr = PyArray_DescrFromType(call->half_type);
    if (descr == NULL)
        return NULL;
    const unsigned mode = cattn_fp_enter();
    PyObject *rounded = PyObject_CallFunction(call->state->rounded, "OO", (PyObject *)result->array, (PyObject *)descr);
    cattn_fp_leave(mode);
    Py_DECREF((PyObject *)descr);
    return rounded;
}

/* The result, or a tuple of several, with None for one that there is not. */
static PyObject *build(struct cattn_function_call *call) {
    const int n = call->n_results;
    if (n == 1)
        return finish(call, &call->results[0]);
    PyObject *all = PyTuple_New(n);
    for (int i = 0; all != NULL && i < n; i++) {
        struct cattn_output *output = &call->results[i];
        PyObject *result = output->array != NULL ? finish(call, output) : Py_NewRef(Py_None);
        if (result == NULL || PyTuple_SetItem(all, i, result) < 0)
            Py_CLEAR(all);
    }
    return all;
}

/* ---- the call ---- */

static PyObject *run_function(struct binding_state *state, PyObject *const *args,
                              const struct cattn_function *function) {
    union params params;
    struct cattn_array frozen[CATTN_MOST_ARRAYS];
    struct cattn_function_call call;
    PyObject *result = NULL;
    call.state = state;
    call.function = function;
    call.args = args;
    call.params = &params;
    call.frozen = frozen;
    call.n_arrays = call.n_results = 0;
    call.half_type = NPY_BOOL;
    call.kept = NULL;
    function->clear(&params);
    if (take_arrays(&call) && promote(&call) && freeze(&call) && check(&call) && take_numbers(&call) &&
        (function->settle == NULL || function->settle(&call)) && make_results(&call) && run(&call))
        result = build(&call);
    for (int i = 0; i < call.n_arrays; i++)
        Py_DECREF((PyObject *)call.arrays[i]);
    for (int i = 0; i < call.n_results; i++)
        cattn_output_clear(&call.results[i]);
    Py_XDECREF(call.kept);
    return result;
}

/* The public functions, for signature.c. */
#define BODY(name, ...)                                                                                                \
    PyObject *cattn_body_##name(struct binding_state *state, PyObject **args) {                                        \
        return run_function(state, args, &functions[FUNCTION_##name]);                                                 \
    }
FUNCTIONS(BODY)
