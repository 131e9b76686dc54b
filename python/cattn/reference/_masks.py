"""The keys that a query sees by position: causality, windows, lengths, padding on the left."""

import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cattn._input.types import CausalAlignmentWarning, Window

from ._shared import Bools, Integers

Causal = bool | np.bool_ | str


class Ranges(NamedTuple):
    """The arguments that give each query one range of keys. All but the window are numbers, or arrays (*batch,)."""

    is_causal: Causal
    query_offset: ArrayLike | None = None
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    key_value_seq_starts: ArrayLike | None = None
    window_size: Window = None


def causal_mask(
    T_q: int,
    T_k: int | None = None,
    *,
    is_causal: Causal = "lower_right",
    query_offset: int | None = None,
    window_size: Window = (-1, -1),
) -> Bools:
    """Return a causal mask, True where the key is visible.

    With T_q = T_k this is the lower triangle. Otherwise "upper_left" aligns the first query with the first key,
    "lower_right" (the default: queries are the newest tokens of a longer text) aligns the last query with the last key,
    and `query_offset` is the position of the first query. `window_size` (left, right) hides all keys except
    p - left .. p + right around the position p of a query; -1 or None: no bound.

    Examples
    --------
    >>> causal_mask(2, 4).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    >>> causal_mask(2, 4, is_causal="upper_left").astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0]])
    >>> causal_mask(3, window_size=(1, -1), is_causal=False).astype(int)
    array([[1, 1, 1],
           [1, 1, 1],
           [0, 1, 1]])
    """
    is_causal = is_causal if query_offset is None or not is_causal else "upper_left"
    ranges = Ranges(is_causal, query_offset, window_size=window_size)
    return visible_keys(T_q, T_q if T_k is None else T_k, ranges)[0]


def visible_keys(T_q: int, T_k: int, ranges: Ranges) -> tuple[Bools, Integers, Integers]:
    """Return which keys the queries of each batch entry see (*batch, T_q, T_k), their positions, and the first keys.

    Positions have the shape (*batch, T_q), the indices of the first valid keys (*batch,).

    Queries and keys at or after their length do not exist: such a query sees no key, such a key is hidden. Neither do
    keys before the first valid one.
    """
    left, right = (np.inf if side is None or side == -1 else side for side in ranges.window_size or (None, None))
    queries = _counts(ranges.query_seq_lengths, T_q, T_q, "query_seq_lengths")
    keys = _counts(ranges.key_value_seq_lengths, T_k, T_k, "key_value_seq_lengths")
    starts = _counts(ranges.key_value_seq_starts, 0, T_k, "key_value_seq_starts")
    position = positions(ranges, T_q, T_k, keys - queries, windowed=left < np.inf or right < np.inf)
    i, j, p = np.arange(T_q)[:, None], np.arange(T_k), position[..., None]
    exists = (i < queries[..., None, None]) & (j >= starts[..., None, None]) & (j < keys[..., None, None])
    visible = exists & (j >= p - left) & (j <= p + right)
    return (visible & (j <= p) if ranges.is_causal else visible), position, starts


def positions(ranges: Ranges, T_q: int, T_k: int, lower_right: ArrayLike, windowed: bool = False) -> Integers:
    """Return absolute positions of the queries, (*shape of the offset, T_q); `lower_right` is T_k - T_q."""
    is_causal, query_offset, *_ = ranges
    is_causal = bool(is_causal) if isinstance(is_causal, np.bool_) else is_causal
    if is_causal not in (False, True, "upper_left", "lower_right"):
        raise ValueError(f'is_causal must be False, True, "upper_left" or "lower_right", got {is_causal!r}')
    bare = is_causal is True or (is_causal is False and windowed)
    if is_causal == "lower_right":
        if query_offset is not None:
            raise ValueError('is_causal="lower_right" sets the offset to T_k - T_q: give query_offset or it, not both')
        query_offset = lower_right
    elif bare and query_offset is None and T_q != T_k:
        text = f'T_q = {T_q}, T_k = {T_k}: query i stands at key i ("upper_left"); say so, or say "lower_right"'
        warnings.warn(text, CausalAlignmentWarning, stacklevel=4)
    return _integers(0 if query_offset is None else query_offset, "query_offset")[..., None] + np.arange(T_q)


def _integers(numbers: ArrayLike, name: str) -> Integers:
    array = np.asarray(numbers)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    return array.astype(np.int64)


def _counts(counts: ArrayLike | None, default: int, most: int, name: str) -> Integers:
    array = _integers(default if counts is None else counts, name)
    if np.any((array < 0) | (array > most)):
        raise ValueError(f"{name} must be between 0 and {most}, got {counts!r}")
    return array
