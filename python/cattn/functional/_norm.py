"""RMS norm, layer norm, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import as_array, common_dtype, converted
from .._input.contexts import in_default_mode
from ._signature import implemented_in_c

__all__ = ["layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]


@implemented_in_c
def rms_norm(  # type: ignore[empty-body]
    x: ArrayLike,
    weight: ArrayLike | None = None,
    eps: float = 1e-6,
    *,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return x divided by the root of the mean of its squares over the last axis, times a weight.

    Parameters
    ----------
    x : array_like, shape (..., D)
        float16, bfloat16, float32 or float64; booleans and integers are converted to float64.
    weight : array_like, shape (D,), optional
        One factor for each column; None means 1. Gemma stores the weight minus 1: pass ``1 + weight``.
    eps : float
        Added to the mean; not negative.
    out : ndarray, optional
        Takes the result: its shape and dtype, any strides. It may be x itself.

    Returns
    -------
    ndarray
        Has the shape of x, and the dtype that NumPy promotes x and weight to; it is `out` if that was given.

    Raises
    ------
    TypeError
        A dtype is not supported, x and weight mix float16 and bfloat16, or eps is no real number.
    ValueError
        x has no axis, weight has another shape than (D,), eps is negative or not finite, or out has the wrong shape.

    See Also
    --------
    rms_norm_backward : The gradients.
    cattn.functional.layer_norm : The norm that subtracts the mean, too.
    rope : Rotary positions, which follow a norm of queries and keys (QK-norm).
    cattn.reference.rms_norm : The same in plain NumPy.

    Notes
    -----
    .. math::

       y_i = \frac{x_i}{\sqrt{\frac{1}{D} \sum_j x_j^2 + \text{eps}}} \, \text{weight}_i

    Halves are computed in float32, weight included, and rounded once; models of transformers round before they multiply
    by the weight. The order of the sum is fixed, so the result has the same bits for every number of threads, all
    strides and every instruction set. As in PyTorch, squares may overflow: a row of float32 with a number beyond 1.8e19
    becomes 0.

    References
    ----------
    Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> cattn.rms_norm([[3.0, 4.0], [0.0, 0.0]]).round(3)
    array([[0.849, 1.131],
           [0.   , 0.   ]])
    >>> cattn.rms_norm([3.0, 4.0], [1.0, 10.0]).round(3)
    array([ 0.849, 11.314])
    """


@in_default_mode
def rms_norm_backward(
    grad_out: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-6
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    r"""Return the gradients of the arguments of `rms_norm`, given the gradient of its result.

    Parameters
    ----------
    grad_out : array_like, shape (..., D)
        Gradient of the result.
    x : array_like, shape (..., D)
        The argument of the forward pass, as weight and eps.
    weight : array_like, shape (D,), optional
        One factor for each column.
    eps : float
        Added to the mean; not negative.

    Returns
    -------
    grad_x : ndarray
        Has the shape of x, and the dtype that NumPy promotes the three arrays to.
    grad_weight : ndarray or None
        Has the shape of weight and the same dtype; None without a weight.

    Raises
    ------
    TypeError, ValueError
        As for `rms_norm`, and if grad_out has another shape than x.

    See Also
    --------
    rms_norm : The forward pass.
    cattn.reference.rms_norm_backward : The same in plain NumPy.

    Notes
    -----
    With :math:`r = 1 / \sqrt{\text{mean}(x^2) + \text{eps}}` and :math:`g = \text{grad out} \cdot \text{weight}`:

    .. math::

       \text{grad x}_i = r \left(g_i - r x_i \, \frac{1}{D} \sum_j g_j r x_j\right), \qquad
       \text{grad weight}_i = \sum_\text{rows} \text{grad out}_i \, r x_i

    The sum over the rows is cut into blocks of 64 rows, which are added in float64 in their order, so its bits do not
    depend on the number of threads.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> grad_x, grad_weight = cattn.rms_norm_backward([1.0, 0.0], [3.0, 4.0], [1.0, 2.0])
    >>> grad_x.round(3), grad_weight.round(3)
    (array([ 0.181, -0.136]), array([0.849, 0.   ]))
    """
    grad_x, grad_weight = _widened(_cattn.rms_norm_backward, grad_out, x, weight, eps)
    assert grad_x is not None
    return grad_x, grad_weight


@implemented_in_c
def layer_norm(  # type: ignore[empty-body]
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return x less its mean, divided by its standard deviation, both over the last axis, times a weight plus a bias.

    Parameters
    ----------
    x : array_like, shape (..., D)
        float16, bfloat16, float32 or float64; booleans and integers are converted to float64.
    weight : array_like, shape (D,), optional
        One factor for each column; None means 1.
    bias : array_like, shape (D,), optional
        One term for each column; None means 0.
    eps : float
        Added to the variance; not negative.
    out : ndarray, optional
        Takes the result: its shape and dtype, any strides. It may be x itself.

    Returns
    -------
    ndarray
        Has the shape of x, and the dtype that NumPy promotes x, weight and bias to; it is `out` if that was given.

    Raises
    ------
    TypeError
        A dtype is not supported, the arrays mix float16 and bfloat16, or eps is no real number.
    ValueError
        x has no axis, weight or bias has another shape than (D,), eps is negative or not finite, or out has the wrong
        shape.

    See Also
    --------
    layer_norm_backward : The gradients.
    cattn.rms_norm : The norm without the mean.
    cattn.reference.layer_norm : The same in plain NumPy.

    Notes
    -----
    .. math::

       y_i = \frac{x_i - \mu}{\sqrt{\frac{1}{D} \sum_j (x_j - \mu)^2 + \text{eps}}} \, \text{weight}_i
             + \text{bias}_i, \qquad \mu = \frac{1}{D} \sum_j x_j

    The mean is subtracted in two parts, the rounded mean and the mean of the differences from it. So a row that lies
    far from 0 keeps its digits: for 10,000 plus normal numbers in float32, PyTorch's result is wrong by 2e-3, and this
    one by no more than the last digits. The order of each sum is fixed: the result has the same bits for every number
    of threads, all strides and every instruction set. Halves are computed in float32, weight and bias included, and
    rounded once. As in PyTorch, sums may overflow, and a row with infinity or NaN is NaN.

    References
    ----------
    Ba, Kiros and Hinton, "Layer normalization", 2016.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import layer_norm
    >>> layer_norm([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]).round(3)
    array([[-1.225,  0.   ,  1.225],
           [ 0.   ,  0.   ,  0.   ]])
    >>> layer_norm([1.0, 2.0, 3.0], [1.0, 1.0, 10.0], [0.5, 0.5, 0.5]).round(3)
    array([-0.725,  0.5  , 12.747])
    """


@in_default_mode
def layer_norm_backward(
    grad_out: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-5
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any]]:
    r"""Return the gradients of the arguments of `layer_norm`, given the gradient of its result.

    Parameters
    ----------
    grad_out : array_like, shape (..., D)
        Gradient of the result.
    x : array_like, shape (..., D)
        The argument of the forward pass, as weight and eps.
    weight : array_like, shape (D,), optional
        One factor for each column.
    eps : float
        Added to the variance; not negative.

    Returns
    -------
    grad_x : ndarray
        Has the shape of x, and the dtype that NumPy promotes the three arrays to.
    grad_weight : ndarray or None
        Has the shape of weight and the same dtype; None without a weight.
    grad_bias : ndarray
        Has the shape (D,) and the same dtype: what a bias would get, since the gradients do not depend on it.

    Raises
    ------
    TypeError, ValueError
        As for `layer_norm`, and if grad_out has another shape than x.

    See Also
    --------
    layer_norm : The forward pass.
    cattn.reference.layer_norm_backward : The same in plain NumPy.

    Notes
    -----
    With :math:`y` the result without weight and bias, :math:`r` the inverse of the standard deviation, and
    :math:`g = \text{grad out} \cdot \text{weight}`:

    .. math::

       \text{grad x}_i = r \left(g_i - \frac{1}{D} \sum_j g_j - y_i \, \frac{1}{D} \sum_j g_j y_j\right), \qquad
       \text{grad weight}_i = \sum_\text{rows} \text{grad out}_i \, y_i, \qquad
       \text{grad bias}_i = \sum_\text{rows} \text{grad out}_i

    The sums over the rows are cut into blocks of 64 rows, which are added in float64 in their order, so their bits do
    not depend on the number of threads.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import layer_norm_backward
    >>> grad_x, grad_weight, grad_bias = layer_norm_backward([1.0, 0.0, 0.0], [1.0, 2.0, 4.0], [1.0, 2.0, 1.0])
    >>> grad_x.round(3), grad_weight.round(3), grad_bias
    (array([ 0.229, -0.344,  0.115]), array([-1.069,  0.   ,  0.   ]), array([1., 0., 0.]))
    """
    grad_x, grad_weight, grad_bias = _widened(_cattn.layer_norm_backward, grad_out, x, weight, eps)
    assert grad_x is not None
    assert grad_bias is not None
    return grad_x, grad_weight, grad_bias


def _widened(
    backward: Callable[..., Sequence[NDArray[Any] | None]],
    grad_out: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike | None,
    eps: float,
) -> Sequence[NDArray[Any] | None]:
    """Call a function of C that takes no halves: those are computed in float32 and rounded once."""
    arrays = [as_array(grad_out, "grad_out"), as_array(x, "x")]
    if weight is not None:
        arrays.append(as_array(weight, "weight"))
    dtype = common_dtype(arrays, "grad_out, x and weight")
    if dtype.itemsize > 2:
        return backward(arrays[0], arrays[1], arrays[2] if weight is not None else None, eps)
    with np.errstate(all="ignore"):
        wide = [converted(array, np.float32) for array in arrays]
        gradients = backward(wide[0], wide[1], wide[2] if weight is not None else None, eps)
        return [None if gradient is None else converted(gradient, dtype) for gradient in gradients]
