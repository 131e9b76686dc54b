/* causal_mask.c -- causal_mask(...): which key each query sees, as a boolean array. */
#include "error.h"
#include "gil.h"
#include "key_ranges.h"
#include "numbers.h"
#include "outputs.h"
#include "rowwise_args.h"

static enum cattn_status compute(const void *params) { return cattn_mask(params); }

PyObject *cattn_body_causal_mask(struct binding_state *state, PyObject **args) {
    struct cattn_range_args parsed = {0};
    struct cattn_mask_params params = {.num_threads = cattn_get_num_threads()};
    struct cattn_output output = {NULL, NULL};
    PyObject *result = NULL, *T_k = args[CAUSAL_MASK_T_k] == Py_None ? args[CAUSAL_MASK_T_q] : args[CAUSAL_MASK_T_k];
    PyObject *is_causal = args[CAUSAL_MASK_is_causal];
    /* lower_right is the default: an offset overrides it */
    if (args[CAUSAL_MASK_query_offset] != Py_None && cattn_arg_is(is_causal, state->lower_right))
        is_causal = state->upper_left;
    if (!cattn_arg_count(args[CAUSAL_MASK_T_q], "T_q", 0, NPY_MAX_INTP, &params.seqlen_q) ||
        !cattn_arg_count(T_k, "T_k", 0, NPY_MAX_INTP, &params.seqlen_k) ||
        !cattn_arg_ranges(state, is_causal, args[CAUSAL_MASK_query_offset], args[CAUSAL_MASK_window_size], &parsed))
        goto done;
    if (parsed.offsets != NULL) {
        cattn_error_type("query_offset", "an int", args[CAUSAL_MASK_query_offset]);
        goto done;
    }
    const npy_intp dims[2] = {(npy_intp)params.seqlen_q, (npy_intp)params.seqlen_k};
    const struct cattn_range_sizes sizes = {.seqlen_q = dims[0],
                                            .seqlen_k = dims[1],
                                            .query_lengths = Py_None,
                                            .key_lengths = Py_None,
                                            .first_keys = Py_None};
    const struct cattn_output_spec spec = {.name = "the mask", .type = NPY_BOOL, .nd = 2, .dims = dims};
    if (!cattn_ranges_settle(state, &parsed, &sizes, &params.ranges) || !cattn_arg_output(state, NULL, &spec, &output))
        goto done;
    params.mask = (uint8_t *)PyArray_BYTES(output.array);
    const bool brief = PyArray_SIZE(output.array) <= CATTN_GIL_ELEMENTS;
    if (cattn_error_status(cattn_compute(brief, &params.poll, compute, &params)))
        result = cattn_output_result(&output);
done:
    cattn_ranges_clear(&parsed);
    cattn_output_clear(&output);
    return result;
}
