"""Rotary positions of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ._signature import implemented_in_c

__all__ = ["rope"]


@implemented_in_c
def rope(  # type: ignore[empty-body]
    x: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
    inverse: bool = False,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Return queries or keys with rotary positions: pairs of columns, rotated by angles that grow with the position.

    Parameters
    ----------
    x : array_like, shape (..., T, D)
        Queries or keys of T tokens: float16, bfloat16, float32 or float64; booleans and integers are converted to
        float64.
    positions : array_like, shape (T,) or (\*lead, T), optional
        The position of each token, an int or a float from -2**53 to 2**53; the default is 0, 1, ..., T - 1. ``lead``
        are the leading axes of x, with or without its axis -3 (heads), or 1 in their place: for x of shape
        (B, H, T, D) the position ids (B, T) fit, and (B, 1, T), too.
    theta : float
        Base of the frequencies, at least 1: ``rope_theta`` of a model.
    rotary_dim : int, optional
        The number of columns that are rotated, an even number; the default is D. The others are copied.
    interleaved : bool
        Which columns form a pair. False: column i and column i + rotary_dim/2, as in Hugging Face's Llama and GPT-NeoX.
        True: columns 2i and 2i + 1, as in GPT-J and in Meta's own files of Llama. No model works with the other one.
    scaling : dict, optional
        Changes the frequencies for longer contexts: the ``rope_scaling`` or ``rope_parameters`` of a model's config in
        transformers, with a ``rope_type`` (or ``type``) of "default", "linear", "dynamic", "yarn" or "llama3".
    inverse : bool
        Rotate by the negative angles: the gradient of x, given the gradient of the result.
    out : ndarray, optional
        Takes the result: shape and dtype of x, any strides. It may be x itself.

    Returns
    -------
    ndarray
        Has the shape and dtype of x; it is `out` if that was given.

    Raises
    ------
    TypeError
        x or out has a dtype that is not supported, positions are not numbers, or scaling is no dict.
    ValueError
        x has less than 2 dimensions, D or rotary_dim is odd, positions do not fit x or are NaN or too large, theta is
        below 1, scaling has an unknown type or key, lacks one, or contradicts theta or rotary_dim, or out has the wrong
        shape.

    See Also
    --------
    rms_norm : The norm of queries and keys, which some models compute before.
    scaled_dot_product_attention : Attention of the result.
    cattn.reference.rope : The same in plain NumPy.

    Notes
    -----
    With d = rotary_dim, the pair i of a token at position :math:`p` is rotated by the angle :math:`p f_i`:

    .. math::

       a' = a \cos p f_i - b \sin p f_i, \qquad b' = b \cos p f_i + a \sin p f_i, \qquad
       f_i = \theta^{-2i / d}

    Frequencies, angles, sines and cosines are computed in float64, also for halves and far positions; sines and cosines
    are then rounded once to the dtype of the computation. The result has the bits of ``x * cos + rotate_half(x) * sin``
    in NumPy from these, and is the same on every machine. transformers computes angles in float32: its error grows with
    the position and reaches 1e-3 at 16384.

    The scalings "linear" (Chen et al., 2023), "dynamic", "yarn" (Peng et al., 2023) and "llama3" follow
    transformers 5. "dynamic" needs ``original_max_position_embeddings``, which transformers takes from the config, and
    takes the largest position of the call for the length. "yarn" multiplies every sine and cosine by its attention
    factor: the gradient is that too, so with ``inverse=True`` they are multiplied by the factor, not divided. Without
    "yarn" the rotation is orthogonal, and ``rope(rope(x), inverse=True)`` is x but for rounding.

    Infinity and NaN in x affect their pair only, as in arithmetic: infinity times a sine of 0 is NaN.

    References
    ----------
    Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> query = np.array([[1.0, 0.0, 1.0, 0.0]] * 3)  # 3 tokens
    >>> cattn.rope(query).round(3)
    array([[ 1.   ,  0.   ,  1.   ,  0.   ],
           [-0.301,  0.   ,  1.382,  0.   ],
           [-1.325,  0.   ,  0.493,  0.   ]])
    >>> cattn.rope(query, np.arange(100, 103), interleaved=True).round(3)[0]
    array([ 0.862, -0.506,  0.54 ,  0.841])
    """


def as_positions(*arguments: Any) -> Any:
    """Call the function of `cattn._input.rope` for C; that module is imported at its first use."""
    from .._input import rope

    return rope.as_positions(*arguments)


def as_rope_scaling(*arguments: Any) -> Any:
    """Call the function of `cattn._input.rope` for C, in the same way."""
    from .._input import rope

    return rope.as_rope_scaling(*arguments)
