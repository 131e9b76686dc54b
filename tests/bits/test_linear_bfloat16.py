"""Projections with products of bfloat16: the order of the sums, the bits of every way, storages, gradients, errors."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from cattn.functional import linear, linear_backward
from support import (
    BF16,
    INF,
    NAN,
    WORDS,
    assert_same_bits,
    flushed,
    in_contract,
    layouts,
    pairs,
    sum_of_groups,
    sum_of_pairs,
    table,
)

# Sizes (T, K, N) around pairs, vectors, 16 chains, slabs of 1,024 columns, blocks of 96 and 192 rows, and 8 rows, up to
# which lanes are chains.
SIZES = [
    (1, 1, 1), (1, 32, 16), (2, 33, 3), (3, 1023, 5), (4, 1024, 1), (5, 1025, 18), (7, 5, 40), (8, 8400, 20), (9, 1, 9),
    (17, 1100, 17), (97, 67, 98), (100, 2080, 30), (193, 20, 7), (20, 3, 400), (8, 133, 300), (1, 20, 2100),
]  # fmt: skip


@pytest.fixture(params=WORDS)
def products(request: pytest.FixtureRequest) -> Any:
    """The options of a call with products of bfloat16."""
    return {"compute_dtype": request.param}


def sum_by_law(a: np.ndarray, b: np.ndarray, word: str) -> np.float32:
    """Add the pairs in the order of the bit contract: slabs of 512, 16 chains by index, the chains in order."""
    if word == "bfloat16_tiles":
        return np.float32(sum_of_groups(a, b)) + np.float32(0)
    total = np.float32(0)
    for start in range(0, -(-len(a) // 2), 512):
        slab = [pairs(row)[start : start + 512] for row in (a, b)]
        for chain in range(16):
            total += np.float32(sum_of_pairs(*(half[chain::16].ravel() for half in slab)))
    return total


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_linear_agrees_with_the_reference(
    isa: str, size: tuple[int, int, int], rng: np.random.Generator, products: Any
) -> None:
    t, k, n = size
    x, weight = rng.standard_normal((t, k), np.float32), rng.standard_normal((n, k), np.float32)
    near = [np.abs(a.astype(BF16).astype(np.float64)) for a in (x, weight)]
    bias = rng.standard_normal(n, np.float32)
    bound = (66 + 16 * -(-k // 1024)) * 2.0**-24 * (near[0] @ near[1].T)
    for b in (None, bias):
        actual, right = linear(x, weight, b, **products), reference.linear(x, weight, b, **products)
        assert actual.dtype == np.float32
        assert (np.abs(actual - right) <= bound + 2.0**-23 * np.abs(right)).all()


@pytest.mark.promise("projections' bits", "products of bfloat16")
@pytest.mark.parametrize("power", [0, -60])
@pytest.mark.parametrize(("t", "k", "n"), [(1, 2100, 2), (6, 75, 5), (20, 1027, 3), (3, 40, 20)])
def test_the_bits_follow_from_the_order_of_the_sums(
    isa: str, t: int, k: int, n: int, power: int, rng: np.random.Generator, products: Any
) -> None:
    """Numbers of many sizes, whose sums cancel; with a negative power also sums below the smallest normal number."""
    if not in_contract(isa):
        pytest.skip("without an FMA")
    x, weight = (
        flushed(np.ldexp(rng.standard_normal(s), power + rng.integers(-6, 7, s)).astype(BF16).astype(float))
        for s in ((t, k), (n, k))
    )
    weight[:, 1::2] = -weight[:, : k // 2 * 2 : 2]
    expected = np.array(
        [[sum_by_law(row, w, products["compute_dtype"]) for w in weight[: 4 if t > 1 else n]] for row in x[:4]]
    )
    found = linear(x.astype(np.float32), weight.astype(np.float32), **products)
    assert_same_bits(found[:4, : expected.shape[1]].copy(), expected)


def test_subnormal_numbers_and_sums_are_zeros(isa: str, products: Any) -> None:
    tiny = np.finfo(np.float32).tiny
    for t in (1, 20):
        for x, weight, right in [
            (tiny, 1, tiny), (tiny * (1 - 2.0**-20), 1, 0), (tiny, 0.5, 0), (2 * tiny, 0.5, tiny), (-tiny * 0.99, 1, 0)
        ]:  # fmt: skip
            found = linear(np.full((t, 1), x, np.float32), np.float32([[weight]]), **products)
            assert_same_bits(found, np.full((t, 1), right, np.float32))


def test_special_numbers_spread_as_in_a_product(isa: str, products: Any) -> None:
    x = np.ones((30, 41), np.float32)
    x[3, 5], x[4, 6], x[5, 7:9] = NAN, INF, (INF, -INF)
    for t in (30, 6):
        y = linear(x[:t], np.ones((21, 41), np.float32), **products)
        assert_same_bits(y[3], np.full(21, NAN, np.float32))
        assert_same_bits(y[4], np.full(21, INF, np.float32))
        assert_same_bits(y[5], np.full(21, NAN, np.float32))
        assert_same_bits(np.delete(y, [3, 4, 5], 0), np.full((t - 3, 21), 41, np.float32))


def test_sizes_of_zero(isa: str, products: Any) -> None:
    bias = np.float32([1.0, -2.0, NAN])
    for t in (4, 20):
        nothing = linear(np.zeros((t, 0), np.float32), np.zeros((3, 0), np.float32), bias, **products)
        assert_same_bits(nothing, np.tile(bias, (t, 1)))
    assert linear(np.zeros((0, 5), np.float32), np.zeros((3, 5), np.float32), **products).shape == (0, 3)


# ---- bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.promise("projections' bits", "products of bfloat16")
@pytest.mark.parametrize("columns", [700, 1301])
def test_tables_threads_strides_storages_and_the_batch_change_no_bit(
    isa: str, columns: int, rng: np.random.Generator, products: Any
) -> None:
    x, weight = rng.standard_normal((210, columns), np.float32), rng.standard_normal((115, columns), np.float32)
    bias = rng.standard_normal(115, np.float32)
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        y = linear(x, weight, bias, **products)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            assert_same_bits(linear(x, weight, bias, **products), y)
    for rows in (slice(0, 1), slice(5, 7), slice(11, 19), slice(3, 40), slice(100, 208)):
        assert_same_bits(linear(x[rows], weight, bias, **products), y[rows], str(rows))
        assert_same_bits(linear(x, weight[rows], bias[rows], **products), y[:, rows], str(rows))
    small_x, small_weight = x.astype(BF16), weight.astype(BF16)
    for given_x, given_weight in itertools.chain(
        ((other, weight) for other in (*layouts(x), *layouts(small_x), small_x)),
        ((x[:20], other) for other in (*layouts(weight), *layouts(small_weight), small_weight)),
        ((x[:3], other) for other in (*layouts(weight), *layouts(small_weight), small_weight)),
    ):
        assert_same_bits(linear(given_x, given_weight, bias, **products), y[: len(given_x)])
    rounded = linear(small_x, small_weight, bias.astype(BF16), **products)
    assert rounded.dtype == BF16
    wide = linear(x, weight, bias.astype(BF16).astype(np.float32), **products)
    assert_same_bits(rounded, wide.astype(BF16))


@pytest.mark.promise("projections' bits", "products of bfloat16")
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_alone_have_the_bits_of_any_batch(seed: int, products: Any) -> None:
    rng = np.random.default_rng(seed)
    t, k, n = (int(rng.integers(1, most)) for most in (60, 2400, 60))
    x, weight = rng.standard_normal((t, k), np.float32), rng.standard_normal((n, k), np.float32)
    weight = weight.astype(BF16) if seed // 2 % 2 else weight
    weight = layouts(weight)[seed % 3] if seed % 2 else weight
    y = linear(x, weight, **products)
    with table("scalar"):
        for i in rng.integers(0, t, 3):
            assert_same_bits(linear(x[i], weight, **products), y[i])
        first, last = sorted(int(i) for i in rng.integers(0, t + 1, 2))
        assert_same_bits(linear(x[first:last], weight, **products), y[first:last])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [24, 1060])
def test_large_results_have_the_bits_of_small_ones(
    isa: str, columns: int, bias: bool, rng: np.random.Generator, products: Any
) -> None:
    """A result of four megabytes bypasses the caches in whole lines, wherever it begins, and with any threads."""
    x, weight = (rng.standard_normal((n, columns), np.float32).astype(BF16) for n in (96, 1088))
    added = rng.standard_normal(1088, np.float32).astype(BF16) if bias else None
    right = np.tile(linear(x, weight, added, **products), (21, 1))
    many = np.tile(x, (21, 1))
    memory = np.empty(right.size + 32, BF16)
    for start, threads in ((0, 1), (7, 2), (8, 1), (31, 2)):
        out = memory[start : start + right.size].reshape(right.shape)
        with cattn.num_threads(threads):
            linear(many, weight, added, out=out, **products)
        assert_same_bits(out, right, f"from element {start} on")


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_what_an_earlier_call_left_in_scratch_has_no_influence(
    isa: str, rows: int, dtype: Any, rng: np.random.Generator, products: Any
) -> None:
    """The element that the last pair of an odd row lacks is 0, whatever lay there before."""
    x, weight = rng.standard_normal((rows, 33)).astype(dtype), rng.standard_normal((50, 33)).astype(dtype)
    weights = (weight, np.asfortranarray(weight))
    with cattn.num_threads(1):
        before = [linear(x, each, **products) for each in weights]
        for each, right in zip(weights, before, strict=True):
            for columns in (64, 34):
                nan = np.full((rows, columns), NAN, dtype)
                linear(nan, np.full((50, columns), NAN, dtype), **products)
                assert_same_bits(linear(x, each, **products), right)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_quantized_weights_are_multiplied_by_their_scales_first(
    kind: Any, isa: str, rng: np.random.Generator, products: Any
) -> None:
    weight, x = rng.standard_normal((45, 701), np.float32), rng.standard_normal((20, 701), np.float32)
    rows = cattn.quantize(weight, dtype=kind)
    columns = rng.random((1, 701), np.float32) + np.float32(0.1)
    for scale in (rows.scale, columns, np.float32(0.01), rows.scale * columns, np.float32(2.0**-100)):
        dense = rows.values.astype(np.float32) * scale
        for t in (20, 8, 1):
            expected = linear(x[:t], dense, **products)
            assert_same_bits(linear(x[:t], cattn.Quantized(rows.values, scale), **products), expected)
            other = cattn.Quantized(np.asfortranarray(rows.values), scale)
            assert_same_bits(linear(x[:t], other, **products), expected)


# ---- gradients -------------------------------------------------------------------------------------------------------
@pytest.mark.promise("gradients")
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_gradients_are_of_float32_at_the_rounded_factors(
    dtype: Any, isa: str, rng: np.random.Generator, products: Any
) -> None:
    grad, x = rng.standard_normal((2, 30, 37)).astype(dtype), rng.standard_normal((2, 30, 53)).astype(dtype)
    weight = rng.standard_normal((37, 53)).astype(dtype)
    near = [a.astype(BF16).astype(dtype) for a in (x, weight)]
    right = linear_backward(grad, *near)
    for actual, expected in zip(linear_backward(grad, x, weight, **products), right, strict=True):
        assert actual.dtype == dtype
        assert_same_bits(actual, expected)
    own = reference.linear_backward(grad, x, weight, **products)
    for actual, expected in zip(own, reference.linear_backward(grad, *near), strict=True):
        np.testing.assert_array_equal(actual, expected)
    quantized = cattn.quantize(weight.astype(np.float32))
    dense = cattn.dequantize(quantized).astype(BF16).astype(np.float32)
    grad = grad.astype(np.float32)
    assert_same_bits(linear_backward(grad, None, quantized, **products)[0], linear_backward(grad, None, dense)[0])


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("function", [linear, linear_backward])
@pytest.mark.parametrize("wrong", ["float32", "", np.float32, True, 16, [None]], ids=str)
def test_another_compute_dtype_is_named(function: Any, wrong: Any) -> None:
    one = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="compute_dtype must be None, 'bfloat16' or 'bfloat16_tiles', got"):
        function(one, one, one[0] if function is linear else one, compute_dtype=wrong)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64])
def test_other_dtypes_are_refused(dtype: Any, products: Any) -> None:
    other, single = np.ones((2, 2), dtype), np.ones((2, 2), np.float32)
    name = "float16" if dtype is np.float16 else "float64"
    for x, weight in ((other, other), (single, other), (other, single)):
        with pytest.raises(TypeError, match=f"is for float32 and bfloat16, and x, weight and bias are {name}: convert"):
            linear(x, weight, **products)
        with pytest.raises(TypeError, match=f"float32 and bfloat16, and grad_out, x and weight are {name}: convert"):
            linear_backward(single, x, weight, **products)
