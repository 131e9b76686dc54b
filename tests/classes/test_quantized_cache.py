"""KVCache of int8 and float8_e4m3fn: contents, decoding with the bits of dequantized keys, errors, copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_cache import REFUSED, Normal, make, tokens, zeros

import cattn
from support import assert_same_bits

QUANTIZED = [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)]
quantized = pytest.mark.parametrize("to", QUANTIZED, ids=str)


def contents(cache: cattn.KVCache) -> list[np.ndarray]:
    """Return keys, values and their scales."""
    assert isinstance(cache.k, cattn.Quantized)
    assert isinstance(cache.v, cattn.Quantized)
    return [*cache.k, *cache.v]


def attend(query: np.ndarray, cache: cattn.KVCache, **options: Any) -> np.ndarray:
    return cattn.causal_attention(query, cache.k, cache.v, enable_gqa=True, **options)


@quantized
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
def test_a_quantized_cache_holds_what_quantize_returns(batch: tuple[int, ...], to: np.dtype, normal: Normal) -> None:
    cache = cattn.KVCache(batch, 3, 10, 8, 5, str(to))
    assert cache.dtype == to
    parts = [tokens(normal, cache, count, np.float32) for count in (1, 4, 0, 2)]
    for key, value in parts:
        cache.append(key, value)
    right = [
        array for arrays in zip(*parts, strict=True) for array in cattn.quantize(np.concatenate(arrays, -2), dtype=to)
    ]
    for now, then in zip(contents(cache), right, strict=True):
        assert_same_bits(now, then)
        assert now.base is not None
    assert cache.nbytes == np.prod((*batch, 3, 10), dtype=int) * (13 + 2 * 4)
    assert f"dtype={to}" in repr(cache)
    assert f"{cache.nbytes:,}" in cache._repr_html_()


def test_other_caches_have_no_scales(dtype: type, normal: Normal) -> None:
    cache = make(normal, dtype=dtype)
    assert type(cache.k) is type(cache.v) is np.ndarray
    query = normal(2, 3, 1, 8, dtype=dtype)
    assert_same_bits(attend(query, cache), cattn.causal_attention(query, cache.k, cache.v))


@quantized
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ">f4"], ids=str)
def test_a_quantized_cache_takes_floats_of_any_dtype(to: np.dtype, dtype: Any, normal: Normal) -> None:
    cache = cattn.KVCache(2, 3, 10, 8, dtype=to)
    key, value = tokens(normal, cache, 4, dtype)
    cache.append(key.swapaxes(1, 2).copy().swapaxes(1, 2), value[:, :, ::-1])
    right = *cattn.quantize(key, -1, to), *cattn.quantize(value[:, :, ::-1], -1, to)
    for now, then in zip(contents(cache), right, strict=True):
        assert_same_bits(now, then)


@quantized
def test_sequences_of_different_lengths_are_quantized_alone(to: np.dtype, normal: Normal) -> None:
    lengths = [7, 3, 0]
    cache = cattn.KVCache(3, 2, 12, 8, dtype=to)
    key, value = tokens(normal, cache, 7, np.float32)
    more_key, more_value = tokens(normal, cache, 2, np.float32)
    cache.append(key, value)
    cache.truncate(lengths)
    offset = cache.query_offset()
    cache.append(more_key, more_value)
    query = normal(3, 4, 2, 8)
    out = attend(query, cache, query_offset=offset)
    for row, length in enumerate(lengths):
        alone = cattn.KVCache((), 2, 12, 8, dtype=to)
        alone.append(*(np.concatenate([a[row, :, :length], b[row]], -2)
                       for a, b in ((key, more_key), (value, more_value))))  # fmt: skip
        for now, then in zip(contents(cache), contents(alone), strict=True):
            assert_same_bits(now[row, :, : length + 2], then)
        assert_same_bits(out[row], attend(query[row], alone))
    for scale in (cache._k_scale, cache._v_scale):
        assert scale is not None
        assert (scale[..., cache.k.shape[-2] :, :] == 1).all()
        assert (scale > 0).all()


@quantized
@pytest.mark.promise("decoding", "quantized")
def test_decoding_with_a_quantized_cache_has_the_bits_of_dequantized_keys(to: np.dtype, normal: Normal) -> None:
    query, key, value = normal(2, 4, 30, 8), normal(2, 2, 30, 8), normal(2, 2, 30, 6)
    key[..., 3] *= 50  # a channel with outliers
    full = cattn.causal_attention(
        query, *(cattn.dequantize(*cattn.quantize(a, -1, to)) for a in (key, value)), enable_gqa=True
    )
    cache = cattn.KVCache(2, 2, 30, 8, 6, to)
    start = 0
    for count in (1, 1, 5, 1, 0, 20, 1, 1):
        now = slice(start, start + count)
        cache.append(key[:, :, now], value[:, :, now])
        assert_same_bits(attend(query[:, :, now], cache), full[:, :, now])
        start += count
    cache.truncate(12)
    assert_same_bits(attend(query[:, :, 11:12], cache), full[:, :, 11:12])
    cache.reset()
    cache.append(key, value)
    assert_same_bits(attend(query, cache), full)


@quantized
def test_copies_of_a_quantized_cache_are_independent(to: np.dtype, normal: Normal) -> None:
    for twin_of in (copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))):
        cache = cattn.KVCache(3, 2, 100_000, 8, 5, to)
        cache.append(*tokens(normal, cache, 4, np.float32))
        cache.truncate([4, 1, 0])
        twin = twin_of(cache)
        assert repr(twin) == repr(cache)
        before = [a.copy() for a in contents(cache)]
        for now, then in zip(contents(twin), before, strict=True):
            assert_same_bits(now, then)
        twin.append(*tokens(normal, cache, 2, np.float32))
        for a in twin._stores():
            a[...] = 1
        for now, then in zip(contents(cache), before, strict=True):
            assert_same_bits(now, then)
        assert len(pickle.dumps(cache)) < 3000


QUANTIZED_REFUSED = REFUSED | {
    "key is NaN": (zeros(2, 3, 2, 8) + np.nan, zeros(2, 3, 2, 5), ValueError, r"key must be finite.* nan at \(0, 0, 0"),
    "value is infinite": (
        zeros(2, 3, 2, 8), zeros(2, 3, 2, 5) - np.inf, ValueError, r"value must be finite.* got -inf at \(0, 0, 0, 0\)",
    ),
    "too large": (zeros(2, 3, 2, 8, dtype="d") + 1e39, zeros(2, 3, 2, 5), ValueError, "key must be finite and at most"),
    "quantized": (
        zeros(2, 3, 2, 8, dtype=np.int8), zeros(2, 3, 2, 5), TypeError, r"key has dtype int8, .* pass cattn.dequantize",
    ),
    "integers": (zeros(2, 3, 2, 8), zeros(2, 3, 2, 5, dtype=int), TypeError, "value has dtype int64"),
    "float8": (
        zeros(2, 3, 2, 8, dtype=QUANTIZED[1]), zeros(2, 3, 2, 5), TypeError, "key has dtype float8_e4m3fn",
    ),
}  # fmt: skip
del QUANTIZED_REFUSED["key wider"], QUANTIZED_REFUSED["value wider"]


@quantized
@pytest.mark.parametrize("case", QUANTIZED_REFUSED)
@pytest.mark.parametrize("ragged", [False, True])
def test_a_quantized_cache_is_unchanged_after_errors(case: str, ragged: bool, to: np.dtype, normal: Normal) -> None:
    key, value, error, message = QUANTIZED_REFUSED[case]
    cache = cattn.KVCache((2,), 3, 10, 8, 5, to)
    cache.append(*tokens(normal, cache, 4, np.float32))
    if ragged:
        cache.truncate([4, 1])
    before = [a.copy() for a in cache._stores()]
    with pytest.raises(error, match=message):
        cache.append(key, value)
    for now, then in zip(cache._stores(), before, strict=True):
        assert_same_bits(now, then)
    assert cache.lengths.tolist() == [4, 1 if ragged else 4]


@pytest.mark.parametrize(
    "change",
    [
        {"k_scale": np.ones((2, 3, 4, 2), np.float32)},
        {"k_scale": np.ones((2, 3, 4, 1))},
        {"v_scale": np.zeros((2, 3, 4, 1), np.float32)},
        {"v_scale": np.full((2, 3, 4, 1), np.nan, np.float32)},
        {"v_scale": np.full((2, 3, 4, 1), 2.0**101, np.float32)},
        {"k": np.zeros((2, 3, 4, 8), np.float32)},
        {"dtype": np.dtype(np.float32)},
    ],
)
def test_a_damaged_pickle_of_a_quantized_cache_is_refused(change: dict[str, Any], normal: Normal) -> None:
    cache = cattn.KVCache((2,), 3, 10, 8, 5, "int8")
    cache.append(*tokens(normal, cache, 4, np.float32))
    damaged = cattn.KVCache.__new__(cattn.KVCache)
    with pytest.raises(ValueError, match="the pickle of a KVCache is damaged"):
        damaged.__setstate__(cache.__getstate__() | change)


@quantized
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_classes_take_quantized_caches(batch: tuple[int, ...], dtype: Any, to: np.dtype, normal: Normal) -> None:
    """A layer with a quantized cache computes as with its dequantized numbers; also with dropout of each head."""
    mha = cattn.MultiHeadAttention(8, 8, 16, 0.0, 4, num_kv_groups=2, rng=0).eval()
    wrapper = cattn.MultiHeadAttentionWrapper(8, 3, 16, 0.5, num_heads=2, rng=0)
    x = normal(*batch, 6, 8, dtype=dtype)
    cache = cattn.KVCache(batch, 2, 16, 2, dtype=to)
    out = mha(x, cache=cache)
    q, k, v = mha._project(x.reshape(-1, 6, 8))
    wide = [cattn.dequantize(*cattn.quantize(a, -1, to)) for a in (k, v)]
    context = cattn.causal_attention(q, *wide, enable_gqa=True).swapaxes(1, 2).reshape(-1, 6, 8)
    right = mha.out_proj(context).reshape(x.shape)
    assert_same_bits(out, right)

    cache = cattn.KVCache(batch, 2, 16, 3, dtype=to)
    out, weights = wrapper(x, cache=cache, return_weights=True)
    assert out.shape == (*batch, 6, 6)
    q, k, v = wrapper._project(x.reshape(-1, 6, 8))
    right = cattn.attention_weights(q, cattn.dequantize(*cattn.quantize(k, -1, to)), is_causal=True)
    assert_same_bits(weights, right.reshape(weights.shape))
