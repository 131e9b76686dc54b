"""RMS norm and layer norm: the law of their sums, rows far from 0, special numbers, errors of the gradients."""

from __future__ import annotations

import numpy as np
import pytest

import cattn
from cattn import reference
from cattn.functional import layer_norm, layer_norm_backward
from support import INF, NAN, assert_same_bits, sum_by_law

# Numbers of columns around vectors of 4 to 16 lanes, 8 chains of a sum, and runs of 512 columns.
COLUMNS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 511, 512, 513, 1024, 1100]


# ---- RMS norm --------------------------------------------------------------------------------------------------------
@pytest.mark.promise("rotary positions' bits")
@pytest.mark.parametrize("n", [*COLUMNS, 140_003])  # kernels look at a stop every 65,536 columns
def test_the_bits_of_rms_norm_follow_from_its_sums(isa: str, dtype: type, n: int, rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((3, n)).astype(dtype), rng.standard_normal(n).astype(dtype)
    one, eps = dtype(1), dtype(1e-6)
    expected = np.empty_like(x)
    for row in range(3):
        factor = one / np.sqrt(sum_by_law(x[row] * x[row]) / dtype(n) + eps)
        expected[row] = x[row] * factor * weight
    assert_same_bits(cattn.rms_norm(x, weight), expected)


@pytest.mark.promise("rotary positions' bits")
def test_the_bits_of_the_gradient_of_the_weight_follow_from_its_blocks(dtype: type, rng: np.random.Generator) -> None:
    """Rows are added in blocks of 64, the blocks in float64."""
    g, x = rng.standard_normal((2, 300, 5)).astype(dtype)
    factor = np.stack([dtype(1) / np.sqrt(sum_by_law(row * row) / dtype(5) + dtype(1e-6)) for row in x])[:, None]
    terms = g * (x * factor)
    total = np.zeros(5)
    for start in range(0, 300, 64):
        block = np.zeros(5, dtype)
        for row in terms[start : start + 64]:
            block += row
        total += block
    _, grad_weight = cattn.rms_norm_backward(g, x, np.ones(5, dtype))
    assert grad_weight is not None
    assert_same_bits(grad_weight, total.astype(dtype))


def test_special_numbers_go_as_in_arithmetic_of_rms_norm(isa: str, dtype: type) -> None:
    tiny, huge = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    x = np.array([[NAN, 1, 2], [INF, 1, 2], [huge, 1, 2], [0, 0, 0], [tiny, 0, 0], [3, 4, 0]], dtype)
    y = cattn.rms_norm(x)
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1], [NAN, 0, 0])
    np.testing.assert_array_equal(y[2:4], 0)
    np.testing.assert_allclose(y[4, 0] / tiny, 1000, rtol=1e-6)
    np.testing.assert_allclose(y[5], np.array([3, 4, 0]) / np.sqrt(25 / 3), rtol=1e-5)
    assert np.isnan(cattn.rms_norm(x[3], eps=0.0)).all(), "0 / 0"
    _, grad_weight = cattn.rms_norm_backward(np.ones_like(x), x, np.ones(3, dtype))
    assert grad_weight is not None
    assert np.isnan(grad_weight).all()


# ---- layer norm ------------------------------------------------------------------------------------------------------
@pytest.mark.promise("rotary positions' bits")
@pytest.mark.parametrize("n", [*COLUMNS, 140_003])  # kernels look at a stop every 65,536 columns
def test_the_bits_of_layer_norm_follow_from_its_sums(isa: str, dtype: type, n: int, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((3, n)) + np.array([[0], [100], [-0.01]])).astype(dtype)
    weight, bias = rng.standard_normal((2, n)).astype(dtype)
    expected = np.empty_like(x)
    for row in range(3):
        differences = x[row] - sum_by_law(x[row]) / dtype(n)
        rest = sum_by_law(differences) / dtype(n)
        variance = max(sum_by_law(differences * differences) / dtype(n) - rest * rest, dtype(0))
        factor = dtype(1) / np.sqrt(variance + dtype(1e-5))
        expected[row] = (differences - rest) * factor
    assert_same_bits(layer_norm(x), expected)
    assert_same_bits(layer_norm(x, weight), expected * weight)
    assert_same_bits(layer_norm(x, None, bias), expected + bias)
    assert_same_bits(layer_norm(x, weight, bias), expected * weight + bias)


def test_a_row_far_from_zero_keeps_its_digits(isa: str, dtype: type, rng: np.random.Generator) -> None:
    """The mean of such a row is rounded: PyTorch's result is wrong by 2e-3 in float32."""
    far, eps = 1e4 if dtype is np.float32 else 1e12, np.finfo(dtype).eps
    x = (rng.standard_normal((20, 768)) + far).astype(dtype)
    shifted = x - dtype(far)  # exact: Sterbenz
    right = reference.layer_norm(shifted)
    np.testing.assert_allclose(layer_norm(x), right, rtol=0, atol=60 * eps)
    assert np.abs(layer_norm(np.full((1, 768), far, dtype) * dtype(1.1))).max() < 1e-4, "a constant row"


@pytest.mark.promise("rotary positions' bits")
def test_the_gradient_of_the_bias_is_summed_in_blocks(dtype: type, rng: np.random.Generator) -> None:
    """Rows are added in blocks of 64, the blocks in float64."""
    g, x = rng.standard_normal((2, 300, 5)).astype(dtype)
    total = np.zeros(5)
    for start in range(0, 300, 64):
        block = np.zeros(5, dtype)
        for row in g[start : start + 64]:
            block += row
        total += block
    assert_same_bits(layer_norm_backward(g, x)[2], total.astype(dtype))


def test_special_numbers_go_as_in_arithmetic_of_layer_norm(isa: str, dtype: type) -> None:
    huge = np.finfo(dtype).max
    x = np.array([[NAN, 1, 2], [INF, 1, 2], [huge, huge, 2], [0, 0, 0], [3, 4, 5]], dtype)
    y = layer_norm(x)
    assert np.isnan(y[:3]).all()
    np.testing.assert_array_equal(y[3], 0)
    np.testing.assert_allclose(y[4], [-np.sqrt(1.5), 0, np.sqrt(1.5)], rtol=1e-5)
    assert np.isnan(layer_norm(x[3], eps=0.0)).all(), "0 / 0"
    assert all(a is not None and np.isnan(a).all() for a in layer_norm_backward(x, x, np.ones(3, dtype))[1:2])
    assert layer_norm_backward(x, x)[1] is None
