"""Gelu, silu, and their gradients."""

from __future__ import annotations

from typing import Any, Literal

from numpy.typing import ArrayLike, NDArray

from ._signature import implemented_in_c

__all__ = ["gelu", "gelu_backward", "silu", "silu_backward"]


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
    approximate : {"none", "tanh"}
        As in the forward pass.
    out : ndarray, optional
        Takes the result: its shape and dtype, any strides. It may be grad_out or x.

    Returns
    -------
    ndarray
        ``grad_out`` times the derivative at x, in the dtype that NumPy promotes both to; it is `out` if that was given.

    Raises
    ------
    TypeError, ValueError
        As for `gelu`, and if grad_out has another shape than x.

    See Also
    --------
    gelu : The forward pass.
    cattn.reference.gelu_backward : The same in plain NumPy.

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

    Raises
    ------
    TypeError, ValueError
        As for `silu`, and if grad_out has another shape than x.

    See Also
    --------
    silu : The forward pass.
    cattn.reference.silu_backward : The same in plain NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import silu_backward
    >>> silu_backward(np.ones(3), [-1.0, 0.0, 1.0]).round(4)
    array([0.0723, 0.5   , 0.9277])
    """
