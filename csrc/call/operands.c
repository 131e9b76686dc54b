/* operands.c -- the rows of the table as data. See operands.h. */
#include "operands.h"

#define OPERAND_ROW(name, axes, kind, fits, calls, view)                                                               \
    {#name, axes, kind, fits, calls, offsetof(struct cattn_attention_params, view)},
const struct cattn_operand_row cattn_operands[] = {ATTENTION_OPERANDS(OPERAND_ROW)};

#define NUMBER_ROW(name, kind, place, stage) {#name, kind, place, CATTN_STAGE_##stage},
const struct cattn_number_row cattn_numbers[] = {ATTENTION_NUMBERS(NUMBER_ROW)};

#define TEXT(name) #name,
const char *const cattn_operand_kinds[] = {OPERAND_KINDS(TEXT)};
const char *const cattn_number_kinds[] = {NUMBER_KINDS(TEXT)};
const char *const cattn_call_kinds[] = {CALL_KINDS(TEXT)};

struct cattn_tensor *cattn_operand_view(struct cattn_attention_params *params, int operand) {
    return (struct cattn_tensor *)(void *)((char *)params + cattn_operands[operand].view);
}

double *cattn_number_place(struct cattn_attention_params *params, int number) {
    const size_t place = cattn_numbers[number].place;
    return place == NO_PLACE ? NULL : (double *)(void *)((char *)params + place);
}

/* The first stage that has arrays of this kind. */
static enum cattn_stage stage_of(enum cattn_operand_kind kind) {
    const bool is_mask = kind == MASK || kind == BLOCKS, is_bias = kind == COMPUTED || kind == SLOPES;
    return is_mask ? CATTN_STAGE_MASK : is_bias ? CATTN_STAGE_BIAS : CATTN_STAGE_QK;
}

void cattn_stop_at(struct cattn_attention_params *params, enum cattn_stage stage) {
    params->store_scores = stage < CATTN_STAGE_SOFTMAX;
    if (stage < CATTN_STAGE_DROPOUT)
        params->dropout.enabled = false;
    if (stage < CATTN_STAGE_BIAS)
        params->n_bias = 0;
    if (stage < CATTN_STAGE_MASK)
        params->ranges.all_visible = true;
    for (int i = 0; i < N_ATTENTION_NUMBERS && stage < CATTN_STAGE_SOFTMAX; i++)
        if (stage < cattn_numbers[i].stage)
            *cattn_number_place(params, i) = 0;
    for (int i = 0; i < N_ATTENTION_OPERANDS && stage < CATTN_STAGE_SOFTMAX; i++)
        if (stage < stage_of(cattn_operands[i].kind))
            cattn_operand_view(params, i)->data = NULL;
}
