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
