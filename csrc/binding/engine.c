/* engine.c -- the functions of call/functions.h: take, promote, freeze, check, allocate, run, return. */
#include "engine.h"
#include "fp_mode.h"

/* ---- the table ---- */

#define FUNCTION_ROWS(name, TABLE, main, params_of, function, set, ...)                                                \
    ARGUMENT_ROWS(name, TABLE)                                                                                         \
    static void clear_##name(void *params) {                                                                           \
        struct cattn_##params_of##_params *p = params;                                                                 \
        cattn_clear_##params_of(p);                                                                                    \
        set;                                                                                                           \
    }                                                                                                                  \
    static enum cattn_status compute_##name(const void *params) { return function(params); }
#define FUNCTION(name_of, TABLE, main_of, params, function, set, sizes, ...)                                           \
    [FUNCTION_##name_of] = {.name = #name_of,                                                                          \
                            .main_name = #main_of,                                                                     \
                            .arguments = name_of##_arguments,                                                          \
                            .n_arguments = COUNT_OF(name_of##_arguments),                                              \
                            .returned = name_of##_returned,                                                            \
                            .n_returned = COUNT_OF(name_of##_returned) - 1,                                            \
                            .clear = clear_##name_of,                                                                  \
                            .compute = compute_##name_of,                                                              \
                            .places = sizes,                                                                           \
                            __VA_ARGS__},

#define MEMBER(name, TABLE, main, params, ...) struct cattn_##params##_params name;
union params {
    FUNCTIONS(MEMBER)
    PRIVATE_FUNCTIONS(MEMBER)
    struct cattn_dropout_memory dropout_memory;
    struct cattn_linear_memory linear_memory;
};

/* For `over_axes`. */
#define HELPER(name) offsetof(struct binding_state, name)

FUNCTIONS(FUNCTION_ROWS)
PRIVATE_FUNCTIONS(FUNCTION_ROWS)
struct cattn_function cattn_functions[N_FUNCTIONS] = {FUNCTIONS(FUNCTION) PRIVATE_FUNCTIONS(FUNCTION)};

static enum cattn_relation relation_of(const struct cattn_argument *row, const char *main) {
    const bool is_last = row->axes[0] == main[strlen(main) - 1] && row->axes[1] == '\0';
    if (strcmp(row->axes, main) == 0)
        return row->role == ARRAY_ROLE && row->fits == BROADCASTS ? CATTN_SPREAD : CATTN_ALIKE;
    return is_last ? CATTN_COLUMN : CATTN_OTHER;
}

/* Whether the engine reads arrays of this kind. */
static bool is_taken(int kind) {
    return kind == STORED || kind == COMPUTED || kind == PROMOTED || kind == BOOLS || kind == FACTOR || kind == WEIGHT;
}

/* Whether it reads numbers of this kind into the params: bools, doubles and an enum. */
static bool is_parsed(int kind) {
    return kind == FLAG || kind == REAL || kind == BOUND || kind == PROBABILITY || kind == NOT_NEGATIVE ||
           kind == BASE || kind == PRODUCTS;
}

/* The slot of an argument, or -1 for "NO_MAIN" and "ALWAYS"; -2: there is no such argument. */
static int find_slot(const struct cattn_function *function, const char *name) {
    for (int slot = 0; slot < function->n_arguments; slot++)
        if (strcmp(function->arguments[slot].name, name) == 0)
            return slot;
    return strcmp(name, "NO_MAIN") == 0 || strcmp(name, "ALWAYS") == 0 ? -1 : -2;
}

/* False: there is no room. */
static bool append(struct cattn_slot *slots, int *n, int most, const struct cattn_slot *slot) {
    if (*n == most)
        return false;
    slots[(*n)++] = *slot;
    return true;
}

static bool counts(const struct cattn_argument *row) {
    return row->role == ARRAY_ROLE &&
           (row->kind == STORED || row->kind == PROMOTED || row->kind == FACTOR || row->kind == WEIGHT);
}

/* Appends an item to a list in an error: ", " stands before it, `last` before the last one. */
static void add_item(char *text, size_t size, const char *last, bool is_last, const char *quote, int n,
                     const char *item) {
    const size_t used = strlen(text);
    const char *before = used == 0 ? "" : is_last ? last : ", ";
    PyOS_snprintf(text + used, size - used, "%s%s%.*s%s", before, quote, n, item, quote);
}

static void name_counted(struct cattn_function *function) {
    int left = 0;
    function->counted[0] = '\0';
    for (int slot = 0; slot < function->n_arguments; slot++)
        left += counts(&function->arguments[slot]);
    for (int slot = 0; slot < function->n_arguments; slot++) {
        const char *name = function->arguments[slot].name;
        if (counts(&function->arguments[slot]))
            add_item(function->counted, sizeof function->counted, " and ", --left == 0, "", (int)strlen(name), name);
    }
}

static bool prepare(struct cattn_function *function) {
    function->main = find_slot(function, function->main_name);
    bool fits = function->main > -2 && function->n_arguments + function->n_returned <= CATTN_MOST_SLOTS;
    const char *main = function->main >= 0 ? function->arguments[function->main].axes : "*";
    function->least_axes = (int)strlen(main) - 1; /* without `*` */
    function->axis = -1;
    function->n_arrays = function->n_numbers = function->n_results = 0;
    for (int i = 0; fits && i < function->n_arguments + function->n_returned; i++) {
        const bool is_argument = i < function->n_arguments;
        const struct cattn_argument *row =
            is_argument ? &function->arguments[i] : &function->returned[i - function->n_arguments];
        struct cattn_slot slot = {.row = row,
                                  .slot = is_argument ? i : -1,
                                  .condition = find_slot(function, row->condition != NULL ? row->condition : "ALWAYS")};
        fits = slot.condition > -2 && (row->role != NUMBER_ROLE || row->place == NOWHERE || is_parsed(row->kind));
        if (row->role == ARRAY_ROLE || row->role == RESULT_ROLE)
            slot.relation = relation_of(row, main);
        if (row->role == ARRAY_ROLE && is_taken(row->kind))
            fits = fits && append(function->arrays, &function->n_arrays, CATTN_MOST_ARRAYS, &slot);
        else if (row->role == RESULT_ROLE)
            fits = fits && append(function->results, &function->n_results, CATTN_MOST_RESULTS, &slot);
        else if (row->role == WISH_ROLE || (row->role != ARRAY_ROLE && row->place != NOWHERE))
            fits = fits && append(function->numbers, &function->n_numbers, CATTN_MOST_ARRAYS, &slot);
        else if (row->role == NUMBER_ROLE && (row->kind == AXIS || row->kind == AXES))
            function->axis = i;
    }
    name_counted(function);
    return fits || cattn_raise(PyExc_SystemError, "the row of %s and its table do not fit", function->name);
}

bool cattn_prepare_functions(void) {
    for (int i = 0; i < N_FUNCTIONS; i++)
        if (cattn_functions[i].n_results == 0 && !prepare(&cattn_functions[i])) /* once in a process */
            return false;
    return true;
}

/* ---- take ---- */

bool cattn_append_array(struct cattn_function_call *call, const struct cattn_slot *slot, PyArrayObject *array) {
    if (array == NULL)
        return false;
    call->slots[call->n_arrays] = slot;
    call->types[call->n_arrays] = PyArray_TYPE(array);
    call->arrays[call->n_arrays++] = array;
    return true;
}

static bool take_arrays(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    for (int i = 0; i < function->n_arrays; i++) {
        const struct cattn_slot *slot = &function->arrays[i];
        const struct cattn_argument *row = slot->row;
        PyObject *object = call->args[slot->slot];
        if (row->need == OPTIONAL && object == Py_None)
            continue;
        if (row->kind == WEIGHT
                ? !function->take(call, slot)
                : !cattn_append_array(call, slot,
                                      row->kind == BOOLS ? cattn_arg_bools(call->state, object, row->name)
                                                         : cattn_arg_floats(call->state, object, row->name)))
            return false;
    }
    return true;
}

/* ---- promote ---- */

/* Whether it is the type of a quantized weight. */
static bool is_quantized(int type) { return type == NPY_BYTE || type == NPY_UBYTE; }

/* The type of a result, or to which an array of type `own` is converted. */
static int type_of(const struct cattn_function_call *call, const struct cattn_argument *row, int own) {
    const int compute_type = cattn_arg_compute_type(call->type);
    switch (row->kind) {
    case STORED:
        return call->type;
    case BOOLS:
        return NPY_BOOL;
    case SCALES:
        return own;
    case FACTOR:
    case WEIGHT:
        return compute_type == NPY_DOUBLE && !is_quantized(own) ? compute_type : own;
    default:
        return compute_type;
    }
}

/* Converts arrays of several types, or of halves. */
static __attribute__((noinline)) bool convert(struct cattn_function_call *call) {
    PyArrayObject *counted[CATTN_MOST_ARRAYS];
    for (int i = 0; i < call->n_arrays; i++)
        counted[i] = counts(call->slots[i]->row) && !is_quantized(call->types[i]) ? call->arrays[i] : NULL;
    call->type = cattn_arg_common_type(call->state, counted, call->n_arrays, call->function->counted);
    if (call->type < 0)
        return false;
    if (call->function->widens && cattn_arg_storage(call->type) != CATTN_STORED_PLAIN) {
        call->half_type = call->type;
        call->type = NPY_FLOAT;
    }
    for (int i = 0; i < call->n_arrays; i++) {
        const int own = call->types[i];
        call->types[i] = type_of(call, call->slots[i]->row, own);
        if (call->types[i] != own && !cattn_arg_widen(call->state, &call->arrays[i], call->types[i]))
            return false;
    }
    return true;
}

static bool promote(struct cattn_function_call *call) {
    call->type = call->types[0];
    bool alike = call->type == NPY_FLOAT || call->type == NPY_DOUBLE;
    for (int i = 1; i < call->n_arrays; i++)
        alike = alike && (call->types[i] == call->type || call->slots[i]->row->kind == BOOLS);
    return alike || convert(call);
}

/* ---- freeze and check ---- */

struct cattn_array *cattn_frozen(const struct cattn_function_call *call, int slot) {
    for (int i = 0; i < call->n_arrays; i++)
        if (call->slots[i]->slot == slot)
            return &call->frozen[i];
    return NULL;
}

static bool find_axis(struct cattn_function_call *call, PyObject *object) {
    const int nd = call->main->nd;
    PyObject *index = PyLong_CheckExact(object) ? Py_NewRef(object) : cattn_arg_index(object, "axis");
    if (index == NULL)
        return false;
    const Py_ssize_t axis = PyLong_AsSsize_t(index);
    const bool is_far = axis == -1 && PyErr_Occurred() != NULL; /* it does not fit a Py_ssize_t */
    const bool fits = !is_far && axis >= -nd && axis < nd;
    if (is_far)
        PyErr_Clear();
    PyObject *shown = fits ? NULL : cattn_shown(index);
    if (shown != NULL)
        PyErr_Format(PyExc_ValueError, "axis %U is out of bounds for %s with %d dimensions", shown, call->main->name,
                     call->own_nd);
    Py_XDECREF(shown);
    Py_DECREF(index);
    call->axis = (int)(axis < 0 ? axis + nd : axis);
    return fits;
}

static bool freeze(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    struct cattn_array *main = NULL;
    for (int i = 0; i < call->n_arrays; i++) {
        const char *name = call->slots[i]->row->name;
        /* Python code may have run since an array was taken, if there are several */
        if (call->n_arrays > 1 && !cattn_arg_unchanged(call->arrays[i], call->types[i], name))
            return false;
        cattn_freeze(call->arrays[i], name, &call->frozen[i]);
        if (call->slots[i]->slot == function->main)
            main = &call->frozen[i];
    }
    call->main = main;
    if (main == NULL)
        return true;
    call->own_nd = main->nd;
    if ((main->nd < function->least_axes || main->nd == 0) &&
        !cattn_check_main(cattn_python, &function->arguments[function->main], main))
        return false;
    call->axis = main->nd - 1;
    return function->axis < 0 || find_axis(call, call->args[function->axis]);
}

/* Checks the arrays against the main one, and fills in what the params have of them. */
static bool check(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    const struct cattn_places *places = &function->places;
    char *const params = call->params;
    CATTN_AT(enum cattn_dtype, params, places->dtype) = cattn_arg_dtype(call->type);
    if (places->storage != NOWHERE)
        CATTN_AT(enum cattn_storage, params, places->storage) = cattn_arg_storage(call->type);
    if (call->main == NULL)
        return true;
    for (int i = 0; i < call->n_arrays; i++) {
        const struct cattn_array *array = &call->frozen[i];
        const enum cattn_relation relation = call->slots[i]->relation;
        if (relation == CATTN_OTHER)
            continue;
        if (array != call->main && !cattn_check_relation(cattn_python, relation, array, call->main, call->own_nd))
            return false;
        if (relation == CATTN_SPREAD && !cattn_arg_mask_fits(array, CATTN_MASK_BOOL, call->main->nd, call->main->dims))
            return false;
        cattn_view_related(places, relation, call->main, call->axis, array,
                           &CATTN_AT(struct cattn_tensor, params, call->slots[i]->row->place));
    }
    cattn_fill_sizes(places, call->main, call->axis, params);
    return true;
}

/* ---- numbers and words ---- */

/* ValueError "<name> must be '<word>', '<word>' or '<word>', got <the object>". Always false. */
static bool error_word(const struct cattn_argument *row, PyObject *object) {
    char wanted[128] = "";
    for (const char *word = row->axes, *end; word != NULL; word = end != NULL ? end + 1 : NULL) {
        end = strchr(word, '|');
        add_item(wanted, sizeof wanted, " or ", end == NULL, "'", (int)strcspn(word, "|"), word);
    }
    return cattn_error_value(object, "%s must be %s", row->name, wanted);
}

/* Whether a word of a row, up to its end or |, is the text; else *word is the next one, or NULL. */
static bool is_word(const char **word, const char *text, Py_ssize_t length) {
    const char *at = *word;
    Py_ssize_t n = 0;
    while (n < length && at[n] == text[n] && at[n] != '|' && at[n] != '\0')
        n++;
    if (n == length && (at[n] == '|' || at[n] == '\0'))
        return true;
    *word = strchr(at + n, '|');
    *word = *word != NULL ? *word + 1 : NULL;
    return false;
}

static bool take_word(const struct cattn_argument *row, PyObject *object, int *index) {
    Py_ssize_t length = 0;
    const char *given = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    *index = 0;
    for (const char *word = row->axes; given != NULL && word != NULL; (*index)++)
        if (is_word(&word, given, length))
            return true;
    PyErr_Clear(); /* of a str that is no text */
    return error_word(row, object);
}

static bool take_number(const struct cattn_function_call *call, const struct cattn_argument *row, PyObject *object,
                        void *place) {
    if (row->kind == FLAG) {
        *(bool *)place = object == Py_True;
        return object == Py_True || object == Py_False || cattn_arg_bool(object, row->name, place);
    }
    if (row->kind == PRODUCTS)
        return cattn_arg_compute_dtype(object, place);
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
        bool wish = false;
        if (row->role == WISH_ROLE     ? !cattn_arg_flag(object, row->name, &wish)
            : row->role == NUMBER_ROLE ? !take_number(call, row, object, (char *)call->params + row->place)
                                       : !take_word(row, object, &CATTN_AT(int, call->params, row->place)))
            return false;
        call->wishes |= (unsigned)wish << function->numbers[i].slot;
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
    struct cattn_output_spec spec = {.name = row->name,
                                     .type = type_of(call, row, call->type),
                                     .nd = is_column ? 1 : call->own_nd,
                                     .dims = is_column ? &main->dims[main->nd - 1] : main->dims,
                                     .inputs = call->arrays,
                                     .n_inputs = call->n_arrays,
                                     .in_place = NULL};
    if (call->half_type != NPY_BOOL)
        given = NULL; /* it takes the rounded result */
    if (given != NULL && given != Py_None && row->fits == IN_PLACE)
        spec.in_place = overwritten(call, given);
    if (!cattn_arg_output(call->state, given, &spec, result))
        return false;
    if (call->function->places.is_new != NOWHERE)
        CATTN_AT(bool, call->params, call->function->places.is_new) = result->array != result->given;
    cattn_freeze(result->array, row->name, &frozen);
    cattn_view_related(&call->function->places, slot->relation, main, call->axis, &frozen,
                       &CATTN_AT(struct cattn_tensor, call->params, row->place));
    return true;
}

/* Whether a result is made: its condition is a wish that is true, or an array that is given. */
static bool is_wanted(const struct cattn_function_call *call, int condition) {
    if (condition < 0)
        return true;
    const bool is_wish = call->function->arguments[condition].role == WISH_ROLE;
    return is_wish ? (call->wishes >> condition & 1) != 0 : call->args[condition] != Py_None;
}

static PyObject *given_for(const struct cattn_function_call *call, int result) {
    const int slot = call->function->results[result].slot;
    return slot >= 0 ? call->args[slot] : NULL;
}

static bool make_results(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    for (int i = 0; i < function->n_results; i++) {
        const struct cattn_slot *slot = &function->results[i];
        call->results[i] = (struct cattn_output){NULL, NULL};
        call->n_results = i + 1;
        if (slot->relation != CATTN_OTHER && call->main != NULL && is_wanted(call, slot->condition) &&
            !make_result(call, slot, given_for(call, i), &call->results[i]))
            return false;
    }
    return true;
}

bool cattn_run_core(struct cattn_function_call *call) {
    const struct cattn_function *function = call->function;
    char *const params = call->params;
    const bool brief = function->work != NULL ? function->work(params) <= CATTN_GIL_WORK
                                              : PyArray_SIZE(call->results[0].array) <= CATTN_GIL_ELEMENTS;
    CATTN_AT(int, params, function->places.num_threads) = cattn_get_num_threads();
    struct cattn_poll *poll = &CATTN_AT(struct cattn_poll, params, function->places.poll);
    return cattn_error_status(cattn_compute(brief, poll, function->compute, call->params));
}

/* A result, a new reference: rounded if its inputs were widened. */
static PyObject *finish(struct cattn_function_call *call, int i) {
    struct cattn_output *result = &call->results[i];
    if (result->array == NULL)
        return Py_NewRef(Py_None);
    if (call->half_type == NPY_BOOL)
        return cattn_output_finish(result) ? cattn_output_result(result) : NULL;
    PyArray_Descr *descr = PyArray_DescrFromType(call->half_type);
    if (descr == NULL)
        return NULL;
    const unsigned mode = cattn_fp_enter();
    PyObject *rounded = PyObject_CallFunction(call->state->rounded, "OO", (PyObject *)result->array, (PyObject *)descr);
    cattn_fp_leave(mode);
    Py_DECREF((PyObject *)descr);
    PyObject *given = given_for(call, i);
    if (rounded == NULL || given == NULL || given == Py_None)
        return rounded;
    PyObject *stored = cattn_output_store(call->state, rounded, given);
    Py_DECREF(rounded);
    return stored;
}

/* The result, or a tuple of several: without one that nobody wished, and with None for one whose array is absent. */
static PyObject *build(struct cattn_function_call *call) {
    int wanted[CATTN_MOST_RESULTS], n = 0;
    for (int i = 0; i < call->n_results; i++) {
        const int condition = call->function->results[i].condition;
        if (call->results[i].array != NULL || call->function->arguments[condition].role != WISH_ROLE)
            wanted[n++] = i;
    }
    if (n == 1)
        return finish(call, wanted[0]);
    PyObject *all = PyTuple_New(n);
    for (int i = 0; all != NULL && i < n; i++) {
        PyObject *result = finish(call, wanted[i]);
        if (result == NULL || PyTuple_SetItem(all, i, result) < 0)
            Py_CLEAR(all);
    }
    return all;
}

/* ---- the call ---- */

/* An `axis` that is no int: the helper merges the axes into one, and calls the function again. */
static __attribute__((noinline)) PyObject *merge_axes(const struct binding_state *state, PyObject *const *args,
                                                      const struct cattn_function *function) {
    PyObject *helper = *(PyObject *const *)(const void *)((const char *)state + function->over_axes);
    PyObject *all = PyTuple_New(function->n_arguments), *result = NULL;
    bool packed = all != NULL;
    for (int slot = 0; packed && slot < function->n_arguments; slot++)
        packed = PyTuple_SetItem(all, slot, Py_NewRef(args[slot])) == 0;
    if (packed)
        result = PyObject_CallObject(helper, all);
    Py_XDECREF(all);
    return result;
}

PyObject *cattn_run_function(struct binding_state *state, PyObject *const *args,
                             const struct cattn_function *function) {
    union params params;
    struct cattn_array frozen[CATTN_MOST_ARRAYS];
    struct cattn_function_call call;
    PyObject *result;
    if (function->over_axes != 0 && !PyLong_CheckExact(args[function->axis]))
        return merge_axes(state, args, function);
    call.state = state;
    call.function = function;
    call.args = args;
    call.params = &params;
    call.frozen = frozen;
    call.n_arrays = call.n_results = 0;
    call.half_type = NPY_BOOL;
    call.wishes = 0;
    call.draw = NULL;
    call.kept = NULL;
    call.edges.edges = NULL;
    function->clear(&params);
    const bool computed = take_arrays(&call) && promote(&call) && freeze(&call) && check(&call) &&
                          take_numbers(&call) && (function->settle == NULL || function->settle(&call)) &&
                          make_results(&call) && (function->make == NULL || function->make(&call)) &&
                          (function->run != NULL ? function->run(&call) : cattn_run_core(&call));
    if (function->n_results == 1 && call.n_results == 1 && call.half_type == NPY_BOOL) {
        result = cattn_output_end(computed, &call.results[0], call.arrays, call.n_arrays);
    } else {
        result = !computed ? NULL : function->build != NULL ? function->build(&call) : build(&call);
        for (int i = 0; i < call.n_arrays; i++)
            Py_DECREF((PyObject *)call.arrays[i]);
        for (int i = 0; i < call.n_results; i++)
            cattn_output_clear(&call.results[i]);
    }
    Py_XDECREF(call.kept);
    PyMem_Free(call.edges.edges);
    return call.draw == NULL ? result : cattn_draw_end(call.draw, result);
}

/* The public functions, for signature.c. */
#define BODY(name, ...)                                                                                                \
    PyObject *cattn_body_##name(struct binding_state *state, PyObject **args) {                                        \
        return cattn_run_function(state, args, &cattn_functions[FUNCTION_##name]);                                     \
    }
FUNCTIONS(BODY)

/* The private ones take all arguments by position. */
#define PRIVATE_BODY(of, ...)                                                                                          \
    PyObject *cattn_py_##of(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {                              \
        const struct cattn_function *function = &cattn_functions[FUNCTION_##of];                                       \
        if (!cattn_error_count("_" #of, n_args, function->n_arguments) || !cattn_ready(cattn_state(module)))           \
            return NULL;                                                                                               \
        return cattn_run_function(cattn_state(module), args, function);                                                \
    }
PRIVATE_FUNCTIONS(PRIVATE_BODY)
