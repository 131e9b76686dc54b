"""Chunks of dask arrays: the intervals of a call's axes, and arrays that are cut at them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import dask.array
import numpy as np
from numpy.typing import NDArray

da: Any = dask.array  # its functions have no types

Interval: TypeAlias = tuple[int, int]


def intervals_of(sizes: Iterable[int]) -> list[Interval]:
    """Return the intervals of consecutive chunks, without the empty ones."""
    return [(a, b) for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0)) if a < b]


def _split_at(bounds: Iterable[int]) -> list[Interval]:
    return list(itertools.pairwise(sorted({0, *bounds})))


class Operand:
    """A dask array, chunked so that each interval of the whole problem needs exactly one of its blocks."""

    def __init__(self, array: Any, intervals: Sequence[list[Interval]]) -> None:
        self.blocks: list[list[int]] = []  # on each axis, the block of each interval
        chunks = []
        for n, own_size in zip(intervals, array.shape, strict=True):
            whole = n[-1][1] if n else 0
            shared = max(1, whole // max(1, own_size))  # positions that share one of this array: all, or a group's
            own = [(a // shared, (b - 1) // shared + 1) for a, b in n]
            distinct = list(dict.fromkeys(own))
            self.blocks.append([distinct.index(interval) for interval in own] or [0])
            chunks.append(tuple(b - a for a, b in distinct) or (own_size,))
        self.array = array.rechunk(tuple(chunks))

    def at(self, index: Iterable[int]) -> tuple[Any, ...]:
        """Return the key of the block for these intervals."""
        return (self.array.name, *(blocks[i] for blocks, i in zip(self.blocks, index, strict=True)))


def head_intervals(n: int, arrays: Sequence[Any], axis: int) -> list[Interval]:
    """Return common chunks of the heads, in which each array has whole groups, or all heads are in one group."""
    groups = {n // array.shape[axis] for array in arrays if 1 < array.shape[axis] < n}
    bounds = {
        n // array.shape[axis] * end
        for array in arrays
        if array.shape[axis] > 1
        for end in itertools.accumulate(array.chunks[axis])
    } | {n}
    for group in groups:
        for a, b in _split_at(bounds):
            first, last = -(-a // group) * group, b // group * group
            if a // group != (b - 1) // group:
                bounds |= {first, last}
    return _split_at(bounds)


def batch_intervals(n: int, arrays: Sequence[Any], axis: int) -> list[Interval]:
    """Return common chunks of a batch dimension."""
    ends = (itertools.accumulate(array.chunks[axis]) for array in arrays if array.shape[axis] == n)
    return _split_at({n}.union(*ends))


def _repeat(blocks: NDArray[np.bool_], first: int, n: int, size: int, axis: int) -> NDArray[np.bool_]:
    """Return n elements along the axis, from ``first`` on, of the blocks repeated ``size`` times."""
    return blocks.take(np.arange(first, first + n) // size, axis)


def _repeat_blocks(blocks: Any, size: int, axis: int, intervals: list[Interval]) -> Any:
    """Return the blocks repeated ``size`` times along the axis, with a chunk for each interval."""
    parts = []
    for start, end in intervals:
        index: list[Any] = [slice(None)] * blocks.ndim
        index[axis] = slice(start // size, (end - 1) // size + 1)
        part = blocks[tuple(index)].rechunk({axis: -1})
        chunks = list(part.chunks)
        chunks[axis] = (end - start,)
        parts.append(part.map_blocks(_repeat, start % size, end - start, size, axis, chunks=chunks, dtype=bool))
    return da.concatenate(parts, axis=axis)


def add_blocks(attn_mask: Any, block_mask: Any, size: int, query: Any, key: Any) -> Any:
    """Return attn_mask without the pairs that the block mask hides."""
    blocks = block_mask[(None,) * (2 - block_mask.ndim)] if block_mask.ndim < 2 else block_mask
    for axis, chunks in ((-2, query.chunks[-2]), (-1, key.chunks[-2])):
        if blocks.shape[axis] > 1:
            blocks = _repeat_blocks(blocks, size, axis, intervals_of(chunks))
    if attn_mask is None:
        return blocks
    return attn_mask & blocks if attn_mask.dtype == bool else da.where(blocks, attn_mask, attn_mask.dtype.type(-np.inf))
