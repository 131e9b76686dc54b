"""Dropout and its gradient."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import as_array, as_bool, parts_of
from .._input.contexts import in_default_mode
from .._input.names import with_hints
from .._input.types import RNG
from ..random import TorchGenerator
from ._options import documented, implemented_in_c

__all__ = ["dropout", "dropout_backward"]


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
@implemented_in_c
def dropout(  # type: ignore[empty-body]
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
        Probability that an element is dropped, in [0, 1].
    training : bool
        If False, nothing is dropped: the result is a copy of x.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        None draws fresh entropy. An int, 0 <= rng < 2**64, is the seed itself: the same int drops the same elements.
        From a generator one seed is drawn, after all other checks. A `TorchGenerator` drops the elements
        that ``torch.nn.functional.dropout`` drops in a contiguous tensor; p = 0 and p = 1 draw nothing from it.
    return_mask : bool
        Return (result, mask).
    out : ndarray, optional
        Takes the result: shape and dtype of x, any strides. It may be x itself.

    Returns
    -------
    ndarray, or (ndarray, ndarray of bool)
        Has the shape and dtype of x; dropped elements, even NaN, are +0. The mask is True where an element was kept.

    Raises
    ------
    TypeError
        x or out has a dtype that is not supported, or nothing can be drawn from rng.
    ValueError
        p is outside [0, 1], an int rng is outside its range, or out has the wrong shape.

    See Also
    --------
    dropout_backward : The gradient.
    scaled_dot_product_attention : Dropout of attention weights, with ``dropout_p``.
    Dropout : A layer that evaluation mode turns off.
    TorchGenerator : PyTorch's dropout masks.
    cattn.reference.dropout : The same in plain NumPy.

    Notes
    -----
    Random bits come from Philox4x32-10 (Salmon et al., 2011) with the seed as key and a counter made of the
    element's index in C order, so they depend neither on strides nor on threads. A `TorchGenerator` gives its bits in
    C order too, one after the other and on one thread. PyTorch draws in memory order if a tensor is not contiguous; its
    dropped elements are x * 0: -0 for negative x, NaN for infinite x.

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


@in_default_mode
def apply_dropout_mask(x: NDArray[Any], mask: NDArray[np.bool_], p: float) -> None:
    """Apply a dropout mask in place: divide elements by 1 - p where it is True, and set the others to 0."""
    wide = x.dtype.type if x.itemsize > 2 else np.float32  # halves are rounded once, at the end
    with np.errstate(all="ignore"):
        for part in parts_of(x.shape):
            np.multiply(x[part], wide(1 / (1 - p) if p < 1 else 0), out=x[part], casting="unsafe")
            x[part][~mask[part]] = 0  # not a product: a dropped NaN or infinity becomes 0 too


@documented
@with_hints
def dropout_backward(
    grad_out: ArrayLike,
    p: float = 0.5,
    *,
    mask: ArrayLike | None = None,
    rng: RNG = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return the gradient of the input of `dropout`, given the gradient of its result.

    Parameters
    ----------
    grad_out : array_like
        Gradient of the result.
    mask : array_like of bool, optional
        True where an element was kept (``return_mask=True``); broadcasts to grad_out. It must be the mask of the same
        call, and p the same: nothing here tells whether they are.
    rng : int or TorchGenerator, optional
        Draws the mask of the forward pass again, as in `attention_backward`; pass either mask or rng.
    out : ndarray, optional
        Takes the result: shape and dtype of grad_out, any strides. It may be grad_out itself.

    Returns
    -------
    ndarray
        ``grad_out / (1 - p)`` where an element was kept, and 0 where it was dropped, whatever its gradient is.

    Raises
    ------
    TypeError, ValueError
        As for `dropout`; also if neither or both of mask and rng are given, or if rng cannot repeat its draws.

    See Also
    --------
    dropout : The forward pass.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> y, kept = cattn.dropout(np.ones(6), 0.5, rng=123, return_mask=True)
    >>> bool((cattn.dropout_backward(np.ones(6), 0.5, mask=kept) == y).all())
    True
    >>> bool((cattn.dropout_backward(np.ones(6), 0.5, rng=123) == y).all())
    True
    """
    if mask is None:
        repeats = isinstance(rng, TorchGenerator) or hasattr(rng, "__index__")
        if not repeats and _cattn._probability(p, "p") > 0:
            raise ValueError(
                "pass the mask of the forward pass, or rng that draws it again: an int or a TorchGenerator"
            )
        return dropout(as_array(grad_out, "grad_out"), p, rng=rng, out=out)
    if rng is not None:
        raise ValueError("pass either mask or rng")
    kept = as_bool(mask, "mask", "")
    result = dropout(as_array(grad_out, "grad_out"), 0.0)  # a copy, and its checks
    try:
        kept = np.broadcast_to(kept, result.shape)
    except ValueError:
        raise ValueError(
            f"mask has shape {kept.shape}, which does not broadcast to grad_out's {result.shape}"
        ) from None
    apply_dropout_mask(result, kept, _cattn._probability(p, "p"))
    return result if out is None else _cattn._store(result, out)
