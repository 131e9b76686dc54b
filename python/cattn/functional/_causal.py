"""Causal attention: signature and documentation of what the C extension computes."""

from __future__ import annotations

from typing import Any, Literal, overload

from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.types import RNG, AttentionOutput, Window
from ._shortcut import shortcut


@overload
def causal_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    *,
    scale: float | None = ...,
    enable_gqa: bool | None = ...,
    bias: ArrayLike | None = ...,
    query_offset: ArrayLike | None = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    window_size: Window = ...,
    softcap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    rng: RNG = ...,
    need_weights: Literal[False] = ...,
    return_lse: Literal[False] = ...,
    return_dropout_mask: Literal[False] = ...,
    out: NDArray[Any] | None = ...,
) -> NDArray[Any]: ...
@overload
def causal_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    *,
    scale: float | None = ...,
    enable_gqa: bool | None = ...,
    bias: ArrayLike | None = ...,
    query_offset: ArrayLike | None = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    window_size: Window = ...,
    softcap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    rng: RNG = ...,
    need_weights: bool = ...,
    return_lse: bool = ...,
    return_dropout_mask: bool = ...,
    out: NDArray[Any] | AttentionOutput | None = ...,
) -> Any: ...
@shortcut
def causal_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    enable_gqa: bool | None = None,
    bias: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    window_size: Window = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    rng: RNG = None,
    need_weights: bool = False,
    return_lse: bool = False,
    return_dropout_mask: bool = False,
    out: NDArray[Any] | AttentionOutput | None = None,
) -> Any:
    """Return attention where no query sees a later key.

    `scaled_dot_product_attention` with ``is_causal="lower_right"``: the last query sees every key, so that it is right
    with a cache too, where T_q < T_k. With query_offset, query i sees the keys j <= i + query_offset instead.

    Parameters
    ----------
    query : array_like, shape (..., T_q, head_dim)
        This and every other argument are those of `scaled_dot_product_attention`.
    key : array_like, shape (..., T_k, head_dim)
        Keys.
    value : array_like, shape (..., T_k, d_v)
        Values.
    attn_mask : array_like, optional
        Boolean (True = keep) or float (added); intersected with causality.
    dropout_p : float
        Probability of a weight to be dropped.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    enable_gqa : bool, optional
        None infers grouped heads, False forbids them.
    bias : array_like of float, optional
        Added to the scaled scores.
    query_offset : int or array_like of int, optional
        Position of the first query. Default T_k - T_q.
    query_seq_lengths, key_value_seq_lengths : int or array_like of int, optional
        How many queries and keys count. The default offset is the difference of the two, for each of the batch.
    window_size : (int, int)
        Keys that a query sees before its own position; the second number has no effect here.
    softcap : float, optional
        Bound of the scaled scores.
    alibi_slopes, sinks : array_like of float, shape (H,) or (..., H), optional
        Numbers of each query head: what distance costs, and a score that belongs to no key.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        Where dropout gets its bits.
    need_weights, return_lse, return_dropout_mask : bool
        Extras to return in an `AttentionOutput`.
    out : ndarray or AttentionOutput, optional
        Takes the result.

    Returns
    -------
    ndarray, shape (..., T_q, d_v), or AttentionOutput
        As `scaled_dot_product_attention`.

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> full = cattn.causal_attention(x, x, x)
    >>> last = cattn.causal_attention(x[2:], x, x)  # one new query, all keys so far
    >>> bool((full[2:] == last).all())
    True
    """
    return _cattn.causal_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        scale,
        enable_gqa,
        bias,
        query_offset,
        query_seq_lengths,
        key_value_seq_lengths,
        window_size,
        softcap,
        alibi_slopes,
        sinks,
        rng,
        need_weights,
        return_lse,
        return_dropout_mask,
        out,
    )
