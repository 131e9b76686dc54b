"""Rotary positions of queries and keys: the function, and its arguments as C reads them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import Array, is_bfloat16, parts_of, read_array
from ._options import implemented_in_c

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


# Every integer up to this size is a float64.
MOST = 2**53


def as_positions(obj: Any, name: str) -> Array:
    """Return positions as a contiguous float64 array of the caller's shape (a copy that nobody else changes)."""
    array = read_array(obj, name)
    if array.dtype.kind not in "iuf" and not is_bfloat16(array.dtype) and array.size > 0:
        raise TypeError(f"{name} must hold ints or floats, got dtype {array.dtype}")
    if array.ndim == 0:
        raise ValueError(
            f"{name} must have one number for each token, shape (T,), got just one: pass np.arange(start, start + T)"
        )
    result: Array = np.empty(array.shape, np.float64)
    for part in parts_of(array.shape):  # a signal is handled after each part
        if array.dtype.kind in "iu":
            low, high = int(array[part].min()), int(array[part].max())
            if low < -MOST or high > MOST:
                raise ValueError(f"{name} must be between -2**53 and 2**53, got {low if low < -MOST else high}")
        numbers = result[part]
        np.copyto(numbers, array[part], casting="unsafe")
        wrong = ~(np.abs(numbers) <= MOST)
        if wrong.any():
            raise ValueError(f"{name} must be between -2**53 and 2**53, got {numbers[wrong].flat[0]}")
    return result


# The order is the order of enum cattn_rope_type. The keys of each type: required ones and optional ones.
_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_WHERE = {  # where a model's config has a key that its dict lacks
    "original_max_position_embeddings": ": config.max_position_embeddings of a model in transformers",
    "factor": ": config.max_position_embeddings / original_max_position_embeddings of a model in transformers",
}


def _type_of(given: Mapping[str, Any]) -> str:
    """Return the type that a dict names."""
    for key in ("rope_type", "type"):
        if not isinstance(given.get(key, ""), (str, type(None))):
            raise TypeError(f"scaling[{key!r}] must be a str, got {type(given[key]).__name__}")
    names = {given[key] for key in ("rope_type", "type") if given.get(key) is not None}
    if len(names) > 1:
        first, second = (_cattn._shown(given[key]) for key in ("rope_type", "type"))
        raise ValueError(f"scaling has rope_type {first} and type {second}: pass one of them")
    if not names:
        raise ValueError(f"scaling lacks 'rope_type': it must be one of {', '.join(map(repr, _TYPES))}")
    name = names.pop()
    if name not in _TYPES:
        raise ValueError(
            f"scaling has rope_type {_cattn._shown(name)}; cattn.rope knows {', '.join(map(repr, _TYPES))}"
        )
    return str(name)


def _check_keys(given: Mapping[str, Any], name: str) -> None:
    """Refuse a dict that has other keys than its type, or lacks one."""
    needed, optional = _TYPES[name]
    layers = [key for key, value in given.items() if isinstance(value, Mapping)]
    if layers:
        raise ValueError(
            f"scaling has a dict for each of {', '.join(map(_cattn._shown, layers))}: pass that of one layer type"
        )
    unknown = [key for key in given if key not in (*needed, *optional, *_COMMON)]
    if unknown:
        known = ", ".join(map(repr, (*needed, *optional))) or "no other key"
        raise ValueError(
            f"scaling has unknown keys {', '.join(map(_cattn._shown, unknown))}; rope_type {name!r} has {known}"
        )
    for key in needed:
        if given.get(key) is None:
            raise ValueError(f"scaling lacks {key!r}, which rope_type {name!r} needs{_WHERE.get(key, '')}")


def _number(given: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    """Return a number of the dict; None counts as absent."""
    value = given.get(key)
    if value is None:
        return default
    if isinstance(value, (bool, np.bool_, str, bytes, complex, np.complexfloating)):
        raise TypeError(f"scaling[{key!r}] must be a real number, got {type(value).__name__}")
    try:
        if getattr(value, "ndim", 0):
            raise TypeError  # an array of one element has a float, too
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"scaling[{key!r}] must be a real number, got {type(value).__name__}") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"scaling[{key!r}] must be finite, got {_cattn._shown(number)}")
    return number


def _demand(holds: bool, given: Mapping[str, Any], key: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"scaling[{key!r}] must be {wanted}, got {_cattn._shown(given[key])}")


def _check_agreement(given: Mapping[str, Any], theta: float, rotary_dim: int, n_cols: int) -> None:
    """Two keys say what arguments of rope say: refuse a contradiction."""
    own_theta = _number(given, "rope_theta", theta)
    if own_theta != theta:
        raise ValueError(f"scaling has rope_theta {own_theta}, but theta is {theta}: pass theta=scaling['rope_theta']")
    part = _number(given, "partial_rotary_factor", rotary_dim / max(n_cols, 1))
    if int(n_cols * part) != rotary_dim and given.get("partial_rotary_factor") is not None:
        raise ValueError(
            f"scaling has partial_rotary_factor {part}, which is {int(n_cols * part)} of {n_cols} columns, but "
            f"rotary_dim is {rotary_dim}: pass rotary_dim={int(n_cols * part)}"
        )


def as_rope_scaling(scaling: Any, theta: float, rotary_dim: int, n_cols: int) -> tuple[float, ...]:
    """Return the members of struct cattn_rope_scaling in their order: the type's number, truncate, and the floats."""
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling must be a dict as in the config of a model, or None, got {type(scaling).__name__}")
    name = _type_of(scaling)
    _check_keys(scaling, name)
    _check_agreement(scaling, theta, rotary_dim, n_cols)
    factor, length = _number(scaling, "factor", 1.0), _number(scaling, "original_max_position_embeddings", 1.0)
    _demand(factor >= 1, scaling, "factor", "at least 1")
    _demand(length > 0, scaling, "original_max_position_embeddings", "positive")
    low, high = _number(scaling, "low_freq_factor", 1.0), _number(scaling, "high_freq_factor", 4.0)
    _demand(low > 0, scaling, "low_freq_factor", "positive")
    _demand(high > low, scaling, "high_freq_factor", f"larger than low_freq_factor, {low}")
    slow, fast = _number(scaling, "beta_slow", 1.0), _number(scaling, "beta_fast", 32.0)
    _demand(slow > 0, scaling, "beta_slow", "positive")
    _demand(fast >= slow, scaling, "beta_fast" if scaling.get("beta_fast") is not None else "beta_slow", "such that "
            f"beta_fast, {fast}, is at least beta_slow, {slow}")  # fmt: skip
    attention = _number(scaling, "attention_factor")
    _demand(attention > 0 or scaling.get("attention_factor") is None, scaling, "attention_factor", "positive")
    if name == "dynamic" and rotary_dim < 4:
        raise ValueError(f"scaling has rope_type 'dynamic', which needs a rotary_dim of at least 4, got {rotary_dim}")
    if name == "yarn" and theta <= 1:
        raise ValueError(f"scaling has rope_type 'yarn', which needs a theta above 1, got {theta}")
    truncate = scaling.get("truncate")
    if truncate is not None and not isinstance(truncate, (bool, np.bool_)):
        raise TypeError(f"scaling['truncate'] must be True or False, got {type(truncate).__name__}")
    mscale, mscale_all_dim = _number(scaling, "mscale"), _number(scaling, "mscale_all_dim")
    number = operator.indexOf(_TYPES, name)
    flag = truncate is None or bool(truncate)
    return (number, flag, factor, length, low, high, fast, slow, attention, mscale, mscale_all_dim)
