"""softmax, masked_softmax, and the gradient of both."""

from __future__ import annotations

import operator
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import as_array, as_bool
from .._input.types import Alignment
from ._options import implemented_in_c

__all__ = ["masked_softmax", "softmax", "softmax_backward"]


@implemented_in_c
def softmax(  # type: ignore[empty-body]
    x: ArrayLike,
    axis: int | tuple[int, ...] | None = -1,
    *,
    where: ArrayLike | None = None,
    scale: float = 1.0,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return exp(scale * x) divided by its sum over an axis, without overflow.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 of any shape; booleans and integers are converted to float64.
    axis : int, tuple of ints or None
        The axis, or axes, over which the result sums to 1; None means all.
    where : array_like of bool, optional
        True where the element takes part; broadcasts to x. The result of all others is 0, and their values have no
        influence, not even NaN and inf.
    scale : float
        Factor by which x is multiplied first; finite.
    out : ndarray, optional
        Takes the result: shape and dtype of x, any strides. It may be x itself.

    Returns
    -------
    ndarray
        Has the shape and dtype of x; it is `out` if that was given. A slice is 0 if no element takes part in it. One
        that holds NaN, +inf or nothing but -inf is NaN.

    Raises
    ------
    TypeError
        x or out has a dtype that is not supported, where is not boolean, or axis is not an int.
    ValueError
        axis is out of bounds, where does not broadcast to x, scale is not finite, or out has the wrong shape.

    See Also
    --------
    masked_softmax : The softmax with a mask or causality.
    softmax_backward : The gradient.
    cattn.reference.softmax : The same in plain NumPy.

    Notes
    -----
    .. math::

       \text{softmax}(x)_i = \frac{e^{\text{scale} \cdot x_i}}{\sum_j e^{\text{scale} \cdot x_j}}

    One axis needs no copy of x, whatever its strides. Several axes are merged into one first, which copies x
    unless its strides allow a view.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> cattn.softmax(np.log([1.0, 2.0, 5.0])).round(3)
    array([0.125, 0.25 , 0.625])
    >>> cattn.softmax(np.log([1.0, 2.0, 5.0]), where=[True, True, False]).round(3)
    array([0.333, 0.667, 0.   ])
    """


def normalize_axes(axis: Any, ndim: int, name: str) -> tuple[int, ...]:
    """Return axis as sorted, non-negative, distinct ints. name is the array's name in errors."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = []
    for entry in given:
        if isinstance(entry, (bool, np.bool_)) or not hasattr(entry, "__index__"):
            raise TypeError(f"axis must be an int, a tuple of ints or None, got {_cattn._shown(axis)}")
        try:
            index = operator.index(entry)
        except (MemoryError, RecursionError):
            raise
        except Exception:
            raise TypeError(f"axis must be an int, a tuple of ints or None, got {_cattn._shown(axis)}") from None
        if not -max(ndim, 1) <= index < max(ndim, 1):
            raise ValueError(f"axis {_cattn._shown(index)} is out of bounds for {name} with {ndim} dimensions")
        axes.append(index % max(ndim, 1))
    if not axes or len(set(axes)) != len(axes):
        raise ValueError(f"axis must name at least one axis, and each once, got {_cattn._shown(axis)}")
    return tuple(sorted(axes))


def _over_axes(function: Any, array: NDArray[Any], axes: tuple[int, ...], out: Any, **options: Any) -> NDArray[Any]:
    """Return the function over several axes of array, which are merged into one, the last. `where` or `mask` fits."""
    if len(axes) <= 1 or array.ndim < 2:
        return function(array, axis=axes[0] if axes else -1, out=out, **options)  # type: ignore[no-any-return]
    order = (*(i for i in range(array.ndim) if i not in axes), *axes)
    moved = array.transpose(order)
    merged = (*moved.shape[: -len(axes)], int(np.prod(moved.shape[-len(axes) :])))
    for name in {"where", "mask"} & options.keys():
        if options[name] is not None:
            mask = as_bool(options[name], name, "")
            try:
                mask = np.broadcast_to(mask, array.shape)
            except ValueError:
                message = f"{name} has shape {mask.shape}, which does not broadcast to the scores' shape {array.shape}"
                raise ValueError(message) from None
            options[name] = mask.transpose(order).reshape(merged)
    result = function(moved.reshape(merged), **options)
    result = result.reshape(moved.shape).transpose(np.argsort(order))
    return np.ascontiguousarray(result) if out is None else _cattn._store(result, out)


def softmax_axes(x: ArrayLike, axis: Any, where: Any, scale: float, out: Any) -> NDArray[Any]:
    """Return softmax over an axis that is no Python int, or over several axes, which it merges into one."""
    array = as_array(x, "x")
    return _over_axes(softmax, array, normalize_axes(axis, array.ndim, "x"), out, where=where, scale=scale)


def masked_softmax_axes(
    scores: ArrayLike, mask: Any, axis: Any, is_causal: Any, query_offset: Any, scale: Any, method: Any, out: Any
) -> NDArray[Any]:
    """Return masked_softmax over an axis that is no Python int, or over several axes, which it merges into one."""
    array = as_array(scores, "scores")
    options = {"mask": mask, "is_causal": is_causal, "query_offset": query_offset, "scale": scale, "method": method}
    return _over_axes(masked_softmax, array, normalize_axes(axis, array.ndim, "scores"), out, **options)


@implemented_in_c
def masked_softmax(  # type: ignore[empty-body]
    scores: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    is_causal: Alignment = False,
    query_offset: ArrayLike | None = None,
    scale: float = 1.0,
    method: Literal["neg_inf", "renormalize"] = "neg_inf",
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return the softmax of attention scores over the keys that each query may see.

    Parameters
    ----------
    scores : array_like, shape (..., T_q, T_k)
        float16, bfloat16, float32 or float64; booleans and integers are converted to float64.
    mask : array_like of bool, optional
        True where the key is visible; broadcasts to scores.
    axis : int, tuple of ints or None
        The axis, or axes, of the keys, over which the weights sum to 1; None means all. The queries are on the last of
        the other axes. Several axes count their keys together, in row-major order.
    is_causal : bool or {"upper_left", "lower_right"}
        Query i sees the keys j <= i ("upper_left", the meaning of True) or j <= i + T_k - T_q ("lower_right"),
        intersected with mask.
    query_offset : int or array_like of int, optional
        Position of the first query: with is_causal, query i sees the keys j <= i + query_offset. An array broadcasts to
        the leading dimensions.
    scale : float
        Factor by which the scores are multiplied first; finite.
    method : {"neg_inf", "renormalize"}
        "neg_inf" fills masked scores with -inf before the softmax. "renormalize" computes the softmax over all scores,
        sets the masked weights to 0 and divides by the sum of the others. Both agree to rounding. Only the second reads
        masked scores, and it computes a row in the first way if that sum is tiny or not finite.
    out : ndarray, optional
        Takes the result: shape and dtype of scores, any strides. It may be scores itself.

    Returns
    -------
    ndarray
        Has the shape and dtype of scores. Masked weights are 0, also in a row without a visible key.

    Raises
    ------
    TypeError
        scores or out has a dtype that is not supported, mask is not boolean, or axis is not an int.
    ValueError
        axis is out of bounds, mask does not broadcast to scores, is_causal or method has another value, or
        "lower_right" comes with query_offset.

    Warns
    -----
    CausalAlignmentWarning
        is_causal=True with T_q != T_k and no query_offset.

    See Also
    --------
    softmax : The softmax without causality.
    attention_weights : The weights from queries and keys.
    causal_mask : A causal mask as an array.
    softmax_backward : The gradient.
    cattn.reference.masked_softmax : The same in plain NumPy.

    Notes
    -----
    For the keys :math:`V_i` that query i sees:

    .. math::

       w_{ij} = \frac{e^{\text{scale} \cdot s_{ij}}}{\sum_{k \in V_i} e^{\text{scale} \cdot s_{ik}}}
       \text{ for } j \in V_i, \qquad w_{ij} = 0 \text{ for the others}

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> scores = np.log([[1.0, 9.0, 9.0], [1.0, 3.0, 9.0], [1.0, 2.0, 5.0]])
    >>> cattn.masked_softmax(scores, is_causal=True).round(3)
    array([[1.   , 0.   , 0.   ],
           [0.25 , 0.75 , 0.   ],
           [0.125, 0.25 , 0.625]])
    >>> cattn.masked_softmax(scores.T, axis=0, is_causal=True).round(3)  # keys on axis 0, queries on axis 1
    array([[1.   , 0.25 , 0.125],
           [0.   , 0.75 , 0.25 ],
           [0.   , 0.   , 0.625]])
    """


@implemented_in_c
def softmax_backward(  # type: ignore[empty-body]
    grad_out: ArrayLike,
    weights: ArrayLike,
    axis: int = -1,
    *,
    scale: float = 1.0,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return the gradient of the scores of `softmax` or `masked_softmax`, given the gradient of the weights.

    Parameters
    ----------
    grad_out : array_like
        Gradient of the weights, in their shape.
    weights : array_like
        The result of softmax with the same axis and scale: nothing here tells whether it is the one that belongs to
        grad_out.
    axis : int
        The axis over which they sum to 1.
    scale : float
        The scale of the softmax.
    out : ndarray, optional
        Takes the result: exact shape and dtype, any strides. It may be grad_out or weights itself.

    Returns
    -------
    ndarray
        ``scale * weights * (grad_out - (weights * grad_out).sum(axis))``, and exactly 0 where the weight is 0: neither
        masked elements nor their gradients have any influence. The method of `masked_softmax` does not
        matter: both are the same function.

    Raises
    ------
    TypeError, ValueError
        A dtype is not supported, shapes differ, or axis is out of bounds.

    See Also
    --------
    softmax : The forward pass.
    masked_softmax : The forward pass with a mask.
    cattn.reference.softmax_backward : The same in plain NumPy.

    Notes
    -----
    With the weights :math:`w` and the gradient :math:`g` of the weights:

    .. math::

       \text{grad}_i = \text{scale} \cdot w_i \left(g_i - \sum_j w_j g_j\right)

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> weights = cattn.masked_softmax(np.zeros((2, 2)), is_causal=True)
    >>> cattn.softmax_backward([[5.0, np.nan], [1.0, 3.0]], weights)
    array([[ 0. ,  0. ],
           [-0.5,  0.5]])
    """
