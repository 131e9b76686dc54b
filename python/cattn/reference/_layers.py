"""The layers around attention: norms, activations, projections, rotary positions."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from cattn._input.objects import Stored
from cattn._input.types import ComputeDType

from ._shared import Floats, deliver, logistic, numbers, plain, quiet, rounded_to_bfloat16


def _rows(x: Floats) -> Floats:
    """Return all rows of an array in one matrix."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@quiet
def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-6, *, out: Floats | None = None) -> Floats:
    """Return ``x / sqrt(mean(x**2) + eps) * weight`` over the last axis."""
    given = numbers(x, "x")
    normed = given / np.sqrt((given * given).mean(axis=-1, keepdims=True) + eps)
    return deliver(normed if weight is None else normed * numbers(weight, "weight"), out)


@quiet
def rms_norm_backward(
    grad_out: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-6
) -> tuple[Floats, Floats | None]:
    """Return the gradients of `x` and `weight`, given the gradient of the result of `rms_norm`."""
    grad, given = numbers(grad_out, "grad_out"), numbers(x, "x")
    factor = 1 / np.sqrt((given * given).mean(axis=-1, keepdims=True) + eps)
    normed = given * factor
    weighted = grad if weight is None else grad * numbers(weight, "weight")
    grad_x = factor * (weighted - normed * (weighted * normed).mean(axis=-1, keepdims=True))
    grad_weight = None if weight is None else _rows(grad * normed).sum(axis=0)
    return grad_x, grad_weight


@quiet
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    out: Floats | None = None,
) -> Floats:
    """Return ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with mean and variance over the last axis."""
    given = numbers(x, "x")
    centred = given - given.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    scaled = normed if weight is None else normed * numbers(weight, "weight")
    return deliver(scaled if bias is None else scaled + numbers(bias, "bias"), out)


@quiet
def layer_norm_backward(
    grad_out: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-5
) -> tuple[Floats, Floats | None, Floats]:
    """Return the gradients of `x`, `weight` and a bias, given the gradient of the result of `layer_norm`."""
    grad, given = numbers(grad_out, "grad_out"), numbers(x, "x")
    centred = given - given.mean(axis=-1, keepdims=True)
    factor = 1 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    normed = centred * factor
    weighted = grad if weight is None else grad * numbers(weight, "weight")
    sideways = normed * (weighted * normed).mean(axis=-1, keepdims=True)
    grad_x = factor * (weighted - weighted.mean(axis=-1, keepdims=True) - sideways)
    grad_weight = None if weight is None else _rows(grad * normed).sum(axis=0)
    return grad_x, grad_weight, _rows(grad).sum(axis=0)


Approximation = Literal["none", "tanh"]


def _inside(x: ArrayLike) -> Floats:
    """Return x with -inf replaced by a number that is as good, so that it is not multiplied by 0."""
    return np.maximum(numbers(x, "x"), -1000.0)


def _normal(x: Floats) -> Floats:
    """Return the distribution function of the normal distribution."""
    result: Floats = np.empty(x.shape)
    for i, number in enumerate(x.flat):
        result.flat[i] = math.erfc(-number / math.sqrt(2)) / 2
    return result


def _cubic(x: Floats) -> Floats:
    """Return twice the argument of the tanh that gelu is approximated by."""
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _product_slope(z: Floats, v: Floats) -> Floats:
    """Return the derivative of x times the logistic function of v, where z is x times the derivative of v."""
    return logistic(v) * (1 + z * logistic(-v))


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return approximate == "tanh"


@quiet
def gelu(x: ArrayLike, approximate: Approximation = "none", *, out: Floats | None = None) -> Floats:
    """Return x times the probability that a normal number is below x, or its approximation by a tanh."""
    given = _inside(x)
    probability = logistic(_cubic(given)) if _is_tanh(approximate) else _normal(given)
    return deliver(np.asarray(given * probability), out)


@quiet
def gelu_backward(
    grad_out: ArrayLike, x: ArrayLike, approximate: Approximation = "none", *, out: Floats | None = None
) -> Floats:
    """Return the gradient of `x`, given the gradient of the result of `gelu`."""
    given = np.minimum(_inside(x), 1000.0)
    if _is_tanh(approximate):
        rate = 2 * math.sqrt(2 / math.pi) * (given + 3 * 0.044715 * given**3)
        slope = _product_slope(rate, _cubic(given))
    else:
        slope = _normal(given) + given * np.exp(-given * given / 2) / math.sqrt(2 * math.pi)
    return deliver(numbers(grad_out, "grad_out") * slope, out)


@quiet
def silu(x: ArrayLike, *, out: Floats | None = None) -> Floats:
    """Return ``x / (1 + exp(-x))``."""
    given = _inside(x)
    return deliver(np.asarray(given * logistic(given)), out)


@quiet
def silu_backward(grad_out: ArrayLike, x: ArrayLike, *, out: Floats | None = None) -> Floats:
    """Return the gradient of `x`, given the gradient of the result of `silu`."""
    given = np.minimum(_inside(x), 1000.0)
    return deliver(numbers(grad_out, "grad_out") * _product_slope(given, given), out)


@quiet
def linear(
    x: ArrayLike,
    weight: Stored,
    bias: ArrayLike | None = None,
    *,
    compute_dtype: ComputeDType = None,
    out: Floats | None = None,
) -> Floats:
    """Return ``x @ weight.T + bias``; `weight` is (N, K). `compute_dtype` "bfloat16" rounds both to it.

    Examples
    --------
    >>> linear([[1.0, 2.0]], [[3.0, 4.0], [0.0, 1.0]], [0.5, 0.0])
    array([[11.5,  2. ]])
    """
    result: Floats = _factor(x, "x", compute_dtype) @ _factor(weight, "weight", compute_dtype).T
    return deliver(result if bias is None else result + numbers(bias, "bias"), out)


@quiet
def linear_backward(
    grad_out: ArrayLike, x: ArrayLike | None, weight: Stored | None, *, compute_dtype: ComputeDType = None
) -> tuple[Floats | None, Floats | None, Floats]:
    """Return the gradients of `x`, `weight` and bias, given the gradient of the result of `linear`.

    With `compute_dtype` "bfloat16" they are the gradients at the rounded x and weight.
    """
    grad = numbers(grad_out, "grad_out")
    rows = _rows(grad)
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = grad @ _factor(weight, "weight", compute_dtype)
    if x is not None:
        given = _factor(x, "x", compute_dtype)
        grad_weight = rows.T @ _rows(given)
    return grad_x, grad_weight, rows.sum(axis=0)


def _factor(array: Stored, name: str, compute_dtype: ComputeDType) -> Floats:
    """Return the numbers that a product takes."""
    given = plain(array, name)
    return given if compute_dtype is None else rounded_to_bfloat16(given)


Scaling = Mapping[str, Any] | None


def rope_frequencies(
    rotary_dim: int, theta: float = 10000.0, scaling: Scaling = None, length: float = 0.0
) -> tuple[Floats, float]:
    """Return the frequency of each pair of columns, and the factor of all sines and cosines.

    `length` is the largest position + 1, which "dynamic" scaling depends on. The formulas come from
    ``modeling_rope_utils`` in Hugging Face transformers.

    Examples
    --------
    >>> rope_frequencies(4)
    (array([1.  , 0.01]), 1.0)
    >>> rope_frequencies(4, scaling={"rope_type": "linear", "factor": 2.0})
    (array([0.5  , 0.005]), 1.0)
    """
    index = np.arange(rotary_dim // 2)
    given = {key: value for key, value in (scaling or {}).items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    factor, original = given.get("factor", 1.0), given.get("original_max_position_embeddings", 1)
    if kind == "dynamic":
        ratio = factor * max(length, original) / original - (factor - 1)
        theta = theta * ratio ** (rotary_dim / (rotary_dim - 2))
    frequencies = theta ** (-2.0 * index / rotary_dim)
    attention_factor = 1.0
    if kind == "linear":
        frequencies = frequencies / factor
    elif kind == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        turns = original * frequencies / (2 * math.pi)  # within the original length
        smooth = (turns - low) / (high - low)
        between = (1 - smooth) * frequencies / factor + smooth * frequencies
        frequencies = np.where(turns < low, frequencies / factor, np.where(turns > high, frequencies, between))
    elif kind == "yarn":
        ramp = _yarn_ramp(rotary_dim, theta, given)
        frequencies = frequencies / factor * ramp + frequencies * (1 - ramp)
        attention_factor = _yarn_attention_factor(given)
    elif kind not in ("default", "dynamic"):
        raise ValueError(f"unknown rope_type {kind!r}")
    return frequencies, attention_factor


def _yarn_ramp(rotary_dim: int, theta: float, given: Mapping[str, Any]) -> Floats:
    """Return 0 where a frequency turns often within the original length, 1 where it turns seldom."""
    original = given["original_max_position_embeddings"]
    low, high = (
        rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (given.get("beta_fast", 32), given.get("beta_slow", 1))
    )
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0, 1)


def _yarn_attention_factor(given: Mapping[str, Any]) -> float:
    factor = given["factor"]

    def mscale(number: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * number * math.log(factor) + 1.0

    if "attention_factor" in given:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)


def _match_positions(positions: ArrayLike | None, shape: tuple[int, ...]) -> Floats:
    """Return positions that broadcast to the axes of x but the last: (T,), or with leading axes of x."""
    array = np.arange(shape[-2], dtype=np.float64) if positions is None else np.asarray(positions, np.float64)
    if 1 < array.ndim == len(shape) - 2:  # without the heads
        array = np.expand_dims(array, -2)
    return array


@quiet
def rope(
    x: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Scaling = None,
    inverse: bool = False,
    out: Floats | None = None,
) -> Floats:
    """Return `x`, (..., T, D), with each pair of its first `rotary_dim` columns rotated by position * frequency.

    A pair is column i and column i + rotary_dim/2 or, if `interleaved`, columns 2i and 2i + 1. `positions` is (T,), or
    has leading axes of `x`, with or without the heads. `rope_frequencies` explains `scaling`. `inverse` rotates by the
    negative angles, which gives the gradient.
    """
    given = numbers(x, "x")
    n = given.shape[-1] if rotary_dim is None else rotary_dim
    matched = _match_positions(positions, given.shape)
    frequencies, factor = rope_frequencies(n, theta, scaling, matched.max(initial=-1.0) + 1)
    angles = matched[..., None] * frequencies
    cos, sin = factor * np.cos(angles), factor * np.sin(-angles if inverse else angles)
    first, second = (
        (np.s_[..., 0:n:2], np.s_[..., 1:n:2]) if interleaved else (np.s_[..., : n // 2], np.s_[..., n // 2 : n])
    )
    result = given.copy()
    result[first] = given[first] * cos - given[second] * sin
    result[second] = given[second] * cos + given[first] * sin
    return deliver(result, out)
