"""Gradients of attention: signature, documentation, and the sums over what was broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import as_array, as_bool, common_dtype, shape_of
from .._input.checks import as_int
from .._input.fp_mode import in_default_mode
from .._input.types import RNG, Alignment, AttentionGradients, Window
from ..random import TorchGenerator
from ._softmax import keep

__all__ = ["attention_backward", "dropout_backward", "softmax_backward"]


@in_default_mode
@np.errstate(all="ignore")
def _as_given(gradients: list[Any], shapes: list[tuple[int, ...]], dtype: np.dtype[Any]) -> AttentionGradients:
    """Return each gradient in the shape of its argument; those of query, key and value in dtype."""
    pairs = zip(gradients, shapes, strict=True)
    sums: list[Any] = [None if gradient is None else _sum_to(gradient, shape) for gradient, shape in pairs]
    return AttentionGradients(*(total.astype(dtype, copy=False) for total in sums[:3]), *sums[3:])


def _sum_to(gradient: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Sum over the axes along which an argument of this shape was broadcast."""
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
        The log-sum-exp that it returned (``return_lse=True``). In float64, which the forward pass gives where ``out=``
        has such an array for it, the gradients of float32 and halves are more exact.
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
    score of -inf has weight 0 and a gradient of 0, which times an infinite query or key is NaN. The gradients have the
    same bits for every number of threads and instruction set with FMA.

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
    *gradients, dtype = _cattn.attention_backward(
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
    arguments = {"query": query, "key": key, "value": value, "bias": additive, "sinks": sinks}
    return _as_given(gradients, [shape_of(argument, name) for name, argument in arguments.items()], dtype)


@in_default_mode
def softmax_backward(
    grad_out: ArrayLike,
    weights: ArrayLike,
    axis: int = -1,
    *,
    scale: float = 1.0,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return the gradient of the scores of `softmax` or `masked_softmax`, given that of the weights.

    Parameters
    ----------
    grad_out : array_like
        Gradient of the weights; shape of weights.
    weights : array_like
        What softmax returned.
    axis : int
        The axis over which they sum to 1.
    scale : float
        That of the softmax.
    out : ndarray, optional
        Takes the result: exact shape and dtype, any strides. It may be grad_out or weights itself.

    Returns
    -------
    ndarray
        ``scale * weights * (grad_out - (weights * grad_out).sum(axis))``, and exactly 0 where the weight is 0: neither
        masked elements nor what their gradient holds have any influence. The method of `masked_softmax` does not
        matter: both are the same function.

    Raises
    ------
    TypeError, ValueError
        Dtypes that are not supported, shapes that differ, an axis out of bounds.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> weights = cattn.masked_softmax(np.zeros((2, 2)), is_causal=True)
    >>> cattn.softmax_backward([[5.0, np.nan], [1.0, 3.0]], weights)
    array([[ 0. ,  0. ],
           [-0.5,  0.5]])
    """
    grad, result = as_array(grad_out, "grad_out"), as_array(weights, "weights")
    dtype = common_dtype((grad, result), "grad_out and weights")
    if dtype.itemsize == 2:  # computed in float32, rounded once
        with np.errstate(all="ignore"):
            wide = softmax_backward(grad.astype(np.float32), result.astype(np.float32), axis, scale=scale)
            narrow = wide.astype(dtype)
        return narrow if out is None else _cattn._store(narrow, out)
    last = as_int(axis, "axis")
    if last != -1 and not -result.ndim <= last < result.ndim:
        raise ValueError(f"axis {last} is out of bounds for weights with {result.ndim} dimensions")
    if last == -1 or grad.shape != result.shape:
        return _cattn.softmax_backward(grad, result, scale, out)
    moved_out = out  # what does not fit is refused below
    if isinstance(out, np.ndarray) and out.shape == result.shape:
        moved_out = np.moveaxis(out, axis, -1)
    moved = _cattn.softmax_backward(np.moveaxis(grad, axis, -1), np.moveaxis(result, axis, -1), scale, moved_out)
    return np.ascontiguousarray(np.moveaxis(moved, -1, axis)) if out is None else out


def dropout_backward(
    grad_out: ArrayLike,
    p: float = 0.5,
    *,
    mask: ArrayLike | None = None,
    rng: RNG = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return the gradient of what went into `dropout`, given that of what came out.

    Parameters
    ----------
    grad_out : array_like
        Gradient of the result.
    p : float
        Probability with which elements were dropped, in [0, 1].
    mask : array_like of bool, optional
        True where an element was kept (``return_mask=True``); broadcasts to grad_out.
    rng : int or TorchGenerator, optional
        Instead of the mask: what draws it again, as in `attention_backward`.
    out : ndarray, optional
        Takes the result: shape and dtype of grad_out, any strides. It may be grad_out itself.

    Returns
    -------
    ndarray
        ``grad_out / (1 - p)`` where an element was kept, and 0 where it was dropped, whatever its gradient is.

    Raises
    ------
    TypeError, ValueError
        As `dropout`; also without, or with both, mask and rng, and for an rng that cannot repeat itself.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> y, kept = cattn.dropout(np.ones(6), 0.5, rng=123, return_mask=True)
    >>> bool((cattn.dropout_backward(np.ones(6), 0.5, mask=kept) == y).all())
    True
    >>> bool((cattn.dropout_backward(np.ones(6), 0.5, rng=123) == y).all())
    True
    """
    if mask is None:
        repeats = isinstance(rng, TorchGenerator) or hasattr(rng, "__index__")
        if not repeats and _cattn._probability(p, "p") > 0:
            raise ValueError("pass the mask of the forward pass, or what draws it again: an int or a TorchGenerator")
        result: NDArray[Any] = _cattn.dropout(as_array(grad_out, "grad_out"), p, True, rng, False, out)
        return result
    if rng is not None:
        raise ValueError("pass either mask or rng")
    kept = as_bool(mask, "mask", "")
    result = _cattn.dropout(as_array(grad_out, "grad_out"), 0.0, True, None, False, None)  # a copy, and its checks
    try:
        kept = np.broadcast_to(kept, result.shape)
    except ValueError:
        raise ValueError(
            f"mask has shape {kept.shape}, which does not broadcast to grad_out's {result.shape}"
        ) from None
    keep(result, kept, _cattn._probability(p, "p"))
    return result if out is None else _cattn._store(result, out)
