/* fuzz_core.c -- libFuzzer's entry point: the first byte chooses the target that gets the others. */
#include "memory.h"
#include "targets.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
const char *__asan_default_options(void);

/* A large quarantine of freed memory evicts the caches. Nothing freed here outlives its execution: 1 MB is enough. */
const char *__asan_default_options(void) { return "quarantine_size_mb=1"; }

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static void (*const targets[])(struct input *) = {
        fuzz_attention, fuzz_attention,  fuzz_attention,     fuzz_varlen,       fuzz_softmax, fuzz_softmax_backward,
        fuzz_dropout,   fuzz_stream,     fuzz_rope,          fuzz_rope,         fuzz_rope,    fuzz_norm,
        fuzz_norm,      fuzz_activation, fuzz_norm_backward, fuzz_norm_backward};
    struct input in = {bytes, size};
    arrays_begin();
    targets[take_byte(&in) % 16](&in);
    return 0;
}
