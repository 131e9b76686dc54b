"""Norms and activations: the law of their sums, accuracy, numbers of every size, special numbers, errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import functional, reference
from cattn.functional import layer_norm, layer_norm_backward
from support import INF, NAN, assert_same_bits, benchmarks_importable, in_contract, sum_by_law, table

with benchmarks_importable():
    from benchmarks.accuracy import BOUNDS

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


def sum_in_blocks(terms: np.ndarray) -> np.ndarray:
    """Add the rows in blocks of 64, and the blocks in float64."""
    total = np.zeros(terms.shape[1])
    for start in range(0, len(terms), 64):
        block = np.zeros(terms.shape[1], terms.dtype)
        for row in terms[start : start + 64]:
            block += row
        total += block
    return total.astype(terms.dtype)


@pytest.mark.promise("rotary positions' bits")
def test_the_bits_of_the_gradient_of_the_weight_follow_from_its_blocks(dtype: type, rng: np.random.Generator) -> None:
    g, x = rng.standard_normal((2, 300, 5)).astype(dtype)
    factor = np.stack([dtype(1) / np.sqrt(sum_by_law(row * row) / dtype(5) + dtype(1e-6)) for row in x])[:, None]
    terms = g * (x * factor)
    _, grad_weight = cattn.rms_norm_backward(g, x, np.ones(5, dtype))
    assert grad_weight is not None
    assert_same_bits(grad_weight, sum_in_blocks(terms))


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
    g, x = rng.standard_normal((2, 300, 5)).astype(dtype)
    assert_same_bits(layer_norm_backward(g, x)[2], sum_in_blocks(g))


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


# ---- gelu and silu ---------------------------------------------------------------------------------------------------
# Each function with its options; gradients take the gradient of the result first.
FORWARD: dict[str, Callable[..., np.ndarray]] = {
    "gelu": functional.gelu,
    "gelu, tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
BACKWARD: dict[str, Callable[..., np.ndarray]] = {
    "gelu": functional.gelu_backward,
    "gelu, tanh": functools.partial(functional.gelu_backward, approximate="tanh"),
    "silu": functional.silu_backward,
}
names = pytest.mark.parametrize("name", FORWARD)


def numbers(dtype: type, rng: np.random.Generator, n: int) -> np.ndarray:
    """Numbers around 0, as far as the functions differ from 0 and x, and of every size, subnormal ones too."""
    info = np.finfo(dtype)
    far = 110 if dtype is np.float32 else 760
    exponents = np.arange(info.minexp - info.nmant, info.maxexp, 1 if dtype is np.float32 else 9)
    sizes = np.ldexp(rng.uniform(1, 2, len(exponents)), exponents)
    parts = [rng.uniform(-6, 6, n), rng.uniform(-40, 40, n), rng.uniform(-far, 0, n // 4), sizes, -sizes]
    return np.concatenate(parts).astype(dtype)


# ---- values ----------------------------------------------------------------------------------------------------------
def exact(name: str, x: float) -> tuple[Any, Any]:
    """The function and its derivative at x, by mpmath."""
    from mpmath import mp, mpf

    number = mpf(x)
    if x > 1000:
        return number, mpf(1)
    if x < -1000:
        return mpf(0), mpf(0)
    if name == "gelu":
        p, density = mp.erfc(-number / mp.sqrt(2)) / 2, mp.exp(-number * number / 2) / mp.sqrt(2 * mp.pi)
        return number * p, p + number * density
    rate, v = mpf(1), number
    if name == "gelu, tanh":
        factor, cubic = 2 * mp.sqrt(2 / mp.pi), mpf("0.044715")
        v, rate = factor * (number + cubic * number**3), factor * (1 + 3 * cubic * number**2)
    p = 1 / (1 + mp.exp(-v))
    return number * p, p * (1 + number * rate / (1 + mp.exp(v)))


@names
def test_the_error_is_a_few_units_in_the_last_place(name: str, dtype: type, rng: np.random.Generator) -> None:
    """Also where the result is tiny or subnormal. The derivative has zeros: its unit is at least the unit of 1/8.

    The other tables have the bits of "scalar", but "gnu128" without an FMA.
    """
    mpmath = pytest.importorskip("mpmath")
    x = numbers(dtype, rng, 100)
    info = np.finfo(dtype)
    with mpmath.workdps(40):
        right = [exact(name, float(number)) for number in x]
        for kernels in ("scalar", *({"gnu128"} & {isa["name"] for isa in cattn._cattn._isa_list()})):
            with table(kernels):
                results = FORWARD[name](x), BACKWARD[name](np.ones_like(x), x)
            for i, values in enumerate(results):
                most = BOUNDS[("gelu and silu", "slopes of gelu and silu")[i]][0]
                for number, value, pair in zip(x, values, right, strict=True):
                    size = max(abs(pair[i]), mpmath.mpf(0.125 if i else 0))
                    exponent = max(int(mpmath.floor(mpmath.log(size, 2))), info.minexp) if size else info.minexp
                    ulps = abs(mpmath.mpf(float(value)) - pair[i]) / mpmath.ldexp(1, exponent - info.nmant)
                    assert ulps < most, (kernels, number, value, pair[i])


# ---- bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.promise("rotary positions' bits")
@names
def test_numbers_of_every_size_have_the_bits_of_the_scalar_table(
    name: str, isa: str, dtype: type, rng: np.random.Generator
) -> None:
    x = numbers(dtype, rng, 2000)
    g = rng.standard_normal(x.shape).astype(dtype)
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        expected, gradient = FORWARD[name](x), BACKWARD[name](g, x)
    assert_same_bits(FORWARD[name](x), expected)
    assert_same_bits(BACKWARD[name](g, x), gradient)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            assert_same_bits(FORWARD[name](np.tile(x, 70))[-x.size :], expected, "in pieces")
    for index in (0, 1234, x.size - 1):
        assert FORWARD[name](x[index]).tobytes() == expected[index].tobytes(), "one number alone"


# ---- special numbers, shapes, errors ---------------------------------------------------------------------------------
@names
def test_special_numbers_get_the_limits(name: str, isa: str, dtype: type) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    x = np.array([0.0, -0.0, INF, -INF, NAN, 1e30, -1e30, 4 * tiny, -4 * tiny, 800, -800], dtype)
    expected = np.array([0.0, -0.0, INF, -0.0, NAN, 1e30, -0.0, 2 * tiny, -2 * tiny, 800, -0.0], dtype)
    assert_same_bits(FORWARD[name](x), expected)
    slopes = np.array([0.5, 0.5, 1, 0, NAN, 1, 0, 0.5, 0.5, 1, 0], dtype)
    np.testing.assert_array_equal(BACKWARD[name](np.ones_like(x), x), slopes)
    assert np.isnan(BACKWARD[name](np.full(2, INF, dtype), np.array([-INF, NAN], dtype))).all(), "inf * 0"
