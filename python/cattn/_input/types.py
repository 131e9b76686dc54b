"""Types of arguments and results: unions, the named tuples and how they are shown, and the alignment warning."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..random import TorchGenerator

__all__ = [
    "AttentionGradients",
    "AttentionOutput",
    "AttentionStatistics",
    "AttentionTangents",
    "CausalAlignmentWarning",
    "LinearAttentionGradients",
    "LinearAttentionOutput",
]
Alignment: TypeAlias = bool | np.bool_ | Literal["upper_left", "lower_right"]
Layout: TypeAlias = Literal["bhtd", "bthd"]
LseDType: TypeAlias = type[np.float32] | type[np.float64] | type[float] | np.dtype[np.float32] | np.dtype[np.float64]
ComputeDType: TypeAlias = Literal["bfloat16", "bfloat16_tiles"] | np.dtype[Any] | type[np.generic] | None
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
    gate : ndarray or None
        Gradient of gate; None without one.

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
    gate: Any = None

    def __repr__(self) -> str:
        return show_fields(self)

    def _repr_html_(self) -> str:
        return fields_html(self)


class AttentionTangents(NamedTuple):
    """The result of `attention_jvp`: attention, and its derivative in the direction of the tangents.

    Attributes
    ----------
    out, out_tangent : ndarray, shape (..., T_q, d_v)
        The attention output, and its derivative.
    lse, lse_tangent : ndarray, shape (..., T_q), or None
        The log-sum-exp, and its derivative (``return_lse=True``). The derivative is the mean of the tangents of the
        scores, weighted with the attention weights.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.eye(2)
    >>> result = cattn.attention_jvp(x, x, x, query_tangent=x, return_lse=True)
    >>> result.lse_tangent.round(3)
    array([0.474, 0.474])
    >>> cattn.attention_jvp(x, x, x, query_tangent=x)
    AttentionTangents(out=<float64 (2, 2)>, out_tangent=<float64 (2, 2)>)
    """

    out: Any
    out_tangent: Any
    lse: Any = None
    lse_tangent: Any = None

    def __repr__(self) -> str:
        return show_fields(self)

    def _repr_html_(self) -> str:
        return fields_html(self)


class AttentionStatistics(NamedTuple):
    """The result of `attention_statistics`.

    Fields that were not asked for are None. All numbers have the dtype of the computation: float64 for float64 inputs,
    else float32. Without an axis of heads, leave H out of the shapes.

    Attributes
    ----------
    lse : ndarray, shape (..., H, T_q), or None
        Natural logarithm of the sum of the exponentials of the scores that the query sees, and of its sink.
    max_score : ndarray, shape (..., H, T_q), or None
        The largest of these scores, without the sink; -inf where the query sees no key.
    entropy : ndarray, shape (..., H, T_q), or None
        Sum over the keys of ``-w * log(w)``, in nats: 0 if one key has all the weight, ``log(n)`` if n keys share it.
        The sink is not a key.
    max_weight : ndarray, shape (..., H, T_q), or None
        The largest weight.
    sink_weight : ndarray, shape (..., H, T_q), or None
        The share of the softmax that the sink takes; 0 without sinks.
    distance : ndarray, shape (..., H, T_q), or None
        Sum over the keys of ``w * abs(p - j)``, with p and j the positions of query and key: how far the head looks,
        in tokens.
    top_keys : ndarray of int64, shape (..., H, T_q, top_k), or None
        The keys with the largest scores, in descending order; of equal scores the lower key first. -1 where the query
        sees fewer keys with a score above -inf.
    top_weights : ndarray, shape (..., H, T_q, top_k), or None
        Their weights; 0 where the key is -1.
    received : ndarray, shape (..., H, T_k), or None
        Sum over the queries of the weight that they give to a key.
    received_max : ndarray, shape (..., H, T_k), or None
        The largest weight that a query gives to it.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.zeros((3, 2))
    >>> statistics = cattn.attention_statistics(x, x, is_causal=True, statistics=["entropy", "received"])
    >>> statistics.entropy.round(3)
    array([0.   , 0.693, 1.099])
    >>> statistics.received.round(3)
    array([1.833, 0.833, 0.333])
    >>> statistics
    AttentionStatistics(entropy=<float64 (3,)>, received=<float64 (3,)>)
    """

    lse: Any = None
    max_score: Any = None
    entropy: Any = None
    max_weight: Any = None
    sink_weight: Any = None
    distance: Any = None
    top_keys: Any = None
    top_weights: Any = None
    received: Any = None
    received_max: Any = None

    def __repr__(self) -> str:
        return show_fields(self)

    def _repr_html_(self) -> str:
        return fields_html(self)


class LinearAttentionOutput(NamedTuple):
    """The result of `linear_attention` with ``return_state=True``.

    Attributes
    ----------
    out : ndarray, shape (..., N, T, d_v)
        The output of each token.
    state : ndarray, shape (..., N, d_k, d_v)
        The state after the last token: pass it as ``state`` with the next tokens.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.eye(2)
    >>> cattn.linear_attention(x, x, x, return_state=True)
    LinearAttentionOutput(out=<float64 (2, 2)>, state=<float64 (2, 2)>)
    """

    out: Any
    state: Any

    def __repr__(self) -> str:
        return show_fields(self)

    def _repr_html_(self) -> str:
        return fields_html(self)


class LinearAttentionGradients(NamedTuple):
    """The result of `cattn.functional.linear_attention_backward`: gradients in the shapes of the arguments.

    Attributes
    ----------
    query, key, value : ndarray
        Gradients of the three inputs.
    decay, beta, state : ndarray or None
        Gradients of the options; None for one that was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import linear_attention_backward
    >>> x = np.eye(2)
    >>> linear_attention_backward(x, x, x, x, beta=[1.0, 0.5])
    LinearAttentionGradients(query=<float64 (2, 2)>, key=<float64 (2, 2)>, value=<float64 (2, 2)>, beta=<float64 (2,)>)
    """

    query: Any
    key: Any
    value: Any
    decay: Any = None
    beta: Any = None
    state: Any = None

    def __repr__(self) -> str:
        return show_fields(self)

    def _repr_html_(self) -> str:
        return fields_html(self)


class CausalAlignmentWarning(UserWarning):
    """Causality or a window with different numbers of queries and keys has two possible alignments: name one."""


def summary(value: object) -> str:
    """Return dtype and shape of an array or tensor, and a short repr of anything else."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {tuple(value.shape)}"
    return reprlib.repr(value)


def show_fields(record: Any) -> str:
    """Return the repr of a named tuple of arrays: dtypes and shapes of the fields that are not None."""
    fields = [
        f"{name}=<{summary(value)}>" if hasattr(value, "dtype") else f"{name}={summary(value)}"
        for name, value in record._asdict().items()
        if value is not None
    ]
    return f"{type(record).__name__}({', '.join(fields)})"


def html_table(title: str, rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table with a title. The first cell of a row is its name."""
    from html import escape  # imported here, because only notebooks need it

    lines = []
    for name, *cells in rows:
        shown = (f"<pre>{escape(str(cell))}</pre>" if "\n" in str(cell) else escape(str(cell)) for cell in cells)
        texts = "".join(f'<td style="text-align: left">{cell}</td>' for cell in shown)
        lines.append(f'<tr><th style="text-align: left">{escape(str(name))}</th>{texts}</tr>')
    return f"<table><caption>{escape(title)}</caption><tbody>{''.join(lines)}</tbody></table>"


def fields_html(record: Any) -> str:
    """Return a named tuple of arrays as an HTML table of names, dtypes and shapes."""
    given = {name: value for name, value in record._asdict().items() if value is not None}
    rows = [
        (name, value.dtype, tuple(value.shape)) if hasattr(value, "dtype") else (name, summary(value), "")
        for name, value in given.items()
    ]
    return html_table(type(record).__name__, rows)


class Text(str):
    """A str of several lines whose repr is the text itself, so that interpreters and notebooks show it as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from html import escape

        return f'<pre style="line-height: 1.2">{escape(str(self))}</pre>'

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)
