"""Projections of tokens by a weight matrix, and their gradients."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import as_array, common_dtype, converted, read_array, refuse_without_scale
from .._input.contexts import in_default_mode
from .._input.objects import Quantized, Stored, multiply
from .._input.types import ComputeDType
from ._signature import implemented_in_c

__all__ = ["linear", "linear_backward"]

_ONE = np.ones((1, 1))


@implemented_in_c
def linear(  # type: ignore[empty-body]
    x: ArrayLike,
    weight: Stored,
    bias: ArrayLike | None = None,
    *,
    compute_dtype: ComputeDType = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return ``x @ weight.T + bias``, with the same bits for a row alone and in any batch.

    Parameters
    ----------
    x : array_like, shape (..., K)
        The tokens: float16, bfloat16, float32 or float64; booleans and integers are converted to float64.
    weight : array_like or Quantized, shape (N, K)
        One row for each output, as in ``torch.nn.Linear``; for a matrix of shape (K, N) pass ``weight.T``. It may be
        stored as halves although x is float32. A `cattn.Quantized`, as `cattn.quantize` makes it with a scale for each
        row, means its float32 products.
    bias : array_like, shape (N,), optional
        Added to each row.
    compute_dtype : {None, "bfloat16", "bfloat16_tiles"}
        "bfloat16" rounds x and weight to bfloat16, after the scales of a quantized weight, and sums their products in
        float32. That is faster where the processor has the instruction (AVX512_BF16, on AMD), and the bits are the same
        everywhere. "bfloat16_tiles" does the same in the order of another instruction (AMX). x and weight are float32
        or bfloat16, weight also `cattn.Quantized`, and the result has their dtype. None computes in float32, and
        float64 in float64.
    out : ndarray, optional
        Takes the result: its shape and dtype, any strides.

    Returns
    -------
    ndarray, shape (..., N)
        In the dtype that NumPy promotes x, weight and bias to, or x and bias if the weight is quantized; it is `out` if
        that was given.

    Raises
    ------
    TypeError
        A dtype is not supported, or not with compute_dtype, the arrays mix float16 and bfloat16, or weight is int8 or
        float8_e4m3fn without a scale.
    ValueError
        A shape does not fit, out has another shape, or compute_dtype is another word.

    See Also
    --------
    linear_backward : The gradients.
    cattn.quantize : Makes a quantized weight.
    cattn.reference.linear : The same in plain NumPy.

    Notes
    -----
    .. math::

       y_{tn} = \sum_k x_{tk} \, w_{nk} + b_n

    The sum is cut into slabs of 512 columns, and a slab into 16 chains of fused multiply-adds: chain c has the columns
    with an index of c modulo 16. The chains are added in their order, then the bias. So a row of the result has the
    same bits whatever the other rows are, for every number of threads, all strides and every instruction set with an
    FMA. Halves and quantized numbers are computed in float32, and the result is rounded once. With
    ``compute_dtype="bfloat16"`` pairs of columns take the place of columns: the product of the odd column is added
    first, then the product of the even one, and numbers below 2**-126 count as zeros.

    Nothing is masked here: NaN and infinity spread as in ``x @ weight.T``.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import linear
    >>> linear([[1.0, 2.0, 3.0]], [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], [0.5, 0.0])
    array([[1.5, 5. ]])

    The first row has the same bits alone and together with the others:

    >>> rng = np.random.default_rng(0)
    >>> x, weight = rng.standard_normal((100, 768)), rng.standard_normal((64, 768))
    >>> np.array_equal(linear(x[:1], weight), linear(x, weight)[:1])
    True

    Numbers with more digits than bfloat16 has are rounded to it:

    >>> linear(np.float32([[1.0009765625]]), np.float32([[3.0]]), compute_dtype="bfloat16")
    array([[3.]], dtype=float32)
    """


@overload
def linear_backward(
    grad_out: ArrayLike, x: None, weight: Stored, *, compute_dtype: ComputeDType = None
) -> tuple[NDArray[Any], None, NDArray[Any]]: ...


@overload
def linear_backward(
    grad_out: ArrayLike, x: ArrayLike, weight: None, *, compute_dtype: ComputeDType = None
) -> tuple[None, NDArray[Any], NDArray[Any]]: ...


@overload
def linear_backward(
    grad_out: ArrayLike, x: ArrayLike, weight: Stored, *, compute_dtype: ComputeDType = None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...


@in_default_mode
def linear_backward(
    grad_out: ArrayLike, x: ArrayLike | None, weight: Stored | None, *, compute_dtype: ComputeDType = None
) -> tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any]]:
    r"""Return the gradients of the arguments of `linear`, given the gradient of its result.

    Parameters
    ----------
    grad_out : array_like, shape (..., N)
        Gradient of the result.
    x : array_like, shape (..., K), or None
        The tokens of the forward pass. None leaves out the gradient of weight, which needs them.
    weight : array_like or Quantized, shape (N, K), or None
        The matrix of the forward pass. None leaves out the gradient of x, which needs it. A quantized weight gets no
        gradient of its own: grad_weight is the gradient of the dequantized matrix.
    compute_dtype : {None, "bfloat16", "bfloat16_tiles"}
        As in `linear`. The gradients are computed in float32, from x and weight rounded to bfloat16.

    Returns
    -------
    grad_x : ndarray, shape (..., K), or None
    grad_weight : ndarray, shape (N, K), or None
    grad_bias : ndarray, shape (N,)
        In the dtype that NumPy promotes grad_out, x and weight to.

    Raises
    ------
    TypeError, ValueError
        As for `linear`, and if grad_out does not have the shape of its result.

    See Also
    --------
    linear : The forward pass.
    cattn.reference.linear_backward : The same in plain NumPy.

    Notes
    -----
    With :math:`g` for grad_out:

    .. math::

       \text{grad x} = g \, w, \qquad \text{grad weight} = g^T x, \qquad \text{grad bias} = \sum_t g_t

    All products have the order of `linear`, the sums over the tokens included. So grad_x has the same bits for a row
    alone and in any batch. The sum of grad_bias is computed in float64.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import linear_backward
    >>> grad_x, grad_weight, grad_bias = linear_backward([[1.0, 0.0]], [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]])
    >>> grad_x
    array([[3., 4.]])
    >>> grad_weight
    array([[1., 2.],
           [0., 0.]])
    >>> grad_bias
    array([1., 0.])
    """
    grad = as_array(grad_out, "grad_out")
    if grad.ndim == 0:
        raise ValueError("grad_out must have at least 1 dimension (..., N), got 0")
    given = None if x is None else as_array(x, "x")
    matrix = None
    if weight is not None:
        matrix = _as_matrix(weight)
        if matrix.ndim != 2 or matrix.shape[0] != grad.shape[-1]:
            raise ValueError(f"weight has shape {matrix.shape}, wanted (N, K) with N = {grad.shape[-1]} as in grad_out")
    if given is not None:
        if given.ndim == 0 or given.shape[:-1] != grad.shape[:-1]:
            raise ValueError(
                f"grad_out has shape {grad.shape}, wanted (..., N) with the leading axes of x {given.shape}"
            )
        if matrix is not None and matrix.shape[1] != given.shape[-1]:
            raise ValueError(f"weight has shape {matrix.shape}, wanted (N, K) with K = {given.shape[-1]} as in x")
    dense = [array for array in (grad, given, None if isinstance(weight, Quantized) else matrix) if array is not None]
    dtype = common_dtype(dense, "grad_out, x and weight")
    grad_x = grad_weight = None
    with np.errstate(all="ignore"):
        rows = _as_rows(grad).astype(dtype, copy=False)  # so that no product is rounded to a narrower dtype
        if matrix is not None:
            grad_x = _in_dtype(_cattn._product(rows, matrix.T, compute_dtype), dtype)
            grad_x = grad_x.reshape(*grad.shape[:-1], matrix.shape[1])
        if given is not None:
            grad_weight = _in_dtype(_cattn._product(rows.T, _as_rows(given).T, compute_dtype), dtype)
        grad_bias = _in_dtype(_cattn._product(np.broadcast_to(_ONE, (1, len(rows))), rows.T, None)[0], dtype)
    return grad_x, grad_weight, grad_bias


def _in_dtype(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the array itself if it has this dtype, else a copy."""
    return array if array.dtype == dtype else converted(array, dtype)


def _as_rows(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array with its leading axes as one."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _as_matrix(weight: object) -> NDArray[Any]:
    """Return the numbers of a weight; one of int8 needs a scale."""
    if isinstance(weight, Quantized):
        return multiply(weight.values, weight.scale)
    refuse_without_scale(read_array(weight, "weight"), "weight")
    return as_array(weight, "weight")
