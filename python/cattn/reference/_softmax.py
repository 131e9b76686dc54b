"""Softmax, and masked softmax by both methods."""

import numpy as np
from numpy.typing import ArrayLike

from ._masks import Causal, positions
from ._shared import Floats, boolean, deliver, quiet

Axis = int | tuple[int, ...] | None


@quiet
def softmax(
    x: ArrayLike, axis: Axis = -1, *, where: ArrayLike | None = None, scale: float = 1.0, out: Floats | None = None
) -> Floats:
    """Softmax of ``scale * x`` along `axis`: exp(z - max) / sum of exp(z - max).

    `axis` may be a tuple, or None for all axes together. Where `where` (bool, broadcastable to `x`) is False, an
    element gets 0 and has no influence, even if it is NaN. Slices where nothing takes part are 0; where all that takes
    part is -inf they are NaN.

    Examples
    --------
    >>> softmax([0.0, np.log(3.0)])
    array([0.25, 0.75])
    >>> softmax([1.0, np.nan, 1.0], where=[True, False, True])
    array([0.5, 0. , 0.5])
    """
    z = np.asarray(x, np.float64) * scale
    takes_part = np.broadcast_to(True if where is None else np.asarray(where, np.bool_), z.shape)
    z = np.where(takes_part, z, -np.inf)
    numerator = np.where(takes_part, np.exp(z - z.max(axis=axis, keepdims=True, initial=-np.inf)), 0.0)
    # An element that takes part divides by a sum > 0 (or NaN); the others are 0, not 0/0.
    weights = np.where(takes_part, numerator / numerator.sum(axis=axis, keepdims=True), 0.0)
    return deliver(weights, out)


@quiet
def masked_softmax(
    scores: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    is_causal: Causal = False,
    query_offset: ArrayLike | None = None,
    scale: float = 1.0,
    method: str = "neg_inf",
    out: Floats | None = None,
) -> Floats:
    """Softmax over the last axis of `scores`, of the visible entries only, in one of two ways.

    ``"neg_inf"`` sets hidden scores to -inf and takes the softmax. ``"renormalize"`` takes the softmax of everything,
    sets hidden weights to 0 and divides each row by what is left. On paper both are the same, since the first
    denominator cancels; in floating point the second loses everything when a hidden score dwarfs the visible ones.
    Rows that keep less than 2**-100 of their mass, or whose kept mass is not finite, are therefore computed again
    from their visible scores. `textbook_masked_softmax` does without such precautions.

    `scores` is (..., T_q, T_k); `mask` is bool (True = keep) and broadcasts to it; `is_causal` and `query_offset` are
    explained at `causal_mask`, and the offset may be an array (...,). Rows without a visible entry are 0.

    Examples
    --------
    >>> masked_softmax(np.zeros((3, 3)), is_causal=True).round(4)
    array([[1.    , 0.    , 0.    ],
           [0.5   , 0.5   , 0.    ],
           [0.3333, 0.3333, 0.3333]])
    >>> masked_softmax([0.0, 2000.0], [True, False], method="renormalize")
    array([1., 0.])
    """
    scores = np.asarray(scores, np.float64)
    visible = np.array(np.broadcast_to(True if mask is None else boolean(mask, "mask"), scores.shape))
    if is_causal:
        T_q, T_k = scores.shape[-2:]
        position = positions(is_causal, query_offset, T_q, T_k, T_k - T_q)
        visible &= np.arange(scores.shape[-1]) <= position[..., None]

    if method == "neg_inf":
        weights = softmax(scores, where=visible, scale=scale)
    elif method == "renormalize":
        everything = softmax(scores, scale=scale)
        kept = (everything * visible).sum(axis=-1, keepdims=True)
        weights = everything * visible / kept
        sound = kept >= 2.0**-100  # False for NaN too
        weights = np.where(sound, weights, softmax(scores, where=visible, scale=scale))
    else:
        raise ValueError(f'method must be "neg_inf" or "renormalize", got {method!r}')
    return deliver(weights, out)


@quiet
def textbook_masked_softmax(scores: ArrayLike, mask: ArrayLike, method: str = "neg_inf") -> Floats:
    """Mask and normalise as a first chapter on attention writes it: to see what can go wrong.

    Rows without a visible entry come out as NaN; so do, with ``"renormalize"``, rows in which a hidden score is so
    much larger than the visible ones that their weights vanish. `mask` is True where a score of (..., T_k) is kept.

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
    kept = softmax(scores) * np.asarray(mask, np.bool_)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))
