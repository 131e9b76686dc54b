"""Attention: scores, visibility, weights, and the weighted sum of the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cattn._input.arrays import refuse_scalar
from cattn._input.objects import Stored
from cattn._input.types import AttentionOutput, AttentionStatistics, ComputeDType, Layout, LseDType
from cattn.functional._options import DenseOptions, spelled_out

from ._dropout import apply_dropout, dropout_keep
from ._masks import Causal, Ranges, visible_keys
from ._shared import (
    Bools,
    Floats,
    boolean,
    deliver,
    logistic,
    new_seed,
    numbers,
    plain,
    probability,
    quiet,
    rounded_to_bfloat16,
)
from ._softmax import softmax

if TYPE_CHECKING:
    from cattn.cache import KVCache


STAGES = ("qk", "softcap", "bias", "mask", "softmax", "dropout")


class _Options(DenseOptions, total=False):
    key_indices: ArrayLike | None
    gate: ArrayLike | None
    compute_dtype: ComputeDType
    rng: int | None
    return_weights: bool
    return_lse: bool | LseDType
    return_dropout_mask: bool
    out: Floats | AttentionOutput | None


@spelled_out()
@quiet
def scaled_dot_product_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Causal = False,
    **options: Unpack[_Options],
) -> Floats | AttentionOutput:
    """Return softmax(scale * query @ key.T) @ value over the visible keys, for any number of batch dimensions.

    The parameters that are not listed are the same as in `cattn.scaled_dot_product_attention`.

    Parameters
    ----------
    query, key, value : array_like (..., T_q, D), (..., T_k, D), (..., T_k, D_v)
    compute_dtype : {None, "bfloat16", "bfloat16_tiles"}
        Either word rounds query, key and value, but not the weights.
    rng : int or None
        A 64-bit seed, or None for a random one; see `dropout_keep`.
    out : ndarray of float64 (..., T_q, D_v), or an AttentionOutput of arrays

    Returns
    -------
    ndarray (..., T_q, D_v), or an AttentionOutput if it has more than one field
        A query that sees no key has output 0, weights 0 and LSE -inf. A hidden key has no influence, even if it or its
        value is NaN. NaN or infinity in a visible key affects the rows that see it.
    """
    p, given = probability(dropout_p, "dropout_p"), dict[str, Any](options)
    sinks, gate, rng, out = (given.pop(name) for name in ("sinks", "gate", "rng", "out"))
    extras = {name: given.pop(f"return_{name}") for name in ("weights", "lse", "dropout_mask")}
    problem = score((query, key, value), attn_mask, is_causal, **given)
    if problem.indices is not None and (p > 0 or extras["dropout_mask"]):
        raise ValueError("dropout and key_indices do not go together")
    weights, lse = normalize(problem.scores, problem.visible, sinks)
    seed = new_seed(rng)
    drop_bits = _dropout_bits(p, seed, problem)
    dense, visible = problem.of_all_keys(apply_dropout(weights, drop_bits, p)), problem.of_all_keys(problem.visible)
    result = _weighted_sum(dense, problem.value, visible, is_mean=p == 0)
    if gate is not None:
        factor = logistic(of_output(gate, "gate", problem, given["layout"]))
        result = np.where(visible.any(axis=-1, keepdims=True), result * factor, 0.0)

    if problem.one_head:
        result, weights = result[..., 0, :, :], weights[..., 0, :, :]
        drop_bits, lse = drop_bits[..., 0, :, :], lse[..., 0, :]
    into = out if isinstance(out, AttentionOutput) else AttentionOutput(out)
    result = deliver(reordered(result, given["layout"]), into.out)
    if not (any(extras.values()) or isinstance(out, AttentionOutput)):
        return result
    return AttentionOutput(
        result,
        deliver(weights, into.weights) if extras["weights"] else None,
        deliver(lse, into.lse) if extras["lse"] else None,
        deliver(drop_bits, into.dropout_mask) if extras["dropout_mask"] else None,
        seed if p > 0 else None,
    )


def causal_attention(
    query: ArrayLike,
    key: Stored | KVCache,
    value: Stored | None = None,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    *,
    query_offset: ArrayLike | None = None,
    **keywords: Any,
) -> Floats | AttentionOutput:
    """Return `scaled_dot_product_attention` in which a token sees itself and the tokens before it.

    A cache holds the keys and the values, and its lengths are the numbers of tokens of the sequences.

    The queries are the last ones of the sequence ("lower_right"), so that a few new queries with a longer cache of keys
    give the results of a full pass. `query_offset` sets the position of query 0 instead.
    """
    if value is None:
        key, value, of_lengths = cast("KVCache", key)._attended_by(query, False)
        query_offset = of_lengths if query_offset is None else query_offset
    keywords |= {"query_offset": query_offset, "is_causal": "lower_right" if query_offset is None else "upper_left"}
    return scaled_dot_product_attention(query, cast("Stored", key), value, attn_mask, dropout_p, **keywords)


def varlen_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    alignment: str | None = None,
    return_lse: bool | LseDType = False,
    **keywords: Any,
) -> Floats | AttentionOutput:
    """Return attention of packed sequences: (total_q, H, D), (total_k, H_kv, D), (total_k, H_kv, D_v).

    The sequences are padded to a batch with lengths. It takes the keywords of
    `scaled_dot_product_attention`. `alignment` gives the positions of the queries of a sequence, with and without
    causality: "upper_left", or "lower_right" (the last one stands at the last key).
    """
    edges_q, edges_k = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k)
    result = scaled_dot_product_attention(
        pad(query, edges_q, "query"), pad(key, edges_k, "key"), pad(value, edges_k, "value"), return_lse=True,
        gate=pad_gate(keywords.pop("gate", None), query, value, edges_q),
        **padded_options(edges_q, edges_k, alignment, keywords),
    )  # fmt: skip
    assert isinstance(result, AttentionOutput)
    out = unpad(result.out, edges_q)
    return AttentionOutput(out, lse=unpad(result.lse[..., None], edges_q)[..., 0].T) if return_lse else out


def pad_gate(gate: ArrayLike | None, query: ArrayLike, value: Stored, edges: NDArray[Any]) -> Floats | None:
    """Return the gate of packed sequences as `pad` does, in the shape of the output."""
    if gate is None:
        return None
    shape = (*np.shape(query)[:-1], np.shape(plain(value, "value"))[-1])
    return pad(np.broadcast_to(numbers(gate, "gate"), shape), edges, "gate")


def pad(packed: Stored, edges: NDArray[Any], name: str) -> Floats:
    """Return packed rows (total, H, D) as a batch (B, H, longest, D), padded with zeros."""
    rows = plain(packed, name)
    batch = np.zeros((len(edges) - 1, int(np.diff(edges).max(initial=0)), *rows.shape[1:]))
    for entry, first, last in zip(batch, edges[:-1], edges[1:], strict=True):
        entry[: last - first] = rows[first:last]
    return batch.swapaxes(1, 2)


def unpad(batch: Floats, edges: NDArray[Any]) -> Floats:
    """Undo `pad`."""
    return np.concatenate([entry[:, :n].swapaxes(0, 1) for entry, n in zip(batch, np.diff(edges), strict=True)])


def padded_options(
    edges_q: NDArray[Any], edges_k: NDArray[Any], alignment: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of a padded call, given the options of packed sequences."""
    lengths_q, lengths_k = np.diff(edges_q), np.diff(edges_k)
    options = options | {"query_seq_lengths": lengths_q, "key_value_seq_lengths": lengths_k}
    if alignment is None:
        return options
    return options | {
        "query_offset": lengths_k - lengths_q if alignment == "lower_right" else 0,
        "is_causal": "upper_left" if options.get("is_causal") else False,
    }


@quiet
def attention_weights(
    query: ArrayLike,
    key: Stored,
    attn_mask: ArrayLike | None = None,
    is_causal: Causal = False,
    *,
    sinks: ArrayLike | None = None,
    dropout_p: float = 0.0,
    rng: int | None = None,
    stage: str = "softmax",
    out: Floats | None = None,
    **options: Any,
) -> Floats:
    """Return scores or weights after a stage of attention, (..., T_q, T_k).

    The stages: "qk" (scaled products), "softcap", "bias" (slopes and additive masks), "mask" (hidden scores are -inf),
    "softmax" (the weights), "dropout" (the weights that multiply the values). The other options
    belong to `scaled_dot_product_attention`.

    Examples
    --------
    >>> attention_weights(np.zeros((2, 3)), np.zeros((2, 3)), is_causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    >>> attention_weights(np.zeros((2, 3)), np.zeros((2, 3)), is_causal=True, stage="mask")
    array([[  0., -inf],
           [  0.,   0.]])
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {STAGES}, got {stage!r}")
    step = STAGES.index(stage)
    problem = score((query, key, key), attn_mask, is_causal, **options)
    result = {"qk": problem.products, "softcap": problem.capped}.get(stage, problem.scores)
    if stage == "mask":
        result = np.where(problem.visible, result, -np.inf)
    elif step > STAGES.index("mask"):
        result, _ = normalize(result, problem.visible, sinks)
    if stage == "dropout":
        p = probability(dropout_p, "dropout_p")
        result = apply_dropout(result, _dropout_bits(p, new_seed(rng), problem), p)
    return deliver(result[..., 0, :, :] if problem.one_head else result, out)


def _dropout_bits(p: float, seed: int, problem: Problem) -> Bools:
    """Return the dropout mask of all weights. Positions and keys count from the first valid key of each batch entry.

    Nothing is dropped from the padding before it.
    """
    *batch_shape, num_heads, _, T_k = problem.scores.shape
    if p == 0:
        return np.ones(problem.scores.shape, np.bool_)
    batch = np.arange(math.prod(batch_shape)).reshape(*batch_shape, 1, 1)
    starts = problem.starts[..., None, None]
    position = problem.position[..., None, :] - starts
    kept = dropout_keep(p, seed, batch, np.arange(num_heads)[:, None], position, T_k)
    keys = np.broadcast_to(np.arange(T_k) - starts[..., None], kept.shape)
    return np.take_along_axis(kept, np.maximum(keys, 0), axis=-1) | (keys < 0)


class Problem(NamedTuple):
    query: Floats  # (*batch, H, T_q, D)
    key: Floats  # (*batch, H, T_k, D)
    value: Floats  # (*batch, H, T_k, D_v)
    scale: float
    products: Floats  # (*batch, H, T_q, T_k): scaled
    capped: Floats  # the products after the softcap
    scores: Floats  # after slopes and additive masks
    visible: Bools  # the same shape
    position: NDArray[np.int64]  # (*batch or fewer dimensions, T_q)
    starts: NDArray[np.int64]  # (*batch or fewer dimensions): the first valid key
    one_head: bool  # the caller's arrays have no head axis
    indices: NDArray[np.int64] | None  # (*batch, H, T_q, n): the keys of each query, instead of all T_k

    def of_all_keys(self, pairs: NDArray[Any]) -> NDArray[Any]:
        """Return numbers of pairs (..., T_q, n) as (..., T_q, T_k): the numbers of a repeated key are added."""
        if self.indices is None:
            return pairs
        T_k = self.key.shape[-2]
        dense = np.zeros((math.prod(pairs.shape[:-1]), T_k + 1), pairs.dtype)  # -1 is the column after the last key
        rows = np.arange(len(dense))[:, None]
        shape = (len(dense), pairs.shape[-1])
        np.add.at(dense, (rows, self.indices.reshape(shape)), pairs.reshape(shape))
        return dense[:, :T_k].reshape(*pairs.shape[:-1], T_k)

    def of_listed_keys(self, pairs: NDArray[Any], filling: Any = 0) -> NDArray[Any]:
        """Return numbers of pairs (..., T_q, T_k) as (..., T_q, n), with `filling` where there is no key."""
        if self.indices is None:
            return pairs
        no_key = np.full((*pairs.shape[:-1], 1), filling, pairs.dtype)
        return np.take_along_axis(np.concatenate([pairs, no_key], axis=-1), self.indices, axis=-1)


def score(
    inputs: tuple[ArrayLike, Stored, Stored],
    attn_mask: ArrayLike | None = None,
    is_causal: Causal = False,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    **options: Any,
) -> Problem:
    """Return scores and visibility of every pair, with an axis for the heads."""
    bias, block_mask, key_indices = (options.pop(name, None) for name in ("bias", "block_mask", "key_indices"))
    of_inputs = {name: options.pop(name) for name in ("enable_gqa", "layout", "compute_dtype") if name in options}
    q, k, v, one_head = with_heads(inputs, **of_inputs)
    shape = (*np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), q.shape[-2], k.shape[-2])
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"value has {v.shape[-2]} rows, key has {k.shape[-2]}")

    scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    products = np.array(np.broadcast_to((q * scale) @ np.swapaxes(k, -1, -2), shape))
    in_range, position, starts = visible_keys(shape[-2], shape[-1], Ranges(is_causal, **options))
    visible = np.array(np.broadcast_to(in_range[..., None, :, :], shape))
    scores = capped = softcap * np.tanh(products / softcap) if softcap else products
    if alibi_slopes is not None:
        distance = np.abs(position[..., None, :, None] - np.arange(shape[-1]))
        scores = scores - numbers(alibi_slopes, "alibi_slopes")[..., None, None] * distance
    for name, given in (("attn_mask", attn_mask), ("bias", bias)):
        if given is None:
            continue
        if name == "attn_mask":
            refuse_scalar(given, name, True)
        term = np.asarray(given)
        if one_head and term.ndim > 2:
            term = np.expand_dims(term, -3)
        if term.dtype.kind == "f":
            scores = scores + np.broadcast_to(term, shape)
            visible &= term != -np.inf
        elif name == "attn_mask":
            visible &= np.broadcast_to(boolean(term, name), shape)
        else:
            raise TypeError(f"bias must hold floats, got {term.dtype}; a boolean mask goes to attn_mask")

    if block_mask is not None:
        blocks, size = block_mask
        if one_head and blocks.ndim > 2:
            blocks = np.expand_dims(blocks, -3)
        visible &= np.broadcast_to(repeat_blocks(blocks, size, shape[-2], shape[-1]), shape)

    q, k, v = (np.broadcast_to(a, shape[:-2] + a.shape[-2:]) for a in (q, k, v))
    problem = Problem(q, k, v, scale, products, capped, scores, visible, position, starts, one_head, None)
    if key_indices is None:
        return problem
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes and key_indices do not go together")
    indices = np.asarray(key_indices, np.int64)
    if one_head and indices.ndim > 2:
        indices = np.expand_dims(indices, -3)
    if (indices < -1).any() or (indices >= shape[-1]).any():
        raise ValueError(f"key_indices must be from -1 to {shape[-1] - 1}")
    problem = problem._replace(indices=np.broadcast_to(indices, (*shape[:-1], indices.shape[-1])))
    products, capped, scores = (problem.of_listed_keys(a, -np.inf) for a in (products, capped, scores))
    visible = problem.of_listed_keys(visible, False)
    return problem._replace(products=products, capped=capped, scores=scores, visible=visible)


def with_heads(
    inputs: tuple[ArrayLike, Stored, Stored],
    enable_gqa: bool | None = None,
    layout: Layout = "bhtd",
    compute_dtype: ComputeDType = None,
) -> tuple[Floats, Floats, Floats, bool]:
    """Return query, key and value as (*batch, H, T, width), and whether the caller's arrays have no axis of heads."""
    arrays = [reordered(plain(a, name), layout) for a, name in zip(inputs, ("query", "key", "value"), strict=True)]
    if compute_dtype is not None:
        arrays = [rounded_to_bfloat16(a) for a in arrays]
    rank = max(a.ndim for a in arrays)
    arrays = [a.reshape((1,) * (rank - a.ndim) + a.shape) for a in arrays]
    one_head = rank == 2 or (rank == 3 and not enable_gqa and layout == "bhtd")
    if one_head:
        arrays = [np.expand_dims(a, -3) for a in arrays]
    return *match_heads(arrays[0], arrays[1], arrays[2], enable_gqa), one_head


def reordered(array: Floats, layout: Layout) -> Floats:
    """Return an array (..., heads, tokens, width) in this layout, or the other way round."""
    if layout not in ("bhtd", "bthd"):
        raise ValueError(f"layout must be 'bhtd' or 'bthd', got {layout!r}")
    return array.swapaxes(-3, -2) if layout == "bthd" else array


def of_output(given: ArrayLike, name: str, problem: Problem, layout: Layout) -> Floats:
    """Return an array that broadcasts to the output, in the shape (..., heads, T_q, D_v)."""
    shape = (*problem.scores.shape[:-1], problem.value.shape[-1])
    own = numbers(given, name)
    if problem.one_head:
        return np.broadcast_to(own, shape[:-3] + shape[-2:])[..., None, :, :]
    return np.broadcast_to(reordered(own[(None,) * (3 - own.ndim)], layout), shape)


def repeat_blocks(blocks: Bools, size: int, T_q: int, T_k: int) -> Bools:
    """Return the mask of single pairs (..., T_q, T_k) of a mask of blocks."""
    for axis, length in ((-2, T_q), (-1, T_k)):
        counts = -(-length // size)
        blocks = np.broadcast_to(blocks, np.broadcast_shapes(blocks.shape, (counts, 1) if axis == -2 else (counts,)))
        blocks = np.repeat(blocks, size, axis=axis).swapaxes(axis, -1)[..., :length].swapaxes(axis, -1)
    return blocks


def normalize(scores: Floats, visible: Bools, sinks: ArrayLike | None) -> tuple[Floats, Floats]:
    """Return weights and LSE of the visible scores. A sink is an extra score, whose weight is left out."""
    if sinks is not None:
        sink = np.broadcast_to(numbers(sinks, "sinks")[..., None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, sink], axis=-1)
        visible = np.concatenate([visible, sink > -np.inf], axis=-1)
    weights = softmax(scores, where=visible)[..., : visible.shape[-1] - (sinks is not None)]
    row_max = np.max(scores, axis=-1, initial=-np.inf, where=visible)
    row_sum = np.where(visible, np.exp(scores - row_max[..., None]), 0.0).sum(axis=-1)
    return weights, np.where(row_max == -np.inf, -np.inf, row_max + np.log(row_sum))


def match_heads(q: Floats, k: Floats, v: Floats, enable_gqa: bool | None) -> tuple[Floats, Floats, Floats]:
    """Repeat key and value heads for the groups of query heads that share them."""
    num_heads, (num_kv,) = q.shape[-3], np.broadcast_shapes(k.shape[-3:-2], v.shape[-3:-2])
    if num_heads == num_kv or 1 in (num_heads, num_kv):
        return q, k, v
    if num_kv == 0 or num_heads % num_kv or enable_gqa is False:
        raise ValueError(f"query has {num_heads} heads, key and value have {num_kv}")
    k, v = (a if a.shape[-3] == 1 else np.repeat(a, num_heads // num_kv, axis=-3) for a in (k, v))
    return q, k, v


def _weighted_sum(weights: Floats, value: Floats, visible: Bools, is_mean: bool = False) -> Floats:
    """Multiply weights @ value without the products 0 * NaN and 0 * inf of keys that are not visible.

    A mean of finite values is finite: rounding does not take it beyond the largest number.
    """
    finite = np.isfinite(value)
    total: Floats = weights @ np.where(finite, value, 0.0)
    if is_mean:
        limits = np.finfo(total.dtype)
        total = np.clip(total, limits.min, limits.max)
    for j in np.flatnonzero(~finite.all(axis=(*range(value.ndim - 2), -1))):  # each is added to the rows that see it
        row = np.where(finite, 0.0, value)[..., j, None, :]
        total += np.where(visible[..., j, None], weights[..., j, None] * row, 0.0)
    return total


@quiet
def attention_statistics(
    query: ArrayLike,
    key: Stored,
    attn_mask: ArrayLike | None = None,
    is_causal: Causal = False,
    *,
    statistics: str | Sequence[str] | None = None,
    top_k: int = 0,
    observation_window: int | None = None,
    sinks: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    **options: Any,
) -> AttentionStatistics:
    """Return statistics of the attention weights.

    A row with NaN among its weights, or with NaN for its log-sum-exp, has NaN in all of its statistics. The other
    options are the same as in `attention_weights`.

    Examples
    --------
    >>> attention_statistics(np.zeros((2, 3)), np.zeros((2, 3)), is_causal=True).received
    array([1.5, 0.5])
    """
    if "key_indices" in options:
        raise TypeError("attention_statistics takes no key_indices")
    problem = score((query, key, key), attn_mask, is_causal, query_seq_lengths=query_seq_lengths, **options)
    scores, visible = problem.scores, problem.visible
    w, lse = normalize(scores, visible, sinks)
    T_q, T_k = scores.shape[-2:]
    undefined = np.isnan(lse) | np.isnan(w).any(-1)
    w = np.where(visible & undefined[..., None], np.nan, w)
    best = np.where(visible & ~undefined[..., None], scores, -np.inf)
    max_score = np.where(np.isnan(lse), np.nan, best.max(-1, initial=-np.inf))
    sink = np.zeros_like(lse) if sinks is None else np.exp(numbers(sinks, "sinks")[..., None] - lse)
    order = np.argsort(-best, axis=-1, kind="stable")[..., :top_k]
    seen = np.take_along_axis(best, order, -1) > -np.inf
    top_weights = np.where(undefined[..., None], np.nan, np.take_along_axis(w, order, -1) * seen)
    n = np.asarray(T_q if query_seq_lengths is None else query_seq_lengths)[..., None, None, None]
    counts = np.arange(T_q)[:, None] >= n - (T_q if observation_window is None else observation_window)
    counted = np.where(counts, w, 0.0)
    fields = {
        "lse": lse,
        "max_score": max_score,
        "entropy": 0.0 - np.where(w == 0, 0.0, w * np.log(w)).sum(-1),  # +0 for a single key
        "max_weight": np.where(undefined, np.nan, w.max(-1, initial=0.0)),
        "sink_weight": np.where(undefined, np.nan, np.nan_to_num(sink, nan=0.0)),
        "distance": (w * np.abs(problem.position[..., None, :, None] - np.arange(T_k))).sum(-1),
        "received": counted.sum(-2),
        "received_max": counted.max(-2, initial=0.0),
    }
    names = [statistics] if isinstance(statistics, str) else list(fields) if statistics is None else statistics
    wanted = {name: fields[name] for name in names}
    if top_k:
        wanted |= {"top_keys": np.where(seen, order, -1), "top_weights": top_weights}
    if problem.one_head:  # the axis of heads is the third from the end of top keys, the second of all others
        wanted = {name: a.squeeze(-3 if name.startswith("top") else -2) for name, a in wanted.items()}
    return AttentionStatistics(**wanted)


def varlen_attention_statistics(
    query: ArrayLike,
    key: Stored,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    alignment: str | None = None,
    **keywords: Any,
) -> AttentionStatistics:
    """Return the statistics of packed sequences: (total_q, H, D), (total_k, H_kv, D).

    The sequences are padded to a batch with lengths, as in `varlen_attention`.
    """
    edges_q, edges_k = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k)
    result = attention_statistics(
        pad(query, edges_q, "query"), pad(key, edges_k, "key"), **padded_options(edges_q, edges_k, alignment, keywords)
    )
    fields = {}
    for name, field in result._asdict().items():
        if field is None:
            continue
        edges = edges_k if name.startswith("received") else edges_q
        is_list = name.startswith("top")
        rows = unpad(field if is_list else field[..., None], edges).swapaxes(0, 1)  # (H, total, 1 or top_k)
        fields[name] = rows if is_list else rows[..., 0]
    return AttentionStatistics(**fields)
