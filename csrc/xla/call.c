/* call.c -- from XLA's call frame to checked operands, sizes, options and views.
 *
 * cattn.integrations.jax has checked the arguments by their names. Other programs could call the targets, too: what
 * would make the core read or write beyond a buffer is an error here.
 */
#include "call.h"
#include "../fp_mode.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what XLA asks at registration, and which XLA asks ---- */

static bool has_known_layout(const struct xla_frame *frame) {
    return frame->head.size == XLA_SIZE(xla_frame, attributes) &&
           frame->arguments.head.size == XLA_SIZE(xla_items, items) &&
           frame->results.head.size == XLA_SIZE(xla_items, items) &&
           frame->attributes.head.size == XLA_SIZE(xla_attributes, items) && frame->api->version.major == XLA_MAJOR;
}

static atomic_bool was_asked, was_asked_by_another_layout;

bool cattn_xla_is_known(void) { return was_asked && !was_asked_by_another_layout; }

bool cattn_xla_describe(const struct xla_frame *frame) {
    const struct xla_extension *extension = frame->head.extensions;
    while (extension != NULL && extension->type != XLA_METADATA)
        extension = extension->next;
    if (extension == NULL)
        return false;
    struct xla_metadata *metadata = ((const struct xla_metadata_extension *)extension)->metadata;
    was_asked = true;
    if (!has_known_layout(frame))
        was_asked_by_another_layout = true;
    /* A handler with a version that XLA refuses would leave JAX without a CPU. So the answer is XLA's own version, and
     * cattn.integrations.jax does not call a handler whose frame has another layout. */
    metadata->version.major = frame->api->version.major;
    metadata->version.minor = frame->api->version.minor;
    metadata->traits = 0;
    return true;
}

/* ---- descriptions ---- */

static const struct description {
    const char *name, *axes;
    enum cattn_operand_kind kind;
    enum cattn_fits fits;
} DESCRIPTIONS[XLA_N_OPERANDS] = {
#define DESCRIBE(name, axes, kind, fits, ...) {#name, axes, kind, fits},
    XLA_ARGUMENTS(DESCRIBE) XLA_RESULTS(DESCRIBE)
#undef DESCRIBE
};
#define NAME(name, ...) #name,
const char *const cattn_xla_operands[] = {XLA_ARGUMENTS(NAME) XLA_RESULTS(NAME)};

#define MOST_AXES 4

/* The axes of an operand in XLA's order: the batch comes first, and tokens before heads where the array is not one of
 * scores. Returns their number. */
static int axes_of(int operand, char *axes) {
    const char *own = DESCRIPTIONS[operand].axes;
    if (own[0] == 'W') { /* one for the whole call */
        axes[0] = 'W';
        return 1;
    }
    const int n = (int)strlen(own);
    const bool has_scores = strchr(own, 'T') != NULL && strchr(own, 'S') != NULL;
    const bool swaps = n > 1 && !has_scores && (own[1] == 'T' || own[1] == 'S');
    axes[0] = 'B';
    for (int i = 0; i < n; i++)
        axes[1 + i] = own[swaps && i < 2 ? 1 - i : i];
    return 1 + n;
}

struct xla_error *cattn_xla_fail(const struct xla_frame *frame, int code, const char *format, ...) {
    char text[256] = "cattn: ";
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text + strlen(text), sizeof text - strlen(text), format, arguments);
    va_end(arguments);
    struct xla_new_error error = {.head.size = XLA_SIZE(xla_new_error, code), .message = text, .code = code};
    return frame->api->create_error(&error);
}

/* ---- numbers of the whole call ---- */

static bool is_called(const struct xla_name *name, const char *text, const char *suffix) {
    if (name->length == 0 || name->text[0] != text[0]) /* most are not */
        return false;
    const size_t length = strlen(text), more = strlen(suffix);
    return name->length == length + more && memcmp(name->text, text, length) == 0 &&
           memcmp(name->text + length, suffix, more) == 0;
}

/* The attributes of a number by its kind; kinds without any are not for XLA. */
static const struct {
    int n, type;
} ATTRIBUTES[N_NUMBER_KINDS] = {
    [PROBABILITY] = {1, XLA_F64}, [REAL] = {1, XLA_F64},   [BOUND] = {1, XLA_F64},
    [ALIGNMENT] = {1, XLA_S64},   [WINDOW] = {2, XLA_S64}, [COUNT] = {1, XLA_S64},
};

/* Where the attribute of this name goes, and its type; or NULL. */
static void *find_attribute(struct xla_call *call, const struct xla_name *name, int *type) {
    static const char *const sides[] = {"_left", "_right"};
    *type = XLA_S64;
    if (is_called(name, "present", ""))
        return &call->present;
    for (int i = 0; i < N_ATTENTION_NUMBERS; i++) {
        const int n = ATTRIBUTES[cattn_numbers[i].kind].n;
        *type = ATTRIBUTES[cattn_numbers[i].kind].type;
        for (int part = 0; part < n; part++)
            if (is_called(name, cattn_numbers[i].name, n > 1 ? sides[part] : ""))
                return &call->numbers[i][part];
    }
    return NULL;
}

static struct xla_error *parse_numbers(struct xla_call *call) {
    const struct xla_attributes *attributes = &call->frame->attributes;
    int n_attributes = 1;
    for (int i = 0; i < N_ATTENTION_NUMBERS; i++)
        n_attributes += ATTRIBUTES[cattn_numbers[i].kind].n;
    if (attributes->count != n_attributes)
        return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "%d attributes expected, got %lld", n_attributes,
                              (long long)attributes->count);
    for (int i = 0; i < n_attributes; i++) {
        const struct xla_name *name = attributes->names[i];
        const struct xla_scalar *scalar = attributes->types[i] == XLA_SCALAR ? attributes->items[i] : NULL;
        int type;
        void *to = find_attribute(call, name, &type);
        if (to == NULL || scalar == NULL || scalar->type != type)
            return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "attribute %.*s is unknown, or has another type",
                                  (int)name->length, name->text);
        memcpy(to, scalar->value, sizeof(union xla_number));
    }
    return NULL;
}

/* After the type of the computation is known. */
static struct xla_error *check_numbers(const struct xla_call *call) {
    for (int i = 0; i < N_ATTENTION_NUMBERS; i++) {
        const struct cattn_number_row *row = &cattn_numbers[i];
        const double real = call->numbers[i][0].real;
        const int64_t integer = call->numbers[i][0].integer;
        const char *fault =
            ATTRIBUTES[row->kind].type == XLA_F64 ? cattn_number_fault((int)row->kind, real, call->dtype) : NULL;
        if (fault != NULL)
            return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "%s %s, got %s", row->name, fault,
                                  cattn_show_number(real, 6).text);
        if (row->kind == ALIGNMENT && (integer < 0 || integer > XLA_LOWER_RIGHT))
            return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "%s is %lld", row->name, (long long)integer);
    }
    return NULL;
}

/* ---- operands ---- */

/* Puts those that `present` names into call->operands, in order. */
static struct xla_error *take_operands(struct xla_call *call, const struct xla_items *from, int first, int end) {
    int64_t taken = 0;
    for (int i = first; i < end; i++) {
        if (!((uint64_t)call->present >> i & 1))
            continue;
        const struct xla_buffer *buffer = taken < from->count ? from->items[taken] : NULL;
        if (buffer == NULL || from->types[taken] != XLA_BUFFER || buffer->head.size != XLA_SIZE(xla_buffer, dims))
            return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "there is no buffer for %s", DESCRIPTIONS[i].name);
        call->operands[i] = buffer;
        taken++;
    }
    if (taken == from->count)
        return NULL;
    return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "%lld %s expected, got %lld", (long long)taken,
                          first == 0 ? "arguments" : "results", (long long)from->count);
}

static enum cattn_storage storage_of(const struct xla_call *call, enum cattn_operand_kind kind) {
    const enum cattn_storage quantized = kind == KEYS     ? call->quantized_key
                                         : kind == VALUES ? call->quantized_value
                                                          : CATTN_STORED_PLAIN;
    return quantized ? quantized : call->storage;
}

static int xla_type(const struct xla_call *call, enum cattn_operand_kind kind) {
    static const int types[] = {[CATTN_STORED_F16] = XLA_F16,
                                [CATTN_STORED_BF16] = XLA_BF16,
                                [CATTN_STORED_I8] = XLA_S8,
                                [CATTN_STORED_F8] = XLA_F8E4M3FN};
    const int computed = call->dtype == CATTN_F64 ? XLA_F64 : XLA_F32;
    switch (kind) {
    case STORED:
    case GATES:
    case KEYS:
    case VALUES:
        return storage_of(call, kind) == CATTN_STORED_PLAIN ? computed : types[storage_of(call, kind)];
    case SCALES:
        return XLA_F32;
    case COMPUTED:
    case SLOPES:
    case LOGITS:
    case WIDENED:
        return computed;
    case MASK:
    case BLOCKS:
        return XLA_PRED;
    case OFFSETS:
    case QUERY_COUNTS:
    case KEY_COUNTS:
        return XLA_S32;
    case LISTS: /* no call has it */
    case WORDS:
    case N_OPERAND_KINDS:
        break;
    }
    return XLA_U32;
}

static bool holds_integers(enum cattn_operand_kind kind) {
    return kind == OFFSETS || kind == QUERY_COUNTS || kind == KEY_COUNTS;
}

/* Bytes of an element as the core counts them: of WORDS both words, of integers and WIDENED the widened one. */
static size_t element_size(const struct xla_call *call, enum cattn_operand_kind kind) {
    if (holds_integers(kind) || kind == WIDENED || kind == WORDS)
        return sizeof(int64_t);
    switch (xla_type(call, kind)) {
    case XLA_PRED:
    case XLA_S8:
    case XLA_F8E4M3FN:
        return 1;
    case XLA_F16:
    case XLA_BF16:
        return 2;
    case XLA_F32:
        return sizeof(float);
    default:
        return sizeof(double);
    }
}

int64_t cattn_xla_count(const struct xla_buffer *buffer) {
    for (int64_t axis = 0; axis < buffer->rank; axis++)
        if (buffer->dims[axis] == 0)
            return 0; /* beside it, the other sizes could overflow */
    return cattn_count((int)buffer->rank, buffer->dims);
}

size_t cattn_xla_bytes(const struct xla_call *call, int operand) {
    const enum cattn_operand_kind kind = DESCRIPTIONS[operand].kind;
    const size_t element = kind == WORDS || holds_integers(kind) ? sizeof(int32_t) : element_size(call, kind);
    return (size_t)cattn_xla_count(call->operands[operand]) * element;
}

/* The sizes of the call, from query, key, value and the first result. */
static struct xla_error *take_sizes(struct xla_call *call) {
    const int first_result = call->operands[XLA_out] != NULL           ? XLA_out
                             : call->operands[XLA_out_tangent] != NULL ? XLA_out_tangent
                                                                       : XLA_grad_query;
    const int owners[] = {XLA_query, XLA_key, XLA_value, first_result};
    for (int i = 0; i < 4; i++) {
        const struct xla_buffer *buffer = call->operands[owners[i]];
        if (buffer->rank < 4 || buffer->rank - 4 >= CATTN_MAX_BATCH_DIMS)
            return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "%s has %lld dimensions, wanted 4 to %d",
                                  DESCRIPTIONS[owners[i]].name, (long long)buffer->rank, CATTN_MAX_BATCH_DIMS + 3);
        if (owners[i] == first_result)
            continue;
        char axes[MOST_AXES];
        (void)axes_of(owners[i], axes);
        for (int axis = 0; axis < 4; axis++)
            call->sizes[(unsigned char)axes[axis]] = buffer->dims[buffer->rank - 4 + axis];
    }
    call->n_leading = (int)call->operands[first_result]->rank - 4;
    call->leading = call->operands[first_result]->dims;
    /* key has no letter of query's but B and H, whose sizes are checked with all operands */
    call->sizes['W'] = 2;
    const int64_t block = call->numbers[NUMBER_block_size][0].integer;
    if (call->operands[XLA_block_mask] != NULL ? block < 1 : block != 0)
        return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "block_size is %lld %s block_mask", (long long)block,
                              block < 1 ? "with a" : "without a");
    for (int i = 0; i < 2 && block > 0; i++) {
        const int64_t tokens = call->sizes[(unsigned char)"TS"[i]];
        call->sizes[(unsigned char)"XY"[i]] = cattn_ceil_div(tokens, block);
    }
    const int64_t heads = call->sizes['N'], kv_heads = call->sizes['K'];
    if (kv_heads > 0 ? heads % kv_heads == 0 : heads == 0)
        return NULL;
    return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "query has %lld heads, key has %lld: no multiple",
                          (long long)heads, (long long)kv_heads);
}

/* The storage of key or value if it is quantized. Then it has scales, and query is float32. */
static struct xla_error *take_quantized(const struct xla_call *call, int operand, int scale,
                                        enum cattn_storage *quantized) {
    const int type = call->operands[operand]->type;
    const bool is_quantized = type == XLA_S8 || type == XLA_F8E4M3FN;
    if (is_quantized != (call->operands[scale] != NULL))
        return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "%s has element type %d of XLA and %s scale",
                              DESCRIPTIONS[operand].name, type, is_quantized ? "no" : "a");
    if (!is_quantized)
        return NULL;
    if (call->operands[XLA_query]->type != XLA_F32)
        return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT,
                              "%s is quantized, but query has element type %d of XLA", DESCRIPTIONS[operand].name,
                              call->operands[XLA_query]->type);
    *quantized = type == XLA_S8 ? CATTN_STORED_I8 : CATTN_STORED_F8;
    return NULL;
}

static struct xla_error *take_types(struct xla_call *call) {
    const int type = call->operands[XLA_query]->type;
    call->dtype = type == XLA_F64 ? CATTN_F64 : CATTN_F32;
    call->storage = type == XLA_F16 ? CATTN_STORED_F16 : type == XLA_BF16 ? CATTN_STORED_BF16 : CATTN_STORED_PLAIN;
    if (type != xla_type(call, STORED))
        return cattn_xla_fail(call->frame, XLA_UNIMPLEMENTED, "query has element type %d of XLA", type);
    struct xla_error *error = take_quantized(call, XLA_key, XLA_key_scale, &call->quantized_key);
    return error != NULL ? error : take_quantized(call, XLA_value, XLA_value_scale, &call->quantized_value);
}

static struct xla_error *check_operand(const struct xla_call *call, int i) {
    const struct description *d = &DESCRIPTIONS[i];
    const struct xla_buffer *buffer = call->operands[i];
    char axes[MOST_AXES];
    const int nd = call->n_leading + axes_of(i, axes);
    if (buffer->type != xla_type(call, d->kind) || buffer->rank != nd)
        return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT,
                              "%s has element type %d and %lld dimensions, wanted %d and %d", d->name, buffer->type,
                              (long long)buffer->rank, xla_type(call, d->kind), nd);
    for (int axis = 0; axis < nd; axis++) {
        const bool leads = axis < call->n_leading;
        const int64_t own = buffer->dims[axis];
        const int64_t size = leads ? call->leading[axis] : call->sizes[(unsigned char)axes[axis - call->n_leading]];
        const bool broadcasts = leads ? i < XLA_N_ARGUMENTS : d->fits == BROADCASTS;
        if (own != size && !(broadcasts && own == 1))
            return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "%s has size %lld on axis %d, wanted %lld",
                                  d->name, (long long)own, axis, (long long)size);
    }
    const bool is_copied = holds_integers(d->kind) || d->kind == WIDENED;
    if ((uintptr_t)buffer->data % (is_copied ? sizeof(int32_t) : element_size(call, d->kind)) != 0)
        return cattn_xla_fail(call->frame, XLA_INTERNAL, "%s is not aligned", d->name);
    return NULL;
}

/* ---- numbers in operands ---- */

static void fail(void *context, enum cattn_fault fault, const char *text) {
    struct xla_call *call = context;
    (void)fault;
    call->error = cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT, "%s", text);
}

struct cattn_door cattn_xla_door(struct xla_call *call) { return (struct cattn_door){.context = call, .fail = fail}; }

/* A buffer as the checks of call/ read it. */
static void freeze(const struct xla_call *call, int i, struct cattn_array *array) {
    const struct xla_buffer *buffer = call->operands[i];
    const bool is_integer = holds_integers(DESCRIPTIONS[i].kind);
    array->name = DESCRIPTIONS[i].name;
    array->data = buffer->data;
    array->kind = is_integer ? 'i' : 'f';
    array->is_swapped = false;
    array->size = is_integer || call->dtype == CATTN_F32 || DESCRIPTIONS[i].kind == SCALES ? 4 : 8;
    array->nd = (int)buffer->rank;
    int64_t stride = array->size;
    for (int axis = array->nd - 1; axis >= 0; axis--) {
        array->dims[axis] = buffer->dims[axis];
        array->strides[axis] = stride;
        stride = (int64_t)((uint64_t)stride * (uint64_t)buffer->dims[axis]); /* wraps in an empty buffer only */
    }
}

static void widen_reals(const struct cattn_array *array, int64_t count, double *to) {
    const unsigned mode = cattn_fp_enter();
    for (int64_t i = 0; i < count; i++)
        to[i] = array->size == 8 ? ((const double *)(const void *)array->data)[i]
                                 : (double)((const float *)(const void *)array->data)[i];
    cattn_fp_leave(mode);
}

/* Checks numbers that the core checks no more, and widens those that it takes in 64 bits. A length or start may be any
 * number, as in JAX; the core wants one within the array. Subnormal numbers keep their values, whatever mode XLA runs
 * in. */
static struct xla_error *take_numbers(struct xla_call *call, int i) {
    const enum cattn_operand_kind kind = DESCRIPTIONS[i].kind;
    const struct cattn_door door = cattn_xla_door(call);
    const int64_t count = cattn_xla_count(call->operands[i]);
    struct cattn_array array;
    float wrong;
    freeze(call, i, &array);
    if ((holds_integers(kind) || kind == WIDENED) &&
        (call->widened[i] = malloc((size_t)(count > 0 ? count : 1) * sizeof(int64_t))) == NULL)
        return cattn_xla_fail(call->frame, XLA_RESOURCE_EXHAUSTED, "no memory for %s", DESCRIPTIONS[i].name);
    if (kind == OFFSETS)
        (void)cattn_read_integers(&door, &array, INT32_MIN, INT32_MAX, CATTN_CLIPPED, call->widened[i]);
    else if (holds_integers(kind))
        (void)cattn_read_integers(&door, &array, 0, call->sizes[kind == QUERY_COUNTS ? 'T' : 'S'], CATTN_CLIPPED,
                                  call->widened[i]);
    else if (kind == WIDENED)
        widen_reals(&array, count, call->widened[i]);
    else if (kind == SLOPES || kind == LOGITS)
        (void)cattn_check_heads(&door, &array, kind, call->dtype, NULL);
    else if (kind == SCALES && !cattn_are_scales(&array, &wrong))
        return cattn_xla_fail(call->frame, XLA_INVALID_ARGUMENT,
                              "%s must be positive and finite, from 2**-100 to 2**100, got %s", array.name,
                              cattn_show_number((double)wrong, 6).text);
    return call->error;
}

struct xla_error *cattn_xla_parse(struct xla_call *call, const struct xla_frame *frame, uint64_t required,
                                  uint64_t allowed) {
    memset(call, 0, sizeof *call);
    call->frame = frame;
    if (!has_known_layout(frame) || frame->stage != XLA_EXECUTE)
        return cattn_xla_fail(frame, XLA_UNIMPLEMENTED, "this version of XLA passes other call frames");
    struct xla_error *error = parse_numbers(call);
    const uint64_t present = (uint64_t)call->present;
    if (error == NULL && ((present & required) != required || (present & ~allowed) != 0))
        error = cattn_xla_fail(frame, XLA_INVALID_ARGUMENT, "present is %#llx, which lacks operands or has too many",
                               (unsigned long long)present);
    if (error == NULL)
        error = take_operands(call, &frame->arguments, 0, XLA_N_ARGUMENTS);
    if (error == NULL)
        error = take_operands(call, &frame->results, XLA_N_ARGUMENTS, XLA_N_OPERANDS);
    if (error == NULL)
        error = take_sizes(call);
    if (error == NULL)
        error = take_types(call);
    if (error == NULL)
        error = check_numbers(call);
    for (int i = 0; error == NULL && i < XLA_N_OPERANDS; i++) {
        if (call->operands[i] == NULL)
            continue;
        error = check_operand(call, i);
        if (error == NULL)
            error = take_numbers(call, i);
    }
    return error;
}

void cattn_xla_clear(struct xla_call *call) {
    for (int i = 0; i < XLA_N_OPERANDS; i++)
        free(call->widened[i]);
}

/* ---- views ---- */

/* Where the stride of an axis belongs. S is a column in the scores, else a row. */
static int64_t *stride_of(struct cattn_tensor *tensor, const char *axes, int letter, int n_batch_dims) {
    switch (letter) {
    case 'B':
        return &tensor->batch[n_batch_dims - 1];
    case 'N':
    case 'K':
        return &tensor->head;
    case 'T':
    case 'X':
        return &tensor->row;
    case 'S':
        return strchr(axes, 'T') != NULL ? &tensor->col : &tensor->row;
    default:
        return &tensor->col;
    }
}

void cattn_xla_view(const struct xla_call *call, int operand, int64_t leading_index, struct cattn_tensor *tensor) {
    static int64_t nothing; /* an empty buffer may have no address, but an absent tensor is another one */
    const struct xla_buffer *buffer = call->operands[operand];
    const struct description *d = &DESCRIPTIONS[operand];
    char axes[MOST_AXES];
    (void)axes_of(operand, axes);
    const bool splits = leading_index >= 0;
    const int n_batch_dims = 1 + (splits ? 0 : call->n_leading);
    if (buffer == NULL)
        return;
    tensor->head = tensor->row = tensor->col = 0;
    for (int axis = 0; axis < n_batch_dims; axis++)
        tensor->batch[axis] = 0;
    int64_t stride = 1, offset = 0;
    for (int axis = (int)buffer->rank - 1; axis >= 0; axis--) {
        const int64_t size = buffer->dims[axis], own = size == 1 ? 0 : stride;
        const bool leads = axis < call->n_leading;
        const int letter = leads ? 0 : (unsigned char)axes[axis - call->n_leading];
        if (letter == 'W')
            continue; /* both words are one element */
        if (leads && splits) {
            offset += leading_index % call->leading[axis] * own;
            leading_index /= call->leading[axis];
        } else if (leads) {
            tensor->batch[axis] = own;
        } else {
            *stride_of(tensor, d->axes, letter, n_batch_dims) = own;
        }
        stride = (int64_t)((uint64_t)stride * (uint64_t)size); /* wraps in an empty buffer only */
    }
    if (d->fits == EXACTLY && strpbrk(d->axes, "HD") != NULL)
        tensor->col = 1; /* even if there is one column */
    char *data = call->widened[operand] != NULL ? call->widened[operand] : buffer->data;
    tensor->data = data != NULL ? data + offset * (int64_t)element_size(call, d->kind) : (void *)&nothing;
}
