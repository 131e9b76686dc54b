"""Arrays in 8 bits with scales: how numbers become such arrays, and what these stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, _asarray, _quiet, as_array, cast, is_float8
from .fp_mode import in_default_mode

# The largest number of each dtype, and half of its smallest: what is not larger becomes 0.
_INT8 = (127.0, 0.5)
_FLOAT8 = (448.0, 2.0**-10)

_TINY = float(np.finfo(np.float32).tiny)
_MOST = float(np.finfo(np.float32).max)
# 127 times this, rounded to float32, is finite: 127 * float32(_MOST / 127) is not.
_MOST_SCALE = np.nextafter(np.float32(_MOST / 127), np.float32(0))


def dequantized(array: Array, scale: Array) -> NDArray[np.float32]:
    """Return the numbers that a quantised array stands for: every reader of such arrays computes with these."""
    result: NDArray[np.float32] = array.astype(np.float32) * scale
    return result


@in_default_mode
@_quiet
def quantized(obj: object, name: str, axis: Any, dtype: np.dtype[Any]) -> tuple[Array, NDArray[np.float32]]:
    """Return obj in 8 bits, and one scale for each slice along axis. dtype is one of QUANTIZED."""
    x = as_array(obj, name)
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    absmax = np.maximum.reduce(np.abs(x), axis, keepdims=True, initial=0)
    if not np.maximum.reduce(absmax, None, initial=0) <= _MOST:  # NaN is not
        wrong = np.argwhere(~(np.abs(x) <= _MOST))[0]
        place = f" at {tuple(wrong.tolist())}" if x.ndim else ""
        raise ValueError(f"{name} must be finite and in the range of float32 to be quantised, "
                         f"got {x[tuple(wrong)]}{place}")  # fmt: skip
    limit, negligible = _INT8 if dtype.type is np.int8 else _FLOAT8
    # The scale is that of the largest number in float32, so that dequantised numbers get the same scale again.
    scale = np.asarray(absmax.astype(np.float32) / np.float32(limit))  # arithmetic on shape () gives a scalar
    if not np.minimum.reduce(scale, None, initial=1) >= _TINY:
        scale = np.where(absmax <= _TINY * negligible, np.float32(1), np.maximum(scale, np.float32(_TINY)))
    if limit == _INT8[0]:
        np.minimum(scale, _MOST_SCALE, out=scale)
    values = np.asarray(x / scale)
    return (np.rint(values, out=values) if limit == _INT8[0] else values).astype(dtype), scale


def as_quantized(obj: object, name: str) -> Array:
    """Return obj, an array of int8 or float8_e4m3fn."""
    array = _asarray(obj, name)
    if array.dtype.type is not np.int8 and not is_float8(array.dtype):
        raise TypeError(f"{name} has dtype {array.dtype}, wanted int8 or float8_e4m3fn")
    return array


def as_scale(obj: object, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return obj in float32: positive numbers that broadcast to shape."""
    scale = cast(as_array(obj, name), name, np.float32)
    try:
        fits = np.broadcast_to(scale, shape).ndim == len(shape)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} has shape {scale.shape}, which does not broadcast to {shape}")
    wrong = ~((scale > 0) & (scale <= _MOST))
    if wrong.any():
        raise ValueError(f"{name} must be positive and finite in float32, got {scale[wrong].flat[0]}")
    return scale
