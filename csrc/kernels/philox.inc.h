/* philox.inc.h -- the random bits of dropout by position: Philox4x32-10.
 *
 * (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".)
 *
 * One call of Philox gives four 32-bit words, that is eight 16-bit digits for eight elements. Element j uses
 *
 *     counter  c0 = 8*(j >> 6) + (j & 7), c1, c2, c3         digit  d = (j >> 3) & 7
 *     digit d  = low half of word d >> 1 where d is even, high half where it is odd
 *
 * so 64 consecutive elements share eight counters, and 8 neighbouring elements have 8 neighbouring counters. Hence
 * lanes that are elements need no shuffle, and with queries as lanes one call serves 8 keys. For attention, j is the
 * key, c1 the query's absolute position, c2 the head and c3 twice the batch index; the second draw uses c3 + 1.
 *
 * An element is kept with probability threshold / 2^32: the first draw's digit is compared with the threshold's high
 * half. Only a tie (one in 65536) needs the second draw, whose digit is compared with the low half.
 */

#define PHILOX_M0 0xd2511f53u
#define PHILOX_M1 0xcd9e8d57u

/* Runs the rounds from `first` on and writes the four words to c. */
INLINE void philox_rounds(vw w[4], const uint32_t key[CATTN_PHILOX_ROUNDS][2], int first, vu c[4]) {
#pragma GCC unroll 10
    for (int round = first; round < CATTN_PHILOX_ROUNDS; round++) {
        const vw p0 = vw_mul(w[0], PHILOX_M0), p1 = vw_mul(w[2], PHILOX_M1);
        w[0] = vw_xor(vw_high(p1), w[1], key[round][0]);
        w[1] = p1;
        w[2] = vw_xor(vw_high(p0), w[3], key[round][1]);
        w[3] = p0;
    }
    UNROLLED(i, 4)
        c[i] = vw_low(w[i]);
}

/* All rounds, for lanes that share c1, c2 and c3: half of the first two rounds is scalar work. */
INLINE void philox_common(vu c0, uint32_t c1, uint32_t c2, uint32_t c3, const uint32_t key[CATTN_PHILOX_ROUNDS][2],
                          vu c[4]) {
    /* in the first round c2 * M1 is the same in all lanes, in the second what comes from it */
    const vw zero = vw_from(vu_set1(0)), p0 = vw_mul(vw_from(c0), PHILOX_M0);
    const uint64_t p1 = (uint64_t)c2 * PHILOX_M1;
    const uint64_t next_p0 = (uint64_t)((uint32_t)(p1 >> 32) ^ c1 ^ key[0][0]) * PHILOX_M0;
    const vw next_p1 = vw_mul(vw_xor(vw_high(p0), zero, c3 ^ key[0][1]), PHILOX_M1);
    vw w[4] = {vw_xor(vw_high(next_p1), zero, (uint32_t)p1 ^ key[1][0]), next_p1,
               vw_xor(p0, zero, (uint32_t)(next_p0 >> 32) ^ key[1][1]), vw_from(vu_set1((uint32_t)next_p0))};
    philox_rounds(w, key, 2, c);
}

/* One digit of one counter in plain C, for ties. */
static uint32_t philox_digit(const struct cattn_drop *drop, uint64_t j, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t c[4] = {(uint32_t)((j >> 6) << 3) + (uint32_t)(j & 7), c1, c2, c3};
    for (int round = 0; round < CATTN_PHILOX_ROUNDS; round++) {
        uint64_t p0 = (uint64_t)c[0] * PHILOX_M0, p1 = (uint64_t)c[2] * PHILOX_M1;
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ drop->key[round][0];
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ drop->key[round][1];
        c[3] = (uint32_t)p0;
    }
    uint32_t word = c[(j >> 4) & 3];
    return (j >> 3) & 1 ? word >> 16 : word & 0xffff;
}

static bool philox_drop_bit(const struct cattn_drop *drop, uint64_t j, uint32_t c1, uint32_t c2) {
    uint32_t digit = philox_digit(drop, j, c1, c2, drop->batch_twice);
    if (digit != drop->threshold_hi)
        return digit < drop->threshold_hi;
    return philox_digit(drop, j, c1, c2, drop->batch_twice + 1) < drop->threshold_lo;
}

/* First draws of the elements base .. base+127, where base is a multiple of 64: words[w * 16 + i] is word w of the i-th
 * counter. */
static void philox_words(const struct cattn_drop *drop, uint64_t base, uint32_t c1, uint32_t c2, uint32_t *words) {
    uint32_t lane[LANES];
    for (uint32_t i = 0; i < LANES; i++)
        lane[i] = i;
    const vu lanes = vu_loadu(lane);
    for (uint32_t i = 0; i < 16; i += LANES) {
        const vu c0 = vu_add(vu_set1((uint32_t)((base >> 6) << 3) + i), lanes);
        vu c[4];
        philox_common(c0, c1, c2, drop->batch_twice, drop->key, c);
#pragma GCC unroll 4
        for (uint32_t w = 0; w < 4; w++)
            vu_storeu(words + 16 * w + i, c[w]);
    }
}

/* Drop bits (1 or 0) of LANES elements with both draws. Lane i is element j + i*j_step with the counter words c1[i] and
 * c2[i] or, if j_step is 1, c1[0] and c2[0]. Not inlined: ties are rare. */
NOINLINE void philox_ties(const struct cattn_drop *drop, uint64_t j, int j_step, const uint32_t *c1, const uint32_t *c2,
                          real drop_bits[LANES]) {
    for (int i = 0; i < LANES; i++) {
        int at = j_step ? 0 : i;
        drop_bits[i] = philox_drop_bit(drop, j + (uint64_t)(i * j_step), c1[at], c2[at]) ? 1 : 0;
    }
}

/* Drop bits of LANES elements from the digits of their first draws; lanes as in philox_ties. */
INLINE vm philox_decide(const struct cattn_drop *drop, vu digits, uint64_t j, int j_step, const uint32_t *c1,
                        const uint32_t *c2) {
    if (__builtin_expect(vm_any(vu_eq(digits, vu_set1(drop->threshold_hi))), 0)) {
        real drop_bits[LANES];
        philox_ties(drop, j, j_step, c1, c2, drop_bits);
        return vf_lt(vf_set1(0), vf_loadu(drop_bits));
    }
    return vu_lt(digits, vu_set1(drop->threshold_hi));
}

/* First draws of LANES queries for the keys j, j+8 .. j+56, where j is one of the first 8 keys of a run of 64. */
INLINE void philox_lanes(const struct cattn_drop *drop, uint64_t j, const uint32_t *c1, const uint32_t *c2,
                         vu words[4]) {
    vw w[4] = {vw_from(vu_set1((uint32_t)((j >> 6) << 3) + (uint32_t)(j & 7))), vw_from(vu_loadu(c1)),
               vw_from(vu_loadu(c2)), vw_from(vu_set1(drop->batch_twice))};
    philox_rounds(w, drop->key, 0, words);
}

/* The drop bits of key j + 8 * d, from the words of philox_lanes. */
INLINE vm philox_lanes_drop_bits(const struct cattn_drop *drop, const vu words[4], int d, uint64_t j,
                                 const uint32_t *c1, const uint32_t *c2) {
    vu digits = d & 1 ? vu_shr16(words[d >> 1]) : vu_and(words[d >> 1], vu_set1(0xffff));
    return philox_decide(drop, digits, j + (uint64_t)(8 * d), 0, c1, c2);
}
