"""Rotary positions with the scalings of transformers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._shared import Floats, deliver, numbers, quiet

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

    Examples
    --------
    >>> rope(np.ones((2, 2))).round(3)
    array([[ 1.   ,  1.   ],
           [-0.301,  1.382]])
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
