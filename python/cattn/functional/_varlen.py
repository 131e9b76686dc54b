"""Attention over packed sequences of different lengths."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from .._input.objects import Stored
from .._input.types import Alignment, AttentionGradients, AttentionOutput, LseDType
from ._options import PackedAttentionOptions, implemented_in_c

__all__ = ["varlen_attention", "varlen_attention_backward"]


@overload
def varlen_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    is_causal: Alignment = ...,
    return_lse: Literal[False] = ...,
    out: NDArray[Any] | None = ...,
    **options: Unpack[PackedAttentionOptions],
) -> NDArray[Any]: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    is_causal: Alignment = ...,
    return_lse: Literal[True] | LseDType,
    out: NDArray[Any] | None = ...,
    **options: Unpack[PackedAttentionOptions],
) -> AttentionOutput: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    is_causal: Alignment = ...,
    return_lse: bool | LseDType,
    out: NDArray[Any] | None = ...,
    **options: Unpack[PackedAttentionOptions],
) -> NDArray[Any] | AttentionOutput: ...
@implemented_in_c
def varlen_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    is_causal: Alignment = False,
    return_lse: bool | LseDType = False,
    out: NDArray[Any] | None = None,
    **options: Unpack[PackedAttentionOptions],
) -> Any:
    """Return attention of sequences that are packed into the same arrays one after another, without padding.

    Sequence b gets the bits that `scaled_dot_product_attention` gives batch entry b of a padded call with lengths.

    Parameters
    ----------
    query : array_like, shape (total_q, H, head_dim)
        The queries of all sequences; float16, bfloat16, float32 or float64, as key and value.
    key : array_like or Quantized, shape (total_k, H_kv, head_dim)
        The keys; H is a multiple of H_kv.
    value : array_like or Quantized, shape (total_k, H_kv, d_v)
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
    is_causal : bool or {"upper_left", "lower_right"}
        Which keys a query sees, within its sequence. "lower_right" aligns the last query of each sequence with its
        last key.
    alignment : {"upper_left", "lower_right"}, optional
        The position of a query, for window_size and alibi_slopes without causality: query i of a sequence stands at key
        i ("upper_left", the default), or its last query at its last key ("lower_right"). With is_causal both mean the
        same, and may be given together if they agree.
    alibi_slopes, sinks : array_like of float, shape (H,) or (B, H), optional
        One number for each query head, or for each sequence and query head: the slope of ALiBi, and one extra logit.
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
    Names and layout follow flash-attention (Dao et al., 2022).

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
    key: Stored,
    value: Stored,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    is_causal: Alignment = False,
    grad_lse: ArrayLike | None = None,
    merged: bool = False,
    **options: Unpack[PackedAttentionOptions],
) -> AttentionGradients:
    """Return the gradients of `varlen_attention`, given the gradients of its output and, if wanted, log-sum-exp.

    Sequence b gets the bits that `attention_backward` gives batch entry b of a padded call with lengths.

    Parameters
    ----------
    grad_out : array_like, shape (total_q, H, d_v)
        Gradient of the output.
    query : array_like, shape (total_q, H, head_dim)
        This and every other argument of `varlen_attention` must be the same as in the forward pass.
    out : array_like, shape (total_q, H, d_v)
        The output of the forward pass; for halves it may be float32.
    lse : array_like, shape (H, total_q)
        The log-sum-exp of the forward pass (``return_lse=True``, or np.float64 for more exact gradients).

    Returns
    -------
    AttentionGradients
        Gradients of query, key, value and sinks, each in the shape of its argument; ``bias`` is None.

    Other Parameters
    ----------------
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
