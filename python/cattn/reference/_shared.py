"""Helpers of the reference."""

import os
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cattn._input.arrays import refuse_scalar, refuse_without_scale
from cattn._input.objects import Quantized, Stored

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
Array = TypeVar("Array", bound=NDArray[Any])

# NaN and infinity are valid results here, so NumPy must not warn about them.
quiet = np.errstate(all="ignore")


def boolean(mask: ArrayLike, name: str) -> Bools:
    refuse_scalar(mask, name, False)
    array = np.asarray(mask)
    if array.dtype != np.bool_:
        raise TypeError(f"{name} has dtype {array.dtype}, expected bool (True = keep): pass mask.astype(bool)")
    return array


def numbers(array: ArrayLike, name: str) -> Floats:
    """Return an array in float64. The numbers of a quantized one are others without the scale."""
    given = np.asarray(array)
    refuse_without_scale(given, name)
    return np.asarray(given, np.float64)


def plain(stored: Stored, name: str) -> Floats:
    """Return the numbers of an array: of a quantized one the products, in float32."""
    return numbers(stored.values.astype(np.float32) * stored.scale if isinstance(stored, Quantized) else stored, name)


def probability(p: float, name: str) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {p}")
    return float(p)


def logistic(v: Floats) -> Floats:
    """Return 1 / (1 + exp(-v)) without losing digits where it is small."""
    power = np.exp(-np.abs(v))
    result: Floats = np.where(v < 0, power, 1.0) / (1 + power)
    return result


def new_seed(rng: int | None) -> int:
    return int.from_bytes(os.urandom(8), "little") if rng is None else int(rng)


def deliver(result: Array, out: Array | None) -> Array:
    if out is None:
        return result
    out[...] = result
    return out


def rounded_to_bfloat16(x: ArrayLike) -> Floats:
    """Return float32 numbers rounded to bfloat16, to nearest even. Subnormal numbers become 0.

    >>> rounded_to_bfloat16([1.0, 1.00390625, 1.01171875, 1e-39])
    array([1.      , 1.      , 1.015625, 0.      ])
    """
    single = np.asarray(x, np.float32)
    bits = single.view(np.uint32).astype(np.int64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    rounded = np.where(np.isnan(single), np.nan, rounded)
    return np.where(np.abs(single) < np.finfo(np.float32).tiny, 0.0, rounded)
