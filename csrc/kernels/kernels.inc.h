/* kernels.inc.h -- the one algorithm source of every table. A stub defines ISA, MR and NR (micro-tile: MR rows of NR
 * vectors), includes its simd_*.h, and then this file. The parts depend on each other in the order of the includes; the
 * blank lines keep clang-format from sorting across them.
 */
#include "../fp_mode.h"
#include "kernels.h"

#ifdef BF16_PRODUCTS /* a table of attention's forward pass and of products of matrices only */
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#include "arithmetic.inc.h"
#include "exp.inc.h"

#include "philox.inc.h"

#include "load.inc.h"

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
#include "rowwise.inc.h"
#include "tile_scores.inc.h"

#ifdef BF16_TILES
#include "tile_units.inc.h"
#else
#include "tile.inc.h"
#endif

#ifndef BF16_PRODUCTS
#include "second_pass.inc.h"

#include "backward.inc.h"
#include "statistics.inc.h"

#include "jvp.inc.h"

#include "activation.inc.h"
#include "norm.inc.h"
#include "rope.inc.h"

#include "torch.inc.h"
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

#define PASTE_(isa, bits) cattn_kernels_##isa##_##bits
#define PASTE(isa, bits) PASTE_(isa, bits)
#define TEXT_(isa) #isa
#define TEXT(isa) TEXT_(isa)

const struct cattn_kernels PASTE(ISA, TABLE_BITS) = {
    .name = TEXT(ISA),
    .lanes = LANES,
    .mr = MR,
    .nr = NR,
    .has_fma = HAS_FMA,
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
    .dropout_mask_row = dropout_mask_row,
    .widen_row = widen_row,
    .narrow_row = narrow_row,
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
    .softmax_row = softmax_row,
#ifdef HAS_STREAM
    .stream_row = stream_row,
    .stream_end = stream_end,
#endif
    .softmax_gradient = softmax_gradient,
    .dropout_row = dropout_row,
#if REAL_BITS == 64
    .rope_frequencies = rope_frequencies,
    .rope_angles = rope_angles,
#endif
    .rope_rows = rope_rows,
    .norm_row = norm_row,
    .norm_gradient = norm_gradient,
    .activation_row = activation_row,
    .mt19937_block = mt19937_block,
    .mt19937_temper = mt19937_temper,
    .torch_uniform = torch_uniform,
    .torch_normal = torch_normal,
    .torch_below = torch_below,
    .torch_drop = torch_drop,
#endif
};
