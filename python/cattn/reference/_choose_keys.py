"""The choice of the keys that sparse attention reads."""

from __future__ import annotations

import math
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from cattn._input.objects import Stored
from cattn._input.types import Layout, Window
from cattn.functional._options import RangeOptions, spelled_out

from ._attention import score
from ._masks import Causal, Ranges, visible_keys
from ._shared import Bools, Floats, Integers, boolean, deliver, numbers, quiet


class _Options(RangeOptions, total=False):
    scale: float | None
    enable_gqa: bool | None
    layout: Layout
    bias: ArrayLike | None
    window_size: Window


@spelled_out()
@quiet
def choose_keys(
    query: ArrayLike,
    key: Stored,
    count: int,
    *,
    weights: ArrayLike | None = None,
    activation: str | None = None,
    block_size: int = 1,
    pooled: bool = False,
    first: int = 0,
    last: int = 0,
    attn_mask: ArrayLike | None = None,
    is_causal: Causal = False,
    return_scores: bool = False,
    out: Integers | None = None,
    **options: Unpack[_Options],
) -> Any:
    """Return the keys of the best blocks for each query, in ascending order, then -1.

    The parameters are the same as in `cattn.choose_keys`.

    Examples
    --------
    >>> choose_keys(np.ones((2, 1)), np.array([[1.0], [3.0], [2.0]]), 2)
    array([[1, 2],
           [1, 2]], dtype=int32)
    """
    given = dict[str, Any](options)
    of_products = {name: given.pop(name) for name in ("scale", "enable_gqa", "layout")}
    problem = score((query, key, key), **of_products)
    terms = np.maximum(problem.products, 0) if activation == "relu" else problem.products
    if weights is not None:
        of_heads = numbers(weights, "weights")
        terms = terms * (np.expand_dims(of_heads, -2) if problem.one_head else of_heads)[..., None]
    scores = terms.sum(axis=-3)  # (*batch, T_q, rows of key)
    visible = np.ones(scores.shape, np.bool_)
    for added in (attn_mask, given.pop("bias")):
        if added is None:
            continue
        term = np.asarray(added)
        term = term if term.ndim < 3 or problem.one_head else term[..., 0, :, :]
        if term.dtype.kind == "f":
            scores = scores + term
            visible &= term != -np.inf
        else:
            visible &= boolean(term, "attn_mask")

    rows = scores.shape[-1]
    if pooled and given["key_value_seq_lengths"] is None:
        given["key_value_seq_lengths"] = rows * block_size
    T_k = rows * block_size + block_size - 1 if pooled else rows
    in_range, _, starts = visible_keys(scores.shape[-2], T_k, Ranges(is_causal, **given))
    in_range = np.broadcast_to(in_range, (*scores.shape[:-1], T_k))
    starts = np.broadcast_to(starts[..., None], scores.shape[:-1])
    blocks = rows if pooled else -(-rows // block_size)
    edges = (1 if (given["window_size"] or (-1,))[0] in (-1, None) else 2) * (block_size - 1) if pooled else 0
    n = min(min(count, blocks) * block_size + edges, T_k)
    indices = np.full((*scores.shape[:-1], n), -1, np.int32)
    chosen_scores = np.full(indices.shape, -np.inf)
    for row in np.ndindex(scores.shape[:-1]):
        tokens, whose = np.flatnonzero(in_range[row]), scores[row]
        block = (tokens - starts[row]) // block_size
        if pooled:
            found = _of_whole_blocks(tokens, block, whose, visible[row], block_size)
        else:
            seen = visible[row][tokens]
            found = tokens[seen], _best_of_blocks(block[seen], whose[tokens[seen]]), np.empty(0, np.int64)
        keys, by_block, free = found
        ends = _ends(tokens, block, block_size if pooled else 1)
        kept = _best(by_block, count, ends[0] + first, ends[1] + 1 - last)
        of_key = {int(k): by_block[int(b)] for k, b in zip(keys, (keys - starts[row]) // block_size, strict=True)
                  if int(b) in kept} | dict.fromkeys(map(int, free), np.nan)  # fmt: skip
        for place, k in enumerate(sorted(of_key)):
            indices[(*row, place)], chosen_scores[(*row, place)] = k, of_key[k]
    if not problem.one_head:
        indices, chosen_scores = (np.expand_dims(x, -3) for x in (indices, chosen_scores))
    result = deliver(indices, out)
    return (result, chosen_scores) if return_scores else result


def _of_whole_blocks(
    tokens: Integers, block: Integers, scores: Floats, visible: Bools, size: int
) -> tuple[Integers, dict[int, float], Integers]:
    """Return the tokens of whole blocks that may be chosen, the scores of these blocks, and the tokens of others."""
    whole = np.bincount(block, minlength=len(scores) + 1)[: len(scores)] == size
    is_whole = np.append(whole, False)[block]
    by_block = {int(b): float(scores[b]) for b in np.flatnonzero(whole & visible)}
    return tokens[np.isin(block, list(by_block))], by_block, tokens[~is_whole]


def _best_of_blocks(block: Integers, scores: Floats) -> dict[int, float]:
    """Return the largest score of each block; NaN only if it has no other."""
    found: dict[int, float] = {}
    for b, own in zip(block.tolist(), scores.tolist(), strict=True):
        found[b] = float(np.fmax(found.get(b, np.nan), own))
    return found


def _ends(tokens: Integers, block: Integers, size: int) -> tuple[int, int]:
    """Return the first and the last block that has `size` of these tokens."""
    full = np.flatnonzero(np.bincount(block, minlength=1) >= size) if len(tokens) else tokens
    return (int(full[0]), int(full[-1])) if len(full) else (0, -1)


def _best(scores: dict[int, float], count: int, first: int, last: int) -> set[int]:
    """Return the blocks with the largest scores. Those before `first` and from `last` on win, NaN loses."""

    def place(block: int) -> tuple[bool, bool, float, int]:
        own = scores[block]
        return first <= block < last, math.isnan(own), 0.0 if math.isnan(own) else -own, block

    return set(sorted(scores, key=place)[:count])
