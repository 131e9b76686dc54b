"""Attention over packed sequences of different lengths."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import as_array, as_integers, common_dtype, read_integers
from .._input.checks import as_size, is_word
from .._input.quantized import as_scale, quantized_array
from .._input.types import (
    RNG,
    Alignment,
    AttentionGradients,
    AttentionOutput,
    CausalAlignmentWarning,
    LseDType,
    Window,
)
from ..random import TorchGenerator
from ._signature import implemented_in_c

__all__ = ["varlen_attention", "varlen_attention_backward"]


Corner: TypeAlias = Literal["upper_left", "lower_right"]


class VarlenOptions(TypedDict, total=False):
    """The keyword-only options that do not decide the type of the result, for the overloads."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    dropout_p: float
    is_causal: Alignment
    alignment: Corner | None
    scale: float | None
    window_size: Window
    softcap: float | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    key_scale: ArrayLike | None
    value_scale: ArrayLike | None
    rng: RNG


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    out: NDArray[Any] | None = ...,
    **options: Unpack[VarlenOptions],
) -> NDArray[Any]: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: Literal[True] | LseDType,
    out: NDArray[Any] | None = ...,
    **options: Unpack[VarlenOptions],
) -> AttentionOutput: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: bool | LseDType,
    out: NDArray[Any] | None = ...,
    **options: Unpack[VarlenOptions],
) -> NDArray[Any] | AttentionOutput: ...
@implemented_in_c
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
    alignment: Corner | None = None,
    scale: float | None = None,
    window_size: Window = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    rng: RNG = None,
    return_lse: bool | LseDType = False,
    out: NDArray[Any] | None = None,
) -> Any:
    """Return attention of sequences that are packed into the same arrays one after another, without padding.

    Sequence b gets the bits that `scaled_dot_product_attention` gives batch entry b of a padded call with lengths.

    Parameters
    ----------
    query : array_like, shape (total_q, H, head_dim)
        The queries of all sequences; float16, bfloat16, float32 or float64, as key and value.
    key : array_like, shape (total_k, H_kv, head_dim)
        The keys; H is a multiple of H_kv.
    value : array_like, shape (total_k, H_kv, d_v)
        The values.
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (B + 1,)
        The edges of the sequences: sequence b has the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``. They start
        with 0, never decrease, and end with the number of rows.

    Returns
    -------
    ndarray, shape (total_q, H, d_v), or AttentionOutput
        The output; with return_lse an `AttentionOutput`.

    Other Parameters
    ----------------
    max_seqlen_q, max_seqlen_k : int, optional
        An upper bound of the lengths. It is not needed, but accepted because other libraries need it.
    dropout_p : float
        Probability that a weight is dropped.
    is_causal : bool or {"upper_left", "lower_right"}
        Which keys a query sees, within its sequence. "lower_right" aligns the last query of each sequence with its
        last key.
    alignment : {"upper_left", "lower_right"}, optional
        The position of a query, for window_size and alibi_slopes without causality: query i of a sequence stands at key
        i ("upper_left", the default), or its last query at its last key ("lower_right"). With is_causal both mean the
        same, and may be given together if they agree.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    window_size : (int, int)
        Number of keys seen before and after a query's position; -1 sets no bound.
    softcap : float, optional
        Bound of the scaled scores.
    alibi_slopes, sinks : array_like of float, shape (H,) or (B, H), optional
        One number for each query head, or for each sequence and query head: the slope of ALiBi, and one extra logit.
    key_scale, value_scale : array_like of float, optional
        Scales of a quantized key or value, which broadcast to its shape: (total_k, H_kv, 1) or (H_kv, head_dim), for
        instance; see `scaled_dot_product_attention`.
    rng : None, int, numpy.random.Generator or what numpy.random.default_rng takes
        The source of dropout's random bits. A `TorchGenerator` has no order for packed sequences and is refused.
    return_lse : bool, np.float32 or np.float64
        Also return the log-sum-exp, shape (H, total_q), in this dtype.
    out : ndarray, optional
        Takes the output: exact shape and dtype, any strides.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`; also if cu_seqlens do not describe the rows.

    Warns
    -----
    CausalAlignmentWarning
        is_causal=True, or a window without is_causal, where a sequence has different numbers of queries and keys.

    See Also
    --------
    scaled_dot_product_attention : Padded sequences, with ``key_value_seq_lengths``.
    varlen_attention_backward : The gradients.
    cattn.reference.varlen_attention : The same in plain NumPy.

    Notes
    -----
    Names and layout are those of flash-attention (Dao et al., 2022).

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.zeros((5, 1, 2))  # a sequence of 3 tokens, and one of 2
    >>> value = np.array([3.0, 6.0, 9.0, 10.0, 20.0]).reshape(5, 1, 1)
    >>> cattn.varlen_attention(x, x, value, [0, 3, 5], [0, 3, 5], is_causal="lower_right").ravel()
    array([ 3. ,  4.5,  6. , 10. , 15. ])
    """


@implemented_in_c
def varlen_attention_backward(  # type: ignore[empty-body]
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
    alignment: Corner | None = None,
    scale: float | None = None,
    window_size: Window = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    rng: RNG = None,
    grad_lse: ArrayLike | None = None,
    merged: bool = False,
) -> AttentionGradients:
    """Return the gradients of `varlen_attention`, given those of its output and, optionally, of its log-sum-exp.

    Sequence b gets the bits that `attention_backward` gives batch entry b of a padded call with lengths.

    Parameters
    ----------
    grad_out : array_like, shape (total_q, H, d_v)
        Gradient of the output.
    query : array_like, shape (total_q, H, head_dim)
        This and every other argument of `varlen_attention` must be that of the forward pass.
    key : array_like, shape (total_k, H_kv, head_dim)
        The keys.
    value : array_like, shape (total_k, H_kv, d_v)
        The values.
    out : array_like, shape (total_q, H, d_v)
        The output of the forward pass; for halves it may be float32.
    lse : array_like, shape (H, total_q)
        The log-sum-exp of the forward pass (``return_lse=True``, or np.float64 for more exact gradients).
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (B + 1,)
        The edges of the sequences.

    Returns
    -------
    AttentionGradients
        Gradients of query, key, value and sinks, each in the shape of its argument; ``bias`` is None.

    Other Parameters
    ----------------
    max_seqlen_q, max_seqlen_k : int, optional
        An upper bound of the lengths.
    dropout_p : float
        Probability that a weight is dropped.
    is_causal : bool or {"upper_left", "lower_right"}
        Which keys a query sees, within its sequence.
    alignment : {"upper_left", "lower_right"}, optional
        The position of a query without causality.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    window_size : (int, int)
        Number of keys seen before and after a query's position; -1 sets no bound.
    softcap : float, optional
        Bound of the scaled scores.
    alibi_slopes, sinks : array_like of float, shape (H,) or (B, H), optional
        The slope of ALiBi, and one extra logit.
    key_scale, value_scale : array_like of float, optional
        Scales of a quantized key or value, which broadcast to its shape: (total_k, H_kv, 1) or (H_kv, head_dim), for
        instance; see `scaled_dot_product_attention`.
    rng : int
        Draws the mask of the forward pass again: its int, or its ``dropout_seed``. Ignored without dropout.
    grad_lse : array_like, shape (H, total_q), optional
        Gradient of the log-sum-exp.
    merged : bool
        Whether out and lse count keys of other calls, too; see `attention_backward`.

    Raises
    ------
    TypeError, ValueError
        As for `varlen_attention` and `attention_backward`.

    See Also
    --------
    varlen_attention : The forward pass; ``return_lse=True`` returns the log-sum-exp.
    attention_backward : The gradients of padded sequences.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.zeros((5, 1, 2))  # a sequence of 3 tokens, and one of 2
    >>> edges = [0, 3, 5]
    >>> result = cattn.varlen_attention(x, x, x, edges, edges, return_lse=True)
    >>> grads = cattn.varlen_attention_backward(np.ones((5, 1, 2)), x, x, x, result.out, result.lse, edges, edges)
    >>> grads.value[:, 0, 0]
    array([1., 1., 1., 1., 1.])
    """


def pack(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    key_scale: ArrayLike | None,
    value_scale: ArrayLike | None,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    is_causal: Alignment,
    alignment: Corner | None,
    window_size: Window,
    rng: RNG,
) -> tuple[Any, ...]:
    """Check the arguments of packed sequences, and return arguments for C in the order of varlen_attention.c."""
    for array, name, last in ((q, "query", "head_dim"), (k, "key", "head_dim"), (v, "value", "d_v")):
        if array.ndim != 3:
            raise ValueError(f"{name} must have shape (total, heads, {last}), got {array.shape}")
    starts_q, lengths_q, longest_q = _sequences(cu_seqlens_q, len(q), "cu_seqlens_q", max_seqlen_q, "max_seqlen_q")
    starts_k, lengths_k, longest_k = _sequences(cu_seqlens_k, len(k), "cu_seqlens_k", max_seqlen_k, "max_seqlen_k")
    if len(lengths_q) != len(lengths_k):
        raise ValueError(f"cu_seqlens_q has {len(lengths_q)} sequences, cu_seqlens_k has {len(lengths_k)}")
    if isinstance(rng, TorchGenerator):
        raise TypeError("rng must be None, an int or what numpy.random.default_rng takes, got TorchGenerator")
    lower_right = is_word(is_causal, "lower_right")
    if alignment is not None:
        lower_right, is_causal = _align(is_causal, alignment)
    elif lower_right:
        is_causal = "upper_left"  # C aligns the sequences itself
    elif isinstance(is_causal, (bool, np.bool_)) and not np.array_equal(lengths_q, lengths_k):
        _warn_alignment(bool(is_causal), window_size)
        is_causal = "upper_left" if is_causal else False
    sequences = (starts_q, lengths_q, starts_k, lengths_k, longest_q, longest_k)
    scales = _scale_as_heads(key_scale, "key_scale"), _scale_as_heads(value_scale, "value_scale")
    return (_as_heads(q), _as_heads(k), _as_heads(v), *scales, is_causal, 0, lower_right, *sequences)


def _align(is_causal: Alignment, alignment: Corner) -> tuple[bool, Alignment]:
    """Return whether sequences are aligned at their ends, and is_causal without an alignment of its own."""
    lower_right = is_word(alignment, "lower_right")
    if not lower_right and not is_word(alignment, "upper_left"):
        raise ValueError(f"alignment must be None, 'upper_left' or 'lower_right', got {_cattn._shown(alignment)}")
    if is_word(is_causal, "upper_left" if lower_right else "lower_right"):
        raise ValueError(
            f"alignment={_cattn._shown(alignment)} contradicts is_causal={_cattn._shown(is_causal)}: give one of them"
        )
    if is_word(is_causal, alignment) or (isinstance(is_causal, (bool, np.bool_)) and is_causal):
        return lower_right, "upper_left"
    return lower_right, is_causal


def pack_sequences(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    key_scale: ArrayLike | None,
    value_scale: ArrayLike | None,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    is_causal: Alignment,
    alignment: Corner | None,
    window_size: Window,
    rng: RNG,
    out: NDArray[Any] | None,
) -> tuple[Any, ...]:
    """Return the arguments of `pack`, a view of the output as heads, and the output."""
    q, k, v = as_array(query, "query"), as_keys(key, "key", key_scale), as_keys(value, "value", value_scale)
    packed = pack(
        q, k, v, key_scale, value_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        is_causal, alignment, window_size, rng,
    )  # fmt: skip
    heads = next((array.shape[1] for array in (q, k, v) if array.shape[1] != 1), 1)  # a single head is broadcast
    shape = (len(q), heads, v.shape[2])
    if out is None:
        plain = [array for array, scale in ((q, None), (k, key_scale), (v, value_scale)) if scale is None]
        dtype = common_dtype(plain, "query, key and value")
        out = np.empty(shape, dtype if len(plain) == 3 else np.result_type(dtype, np.float32))
    elif not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray, got {type(out).__name__}")
    elif out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the result has {shape}")
    return (*packed, _as_heads(out), out)


def unpack_sequences(result: Any, out: NDArray[Any]) -> Any:
    """Return out, or an AttentionOutput with it, given the result of C."""
    if not isinstance(result, AttentionOutput):
        return out
    return AttentionOutput(out, lse=result.lse[0], dropout_seed=result.dropout_seed)


def pack_gradients(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    key_scale: ArrayLike | None,
    value_scale: ArrayLike | None,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    is_causal: Alignment,
    alignment: Corner | None,
    window_size: Window,
    rng: RNG,
    grad_out: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    grad_lse: ArrayLike | None,
) -> tuple[Any, ...]:
    """Return the arguments of `pack`, and views of the other four as heads."""
    q, k, v = as_array(query, "query"), as_keys(key, "key", key_scale), as_keys(value, "value", value_scale)
    packed = pack(
        q, k, v, key_scale, value_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        is_causal, alignment, window_size, rng,
    )  # fmt: skip
    heads = next((array.shape[1] for array in (q, k, v) if array.shape[1] != 1), 1)

    def checked(array: ArrayLike, name: str, whose: str, shape: tuple[int, ...]) -> NDArray[Any]:
        rows = as_array(array, name)
        if rows.shape != shape:
            raise ValueError(f"{name} has shape {rows.shape}, {whose} has {shape}")
        return rows

    shape, rows = (len(q), heads, v.shape[2]), (heads, len(q))
    return (
        *packed,
        _as_heads(checked(grad_out, "grad_out", "the output", shape)),
        _as_heads(checked(out, "out", "the output", shape)),
        checked(lse, "lse", "the log-sum-exp", rows)[None],
        None if grad_lse is None else checked(grad_lse, "grad_lse", "the log-sum-exp", rows)[None],
    )


def unpack_gradients(grads: AttentionGradients) -> AttentionGradients:
    """Return the gradients of C, (1, H, total, D), in the shapes of the packed arrays."""
    query, key, value = (grad[0].swapaxes(0, 1) for grad in grads[:3])
    return AttentionGradients(query, key, value, sinks=grads.sinks)


def as_keys(array: ArrayLike, name: str, scale: ArrayLike | None) -> NDArray[Any]:
    """Return keys or values as an array; with scales, in the dtype that they belong to."""
    return as_array(array, name) if scale is None else quantized_array(array, name)


def _scale_as_heads(scale: ArrayLike | None, name: str) -> NDArray[Any] | None:
    """View scales that broadcast to (total, H_kv, D) as scales of one batch entry."""
    if scale is None:
        return None
    array = as_scale(scale, name, "f")
    if array.ndim > 3:
        raise ValueError(f"{name} has shape {array.shape}, which does not broadcast to (total, heads, width)")
    return _as_heads(array.reshape((1,) * (3 - array.ndim) + array.shape))


def _as_heads(packed: NDArray[Any]) -> NDArray[Any]:
    """View (total, H, D) as one batch entry, (1, H, total, D)."""
    return packed.swapaxes(0, 1)[None]


def _sequences(
    cu_seqlens: ArrayLike, total: int, name: str, longest: int | None, longest_name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the first rows and the lengths of the sequences, and the largest length."""
    given = read_integers(cu_seqlens, name)
    if isinstance(given, int) or given.ndim != 1 or given.size == 0:
        raise ValueError(f"{name} must have shape (B + 1,), got {() if isinstance(given, int) else given.shape}")
    edges: Any = as_integers(given, name, 0, total)
    lengths = np.diff(edges)
    if edges[0] != 0 or edges[-1] != total or (lengths < 0).any():
        raise ValueError(
            f"{name} must start with 0, never fall and end with {total}, got {_cattn._shown(edges.tolist())}"
        )
    most = int(lengths.max(initial=0))
    if longest is not None and (size := as_size(longest, longest_name, 0)) < most:
        raise ValueError(f"{longest_name} must be at least {most}, the longest of {name}, got {size}")
    return edges[:-1].copy(), lengths, most


def _warn_alignment(is_causal: bool, window_size: Window) -> None:
    """Warn if the alignment of a sequence's queries and keys is ambiguous."""
    sides: Any = window_size if isinstance(window_size, (tuple, list)) else ()  # anything else raises later
    windowed = any(side is not None and not (isinstance(side, (int, np.integer)) and side == -1) for side in sides)
    if is_causal or windowed:
        text = "queries and keys of a sequence differ in number, and query i stands at key i: name is_causal "
        text += "'upper_left' for that, 'lower_right' if the last query belongs to the last key"
        warnings.warn(text, CausalAlignmentWarning, stacklevel=4)
