/* vectors.c -- attention of the vectors of python/cattn/testing/vectors.json, for bits.c. See problem.h.
 *
 * tests/support/vectors.py writes a vector as lines of words: "attention BYTES", and the sizes in the order of
 * read_sizes; "array NAME TYPE SEED COUNT FIRST UNIT AXES SIZE ..." for an array of the vectors' generator; "given NAME
 * N NUMBER ..." for an option; "run". Each result is printed as a line: its name and its bits.
 */
#include <fenv.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "problem.h"

enum { WORD_SIZE = 32 };
static struct problem problem;

static bool read_sizes(void) {
    struct cattn_attention_params *p = &problem.back.forward;
    int64_t size[10];
    for (int i = 0; i < 10; i++)
        if (scanf("%" SCNd64, &size[i]) != 1)
            return false;
    problem = (struct problem){.lists = size[8] ? GATHERED : DENSE, .run = run_attention};
    problem.fresh.stream = CATTN_TORCH_ATEN;
    p->dtype = size[0] == 4 ? CATTN_F32 : CATTN_F64;
    p->n_batch_dims = 1;
    p->n_batch = p->batch_shape[0] = size[1];
    p->num_heads = size[2];
    p->group_size = size[2] / size[3];
    p->seqlen_q = p->ranges.query_length = size[4];
    p->seqlen_k = p->ranges.key_length = p->ranges.seqlen_k = size[5];
    p->head_dim = size[6];
    p->d_v = size[7];
    p->n_indices = size[8];
    p->block_size = size[9];
    p->ranges.left = p->ranges.right = CATTN_UNBOUNDED;
    p->score_options.scale = 1 / sqrt((double)p->head_dim);
    return true;
}

/* Adds an operand whose last axes have these sizes; it broadcasts along the others. */
static struct array *add_input(struct source *s, const char *name, enum element element, int n_axes,
                               const int64_t *sizes) {
    struct cattn_attention_params *p = &problem.back.forward;
    int which = 0;
    while (which < N_ATTENTION_OPERANDS && strcmp(cattn_operands[which].name, name) != 0)
        which++;
    if (which == N_ATTENTION_OPERANDS)
        return NULL;
    const struct cattn_operand_row *row = &cattn_operands[which];
    const int n = 1 + (int)strlen(row->axes);
    struct cattn_tensor *tensor = cattn_operand_view(p, which);
    unsigned broadcast = 0;
    for (int axis = 0; axis < n; axis++)
        if (axis < n - n_axes || sizes[axis - n + n_axes] == 1)
            broadcast |= 1u << axis;
    if (row->kind == COMPUTED || (row->kind == MASK && element != BYTE)) { /* a mask of numbers is a bias */
        which = p->n_bias ? BIAS_1 : OPERAND_bias;
        tensor = &p->bias[p->n_bias++];
    }
    return &add_sized(s, &problem, which, row->name, row->axes, tensor, INPUT, element, broadcast)->array;
}

/* Whether the element is another one that a broadcast axis repeats. */
static bool is_repeated(const struct cursor *c) {
    for (int axis = 0; axis < c->array->n_axes; axis++)
        if (c->array->stride[axis] == 0 && c->index[axis] > 0)
            return true;
    return false;
}

/* The generator that vectors.json describes. */
static bool read_array(struct source *s) {
    static const char *const types[] = {"f4", "f8", "i1", "b1", "i8"};
    static const enum element elements[] = {F32, F64, INT8, BYTE, INT64};
    char name[WORD_SIZE], word[WORD_SIZE];
    int type = 0, n_axes;
    uint32_t state;
    int64_t count, first, sizes[MAX_AXES];
    double unit;
    if (scanf("%31s %31s %" SCNu32 " %" SCNd64 " %" SCNd64 " %lf %d", name, word, &state, &count, &first, &unit,
              &n_axes) != 7)
        return false;
    for (int i = 0; i < n_axes; i++)
        if (scanf("%" SCNd64, &sizes[i]) != 1)
            return false;
    while (type < 4 && strcmp(types[type], word) != 0)
        type++;
    struct array *array = add_input(s, name, elements[type], n_axes, sizes);
    if (!array)
        return false;
    for (struct cursor c = walk(array); c.more; step(&c)) {
        if (is_repeated(&c))
            continue;
        state = 1664525 * state + 1013904223;
        const int64_t integer = first + (int64_t)(((uint64_t)(state >> 16) * (uint64_t)count) >> 16);
        if (array->element == INT8)
            array->memory[array->low + c.offset] = (uint8_t)(int8_t)integer;
        else
            set_number(array, c.offset, (double)integer * unit);
    }
    return true;
}

/* Numbers of the batch are an array of integers; the others are one number, or two. */
static bool read_option(struct source *s) {
    struct cattn_attention_params *p = &problem.back.forward;
    char name[WORD_SIZE];
    int64_t n;
    double numbers[2];
    if (scanf("%31s %" SCNd64, name, &n) != 2 || n < 1 || n > 2)
        return false;
    for (int i = 0; i < n; i++)
        if (scanf("%lf", &numbers[i]) != 1)
            return false;
    for (int i = 0; i < N_ATTENTION_NUMBERS; i++)
        if (strcmp(cattn_numbers[i].name, name) == 0 && cattn_number_place(p, i))
            return *cattn_number_place(p, i) = numbers[0], true;
    if (strcmp(name, "is_causal") == 0) {
        p->ranges.right = 0;
        p->ranges.lower_right = numbers[0] > 1;
    } else if (strcmp(name, "window_size") == 0) {
        p->ranges.left = (int64_t)numbers[0];
        p->ranges.right = cattn_min(p->ranges.right, (int64_t)numbers[1]);
    } else if (strcmp(name, "compute_dtype") == 0) {
        p->bf16_products = (enum cattn_bf16_products)numbers[0];
    } else if (strcmp(name, "dropout_p") == 0) {
        cattn_set_dropout(&p->dropout, numbers[0]);
    } else if (strcmp(name, "rng") == 0) {
        p->dropout.seed = (uint64_t)numbers[0];
    } else if (strcmp(name, "TorchGenerator") == 0) {
        cattn_torch_seed(&problem.fresh, (uint64_t)numbers[0]);
        p->dropout.torch = &problem.torch;
    } else {
        struct array *array = add_input(s, name, INT64, 1, &n);
        if (!array)
            return false;
        for (struct cursor c = walk(array); c.more; step(&c))
            set_number(array, c.offset, numbers[n == 1 ? 0 : c.index[0]]);
    }
    return true;
}

static bool run(struct source *s) {
    static const struct way way = {.path = CATTN_PATH_AUTO, .num_threads = 1, .direction = FE_TONEAREST};
    struct cattn_attention_params *p = &problem.back.forward;
    const enum element element = computed_element(p->dtype);
    add_sized(s, &problem, OUT, "out", "NTD", &p->out, OUTPUT, element, 0);
    add_sized(s, &problem, WEIGHTS, "weights", p->n_indices ? "NTL" : "NTS", &p->weights, OUTPUT, element, 0);
    add_sized(s, &problem, LSE, "lse", "NT", &p->lse, OUTPUT, element, 0);
    if (compute(s, &problem, &way) != CATTN_OK)
        return false;
    for (int i = OUT; i <= LSE; i++) {
        const struct array *array = &problem.parts[i].array;
        printf("%s ", problem.parts[i].name);
        for (struct cursor c = walk(array); c.more; step(&c))
            printf("%0*" PRIx64, element == F32 ? 8 : 16, word_at(array, c.offset));
        printf("\n");
    }
    return true;
}

bool compute_vector(struct source *s, bool *is_wrong) {
    char word[WORD_SIZE];
    while (!*is_wrong && scanf("%31s", word) == 1) {
        const bool is_end = strcmp(word, "run") == 0;
        *is_wrong = !(is_end                           ? run(s)
                      : strcmp(word, "attention") == 0 ? read_sizes()
                      : strcmp(word, "array") == 0     ? read_array(s)
                                                       : read_option(s));
        if (is_end)
            return true;
    }
    return false;
}
