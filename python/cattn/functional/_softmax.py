"""softmax, masked_softmax and dropout: signatures, defaults and documentation of what the C extension computes."""

from __future__ import annotations

import operator
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import as_array, as_bool
from .._input.fp_mode import in_default_mode
from .._input.types import RNG, Alignment
from ._shortcut import shortcut

__all__ = ["dropout", "masked_softmax", "softmax"]


def softmax(
    x: ArrayLike,
    axis: int | tuple[int, ...] | None = -1,
    *,
    where: ArrayLike | None = None,
    scale: float = 1.0,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return exp(scale * x) divided by its sum over an axis, without overflow.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 of any shape; booleans and integers are converted to float64.
    axis : int, tuple of ints or None
        The axis, or axes, over which the result sums to 1; None means all.
    where : array_like of bool, optional
        True = the element takes part; broadcasts to x. Elements that do not take part come out as 0, and nothing of
        their value shows, NaN and inf included.
    scale : float
        Multiplied into x first. Finite.
    out : ndarray, optional
        Takes the result: shape and dtype of x, any strides. It may be x itself.

    Returns
    -------
    ndarray
        Shape and dtype of x; `out` if that was given. A slice where nothing takes part is 0; one whose elements are all
        -inf is NaN, as is one that holds NaN or +inf.

    Raises
    ------
    TypeError
        x or out has a dtype that is not supported, where is not boolean, axis is not an int.
    ValueError
        axis is out of bounds, where does not broadcast to x, scale is not finite, out has the wrong shape.

    Notes
    -----
    One axis needs no copy of x, whatever its strides. Several axes are merged into one first: a copy, unless their
    strides allow a view.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> cattn.softmax(np.log([1.0, 2.0, 5.0])).round(3)
    array([0.125, 0.25 , 0.625])
    >>> cattn.softmax(np.log([1.0, 2.0, 5.0]), where=[True, True, False]).round(3)
    array([0.333, 0.667, 0.   ])
    """
    if type(axis) is int:
        return _cattn.softmax(x, axis, where, scale, out)
    return _softmax_axes(x, axis, where, scale, out)


def _normalized(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return axis as sorted, non-negative, distinct ints."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = []
    for entry in given:
        if isinstance(entry, (bool, np.bool_)) or not hasattr(entry, "__index__"):
            raise TypeError(f"axis must be an int, a tuple of ints or None, got {axis!r}")
        try:
            index = operator.index(entry)
        except TypeError:  # an array of anything but one integer
            raise TypeError(f"axis must be an int, a tuple of ints or None, got {axis!r}") from None
        if not -max(ndim, 1) <= index < max(ndim, 1):
            raise ValueError(f"axis {index} is out of bounds for x with {ndim} dimensions")
        axes.append(index % max(ndim, 1))
    if not axes or len(set(axes)) != len(axes):
        raise ValueError(f"axis must name at least one axis, and each once, got {axis!r}")
    return tuple(sorted(axes))


def _softmax_axes(x: ArrayLike, axis: Any, where: Any, scale: float, out: Any) -> NDArray[Any]:
    """Softmax over anything but one Python int: merge the axes into a last one."""
    array = as_array(x, "x")
    axes = _normalized(axis, array.ndim)
    if len(axes) <= 1 or array.ndim < 2:
        return _cattn.softmax(array, axes[0] if axes else -1, where, scale, out)
    order = (*(i for i in range(array.ndim) if i not in axes), *axes)
    moved = array.transpose(order)
    merged = (*moved.shape[: -len(axes)], int(np.prod(moved.shape[-len(axes) :])))
    if where is not None:
        where = as_bool(where, "where", "")
        try:
            where = np.broadcast_to(where, array.shape)
        except ValueError:
            message = f"where has shape {where.shape}, which does not broadcast to the scores' shape {array.shape}"
            raise ValueError(message) from None
        where = where.transpose(order).reshape(merged)
    result = _cattn.softmax(moved.reshape(merged), -1, where, scale, None)
    result = result.reshape(moved.shape).transpose(np.argsort(order))
    return np.ascontiguousarray(result) if out is None else _cattn._store(result, out)


@shortcut
def masked_softmax(
    scores: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    is_causal: Alignment = False,
    query_offset: ArrayLike | None = None,
    scale: float = 1.0,
    method: Literal["neg_inf", "renormalize"] = "neg_inf",
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return the softmax of attention scores over the keys that each query may see.

    Parameters
    ----------
    scores : array_like, shape (..., T_q, T_k)
        float16, bfloat16, float32 or float64; booleans and integers are converted to float64.
    mask : array_like of bool, optional
        True = keep; broadcasts to scores.
    is_causal : bool or {"upper_left", "lower_right"}
        Query i sees the keys j <= i ("upper_left", the meaning of True) or j <= i + T_k - T_q ("lower_right"),
        intersected with mask.
    query_offset : int or array_like of int, optional
        Position of the first query: with is_causal, query i sees the keys j <= i + query_offset. An array broadcasts to
        the leading dimensions.
    scale : float
        Multiplied into the scores first. Finite.
    method : {"neg_inf", "renormalize"}
        "neg_inf" fills masked scores with -inf before the softmax. "renormalize" computes the softmax over all scores,
        zeroes the masked weights and divides by what is left. Both agree to rounding; only the second reads masked
        scores, and rows whose kept mass is tiny or not finite are computed the first way.
    out : ndarray, optional
        Takes the result: shape and dtype of scores, any strides. It may be scores itself.

    Returns
    -------
    ndarray
        Shape and dtype of scores. Masked weights are 0, also in a row without a visible key.

    Raises
    ------
    TypeError
        scores or out has a dtype that is not supported, mask is not boolean.
    ValueError
        mask does not broadcast to scores, another is_causal or method, "lower_right" together with query_offset.

    Warns
    -----
    CausalAlignmentWarning
        is_causal=True with T_q != T_k and no query_offset.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> scores = np.log([[1.0, 9.0, 9.0], [1.0, 3.0, 9.0], [1.0, 2.0, 5.0]])
    >>> cattn.masked_softmax(scores, is_causal=True).round(3)
    array([[1.   , 0.   , 0.   ],
           [0.25 , 0.75 , 0.   ],
           [0.125, 0.25 , 0.625]])
    """
    return _cattn.masked_softmax(scores, mask, is_causal, query_offset, scale, method, out)


@overload
def dropout(
    x: ArrayLike,
    p: float = ...,
    *,
    training: bool = ...,
    rng: RNG = ...,
    return_mask: Literal[False] = ...,
    out: NDArray[Any] | None = ...,
) -> NDArray[Any]: ...
@overload
def dropout(
    x: ArrayLike,
    p: float = ...,
    *,
    training: bool = ...,
    rng: RNG = ...,
    return_mask: Literal[True],
    out: NDArray[Any] | None = ...,
) -> tuple[NDArray[Any], NDArray[np.bool_]]: ...
@overload
def dropout(
    x: ArrayLike,
    p: float = ...,
    *,
    training: bool = ...,
    rng: RNG = ...,
    return_mask: bool,
    out: NDArray[Any] | None = ...,
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[np.bool_]]: ...
@shortcut
def dropout(
    x: ArrayLike,
    p: float = 0.5,
    *,
    training: bool = True,
    rng: RNG = None,
    return_mask: bool = False,
    out: NDArray[Any] | None = None,
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[np.bool_]]:
    """Set each element to 0 with probability p, and divide the others by 1 - p.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 of any shape; booleans and integers are converted to float64.
    p : float
        Probability of an element to be dropped, in [0, 1].
    training : bool
        False: nothing is dropped, the result is a copy of x.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        None draws fresh entropy. An int, 0 <= rng < 2**64, is the key itself: the same int drops the same elements.
        From a generator one key is drawn, after everything else was checked. A `TorchGenerator` drops the elements
        that ``torch.nn.functional.dropout`` drops in a contiguous tensor; p = 0 and p = 1 draw nothing from it.
    return_mask : bool
        Return (result, mask).
    out : ndarray, optional
        Takes the result: shape and dtype of x, any strides. It may be x itself.

    Returns
    -------
    ndarray, or (ndarray, ndarray of bool)
        Shape and dtype of x; dropped elements are +0, whatever they were. The mask is True where an element was kept.

    Raises
    ------
    TypeError
        x or out has a dtype that is not supported, rng is nothing to draw from.
    ValueError
        p is outside [0, 1], an int rng outside its range, out has the wrong shape.

    Notes
    -----
    Random bits are those of Philox4x32-10 (Salmon et al., 2011) with the key rng and a counter made of the element's
    index in C order, so they depend neither on strides nor on threads. A `TorchGenerator` gives its bits in C order
    too, one after the other and on one thread; PyTorch goes by memory where a tensor is not contiguous, and its dropped
    elements are x * 0: -0 for negative x, NaN for infinite x.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.ones((2, 3))
    >>> y, kept = cattn.dropout(x, 0.5, rng=123, return_mask=True)
    >>> bool((y == np.where(kept, 2.0, 0.0)).all())
    True
    >>> bool((y == cattn.dropout(x, 0.5, rng=123)).all())
    True
    """
    result: NDArray[Any] | tuple[NDArray[Any], NDArray[np.bool_]]
    result = _cattn.dropout(x, p, training, rng, return_mask, out)
    return result


@in_default_mode
def keep(x: NDArray[Any], kept: NDArray[np.bool_], p: float) -> None:
    """Apply a mask of dropout in place: divide by 1 - p what was kept, and drop the others."""
    wide = x.dtype.type if x.itemsize > 2 else np.float32  # halves are rounded once, at the end
    with np.errstate(all="ignore"):
        np.multiply(x, wide(1 / (1 - p) if p < 1 else 0), out=x, casting="unsafe")
    x[~kept] = 0  # not a product: what is dropped is 0, whatever it was
