/* stream.c -- fuzz target: PyTorch's random numbers. A generator whose state was exported and imported draws the same
 * numbers. Numbers are inside their bounds. Importing bytes that are no state changes nothing.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "targets.h"
#include "torch_random.h"

static struct cattn_torch_fill choose_fill(struct input *in, enum cattn_torch_distribution distribution) {
    static const double lows[] = {0, -1, 0.25, -3e38};
    static const double probabilities[] = {0.5, 0, 1, 0.1};
    struct cattn_torch_fill fill = {.distribution = distribution};
    fill.dtype = take_chance(in, 2) ? CATTN_F32 : CATTN_F64;
    fill.n = take_below(in, 40) * (1 + take_below(in, 60));
    fill.low = TAKE_FROM(in, lows);
    fill.high = fill.low < -4 ? 0 : fill.low + (double)take_below(in, 3);
    fill.range = take_chance(in, 2) ? 1 + (uint64_t)take_byte(in) : take_word(in) | 1;
    fill.base = -(int64_t)take_byte(in);
    fill.skip = distribution == CATTN_TORCH_DROPOUT_MASK ? take_below(in, 5000) : 0;
    fill.probability = TAKE_FROM(in, probabilities);
    if (distribution == CATTN_TORCH_DROPOUT_MASK && (fill.probability == 0 || fill.probability == 1))
        fill.probability = 0.5;
    return fill;
}

static enum element element_of(const struct cattn_torch_fill *fill) {
    return fill->distribution == CATTN_TORCH_DROPOUT_MASK ? BYTE
           : fill->distribution == CATTN_TORCH_INTEGER    ? INT64
                                                          : computed_element(fill->dtype);
}

static void check_number(const struct cattn_torch_fill *fill, double x) {
    switch (fill->distribution) {
    case CATTN_TORCH_UNIFORM:
        if (!(x >= fill->low && x <= fill->high && (x < fill->high || fill->low == fill->high)))
            finding("a uniform number is out of bounds");
        return;
    case CATTN_TORCH_NORMAL:
        if (!(fabs(x) < 40))
            finding("a normal number is out of bounds");
        return;
    case CATTN_TORCH_INTEGER:
        if (fill->range < 1000 && !(x >= (double)fill->base && x < (double)fill->base + (double)fill->range))
            finding("an integer is out of bounds");
        return;
    case CATTN_TORCH_BERNOULLI:
    case CATTN_TORCH_DROPOUT_MASK:
        if (x != 0 && x != 1)
            finding("a choice is neither 0 nor 1");
    }
}

static void draw(struct cattn_torch_random *random, const struct cattn_torch_fill *fill) {
    if (cattn_torch_fill(random, fill) != CATTN_OK)
        finding("fill failed");
}

/* Imports a state of which some bytes were changed. */
static void import_bytes(struct input *in, struct cattn_torch_random *random) {
    uint8_t bytes[CATTN_TORCH_STATE_BYTES], before[CATTN_TORCH_STATE_BYTES], after[CATTN_TORCH_STATE_BYTES];
    cattn_torch_export(random, before);
    memcpy(bytes, before, sizeof bytes);
    for (int i = (int)take_below(in, 4); i > 0; i--)
        bytes[take_word(in) % sizeof bytes] = take_byte(in);
    for (int i = (int)take_below(in, 3); i > 0; i--) /* the numbers before and after the twister's words */
        bytes[take_chance(in, 2) ? take_byte(in) % 32 : sizeof bytes - 1 - take_byte(in) % 48] = take_byte(in);
    const bool imported = cattn_torch_import(random, bytes);
    cattn_torch_export(random, after);
    if (!imported && memcmp(before, after, sizeof after) != 0)
        finding("a state that was refused left a trace");
}

void fuzz_stream(struct input *in) {
    struct cattn_torch_random random;
    memset(&random, 0, sizeof random);
    cattn_torch_seed(&random, take_word(in));
    random.stream = take_chance(in, 2) ? CATTN_TORCH_ATEN : CATTN_TORCH_MKL;
    for (int i = 1 + (int)take_below(in, 4); i > 0; i--) {
        import_bytes(in, &random);
        struct cattn_torch_fill fill = choose_fill(in, (enum cattn_torch_distribution)take_below(in, 5));
        const enum element element = element_of(&fill);
        struct array numbers = make_zeros(element, 1, &fill.n, 0), again = make_zeros(element, 1, &fill.n, 0);
        struct array p = make_zeros(computed_element(fill.dtype), 1, &fill.n, 0);
        if (fill.distribution == CATTN_TORCH_BERNOULLI && take_chance(in, 2))
            fill.probabilities = p.memory; /* zeros */
        uint8_t state[CATTN_TORCH_STATE_BYTES];
        cattn_torch_export(&random, state);
        struct cattn_torch_random copy = random;
        if (!cattn_torch_import(&copy, state))
            finding("its own state is refused");
        fill.out = numbers.memory;
        draw(&random, &fill);
        for (struct cursor c = walk(&numbers); c.more; step(&c))
            check_number(&fill, number_at(&numbers, c.offset));
        fill.out = again.memory;
        draw(&copy, &fill);
        void *const right = gathered(&numbers);
        check_same(&again, right, "a state taken out and put back draws other numbers");
        free(right);
    }
}
