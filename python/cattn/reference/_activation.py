"""Gelu, silu, and their gradients."""

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from ._shared import Floats, deliver, numbers, quiet

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


def _logistic(v: Floats) -> Floats:
    """Return 1 / (1 + exp(-v)) without losing digits where it is small."""
    power = np.exp(-np.abs(v))
    result: Floats = np.where(v < 0, power, 1.0) / (1 + power)
    return result


def _cubic(x: Floats) -> Floats:
    """Return twice the argument of the tanh that gelu is approximated by."""
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _product_slope(z: Floats, v: Floats) -> Floats:
    """Return the derivative of x times the logistic function of v, where z is x times the derivative of v."""
    return _logistic(v) * (1 + z * _logistic(-v))


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return approximate == "tanh"


@quiet
def gelu(x: ArrayLike, approximate: Approximation = "none", *, out: Floats | None = None) -> Floats:
    """Return x times the probability that a normal number is below x, or its approximation by a tanh.

    Examples
    --------
    >>> gelu([-1.0, 0.0, 1.0]).round(4)
    array([-0.1587,  0.    ,  0.8413])
    >>> gelu([-1.0, 0.0, 1.0], "tanh").round(4)
    array([-0.1588,  0.    ,  0.8412])
    """
    given = _inside(x)
    probability = _logistic(_cubic(given)) if _is_tanh(approximate) else _normal(given)
    return deliver(np.asarray(given * probability), out)


@quiet
def gelu_backward(
    grad_out: ArrayLike, x: ArrayLike, approximate: Approximation = "none", *, out: Floats | None = None
) -> Floats:
    """Return the gradient of `x`, given the gradient of the result of `gelu`.

    Examples
    --------
    >>> gelu_backward([1.0, 1.0, 1.0], [-1.0, 0.0, 1.0]).round(4)
    array([-0.0833,  0.5   ,  1.0833])
    """
    given = np.minimum(_inside(x), 1000.0)
    if _is_tanh(approximate):
        rate = 2 * math.sqrt(2 / math.pi) * (given + 3 * 0.044715 * given**3)
        slope = _product_slope(rate, _cubic(given))
    else:
        slope = _normal(given) + given * np.exp(-given * given / 2) / math.sqrt(2 * math.pi)
    return deliver(numbers(grad_out, "grad_out") * slope, out)


@quiet
def silu(x: ArrayLike, *, out: Floats | None = None) -> Floats:
    """Return ``x / (1 + exp(-x))``.

    Examples
    --------
    >>> silu([-1.0, 0.0, 1.0]).round(4)
    array([-0.2689,  0.    ,  0.7311])
    """
    given = _inside(x)
    return deliver(np.asarray(given * _logistic(given)), out)


@quiet
def silu_backward(grad_out: ArrayLike, x: ArrayLike, *, out: Floats | None = None) -> Floats:
    """Return the gradient of `x`, given the gradient of the result of `silu`.

    Examples
    --------
    >>> silu_backward([1.0, 1.0, 1.0], [-1.0, 0.0, 1.0]).round(4)
    array([0.0723, 0.5   , 0.9277])
    """
    given = np.minimum(_inside(x), 1000.0)
    return deliver(numbers(grad_out, "grad_out") * _product_slope(given, given), out)
