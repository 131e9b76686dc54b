/* bits.c -- csrc/core without Python: prints hashes that must be equal for all tables and on all machines.
 *
 *   bits                    the tables of this build: name, usable on this CPU, inside the bit contract
 *   bits TABLE              the results of vectors.c for lines of standard input, with that table
 *   bits TABLE BEGIN END    problems BEGIN .. END-1 of each kind with that table, one line each: description and hash
 *
 * Shapes, options, strides and numbers of a problem follow from its index, and hashes take the values of words, not
 * their bytes, so lines can be compared across machines; tests/data/bits.txt keeps the first ones. Each problem is
 * computed in several ways (paths, threads, rounding directions of the caller, float32 in the place of quantized
 * arrays, packed sequences one by one) that must give the same hash; the exit code is 1 if one did not. tools/machines
 * builds and runs this program.
 *
 * Left out: PyTorch's normal numbers in float64. Their logarithm, sine and cosine come from the C library.
 */
#include <fenv.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "problem.h"

#ifndef FE_UPWARD /* WebAssembly only rounds to nearest */
#define FE_UPWARD FE_TONEAREST
#define FE_DOWNWARD FE_TONEAREST
#define FE_TOWARDZERO FE_TONEAREST
#endif

enum { MOST_BLOCKS = 256 };
static void *blocks[MOST_BLOCKS];
static int n_blocks;

static void *allocate(size_t bytes, bool at_end) {
    (void)at_end;
    void *data = malloc(bytes + 1);
    if (!data || n_blocks == MOST_BLOCKS)
        abort();
    return blocks[n_blocks++] = data;
}

static void free_blocks(void) {
    while (n_blocks > 0)
        free(blocks[--n_blocks]);
}

static uint64_t mixed(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Includes the gaps between elements, where nothing may be written, and the state of the generator. */
static uint64_t hash_of_outputs(struct problem *problem) {
    struct cattn_torch_fill fill = {.distribution = CATTN_TORCH_INTEGER, .range = 1u << 31, .n = 1};
    int64_t word = 0;
    uint64_t hash = 1;
    for (int i = 0; i < problem->n_parts; i++) {
        const struct part *part = &problem->parts[i];
        if (part->present && part->array.role != INPUT && !part->is_own)
            for (int64_t at = 0; at < part->array.span; at++)
                hash = mixed(hash, word_at(&part->array, at - part->array.low));
    }
    fill.out = &word;
    cattn_torch_fill(&problem->torch, &fill);
    return mixed(hash, (uint64_t)word);
}

struct result {
    uint64_t hash;
    bool known, agree;
};

/* Computes the problem in one more way, and compares the outputs with those of the first. */
static void compute_once(struct source *s, struct problem *problem, int64_t index, const struct way *way,
                         const char *what, struct result *result) {
    const enum cattn_status status = compute(s, problem, way);
    const uint64_t hash = status == CATTN_OK ? hash_of_outputs(problem) : 0;
    if (status != CATTN_OK || (result->known && hash != result->hash)) {
        fprintf(stderr,
                "%s %" PRId64 "%s: %s, path %d with %d threads gave %016" PRIx64 " (status %d), not %016" PRIx64 "\n",
                problem->kind->name, index, problem->said, what, (int)way->path, way->num_threads, hash, (int)status,
                result->hash);
        result->agree = false;
    }
    if (!result->known)
        result->hash = hash;
    result->known = true;
}

static bool print_problem(const struct kind *kind, int64_t index) {
    static const struct way ways[] = {
        {CATTN_PATH_ROWS, 1, FE_TONEAREST, false, true, false, false},
        {CATTN_PATH_TILE, 3, FE_UPWARD, true, false, true, true},
        {CATTN_PATH_TILE, 1, FE_TONEAREST, false, true, false, false},
        {CATTN_PATH_SPLIT, 3, FE_DOWNWARD, false, true, false, false},
        {CATTN_PATH_TINY, 1, FE_TOWARDZERO, false, true, false, false},
    };
    static struct problem problem;
    struct source s = {.state = (uint64_t)index * 8, .budget = 1e6, .allocate = allocate};
    struct result result = {.agree = true};
    for (const char *c = kind->name; *c; c++)
        s.state = s.state * 31 + (uint64_t)*c;
    choose_problem(&s, &problem, kind);
    for (int i = 0; i < (problem.has_paths ? 5 : 2); i++)
        compute_once(&s, &problem, index, &ways[i], "computed", &result);
    if (dequantize(&s, &problem))
        compute_once(&s, &problem, index, &ways[2], "in float32", &result);
    printf("%s %" PRId64 "%s: %016" PRIx64 "\n", kind->name, index, problem.said, result.hash);
    free_blocks();
    return result.agree;
}

int main(int argc, char **argv) {
    bool agree = true;
    if (argc == 1) {
        for (int i = 0; i < cattn_isa_count(); i++) {
            const struct cattn_isa_info info = cattn_isa_info(i);
            printf("%s %d %d\n", info.name, info.usable, info.has_fma);
        }
        return 0;
    }
    if ((argc != 2 && argc != 4) || !cattn_isa_select(argv[1])) {
        fprintf(stderr, "usage: %s TABLE [BEGIN END], with a table that this CPU can run\n", argv[0]);
        return 2;
    }
    if (argc == 2) {
        struct source s = {.allocate = allocate};
        bool is_wrong = false;
        while (compute_vector(&s, &is_wrong))
            free_blocks();
        return is_wrong ? 1 : 0;
    }
    for (int64_t i = atoll(argv[2]); i < atoll(argv[3]); i++)
        for (int kind = 0; kind < n_kinds; kind++)
            agree = print_problem(&kinds[kind], i) && agree;
    return agree ? 0 : 1;
}
