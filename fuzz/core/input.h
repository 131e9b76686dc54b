/* input.h -- choices from the bytes of an input, and random numbers from a seed. */
#ifndef CATTN_FUZZ_INPUT_H
#define CATTN_FUZZ_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An input that has run out continues with zeros. */
struct input {
    const uint8_t *bytes;
    size_t left;
};
uint8_t take_byte(struct input *in);
/* Splits off the next n bytes as an input of their own. */
struct input cut_off(struct input *in, size_t n);
/* Returns 0 .. n-1. */
int64_t take_below(struct input *in, int64_t n);
/* Returns true for one value in n. */
bool take_chance(struct input *in, int n);
uint64_t take_word(struct input *in);
#define TAKE_FROM(in, table) ((table)[take_below(in, (int64_t)(sizeof(table) / sizeof *(table)))])

/* Chooses a table that this machine can run and that is inside the bit contract. */
void choose_table(struct input *in);
int choose_threads(struct input *in);

/* Fills arrays: their exact values do not matter, so they cost no bytes of the input. */
struct noise {
    uint64_t state;
};
uint64_t noise_word(struct noise *noise);

#endif
