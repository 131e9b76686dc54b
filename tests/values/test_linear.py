"""Projections and their gradients: values, the order of the sums, bits, halves, quantized weights, errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import _cattn, reference
from cattn.functional import linear, linear_backward
from support import HALVES, NAN, assert_same_bits, in_contract, layouts, table

# Sizes (T, K, N) around vectors, 16 chains, slabs of 512 columns, panels of 3 vectors, blocks of 192 and 384 rows, and
# 8 rows, up to which lanes are chains.
SIZES = [
    (1, 1, 1), (1, 16, 16), (2, 17, 3), (3, 511, 5), (4, 512, 1), (5, 513, 18), (7, 5, 40), (8, 4200, 20), (9, 1, 9),
    (17, 600, 17), (97, 33, 98), (100, 1040, 30), (193, 20, 7), (20, 3, 400), (8, 133, 300), (1, 20, 2100),
    (192, 513, 192), (203, 33, 449), (401, 520, 197), (801, 20, 48),
]  # fmt: skip


def sum_by_law(products: np.ndarray) -> Any:
    """Add exact products in the order of the bit contract: slabs of 512, 16 chains by index, the chains in order."""
    total = products.dtype.type(0)
    for start in range(0, len(products), 512):
        chains = [products.dtype.type(0)] * 16
        for d, product in enumerate(products[start : start + 512]):
            chains[d % 16] += product
        for chain in chains:
            total += chain
    return total


def tolerance(x: np.ndarray, weight: np.ndarray, dtype: Any) -> Any:
    """Return a bound of the rounding errors: of a chain of 32 terms, and of the sum of all chains."""
    n = x.shape[-1]
    magnitude = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T
    return (34 + 16 * -(-n // 512)) * np.finfo(dtype).eps / 2 * magnitude + np.finfo(dtype).tiny


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_linear_agrees_with_the_reference(
    isa: str, dtype: type, size: tuple[int, int, int], rng: np.random.Generator
) -> None:
    t, k, n = size
    x, weight = rng.standard_normal((t, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)
    bias = rng.standard_normal(n).astype(dtype)
    for b in (None, bias):
        actual, right = linear(x, weight, b), reference.linear(x, weight, b)
        assert actual.dtype == dtype
        assert (np.abs(actual - right) <= tolerance(x, weight, dtype) + np.finfo(dtype).eps * np.abs(right)).all()


@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize(("t", "k", "n"), [(1, 1100, 4), (6, 700, 5), (20, 530, 3)])
def test_the_bits_follow_from_the_order_of_the_sums(
    isa: str, dtype: type, t: int, k: int, n: int, rng: np.random.Generator
) -> None:
    digits = np.finfo(dtype).nmant // 2 - 1  # so that every product is exact
    x, weight = (np.ldexp(rng.integers(-(2**digits), 2**digits, s), -digits).astype(dtype) for s in ((t, k), (n, k)))
    expected = np.array([[sum_by_law(row * w) for w in weight] for row in x])
    assert_same_bits(linear(x, weight), expected)
    bias = rng.standard_normal(n).astype(dtype)
    assert_same_bits(linear(x, weight, bias), expected + bias)


def test_sizes_of_zero(isa: str, dtype: type) -> None:
    bias = np.array([1.0, -2.0, NAN], dtype)
    assert_same_bits(linear(np.zeros((4, 0), dtype), np.zeros((3, 0), dtype), bias), np.tile(bias, (4, 1)))
    assert linear(np.zeros((0, 5), dtype), np.zeros((3, 5), dtype)).shape == (0, 3)
    assert linear(np.zeros((2, 0, 5), dtype), np.zeros((0, 5), dtype)).shape == (2, 0, 0)
    assert linear(np.zeros(5, dtype), np.zeros((3, 5), dtype), bias[:3]).shape == (3,)
    grad_x, grad_weight, grad_bias = linear_backward(np.ones((0, 3)), np.ones((0, 5)), np.ones((3, 5)))
    assert grad_x.shape == (0, 5)
    assert_same_bits(grad_weight, np.zeros((3, 5)))
    assert_same_bits(grad_bias, np.zeros(3))


def test_no_result_is_a_negative_zero(isa: str, dtype: type) -> None:
    x, weight = np.full((20, 3), -0.0, dtype), np.ones((20, 3), dtype)
    for t in (20, 2):
        assert_same_bits(linear(x[:t], weight, np.full(20, -0.0, dtype)), np.zeros((t, 20), dtype))


# ---- gradients -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_agree_with_the_reference(dtype: type, size: tuple[int, int, int], rng: np.random.Generator) -> None:
    t, k, n = size
    grad, x = rng.standard_normal((t, n)).astype(dtype), rng.standard_normal((t, k)).astype(dtype)
    weight = rng.standard_normal((n, k)).astype(dtype)
    actual, right = linear_backward(grad, x, weight), reference.linear_backward(grad, x, weight)
    factors = [(grad, weight.T), (grad.T, x.T), (np.ones((1, t)), grad.T)]
    for a, r, (left, other) in zip(actual, right, factors, strict=True):
        assert r is not None
        assert a.dtype == dtype
        assert (np.abs(a - r) <= tolerance(left, other, dtype) + np.finfo(dtype).eps * np.abs(r)).all()


def test_the_gradient_of_the_bias_is_summed_in_float64() -> None:
    """In float32 the ones would be lost beside the large number."""
    for last in (0.0, -(2.0**24)):
        grad = np.ones((400, 3), np.float32)
        grad[0], grad[-1] = 2.0**24, last
        right = np.full(3, 2.0**24 + 398 + last, np.float32)
        for dtype in (np.float32, np.float64):
            assert_same_bits(linear_backward(grad, grad.astype(dtype), None)[2], right.astype(dtype))
    grad = np.ones((20, 1), np.float32)
    grad[0] = 2.0**24
    assert linear_backward(grad, grad, None)[2] == 16777236


def test_gradients_that_nobody_needs_are_left_out(rng: np.random.Generator) -> None:
    grad, x, weight = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 5)), rng.standard_normal((4, 5))
    both = linear_backward(grad, x, weight)
    only_x, only_weight = linear_backward(grad, None, weight), linear_backward(grad, x, None)
    assert_same_bits(only_x[0], both[0])
    assert only_x[1] is None
    assert only_weight[0] is None
    assert_same_bits(only_weight[1], both[1])
    assert_same_bits(only_weight[2], both[2])


# ---- bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.promise("projections' bits")
def test_tables_threads_strides_and_the_batch_change_no_bit(isa: str, dtype: type, rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((210, 700)).astype(dtype), rng.standard_normal((115, 700)).astype(dtype)
    grad = rng.standard_normal((210, 115)).astype(dtype)
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        y, (grad_x, grad_weight, _) = linear(x, weight), linear_backward(grad, x, weight)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            assert_same_bits(linear(x, weight), y)
            assert_same_bits(linear_backward(grad, x, weight)[0], grad_x)
            assert_same_bits(linear_backward(grad, x, weight)[1], grad_weight)
    for rows in (slice(0, 1), slice(5, 7), slice(11, 19), slice(3, 40), slice(100, 208)):
        assert_same_bits(linear(x[rows], weight), y[rows], str(rows))
        assert_same_bits(linear(x, weight[rows]), y[:, rows], str(rows))
        assert_same_bits(linear_backward(grad[rows], None, weight)[0], grad_x[rows], str(rows))
    for given_x, given_weight in itertools.chain(
        ((other, weight) for other in layouts(x)), ((x[:20], other) for other in layouts(weight))
    ):
        assert_same_bits(linear(given_x, given_weight), y[: len(given_x)])
    # leading axes of any strides
    assert_same_bits(linear(x.reshape(7, 30, 700).swapaxes(0, 1), weight), y.reshape(7, 30, 115).swapaxes(0, 1))
    assert_same_bits(linear(np.broadcast_to(x[3], (2, 9, 700)), weight), np.broadcast_to(y[3], (2, 9, 115)))
    repeated = np.broadcast_to(x[:4, None], (4, 3, 700))
    assert_same_bits(linear(repeated, weight), np.broadcast_to(y[:4, None], (4, 3, 115)))


@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize(("t", "n"), [(200, 211), (203, 400), (200, 17), (97, 33), (801, 50)])
def test_a_result_in_a_larger_array_leaves_its_neighbours_alone(
    isa: str, dtype: type, t: int, n: int, rng: np.random.Generator
) -> None:
    """Sums of several slabs rest in the result; every row and column is at the edge of some block in some size."""
    x, weight, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((t, 1100), (n, 1100), (n,)))
    with table("scalar" if in_contract(isa) else isa):
        y = np.concatenate([linear(x[i : i + 8], weight, bias) for i in range(0, t, 8)])
    for around in (np.full((t + 2, n + 5), NAN, dtype), np.full((n + 5, t + 2), NAN, dtype).T):
        out = around[1:-1, 2:-3]
        assert linear(x, weight, bias, out=out) is out
        assert_same_bits(out.copy(), y)
        out[:] = NAN
        assert np.isnan(around).all()


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_blocks_of_columns_have_their_own_bias(dtype: type, rng: np.random.Generator, rows: int) -> None:
    """Long rows of results are shared out to the threads by columns."""
    x, weight = rng.standard_normal((rows, 130)).astype(dtype), rng.standard_normal((6000, 130)).astype(dtype)
    bias = rng.standard_normal(6000).astype(dtype)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            y = linear(x, weight, bias)
        for part in (slice(0, 40), slice(2990, 3010), slice(5900, 6000)):
            assert_same_bits(y[:, part], linear(x, weight[part], bias[part]), f"{threads} threads, {part}")


@pytest.mark.parametrize("rows", range(2, 9))
@pytest.mark.parametrize("columns", [100_000, 4_000_000])
def test_long_sums_of_few_rows_read_nothing_beyond_them(columns: int, rows: int, rng: np.random.Generator) -> None:
    """A row past the last one would lie far after the packed rows, where no memory needs to be."""
    x, weight = rng.integers(-8, 9, (rows, columns)).astype(np.float32), np.ones((1, columns), np.float32)
    with cattn.num_threads(1):
        result = linear(x, weight)
    np.testing.assert_array_equal(result[:, 0], x.sum(1, dtype=np.float64))


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
@pytest.mark.parametrize(("rows", "columns"), [(2, 70_001), (20, 70_001), (7, 2**22 + 3), (20, 2**20 + 3)])
def test_long_rows_are_packed_in_pieces_or_by_slabs(
    rows: int, columns: int, compute_dtype: Any, rng: np.random.Generator
) -> None:
    """Rows of B that take more than 64 MiB are never packed as a whole. All sums are exact."""
    x = rng.integers(-1, 2, (rows, columns), np.int8)
    weight = rng.integers(-1, 2, (5 if rows < 20 else 17, columns), np.int8)
    wide, dense = x.astype(np.float32), weight.astype(np.float32)
    right = wide @ dense.T
    scale = np.full((len(weight), 1), 0.5, np.float32)
    for other in (dense, np.asfortranarray(dense)):
        np.testing.assert_array_equal(linear(wide, other, compute_dtype=compute_dtype), right)
    quantized = cattn.Quantized(weight, scale)
    np.testing.assert_array_equal(linear(wide, quantized, compute_dtype=compute_dtype), right / 2)
    if compute_dtype is None:
        np.testing.assert_array_equal(linear(x.astype(np.float16), dense), right)


def test_products_of_batches(dtype: type, rng: np.random.Generator) -> None:
    """The private product, which serves PyTorch's bmm."""
    a, b = rng.standard_normal((3, 20, 70)).astype(dtype), rng.standard_normal((3, 70, 40)).astype(dtype)
    expected = np.stack([linear(x, y.T) for x, y in zip(a, b, strict=True)])
    with cattn.num_threads(2):
        assert_same_bits(_cattn._product(a, b.swapaxes(1, 2), None, False), expected)
    assert _cattn._product(a[:0], b[:0].swapaxes(1, 2), None, False).shape == (0, 20, 40)


# ---- storage ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_weight_may_be_stored_as_halves_beside_float32(isa: str, half: Any, rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((40, 530)).astype(half), rng.standard_normal((37, 530)).astype(half)
    bias = rng.standard_normal(37).astype(half)
    wide = [a.astype(np.float32) for a in (x, weight, bias)]
    y = linear(*wide)
    for rows in (40, 3):
        assert_same_bits(linear(x[:rows], weight, bias), y[:rows].astype(half))
        assert_same_bits(linear(wide[0][:rows], weight, wide[2]), y[:rows])
        assert_same_bits(linear(wide[0][:rows], np.asfortranarray(weight), wide[2]), y[:rows])


@pytest.mark.parametrize("quantized", ["int8", "float8_e4m3fn"])
def test_quantized_weights_have_the_bits_of_their_products(isa: str, quantized: Any, rng: np.random.Generator) -> None:
    if quantized != "int8":
        quantized = pytest.importorskip("ml_dtypes").float8_e4m3fn
    weight = rng.standard_normal((45, 700), np.float32)
    rows = tuple(cattn.quantize(weight, dtype=quantized))
    columns = (rows[0], np.broadcast_to(rng.random(700, np.float32) + 0.1, (1, 700)))
    x = rng.standard_normal((20, 700), np.float32)
    for values, scale in (rows, columns, (rows[0], np.float32(0.01)), (rows[0], rows[1] * columns[1])):
        quantized_weight, dense = cattn.Quantized(values, scale), values.astype(np.float32) * scale
        for t in (20, 8, 1):
            expected = linear(x[:t], dense)
            assert_same_bits(linear(x[:t], quantized_weight), expected)
            assert_same_bits(linear(x[:t], cattn.Quantized(np.asfortranarray(values), scale)), expected)
        grad = rng.standard_normal((20, 45), np.float32)
        assert_same_bits(linear_backward(grad, x, quantized_weight)[0], linear_backward(grad, x, dense)[0])
        assert_same_bits(linear(x.astype(np.float64), quantized_weight), linear(x.astype(np.float64), dense))


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("rows", [5, 20, 300])
def test_every_block_of_a_weight_has_its_own_scales_and_bias(
    isa: str, rows: int, compute_dtype: Any, rng: np.random.Generator
) -> None:
    """Either operand is packed, in blocks of up to 192 rows: the weight's rows have scales, and numbers of the bias."""
    x, weight = rng.standard_normal((rows, 40), np.float32), rng.standard_normal((460, 40), np.float32)
    bias, (values, scale) = rng.standard_normal(460, np.float32), cattn.quantize(weight)
    dense = values.astype(np.float32) * scale
    for stored in (values, np.asfortranarray(values)):
        y = linear(x, cattn.Quantized(stored, scale), bias, compute_dtype=compute_dtype)
        for part in (slice(0, 7), slice(150, 210), slice(250, 260), slice(380, 400), slice(455, 460)):
            expected = linear(x[:1], dense[part], bias[part], compute_dtype=compute_dtype)
            assert_same_bits(y[:1, part].copy(), expected, str(part))
            expected = linear(x, dense[part], bias[part], compute_dtype=compute_dtype)
            assert_same_bits(y[:, part].copy(), expected, str(part))


# ---- arguments -------------------------------------------------------------------------------------------------------
