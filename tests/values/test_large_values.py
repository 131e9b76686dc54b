"""Values near the largest number: an output lies within the values that it averages, on every path and table.

Sums that overflow are computed again. The yardstick is exact: the same call on values that are a power of two smaller,
none of whose sums overflows, gives the same bits times that power.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from support import HALVES, INF, NAN, assert_same_bits, every_way, forced, in_contract

Call = dict[str, Any]
Normal = Callable[..., np.ndarray]
SMALLER = 2.0**-40  # of values: then no sum overflows, and none of their digits is lost


def large(rng: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return values near the largest number: all the same, of both signs, or beside ordinary ones."""
    top = np.float64(ml_dtypes.finfo(dtype).max)
    factor = {
        "the largest": np.ones(shape),
        "both signs": rng.choice([-1.0, 1.0], shape),
        "some": np.where(rng.random(shape) < 0.3, rng.uniform(0.5, 1, shape), 1e-30),
    }[kind]
    return (factor * top).astype(dtype)


def without_overflow(call: Call, name: str = "value") -> np.ndarray:
    """Return the output of the same call on smaller values, times what they are smaller, at most the largest number."""
    right = call[name]
    if isinstance(right, cattn.Quantized):
        smaller: Any = cattn.Quantized(right.values, right.scale * SMALLER)
    else:
        smaller = (right * SMALLER).astype(right.dtype)
    out = cattn.scaled_dot_product_attention(**call | {name: smaller})
    computed = out.astype(np.float32 if out.dtype in HALVES else out.dtype)
    with np.errstate(over="ignore"):
        computed /= SMALLER
    if not call.get("dropout_p"):
        top = float(ml_dtypes.finfo(out.dtype).max)
        np.clip(computed, -top, top, out=computed)
    return computed.astype(out.dtype)


OPTIONS: dict[str, Callable[[np.random.Generator, int, int], Call]] = {
    "plain": lambda _rng, _T_q, _T_k: {},
    "causal, sink": lambda _rng, _T_q, _T_k: {"is_causal": "lower_right", "sinks": np.array([0.5])},
    "masks": lambda rng, T_q, T_k: {"attn_mask": rng.random((T_q, T_k)) < 0.8, "softcap": 5.0},
    "blocks": lambda rng, T_q, T_k: {
        "block_mask": cattn.BlockMask(rng.random((-(-T_q // 20), -(-T_k // 20))) < 0.7, 20), "is_causal": "lower_right",
    },
    "dropout": lambda _rng, _T_q, _T_k: {"dropout_p": 0.25, "rng": 3, "alibi_slopes": np.array([1e-3])},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("T_q", "T_k"), [(1, 2), (7, 190), (101, 200), (5, 3300)])
def test_sums_that_overflow_are_computed_again(
    isa: str, dtype: type, T_q: int, T_k: int, options: str, rng: np.random.Generator
) -> None:
    """Every path gives the bits of the call that does not overflow; weights and log-sum-exp do not change at all."""
    kinds = ("the largest", "both signs", "some")
    query, key = (rng.standard_normal((T, 16)).astype(dtype) for T in (T_q, T_k))
    value = np.concatenate([large(rng, kind, (T_k, 3), dtype) for kind in kinds], axis=-1)
    call = {"query": query, "key": key, "value": value} | OPTIONS[options](rng, T_q, T_k)
    expected = without_overflow(call)
    extras = {"return_weights": True, "return_lse": True}
    small = cattn.scaled_dot_product_attention(**call | {"value": key}, **extras)
    for way, result in every_way(functools.partial(cattn.scaled_dot_product_attention, **call, **extras), tiny=False):
        assert_same_bits(result.out, expected, way)
        assert_same_bits(result.weights, small.weights, way)
        assert_same_bits(result.lse, small.lse, way)
    if options != "dropout":
        assert np.isfinite(expected).all()


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "strided"])
def test_large_values_of_halves_and_other_strides(isa: str, storage: str, rng: np.random.Generator) -> None:
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "strided": np.float32}[storage]
    key, value = rng.standard_normal((2, 250, 8)).astype(dtype), large(rng, "both signs", (2, 250, 5), dtype)
    if storage == "strided":
        value = np.repeat(value, 2, axis=-1)[..., ::2]
    for T_q in (3, 20):
        call: Call = {"query": rng.standard_normal((2, T_q, 8)).astype(dtype), "key": key, "value": value}
        right = (
            cattn.scaled_dot_product_attention(**call)
            if storage == "float16"  # float32 has room for sums of float16
            else without_overflow(call)
        )
        assert np.isfinite(right.astype(np.float64)).all()
        for way, out in every_way(functools.partial(cattn.scaled_dot_product_attention, **call), tiny=False):
            assert_same_bits(out, right, way)


@pytest.mark.parametrize(("dtype", "T_k"), [(np.int8, 2_300_000), (ml_dtypes.float8_e4m3fn, 700_000)])
def test_large_values_of_quantized_keys(isa: str, dtype: Any, T_k: int) -> None:
    """The largest scale leaves room for so many keys; here are more."""
    one = np.full((1, 1), float(ml_dtypes.finfo(dtype).max) if dtype is not np.int8 else 127).astype(dtype)
    value = np.broadcast_to(one, (T_k, 1))
    call: Call = {"query": np.zeros((1, 1), np.float32), "key": np.zeros((T_k, 1), np.float32), "value": value}
    call["value"] = cattn.Quantized(value, 2.0**100)
    right = without_overflow(call)
    np.testing.assert_allclose(right, float(one[0, 0]) * 2.0**100, rtol=1e-4)
    for path in ("split", "rows"):
        with forced(path):
            assert_same_bits(cattn.scaled_dot_product_attention(**call), right, path)


def test_large_values_of_packed_sequences_and_grouped_heads(isa: str, dtype: type, rng: np.random.Generator) -> None:
    query, key = rng.standard_normal((150, 4, 8)).astype(dtype), rng.standard_normal((150, 2, 8)).astype(dtype)
    value, edges = large(rng, "both signs", (150, 2, 5), dtype), np.array([0, 20, 20, 150])
    out = cattn.varlen_attention(query, key, value, edges, edges)
    smaller = cattn.varlen_attention(query, key, value * dtype(SMALLER), edges, edges)
    assert_same_bits(out, np.clip(smaller / dtype(SMALLER), np.finfo(dtype).min, np.finfo(dtype).max))


def test_a_stream_of_dropout_draws_once(dtype: type, rng: np.random.Generator) -> None:
    """The second attempt uses the bits that the first one drew, and the generator advances as without it."""
    query, key = (rng.standard_normal((2, 3, T, 8)).astype(dtype) for T in (120, 300))
    value, generators = large(rng, "both signs", (2, 3, 300, 4), dtype), [cattn.TorchGenerator(5) for _ in range(2)]
    call: Call = {"query": query, "key": key, "value": value, "dropout_p": 0.5}
    out = cattn.scaled_dot_product_attention(**call, rng=generators[0])
    assert_same_bits(out, without_overflow(call | {"rng": generators[1]}))
    np.testing.assert_array_equal(generators[0].get_state(), generators[1].get_state())


# The values of a column, first key to last, beside keys of the largest value; and the output. The weight of the key
# before the last is hardly a normal number, the weight of the last is 0.
INFINITE: dict[str, tuple[dict[int, float], float]] = {
    "inf": ({3: INF}, INF),
    "-inf beside sums that overflow": ({250: -INF}, -INF),
    "both": ({3: INF, 250: -INF}, NAN),
    "NaN": ({100: NAN}, NAN),
    "inf of little weight": ({298: INF}, INF),
    "-inf of little weight": ({298: -INF}, -INF),
    "inf of weight 0": ({299: INF}, NAN),
    "hidden inf": ({7: INF}, 1),
    "hidden NaN": ({7: NAN}, 1),
}


def test_infinite_values_among_the_largest(isa: str, dtype: type) -> None:
    """IEEE arithmetic in the rows that see them, and nothing where they are hidden; other columns do not matter."""
    T_k, top = 300, np.finfo(dtype).max
    value = np.full((T_k, len(INFINITE) + 1), top, dtype)
    for column, (numbers, _) in enumerate(INFINITE.values()):
        for row, number in numbers.items():
            value[row, column] = number
    bias = np.zeros(T_k, dtype)
    bias[[298, 299]] = {np.float32: -76, np.float64: -705}[dtype], -1e6
    mask = np.arange(T_k) != 7
    expected = np.array([number if number != 1 else top for _, number in INFINITE.values()] + [top], dtype)
    for T_q in (2, 100):
        call: Call = {"query": np.zeros((T_q, 4), dtype), "key": np.zeros((T_k, 4), dtype), "value": value}
        call |= {"attn_mask": mask, "bias": bias}
        right = cattn.reference.scaled_dot_product_attention(**call)
        np.testing.assert_allclose(right, np.broadcast_to(expected, right.shape), rtol=1e-6)
        for way, out in every_way(functools.partial(cattn.scaled_dot_product_attention, **call), tiny=False):
            np.testing.assert_allclose(out, right, rtol=1e-5, err_msg=way)


def test_other_elements_keep_their_bits(isa: str, dtype: type, rng: np.random.Generator) -> None:
    """A second attempt for some rows and columns of a block changes no bit of the others, not even of small numbers."""
    query, key, value = (rng.standard_normal((130, 16)).astype(dtype) for _ in range(3))
    value *= np.finfo(dtype).tiny * 1e5
    clean = cattn.causal_attention(query, key, value)
    value[100:, 5] = np.finfo(dtype).max
    out = cattn.causal_attention(query, key, value)
    assert np.isfinite(out).all()
    assert (out[101:, 5] > np.finfo(dtype).max * 1e-3).any()
    assert_same_bits(np.delete(out, 5, axis=1), np.delete(clean, 5, axis=1))
    assert_same_bits(out[:100], clean[:100])


@pytest.mark.parametrize("kind", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_merged_outputs_near_the_largest_number(kind: Any) -> None:
    top, lse_kind = ml_dtypes.finfo(kind).max, np.float64 if kind is np.float64 else np.float32
    columns = np.array([[1, 1, -1, 0.5, INF, 1, 1], [1, -1, -1, 1, 1, -INF, NAN], [1, 1, -1, 0, 1, 1, 1]]) * float(top)
    outs, lses = list(columns.astype(kind)[:, None]), np.array([[2.0], [2.0], [-3.0]], lse_kind)
    out, lse = cattn.merge_attention(outs, lses)
    weights = np.exp(lses.astype(np.float64) - lse)[:, 0]
    with np.errstate(invalid="ignore"):
        expected = [[top, 0, -top, 0.75 * float(top) * weights[:2].sum(), INF, -INF, NAN]]
    expected[0][1] = float(top) * weights[2]
    assert out.dtype == kind
    np.testing.assert_allclose(
        out.astype(np.float64), np.array(expected, np.float64), rtol=ml_dtypes.finfo(kind).eps * 8
    )


def test_zeros_of_scores_keep_their_sign(isa: str, dtype: type, rng: np.random.Generator) -> None:
    """softcap of 0 is 0, and of -0 is -0; masks that only hide do not change the sign of a visible score either."""
    query, key = rng.standard_normal((21, 16)).astype(dtype), rng.standard_normal((230, 16)).astype(dtype)
    query[3], key[5::7] = 0, 0
    exact = (query == 0).all(axis=1)[:, None] | (key == 0).all(axis=1)
    least = np.finfo(dtype).tiny * dtype(2)
    query[4], key[6::7] = -least, least  # their products are too small for any number but -0
    hides: list[Call] = [
        {},
        {"attn_mask": rng.random((21, 230)) < 0.9},
        {"block_mask": cattn.BlockMask(rng.random((3, 23)) < 0.8, 10)},
    ]
    negative_zeros = 0
    for softcap in (None, 3.0):
        for hidden in hides:
            call: Call = {"query": query, "key": key, "softcap": softcap, **hidden}
            qk = cattn.attention_weights(**call, stage="qk")
            zero, sign = qk == 0, np.signbit(qk)
            negative_zeros += int((zero & sign).sum())
            for stage in ("softcap", "bias", "mask"):
                right = cattn.reference.attention_weights(**call, stage=stage)
                for way, scores in every_way(
                    functools.partial(cattn.attention_weights, **call, stage=stage), tiny=False
                ):
                    visible = zero & (scores != -INF)
                    np.testing.assert_array_equal(scores[visible], 0, err_msg=f"{stage}, {way}")
                    np.testing.assert_array_equal(np.signbit(scores)[visible], sign[visible], err_msg=f"{stage}, {way}")
                    np.testing.assert_array_equal(
                        np.signbit(scores)[exact & visible], np.signbit(right)[exact & visible]
                    )
    assert (negative_zeros > 0) == in_contract(isa)


@pytest.mark.parametrize("mask", [None, np.ones((4, 60), bool), np.zeros((4, 60))], ids=["none", "bool", "additive"])
def test_the_largest_score_of_zeros_is_positive(isa: str, dtype: type, mask: np.ndarray | None) -> None:
    """It was -0 under softcap, and +0 with some masks or beside some queries."""
    query, key = np.zeros((4, 8), dtype), np.ones((60, 8), dtype)
    blocks = cattn.BlockMask(np.array([[1, 0, 1] * 10, [1] * 30], bool), 2)
    for options in ({}, {"block_mask": blocks}):
        ours = cattn.attention_statistics(query, key, mask, softcap=2.0, **options).max_score
        right = cattn.reference.attention_statistics(query, key, mask, softcap=2.0, **options).max_score
        np.testing.assert_array_equal(ours, 0)
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(right))
