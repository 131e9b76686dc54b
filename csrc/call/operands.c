/* operands.c -- the rows of the table as data. See operands.h. */
#include "operands.h"

#define OPERAND_ROW(name, axes, kind, fits, calls, view)                                                               \
    {#name, axes, kind, fits, calls, offsetof(struct cattn_attention_params, view)},
const struct cattn_operand_row cattn_operands[] = {ATTENTION_OPERANDS(OPERAND_ROW)};

#define NUMBER_ROW(name, kind) {#name, kind},
const struct cattn_number_row cattn_numbers[] = {ATTENTION_NUMBERS(NUMBER_ROW)};

#define TEXT(name) #name,
const char *const cattn_operand_kinds[] = {OPERAND_KINDS(TEXT)};
const char *const cattn_number_kinds[] = {NUMBER_KINDS(TEXT)};
const char *const cattn_call_kinds[] = {CALL_KINDS(TEXT)};

struct cattn_tensor *cattn_operand_view(struct cattn_attention_params *params, int operand) {
    return (struct cattn_tensor *)(void *)((char *)params + cattn_operands[operand].view);
}

void cattn_stop_at(struct cattn_attention_params *params, enum cattn_stage stage) {
    params->store_scores = stage < CATTN_STAGE_SOFTMAX;
    if (stage < CATTN_STAGE_DROPOUT)
        params->dropout.enabled = false;
    if (stage < CATTN_STAGE_SOFTCAP)
        params->score_options.softcap = 0;
    if (stage < CATTN_STAGE_BIAS) {
        params->slopes.data = NULL;
        params->n_bias = 0;
    }
    if (stage < CATTN_STAGE_MASK) {
        params->attn_mask.data = params->block_mask.data = NULL;
        params->ranges.all_visible = true;
    }
}
