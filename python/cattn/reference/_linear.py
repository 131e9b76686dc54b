"""Projections in plain NumPy."""

from numpy.typing import ArrayLike

from cattn._input.objects import Stored
from cattn._input.types import ComputeDType

from ._shared import Floats, deliver, numbers, plain, quiet, rounded_to_bfloat16


@quiet
def linear(
    x: ArrayLike,
    weight: Stored,
    bias: ArrayLike | None = None,
    *,
    compute_dtype: ComputeDType = None,
    out: Floats | None = None,
) -> Floats:
    """Return ``x @ weight.T + bias``; `weight` is (N, K). `compute_dtype` "bfloat16" rounds both to it.

    Examples
    --------
    >>> linear([[1.0, 2.0]], [[3.0, 4.0], [0.0, 1.0]], [0.5, 0.0])
    array([[11.5,  2. ]])
    """
    result: Floats = _factor(x, "x", compute_dtype) @ _factor(weight, "weight", compute_dtype).T
    return deliver(result if bias is None else result + numbers(bias, "bias"), out)


@quiet
def linear_backward(
    grad_out: ArrayLike, x: ArrayLike | None, weight: Stored | None, *, compute_dtype: ComputeDType = None
) -> tuple[Floats | None, Floats | None, Floats]:
    """Return the gradients of `x`, `weight` and bias, given the gradient of the result of `linear`.

    With `compute_dtype` "bfloat16" they are the gradients at the rounded x and weight.

    Examples
    --------
    >>> grad_x, grad_weight, grad_bias = linear_backward([[1.0, 0.0]], [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]])
    >>> grad_x, grad_bias
    (array([[3., 4.]]), array([1., 0.]))
    """
    grad = numbers(grad_out, "grad_out")
    rows = grad.reshape(-1, grad.shape[-1])
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = grad @ _factor(weight, "weight", compute_dtype)
    if x is not None:
        given = _factor(x, "x", compute_dtype)
        grad_weight = rows.T @ given.reshape(-1, given.shape[-1])
    return grad_x, grad_weight, rows.sum(axis=0)


def _factor(array: Stored, name: str, compute_dtype: ComputeDType) -> Floats:
    """Return the numbers that a product takes."""
    given = plain(array, name)
    return given if compute_dtype is None else rounded_to_bfloat16(given)
