"""Gelu, silu and their gradients: accuracy against mpmath, numbers of every size, special numbers, errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import functional
from support import INF, NAN, assert_same_bits, benchmarks_importable, in_contract, table

with benchmarks_importable():
    from benchmarks.accuracy import BOUNDS

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
