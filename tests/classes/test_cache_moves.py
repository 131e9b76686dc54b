"""KVCache.keep, reorder and fork: the tokens that are left, attention's bits, errors before anything moves."""

from __future__ import annotations

import pickle
import signal
from typing import Any

import numpy as np
import pytest
from test_cache import Normal, make, tokens, zeros

import cattn
from support import assert_same_bits
from support.alarm import ALARM, set_alarm

ALL_DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn"]


def ragged_cache(normal: Normal, batch: tuple[int, ...], dtype: str) -> tuple[cattn.KVCache, np.ndarray, np.ndarray]:
    """Return a cache whose sequences have 8, 7, 6, ... of 8 tokens, and all that was appended."""
    cache = cattn.KVCache(batch, 3, 12, 8, 5, dtype)
    key, value = tokens(normal, cache, 8, cache.dtype if cache.dtype.itemsize > 1 else np.float32)
    cache.append(key, value)
    cache.truncate(8 - np.arange(int(np.prod(batch)), dtype=int).reshape(batch))
    return cache, key, value


def assert_holds(
    cache: cattn.KVCache, at: tuple[int, ...], key: np.ndarray, value: np.ndarray, query: np.ndarray
) -> None:
    """Compare one sequence with a cache to which only these tokens were appended: contents, and attention's bits."""
    alone = cattn.KVCache((), 3, 12, 8, 5, cache.dtype)
    alone.append(key, value)
    assert cache.lengths[at] == key.shape[-2]
    n = key.shape[-2]
    results = []
    for one, index in ((cache, at), (alone, ())):
        for part, whole in zip(alone._stores(), one._stores(), strict=True):
            assert_same_bits(whole[index][:, :n], part[:, :n])
        call = {"query": query[(None,) * len(index)], "key": one.k, "value": one.v, "enable_gqa": True}
        results.append(cattn.causal_attention(**call, query_offset=one.lengths - query.shape[-2])[index])
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("batch", [(), (3,), (2, 2), (1,) * 7])
def test_a_cache_keeps_tokens_as_if_only_they_had_been_appended(
    batch: tuple[int, ...], dtype: str, normal: Normal
) -> None:
    query, generator = normal(6, 1, 8), np.random.default_rng(5)
    for case in ("all", "mine", "padded", "lists", "again", "prefix"):
        cache, key, value = ragged_cache(normal, batch, dtype)
        rows = list(np.ndindex(batch))
        if case == "all":
            kept, indices = [[0, 1, 4, 2]] * len(rows), [0, 1, 4, 2]
        elif case == "again":  # more than there were
            kept = [[3, 3, 0, *range(4), 1, 2, 3, 0, 4]] * len(rows)
            indices = np.array(kept[0], np.uint8)
        elif case == "prefix":
            kept, indices = [[0, 1, 2]] * len(rows), np.array([0, 1, 2])[(None,) * len(batch)]
        else:
            longest = [int(n) for n in cache.lengths.ravel()]
            kept = [generator.permutation(n)[: max(1, n - 2 * (i % 3))].tolist() for i, n in enumerate(longest)]
            if case == "mine":
                kept = [row[:4] for row in kept]
                kept = [row + row[:1] * (4 - len(row)) for row in kept]
            most = max(map(len, kept))
            padded = [[-1] * (most - len(row)) + row for row in kept]  # padding on the left is no token, either
            if case == "lists":
                nested = np.empty(len(rows), object)
                nested[:] = kept
                indices = nested.reshape(batch).tolist()
            else:
                indices = np.array(padded).reshape(*batch, most)
        assert cache.keep(indices) is None
        cache.append(key[..., 2:3, :] if len(kept[0]) < 12 else key[..., :0, :],
                     value[..., 5:6, :] if len(kept[0]) < 12 else value[..., :0, :])  # fmt: skip
        for at, row in zip(rows, kept, strict=True):
            new_key, new_value = ([*row, 2], [*row, 5]) if len(kept[0]) < 12 else (row, row)
            assert_holds(cache, at, key[at][:, new_key], value[at][:, new_value], query)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("batch", [(3,), (3, 2), (3, 1, 1, 1, 2)])
@pytest.mark.parametrize("entries", [[2, 0, 1], [1, 1, 1], [0, 1, 0], [2], [2, 2, 0, 1, 0], []])
def test_a_reordered_batch_has_the_sequences_of_its_entries(
    entries: list[int], batch: tuple[int, ...], dtype: str, normal: Normal
) -> None:
    cache, key, value = ragged_cache(normal, batch, dtype)
    lengths = cache.lengths
    assert cache.reorder(np.array(entries, np.int32)) is None
    assert cache.batch_shape == (len(entries), *batch[1:])
    assert cache.k.shape[:-2] == (*cache.batch_shape, 3)
    assert cache.k.shape[-2] == lengths[entries].max(initial=0 if entries else 8)
    for at in np.ndindex(cache.batch_shape):
        old = (entries[at[0]], *at[1:])
        n = lengths[old]
        assert_holds(cache, at, key[old][:, :n], value[old][:, :n], normal(6, 1, 8))
    for scale in (cache._k_scale, cache._v_scale):
        assert scale is None or (scale > 0).all()  # attention refuses others, also of places that it does not read
    room = cache.max_len - cache.k.shape[-2]
    cache.append(*tokens(normal, cache, room, np.float32 if cache.dtype.itemsize != 2 else cache.dtype))
    twin = pickle.loads(pickle.dumps(cache))
    for now, then in zip(twin._stores(), cache._stores(), strict=True):
        assert_same_bits(now, then)
    assert repr(twin) == repr(cache)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_fork_goes_its_own_way(dtype: str, normal: Normal) -> None:
    cache, key, value = ragged_cache(normal, (2, 2), dtype)
    before = pickle.dumps(cache)
    fork = cache.fork()
    assert (repr(fork), fork.nbytes, fork.max_len) == (repr(cache), cache.nbytes, 12)
    assert not any(np.shares_memory(a, b) for a, b in zip(cache._stores(), fork._stores(), strict=True))
    fork.append(key[..., :2, :], value[..., :2, :])
    fork.keep([4, 0])
    fork.reorder([1])
    assert pickle.dumps(cache) == before
    assert_holds(fork, (0, 1), key[1, 1][:, [4, 0]], value[1, 1][:, [4, 0]], normal(6, 1, 8))


def test_older_views_of_a_cache_may_be_indices(normal: Normal) -> None:
    """What is read while tokens move is a copy, also of the lengths that a cache hands out."""
    cache, key, _ = ragged_cache(normal, (3,), "float32")
    indices = cache.lengths[:, None] - 1
    cache.keep(indices)
    assert_same_bits(cache.k[:, :, 0], np.stack([key[i, :, 7 - i] for i in range(3)]))
    assert indices.tolist() == [[7], [6], [5]]


def test_keep_takes_none_and_empty_batches(normal: Normal) -> None:
    cache = make(normal, (0,))
    cache.keep([3, 1, -1])
    assert cache.k.shape == (0, 3, 2, 8)
    cache.keep(np.zeros((0, 1), int))
    assert cache.k.shape == (0, 3, 1, 8)
    cache.reorder([])
    assert cache.k.shape == (0, 3, 1, 8)
    for nothing in ([], [[], []], [-1, -1], [[-1], [-1]]):
        cache = make(normal)
        cache.keep(nothing)
        assert cache.k.shape == (2, 3, 0, 8)
        cache.keep(nothing)
    cache = make(normal)
    cache.keep([[1], []])
    np.testing.assert_array_equal(cache.query_offset(), [1, 0])


@pytest.mark.parametrize(
    ("method", "given", "error", "message"),
    [
        ("keep", [4], ValueError, "indices must be between -1 and 3, got 4"),
        ("keep", [0, -2], ValueError, "indices must be between -1 and 3, got -2"),
        ("keep", [[0], [2]], ValueError, r"smaller than the lengths, \[4, 2\]; got 2 for the sequence \(1,\)"),
        ("keep", [2], ValueError, r"smaller than the lengths, \[4, 2\]; got 2 for the sequence \(1,\)"),
        ("keep", [[0, 1], [3]], ValueError, r"smaller than the lengths, \[4, 2\]; got 3 for the sequence \(1,\)"),
        ("keep", [[0, 1], [9]], ValueError, "indices must be between -1 and 3, got 9"),
        ("keep", [[0, 1], [0], [0]], ValueError, "indices must have a list of 2 parts .* got 3 parts"),
        ("keep", [[0, 1], 0], ValueError, "indices must be an array or a list of integers, got one integer"),
        ("keep", [[[0], [1]], [0]], ValueError, "indices must have one list of integers .* got deeper ones"),
        ("keep", [[[0], [1]], [[0, 1]]], ValueError, "indices must have one list of integers .* got deeper ones"),
        ("keep", [[0.0, 1.0], [0.0]], TypeError, "indices must be .* got dtype float64"),
        ("keep", zeros(3, 1, dtype=int), ValueError, r"indices has shape \(3, 1\), which does not broadcast to batch"),
        ("keep", zeros(1, 2, 1, dtype=int), ValueError, r"indices has shape \(1, 2, 1\), which does not broadcast"),
        ("keep", zeros(11, dtype=int), ValueError, "indices keeps 11 tokens of a sequence, max_len is 10"),
        ("keep", 0, ValueError, "indices must be an array or a list of integers, got one integer"),
        ("keep", [0.0], TypeError, "indices must be .* got dtype float64"),
        ("keep", [True, False], TypeError, "indices must be .* got dtype bool"),
        ("keep", [2**70], TypeError, "indices must be .* got dtype object"),
        ("keep", np.array([2**64 - 1], np.uint64), ValueError, f"between -1 and 3, got {2**64 - 1}"),
        ("keep", None, TypeError, "indices must be"),
        ("keep", np.ma.masked_array([1, 2], [True, False]), TypeError, "indices is a masked array"),
        ("reorder", [2], ValueError, "entries must be between 0 and 1, got 2"),
        ("reorder", [0, -1], ValueError, "entries must be between 0 and 1, got -1"),
        ("reorder", [[0, 1]], ValueError, r"entries must have one dimension, got shape \(1, 2\)"),
        ("reorder", 1, ValueError, "entries must be an array or a list of integers, got one integer"),
        ("reorder", [0.5], TypeError, "entries must be .* got dtype float64"),
        ("reorder", [True, False], TypeError, "entries must be .* got dtype bool"),
        ("reorder", [[0], [0, 1]], ValueError, "entries cannot be read as an array"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_wrong_keep_or_reorder_is_refused_and_changes_nothing(
    dtype: str, method: str, given: Any, error: type[Exception], message: str, normal: Normal
) -> None:
    cache = cattn.KVCache((2,), 3, 10, 8, dtype=dtype)
    cache.append(normal(2, 3, 4, 8), normal(2, 3, 4, 8))
    cache.truncate([4, 2])
    before = pickle.dumps(cache)
    with pytest.raises(error, match=message):
        getattr(cache, method)(given)
    assert pickle.dumps(cache) == before


def test_a_cache_without_a_batch_is_not_reordered() -> None:
    with pytest.raises(ValueError, match=r"entries needs an axis of the batch, but batch_shape is \(\)"):
        cattn.KVCache((), 1, 4, 8).reorder([0])


def test_signals_are_handled_while_a_large_batch_is_reordered() -> None:
    """Between pieces of the arrays. Alarms that come within one call of NumPy are handled as one."""
    alarms: list[int] = []
    cache = cattn.KVCache(1 << 22, 1, 1, 1)
    cache.append(np.zeros((1 << 22, 1, 1, 1), np.float32), np.zeros((1 << 22, 1, 1, 1), np.float32))
    entries = np.arange(1 << 22)[::-1].copy()
    handler = signal.signal(ALARM, lambda *_: alarms.append(len(alarms)))
    try:
        set_alarm(0.001, 0.001)
        cache.reorder(entries)
    finally:
        set_alarm(0)
        signal.signal(ALARM, handler)
    assert len(alarms) > 40


@pytest.mark.parametrize("method", ["keep", "reorder"])
def test_an_exception_amid_moves_leaves_the_cache_empty(
    method: str, normal: Normal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    class Interrupting(np.ndarray):
        __setitem__ = interrupted  # type: ignore[assignment]

    cache, x = cattn.KVCache(2, 1, 8, 4), normal(2, 1, 5, 4)
    cache.append(x, x)
    monkeypatch.setattr(cache, "_v", cache._v.view(Interrupting))
    with pytest.raises(KeyboardInterrupt):
        getattr(cache, method)([1, 0])
    assert cache.lengths.tolist() == [0, 0]
