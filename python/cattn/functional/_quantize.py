"""Keys and values in 8 bits: quantize and dequantize."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._input.arrays import as_array
from .._input.checks import QUANTIZED, as_dtype
from .._input.fp_mode import in_default_mode
from .._input.quantize import as_quantized, as_scale, dequantized, quantized
from ._softmax import normalize_axes

__all__ = ["dequantize", "quantize"]


@in_default_mode
def quantize(
    x: ArrayLike, axis: int | tuple[int, ...] | None = -1, dtype: DTypeLike = "int8"
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    r"""Return x in 8 bits, and the scales: ``x`` is about ``values * scale``.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64; booleans and integers are converted to float64. All numbers must be
        finite and in the range of float32.
    axis : int, tuple of ints or None
        The axis, or axes, that share a scale; None means all. For keys or values of shape (..., T, D), -1 gives a scale
        for each token, and -2 one for each channel.
    dtype : dtype
        int8, or float8_e4m3fn of ``ml_dtypes``.

    Returns
    -------
    values : ndarray of dtype
        Has the shape of x.
    scale : ndarray of float32
        Has the shape of x, with size 1 along axis. All scales are positive.

    Raises
    ------
    TypeError
        x has a dtype that is not supported, axis is not an int, or dtype is none of the two.
    ValueError
        x has a NaN, an infinity or a number beyond the range of float32, or axis is out of bounds.

    See Also
    --------
    dequantize : The way back.
    KVCache : Quantises what is appended to it, if made with ``dtype="int8"``.

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

    A scale is at least :math:`2^{-126}`, the smallest normal number of float32; smaller numbers are rounded to
    multiples of it as above. Dequantised numbers that are quantised again along the same axis give the same values and
    scales.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> key = np.array([[0.1, -1.27, 0.5], [20.0, 254.0, 3.0]])
    >>> values, scale = cattn.quantize(key)
    >>> values
    array([[  10, -127,   50],
           [  10,  127,    2]], dtype=int8)
    >>> scale
    array([[0.01],
           [2.  ]], dtype=float32)
    >>> cattn.dequantize(values, scale)
    array([[  0.1 ,  -1.27,   0.5 ],
           [ 20.  , 254.  ,   4.  ]], dtype=float32)
    """
    wanted = as_dtype(dtype, QUANTIZED)
    array = as_array(x, "x")
    return quantized(array, "x", normalize_axes(axis, array.ndim, "x") if array.ndim else None, wanted)


@in_default_mode
def dequantize(x: ArrayLike, scale: ArrayLike) -> NDArray[np.float32]:
    """Return ``x.astype(np.float32) * scale``: the numbers that a quantised array stands for.

    Parameters
    ----------
    x : array_like of int8 or float8_e4m3fn
        The values of `quantize`.
    scale : array_like, broadcasting to the shape of x
        Positive numbers, converted to float32.

    Returns
    -------
    ndarray of float32
        Has the shape of x.

    Raises
    ------
    TypeError
        x has another dtype, or scale is not an array of real numbers.
    ValueError
        scale does not broadcast to x, or a scale is not positive and finite.

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
    array = as_quantized(x, "x")
    return dequantized(array, as_scale(scale, "scale", array.shape))
