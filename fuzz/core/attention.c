/* attention.c -- fuzz target: attention and its gradients, computed in two ways.
 *
 * The second call uses another table, path and number of threads, arrays elsewhere in memory, NaN in everything that no
 * query sees, and float32 numbers in the place of quantized ones. Every output must have the same bits.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"
#include "targets.h"
#include "visible.h"

static const char *const INPUT_NAMES[] = {
    "query was changed",          "key was changed",          "value was changed",
    "attn_mask was changed",      "bias was changed",         "second bias was changed",
    "slopes were changed",        "sinks were changed",       "offsets were changed",
    "query lengths were changed", "key lengths were changed", "first keys were changed",
    "key_scale was changed",      "value_scale was changed"};
static const char *const OUTPUT_NAMES[] = {"out differs", "weights differ", "lse differs", "dropout_mask differs"};
static const char *const GRADIENT_NAMES[] = {"grad_query differs", "grad_key differs", "grad_value differs",
                                             "grad_bias differs", "grad_sinks differ"};

/* ---- arrays to parameters ---- */

enum { HEAD = 1, ROW = 2, COL = 4 };

/* Sets a tensor as the binding does. */
static void to_tensor(struct cattn_tensor *tensor, const struct array *array, bool present, int n_batch_dims,
                      int axes) {
    static uint64_t nothing;
    tensor->data = NULL;
    if (!present)
        return;
    int axis = array->n_axes;
    tensor->data = array->span ? array->memory + array->low * (int64_t)element_size(array->element) : (void *)&nothing;
    tensor->col = axes & COL ? array->stride[--axis] : 0;
    if (axes & COL && array->dim[axis] == 1)
        tensor->col = 1;
    tensor->row = axes & ROW ? array->stride[--axis] : 0;
    tensor->head = axes & HEAD ? array->stride[--axis] : 0;
    for (int d = n_batch_dims - 1; d >= 0; d--)
        tensor->batch[d] = array->stride[--axis];
}

static void fill_params(struct problem *problem) {
    struct cattn_backward_params *back = &problem->back;
    struct cattn_attention_params *p = &back->forward;
    const int n = p->n_batch_dims;
    const struct {
        struct cattn_tensor *tensor;
        int axes;
    } inputs[] = {{&p->query, HEAD | ROW | COL},
                  {&p->key, HEAD | ROW | COL},
                  {&p->value, HEAD | ROW | COL},
                  {&p->attn_mask, HEAD | ROW | COL},
                  {&p->bias[0], HEAD | ROW | COL},
                  {&p->bias[1], HEAD | ROW | COL},
                  {&p->slopes, HEAD},
                  {&p->sinks, HEAD},
                  {&p->ranges.offsets, 0},
                  {&p->ranges.query_lengths, 0},
                  {&p->ranges.key_lengths, 0},
                  {&p->ranges.first_keys, 0},
                  {&p->key_scale, HEAD | ROW | COL},
                  {&p->value_scale, HEAD | ROW | COL}},
      outputs[] = {{&p->out, HEAD | ROW | COL},
                   {&p->weights, HEAD | ROW | COL},
                   {&p->lse, HEAD | ROW},
                   {&p->dropout_mask, HEAD | ROW | COL}},
      gradients[] = {{&back->grad_query, HEAD | ROW | COL},
                     {&back->grad_key, HEAD | ROW | COL},
                     {&back->grad_value, HEAD | ROW | COL},
                     {&back->grad_bias, HEAD | ROW | COL},
                     {&back->grad_sinks, HEAD}};
    for (int i = 0; i < N_INPUTS; i++)
        to_tensor(inputs[i].tensor, &problem->inputs[i], problem->has_input[i], n, inputs[i].axes);
    for (int i = 0; i < N_OUTPUTS; i++)
        to_tensor(outputs[i].tensor, &problem->outputs[i], problem->has_output[i], n, outputs[i].axes);
    for (int i = 0; i < N_GRADIENTS; i++)
        to_tensor(gradients[i].tensor, &problem->gradients[i], problem->has_gradient[i], n, gradients[i].axes);
    to_tensor(&back->grad_out, &problem->grad_out, problem->backward, n, HEAD | ROW | COL);
    to_tensor(&back->grad_lse, &problem->grad_lse, problem->has_grad_lse, n, HEAD | ROW);
    p->query_starts.data = p->key_starts.data = NULL;
}

/* ---- computing ---- */

static void choose_way(struct input way, struct cattn_attention_params *p) {
    static const enum cattn_path paths[] = {CATTN_PATH_AUTO, CATTN_PATH_TILE,  CATTN_PATH_TILE,
                                            CATTN_PATH_ROWS, CATTN_PATH_SPLIT, CATTN_PATH_TINY};
    choose_table(&way);
    p->num_threads = choose_threads(&way);
    p->path = TAKE_FROM(&way, paths);
}

static void compute(struct problem *problem, const struct cattn_torch_random *torch) {
    struct cattn_attention_params *p = &problem->back.forward;
    problem->torch = *torch;
    fill_params(problem);
    if (!cattn_attention_path_fits(p)) /* the tiny path depends on strides and outputs */
        p->path = CATTN_PATH_AUTO;
    if (cattn_attention(p) != CATTN_OK)
        finding("attention failed");
    if (!problem->backward)
        return;
    problem->torch = *torch;
    p->path = CATTN_PATH_TILE;
    if (cattn_attention_backward(&problem->back) != CATTN_OK)
        finding("attention_backward failed");
}

/* Inputs of moderate size must give finite results. */
static void check_tame(const struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    for (int i = OUT; i <= WEIGHTS; i++)
        for (struct cursor c = walk(&problem->outputs[i]); problem->has_output[i] && c.more; step(&c)) {
            const double x = number_at(&problem->outputs[i], c.offset);
            if (!(isfinite(x) || (i == WEIGHTS && p->store_scores && x == (double)-INFINITY)))
                finding(i == OUT ? "out is not finite" : "weights are not finite");
            if (i == WEIGHTS && !p->store_scores && !(x >= 0 && x <= 1.001))
                finding("a weight is no probability");
        }
    for (int i = 0; i < N_GRADIENTS; i++)
        for (struct cursor c = walk(&problem->gradients[i]); problem->has_gradient[i] && c.more; step(&c))
            if (!isfinite(number_at(&problem->gradients[i], c.offset)))
                finding("a gradient is not finite");
}

static void check_memory(const struct problem *problem) {
    for (int i = 0; i < N_INPUTS; i++)
        if (problem->has_input[i])
            check_untouched(&problem->inputs[i], INPUT_NAMES[i]);
    for (int i = 0; i < N_OUTPUTS; i++)
        if (problem->has_output[i])
            check_untouched(&problem->outputs[i], "written between the elements of an output");
    if (problem->backward)
        check_untouched(&problem->grad_out, "grad_out was changed");
}

/* Prints the problem if CATTN_FUZZ_SAY is set in the environment. */
static void say(const struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    const struct cattn_ranges *r = &p->ranges;
    if (!getenv("CATTN_FUZZ_SAY"))
        return;
    fprintf(stderr, "%s, table %s, path %d, threads %d, dtype %d, storage %d, of key %d, of value %d\n",
            problem->backward ? "backward" : "forward", cattn_isa_info(cattn_isa_current()).name, p->path,
            p->num_threads, p->dtype, p->storage, p->quantized_key, p->quantized_value);
    fprintf(stderr, "batch %lld, heads %lld / %lld, T_q %lld, T_k %lld, D %lld, D_v %lld, scale %g, softcap %g\n",
            (long long)p->n_batch, (long long)p->num_heads, (long long)p->group_size, (long long)p->seqlen_q,
            (long long)p->seqlen_k, (long long)p->head_dim, (long long)p->d_v, p->score_options.scale,
            p->score_options.softcap);
    fprintf(stderr, "left %lld, right %lld, offset %lld%s, dropout %d, bias_sum %d, outputs of bias axes %x, inputs",
            (long long)r->left, (long long)r->right, (long long)r->offset, r->lower_right ? " lower right" : "",
            p->dropout.enabled, problem->back.bias_sum, problem->bias_broadcast);
    for (int i = 0; i < N_INPUTS; i++)
        if (problem->has_input[i])
            fprintf(stderr, " %.*s", (int)strcspn(INPUT_NAMES[i], " "), INPUT_NAMES[i]);
    fprintf(stderr, "%s\n", problem->is_tame ? "" : ", extreme numbers");
}

void fuzz_attention(struct input *in) {
    struct problem problem = {0};
    const struct input ways[] = {cut_off(in, 3), cut_off(in, 3)}; /* first, so that short inputs choose them too */
    const bool contiguous = take_chance(in, 3);
    choose_problem(in, &problem);
    const struct cattn_torch_random torch = problem.torch;
    choose_way(ways[0], &problem.back.forward);
    say(&problem);
    compute(&problem, &torch);
    check_memory(&problem);
    if (problem.is_tame)
        check_tame(&problem);
    check_explanation(&problem);
    void *outputs[N_OUTPUTS] = {NULL}, *gradients[N_GRADIENTS] = {NULL};
    for (int i = 0; i < N_OUTPUTS; i++)
        outputs[i] = problem.has_output[i] ? gathered(&problem.outputs[i]) : NULL;
    for (int i = 0; i < N_GRADIENTS; i++)
        gradients[i] = problem.has_gradient[i] ? gathered(&problem.gradients[i]) : NULL;
    uint8_t after[CATTN_TORCH_STATE_BYTES], again[CATTN_TORCH_STATE_BYTES];
    cattn_torch_export(&problem.torch, after);

    for (int i = 0; i < N_INPUTS; i++)
        if (problem.has_input[i])
            move_array(&problem.inputs[i], contiguous);
    for (int i = 0; i < N_OUTPUTS; i++)
        if (problem.has_output[i])
            move_array(&problem.outputs[i], contiguous);
    if (problem.backward)
        move_array(&problem.grad_out, contiguous);
    if (problem.has_grad_lse)
        move_array(&problem.grad_lse, contiguous);
    for (int i = 0; i < N_GRADIENTS; i++)
        if (problem.has_gradient[i])
            memset(problem.gradients[i].memory, 0,
                   (size_t)problem.gradients[i].span * element_size(problem.gradients[i].element));
    if (!problem.back.forward.store_scores && !problem.back.forward.ranges.all_visible)
        poison_hidden(&problem);
    if (problem.dequantizes)
        dequantize(&problem);
    choose_way(ways[1], &problem.back.forward);
    say(&problem);
    compute(&problem, &torch);
    check_memory(&problem);
    for (int i = 0; i < N_OUTPUTS; i++)
        if (outputs[i])
            check_same(&problem.outputs[i], outputs[i], OUTPUT_NAMES[i]);
    for (int i = 0; i < N_GRADIENTS; i++)
        if (gradients[i])
            check_same(&problem.gradients[i], gradients[i], GRADIENT_NAMES[i]);
    cattn_torch_export(&problem.torch, again);
    if (memcmp(after, again, sizeof after) != 0)
        finding("the generator stands elsewhere");
    for (int i = 0; i < N_OUTPUTS; i++)
        free(outputs[i]);
    for (int i = 0; i < N_GRADIENTS; i++)
        free(gradients[i]);
}
