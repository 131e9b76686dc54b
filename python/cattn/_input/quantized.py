"""Scales of quantized arrays in float32, and the products of numbers and scales."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _cattn
from .arrays import _as_readable, _quiet, broadcast_shapes, converted, is_bfloat16, parts_of, read_array
from .fp_mode import in_default_mode

Array = NDArray[Any]


@in_default_mode
@_quiet
def as_scale(obj: object, name: str) -> Array:
    """Return scales in float32."""
    array = read_array(obj, name)
    if array.dtype.kind not in "iuf" and not is_bfloat16(array.dtype):
        raise TypeError(f"{name} has dtype {array.dtype}; it must hold real numbers: float32, or what rounds to it")
    return _as_readable(array if array.dtype == np.float32 else converted(array, np.float32), name)


# The C code multiplies scales by powers of two, which must not underflow or overflow.
LEAST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100


def refuse_scale(scale: Array, name: str) -> None:
    """Raise ValueError if a scale is zero, negative, infinite, NaN, or beyond the limits."""
    if _cattn._are_scales(scale):
        return
    wrong = np.argwhere(~((scale >= LEAST_SCALE) & (scale <= LARGEST_SCALE)))
    if len(wrong):
        place = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"{name} must be positive and finite, from 2**-100 to 2**100, got {scale[place]} at {place}; places of a "
            f"cache that hold no token yet take any such number, for instance 1"
        )


@in_default_mode
@_quiet
def multiply(array: Array, scale: Array) -> NDArray[np.float32]:
    """Return the numbers of a quantized array, each rounded once."""
    result = np.empty_like(array, np.float32)
    factors = np.broadcast_to(scale, array.shape)
    for part in parts_of(array.shape):
        np.multiply(array[part].astype(np.float32), factors[part], out=result[part])
    return result


def check_scale_fits(array: Array, scale: Array, name: str = "scale", whose: str = "x") -> None:
    """Raise ValueError unless a scale broadcasts to the shape of its array."""
    try:
        fits = broadcast_shapes(array.shape, scale.shape) == array.shape
    except ValueError:
        fits = False
    if not fits:
        lacks_last = scale.ndim == array.ndim - 1 and all(
            own in (1, size) for own, size in zip(scale.shape, array.shape[:-1], strict=True)
        )
        hint = f": for a scale of each token pass {name}[..., None]" if lacks_last and scale.ndim else ""
        raise ValueError(
            f"{name} has shape {scale.shape}, which does not broadcast to the shape of {whose} {array.shape}{hint}"
        )


def dequantized(array: Array, scale: Array) -> Array:
    """Return float64 numbers that are the products array * scale in float32. The array may be bits of float8_e4m3fn."""
    if array.dtype == np.uint8:
        array = array.view(sys.modules["ml_dtypes"].float8_e4m3fn)
    return converted(multiply(array, scale), np.float64)
