/* fuzz_core.c -- libFuzzer's entry point: bytes become a problem of tests/core, which is computed in two ways.
 *
 * The second call has another table, path and number of threads, arrays elsewhere in memory, NaN in everything that no
 * query sees, float32 numbers in the place of quantized ones, the result in the memory of an input, and packed
 * sequences one by one. Every output must have the same bits, and nothing else may be written.
 *
 * A slot is a fixed piece of address space with an unreadable page at either end. An array lies at the start or at the
 * end of its slot, so that a read of one byte too far is a fault. That covers masked vector loads, which
 * AddressSanitizer does not always check. The rest of the slot is poisoned for AddressSanitizer. The next execution
 * uses the slots again, without a system call.
 */
#include <fenv.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sanitizer/asan_interface.h>
#include <sanitizer/lsan_interface.h>

#include "visible.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
const char *__asan_default_options(void);

/* A large quarantine of freed memory evicts the caches. Nothing freed here outlives its execution: 1 MB is enough. */
const char *__asan_default_options(void) { return "quarantine_size_mb=1"; }

/* ---- memory ---- */

enum { N_SLOTS = 192 };

struct slot {
    uint8_t *begin; /* MOST_BYTES, or NULL */
    uint8_t *used;
    size_t bytes;
};

static struct slot slots[N_SLOTS];
static int n_used;

static void map_slot(struct slot *slot) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *memory = mmap(NULL, MOST_BYTES + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + page, MOST_BYTES, PROT_READ | PROT_WRITE)) {
        perror("mmap");
        exit(1);
    }
    slot->begin = memory + page;
    __asan_poison_memory_region(slot->begin, MOST_BYTES);
}

static void *take_memory(size_t bytes, bool at_end) {
    if (n_used == N_SLOTS || bytes > MOST_BYTES) {
        fprintf(stderr, "%d arrays, %zu bytes: too many\n", n_used, bytes);
        exit(1);
    }
    struct slot *slot = &slots[n_used++];
    if (!slot->begin)
        map_slot(slot);
    slot->used = slot->begin + (at_end ? MOST_BYTES - bytes : 0);
    slot->bytes = bytes;
    __asan_unpoison_memory_region(slot->used, bytes);
    return slot->used;
}

static void free_memory(void) {
    for (int i = 0; i < n_used; i++)
        __asan_poison_memory_region(slots[i].used, slots[i].bytes);
    n_used = 0;
}

/* ---- findings ---- */

static __attribute__((noreturn)) void finding(const char *name, const char *what) {
    fprintf(stderr, "FINDING: %s %s\n", name, what);
    abort();
}

/* An input, and the memory between the elements of an output, must not have changed. */
static void check_untouched(const struct part *part) {
    const struct array *array = &part->array;
    if (array->role == INPUT) {
        if (sum_of(array) != array->sum)
            finding(part->name, "was changed");
        return;
    }
    int64_t n = array->span > 0 ? 1 : 0;
    for (int axis = 0; axis < array->n_axes; axis++)
        n *= array->dim[axis];
    if (n == array->span)
        return;
    const size_t size = element_size(array->element);
    uint8_t *own = calloc(1, (size_t)array->span);
    for (struct cursor c = walk(array); c.more; step(&c))
        own[array->low + c.offset] = 1;
    for (int64_t i = 0; i < array->span; i++)
        for (size_t b = 0; !own[i] && b < size; b++)
            if (array->memory[(size_t)i * size + b] != CANARY)
                finding(part->name, "was written between its elements");
    free(own);
}

static bool is_result(const struct part *part) { return part->present && part->array.role != INPUT && !part->is_own; }

/* Returns the elements in C order; the caller frees them. */
static uint64_t *gathered(const struct array *array) {
    size_t n = 1;
    for (int axis = 0; axis < array->n_axes; axis++)
        n *= (size_t)array->dim[axis];
    uint64_t *words = malloc((n + 1) * sizeof *words), *to = words;
    for (struct cursor c = walk(array); c.more; step(&c))
        *to++ = word_at(array, c.offset);
    return words;
}

static void check_same(const struct part *part, const uint64_t *right) {
    for (struct cursor c = walk(&part->array); c.more; step(&c))
        if (*right++ != word_at(&part->array, c.offset)) {
            fprintf(stderr, "at");
            for (int axis = 0; axis < part->array.n_axes; axis++)
                fprintf(stderr, " %lld", (long long)c.index[axis]);
            fprintf(stderr, ": %.17g\n", number_at(&part->array, c.offset));
            finding(part->name, "differs");
        }
}

/* ---- what must hold for the numbers of a result ---- */

/* Inputs of moderate size give finite results, weights are probabilities, and the results fit the inputs. */
static void check_attention(const struct problem *problem) {
    const struct cattn_attention_params *p = &problem->back.forward;
    for (int i = 0; i < problem->n_parts && problem->is_tame; i++) {
        const struct part *part = &problem->parts[i];
        const bool is_weight = (i == WEIGHTS && !p->store_scores) || i == TOP_WEIGHTS;
        const bool may_be_infinite = i == LSE || i == STATISTICS + CATTN_ROW_LSE ||
                                     i == STATISTICS + CATTN_ROW_MAX_SCORE || (i == WEIGHTS && p->store_scores);
        for (struct cursor c = walk(&part->array); is_result(part) && c.more; step(&c)) {
            const double x = number_at(&part->array, c.offset);
            if (!isfinite(x) && !(may_be_infinite && x == (double)-INFINITY))
                finding(part->name, "is not finite");
            if (is_weight && !(x >= 0 && x <= 1.001))
                finding(part->name, "is no probability");
        }
    }
    if (problem->is_tame && problem->back.misfit && problem->misfit.found)
        finding("out or lse", "is said not to fit its own call");
    if (!explanation_is_right(problem))
        finding("explain", "counts other keys");
}

/* Dropped elements must be +0, also NaN and negative ones. */
static void check_dropped(const struct problem *problem) {
    const struct part *mask = &problem->parts[2], *out = &problem->parts[problem->result];
    for (struct cursor c = walk(&out->array); mask->present && c.more; step(&c)) {
        const double kept = number_at(&mask->array, offset_of(&mask->array, c.index));
        const double x = number_at(&out->array, c.offset);
        if (kept != 0 && kept != 1)
            finding("dropout's mask", "is neither 0 nor 1");
        if (kept == 0 && !(x == 0 && !signbit(x)))
            finding("a dropped element", "is not +0");
    }
}

static void check_stream(struct source *s, const struct problem *problem) {
    const struct cattn_torch_fill *fill = &problem->stream;
    const bool is_choice = fill->distribution >= CATTN_TORCH_BERNOULLI;
    const struct array *numbers = &problem->parts[0].array;
    for (struct cursor c = walk(numbers); c.more; step(&c)) {
        const double x = number_at(numbers, c.offset);
        const bool right = fill->distribution == CATTN_TORCH_UNIFORM
                               ? x >= fill->low && x <= fill->high && (x < fill->high || fill->low == fill->high)
                           : fill->distribution == CATTN_TORCH_NORMAL ? fabs(x) < 40
                           : is_choice ? x == 0 || x == 1
                                       : fill->range >= 1000 ||
                                             (x >= (double)fill->base && x < (double)fill->base + (double)fill->range);
        if (!right)
            finding("a random number", "is out of bounds");
    }
    /* a state of which some bytes were changed is refused without a trace, or taken */
    struct cattn_torch_random random = problem->torch;
    uint8_t bytes[CATTN_TORCH_STATE_BYTES], before[CATTN_TORCH_STATE_BYTES], after[CATTN_TORCH_STATE_BYTES];
    cattn_torch_export(&random, before);
    memcpy(bytes, before, sizeof bytes);
    for (int64_t i = between(s, 0, 3); i > 0; i--)
        bytes[choose(s, sizeof bytes)] = (uint8_t)choose(s, 256);
    for (int64_t i = between(s, 0, 2); i > 0; i--) /* the numbers before and after the twister's words */
        bytes[one_in(s, 2) ? choose(s, 32) : sizeof bytes - 1 - choose(s, 48)] = (uint8_t)choose(s, 256);
    const bool imported = cattn_torch_import(&random, bytes);
    cattn_torch_export(&random, after);
    if (!imported && memcmp(before, after, sizeof after) != 0)
        finding("a state that was refused", "left a trace");
}

static void check_weights(const struct problem *problem) {
    const struct array *out = &problem->parts[problem->result].array;
    for (struct cursor c = walk(out); problem->is_tame && c.more; step(&c))
        if (!(number_at(out, c.offset) >= 0 && number_at(out, c.offset) <= 1.001))
            finding("a weight", "is no probability");
}

static void check_numbers(struct source *s, const struct problem *problem) {
    switch (problem->checks) {
    case NOTHING:
        return;
    case NUMBERS_OF_ATTENTION:
        check_attention(problem);
        return;
    case WEIGHTS_OF_SOFTMAX:
        check_weights(problem);
        return;
    case DROPPED:
        check_dropped(problem);
        return;
    case VISIBLE:
        if (!mask_is_right(problem))
            finding("mask", "shows or hides another key");
        return;
    case RANDOM:
        check_stream(s, problem);
    }
}

/* ---- two ways ---- */

struct two_ways {
    int table[2];
    struct way way[2];
    bool contiguous, poisons, dequantizes;
    int shared; /* which input's memory the result takes, or -1 */
};

/* The next call starts its workers again. Lost memory is looked for now and then while no worker lives: with workers,
 * LeakSanitizer at times overlooks what a thread keeps for its next call, and reports it. */
static void release(void) {
    enum { RELEASES = 50 }; /* between two looks, which take tens of milliseconds */
    static int n;
    cattn_release();
    if (++n % RELEASES == 0 && __lsan_do_recoverable_leak_check())
        finding("memory", "is lost");
}

static void choose_ways(struct source *s, struct two_ways *two) {
    static const enum cattn_path paths[] = {CATTN_PATH_AUTO, CATTN_PATH_TILE,  CATTN_PATH_TILE,
                                            CATTN_PATH_ROWS, CATTN_PATH_SPLIT, CATTN_PATH_TINY};
    int usable[16], n = 0;
    for (int i = 0; i < cattn_isa_count(); i++)
        if (cattn_isa_info(i).usable && cattn_isa_info(i).has_fma)
            usable[n++] = i;
    for (int i = 0; i < 2; i++) {
        two->table[i] = usable[choose(s, (uint64_t)n)];
        const int threads = (int)choose(s, 256);
        if (threads == 255)
            release();
        two->way[i].num_threads = threads < 240 ? 1 : 2 + threads % 3; /* a thread costs more than most calls */
        two->way[i].path = CHOOSE_FROM(s, paths);
        two->way[i].direction = FE_TONEAREST;
        two->way[i].has_results = one_in(s, 2);
        two->way[i].plain_out = one_in(s, 2);
    }
    const uint64_t more = choose(s, 256);
    two->contiguous = more & 1;
    two->poisons = more & 2;
    two->dequantizes = more & 4;
    two->way[1].alone = more & 8;
    two->way[1].reimports = more & 16;
    two->shared = (int)(more >> 5) % 3 - 1;
}

/* The second way's arrays. */
static void move(struct source *s, struct problem *problem, const struct two_ways *two) {
    const int shared = two->shared >= 0 ? problem->shareable[two->shared] : -1;
    for (int i = 0; i < problem->n_parts; i++)
        if (problem->parts[i].present)
            move_array(s, &problem->parts[i].array, two->contiguous || i == shared);
    const bool is_dense = problem->checks == NUMBERS_OF_ATTENTION && problem->lists != PACKED;
    if (two->poisons && is_dense && !problem->back.forward.store_scores && !problem->back.forward.ranges.all_visible)
        poison_hidden(problem);
    if (two->dequantizes)
        dequantize(s, problem);
    if (shared < 0 || problem->parts[shared].array.element != problem->parts[problem->result].array.element)
        return;
    struct part *out = &problem->parts[problem->result];
    out->array = problem->parts[shared].array;
    out->array.role = OUTPUT;
    out->shares = true;
    problem->parts[shared].is_own = true; /* no longer an input that must not change */
}

static void describe(const struct problem *problem, const struct way *way) {
    fprintf(stderr, "%s%s; table %s, path %d, threads %d\n", problem->kind->name, problem->said,
            cattn_isa_info(cattn_isa_current()).name, (int)way->path, way->num_threads);
    for (int i = 0; i < problem->n_parts; i++) {
        const struct array *array = &problem->parts[i].array;
        if (problem->parts[i].present)
            fprintf(stderr, "  %s:", problem->parts[i].name);
        for (int axis = 0; problem->parts[i].present && axis < array->n_axes; axis++)
            fprintf(stderr, " %lld by %lld", (long long)array->dim[axis], (long long)array->stride[axis]);
        fprintf(stderr, problem->parts[i].present ? "\n" : "");
    }
}

static void compute_one(struct source *s, struct problem *problem, int table, const struct way *way) {
    cattn_isa_select(cattn_isa_info(table).name);
    if (getenv("CATTN_FUZZ_SAY"))
        describe(problem, way);
    if (compute(s, problem, way) != CATTN_OK)
        finding(problem->kind->name, "failed");
    for (int i = 0; i < problem->n_parts; i++)
        if (problem->parts[i].present && !problem->parts[i].is_own)
            check_untouched(&problem->parts[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const double budgets[] = {2000, 5000, 10000, 30000};
    static struct problem problem;
    struct source s = {.has_bytes = true, .bytes = bytes, .left = size, .allocate = take_memory};
    struct two_ways two = {.shared = -1};
    uint64_t *right[N_PARTS] = {NULL};
    uint8_t after[CATTN_TORCH_STATE_BYTES], again[CATTN_TORCH_STATE_BYTES];
    free_memory();
    const struct kind *kind = &kinds[choose(&s, (uint64_t)n_kinds)];
    const uint64_t large = choose(&s, 128); /* several blocks of queries and keys; rare, because it takes so long */
    s.budget = large == 127 ? 250000 : budgets[large % 4];
    choose_ways(&s, &two); /* first, so that short inputs choose them too */
    choose_problem(&s, &problem, kind);
    compute_one(&s, &problem, two.table[0], &two.way[0]);
    check_numbers(&s, &problem);
    cattn_torch_export(&problem.torch, after);
    if (problem.is_renormalized) /* the bit contract leaves out its sums */
        return 0;
    for (int i = 0; i < problem.n_parts; i++)
        right[i] = is_result(&problem.parts[i]) ? gathered(&problem.parts[i].array) : NULL;
    move(&s, &problem, &two);
    compute_one(&s, &problem, two.table[1], &two.way[1]);
    for (int i = 0; i < problem.n_parts; i++) {
        if (right[i])
            check_same(&problem.parts[i], right[i]);
        free(right[i]);
    }
    cattn_torch_export(&problem.torch, again);
    if (memcmp(after, again, sizeof after) != 0)
        finding("the generator", "stands elsewhere");
    return 0;
}
