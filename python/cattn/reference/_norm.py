"""RMS norm, layer norm, and their gradients."""

import numpy as np
from numpy.typing import ArrayLike

from ._shared import Floats, deliver, numbers, quiet


@quiet
def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-6, *, out: Floats | None = None) -> Floats:
    """Return ``x / sqrt(mean(x**2) + eps) * weight`` over the last axis.

    Examples
    --------
    >>> rms_norm([3.0, 4.0]).round(3)
    array([0.849, 1.131])
    """
    given = numbers(x, "x")
    normed = given / np.sqrt((given * given).mean(axis=-1, keepdims=True) + eps)
    return deliver(normed if weight is None else normed * numbers(weight, "weight"), out)


@quiet
def rms_norm_backward(
    grad_out: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-6
) -> tuple[Floats, Floats | None]:
    """Return the gradients of `x` and `weight`, given the gradient of the result of `rms_norm`.

    Examples
    --------
    >>> grad_x, grad_weight = rms_norm_backward([1.0, 0.0], [3.0, 4.0], [1.0, 2.0])
    >>> grad_x.round(3), grad_weight.round(3)
    (array([ 0.181, -0.136]), array([0.849, 0.   ]))
    """
    grad, given = numbers(grad_out, "grad_out"), numbers(x, "x")
    factor = 1 / np.sqrt((given * given).mean(axis=-1, keepdims=True) + eps)
    normed = given * factor
    weighted = grad if weight is None else grad * numbers(weight, "weight")
    grad_x = factor * (weighted - normed * (weighted * normed).mean(axis=-1, keepdims=True))
    grad_weight = None if weight is None else (grad * normed).reshape(-1, given.shape[-1]).sum(axis=0)
    return grad_x, grad_weight


@quiet
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    out: Floats | None = None,
) -> Floats:
    """Return ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with mean and variance over the last axis.

    Examples
    --------
    >>> layer_norm([1.0, 2.0, 3.0], bias=[0.0, 1.0, 0.0]).round(3)
    array([-1.225,  1.   ,  1.225])
    """
    given = numbers(x, "x")
    centred = given - given.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    scaled = normed if weight is None else normed * numbers(weight, "weight")
    return deliver(scaled if bias is None else scaled + numbers(bias, "bias"), out)


@quiet
def layer_norm_backward(
    grad_out: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-5
) -> tuple[Floats, Floats | None, Floats]:
    """Return the gradients of `x`, `weight` and a bias, given the gradient of the result of `layer_norm`.

    Examples
    --------
    >>> grad_x, grad_weight, grad_bias = layer_norm_backward([1.0, 0.0, 0.0], [1.0, 2.0, 4.0], [1.0, 2.0, 1.0])
    >>> grad_x.round(3), grad_weight.round(3), grad_bias
    (array([ 0.229, -0.344,  0.115]), array([-1.069,  0.   ,  0.   ]), array([1., 0., 0.]))
    """
    grad, given = numbers(grad_out, "grad_out"), numbers(x, "x")
    centred = given - given.mean(axis=-1, keepdims=True)
    factor = 1 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    normed = centred * factor
    weighted = grad if weight is None else grad * numbers(weight, "weight")
    sideways = normed * (weighted * normed).mean(axis=-1, keepdims=True)
    grad_x = factor * (weighted - weighted.mean(axis=-1, keepdims=True) - sideways)
    n = given.shape[-1]
    grad_weight = None if weight is None else (grad * normed).reshape(-1, n).sum(axis=0)
    return grad_x, grad_weight, grad.reshape(-1, n).sum(axis=0)
