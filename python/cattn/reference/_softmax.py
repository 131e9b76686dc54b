"""Softmax, and masked softmax by both methods."""

import math

import numpy as np
from numpy.typing import ArrayLike

from ._masks import Causal, Ranges, positions
from ._shared import Floats, boolean, deliver, numbers, quiet

Axis = int | tuple[int, ...] | None


@quiet
def softmax(
    x: ArrayLike, axis: Axis = -1, *, where: ArrayLike | None = None, scale: float = 1.0, out: Floats | None = None
) -> Floats:
    """Return softmax of ``scale * x`` along `axis`: exp(z - max) / sum of exp(z - max).

    `axis` may be a tuple, or None for all axes together. If `where` (bool, broadcastable to `x`) is False, an element
    gets 0 and has no influence, even if it is NaN. Slices without any True element are 0; slices whose True elements
    are all -inf are NaN.

    Examples
    --------
    >>> softmax([0.0, np.log(3.0)])
    array([0.25, 0.75])
    >>> softmax([1.0, np.nan, 1.0], where=[True, False, True])
    array([0.5, 0. , 0.5])
    """
    z = numbers(x, "x") * scale
    included = np.broadcast_to(True if where is None else np.asarray(where, np.bool_), z.shape)
    z = np.where(included, z, -np.inf)
    numerator = np.where(included, np.exp(z - z.max(axis=axis, keepdims=True, initial=-np.inf)), 0.0)
    # Included elements are divided by a sum > 0 (or NaN). The others are 0, not 0/0.
    weights = np.where(included, numerator / numerator.sum(axis=axis, keepdims=True), 0.0)
    return deliver(weights, out)


@quiet
def masked_softmax(
    scores: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    is_causal: Causal = False,
    query_offset: ArrayLike | None = None,
    scale: float = 1.0,
    method: str = "neg_inf",
    out: Floats | None = None,
) -> Floats:
    """Return softmax over `axis` of `scores`, of the visible entries only, by one of two methods.

    ``"neg_inf"`` sets hidden scores to -inf and takes the softmax. ``"renormalize"`` takes the softmax of everything,
    sets hidden weights to 0 and divides each row by its sum. In exact arithmetic both are the same, because the first
    denominator cancels. In floating point the second loses all digits if a hidden score is much larger than the visible
    ones. Rows whose visible weights sum to less than 2**-100, or to a sum that is not finite, are therefore computed
    again from their visible scores. `textbook_masked_softmax` has no such precaution.

    `scores` is (..., T_q, T_k). The boolean `mask`, True where a key is visible, broadcasts to it. `causal_mask`
    explains `is_causal` and `query_offset`; the offset may be an array (...,). Rows without a visible entry are 0.

    With another `axis`, or several, these are the axes of the keys, counted together in row-major order. The result is
    the order of an array with the keys moved to the end.

    Examples
    --------
    >>> masked_softmax(np.zeros((3, 3)), is_causal=True).round(4)
    array([[1.    , 0.    , 0.    ],
           [0.5   , 0.5   , 0.    ],
           [0.3333, 0.3333, 0.3333]])
    >>> masked_softmax([0.0, 2000.0], [True, False], method="renormalize")
    array([1., 0.])
    """
    given = numbers(scores, "scores")
    visible = np.array(np.broadcast_to(True if mask is None else boolean(mask, "mask"), given.shape))
    axes = np.sort(np.arange(given.ndim) if axis is None else np.atleast_1d(axis) % given.ndim)
    order = [*(i for i in range(given.ndim) if i not in axes), *axes]
    moved = given.transpose(order)
    rows = moved.shape[: -len(axes)]
    keys = math.prod(moved.shape[-len(axes) :])
    scores, visible = moved.reshape(*rows, keys), visible.transpose(order).reshape(*rows, keys)
    if is_causal:
        T_q, T_k = scores.shape[-2:]
        position = positions(Ranges(is_causal, query_offset), T_q, T_k, T_k - T_q)
        visible &= np.arange(scores.shape[-1]) <= position[..., None]

    if method == "neg_inf":
        weights = softmax(scores, where=visible, scale=scale)
    elif method == "renormalize":
        everything = softmax(scores, scale=scale)
        mass = (everything * visible).sum(axis=-1, keepdims=True)
        weights = everything * visible / mass
        sound = mass >= 2.0**-100  # also False for NaN
        weights = np.where(sound, weights, softmax(scores, where=visible, scale=scale))
    else:
        raise ValueError(f'method must be "neg_inf" or "renormalize", got {method!r}')
    return deliver(weights.reshape(moved.shape).transpose(np.argsort(order)), out)


@quiet
def textbook_masked_softmax(scores: ArrayLike, mask: ArrayLike, method: str = "neg_inf") -> Floats:
    """Return masked softmax as a first chapter on attention computes it, to show what can go wrong.

    Rows without a visible entry are NaN. With ``"renormalize"``, so are rows in which a hidden score is so much larger
    than the visible ones that their weights vanish. `mask` is True for visible scores (..., T_k).

    Examples
    --------
    >>> textbook_masked_softmax([1.0, 1.0, 5.0], [True, True, False])
    array([0.5, 0.5, 0. ])
    >>> textbook_masked_softmax([0.0, 2000.0], [True, False], method="renormalize")
    array([nan, nan])
    """
    if method == "neg_inf":
        return softmax(np.where(mask, scores, -np.inf))
    if method != "renormalize":
        raise ValueError(f'method must be "neg_inf" or "renormalize", got {method!r}')
    visible = softmax(scores) * np.asarray(mask, np.bool_)
    return np.asarray(visible / visible.sum(axis=-1, keepdims=True))
