/* dispatch.c -- the kernel tables of this build, which of them this CPU can run, and the one in use.
 *
 * setup.py defines CATTN_HAVE_<table> for each table that it compiled. The binding selects the best one when the module
 * is imported; tests switch.
 */
#include "dispatch.h"

#include <stdatomic.h>
#include <string.h>

#include "../fp_mode.h"
#include "os.h"

struct table {
    const char *name;
    const struct cattn_kernels *kernels[2]; /* by dtype */
    const struct cattn_row_kernels *rows[2];
    struct cattn_kernel_pair bf16[2]; /* of float32 whose products are of bfloat16: by pairs, by tiles */
    unsigned needs;                   /* features of the processor */
    unsigned slow_with;               /* features with which an earlier table is faster */
    bool test_only;
};

/* `rows` is the vocabulary; `bf16` and `few` have pairs, for tiles and few rows, `wide` and `narrow` tiles. */
#define TABLE_WITH(name, text, rows, bf16, few, wide, narrow)                                                          \
    text, {&cattn_kernels_##name##_32, &cattn_kernels_##name##_64},                                                    \
        {&cattn_row_kernels_##rows##_32, &cattn_row_kernels_##rows##_64}, {                                            \
        {&cattn_kernels_##bf16##_16, &cattn_kernels_##few##_16}, {                                                     \
            &cattn_kernels_##wide##_17, &cattn_kernels_##narrow##_17                                                   \
        }                                                                                                              \
    }
#define TABLE(name) TABLE_WITH(name, #name, name, name, name, name, name)

/* From worst to best: the last usable one that is not slow here is selected. */
static const struct table tables[] = {
#ifdef CATTN_LIVE /* the live page: forward passes in float32 */
    {"scalar", {&cattn_kernels_scalar_32}, {&cattn_row_kernels_scalar_32}, {{NULL, NULL}}, 0, 0, false},
#endif
#ifdef CATTN_HAVE_SCALAR
    {TABLE(scalar), 0, 0, false},
#endif
#ifdef CATTN_HAVE_GNU128
    {TABLE(gnu128), 0, 0, false},
#endif
#ifdef CATTN_HAVE_GNU512
    {TABLE(gnu512), CATTN_CPU_AVX2, 0, true},
#endif
#ifdef CATTN_HAVE_AVX2_4X2
    {TABLE_WITH(avx2_4x2, "avx2_4x2", avx2, avx2, avx2, avx2, avx2), CATTN_CPU_AVX2, 0, false},
#endif
#ifdef CATTN_HAVE_AVX2
    {TABLE(avx2), CATTN_CPU_AVX2, CATTN_CPU_AMD_25, false},
#endif
#ifdef CATTN_HAVE_AVX512_256
    {TABLE_WITH(avx512_256, "avx512_256", avx512, avx512, avx512, avx512, avx512), CATTN_CPU_AVX512, 0, false},
#ifdef CATTN_HAVE_AVX512_BF16
    {TABLE_WITH(avx512_256, "avx512_256_bf16", avx512, avx512_bf16, avx512_bf16, avx512, avx512),
     CATTN_CPU_AVX512 | CATTN_CPU_AVX512_BF16, 0, false},
#endif
#endif
#ifdef CATTN_HAVE_AVX512
    {TABLE(avx512), CATTN_CPU_AVX512, CATTN_CPU_AMD_25, false},
#ifdef CATTN_HAVE_AVX512_BF16
    /* the instruction serves few rows, where conversions and memory count; FMAs multiply tiles */
    {TABLE_WITH(avx512, "avx512_bf16_few", avx512, avx512, avx512_bf16, avx512, avx512),
     CATTN_CPU_AVX512 | CATTN_CPU_AVX512_BF16, CATTN_CPU_AMD_25, false},
    {TABLE_WITH(avx512, "avx512_bf16", avx512, avx512_bf16, avx512_bf16, avx512, avx512),
     CATTN_CPU_AVX512 | CATTN_CPU_AVX512_BF16, CATTN_CPU_AMD_25 | CATTN_CPU_SLOW_PAIRS, false},
#ifdef CATTN_HAVE_AMX /* its kernels of tiles take the place of avx512's if the system permits them */
    {TABLE_WITH(avx512, "avx512_amx", avx512, avx512, avx512_bf16, avx512, amx),
     CATTN_CPU_AVX512 | CATTN_CPU_AVX512_BF16 | CATTN_CPU_AMX, 0, false},
#endif
#endif
#endif
};

enum { N_TABLES = sizeof tables / sizeof *tables };

/* Index of the table in use, written at import and by tests. A call may see a switch halfway: no bit depends on it. */
static atomic_int current;

int cattn_isa_count(void) { return N_TABLES; }

int cattn_isa_current(void) { return atomic_load(&current); }

struct cattn_isa_info cattn_isa_info(int index) {
    const struct table *t = &tables[index];
    const struct cattn_kernels *k = t->kernels[CATTN_F32];
    return (struct cattn_isa_info){
        .name = t->name,
        .usable = (cattn_cpu() & t->needs) == t->needs,
        .has_fma = k->has_fma,
        .test_only = t->test_only,
        .lanes_f32 = k->lanes,
        .mr = k->mr,
        .nr = k->nr,
        .br = CATTN_TILE_ROWS,
    };
}

bool cattn_isa_keeps_arithmetic(int index) {
    if (!cattn_isa_info(index).usable)
        return true;
    const unsigned saved = cattn_fp_enter();
    bool kept = true;
    for (int dtype = CATTN_F32; dtype <= CATTN_F64; dtype++)
        kept &= tables[index].kernels[dtype]->keeps_arithmetic();
    for (int i = 0; i < 2; i++)
        kept &= tables[index].bf16[i].tiles->keeps_arithmetic() && tables[index].bf16[i].few->keeps_arithmetic();
    cattn_fp_leave(saved);
    return kept;
}

bool cattn_isa_wastes_fma(void) {
    return (cattn_cpu() & CATTN_CPU_FMA) != 0 && !cattn_isa_info(cattn_isa_current()).has_fma;
}

bool cattn_isa_select(const char *name) {
    for (int i = N_TABLES - 1; i >= 0; i--) {
        struct cattn_isa_info info = cattn_isa_info(i);
        bool fast = !info.test_only && (cattn_cpu() & tables[i].slow_with) == 0;
        bool wanted = name ? strcmp(name, info.name) == 0 : fast;
        if (wanted && info.usable) {
            atomic_store(&current, i);
            return true;
        }
    }
    return false;
}

const struct cattn_kernels *cattn_kernels_for(enum cattn_dtype dtype) {
    return tables[atomic_load(&current)].kernels[dtype];
}

const struct cattn_row_kernels *cattn_row_kernels_for(enum cattn_dtype dtype) {
    return tables[atomic_load(&current)].rows[dtype];
}

#ifdef CATTN_HAVE_AMX

static bool has_tiles;
static cattn_once tiles_once = CATTN_ONCE_INIT;

/* At the first call that wants tiles: a process that has the permission needs larger stacks for signals. */
static void permit_tiles(void) {
    const unsigned saved = cattn_fp_enter();
    has_tiles = cattn_os_permit_tiles() && cattn_kernels_amx_17.keeps_tiles();
    cattn_fp_leave(saved);
}

struct cattn_kernel_pair cattn_bf16_kernels(enum cattn_bf16_products products) {
    const struct table *t = &tables[atomic_load(&current)];
    struct cattn_kernel_pair pair = t->bf16[products == CATTN_BF16_TILES];
    if (products == CATTN_BF16_TILES && (t->needs & CATTN_CPU_AMX)) {
        cattn_run_once(&tiles_once, permit_tiles);
        pair.tiles = has_tiles ? &cattn_kernels_amx_17 : pair.tiles;
    }
    return pair;
}

#else

struct cattn_kernel_pair cattn_bf16_kernels(enum cattn_bf16_products products) {
    return tables[atomic_load(&current)].bf16[products == CATTN_BF16_TILES];
}

#endif

bool cattn_isa_has_tiles(void) { return cattn_bf16_kernels(CATTN_BF16_TILES).tiles->tiles_begin != NULL; }

int64_t cattn_block_keys(void) { return CATTN_BLOCK_KEYS; }
int64_t cattn_chunk_keys(void) { return CATTN_CHUNK_KEYS; }
