/* rounded_keys.h -- keys and values rounded to bfloat16 once a call, instead of once a task. */
#ifndef CATTN_ROUNDED_KEYS_H
#define CATTN_ROUNDED_KEYS_H

#include "../cattn.h"
#include "../kernels/kernels.h"

/* A call that reads rounded copies of keys and values: `params` holds them as CATTN_STORED_BF16 in place of a quantized
 * storage, without scales. The tables of tiles read them packed. */
struct cattn_rounded_keys {
    struct cattn_attention_params params;
    /* from here on for rounded_keys.c */
    const struct cattn_attention_params *from;
    const struct cattn_kernels *kernels;
    int64_t kv_heads, n_pieces;
};

/* Whether enough queries read each key that a copy is worth its time. */
bool cattn_rounds_keys(const struct cattn_attention_params *params);

/* Makes the copies. *rounded is NULL if there is no memory for them: then the call is computed without. Free it after
 * the call. */
enum cattn_status cattn_round_keys(const struct cattn_attention_params *params, struct cattn_rounded_keys **rounded);

#endif
