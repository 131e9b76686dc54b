/* functions.c -- problems of the functions of rows and elements, products of matrices, masks and PyTorch's random
 * numbers; and the list of all kinds of problems. See problem.h.
 */
#include <math.h>
#include <string.h>

#include "call/functions.h"
#include "problem.h"

/* ---- functions of call/functions.h ---- */

/* A row of the table. */
struct function {
    const char *main;
    const struct cattn_argument *arguments, *returned;
    int n_arguments, n_returned;
    struct cattn_places places;
    void (*set)(void *params);
    enum cattn_status (*compute)(const void *params);
};
#define FUNCTION_ROWS(name, TABLE, main, params_of, function, statement, ...)                                          \
    ARGUMENT_ROWS(name, TABLE)                                                                                         \
    static void set_##name(void *params) {                                                                             \
        struct cattn_##params_of##_params *p = params;                                                                 \
        (void)p;                                                                                                       \
        statement;                                                                                                     \
    }                                                                                                                  \
    static enum cattn_status compute_##name(const void *params) { return function(params); }
#define FUNCTION(name, TABLE, main, params_of, function, statement, places, ...)                                       \
    {#main,  name##_arguments, name##_returned, COUNT_OF(name##_arguments), COUNT_OF(name##_returned) - 1,             \
     places, set_##name,       compute_##name},
FUNCTIONS(FUNCTION_ROWS)
static const struct function functions[] = {FUNCTIONS(FUNCTION)};

/* A call of one of them. */
struct call {
    const struct function *function;
    void *params;
    enum cattn_dtype dtype;
    enum element element; /* of STORED arrays */
    enum content content;
    const char *main;       /* axes of the main array */
    int n_axes;             /* of it */
    int64_t dims[MAX_AXES]; /* of it */
    int64_t sizes['Z' + 1]; /* of axes by letters */
    int n_alike;            /* inputs so far that the result may overwrite */
};

static int own_axes(const char *axes) { return (int)strlen(axes) - (*axes == '*'); }

static int shape_of(const struct call *call, const char *axes, int64_t *dims) {
    int n = 0;
    for (; *axes == '*' && n < call->n_axes - own_axes(call->main); n++)
        dims[n] = call->dims[n];
    for (axes += *axes == '*'; *axes; axes++)
        dims[n++] = call->sizes[(unsigned char)*axes];
    return n;
}

/* The letters of problem.h. */
static const char *letters_of(const struct call *call, const char *axes) {
    const int n = own_axes(axes);
    if (call->function->places.rows == NOWHERE)
        return "C";
    return n == 2 ? "RC" : n == 0 ? "" : axes[strlen(axes) - 1] == 'T' ? "R" : "C";
}

/* Near and far positions, whole and between, below 2^53. */
static void fill_positions(struct source *s, struct array *array) {
    for (int64_t i = 0; i < array->span; i++) {
        const uint64_t word = split_mix(&s->noise);
        const double position = ldexp((double)(int64_t)(word >> 8 & 0xfff) - 2048, (int)(word % 42) - 2);
        set_number(array, i - array->low, word >> 62 ? nearbyint(position) : position);
    }
    array->sum = sum_of(array);
}

static void fill(struct source *s, const struct call *call, struct array *array, int kind) {
    static const uint64_t hidden[] = {16, 2, 1};
    if (kind == BOOLS) {
        fill_integers(s, array, 1, 1);
        set_some(s, array, CHOOSE_FROM(s, hidden), 0);
    } else if (kind == POSITIONS) {
        fill_positions(s, array);
    } else if (kind == QUERY_COUNTS) {
        fill_integers(s, array, 0, call->sizes['T']);
    } else {
        fill_numbers(s, array, call->content);
    }
}

static const struct part *add_argument(struct source *s, struct problem *problem, const struct call *call,
                                       const struct cattn_argument *row, enum role role) {
    const enum element element = row->kind == STORED         ? call->element
                                 : row->kind == BOOLS        ? BYTE
                                 : row->kind == POSITIONS    ? F64
                                 : row->kind == QUERY_COUNTS ? INT64
                                                             : computed_element(call->dtype);
    int64_t dims[MAX_AXES];
    const int n = shape_of(call, row->axes, dims);
    unsigned broadcast = role == INPUT ? choose_broadcast(s, n) : 0;
    if (row->kind == POSITIONS) /* each token has its own */
        broadcast &= ~(1u << (n - 1));
    struct array array = make_array(s, role, element, n, dims, broadcast);
    if (role == INPUT)
        fill(s, call, &array, row->kind);
    if (row->need == OPTIONAL)
        say(problem, " %s", row->name);
    return add_part(problem, problem->n_parts, row->name, letters_of(call, row->axes),
                    &CATTN_AT(struct cattn_tensor, call->params, row->place), array);
}

static bool is_present(const struct problem *problem, const char *name) {
    for (int i = 0; i < problem->n_parts; i++)
        if (strcmp(problem->parts[i].name, name) == 0)
            return true;
    return false;
}

/* The sizes, dtype and contents, of the main array. */
static void choose_sizes(struct source *s, struct problem *problem, struct call *call) {
    static const int64_t columns[] = {0,  1,  2,  5,   7,   8,   9,   15,  16,  17,   31,   33,
                                      64, 65, 66, 127, 129, 500, 511, 512, 513, 1023, 1025, 2050};
    static const int64_t sizes[] = {1, 2, 3, 5, 17, 33, 40, 0};
    const struct cattn_places *places = &call->function->places;
    const double most = fmin(s->budget / 4 + 2000, 60000);
    const bool has_rows = places->rows != NOWHERE, has_storage = places->storage != NOWHERE;
    enum cattn_storage storage = CATTN_STORED_PLAIN;
    struct cattn_array main = {.nd = 1 + has_rows + (int)choose(s, 4 - has_rows)};
    int64_t n_rows = 1;
    call->element = choose_type(s, problem, has_storage, &call->dtype, has_storage ? &storage : NULL);
    main.dims[main.nd - 1] = CHOOSE_FROM(s, columns);
    for (int axis = 0; axis < main.nd - 1; axis++) {
        main.dims[axis] = CHOOSE_FROM(s, sizes);
        if ((double)(n_rows * main.dims[axis] * (main.dims[main.nd - 1] + 1)) > most)
            main.dims[axis] = 1;
        n_rows *= main.dims[axis];
    }
    say(problem, " %dx%d", (int)n_rows, (int)main.dims[main.nd - 1]);
    call->content = choose_content(s, problem);
    call->n_axes = main.nd;
    memcpy(call->dims, main.dims, sizeof call->dims);
    for (int i = own_axes(call->main); i > 0; i--)
        call->sizes[(unsigned char)call->main[strlen(call->main) - (size_t)i]] = main.dims[main.nd - i];
    CATTN_AT(enum cattn_dtype, call->params, places->dtype) = call->dtype;
    if (has_storage)
        CATTN_AT(enum cattn_storage, call->params, places->storage) = storage;
    cattn_fill_sizes(places, &main, main.nd - 1, call->params);
}

static void choose_number(struct source *s, struct problem *problem, const struct cattn_argument *row, void *place) {
    static const double factors[] = {1, 0.5, -1, 0, 30}, bases[] = {10000, 1.5, 500000, 1e300};
    int n_words = 1;
    if (row->role == WORD_ROLE) {
        for (const char *c = row->axes; *c; c++)
            n_words += *c == '|';
        say(problem, " %s %d", row->name, *(int *)place = (int)choose(s, (uint64_t)n_words));
    } else if (row->kind == FLAG) {
        *(bool *)place = one_in(s, 2);
        if (*(bool *)place)
            say(problem, " %s", row->name);
    } else {
        *(double *)place = row->kind == REAL   ? CHOOSE_FROM(s, factors)
                           : row->kind == BASE ? CHOOSE_FROM(s, bases)
                           : one_in(s, 2)      ? 1e-6
                                               : 0;
    }
}

/* A result with the axes of the main array may lie in the memory of the inputs that have them. */
static void add_result(struct source *s, struct problem *problem, const struct call *call,
                       const struct cattn_argument *row) {
    add_argument(s, problem, call, row, OUTPUT);
    if (strcmp(row->axes, call->main) == 0 && row->kind == STORED) {
        problem->result = problem->n_parts - 1;
        if (row->condition == NULL && row->fits == APART)
            problem->shareable[0] = problem->shareable[1] = -1;
    }
}

static enum cattn_status run_function(struct source *s, struct problem *problem, const struct way *way) {
    const struct function *function = &functions[problem->kind->function];
    (void)s;
    CATTN_AT(int, &problem->of, function->places.num_threads) = way->num_threads;
    return function->compute(&problem->of);
}

/* What the rows do not say comes after the sizes and the numbers, before the arrays. */
typedef void settle(struct source *s, struct problem *problem, struct call *call);
static settle settle_softmax, settle_masked_softmax, settle_dropout, settle_rope, settle_conv;
static settle *const SETTLE[N_FUNCTIONS] = {
    [FUNCTION_softmax] = settle_softmax,  [FUNCTION_masked_softmax] = settle_masked_softmax,
    [FUNCTION_dropout] = settle_dropout,  [FUNCTION_rope] = settle_rope,
    [FUNCTION_causal_conv] = settle_conv,
};
/* Functions without a main array choose all by themselves. */
typedef void choose_whole(struct source *s, struct problem *problem);
static choose_whole choose_product;
static choose_whole *const WHOLE[N_FUNCTIONS] = {[FUNCTION_linear] = choose_product,
                                                 [FUNCTION_linear_attention] = choose_linear_attention};

static void choose_function(struct source *s, struct problem *problem) {
    const int which = problem->kind->function;
    const struct function *function = &functions[which];
    struct call call = {.function = function, .params = &problem->of};
    const struct cattn_argument *row;
    if (WHOLE[which]) {
        WHOLE[which](s, problem);
        return;
    }
    for (row = function->arguments; strcmp(row->name, function->main) != 0; row++)
        ;
    call.main = row->axes;
    problem->run = run_function;
    problem->shareable[0] = problem->shareable[1] = -1;
    function->set(call.params);
    choose_sizes(s, problem, &call);
    for (row = function->arguments; row < function->arguments + function->n_arguments; row++)
        if ((row->role == NUMBER_ROLE || row->role == WORD_ROLE) && row->place != NOWHERE)
            choose_number(s, problem, row, (char *)call.params + row->place);
    if (SETTLE[which])
        SETTLE[which](s, problem, &call);
    for (row = function->arguments; row < function->arguments + function->n_arguments; row++) {
        if (row->role != ARRAY_ROLE || row->place == NOWHERE || (row->need == OPTIONAL && one_in(s, 2)))
            continue;
        if (strcmp(row->axes, call.main) == 0 && row->kind == STORED && call.n_alike < 2)
            problem->shareable[call.n_alike++] = problem->n_parts;
        add_argument(s, problem, &call, row, INPUT);
    }
    for (row = function->arguments; row < function->arguments + function->n_arguments; row++)
        if (row->role == RESULT_ROLE && (strcmp(row->name, "out") == 0 || one_in(s, 2)))
            add_result(s, problem, &call, row);
    for (row = function->returned; row < function->returned + function->n_returned; row++)
        if (strcmp(row->condition, "ALWAYS") == 0 || is_present(problem, row->condition) ||
            (row->kind == BOOLS && !one_in(s, 3)))
            add_result(s, problem, &call, row);
}

/* ---- what their rows do not say ---- */

static void settle_softmax(struct source *s, struct problem *problem, struct call *call) {
    (void)s;
    (void)call;
    problem->checks = WEIGHTS_OF_SOFTMAX;
}

static void settle_masked_softmax(struct source *s, struct problem *problem, struct call *call) {
    struct cattn_softmax_params *p = call->params;
    if (!s->has_bytes && p->method != CATTN_SOFTMAX_PLAIN) { /* the bit contract leaves it out */
        p->method = CATTN_SOFTMAX_PLAIN;
        say(problem, ", now 0");
    }
    p->is_causal = call->n_axes > 1 && one_in(s, 3);
    if (p->is_causal)
        choose_ranges(s, problem, &p->ranges, call->dims[call->n_axes - 2], p->n_cols);
    problem->checks = WEIGHTS_OF_SOFTMAX;
    problem->is_renormalized = p->method == CATTN_SOFTMAX_RENORMALIZE;
}

static void settle_dropout(struct source *s, struct problem *problem, struct call *call) {
    struct cattn_dropout_params *p = call->params;
    choose_dropout(s, problem, &p->dropout, true);
    problem->checks = DROPPED;
}

/* One statement for each number: C does not fix the order in which initialisers are evaluated. */
static void choose_scaling(struct source *s, struct cattn_rope_scaling *scaling) {
    scaling->type = (enum cattn_rope_type)choose(s, CATTN_ROPE_LLAMA3 + 1);
    scaling->truncate = one_in(s, 2);
    scaling->factor = 1 + (double)choose(s, 64) / 8;
    scaling->original_length = 1 + (double)choose(s, 900);
    scaling->low_freq_factor = (double)(1 + choose(s, 16)) / 4;
    scaling->high_freq_factor = scaling->low_freq_factor + (double)(1 + choose(s, 16)) / 4;
    scaling->beta_slow = (double)(1 + choose(s, 16)) / 4;
    scaling->beta_fast = scaling->beta_slow + (double)choose(s, 32);
    scaling->attention_factor = one_in(s, 3) ? 1.25 : 0;
    scaling->mscale = one_in(s, 2) ? 0.75 : 0;
    scaling->mscale_all_dim = one_in(s, 2) ? 1.5 : 0;
}

static void settle_rope(struct source *s, struct problem *problem, struct call *call) {
    struct cattn_rope_params *p = call->params;
    p->rotary_dim = one_in(s, 2) ? p->n_cols / 2 * 2 : between(s, 0, p->n_cols / 2) * 2;
    choose_scaling(s, &p->scaling);
    if (p->scaling.type == CATTN_ROPE_DYNAMIC && p->rotary_dim < 4)
        p->scaling.type = CATTN_ROPE_DEFAULT;
    p->length = one_in(s, 2) ? (double)p->seqlen : (double)between(s, 0, 1 << 20);
    say(problem, " %d rotated, scaling %d", (int)p->rotary_dim, (int)p->scaling.type);
}

static void settle_conv(struct source *s, struct problem *problem, struct call *call) {
    struct cattn_conv_params *p = call->params;
    p->n_batch = 1; /* also beside a size of 0 */
    for (int d = 0; d < p->n_batch_dims; d++)
        p->n_batch *= p->batch_shape[d];
    p->width = call->sizes['K'] = between(s, 1, 5);
    call->sizes['S'] = p->width - 1;
    p->length = one_in(s, 3) ? between(s, 0, p->seqlen) : p->seqlen;
    p->silu = one_in(s, 2);
    say(problem, " width %d%s", (int)p->width, p->silu ? " silu" : "");
}

/* ---- products of matrices ---- */

enum { A, B, PRODUCT_BIAS, PRODUCT, A_SCALE, B_SCALE };

static struct cattn_operand operand_of(const struct problem *problem, enum cattn_storage storage, int which) {
    const struct part *part = &problem->parts[which], *scale = &problem->parts[which == A ? A_SCALE : B_SCALE];
    const struct cattn_tensor *tensor = part->tensor, *scales = &problem->tensors[which == A ? A_SCALE : B_SCALE];
    struct cattn_operand operand = {.storage = is_quantized(&part->array)   ? quantized_storage(part->array.element)
                                               : part->array.element == F32 ? CATTN_STORED_PLAIN
                                                                            : storage,
                                    .data = tensor->data,
                                    .batch = tensor->head,
                                    .row = tensor->row,
                                    .col = tensor->col};
    if (scale->present) {
        operand.scale = scales->data;
        operand.scale_batch = scales->head;
        operand.scale_row = scales->row;
        operand.scale_col = scales->col;
    }
    return operand;
}

static enum cattn_status run_product(struct source *s, struct problem *problem, const struct way *way) {
    struct cattn_product_params *p = &problem->of.product;
    const struct cattn_tensor *out = &problem->tensors[PRODUCT], *bias = &problem->tensors[PRODUCT_BIAS];
    (void)s;
    p->num_threads = way->num_threads;
    p->a = operand_of(problem, p->out_storage, A);
    p->b = operand_of(problem, p->out_storage, B);
    p->out = out->data;
    p->out_batch = out->head;
    p->out_a = out->row;
    p->out_b = out->col;
    p->bias = problem->parts[PRODUCT_BIAS].present ? bias->data : NULL;
    p->bias_batch = bias->head;
    p->bias_a = bias->row;
    p->bias_b = bias->col;
    return cattn_product(p);
}

static void choose_product(struct source *s, struct problem *problem) {
    static const char *const BF16_WORDS[] = {"", " compute_dtype bfloat16,", " compute_dtype bfloat16_tiles,"};
    /* around vectors, 8 rows, blocks of rows, chains and slabs, of elements and of pairs */
    static const int64_t counts[] = {0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 95, 97, 193, 230};
    static const int64_t terms[] = {0,  1,  2,  5,   15,  16,  17,  31,  32,   33,
                                    64, 65, 96, 100, 511, 512, 513, 700, 1023, 1025};
    struct cattn_product_params *p = &problem->of.product;
    const enum element element = choose_type(s, problem, true, &p->dtype, &p->out_storage);
    if (p->dtype == CATTN_F32 && one_in(s, 2))
        p->bf16_products = one_in(s, 2) ? CATTN_BF16_TILES : CATTN_BF16_PAIRS;
    p->n_batch = between(s, 1, 3);
    p->n_a = CHOOSE_FROM(s, counts);
    p->n_b = CHOOSE_FROM(s, counts);
    p->depth = CHOOSE_FROM(s, terms);
    while ((double)p->n_batch * (double)p->n_a * (double)p->n_b * (double)p->depth > s->budget) {
        p->n_a = cattn_ceil_div(p->n_a, 2);
        p->n_b = cattn_ceil_div(p->n_b, 2);
        p->depth = p->n_a + p->n_b > 2 ? p->depth : p->depth / 2;
    }
    say(problem, "%s %d of %dx%dx%d", BF16_WORDS[p->bf16_products], (int)p->n_batch, (int)p->n_a, (int)p->n_b,
        (int)p->depth);
    const enum content content = choose_content(s, problem);
    const int64_t dims[][3] = {
        {p->n_batch, p->n_a, p->depth}, {p->n_batch, p->n_b, p->depth}, {p->n_batch, p->n_a, p->n_b}};
    for (int i = A; i <= B; i++) {
        struct array array = make_array(s, INPUT, element, 3, dims[i], choose_broadcast(s, 3));
        fill_numbers(s, &array, content);
        add_part(problem, i, i == A ? "a" : "b", "NTS", &problem->tensors[i], array);
        if (element == F32 && one_in(s, 4))
            quantize(s, problem, i, i == A ? A_SCALE : B_SCALE, i == A ? "scale of a" : "scale of b", "NTS",
                     &problem->tensors[i == A ? A_SCALE : B_SCALE], content);
    }
    if (one_in(s, 2)) { /* a number for each column of the product, or for each row */
        const bool by_columns = !one_in(s, 3);
        const int64_t sizes[] = {p->n_batch, by_columns ? p->n_b : p->n_a};
        struct array bias = make_array(s, INPUT, computed_element(p->dtype), 2, sizes, choose_broadcast(s, 2));
        fill_numbers(s, &bias, content);
        add_part(problem, PRODUCT_BIAS, "bias", by_columns ? "NC" : "NR", &problem->tensors[PRODUCT_BIAS], bias);
    }
    problem->run = run_product;
    add_part(problem, PRODUCT, "product", "NTS", &problem->tensors[PRODUCT],
             make_array(s, OUTPUT, element, 3, dims[2], 0));
    problem->result = PRODUCT;
    problem->shareable[0] = problem->shareable[1] = -1;
}

/* ---- choices of keys ---- */

void choose_indices(struct source *s, struct problem *problem, enum content content) {
    static const int64_t counts[] = {1, 2, 5, 33, 300}, sizes[] = {1, 1, 2, 3, 16};
    struct cattn_choice_params *c = &problem->choice;
    struct cattn_attention_params *p = &problem->back.forward;
    const enum element computed = computed_element(p->dtype);
    c->count = CHOOSE_FROM(s, counts);
    c->block_size = CHOOSE_FROM(s, sizes);
    c->first = between(s, 0, 1);
    c->last = cattn_min(between(s, 0, 1), c->count - c->first);
    c->relu = one_in(s, 2);
    c->pooled = one_in(s, 3);
    const int64_t blocks = c->pooled ? p->seqlen_k : cattn_ceil_div(p->seqlen_k, c->block_size);
    c->n_columns = (cattn_min(c->count, blocks) + (c->pooled ? 2 : 0)) * c->block_size;
    say(problem, " %d%s blocks of %d", (int)c->count, c->pooled ? " pooled" : "", (int)c->block_size);
    if (one_in(s, 2)) {
        struct part *part = add_sized(s, problem, HEAD_WEIGHTS, "weights", "NT", &c->weights, INPUT, computed, 0);
        fill_numbers(s, &part->array, content);
        say(problem, " weights");
    }
    add_sized(s, problem, INDICES, "indices", "1TI", &c->indices, OUTPUT, INT32, 0);
    if (one_in(s, 2))
        add_sized(s, problem, SCORES, "scores", "1TI", &c->scores, OUTPUT, computed, 0);
}

enum cattn_status run_choice(struct problem *problem) {
    struct cattn_choice_params *c = &problem->choice;
    c->forward = problem->back.forward;
    if (c->pooled) /* the last keys may be no whole block */
        c->forward.seqlen_k = (c->forward.seqlen_k + 1) * c->block_size - 1;
    return cattn_choose_keys(c);
}

/* ---- masks ---- */

static enum cattn_status run_mask(struct source *s, struct problem *problem, const struct way *way) {
    struct cattn_mask_params *p = &problem->of.mask;
    (void)s;
    p->num_threads = way->num_threads;
    p->mask = problem->parts[0].array.memory;
    return cattn_mask(p);
}

static void choose_mask(struct source *s, struct problem *problem) {
    static const int64_t sizes[] = {0, 1, 2, 7, 8, 33, 64, 97, 200};
    struct cattn_mask_params *p = &problem->of.mask;
    p->seqlen_q = CHOOSE_FROM(s, sizes);
    p->seqlen_k = CHOOSE_FROM(s, sizes);
    choose_ranges(s, problem, &p->ranges, p->seqlen_q, p->seqlen_k);
    if (one_in(s, 2)) {
        p->ranges.query_length = between(s, 0, p->seqlen_q);
        p->ranges.key_length = between(s, 0, p->seqlen_k);
    }
    const int64_t dims[] = {p->seqlen_q, p->seqlen_k};
    say(problem, " %dx%d", (int)p->seqlen_q, (int)p->seqlen_k);
    problem->run = run_mask;
    problem->checks = VISIBLE;
    add_part(problem, 0, "mask", "RC", NULL, make_array(s, RESULT, BYTE, 2, dims, 0));
    problem->result = 0;
    problem->shareable[0] = problem->shareable[1] = -1;
}

/* ---- PyTorch's random numbers ---- */

/* The numbers, then words that show the state. */
static enum cattn_status run_stream(struct source *s, struct problem *problem, const struct way *way) {
    struct cattn_torch_fill *fill = &problem->stream, words = {.distribution = CATTN_TORCH_INTEGER, .range = 1u << 31};
    uint8_t state[CATTN_TORCH_STATE_BYTES];
    (void)s;
    cattn_torch_export(&problem->torch, state);
    if (way->reimports && !cattn_torch_import(&problem->torch, state))
        return CATTN_NO_MEMORY;
    fill->out = problem->parts[0].array.memory;
    fill->probabilities = problem->parts[2].present ? problem->parts[2].array.memory : NULL;
    const enum cattn_status status = cattn_torch_fill(&problem->torch, fill);
    words.out = problem->parts[1].array.memory;
    words.n = problem->parts[1].array.span;
    return status == CATTN_OK ? cattn_torch_fill(&problem->torch, &words) : status;
}

static void choose_stream(struct source *s, struct problem *problem) {
    static const char *const names[] = {"uniform", "normal", "integer", "bernoulli", "keep"};
    static const double lows[] = {0, -1, 0.25, -3e38}, probabilities[] = {0.5, 0, 1, 0.1};
    struct cattn_torch_fill *fill = &problem->stream;
    cattn_torch_seed(&problem->fresh, choose(s, 0));
    problem->fresh.stream = one_in(s, 2) ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL;
    fill->distribution = (enum cattn_torch_distribution)choose(s, 5);
    fill->dtype = one_in(s, 2) ? CATTN_F64 : CATTN_F32;
    if (!s->has_bytes && fill->distribution == CATTN_TORCH_NORMAL)
        fill->dtype = CATTN_F32; /* logarithm, sine and cosine in float64 come from the C library */
    const int64_t several = between(s, 1, 60);
    fill->n = between(s, 0, 39) * several;
    fill->low = CHOOSE_FROM(s, lows);
    fill->high = fill->low < -4 ? 0 : fill->low + (double)choose(s, 3);
    fill->range = one_in(s, 2) ? choose(s, 0) | 1 : 1 + choose(s, 256);
    fill->base = -(int64_t)choose(s, 256);
    fill->probability = CHOOSE_FROM(s, probabilities);
    const bool is_mask = fill->distribution == CATTN_TORCH_DROPOUT_MASK;
    if (is_mask) {
        fill->skip = between(s, 0, 5000);
        fill->probability = fill->probability > 0 && fill->probability < 1 ? fill->probability : 0.5;
    }
    const enum element element = is_mask                                     ? BYTE
                                 : fill->distribution == CATTN_TORCH_INTEGER ? INT64
                                                                             : computed_element(fill->dtype);
    const int64_t n_words = 700;
    say(problem, " %s %d", names[fill->distribution], (int)fill->n);
    problem->run = run_stream;
    problem->checks = RANDOM;
    add_part(problem, 0, "numbers", "", NULL, make_array(s, RESULT, element, 1, &fill->n, 0));
    add_part(problem, 1, "words", "", NULL, make_array(s, RESULT, INT64, 1, &n_words, 0));
    if (fill->distribution == CATTN_TORCH_BERNOULLI && one_in(s, 2)) {
        struct array chances = make_array(s, RESULT, computed_element(fill->dtype), 1, &fill->n, 0);
        chances.role = INPUT;
        for (int64_t i = 0; i < chances.span; i++)
            set_number(&chances, i, (double)(split_mix(&s->noise) % 5) / 4);
        chances.sum = sum_of(&chances);
        add_part(problem, 2, "probabilities", "", NULL, chances);
    }
    problem->shareable[0] = problem->shareable[1] = -1;
}

/* ---- all of them ---- */

#define KIND(name, ...) {#name, choose_function, FUNCTION_##name},
const struct kind kinds[] = {{"attention", choose_attention, -1},
                             {"gathered", choose_gathered, -1},
                             {"packed", choose_packed, -1},
                             {"bf16_products", choose_bf16_products, -1},
                             {"backward", choose_backward, -1},
                             {"jvp", choose_jvp, -1},
                             {"jvp_backward", choose_jvp_backward, -1},
                             {"statistics", choose_statistics, -1},
                             {"mask", choose_mask, -1},
                             {"stream", choose_stream, -1},
                             FUNCTIONS(KIND){"choose_keys", choose_keys, -1}};
const int n_kinds = COUNT_OF(kinds);

void choose_problem(struct source *s, struct problem *problem, const struct kind *kind) {
    memset(problem, 0, sizeof *problem);
    problem->kind = kind;
    problem->result = -1;
    kind->choose(s, problem);
}
