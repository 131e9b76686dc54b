"""Keys and values in 8 bits: quantize and dequantize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._input.arrays import _quiet, as_array, converted, parts_of
from .._input.checks import QUANTIZED, as_dtype
from .._input.contexts import in_default_mode
from .._input.objects import LARGEST_SCALE, LEAST_SCALE, Quantized, Stored, multiply, read_quantized
from ._softmax import normalize_axes

__all__ = ["dequantize", "quantize"]

# The largest number of each dtype, and half of its smallest: what is not larger becomes 0.
_INT8 = (127.0, 0.5)
_FLOAT8 = (448.0, 2.0**-10)


@in_default_mode
@_quiet
def quantized(
    obj: object, name: str, axes: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return obj in dtype, int8 or float8_e4m3fn, and a scale for each slice along axes, which are not negative."""
    x = as_array(obj, name)
    if x.dtype.itemsize < 4:
        x = converted(x, np.float32)
    limit, negligible = _INT8 if dtype.type is np.int8 else _FLOAT8
    most = limit * LARGEST_SCALE
    values = np.empty_like(x, dtype)  # first: no memory is an error before the numbers have been read
    absmax = np.zeros([1 if axis in axes else size for axis, size in enumerate(x.shape)], x.dtype)
    for part, own in _parts_of(x.shape, axes):
        most_of_part = np.maximum.reduce(np.abs(x[part]), axes, keepdims=True)
        np.maximum(absmax[own], most_of_part, out=absmax[own])
    if not np.maximum.reduce(absmax, None, initial=0) <= most:  # NaN is not
        wrong = np.argwhere(~(np.abs(x) <= most))[0]
        place = f" at {tuple(wrong.tolist())}" if x.ndim else ""
        raise ValueError(f"{name} must be finite and at most {most:.3g} to be quantized, got {x[tuple(wrong)]}{place}")
    # The scale belongs to the largest number in float32, so that dequantized numbers get the same scale again.
    scale = np.asarray(absmax.astype(np.float32) / np.float32(limit))  # arithmetic on shape () gives a scalar
    if not np.minimum.reduce(scale, None, initial=1) >= LEAST_SCALE:
        zero = absmax <= negligible * LEAST_SCALE
        scale = np.where(zero, np.float32(1), np.maximum(scale, np.float32(LEAST_SCALE)))
    for part, own in _parts_of(x.shape, axes):
        quotients = x[part] / scale[own]
        np.copyto(values[part], np.rint(quotients) if dtype.type is np.int8 else quotients, casting="unsafe")
    return values, scale


def _parts_of(shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterator[tuple[Any, Any]]:
    """Yield the indices of parts of an array, and of what belongs to each of them in an array of size 1 along axes."""
    for part in parts_of(shape):
        yield part, (*(slice(None) if axis in axes else index for axis, index in enumerate(part[:-1])), ...)


@in_default_mode
def quantize(x: ArrayLike, axis: int | tuple[int, ...] | None = -1, dtype: DTypeLike = "int8") -> Quantized:
    r"""Return x in 8 bits with scales: ``x`` is about ``values * scale``.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64; booleans and integers are converted to float64. All numbers must be
        finite, and at most 1e32.
    axis : int, tuple of ints or None
        The axis, or axes, that share a scale; None means all. For keys or values of shape (..., T, D), -1 gives a scale
        for each token, and -2 one for each channel.
    dtype : dtype
        int8, or float8_e4m3fn of ``ml_dtypes``.

    Returns
    -------
    Quantized
        Its values have the shape of x, and its scale has size 1 along axis. Attention takes it as key or value, and
        ``values, scale = quantize(x)`` unpacks it.

    Raises
    ------
    TypeError
        x has a dtype that is not supported, axis is not an int, or dtype is none of the two.
    ValueError
        x has a NaN, an infinity or a number beyond 1e32, or axis is out of bounds.

    See Also
    --------
    dequantize : The way back.
    KVCache : Quantizes what is appended to it, if made with ``dtype="int8"``.

    Notes
    -----
    The scale of a slice is its largest absolute number, divided by the largest number of the dtype: 127 or 448. A slice
    of zeros has scale 1. int8 has the integers nearest to ``x / scale``, ties to even, from -127 to 127;
    float8_e4m3fn has the nearest number of that dtype, which has 3 bits after the leading one. float64 is divided in
    float64. So but for rounding in float32

    .. math::

       |x - \text{values} \cdot \text{scale}| \le
       \begin{cases}
         \text{scale} / 2 & \text{int8} \\
         \max(|x| / 16, \text{scale} / 1024) & \text{float8\_e4m3fn}
       \end{cases}

    and a score :math:`q \cdot k` changes by no more than :math:`\lVert q \rVert_1` times half of the largest scale of
    the key in int8, and :math:`\sum_i |q_i| \max(|k_i| / 16, \text{scale} / 1024)` in float8_e4m3fn. Attention
    multiplies the scores by its own ``scale``, and their errors, too. Keys often have a few channels that are far
    larger than the others. In int8 they set the scale of their token, so a scale for each channel is more accurate; but
    only scales for each token can be computed before all tokens are there. float8_e4m3fn minds them less.

    Attention takes scales from :math:`2^{-100}` to :math:`2^{100}`. So a scale is at least :math:`2^{-100}`, within the
    bounds above, and numbers beyond 127 or 448 times :math:`2^{100}` are refused. Dequantized numbers, quantized again
    along the same axis, give the same values and scales.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> key = np.array([[30.2, -127.0, 50.0], [20.0, 254.0, 3.0]])
    >>> quantized = cattn.quantize(key)
    >>> quantized
    Quantized(int8 (2, 3), scale float32 (2, 1))
    >>> values, scale = quantized
    >>> values
    array([[  30, -127,   50],
           [  10,  127,    2]], dtype=int8)
    >>> scale
    array([[1.],
           [2.]], dtype=float32)
    >>> cattn.dequantize(quantized)
    array([[  30., -127.,   50.],
           [  20.,  254.,    4.]], dtype=float32)
    """
    wanted = as_dtype(dtype, QUANTIZED)
    array = as_array(x, "x")
    axes = normalize_axes(axis, array.ndim, "x") if array.ndim else ()
    return Quantized._of_checked(*quantized(array, "x", axes, wanted))


@in_default_mode
def dequantize(x: Stored, scale: ArrayLike | None = None) -> NDArray[np.float32]:
    """Return ``values.astype(np.float32) * scale``: the numbers of a quantized array.

    Parameters
    ----------
    x : Quantized, or array_like of int8 or float8_e4m3fn
        The result of `quantize`, or its values.
    scale : array_like, broadcasting to the shape of x, optional
        The scales, if x is an array: positive numbers, converted to float32.

    Returns
    -------
    ndarray of float32
        Has the shape of x.

    Raises
    ------
    TypeError
        x has another dtype, scale is not an array of real numbers, or it is missing, or not needed.
    ValueError
        scale does not broadcast to x, or has a number that attention refuses: one outside of 2**-100 to 2**100.

    See Also
    --------
    quantize : The way there, with an example.

    Notes
    -----
    Each number is rounded once, to float32. The values of int8 and float8_e4m3fn are exact in float32.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> cattn.dequantize(np.array([[10, -127]], np.int8), [[0.5]])
    array([[  5. , -63.5]], dtype=float32)
    """
    if isinstance(x, Quantized):
        if scale is not None:
            raise TypeError("x is a cattn.Quantized, which has its scale: leave scale out")
        return multiply(*x)
    if scale is None:
        raise TypeError(f"scale is missing: x must be a cattn.Quantized then, got {type(x).__name__}")
    return multiply(*read_quantized(x, "x", scale))
