/* call.h -- the functions that XLA calls, and one call on its way from the frame to the core: operands, sizes, numbers.
 *
 * XLA calls them on its own threads and without the GIL. cattn.integrations.jax knows their arguments.
 */
#ifndef CATTN_XLA_CALL_H
#define CATTN_XLA_CALL_H

#include "../call/check.h"
#include "ffi.h"

/* Attention and its derivatives. */
struct xla_error *cattn_xla_forward(struct xla_frame *frame);
struct xla_error *cattn_xla_backward(struct xla_frame *frame);
struct xla_error *cattn_xla_jvp(struct xla_frame *frame);
struct xla_error *cattn_xla_jvp_backward(struct xla_frame *frame);

/* Whether the frame only asks for the handler's metadata, which it then gets. XLA does so when JAX starts its CPU. */
bool cattn_xla_describe(const struct xla_frame *frame);
/* Whether XLA has asked for metadata, every time by a frame of the known layout. */
bool cattn_xla_is_known(void);

/* The operands of the handlers: the table of attention, whose order is the one here, and then these. A call has those
 * that are the bits of its attribute `present`; cattn.integrations.jax reads the names from `_cattn._xla_operands`. The
 * letters are in call/operands.h. W is the two words of a number. XLA's order of the axes, with the batch and the
 * tokens in front, is a permutation of the letters (axes_of in call.c). vmap puts more axes before them: the leading
 * axes.
 *
 * OPERAND(name, axes, kind, fits, calls) */
#define XLA_OWN_ARGUMENTS(OPERAND)                                                                                     \
    OPERAND(dropout_seed, "W", WORDS, EXACTLY, IN_XLA)                                                                 \
    OPERAND(forward_out, "NTD", STORED, EXACTLY, IN_XLA)                                                               \
    OPERAND(forward_lse, "NTW", WORDS, EXACTLY, IN_XLA)                                                                \
    OPERAND(grad_out, "NTD", STORED, EXACTLY, IN_XLA)                                                                  \
    OPERAND(grad_residual, "NT", WIDENED, EXACTLY, IN_XLA)                                                             \
    OPERAND(query_tangent, "NTH", STORED, EXACTLY, IN_XLA)                                                             \
    OPERAND(key_tangent, "KSH", STORED, EXACTLY, IN_XLA)                                                               \
    OPERAND(value_tangent, "KSD", STORED, EXACTLY, IN_XLA)                                                             \
    OPERAND(bias_tangent, "NTS", COMPUTED, BROADCASTS, IN_XLA)                                                         \
    OPERAND(sinks_tangent, "N", COMPUTED, BROADCASTS, IN_XLA)                                                          \
    OPERAND(forward_out_tangent, "NTD", STORED, EXACTLY, IN_XLA)                                                       \
    OPERAND(forward_lse_tangent, "NT", COMPUTED, EXACTLY, IN_XLA)
#define XLA_ARGUMENTS(OPERAND) ATTENTION_OPERANDS(OPERAND) XLA_OWN_ARGUMENTS(OPERAND)
#define XLA_RESULTS(OPERAND)                                                                                           \
    OPERAND(out, "NTD", STORED, EXACTLY, IN_XLA)                                                                       \
    OPERAND(residual, "NT", COMPUTED, EXACTLY, IN_XLA)                                                                 \
    OPERAND(lse, "NTW", WORDS, EXACTLY, IN_XLA)                                                                        \
    OPERAND(out_tangent, "NTD", STORED, EXACTLY, IN_XLA)                                                               \
    OPERAND(lse_tangent, "NT", COMPUTED, EXACTLY, IN_XLA)                                                              \
    OPERAND(grad_query, "NTH", COMPUTED, EXACTLY, IN_XLA)                                                              \
    OPERAND(grad_key, "KSH", COMPUTED, EXACTLY, IN_XLA)                                                                \
    OPERAND(grad_value, "KSD", COMPUTED, EXACTLY, IN_XLA)                                                              \
    OPERAND(grad_bias, "NTS", COMPUTED, BROADCASTS, IN_XLA)                                                            \
    OPERAND(grad_sinks, "N", COMPUTED, EXACTLY, IN_XLA)                                                                \
    OPERAND(grad_gate, "NTD", COMPUTED, EXACTLY, IN_XLA)

#define XLA_INDEX(name, ...) XLA_##name,
enum { XLA_ARGUMENTS(XLA_INDEX) XLA_N_ARGUMENTS };
enum { XLA_BEFORE_RESULTS = XLA_N_ARGUMENTS - 1, XLA_RESULTS(XLA_INDEX) XLA_N_OPERANDS };
extern const char *const cattn_xla_operands[XLA_N_OPERANDS];

/* A number of the table. It is known when the program is compiled, and comes as an attribute of the handlers by the
 * name of its row; all else is an operand. A PROBABILITY, REAL or BOUND is real, None 0. ALIGNMENT is 0 for none, else
 * an xla_corner; COUNT is 0 for None; WINDOW is two attributes, name_left and name_right, -1 for no bound. */
union xla_number {
    double real;
    int64_t integer;
};
enum xla_corner { XLA_UPPER_LEFT = 1, XLA_LOWER_RIGHT };

struct xla_call {
    const struct xla_frame *frame;
    struct xla_error *error;                           /* of a check of call/ */
    int64_t present;                                   /* the attribute */
    union xla_number numbers[N_ATTENTION_NUMBERS][2];  /* of a window both are used */
    const struct xla_buffer *operands[XLA_N_OPERANDS]; /* NULL: this call does not have it */
    void *widened[XLA_N_OPERANDS];                     /* owned: numbers of batch entries as int64, WIDENED as double */
    int n_leading;
    const int64_t *leading; /* the leading axes of the results */
    enum cattn_dtype dtype;
    enum cattn_storage storage, quantized_key, quantized_value;
    int64_t sizes[128]; /* by letter */
};

/* An error of XLA's with a text that names the target. */
__attribute__((format(printf, 3, 4))) struct xla_error *cattn_xla_fail(const struct xla_frame *frame, int code,
                                                                       const char *format, ...);

/* For the checks of call/, whose errors become the call's. */
struct cattn_door cattn_xla_door(struct xla_call *call);

/* Reads and checks all of the frame. Returns an error or NULL; in both cases the caller clears the call. The bits of
 * `required` are the operands that the handler cannot do without, `allowed` all that it knows. */
struct xla_error *cattn_xla_parse(struct xla_call *call, const struct xla_frame *frame, uint64_t required,
                                  uint64_t allowed);
void cattn_xla_clear(struct xla_call *call);

/* Elements and bytes of an operand. */
int64_t cattn_xla_count(const struct xla_buffer *buffer);
size_t cattn_xla_bytes(const struct xla_call *call, int operand);

/* A view of an operand, absent if the call does not have it. leading_index < 0: the leading axes are batch dimensions;
 * else it is the part that belongs to this index into them. */
void cattn_xla_view(const struct xla_call *call, int operand, int64_t leading_index, struct cattn_tensor *tensor);

#endif
