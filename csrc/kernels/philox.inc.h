/* philox.inc.h -- the random bits of dropout, by position: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers:
 * as easy as 1, 2, 3").
 *
 * One call of Philox gives four 32-bit words, that is eight 16-bit digits, for eight elements. Element j takes
 *
 *     counter  c0 = 8*(j >> 6) + (j & 7), c1, c2, c3         digit  d = (j >> 3) & 7
 *     digit d  = low half of word d >> 1 where d is even, high half where it is odd
 *
 * so the elements of a run of 64 share eight counters, and 8 neighbours are 8 neighbouring counters: lanes across
 * elements need no shuffle, and with lanes across queries one call serves 8 keys. For attention j is the key, c1 the
 * query's absolute position, c2 the head, c3 twice the lead index; a second draw has c3 + 1.
 *
 * An element is kept with probability threshold / 2^32: its digit is compared with the threshold's high half, and only
 * a tie (one in 65536) needs the second draw, whose digit is compared with the low half.
 */

#define PHILOX_M0 0xd2511f53u
#define PHILOX_M1 0xcd9e8d57u

INLINE void philox(vu c[4], const uint32_t key[CATTN_PHILOX_ROUNDS][2]) {
    vw w0 = vw_from(c[0]), w1 = vw_from(c[1]), w2 = vw_from(c[2]), w3 = vw_from(c[3]);
#pragma GCC unroll 10
    for (int round = 0; round < CATTN_PHILOX_ROUNDS; round++) {
        vw p0 = vw_mul(w0, PHILOX_M0), p1 = vw_mul(w2, PHILOX_M1);
        w0 = vw_xor(vw_high(p1), w1, key[round][0]);
        w1 = p1;
        w2 = vw_xor(vw_high(p0), w3, key[round][1]);
        w3 = p0;
    }
    c[0] = vw_low(w0);
    c[1] = vw_low(w1);
    c[2] = vw_low(w2);
    c[3] = vw_low(w3);
}

/* The same for one counter and one digit; for ties and ragged ends. */
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

static bool philox_keep(const struct cattn_drop *drop, uint64_t j, uint32_t c1, uint32_t c2) {
    uint32_t digit = philox_digit(drop, j, c1, c2, drop->lead2);
    if (digit != drop->threshold_hi)
        return digit < drop->threshold_hi;
    return philox_digit(drop, j, c1, c2, drop->lead2 + 1) < drop->threshold_lo;
}

/* First draws for elements base .. base+127, base a multiple of 64: words[64] for vu_digits. */
static void philox_words(const struct cattn_drop *drop, uint64_t base, uint32_t c1, uint32_t c2, uint32_t *words) {
    uint32_t lane[LANES];
    for (uint32_t i = 0; i < LANES; i++)
        lane[i] = i;
    const vu lanes = vu_loadu(lane);
    for (uint32_t i = 0; i < 16; i += LANES) {
        vu c[4] = {vu_add(vu_set1((uint32_t)((base >> 6) << 3) + i), lanes), vu_set1(c1), vu_set1(c2),
                   vu_set1(drop->lead2)};
        philox(c, drop->key);
#pragma GCC unroll 4
        for (uint32_t w = 0; w < 4; w++) {
#if LANES == 16
            uint32_t both[16];
            vu_storeu(both, c[w]);
            memcpy(words + 8 * w, both, 32);
            memcpy(words + 32 + 8 * w, both + 8, 32);
#else
            vu_storeu(words + 32 * (i >> 3) + 8 * w + (i & 7), c[w]);
#endif
        }
    }
}

/* Keep decisions (1 or 0) for LANES elements: lane i is element j + i*j_step at c1[i], c2[i] or, with j_step 1, at
 * c1[0], c2[0]. */
static __attribute__((noinline)) void philox_ties(const struct cattn_drop *drop, uint64_t j, int j_step,
                                                  const uint32_t *c1, const uint32_t *c2, real keep[LANES]) {
    for (int i = 0; i < LANES; i++) {
        int at = j_step ? 0 : i;
        keep[i] = philox_keep(drop, j + (uint64_t)(i * j_step), c1[at], c2[at]) ? 1 : 0;
    }
}

INLINE vm philox_decide(const struct cattn_drop *drop, vu digits, uint64_t j, int j_step, const uint32_t *c1,
                        const uint32_t *c2) {
    if (__builtin_expect(vm_any(vu_eq(digits, vu_set1(drop->threshold_hi))), 0)) {
        real keep[LANES];
        philox_ties(drop, j, j_step, c1, c2, keep);
        return vf_lt(vf_set1(0), vf_loadu(keep));
    }
    return vu_lt(digits, vu_set1(drop->threshold_hi));
}

/* First draws for LANES queries: keys j, j+8 .. j+56, where j is one of the first 8 of a run of 64. */
INLINE void philox_lanes(const struct cattn_drop *drop, uint64_t j, const uint32_t *c1, const uint32_t *c2,
                         vu words[4]) {
    words[0] = vu_set1((uint32_t)((j >> 6) << 3) + (uint32_t)(j & 7));
    words[1] = vu_loadu(c1);
    words[2] = vu_loadu(c2);
    words[3] = vu_set1(drop->lead2);
    philox(words, drop->key);
}

/* The decisions for key j + 8 * d of those. */
INLINE vm philox_lanes_keep(const struct cattn_drop *drop, const vu words[4], int d, uint64_t j, const uint32_t *c1,
                            const uint32_t *c2) {
    vu digits = d & 1 ? vu_shr16(words[d >> 1]) : vu_and(words[d >> 1], vu_set1(0xffff));
    return philox_decide(drop, digits, j + (uint64_t)(8 * d), 0, c1, c2);
}
