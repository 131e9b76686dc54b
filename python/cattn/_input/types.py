"""Types of arguments and results: unions, attention's options, the named tuples, and the alignment warning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .display import fields_html, show_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..random import TorchGenerator

__all__ = ["AttentionGradients", "AttentionOutput", "CausalAlignmentWarning"]

Alignment: TypeAlias = bool | np.bool_ | Literal["upper_left", "lower_right"]
LseDType: TypeAlias = type[np.float32] | type[np.float64] | type[float] | np.dtype[np.float32] | np.dtype[np.float64]
Stage: TypeAlias = Literal["qk", "softcap", "bias", "mask", "softmax", "dropout"]
Window: TypeAlias = tuple[int | None, int | None] | list[int] | list[int | None] | None
# A string, because naming these classes would import numpy.random, which takes as long as the rest of the import.
RNG: TypeAlias = (
    "int | np.integer[Any] | np.random.Generator | np.random.BitGenerator | np.random.SeedSequence"
    " | np.random.RandomState | TorchGenerator | Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]] | None"
)


class AttentionOutput(NamedTuple):
    """The result of attention with extras; also accepted as ``out=``.

    Fields that were not requested are None. The repr shows dtypes and shapes.

    Attributes
    ----------
    out : ndarray, shape (..., T_q, d_v)
        The attention output.
    weights : ndarray, shape (..., T_q, T_k), or None
        The softmax weights before dropout (``return_weights=True``). Rows sum to 1, or to 0 where a query sees no key.
    lse : ndarray, shape (..., T_q), or None
        Natural logarithm of the sum of the exponentials of the visible scores (``return_lse=True``); float32 for
        float32 and halves, but float64 with ``return_lse=np.float64`` or where ``out=`` has such an array, with the
        digits that float32 has no room for.
    dropout_mask : ndarray of bool, shape (..., T_q, T_k), or None
        True where a weight was kept (``return_dropout_mask=True``).
    dropout_seed : int or None
        Given as ``rng=``, it draws the same dropout mask again. None without dropout; ignored in ``out=``.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.eye(2)
    >>> result = cattn.causal_attention(x, x, x, return_weights=True)
    >>> result.weights.round(2)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    >>> result.lse is None
    True
    >>> result
    AttentionOutput(out=<float64 (2, 2)>, weights=<float64 (2, 2)>)
    """

    out: Any = None
    weights: Any = None
    lse: Any = None
    dropout_mask: Any = None
    dropout_seed: int | None = None

    def __repr__(self) -> str:
        return show_fields(self)

    def _repr_html_(self) -> str:
        return fields_html(self)


class AttentionGradients(NamedTuple):
    """The result of `attention_backward`: gradients in the shapes of the arguments.

    Attributes
    ----------
    query, key, value : ndarray
        Gradients of the three inputs.
    bias : ndarray or None
        Gradient of bias or, where there is none, of a float attn_mask. None where neither was given.
    sinks : ndarray or None
        Gradient of sinks; None without them.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.eye(2)
    >>> result = cattn.causal_attention(x, x, x, return_lse=True)
    >>> grads = cattn.attention_backward(x, x, x, x, result.out, result.lse, is_causal=True)
    >>> grads.value.round(2)
    array([[1.  , 0.33],
           [0.  , 0.67]])
    >>> grads
    AttentionGradients(query=<float64 (2, 2)>, key=<float64 (2, 2)>, value=<float64 (2, 2)>)
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    sinks: Any = None

    def __repr__(self) -> str:
        return show_fields(self)

    def _repr_html_(self) -> str:
        return fields_html(self)


class CausalAlignmentWarning(UserWarning):
    """Causality or a window with different numbers of queries and keys has two possible alignments: name one."""
