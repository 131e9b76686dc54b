/* problem.c -- problems of attention: sizes around every boundary, and the options of call/operands.h, row by row. A
 * new row is an option of the problems without an edit; a new kind or number does not compile until it has its choice
 * here.
 */
#include <fenv.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "problem.h"

/* ---- parts ---- */

void say(struct problem *problem, const char *format, ...) {
    const size_t used = strlen(problem->said);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem->said + used, sizeof problem->said - used, format, arguments);
    va_end(arguments);
}

struct part *add_part(struct problem *problem, int which, const char *name, const char *letters,
                      struct cattn_tensor *tensor, struct array array) {
    struct part *part = &problem->parts[which];
    *part = (struct part){.name = name, .letters = letters, .tensor = tensor, .array = array, .present = true};
    problem->n_parts = which < problem->n_parts ? problem->n_parts : which + 1;
    return part;
}

unsigned choose_broadcast(struct source *s, int n_axes) {
    const uint64_t some = choose(s, 256), others = choose(s, 256);
    return (unsigned)(some & others) >> 1 & ((1u << n_axes) - 1);
}

enum content choose_content(struct source *s, struct problem *problem) {
    static const enum content contents[] = {PLAIN, PLAIN, PLAIN, PLAIN, TIES, TIES, SPOILT, EXTREME};
    const enum content content = CHOOSE_FROM(s, contents);
    s->noise = choose(s, s->has_bytes ? 256 : 0);
    problem->is_tame = content <= TIES;
    say(problem, "%s",
        content == TIES      ? " ties"
        : content == SPOILT  ? " spoilt"
        : content == EXTREME ? " extreme"
                             : "");
    return content;
}

/* Sets the tensor of a part as the binding does. */
static void bind(const struct part *part) {
    static uint64_t nothing;
    const struct array *array = &part->array;
    const int n_own = (int)strlen(part->letters), n_batch = array->n_axes - n_own;
    const int64_t *own = array->stride + n_batch;
    struct cattn_tensor *tensor = part->tensor;
    if (!tensor)
        return;
    *tensor = (struct cattn_tensor){.data = &nothing};
    if (array->span)
        tensor->data = array->memory + array->low * (int64_t)element_size(array->element);
    for (int i = 0; i < n_own; i++) {
        const char letter = part->letters[i];
        const int axis = letter == 'C' ? 2 : letter == 'R' ? 1 : i;
        const bool is_one = axis == 2 && array->dim[n_batch + i] == 1;
        *(axis == 0   ? &tensor->head
          : axis == 1 ? &tensor->row
                      : &tensor->col) = letter == '1' ? 0
                                        : is_one      ? 1
                                                      : own[i];
    }
    memcpy(tensor->batch, array->stride, (size_t)n_batch * sizeof *tensor->batch);
}

enum cattn_status compute(struct source *s, struct problem *problem, const struct way *way) {
    for (int i = 0; i < problem->n_parts; i++) {
        struct part *part = &problem->parts[i];
        if (part->tensor && !part->present)
            part->tensor->data = NULL;
        if (!part->present)
            continue;
        bind(part);
        if (!part->shares)
            clear_array(&part->array);
    }
    problem->torch = problem->fresh;
    fesetround(way->direction);
    const enum cattn_status status = problem->run(s, problem, way);
    const bool kept = fegetround() == way->direction;
    fesetround(FE_TONEAREST);
    return kept ? status : (enum cattn_status) - 1;
}

bool dequantize(struct source *s, struct problem *problem) {
    bool any = false;
    for (int i = 0; i < 2; i++) {
        struct part *part = &problem->parts[problem->scale_of[i][0]], *scale = &problem->parts[problem->scale_of[i][1]];
        if (!scale->present || !part->present || part == scale || !is_quantized(&part->array))
            continue;
        part->array = dequantized(s, &part->array, &scale->array);
        scale->present = false;
        any = true;
    }
    return any;
}

void quantize(struct source *s, struct problem *problem, int which, int scale, const char *name, const char *letters,
              struct cattn_tensor *tensor, enum content content) {
    struct part *part = &problem->parts[which];
    const struct array plain = part->array;
    const enum element element = one_in(s, 2) ? F8 : INT8;
    unsigned broadcast = choose_broadcast(s, plain.n_axes);
    part->array = make_array(s, INPUT, element, plain.n_axes, plain.dim, broadcast);
    fill_numbers(s, &part->array, content);
    broadcast = choose_broadcast(s, plain.n_axes); /* a scale for each element, token, column, or one */
    broadcast |= (unsigned)choose(s, 4) << (plain.n_axes - 2);
    struct array scales = make_array(s, INPUT, F32, plain.n_axes, plain.dim, broadcast);
    fill_scales(s, &scales, content);
    const int place = problem->scale_of[0][1] != 0;
    problem->scale_of[place][0] = which;
    problem->scale_of[place][1] = scale;
    say(problem, " %s of %s", name, element == F8 ? "float8_e4m3fn" : "int8");
    add_part(problem, scale, name, letters, tensor, scales);
}

/* ---- choices of several functions ---- */

enum element choose_type(struct source *s, struct problem *problem, bool halves, enum cattn_dtype *dtype,
                         enum cattn_storage *storage) {
    static const char *const names[] = {"float32", "float64", "float16", "bfloat16"};
    const uint64_t type = choose(s, halves ? 4 : 2);
    *dtype = type == 1 ? CATTN_F64 : CATTN_F32;
    if (storage)
        *storage = type == 2 ? CATTN_STORED_F16 : type == 3 ? CATTN_STORED_BF16 : CATTN_STORED_PLAIN;
    say(problem, " %s", names[type]);
    return stored_element(*dtype, storage ? *storage : CATTN_STORED_PLAIN);
}

void choose_dropout(struct source *s, struct problem *problem, struct cattn_dropout_spec *spec, bool ordered) {
    static const double probabilities[] = {0.5, 0.1, 0.9, 1.0, 0x1p-33, 0.3};
    const double p = CHOOSE_FROM(s, probabilities);
    const bool serial = one_in(s, 2);
    spec->enabled = true;
    spec->keep_probability = 1 - p;
    spec->threshold = (uint64_t)llround((1 - p) * 0x1p32);
    spec->keep_scale = p < 1 ? 1 / (1 - p) : 0;
    spec->seed = choose(s, 0);
    say(problem, " dropout_p %g", p);
    if (!ordered || !serial || p == 1)
        return;
    cattn_torch_seed(&problem->fresh, spec->seed);
    problem->fresh.stream = one_in(s, 2) ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL;
    spec->torch = &problem->torch;
    say(problem, problem->fresh.stream == CATTN_TORCH_ATEN ? " aten" : " mkl");
}

void choose_ranges(struct source *s, struct problem *problem, struct cattn_ranges *r, int64_t seqlen_q,
                   int64_t seqlen_k) {
    static const int64_t sides[] = {CATTN_UNBOUNDED, CATTN_UNBOUNDED, CATTN_UNBOUNDED, 0, 1, 5, 30, 150, INT64_MAX - 1};
    r->left = CHOOSE_FROM(s, sides);
    r->right = one_in(s, 2) ? 0 : CHOOSE_FROM(s, sides);
    r->lower_right = one_in(s, 3);
    r->seqlen_k = seqlen_k;
    const uint64_t kind = choose(s, 16);
    r->offset = kind == 15 ? CATTN_MAX_OFFSET : kind == 14 ? -CATTN_MAX_OFFSET : 0;
    if (kind % 4 == 1)
        r->offset = between(s, -seqlen_q, seqlen_k);
    r->query_length = seqlen_q;
    r->key_length = seqlen_k;
    say(problem, "%s%s", r->right == 0 ? r->lower_right ? " is_causal lower_right" : " is_causal" : "",
        r->left != CATTN_UNBOUNDED ? " window_size" : "");
}

/* ---- sizes ---- */

/* Sizes around those of a vector, a micro-tile, a tile, the chains of a sum, a block and a chunk. */
static const int64_t QUERIES[] = {1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 31, 32, 33, 63, 64, 95, 96, 97, 130, 193};
static const int64_t N_KEYS[] = {0,  1,  2,  3,   5,   7,   8,   9,   13,  15,  16,  17,   31,   32,   33,  63,
                                 65, 95, 97, 127, 128, 191, 192, 193, 289, 385, 577, 1535, 1537, 1729, 3073};
static const int64_t DEPTHS[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64, 65, 96, 128};
static const int64_t PLACES[] = {0, 1, 2, 5, 16, 17, 33, 97, 193, 250};

static double work_of(const struct cattn_attention_params *p) {
    const double pairs = p->key_indices.data ? (double)p->n_indices / (double)(p->seqlen_k + 1) : 0;
    return cattn_attention_work(p) * (1 + pairs) + (double)(p->n_batch * p->num_heads * p->seqlen_q);
}

static void choose_sizes(struct source *s, struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    const bool is_packed = problem->lists == PACKED;
    const double budget = s->budget;
    bool is_empty[3] = {false};
    p->n_batch_dims = is_packed ? 1 : (int)choose(s, 4);
    p->n_batch = 1;
    for (int d = 0; d < p->n_batch_dims; d++) {
        is_empty[d] = one_in(s, 32) && !is_packed;
        p->batch_shape[d] = is_empty[d] ? 1 : between(s, 1, is_packed ? 4 : 3);
        p->n_batch *= p->batch_shape[d];
    }
    p->group_size = between(s, 1, 4);
    p->num_heads = p->group_size * between(s, 1, 3);
    p->seqlen_q = CHOOSE_FROM(s, QUERIES);
    p->seqlen_k = CHOOSE_FROM(s, N_KEYS);
    p->head_dim = CHOOSE_FROM(s, DEPTHS);
    p->d_v = CHOOSE_FROM(s, DEPTHS);
    if (problem->lists == GATHERED)
        p->n_indices = CHOOSE_FROM(s, PLACES);
    for (int d = 0; d < p->n_batch_dims && work_of(p) > budget; d++)
        if (p->batch_shape[d] > 1 && !is_packed) {
            p->n_batch /= p->batch_shape[d];
            p->batch_shape[d] = 1;
        }
    if (work_of(p) > budget)
        p->num_heads = p->group_size;
    while (work_of(p) > budget && p->head_dim + p->d_v > 8) {
        p->head_dim /= 2;
        p->d_v /= 2;
    }
    while (work_of(p) > budget && p->seqlen_q > 3)
        p->seqlen_q = p->seqlen_q * 2 / 3;
    while (work_of(p) > budget && p->seqlen_k > 1)
        p->seqlen_k = p->seqlen_k * 2 / 3;
    for (int d = 0; d < p->n_batch_dims; d++)
        if (is_empty[d])
            p->batch_shape[d] = p->n_batch = 0;
}

static int64_t size_of(const struct problem *problem, char letter) {
    const struct cattn_attention_params *p = &problem->back.forward;
    switch (letter) {
    case 'N':
        return p->num_heads;
    case 'K':
        return p->num_heads / p->group_size;
    case 'T':
        return problem->lists == PACKED ? problem->total_q : p->seqlen_q;
    case 'S':
        return problem->lists == PACKED ? problem->total_k : p->seqlen_k;
    case 'H':
        return p->head_dim;
    case 'D':
        return p->d_v;
    case 'X':
        return cattn_ceil_div(p->seqlen_q, p->block_size);
    case 'Y':
        return cattn_ceil_div(p->seqlen_k, p->block_size);
    case 'L':
        return p->n_indices;
    case 'P':
        return problem->statistics.top_k;
    case 'I':
        return problem->choice.n_columns;
    default:
        return 1;
    }
}

/* Sets dims to the batch dimensions and the letters, and returns the number of axes. The rows of packed sequences have
 * no batch dimensions. */
static int axes_of(const struct problem *problem, const char *letters, int64_t *dims) {
    const struct cattn_attention_params *p = &problem->back.forward;
    int n = problem->lists == PACKED && strpbrk(letters, "TS") ? 0 : p->n_batch_dims;
    memcpy(dims, p->batch_shape, (size_t)n * sizeof *dims);
    for (; *letters; letters++)
        dims[n++] = size_of(problem, *letters);
    return n;
}

struct part *add_sized(struct source *s, struct problem *problem, int which, const char *name, const char *letters,
                       struct cattn_tensor *tensor, enum role role, enum element element, unsigned broadcast) {
    int64_t dims[MAX_AXES];
    const int n_axes = axes_of(problem, letters, dims);
    const struct array array = make_array(s, role, element, n_axes, dims, broadcast);
    return add_part(problem, which, name, letters, tensor, array);
}

/* ---- operands ---- */

_Static_assert(N_ATTENTION_NUMBERS == 10, "a new number of call/operands.h is chosen here");
static void choose_numbers(struct source *s, struct problem *problem) {
    static const double scales[] = {1, 0.25, -0.5, 0, 0.125}, caps[] = {0, 0, 0, 0.7, 5, 50, 1e-30};
    static const int64_t blocks[] = {1, 7, 16, 50, 64, 192};
    struct cattn_attention_params *p = &problem->back.forward;
    p->score_options.scale = CHOOSE_FROM(s, scales);
    p->score_options.softcap = CHOOSE_FROM(s, caps);
    p->block_size = CHOOSE_FROM(s, blocks);
    p->double_lse = one_in(s, 2) || problem->pass == SUMMARY;
    const bool ordered = problem->lists == DENSE && problem->pass <= BACKWARD;
    if (problem->lists != GATHERED && problem->pass < SUMMARY && one_in(s, 3))
        choose_dropout(s, problem, &p->dropout, ordered);
    choose_ranges(s, problem, &p->ranges, p->seqlen_q, p->seqlen_k);
    if (problem->lists != PACKED && one_in(s, 4))
        p->ranges.first_key = between(s, 0, p->seqlen_k);
    say(problem, " scale%s", p->score_options.softcap > 0 ? " softcap" : "");
}

/* Packed: rows of all sequences end to end, of any length up to the longest. */
static void choose_sequences(struct source *s, struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    const struct {
        int starts, lengths;
        int64_t most, *total;
        struct cattn_tensor *tensor;
        const char *name;
    } sides[] = {
        {QUERY_STARTS, OPERAND_query_seq_lengths, p->seqlen_q, &problem->total_q, &p->query_starts, "cu_seqlens_q"},
        {KEY_STARTS, OPERAND_key_value_seq_lengths, p->seqlen_k, &problem->total_k, &p->key_starts, "cu_seqlens_k"}};
    for (int i = 0; i < 2; i++) {
        const int lengths = sides[i].lengths;
        struct part *start =
            add_sized(s, problem, sides[i].starts, sides[i].name, "", sides[i].tensor, INPUT, INT64, 0);
        struct part *length = add_sized(s, problem, lengths, cattn_operands[lengths].name, "",
                                        cattn_operand_view(p, lengths), INPUT, INT64, 0);
        for (struct cursor c = walk(&start->array); c.more; step(&c)) {
            const bool is_longest = c.index[0] == 0 || one_in(s, 4);
            const int64_t n = is_longest ? sides[i].most : between(s, 0, sides[i].most);
            set_number(&start->array, c.offset, (double)*sides[i].total);
            set_number(&length->array, offset_of(&length->array, c.index), (double)n);
            *sides[i].total += n;
        }
        start->array.sum = sum_of(&start->array);
        length->array.sum = sum_of(&length->array);
    }
}

/* Whether this call may have the operand. */
static bool may_have(const struct problem *problem, int operand) {
    const struct cattn_operand_row *row = &cattn_operands[operand];
    const struct cattn_attention_params *p = &problem->back.forward;
    const unsigned call = problem->lists == PACKED ? IN_PACKED : problem->pass == SUMMARY ? IN_STATISTICS : IN_DENSE;
    if (!(row->calls & call) || (problem->pass == SUMMARY && !(row->calls & IN_STATISTICS)))
        return false;
    if (problem->pass == CHOOSING && (row->kind == LOGITS || row->kind == SLOPES || row->kind == BLOCKS))
        return false;
    switch (row->kind) {
    case VALUES:
        return !problem->stage;
    case OFFSETS:
        return !p->ranges.lower_right;
    case SLOPES:
        return problem->lists != GATHERED;
    case LISTS:
        return problem->lists == GATHERED;
    case SCALES: /* come with quantized keys and values */
    case GATES:  /* comes last */
        return false;
    default:
        return true;
    }
}

static enum element element_of(const struct problem *problem, enum cattn_operand_kind kind) {
    const struct cattn_attention_params *p = &problem->back.forward;
    switch (kind) {
    case STORED:
    case GATES:
    case KEYS:
    case VALUES:
        return stored_element(p->dtype, p->storage);
    case MASK:
    case BLOCKS:
        return BYTE;
    case COMPUTED:
    case SLOPES:
    case LOGITS:
        return computed_element(p->dtype);
    case SCALES:
        return F32;
    case OFFSETS:
    case QUERY_COUNTS:
    case KEY_COUNTS:
    case LISTS:
    case WIDENED: /* XLA's alone */
    case WORDS:
    case N_OPERAND_KINDS:
        break;
    }
    return INT64;
}

/* Hides some keys by -inf. */
static void hide_some(struct source *s, struct array *array) {
    if (one_in(s, 2)) {
        const uint64_t n = 1 + choose(s, 6);
        set_some(s, array, n, -(double)INFINITY);
    }
}

static void fill_operand(struct source *s, struct problem *problem, struct array *array, enum cattn_operand_kind kind,
                         enum content content) {
    static const uint64_t hidden[] = {16, 2, 1};
    const struct cattn_attention_params *p = &problem->back.forward;
    switch (kind) {
    case STORED:
    case GATES:
    case KEYS:
    case VALUES:
        fill_numbers(s, array, content);
        return;
    case MASK:
    case BLOCKS:
        fill_integers(s, array, 1, 1);
        set_some(s, array, CHOOSE_FROM(s, hidden), 0);
        return;
    case COMPUTED:
    case LOGITS:
        fill_numbers(s, array, content);
        hide_some(s, array);
        return;
    case SLOPES: /* positive */
        for (int64_t i = 0; i < array->span; i++)
            set_number(array, i - array->low, (double)(1 + split_mix(&s->noise) % 64) / 64);
        array->sum = sum_of(array);
        return;
    case OFFSETS:
        fill_integers(s, array, -p->seqlen_q, p->seqlen_k);
        return;
    case QUERY_COUNTS:
        fill_integers(s, array, 0, p->seqlen_q);
        return;
    case KEY_COUNTS:
        fill_integers(s, array, 0, p->seqlen_k);
        return;
    case LISTS:
        fill_integers(s, array, one_in(s, 2) && p->seqlen_k > 0 ? 0 : -1, p->seqlen_k - 1);
        return;
    case SCALES:
    case WIDENED:
    case WORDS:
    case N_OPERAND_KINDS:
        return;
    }
}

static void add_operand(struct source *s, struct problem *problem, int operand, enum content content) {
    const struct cattn_operand_row *row = &cattn_operands[operand];
    const enum element element = element_of(problem, row->kind);
    struct cattn_tensor *tensor = cattn_operand_view(&problem->back.forward, operand);
    int64_t dims[MAX_AXES];
    unsigned broadcast = choose_broadcast(s, axes_of(problem, row->axes, dims));
    if (problem->pass == CHOOSING && (row->kind == MASK || row->kind == COMPUTED)) /* one for all heads */
        broadcast |= 1u << problem->back.forward.n_batch_dims;
    struct part *part = add_sized(s, problem, operand, row->name, row->axes, tensor, INPUT, element, broadcast);
    fill_operand(s, problem, &part->array, row->kind, content);
    say(problem, " %s", row->name);
}

static void choose_operands(struct source *s, struct problem *problem, enum content content) {
    struct cattn_attention_params *p = &problem->back.forward;
    for (int i = 0; i < N_ATTENTION_OPERANDS; i++) {
        const bool needed = cattn_operands[i].fits == EXACTLY || cattn_operands[i].kind == LISTS;
        if (!problem->parts[i].present && may_have(problem, i) && (needed || one_in(s, 4)))
            add_operand(s, problem, i, content);
    }
    const struct part *const lists = &problem->parts[OPERAND_key_indices], *const bias = &problem->parts[OPERAND_bias];
    const int n = p->n_batch_dims;
    p->own_head_lists = lists->present && lists->array.stride[n] != 0;
    p->own_row_lists = lists->present && lists->array.stride[n + 1] != 0;
    p->n_bias = bias->present;
    if (bias->present && one_in(s, 3)) {
        const unsigned of_heads = problem->pass == CHOOSING ? 1u << n : 0;
        struct part *second = add_sized(s, problem, BIAS_1, "second bias", "NTS", &p->bias[1], INPUT,
                                        bias->array.element, choose_broadcast(s, n + 3) | of_heads);
        fill_operand(s, problem, &second->array, COMPUTED, content);
        p->n_bias = 2;
    }
    const uint64_t kind = choose(s, 6);
    if (p->dtype != CATTN_F32 || p->storage != CATTN_STORED_PLAIN || problem->pass == JVP ||
        problem->pass == JVP_BACKWARD)
        return;
    if (kind & 1)
        quantize(s, problem, OPERAND_key, OPERAND_key_scale, "key_scale", "KSH", &p->key_scale, content);
    if (kind >= 3 && !problem->stage)
        quantize(s, problem, OPERAND_value, OPERAND_value_scale, "value_scale", "KSD", &p->value_scale, content);
}

/* ---- results ---- */

static void add_output(struct source *s, struct problem *problem, int which, const char *name, const char *letters,
                       struct cattn_tensor *tensor, enum element element) {
    add_sized(s, problem, which, name, letters, tensor, OUTPUT, element, 0);
}

static void add_result(struct source *s, struct problem *problem, int which, const char *name, const char *letters,
                       struct cattn_tensor *tensor, unsigned broadcast) {
    const enum element element = which == TOP_KEYS ? INT64 : computed_element(problem->back.forward.dtype);
    add_sized(s, problem, which, name, letters, tensor, RESULT, element, broadcast);
}

static void choose_forward_results(struct source *s, struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    const enum element stored = stored_element(p->dtype, p->storage);
    const enum element lse = p->double_lse ? F64 : computed_element(p->dtype);
    const bool is_alone = problem->pass == FORWARD && problem->lists != PACKED;
    const char *const scores = problem->lists == GATHERED ? "NTL" : "NTS";
    if (!problem->stage)
        add_output(s, problem, OUT, "out", "NTD", &p->out, stored);
    if (problem->pass != FORWARD || one_in(s, 2))
        add_sized(s, problem, LSE, "lse", "NT", &p->lse, problem->pass == SUMMARY ? RESULT : OUTPUT, lse, 0);
    if (is_alone && (problem->stage || one_in(s, 3))) {
        add_output(s, problem, WEIGHTS, p->store_scores ? "scores" : "weights", scores, &p->weights, stored);
        say(problem, " return_weights");
    }
    if (is_alone && problem->lists == DENSE && one_in(s, 3))
        add_output(s, problem, DROPOUT_MASK, "dropout_mask", "NTS", &p->dropout_mask, BYTE);
}

/* The gradient of the last bias, in its own shape, or summed over rows or columns. */
static void add_bias_gradient(struct source *s, struct problem *problem) {
    struct cattn_attention_params *p = &problem->back.forward;
    const struct part *bias = &problem->parts[p->n_bias == 2 ? BIAS_1 : OPERAND_bias];
    const int n = p->n_batch_dims;
    unsigned broadcast = 0;
    if (bias->array.stride[n + 1] == 0 && p->seqlen_q != 1)
        problem->back.bias_sum = CATTN_BIAS_SUM_ROWS;
    else if (bias->array.stride[n + 2] == 0 && p->seqlen_k != 1)
        problem->back.bias_sum = CATTN_BIAS_SUM_COLS;
    for (int axis = 0; axis < n + 3 && problem->back.bias_sum == CATTN_BIAS_NO_SUM; axis++)
        broadcast |= (unsigned)(bias->array.stride[axis] == 0) << axis;
    const char *const letters = problem->back.bias_sum == CATTN_BIAS_SUM_ROWS   ? "N1S"
                                : problem->back.bias_sum == CATTN_BIAS_SUM_COLS ? "NT1"
                                                                                : "NTS";
    add_result(s, problem, GRAD_BIAS, "grad_bias", letters, &problem->back.grad_bias, broadcast);
}

static void choose_gradients(struct source *s, struct problem *problem, enum content content) {
    struct cattn_backward_params *b = &problem->back;
    const enum element stored = stored_element(b->forward.dtype, b->forward.storage);
    add_sized(s, problem, GRAD_OUT, "grad_out", "NTD", &b->grad_out, INPUT, stored, 0);
    fill_numbers(s, &problem->parts[GRAD_OUT].array, content);
    if (one_in(s, 2)) {
        add_sized(s, problem, GRAD_LSE, "grad_lse", "NT", &b->grad_lse, INPUT, F64, 0);
        fill_numbers(s, &problem->parts[GRAD_LSE].array, content);
        say(problem, " grad_lse");
    }
    add_result(s, problem, GRAD_QUERY, "grad_query", "NTH", &b->grad_query, 0);
    add_result(s, problem, GRAD_KEY, "grad_key", "KSH", &b->grad_key, 0);
    add_result(s, problem, GRAD_VALUE, "grad_value", "KSD", &b->grad_value, 0);
    if (problem->parts[OPERAND_bias].present)
        add_bias_gradient(s, problem);
    if (problem->parts[OPERAND_sinks].present)
        add_result(s, problem, GRAD_SINKS, "grad_sinks", "N", &b->grad_sinks, 0);
    for (int i = 0; i < 2 && b->forward.storage != CATTN_STORED_PLAIN; i++)
        add_sized(s, problem, PLAIN_OUT + i, "out in float32", "NTD", NULL, OUTPUT, F32, 0)->is_own = true;
    b->misfit = one_in(s, 2) ? &problem->misfit : NULL;
}

/* Comes last, so that all else is chosen as for the problem without a gate. */
static void choose_gate(struct source *s, struct problem *problem, enum content content) {
    struct cattn_backward_params *b = &problem->back;
    if (problem->stage || problem->pass > BACKWARD || !one_in(s, 4))
        return;
    add_operand(s, problem, OPERAND_gate, content);
    if (problem->pass == BACKWARD)
        add_result(s, problem, GRAD_GATE, "grad_gate", "NTD", &b->grad_gate, 0);
}

static void choose_tangents(struct source *s, struct problem *problem, enum content content) {
    struct cattn_tangents *t = &problem->back.tangents;
    const struct {
        int of, which;
        struct cattn_tensor *tensor;
        const char *name;
    } rows[] = {{OPERAND_query, QUERY_TANGENT, &t->query, "query_tangent"},
                {OPERAND_key, KEY_TANGENT, &t->key, "key_tangent"},
                {OPERAND_value, VALUE_TANGENT, &t->value, "value_tangent"},
                {OPERAND_bias, BIAS_TANGENT, &t->bias, "bias_tangent"},
                {OPERAND_sinks, SINKS_TANGENT, &t->sinks, "sinks_tangent"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct part *of = &problem->parts[rows[i].of];
        if (!of->present || one_in(s, 4))
            continue;
        const unsigned broadcast = choose_broadcast(s, of->array.n_axes);
        struct part *part = add_sized(s, problem, rows[i].which, rows[i].name, of->letters, rows[i].tensor, INPUT,
                                      of->array.element, broadcast);
        fill_numbers(s, &part->array, content);
        say(problem, " %s", rows[i].name);
    }
    const enum element computed = computed_element(problem->back.forward.dtype);
    add_output(s, problem, OUT_TANGENT, "out_tangent", "NTD", &t->out, problem->parts[OUT].array.element);
    if (problem->pass == JVP_BACKWARD || one_in(s, 2))
        add_output(s, problem, LSE_TANGENT, "lse_tangent", "NT", &t->lse, computed);
}

static void choose_summary(struct source *s, struct problem *problem) {
    static const char *const names[] = {"lse", "max_score", "entropy", "max_weight", "sink_weight", "distance"};
    struct cattn_statistics_params *p = &problem->statistics;
    const int64_t seqlen_k = problem->back.forward.seqlen_k;
    p->observation_window = one_in(s, 3) ? between(s, 1, 150) : CATTN_UNBOUNDED;
    p->top_k = one_in(s, 2) ? cattn_min(between(s, 1, 40), seqlen_k) : 0;
    for (int i = 0; i < CATTN_N_ROW_STATISTICS; i++)
        if (!one_in(s, 4))
            add_result(s, problem, STATISTICS + i, names[i], "NT", &p->rows[i], 0);
    if (one_in(s, 2))
        add_result(s, problem, RECEIVED, "received", "N1S", &p->received, 0);
    if (one_in(s, 2))
        add_result(s, problem, RECEIVED_MAX, "received_max", "N1S", &p->received_max, 0);
    if (p->top_k > 0) {
        add_result(s, problem, TOP_KEYS, "top_keys", "NTP", &p->top_keys, 0);
        add_result(s, problem, TOP_WEIGHTS, "top_weights", "NTP", &p->top_weights, 0);
    }
    say(problem, " top_k %d", (int)p->top_k);
}

/* ---- calls ---- */

/* Makes the params a call of sequence b alone: the first element of each array moves to where the sequence begins. */
static void only_sequence(struct problem *problem, int64_t b) {
    struct cattn_attention_params *p = &problem->back.forward;
    const int of[] = {QUERY_STARTS, KEY_STARTS, OPERAND_query_seq_lengths, OPERAND_key_value_seq_lengths};
    int64_t numbers[4];
    for (int i = 0; i < 4; i++)
        numbers[i] = (int64_t)number_at(&problem->parts[of[i]].array, offset_of(&problem->parts[of[i]].array, &b));
    for (int i = 0; i < problem->n_parts; i++) {
        const struct part *part = &problem->parts[i];
        struct cattn_tensor *tensor = part->tensor;
        if (!part->present || !tensor || part->array.span == 0)
            continue;
        const char *tokens = strpbrk(part->letters, "TS");
        const int64_t start = !tokens ? b : numbers[*tokens == 'S'];
        const int64_t stride = !tokens ? tensor->batch[0] : tokens == part->letters + 1 ? tensor->row : tensor->col;
        tensor->data = (char *)tensor->data + start * stride * (int64_t)element_size(part->array.element);
    }
    p->n_batch_dims = 0;
    p->n_batch = 1;
    p->query_starts.data = p->key_starts.data = p->ranges.query_lengths.data = p->ranges.key_lengths.data = NULL;
    p->seqlen_q = p->ranges.query_length = numbers[2];
    p->seqlen_k = p->ranges.seqlen_k = p->ranges.key_length = numbers[3];
}

/* Sets the tensor of an array of halves to the same numbers in float32. */
static void widen(const struct part *from, struct part *to) {
    for (struct cursor c = walk(&to->array); c.more; step(&c))
        set_number(&to->array, c.offset, number_at(&from->array, offset_of(&from->array, c.index)));
    to->tensor = from->tensor;
    bind(to);
    to->tensor = NULL;
}

static enum cattn_status differentiate(struct problem *problem, const struct way *way) {
    struct cattn_backward_params *b = &problem->back;
    struct part *const parts = problem->parts;
    const struct cattn_tensor out = b->forward.out, out_tangent = b->tangents.out;
    b->plain_out = way->plain_out && parts[PLAIN_OUT].present && !way->alone;
    if (b->plain_out)
        widen(&parts[OUT], &parts[PLAIN_OUT]);
    if (b->plain_out && problem->pass == JVP_BACKWARD)
        widen(&parts[OUT_TANGENT], &parts[PLAIN_OUT_TANGENT]);
    b->of_tangents = problem->pass == JVP_BACKWARD;
    b->forward.path = CATTN_PATH_TILE;
    problem->torch = problem->fresh;
    const enum cattn_status status =
        problem->lists == GATHERED ? cattn_gathered_backward(b) : cattn_attention_backward(b);
    b->forward.out = out;
    b->tangents.out = out_tangent;
    return status;
}

static enum cattn_status derive(struct problem *problem, const struct way *way) {
    struct cattn_jvp_params jvp = {.has_results = way->has_results, .tangents = problem->back.tangents};
    enum cattn_status status = CATTN_OK;
    jvp.forward = problem->back.forward;
    if (jvp.has_results)
        status = cattn_attention(&jvp.forward);
    jvp.forward.path = CATTN_PATH_AUTO;
    return status == CATTN_OK ? cattn_attention_jvp(&jvp) : status;
}

static enum cattn_status run_once(struct problem *problem, const struct way *way) {
    struct cattn_attention_params *p = &problem->back.forward;
    enum cattn_status status;
    p->quantized_key = quantized_storage(problem->parts[OPERAND_key].array.element);
    p->quantized_value = quantized_storage(problem->parts[OPERAND_value].array.element);
    p->num_threads = way->num_threads;
    p->path = problem->pass >= SUMMARY ? CATTN_PATH_AUTO : way->path;
    if (!cattn_attention_path_fits(p)) /* the tiny path depends on strides and outputs */
        p->path = CATTN_PATH_AUTO;
    if (problem->pass == CHOOSING)
        return run_choice(problem);
    if (problem->pass == SUMMARY) {
        problem->statistics.forward = *p;
        return cattn_attention_statistics(&problem->statistics);
    }
    status = problem->pass == JVP || problem->pass == JVP_BACKWARD ? derive(problem, way)
             : problem->lists == GATHERED                          ? cattn_gathered_attention(p)
                                                                   : cattn_attention(p);
    return status == CATTN_OK && (problem->pass == BACKWARD || problem->pass == JVP_BACKWARD)
               ? differentiate(problem, way)
               : status;
}

enum cattn_status run_attention(struct source *s, struct problem *problem, const struct way *way) {
    (void)s;
    if (!way->alone || problem->lists != PACKED || problem->back.forward.dropout.enabled)
        return run_once(problem, way);
    const struct cattn_backward_params back = problem->back;
    const struct cattn_statistics_params statistics = problem->statistics;
    enum cattn_status status = CATTN_OK;
    for (int64_t b = 0; b < back.forward.n_batch && status == CATTN_OK; b++) {
        only_sequence(problem, b);
        status = run_once(problem, way);
        problem->back = back;
        problem->statistics = statistics;
    }
    return status;
}

/* ---- kinds ---- */

static void choose_call(struct source *s, struct problem *problem, enum pass pass, enum lists lists) {
    struct cattn_attention_params *p = &problem->back.forward;
    problem->run = run_attention;
    problem->checks = pass == CHOOSING ? NOTHING : NUMBERS_OF_ATTENTION;
    problem->pass = pass;
    problem->lists = lists;
    problem->has_paths = pass == FORWARD;
    problem->shareable[0] = problem->shareable[1] = -1;
    problem->result = pass == CHOOSING ? INDICES : OUT;
    if (lists != DENSE)
        say(problem, pass == BACKWARD ? " backward" : pass == SUMMARY ? " statistics" : "");
    if (p->bf16_products) {
        p->storage = one_in(s, 2) ? CATTN_STORED_BF16 : CATTN_STORED_PLAIN;
        say(problem, " by %s, %s", p->bf16_products == CATTN_BF16_TILES ? "tiles" : "pairs",
            p->storage == CATTN_STORED_BF16 ? "bfloat16" : "float32");
    } else {
        choose_type(s, problem, true, &p->dtype, &p->storage);
    }
    const enum content content = choose_content(s, problem);
    problem->stage = pass >= SUMMARY || (pass == FORWARD && lists != PACKED && one_in(s, 5));
    choose_sizes(s, problem);
    p->d_v = problem->stage ? 0 : p->d_v;
    say(problem, " %d of %d/%d heads, %dx%d, %d,%d", (int)p->n_batch, (int)p->num_heads,
        (int)(p->num_heads / p->group_size), (int)p->seqlen_q, (int)p->seqlen_k, (int)p->head_dim, (int)p->d_v);
    choose_numbers(s, problem);
    if (lists == PACKED)
        choose_sequences(s, problem);
    p->store_scores = problem->stage && pass == FORWARD && one_in(s, 2);
    p->ranges.all_visible = p->store_scores && one_in(s, 2);
    if (p->store_scores)
        p->dropout = (struct cattn_dropout_spec){.enabled = false};
    choose_operands(s, problem, content);
    if (p->store_scores && one_in(s, 2)) /* stages before the softmax have no mask or sinks */
        problem->parts[OPERAND_attn_mask].present = problem->parts[OPERAND_sinks].present = false;
    if (pass == CHOOSING)
        choose_indices(s, problem, content);
    else
        choose_forward_results(s, problem);
    if (pass == JVP || pass == JVP_BACKWARD)
        choose_tangents(s, problem, content);
    if (pass == BACKWARD || pass == JVP_BACKWARD)
        choose_gradients(s, problem, content);
    if (pass == SUMMARY)
        choose_summary(s, problem);
    choose_gate(s, problem, content);
}

void choose_attention(struct source *s, struct problem *problem) { choose_call(s, problem, FORWARD, DENSE); }
void choose_backward(struct source *s, struct problem *problem) { choose_call(s, problem, BACKWARD, DENSE); }
void choose_jvp(struct source *s, struct problem *problem) { choose_call(s, problem, JVP, DENSE); }
void choose_jvp_backward(struct source *s, struct problem *problem) { choose_call(s, problem, JVP_BACKWARD, DENSE); }
void choose_statistics(struct source *s, struct problem *problem) { choose_call(s, problem, SUMMARY, DENSE); }
void choose_keys(struct source *s, struct problem *problem) { choose_call(s, problem, CHOOSING, DENSE); }

void choose_gathered(struct source *s, struct problem *problem) {
    choose_call(s, problem, one_in(s, 2) ? BACKWARD : FORWARD, GATHERED);
}

void choose_packed(struct source *s, struct problem *problem) {
    static const enum pass passes[] = {FORWARD, BACKWARD, SUMMARY};
    choose_call(s, problem, CHOOSE_FROM(s, passes), PACKED);
}

/* Of float32 or bfloat16, in a forward pass alone. */
void choose_bf16_products(struct source *s, struct problem *problem) {
    problem->back.forward.bf16_products = one_in(s, 2) ? CATTN_BF16_TILES : CATTN_BF16_PAIRS;
    choose_call(s, problem, FORWARD, one_in(s, 4) ? GATHERED : DENSE);
}
