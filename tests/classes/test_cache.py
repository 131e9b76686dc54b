"""KVCache: contents, errors, decoding with the bits of one pass; keep, reorder and fork."""

from __future__ import annotations

import copy
import itertools
import pickle
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from support import assert_same_bits, each, looped
from support.processes import ALARM, set_alarm

Normal = Callable[..., np.ndarray]


def make(normal: Normal, batch: tuple[int, ...] = (2,), heads: int = 3, filled: int = 4, **kw: Any) -> cattn.KVCache:
    cache = cattn.KVCache(batch, heads, 10, 8, 5, **kw)
    cache.append(*tokens(normal, cache, filled))
    return cache


def tokens(normal: Normal, cache: cattn.KVCache, count: int, dtype: Any = None) -> tuple[np.ndarray, np.ndarray]:
    rows = (*cache.batch_shape, cache.num_kv_heads, count)
    dtype = dtype or cache.dtype
    return normal(*rows, cache.head_dim, dtype=dtype), normal(*rows, cache.v_head_dim, dtype=dtype)


# ---- contents --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
def test_k_and_v_hold_what_was_appended(batch: tuple[int, ...], dtype: type, normal: Normal) -> None:
    cache = cattn.KVCache(batch, 3, 10, 8, 5, dtype)
    parts = [tokens(normal, cache, count) for count in (1, 4, 0, 2)]
    for key, value in parts:
        assert cache.append(key, value) is None
    assert_same_bits(cache.k, np.concatenate([key for key, _ in parts], axis=-2))
    assert_same_bits(cache.v, np.concatenate([value for _, value in parts], axis=-2))
    assert cache.k.dtype == cache.v.dtype == dtype
    np.testing.assert_array_equal(cache.lengths, np.full(batch, 7))
    assert cache.lengths.dtype == np.int64
    assert cache.k.base is not None
    assert cache.nbytes == np.prod((*batch, 3, 10, 13)) * np.dtype(dtype).itemsize


def test_append_moves_no_earlier_token(normal: Normal) -> None:
    cache = make(normal)
    before = cache.k
    address = before.ctypes.data
    cache.append(*tokens(normal, cache, 3))
    assert cache.k.ctypes.data == address
    assert np.shares_memory(cache.k, before)
    assert before.shape[-2] == 4


def test_lengths_are_a_copy(normal: Normal) -> None:
    cache = make(normal)
    cache.lengths[:] = 99
    assert cache.lengths.tolist() == [4, 4]


def test_batch_shape_may_be_an_int() -> None:
    assert cattn.KVCache(2, 1, 4, 8).batch_shape == (2,)
    assert cattn.KVCache(np.int64(2), 1, 4, 8).batch_shape == (2,)
    assert cattn.KVCache([2, 3], 1, 4, 8).batch_shape == (2, 3)


def test_strided_views_are_appended(normal: Normal) -> None:
    cache = cattn.KVCache(2, 3, 10, 8)
    projected = normal(2, 4, 3, 8)  # (B, T, H, D), as a projection leaves it
    cache.append(projected.swapaxes(1, 2), projected[..., ::-1].swapaxes(1, 2))
    assert_same_bits(cache.k, projected.swapaxes(1, 2))
    assert_same_bits(cache.v, projected[..., ::-1].swapaxes(1, 2))


def test_the_cache_may_append_its_own_views(normal: Normal) -> None:
    cache = make(normal)
    expected = np.concatenate([cache.k, cache.k[..., 1:4, :]], axis=-2)
    cache.append(cache.k[..., 1:4, :], cache.v[..., 1:4, :])
    assert_same_bits(cache.k, expected)


def test_a_wider_cache_takes_float32(normal: Normal) -> None:
    cache = cattn.KVCache((), 1, 4, 8, dtype=np.float64)
    key, value = tokens(normal, cache, 2, np.float32)
    cache.append(key, value)
    assert_same_bits(cache.k, key.astype(np.float64))


# ---- truncate, reset, copies -----------------------------------------------------------------------------------------
def test_truncate_and_reset_drop_tokens(normal: Normal) -> None:
    cache = make(normal)
    first = cache.k[..., :2, :].copy()
    cache.truncate(4)
    cache.truncate(2)
    assert cache.lengths.tolist() == [2, 2]
    assert_same_bits(cache.k, first)
    new = tokens(normal, cache, 8)
    cache.append(*new)
    assert_same_bits(cache.k, np.concatenate([first, new[0]], axis=-2))
    cache.reset()
    assert cache.k.shape == (2, 3, 0, 8)
    assert cache.lengths.tolist() == [0, 0]


def test_sequences_may_be_truncated_to_different_lengths(normal: Normal) -> None:
    cache = make(normal, (3,), filled=5)
    whole = cache.k.copy()
    cache.truncate([5, 2, 0])
    assert cache.lengths.tolist() == [5, 2, 0]
    assert cache.k.shape[-2] == 5
    np.testing.assert_array_equal(cache.query_offset(), [5, 2, 0])
    key, value = tokens(normal, cache, 2)
    cache.append(key, value)
    assert cache.lengths.tolist() == [7, 4, 2]
    for row, length in enumerate((5, 2, 0)):
        assert_same_bits(cache.k[row, :, : length + 2], np.concatenate([whole[row, :, :length], key[row]], axis=-2))
        assert_same_bits(cache.v[row, :, length : length + 2], value[row])
    cache.truncate(3)  # a limit for all sequences
    assert cache.lengths.tolist() == [3, 3, 2]
    cache.truncate([2, 2, 2])
    assert cache.query_offset() == 2


def test_copies_are_independent(normal: Normal) -> None:
    for twin_of in (copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))):
        cache = make(normal, (3,))
        cache.truncate([4, 1, 0])
        twin = twin_of(cache)
        assert repr(twin) == repr(cache)
        assert_same_bits(twin.k, cache.k)
        before = cache.k.copy()
        twin.append(*tokens(normal, cache, 2))
        twin.k[...] = 0
        assert_same_bits(cache.k, before)
        assert cache.lengths.tolist() == [4, 1, 0]


def test_a_pickle_holds_only_the_filled_part(normal: Normal) -> None:
    cache = cattn.KVCache((), 2, 100_000, 8)
    cache.append(*tokens(normal, cache, 3))
    assert len(pickle.dumps(cache)) < 2000


def test_repr_shows_the_arguments() -> None:
    assert repr(cattn.KVCache(2, 3, 10, 8)) == (
        "KVCache((2,), num_kv_heads=3, max_len=10, head_dim=8, dtype=float32, lengths=0)"
    )
    assert "v_head_dim=5, dtype=float64" in repr(cattn.KVCache((), 3, 10, 8, 5, "float64"))


# ---- errors, before anything is written ------------------------------------------------------------------------------
def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


REFUSED = {
    "full": (zeros(2, 3, 7, 8), zeros(2, 3, 7, 5), ValueError, "full: it has 4 of max_len=10 tokens, 7 more"),
    "batch": (zeros(1, 3, 2, 8), zeros(1, 3, 2, 5), ValueError, r"key has shape .* takes \(2, 3, T, 8\)"),
    "heads": (zeros(2, 2, 2, 8), zeros(2, 2, 2, 5), ValueError, "key has shape"),
    "head_dim": (zeros(2, 3, 2, 9), zeros(2, 3, 2, 5), ValueError, "key has shape"),
    "v_head_dim": (zeros(2, 3, 2, 8), zeros(2, 3, 2, 8), ValueError, r"value has shape .* takes \(2, 3, T, 5\)"),
    "ndim": (zeros(3, 2, 8), zeros(3, 2, 5), ValueError, "key has shape"),
    "tokens": (zeros(2, 3, 2, 8), zeros(2, 3, 1, 5), ValueError, "value has 1 tokens, key has 2"),
    "key wider": (zeros(2, 3, 2, 8, dtype="d"), zeros(2, 3, 2, 5), TypeError, "key has dtype float64.*astype"),
    "value wider": (zeros(2, 3, 2, 8), zeros(2, 3, 2, 5, dtype="d"), TypeError, "value has dtype float64"),
    "integers": (
        zeros(2, 3, 2, 8, dtype=int),
        zeros(2, 3, 2, 5),
        TypeError,
        "key has dtype int64, read as float64, the",
    ),
    "complex": (zeros(2, 3, 2, 8), zeros(2, 3, 2, 5, dtype="F"), TypeError, "value has dtype complex64"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("ragged", [False, True])
def test_a_wrong_append_is_refused_and_changes_nothing(case: str, ragged: bool, normal: Normal) -> None:
    key, value, error, message = REFUSED[case]
    cache = make(normal)
    if ragged:
        cache.truncate([4, 1])
    before = cache._k.copy(), cache._v.copy(), cache.lengths
    with pytest.raises(error, match=message):
        cache.append(key, value)
    assert_same_bits(cache._k, before[0])
    assert_same_bits(cache._v, before[1])
    np.testing.assert_array_equal(cache.lengths, before[2])


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (5, ValueError, "between 0 and the lengths, 4; got 5"),
        (-1, ValueError, "between 0"),
        ([4, 5], ValueError, "got"),
        ([1, 1, 1], ValueError, "does not broadcast"),
        (1.0, TypeError, "dtype float64"),
        (True, TypeError, "dtype bool"),
        (2**63, ValueError, f"between 0 and the lengths, 4; got {2**63}"),
        (2**100, ValueError, f"got {2**100}"),
        (-(2**100), ValueError, f"got -{2**100}"),
        (np.uint64(2**63 + 1), ValueError, "between 0"),
        (np.array([2**64 - 1, 1], np.uint64), ValueError, "between 0"),
        (np.ma.masked_array([1, 2], [True, False]), TypeError, "n is a masked array"),
    ],
)
def test_a_wrong_truncate_is_refused_and_changes_nothing(
    n: Any, error: type[Exception], message: str, normal: Normal
) -> None:
    cache = make(normal)
    with pytest.raises(error, match=message):
        cache.truncate(n)
    assert cache.lengths.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((-1, 1, 4, 8), ValueError, "batch_shape must be at least 0"),
        ((2.0, 1, 4, 8), TypeError, "batch_shape must be an int, got float"),
        ((2, 0, 4, 8), ValueError, "num_kv_heads must be at least 1"),
        ((2, 1, -4, 8), ValueError, "max_len"),
        ((2, 1, True, 8), TypeError, "max_len must be an int, got bool"),
        (
            (2, 1, 4, 8, None, "int16"),
            TypeError,
            "dtype must be float16, bfloat16, float32, float64, int8 or float8_e4m3fn, got int16",
        ),
    ],
)
def test_wrong_sizes_are_refused(args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cattn.KVCache(*args)


# ---- attention with a cache ------------------------------------------------------------------------------------------
@pytest.mark.promise("decoding")
def test_decoding_in_steps_has_the_bits_of_one_pass(dtype: type, normal: Normal) -> None:
    q, k, v = normal(2, 4, 30, 8, dtype=dtype), normal(2, 2, 30, 8, dtype=dtype), normal(2, 2, 30, 6, dtype=dtype)
    full = cattn.causal_attention(q, k, v, return_weights=True, return_lse=True)
    cache = cattn.KVCache(2, 2, 30, 8, 6, dtype)
    start = 0
    for count in (1, 1, 5, 1, 0, 20, 1, 1):
        now = slice(start, start + count)
        cache.append(k[:, :, now], v[:, :, now])
        step = cattn.causal_attention(q[:, :, now], cache.k, cache.v, return_weights=True, return_lse=True)
        assert_same_bits(step.out, full.out[:, :, now])
        assert_same_bits(step.lse, full.lse[:, :, now])
        assert_same_bits(step.weights, full.weights[:, :, now, : start + count])
        start += count
    assert start == 30


def test_sequences_of_different_lengths_have_the_bits_of_each_alone(normal: Normal) -> None:
    """Prompts are padded to one length, truncated to their own lengths, then decoded together."""
    lengths = [7, 3, 5]
    q, k, v = (normal(3, 2, 12, 8) for _ in range(3))
    cache = cattn.KVCache(3, 2, 12, 8)
    cache.append(k[:, :, :7], v[:, :, :7])
    cache.truncate(lengths)
    for step in range(4):
        rows = [(b, slice(None), slice(n + step, n + step + 1)) for b, n in enumerate(lengths)]
        new_q, new_k, new_v = (np.stack([a[row] for row in rows]) for a in (q, k, v))
        offset = cache.query_offset()
        cache.append(new_k, new_v)
        out = cattn.causal_attention(new_q, cache.k, cache.v, query_offset=offset)
        np.testing.assert_array_equal(offset, cache.lengths - 1)
        for b, row in enumerate(rows):
            n = lengths[b] + step + 1
            assert_same_bits(out[b], cattn.causal_attention(q[row], k[b, :, :n], v[b, :, :n], enable_gqa=True))


def test_an_output_projection_that_fails_leaves_the_cache_unchanged() -> None:
    layer = cattn.MultiHeadAttention(8, 8, 16, 0.0, 2, rng=0).eval()
    cache = cattn.KVCache((), 2, 16, 4)
    x = np.ones((1, 8), np.float32)
    expected = layer(x)
    sound, layer.out_proj.weight = layer.out_proj.weight, np.zeros((3, 3), np.float32)
    with pytest.raises(ValueError, match=r"weight has shape \(3, 3\)"):
        layer(x, cache=cache)
    assert cache.lengths == 0
    layer.out_proj.weight = sound
    assert_same_bits(layer(x, cache=cache), expected)


# ---- damage and overlap --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        {"lengths": np.array([-5, 3])},
        {"lengths": np.array([2**62, 4])},
        {"lengths": np.array([4.5, 4.0])},
        {"lengths": np.array([4, 4, 4])},
        {"k": np.zeros((2, 3, 4, 1), np.float32)},
        {"v": np.zeros((2, 3, 1, 5), np.float32)},
        {"max_len": 3},
    ],
)
def test_a_damaged_pickle_is_refused(change: dict[str, Any], normal: Normal) -> None:
    state = make(normal).__getstate__()
    damaged = cattn.KVCache.__new__(cattn.KVCache)
    with pytest.raises(ValueError, match="the pickle of a KVCache is damaged"):
        damaged.__setstate__(state | change)


def test_its_own_views_go_in_at_unequal_lengths(normal: Normal) -> None:
    """One sequence is written before the other is read."""
    cache = cattn.KVCache((2,), 3, 10, 5)
    cache.append(*tokens(normal, cache, 4))
    cache.truncate([1, 3])
    expected = copy.copy(cache)
    key, value = cache.v[::-1], cache.k[::-1]
    expected.append(key.copy(), value.copy())
    cache.append(key, value)
    assert_same_bits(cache.k, expected.k)
    assert_same_bits(cache.v, expected.v)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("lengths", [[2, 2], [1, 3]])
@pytest.mark.parametrize("swapped", [False, True])
def test_older_views_of_a_cache_are_appended_as_they_were(
    swapped: bool, lengths: list[int], dtype: str, normal: Normal
) -> None:
    """Views of places that append writes, of the other array, too: as keys, as values, in any order."""
    cache = cattn.KVCache((2,), 3, 10, 5, dtype=dtype)
    first, second = (normal(2, 3, 8, 5).astype(cache.dtype if cache.dtype.itemsize > 1 else np.float32) for _ in "kv")
    cache.append(first, second)
    whole = cache.k, cache.v
    if cache.dtype.itemsize == 1:  # what a cache holds has no scale of its own: its scales are arrays of float32
        whole = cache._k_scale[..., :8, :] * np.ones(5, np.float32), cache._v_scale[..., :8, :]
        whole = whole[0], np.broadcast_to(whole[1], whole[0].shape)
    for at in (slice(0, 6), slice(2, 8), slice(7, 1, -1)):
        key, value = (a[..., at, :] for a in (whole[::-1] if swapped else whole))
        cache.truncate(lengths)
        expected = copy.deepcopy(cache)
        expected.append(key.copy(), value.copy())
        cache.append(key, value)
        for name, (i, n) in itertools.product(("k", "v"), enumerate(cache.lengths)):
            now, then = (getattr(c, name) for c in (cache, expected))
            for a, b in zip(now, then, strict=True) if isinstance(now, cattn.Quantized) else [(now, then)]:
                assert_same_bits(a[i, :, :n], b[i, :, :n])
        cache.truncate(0)
        cache.append(first, second)


def test_no_tokens_change_nothing_at_unequal_lengths(normal: Normal) -> None:
    cache = make(normal)
    cache.truncate([1, 3])
    before = cache.k.copy()
    cache.append(*tokens(normal, cache, 0))
    assert_same_bits(cache.k, before)
    np.testing.assert_array_equal(cache.lengths, [1, 3])


def test_errors_name_the_argument(normal: Normal) -> None:
    with pytest.raises(ValueError, match="batch_shape, num_kv_heads, max_len and head_dim give an array of shape"):
        cattn.KVCache((2**40,), 2**20, 2**20, 8)
    with pytest.raises(ValueError, match="n cannot be read as an array"):
        make(normal).truncate([[1], [1, 2]])


# ---- as an argument ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8"])
@pytest.mark.parametrize("lengths", [None, [7, 3]], ids=["even", "ragged"])
def test_causal_attention_takes_a_cache(dtype: str, lengths: list[int] | None, normal: Normal) -> None:
    """The queries belong to the last tokens; options go together with it, and results are the same bits."""
    cache = cattn.KVCache(2, 2, 12, 8, 5, dtype=dtype)
    kind = dtype if dtype != "int8" else "float32"
    cache.append(normal(2, 2, 7, 8).astype(kind), normal(2, 2, 7, 5).astype(kind))
    if lengths is not None:
        cache.truncate(lengths)
    cache.append(normal(2, 2, 3, 8).astype(kind), normal(2, 2, 3, 5).astype(kind))
    query, options = normal(2, 4, 3, 8).astype(kind), {"softcap": 5.0, "sinks": np.ones(4), "return_lse": True}
    found = cattn.causal_attention(query, cache, **options)
    for entry, length in enumerate(cache.lengths.tolist()):
        key, value = (each(lambda a, e=entry, n=length: a[e, :, :n], x) for x in (cache.k, cache.v))
        right = cattn.causal_attention(query[entry], key, value, enable_gqa=True, **options)
        assert_same_bits(found.out[entry], right.out)
        assert_same_bits(found.lse[entry], right.lse)
    earlier = cattn.causal_attention(query, cache, query_offset=1)
    assert_same_bits(earlier, cattn.causal_attention(query, cache.k, cache.v, query_offset=1))


def test_only_a_cache_goes_without_a_value() -> None:
    x = np.ones((3, 2), np.float32)
    for key in (x, [[1.0, 2.0]], "cache", None, cattn.quantize(x)):
        with pytest.raises(
            TypeError,
            match=r"value must be an array of .*, got NoneType; only a key that is a cattn\.KVCache needs none",
        ):
            cattn.causal_attention(x, key)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        cattn.scaled_dot_product_attention(x, x)  # type: ignore[call-overload]
    cache = cattn.KVCache((), 1, 4, 2)
    for query in (1.0, [1.0, 2.0]):
        with pytest.raises(ValueError, match="query"):
            cattn.causal_attention(query, cache)


class Reshaping:
    """An array-like that sets the shape of another array as it is read."""

    def __init__(self, array: np.ndarray, other: np.ndarray, shape: tuple[int, ...]) -> None:
        self.array, self.other, self.new_shape = array, other, shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.other.shape = self.new_shape
        return self.array


def test_a_value_may_change_the_shape_of_key() -> None:
    """The cache has read key by then."""
    x, cache = np.arange(6.0, dtype=np.float32).reshape(1, 3, 2), cattn.KVCache((), 1, 8, 2)
    key = x.copy()
    cache.append(key, Reshaping(x, key, (6,)))
    assert key.shape == (6,)
    assert_same_bits(cache.k, x)
    assert_same_bits(cache.v, x)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_tuple_is_a_query_as_a_list_is(ragged: bool, normal: Normal) -> None:
    cache, x = cattn.KVCache(2, 1, 8, 4), normal(2, 1, 5, 4)
    cache.append(x, x)
    if ragged:
        cache.truncate([5, 3])
    query = x[..., -1:, :]
    expected = cattn.causal_attention(query, cache)
    assert_same_bits(cattn.causal_attention(tuple(query), cache), expected)
    with pytest.raises(ValueError, match=r"^query must have at least 2 dimensions"):
        cattn.causal_attention((1, 2), cache)
    assert_same_bits(cattn.causal_attention((query,), cache), expected[None])


@pytest.mark.parametrize("lengths", [None, [5, 0], [5, 1]])
def test_queries_before_their_keys_are_warned_of(lengths: list[int] | None, normal: Normal) -> None:
    """Where the cache is empty, and where one sequence has fewer tokens than the query."""
    cache, x = cattn.KVCache(2, 1, 8, 4), normal(2, 1, 5, 4)
    query = x[..., -2:, :]
    if lengths is not None:
        cache.append(x, x)
        cache.truncate(lengths)
    with pytest.warns(cattn.CausalAlignmentWarning, match=r"[Aa]ppend the keys and values") as caught:
        out = cattn.causal_attention(query, cache)
    assert caught[0].filename == __file__
    assert not out[1, :, 0].any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cattn.causal_attention(query, cache, query_offset=cache.lengths - 2)
        cattn.causal_attention(query, cache, query_seq_lengths=[0, 0])
        cache.append(query, query)
        cattn.causal_attention(query, cache)


# ---- keep, reorder and fork ------------------------------------------------------------------------------------------
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
@looped("entries", [[2, 0, 1], [1, 1, 1], [0, 1, 0], [2], [2, 2, 0, 1, 0], []])
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
