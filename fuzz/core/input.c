/* input.c -- choices from the bytes of an input, and random numbers from a seed. */
#include "input.h"

#include "cattn.h"

uint8_t take_byte(struct input *in) {
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->bytes++;
}

struct input cut_off(struct input *in, size_t n) {
    const struct input front = {in->bytes, in->left < n ? in->left : n};
    in->bytes += front.left;
    in->left -= front.left;
    return front;
}

int64_t take_below(struct input *in, int64_t n) {
    const int64_t number = n > 256 ? take_byte(in) << 8 | take_byte(in) : take_byte(in);
    return n > 0 ? number % n : 0;
}

bool take_chance(struct input *in, int n) { return take_byte(in) % n == n - 1; }

uint64_t take_word(struct input *in) {
    uint64_t word = 0;
    for (int i = 0; i < 8; i++)
        word = word << 8 | take_byte(in);
    return word;
}

void choose_table(struct input *in) {
    int usable[16], n = 0;
    for (int i = 0; i < cattn_isa_count(); i++) {
        const struct cattn_isa_info info = cattn_isa_info(i);
        if (info.usable && info.has_fma)
            usable[n++] = i;
    }
    cattn_isa_select(cattn_isa_info(usable[take_below(in, n)]).name);
}

int choose_threads(struct input *in) {
    const uint8_t byte = take_byte(in);
    if (byte == 255)
        cattn_release();                  /* the next call starts its workers again */
    return byte < 240 ? 1 : 2 + byte % 3; /* a thread costs more than most calls */
}

uint64_t noise_word(struct noise *noise) {
    uint64_t z = noise->state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
