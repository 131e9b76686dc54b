"""The layers around attention: norms, activations, projections, and their gradients."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import as_array, common_dtype, converted, read_array, refuse_without_scale
from .._input.contexts import in_default_mode
from .._input.objects import Quantized, Stored, multiply
from .._input.types import ComputeDType
from ._options import documented, implemented_in_c

__all__ = [
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward",
    "rms_norm",
    "rms_norm_backward",
    "silu",
    "silu_backward",
]


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


@implemented_in_c
def rms_norm_backward(  # type: ignore[empty-body]
    grad_out: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-6
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    r"""Return the gradients of the arguments of `rms_norm`, given the gradient of its result.

    Parameters
    ----------
    grad_out : array_like, shape (..., D)
        Gradient of the result.
    x : array_like, shape (..., D)
        The argument of the forward pass, as weight and eps.

    Returns
    -------
    grad_x : ndarray
        Has the shape of x, and the dtype that NumPy promotes the three arrays to.
    grad_weight : ndarray or None
        Has the shape of weight and the same dtype; None without a weight.

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


@implemented_in_c
def layer_norm_backward(  # type: ignore[empty-body]
    grad_out: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-5
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any]]:
    r"""Return the gradients of the arguments of `layer_norm`, given the gradient of its result.

    Parameters
    ----------
    grad_out : array_like, shape (..., D)
        Gradient of the result.
    x : array_like, shape (..., D)
        The argument of the forward pass, as weight and eps.

    Returns
    -------
    grad_x : ndarray
        Has the shape of x, and the dtype that NumPy promotes the three arrays to.
    grad_weight : ndarray or None
        Has the shape of weight and the same dtype; None without a weight.
    grad_bias : ndarray
        Has the shape (D,) and the same dtype: what a bias would get, since the gradients do not depend on it.

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


@implemented_in_c
def gelu(  # type: ignore[empty-body]
    x: ArrayLike,
    approximate: Literal["none", "tanh"] = "none",
    *,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return x times the probability that a normal number is below x, for each element.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, of any rank; booleans and integers are converted to float64.
    approximate : {"none", "tanh"}
        "none" computes the function itself, "tanh" its approximation by a tanh, which differs by up to 5e-4. Use the
        one that a model was trained with, as in PyTorch: BERT has "none", GPT-2 has "tanh" ("gelu_new").
    out : ndarray, optional
        Takes the result: shape and dtype of x, any strides. It may be x itself.

    Returns
    -------
    ndarray
        Has the shape and dtype of x; it is `out` if that was given.

    Raises
    ------
    TypeError
        x or out has a dtype that is not supported.
    ValueError
        approximate is another word, or out has the wrong shape.

    See Also
    --------
    gelu_backward : The gradient.
    silu : The same with the logistic function.
    cattn.reference.gelu : The same in plain NumPy.

    Notes
    -----
    .. math::

       \text{gelu}(x) = x \, \frac{1 + \text{erf}(x / \sqrt 2)}{2}, \qquad
       \text{tanh}: \; \frac{x}{2} \left(1 + \tanh \sqrt{2 / \pi} \, (x + 0.044715 \, x^3)\right)

    Negative x lose no digits: the relative error stays within a few units in the last place down to the smallest
    subnormal number, where ``1 + erf`` would cancel. The limits are kept, too: -0 for -inf and inf for inf, where
    PyTorch has NaN. The result of an element does not depend on its place, on the strides or on the instruction set.
    Halves are computed in float32 and rounded once.

    References
    ----------
    Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import gelu
    >>> gelu([-20.0, -1.0, 0.0, 1.0])
    array([-5.50724824e-88, -1.58655254e-01,  0.00000000e+00,  8.41344746e-01])
    >>> gelu([-1.0, 0.0, 1.0], "tanh").round(4)
    array([-0.1588,  0.    ,  0.8412])
    """


@implemented_in_c
def gelu_backward(  # type: ignore[empty-body]
    grad_out: ArrayLike,
    x: ArrayLike,
    approximate: Literal["none", "tanh"] = "none",
    *,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return the gradient of x, given the gradient of the result of `gelu`.

    Parameters
    ----------
    grad_out : array_like
        Gradient of the result, of the shape of x.
    x : array_like
        The argument of the forward pass.
    out : ndarray, optional
        Takes the result: its shape and dtype, any strides. It may be grad_out or x.

    Returns
    -------
    ndarray
        ``grad_out`` times the derivative at x, in the dtype that NumPy promotes both to; it is `out` if that was given.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import gelu_backward
    >>> gelu_backward(np.ones(3), [-1.0, 0.0, 1.0]).round(4)
    array([-0.0833,  0.5   ,  1.0833])
    """


@implemented_in_c
def silu(  # type: ignore[empty-body]
    x: ArrayLike,
    *,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return x times the logistic function of x (swish), for each element.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, of any rank; booleans and integers are converted to float64.
    out : ndarray, optional
        Takes the result: shape and dtype of x, any strides. It may be x itself.

    Returns
    -------
    ndarray
        Has the shape and dtype of x; it is `out` if that was given.

    Raises
    ------
    TypeError
        x or out has a dtype that is not supported.
    ValueError
        out has the wrong shape.

    See Also
    --------
    silu_backward : The gradient.
    gelu : The same with the normal distribution.
    cattn.reference.silu : The same in plain NumPy.

    Notes
    -----
    .. math::

       \text{silu}(x) = \frac{x}{1 + e^{-x}}

    As with `gelu`, negative x lose no digits and the limits are kept: -0 for -inf, where PyTorch has NaN. The result of
    an element does not depend on its place, on the strides or on the instruction set. Halves are computed in float32
    and rounded once.

    References
    ----------
    Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation in reinforcement
    learning", 2017.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import silu
    >>> silu([-1.0, 0.0, 1.0]).round(4)
    array([-0.2689,  0.    ,  0.7311])
    """


@implemented_in_c
def silu_backward(  # type: ignore[empty-body]
    grad_out: ArrayLike,
    x: ArrayLike,
    *,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return the gradient of x, given the gradient of the result of `silu`.

    Parameters
    ----------
    grad_out : array_like
        Gradient of the result, of the shape of x.
    x : array_like
        The argument of the forward pass.
    out : ndarray, optional
        Takes the result: its shape and dtype, any strides. It may be grad_out or x.

    Returns
    -------
    ndarray
        ``grad_out`` times the derivative at x, in the dtype that NumPy promotes both to; it is `out` if that was given.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import silu_backward
    >>> silu_backward(np.ones(3), [-1.0, 0.0, 1.0]).round(4)
    array([0.0723, 0.5   , 0.9277])
    """


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


@documented
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
            grad_x = _in_dtype(_cattn._product(rows, matrix.T, compute_dtype, True), dtype)
            grad_x = grad_x.reshape(*grad.shape[:-1], matrix.shape[1])
        if given is not None:
            grad_weight = _in_dtype(_cattn._product(rows.T, _as_rows(given).T, compute_dtype, True), dtype)
        grad_bias = _sum_of_rows(rows)
    return grad_x, grad_weight, grad_bias


def _sum_of_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the sums of the columns in their dtype; float64 copies of some columns at a time stay in the caches."""
    ones, width = np.broadcast_to(_ONE, (1, len(rows))), max(64, 2**17 // max(1, len(rows)))
    sums = np.empty(rows.shape[1], rows.dtype)
    for i in range(0, len(sums), width):
        sums[i : i + width] = _in_dtype(_cattn._product(ones, rows[:, i : i + width].T, None, True)[0], rows.dtype)
    return sums


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
