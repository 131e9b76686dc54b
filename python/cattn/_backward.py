"""Gradients of attention: signature, documentation, and the sums over what was broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _cattn
from ._types import RNG, Alignment, AttentionGradients, Window

__all__ = ["attention_backward"]


def _sum_to(gradient: NDArray[Any], argument: Any) -> NDArray[Any]:
    """Sum over the axes along which the argument was broadcast."""
    shape = np.shape(argument)
    if gradient.shape == shape:
        return gradient
    missing = gradient.ndim - len(shape)
    sizes = zip(gradient.shape[missing:], shape, strict=True)
    axes = (*range(missing), *(missing + i for i, (full, own) in enumerate(sizes) if full != own))
    return np.asarray(gradient.sum(axis=axes)).reshape(shape)


def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
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
) -> AttentionGradients:
    """Return the gradients of attention's inputs, given that of its output.

    The weights are computed again, block by block, from query, key and the log-sum-exp of the forward pass; their
    matrix is never held as a whole.

    Parameters
    ----------
    grad_out : array_like, shape (..., T_q, d_v)
        Gradient of the output.
    query : array_like, shape (..., T_q, head_dim)
        This and every argument that is not named here is what the forward pass was given.
    key : array_like, shape (..., T_k, head_dim)
        Keys.
    value : array_like, shape (..., T_k, d_v)
        Values.
    out : array_like, shape (..., T_q, d_v)
        What the forward pass returned.
    lse : array_like, shape (..., T_q)
        The log-sum-exp that it returned (``return_lse=True``).
    attn_mask : array_like, optional
        Boolean (True = keep) or float (added).
    dropout_p : float
        Probability of a weight to be dropped.
    is_causal : bool or {"upper_left", "lower_right"}
        Which keys a query sees.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    enable_gqa : bool, optional
        None infers grouped heads, False forbids them.
    bias : array_like of float, optional
        Added to the scaled scores.
    query_offset : int or array_like of int, optional
        Position of the first query.
    query_seq_lengths, key_value_seq_lengths : int or array_like of int, optional
        How many queries and keys count. Gradients of the others are 0.
    window_size : (int, int)
        Keys seen before and after a query's position, -1: no bound.
    softcap : float, optional
        Bound of the scaled scores.
    alibi_slopes, sinks : array_like of float, shape (H,) or (..., H), optional
        Numbers of each query head: what distance costs, and a score that belongs to no key.
    rng : int or TorchGenerator
        What draws the mask of the forward pass again: the int that it was given, or its ``dropout_seed``; or a
        `TorchGenerator` in the state that the forward pass found it in, which then moves on as it did there. Without
        dropout it is not looked at.

    Returns
    -------
    AttentionGradients
        Gradients of query, key, value, bias and sinks, each in the shape of its argument: summed over what was
        broadcast, key-value heads over their group. Their dtype is that of the output, but float32 for those of bias
        and sinks beside halves. `bias` is the gradient of the
        argument bias if that was given, else of a float attn_mask.

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`; also for grad_out, out and lse of other shapes than the forward pass has, and
        for dropout with an rng that cannot repeat itself.

    Notes
    -----
    What a query may not see has no influence on its gradient, nor has the query on the gradient of what it may not see,
    whatever is stored there: NaN and infinity in a hidden key do not spread. A query that sees no key has gradient 0; a
    score of -inf has weight 0 and passes nothing on. The gradients have the same bits for every number of threads and
    instruction set with FMA.

    The method is that of FlashAttention-2 (Dao, 2023): one pass of five products for each pair of blocks, with weights
    computed from the log-sum-exp and ``sum(grad_out * out)`` for the sum over a row.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> query = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> key = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> value = np.array([[3.0], [6.0], [9.0]])
    >>> result = cattn.scaled_dot_product_attention(query, key, value, return_lse=True)
    >>> grads = cattn.attention_backward(np.ones((2, 1)), query, key, value, result.out, result.lse)
    >>> grads.query.round(3)
    array([[0.   , 0.851],
           [0.173, 0.505]])
    """
    d_query, d_key, d_value, d_bias, d_sinks, dtype = _cattn.attention_backward(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
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
        False,  # need_weights
        False,  # return_lse
        False,  # return_dropout_mask
        None,  # out
        grad_out,
        out,
        lse,
    )
    additive = attn_mask if bias is None else bias
    with np.errstate(all="ignore"):
        return AttentionGradients(
            _sum_to(d_query, query).astype(dtype, copy=False),
            _sum_to(d_key, key).astype(dtype, copy=False),
            _sum_to(d_value, value).astype(dtype, copy=False),
            None if d_bias is None else _sum_to(d_bias, additive),
            None if d_sinks is None else _sum_to(d_sinks, sinks),
        )
