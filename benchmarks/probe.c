/* probe.c -- the limits of the machine: fused multiply-adds in registers, and a plain read of memory. machine.py
 * compiles it with the flags of the instruction set in use; BYTES is the width of a vector.
 */
#include <stddef.h>
#include <stdint.h>

/* At least latency times throughput of any core so far. AVX2 has 16 registers, and spills would be measured. */
#define CHAINS (BYTES == 32 ? 12 : 16)

int chains(void) { return CHAINS; }

#define PEAK(name, real)                                                                                               \
    double name(long loops) {                                                                                          \
        typedef real vector __attribute__((vector_size(BYTES)));                                                      \
        vector sum[16], a, b;                                                                                          \
        for (size_t i = 0; i < BYTES / sizeof(real); i++) {                                                            \
            a[i] = (real)0.999 + (real)i * (real)1e-6;                                                                 \
            b[i] = (real)1e-3;                                                                                         \
        }                                                                                                              \
        for (int c = 0; c < CHAINS; c++)                                                                               \
            sum[c] = b * (real)c;                                                                                      \
        for (long loop = 0; loop < loops; loop++)                                                                      \
            _Pragma("GCC unroll 16") for (int c = 0; c < CHAINS; c++) sum[c] = sum[c] * a + b;                        \
        real total = 0;                                                                                                \
        for (int c = 0; c < CHAINS; c++)                                                                               \
            for (size_t i = 0; i < BYTES / sizeof(real); i++)                                                          \
                total += sum[c][i];                                                                                    \
        return (double)total;                                                                                          \
    }

PEAK(peak_float, float)
PEAK(peak_double, double)

/* Reads n bytes, a multiple of 8 vectors, in 8 streams of additions. */
uint64_t read_bytes(const void *memory, long n) {
    typedef uint64_t vector __attribute__((vector_size(BYTES), aligned(8)));
    const vector *v = memory;
    const long count = n / (long)sizeof(vector) / 8 * 8;
    vector sum[8] = {{0}};
    for (long i = 0; i < count; i += 8)
        _Pragma("GCC unroll 8") for (int s = 0; s < 8; s++) sum[s] += v[i + s];
    uint64_t total = 0;
    for (int s = 0; s < 8; s++)
        for (size_t i = 0; i < BYTES / sizeof(uint64_t); i++)
            total += sum[s][i];
    return total;
}
