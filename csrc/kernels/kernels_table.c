/* kernels_table.c -- one kernel table of one instruction set and element type; setup.py compiles it for each.
 *
 * -DTABLE_<NAME> chooses the vocabulary and the micro-tile: MR rows of NR vectors. -DREAL_BITS=32 or 64 chooses the
 * element type; 16 and 17 are float32 with products of bfloat16, by pairs and in tiles. With -DROW_KERNELS it is the
 * table of the functions of rows (softmax, norms and so on), which know no micro-tile, so that tables share it;
 * without, the table of attention and products of matrices.
 *
 * The parts depend on each other in the order of the includes; the blank lines keep clang-format from sorting them.
 */
#if defined(TABLE_SCALAR)
/* One lane and the fma of fma.h; the tests compare the other tables with this one. */
#define ISA scalar
#define MR 4
#define NR 1
#define QUICK_TO_COMPILE
#include "simd_scalar.h"
#elif defined(TABLE_GNU128)
/* The portable table with 16-byte vectors. NEON has 32 registers: 8 x 2 vectors keep 16 chains in flight, enough for
 * four FMA units, but an exponential needs a copy of each coefficient, because fmla overwrites it. SSE2 has 16. */
#define ISA gnu128
#ifdef __aarch64__
#define MR 8
#else
#define MR 4
#endif
#define NR 2
#define FEW_CHAINS_AT_ONCE
#define VECTOR_BYTES 16
#include "simd_gnu.h"
#elif !defined(__x86_64__)
/* A Mac's compiler may make one object for two machines: there is no such table on this one. */
#elif defined(TABLE_GNU512)
/* For tests only: the tile shapes of the AVX-512 table on any CPU with FMA. */
#define ISA gnu512
#define MR 8
#define NR 2
#define VECTOR_BYTES 64
#define QUICK_TO_COMPILE
#define KEEP_LOOPS
#include "simd_gnu.h"
#elif defined(TABLE_AVX2)
/* 12 chains in 16 registers, more than two FMAs a cycle of latency 4 or 5 need: on an Intel core attention takes 0.95
 * to 0.99 of its time with 4 x 2 vectors, and products of 4 x 3 packed vectors 0.87 to 0.95 of the time of 4 x 2. */
#define ISA avx2
#define MR 6
#define NR 2
#if REAL_BITS > 17
#define PRODUCT_MR 4
#define PRODUCT_NR 3
#define PRODUCT_PACKS_FROM 192
#endif
#include "simd_avx2.h"
#elif defined(TABLE_AVX2_4X2)
/* 8 chains, as many as two FMAs a cycle of latency 4 need, leave registers for the sums: on AMD's Zen 3 the spills of
 * larger tiles cost more than the loads that they save, a tenth of the time. Rows are far apart for 32 KiB of L1. */
#define ISA avx2_4x2
#define MR 4
#define NR 2
#if REAL_BITS > 17
#define PRODUCT_MR 4
#define PRODUCT_NR 2
#define PRODUCT_PACKS_FROM 64
#endif
#define FAR_ROW 256
#include "simd_avx2.h"
#elif defined(TABLE_AVX512)
/* For processors with 512-bit units. They do two loads and two FMAs a cycle, and every broadcast operand is a load:
 * tiles of 8 x 2 vectors load 10 operands for 16 FMAs (scores, 6 x 2: 8 for 12), where 12 x 1 would load 13 for 12.
 * Keys and values that stream by are prefetched once, into the L1 cache: more requests take the slots of the loads (AMD
 * Zen 5). */
#define ISA avx512
#define MR 8
#define NR 2
#if REAL_BITS > 17
#define PRODUCT_MR 8
#define PRODUCT_NR 3
#define PRODUCT_PACKS_FROM 192
#endif
#define STREAM_AHEAD 24576
#include "simd_avx512.h"
#elif defined(TABLE_AVX512_256)
/* For processors that split 512-bit operations in two (AMD Zen 4). They do one FMA a cycle, so loads do not limit them.
 * 12 chains and 12 sums fit into 32 registers, which saves the spills of larger tiles. */
#define ISA avx512_256
#define MR 12
#define NR 1
#include "simd_avx512.h"
#elif defined(TABLE_AVX512_BF16)
/* Products of bfloat16 by the instruction VDPBF16PS, REAL_BITS 16 only. All other kernels of the tables that use it are
 * the kernels of avx512 or avx512_256. */
#define ISA avx512_bf16
#define MR 8
#define NR 2
#include "simd_avx512.h"
#elif defined(TABLE_AMX)
/* Products of bfloat16 by the instruction TDPBF16PS, which multiplies tiles (AMX), REAL_BITS 17 only. All other kernels
 * of the table avx512_amx are the kernels of avx512. */
#define ISA amx
#define MR 8
#define NR 2
#define TILE_INSTRUCTIONS
#include "simd_avx512.h"
#else
#error "setup.py defines TABLE_<NAME>"
#endif

#ifdef ISA

#include "../fp_mode.h"
#include "kernels.h"

#define PASTE_(prefix, isa, bits) prefix##isa##_##bits
#define PASTE(prefix, isa, bits) PASTE_(prefix, isa, bits)
#define TEXT_(isa) #isa
#define TEXT(isa) TEXT_(isa)

#if defined(ROW_KERNELS) || defined(BF16_PRODUCTS) || defined(CATTN_LIVE) /* a part of the functions */
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#ifndef FAR_ROW
#define FAR_ROW 512
#endif

#include "exp.inc.h"

#include "philox.inc.h"

#include "load.inc.h"

#ifdef ROW_KERNELS

#include "rowwise.inc.h"

#include "activation.inc.h"
#include "linear_attention.inc.h"
#include "linear_attention_backward.inc.h"
#include "norm.inc.h"
#include "rope.inc.h"
#include "torch.inc.h"

const struct cattn_row_kernels PASTE(cattn_row_kernels_, ISA, REAL_BITS) = {
    .dropout_mask_row = dropout_mask_row,
    .widen_row = widen_row,
    .narrow_row = narrow_row,
    .softmax_row = softmax_row,
#ifdef HAS_STREAM
    .stream_row = stream_row,
    .stream_end = stream_end,
#endif
    .dropout_row = dropout_row,
    .norm_row = norm_row,
    .activation_row = activation_row,
    .mt19937_block = mt19937_block,
    .mt19937_temper = mt19937_temper,
    .torch_below = torch_below,
    .torch_drop = torch_drop,
#ifndef CATTN_LIVE
    .softmax_gradient = softmax_gradient,
#if REAL_BITS == 64
    .rope_frequencies = rope_frequencies,
    .rope_angles = rope_angles,
#endif
    .rope_rows = rope_rows,
    .norm_gradient = norm_gradient,
    .conv_row = conv_row,
    .choice_row = choice_row,
    .state_columns = state_columns,
    .gradient_columns = gradient_columns,
    .gradient_rows = gradient_rows,
    .gradient_tokens = gradient_tokens,
    .torch_uniform = torch_uniform,
    .torch_normal = torch_normal,
#endif
};

#else

#include "arithmetic.inc.h"

#include "mask.inc.h"
#include "state.inc.h"

#include "gemm.inc.h"
#ifdef BF16_PRODUCTS
#include "bf16_products.inc.h"
#endif
#ifdef BF16_TILES
#include "bf16_units.inc.h"
#endif

#include "product_terms.inc.h"

#ifdef BF16_TILES
#include "product_units.inc.h"
#else
#ifdef BF16_PRODUCTS
#include "product_pairs.inc.h"
#else
#include "product_reals.inc.h"
#endif
#include "product.inc.h"
#include "product_few.inc.h"
#endif
#include "row_scores.inc.h"

#include "rows.inc.h"
#include "tile_scores.inc.h"

#ifdef BF16_TILES
#include "tile_units.inc.h"
#else
#include "tile.inc.h"
#endif

#if !defined(BF16_PRODUCTS) && !defined(CATTN_LIVE)
#include "second_pass.inc.h"

#include "backward.inc.h"
#include "statistics.inc.h"

#include "jvp.inc.h"
#endif

_Static_assert(CATTN_TILE_ROWS % (NR * LANES) == 0, "a tile consists of whole panels");
_Static_assert(NR <= 2, "AT_SIZE computes a whole panel or one vector");
_Static_assert(PRODUCT_PACKS_FROM == INT64_MAX || LANES % PRODUCT_MR == 0, "packed rows of A are whole micro-tiles");
_Static_assert(CATTN_TILE_ROWS % MR == 0, "a tile consists of whole micro-tiles");
_Static_assert(CATTN_BLOCK_KEYS % MR == 0, "a key block consists of whole micro-tiles");
_Static_assert(CATTN_CHAIN_TERMS % LANES == 0, "the row path's tiles of K end where chains end");
_Static_assert(CATTN_HALF_BLOCK % 2 == 0 && CATTN_CHAIN_TERMS % 2 == 0 && CATTN_SUM_CHAINS % 2 == 0, "whole pairs");
_Static_assert(CATTN_PRODUCT_CHAINS % LANES == 0, "a vector holds terms of as many chains");
_Static_assert(CATTN_PRODUCT_LANES % LANES == 0 && CATTN_PRODUCT_ROWS % LANES == 0, "blocks are whole vectors");
_Static_assert(PRODUCT_MR <= MR && PRODUCT_MR <= CATTN_PRODUCT_EDGE, "arrays hold the micro-tiles of products");
_Static_assert(CATTN_BLOCK_KEYS % 64 == 0, "a key block starts at a run of Philox counters");
_Static_assert(CATTN_PAD % (NR * LANES) == 0, "padding holds whole panels");

const struct cattn_kernels PASTE(cattn_kernels_, ISA, TABLE_BITS) = {
    .name = TEXT(ISA),
    .lanes = LANES,
    .mr = MR,
    .nr = NR,
    .has_fma = HAS_FMA,
    .far_row = FAR_ROW,
#ifdef TILE_INSTRUCTIONS
    .keeps_arithmetic = keeps_pair_arithmetic,
    .keeps_tiles = keeps_unit_arithmetic,
    .tiles_begin = tiles_begin,
    .tiles_end = tiles_end,
#elif defined(BF16_TILES)
    .keeps_arithmetic = keeps_unit_arithmetic,
#elif defined(BF16_PRODUCTS)
    .keeps_arithmetic = keeps_pair_arithmetic,
#else
    .keeps_arithmetic = keeps_arithmetic,
#endif
    .pack_query_tile = pack_query_tile,
    .pack_query_rows = pack_query_rows,
    .chunk_begin = chunk_begin,
    .tile_block = tile_block,
    .rows_block = rows_block,
    .chunk_merge = chunk_merge,
    .finish = finish,
    .product_pack_few = product_pack_few,
    .product_tile = product_tile,
    .product_packs_from = PRODUCT_PACKS_FROM,
    .product_few = product_few,
#ifdef BF16_TILES
    .chunk_end = chunk_end,
#endif
#ifdef BF16_PRODUCTS
    .pack_keys = pack_keys,
    .pack_values = pack_values,
#else
    .pack_block = pack_block,
#ifndef CATTN_LIVE
    .backward = {backward_begin, backward_scores, backward_query, backward_keys, backward_sink},
    .jvp_backward = {jvp_backward_begin, jvp_backward_scores, jvp_backward_query, jvp_backward_keys, jvp_backward_sink},
    .backward_bias = backward_bias,
    .backward_sees = backward_sees,
    .jvp_backward_terms = jvp_backward_terms,
    .backward_finish = backward_finish,
    .jvp_begin = jvp_begin,
    .jvp_block = jvp_block,
    .jvp_finish = jvp_finish,
    .statistics_begin = statistics_begin,
    .statistics_block = statistics_block,
    .statistics_add = statistics_add,
    .statistics_finish = statistics_finish,
#endif
#endif
};

#endif

#endif
