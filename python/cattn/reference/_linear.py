"""Projections in plain NumPy."""

import numpy as np
from numpy.typing import ArrayLike

from cattn._input.pairs import Stored

from ._shared import Floats, deliver, plain, quiet


@quiet
def linear(
    x: ArrayLike,
    weight: Stored,
    bias: ArrayLike | None = None,
    *,
    out: Floats | None = None,
) -> Floats:
    """Return ``x @ weight.T + bias``; `weight` is (N, K).

    Examples
    --------
    >>> linear([[1.0, 2.0]], [[3.0, 4.0], [0.0, 1.0]], [0.5, 0.0])
    array([[11.5,  2. ]])
    """
    matrix = plain(weight).astype(np.float64)
    result: Floats = np.asarray(x, np.float64) @ matrix.T
    return deliver(result if bias is None else result + np.asarray(bias, np.float64), out)


@quiet
def linear_backward(
    grad_out: ArrayLike, x: ArrayLike | None, weight: Stored | None
) -> tuple[Floats | None, Floats | None, Floats]:
    """Return the gradients of `x`, `weight` and bias, given the gradient of the result of `linear`.

    Examples
    --------
    >>> grad_x, grad_weight, grad_bias = linear_backward([[1.0, 0.0]], [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]])
    >>> grad_x, grad_bias
    (array([[3., 4.]]), array([1., 0.]))
    """
    grad = np.asarray(grad_out, np.float64)
    rows = grad.reshape(-1, grad.shape[-1])
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = grad @ plain(weight).astype(np.float64)
    if x is not None:
        given = np.asarray(x, np.float64)
        grad_weight = rows.T @ given.reshape(-1, given.shape[-1])
    return grad_x, grad_weight, rows.sum(axis=0)
