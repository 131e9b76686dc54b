"""Statistics of the attention weights, and what the heads of a language model look for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import PART, as_array, as_integers, broadcast_shapes, parts_of, read_integers
from .._input.contexts import in_default_mode
from .._input.objects import Stored
from .._input.types import Alignment, AttentionStatistics, fields_html, show_fields
from ._options import DenseOptions, PackedOptions, implemented_in_c

__all__ = ["HeadScores", "attention_rollout", "attention_statistics", "head_scores", "varlen_attention_statistics"]
Statistic: TypeAlias = Literal[
    "lse", "max_score", "entropy", "max_weight", "sink_weight", "distance", "received", "received_max"
]


@implemented_in_c
def attention_statistics(  # type: ignore[empty-body]
    query: ArrayLike,
    key: Stored,
    attn_mask: ArrayLike | None = None,
    is_causal: Alignment = False,
    *,
    statistics: Statistic | Sequence[Statistic] | None = None,
    top_k: int = 0,
    observation_window: int | None = None,
    **options: Unpack[DenseOptions],
) -> AttentionStatistics:
    r"""Return statistics of the attention weights, in memory that grows with T and not with T * T.

    >>> import numpy as np
    >>> import cattn
    >>> x = np.zeros((3, 2))
    >>> cattn.attention_statistics(x, x, is_causal=True).entropy.round(3)
    array([0.   , 0.693, 1.099])

    Parameters
    ----------
    query : array_like, shape (..., T_q, head_dim)
        This and every other argument but the next three keywords are the same as in `attention_weights`.

    Returns
    -------
    AttentionStatistics
        The statistics; its documentation has a line for each. Fields that were not asked for are None.

    Other Parameters
    ----------------
    statistics : str or sequence of str, optional
        Names of fields of `AttentionStatistics`. None means all but the top keys, which top_k asks for.
    top_k : int
        The number of largest weights of each query, with their keys, from 0 to T_k.
    observation_window : int, optional
        ``received`` and ``received_max`` count only the last queries of each batch entry, this many. To compute nothing
        else, pass only these queries instead, with is_causal="lower_right".
    layout : {"bhtd", "bthd"}
        Order of heads and tokens in query and key.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`; also if statistics has another name, or top_k or observation_window is
        out of range.

    See Also
    --------
    attention_weights : The matrix itself.
    varlen_attention_statistics : The same for packed sequences.
    head_scores : What the heads of a language model look for.
    view_attention : Weights to look at, with the statistics as strips along the text.
    cattn.reference.attention_statistics : The same in plain NumPy.

    Notes
    -----
    With the weights :math:`w_{ij}` of the keys :math:`V_i` that query i at position :math:`p_i` sees:

    .. math::

       \text{entropy}_i &= -\sum_{j \in V_i} w_{ij} \log w_{ij} \\
       \text{distance}_i &= \sum_{j \in V_i} w_{ij} |p_i - j| \\
       \text{received}_j &= \sum_i w_{ij}, \qquad \text{received max}_j = \max_i w_{ij}

    A query that sees no key has lse and max_score -inf, and 0 elsewhere; with a sink, its lse is the sink and its
    sink_weight 1. A query with a NaN among its scores has NaN everywhere and the keys -1, and so do the sums of the
    keys that it sees; with only scores of -inf, whose weights are NaN as well, lse and max_score are -inf. A hidden key
    changes nothing, whatever it holds.

    The scores are computed twice: once for the log-sum-exp, and once for the weights, as `attention_backward` computes
    them from it. The results have the same bits for every number of threads and instruction set with FMA. Weights can
    differ from `attention_weights` in the last digit, as they are not divided by a sum.

    ``received`` is what H2O (Zhang et al., 2023) accumulates to choose the keys of a cache; with an observation_window
    it is the vote of SnapKV (Li et al., 2024). ``max_score`` is what QK-clip (Kimi K2, 2025) watches, and a ``lse`` or
    entropy that falls during training is a sign of collapse (Zhai et al., 2023).

    Examples
    --------
    The second query prefers the first key. The three keys received the weights of two queries:

    >>> query = np.array([[0.0, 0.0], [2.0, 0.0]])
    >>> key = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> result = cattn.attention_statistics(query, key, scale=1.0, top_k=1)
    >>> result.max_weight.round(3)
    array([0.333, 0.787])
    >>> result.top_keys.ravel()
    array([0, 0])
    >>> result.received.round(3)
    array([1.12, 0.44, 0.44])
    """


@implemented_in_c
def varlen_attention_statistics(  # type: ignore[empty-body]
    query: ArrayLike,
    key: Stored,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    is_causal: Alignment = False,
    statistics: Statistic | Sequence[Statistic] | None = None,
    top_k: int = 0,
    observation_window: int | None = None,
    **options: Unpack[PackedOptions],
) -> AttentionStatistics:
    """Return the statistics of `attention_statistics` for sequences that are packed without padding.

    Sequence b gets the bits that `attention_statistics` gives batch entry b of a padded call with lengths.

    Parameters
    ----------
    query : array_like, shape (total_q, H, head_dim)
        This and every other argument but the next three keywords are the same as in `varlen_attention`.
    key : array_like or Quantized, shape (total_k, H_kv, head_dim)
        The keys.
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (B + 1,)
        The edges of the sequences.

    Returns
    -------
    AttentionStatistics
        Statistics of queries have the shape (H, total_q), statistics of keys (H, total_k), top keys and their weights
        (H, total_q, top_k). Positions and keys count from the start of their sequence.

    Other Parameters
    ----------------
    is_causal : bool or {"upper_left", "lower_right"}
        Which keys a query sees, within its sequence.
    statistics : str or sequence of str, optional
        Names of fields of `AttentionStatistics`; None means all but the top keys.
    top_k : int
        The number of largest weights of each query, with their keys, from 0 to total_k.
    observation_window : int, optional
        ``received`` and ``received_max`` count only the last queries of each sequence, this many.
    alibi_slopes, sinks : array_like of float, shape (H,) or (B, H), optional
        The slope of ALiBi, and one extra logit.

    Raises
    ------
    TypeError, ValueError
        As for `varlen_attention` and `attention_statistics`.

    See Also
    --------
    attention_statistics : Padded sequences; the meaning of each statistic.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.zeros((5, 1, 2))  # a sequence of 3 tokens, and one of 2
    >>> result = cattn.varlen_attention_statistics(x, x, [0, 3, 5], [0, 3, 5], is_causal="lower_right")
    >>> result.received.round(3)
    array([[1.833, 0.833, 0.333, 1.5  , 0.5  ]])
    """


class HeadScores(NamedTuple):
    """The result of `head_scores`: one number for each head, from 0 to 1.

    Attributes
    ----------
    previous_token : ndarray, shape (..., H)
        Mean weight of the token before.
    duplicate_token : ndarray, shape (..., H)
        Mean weight of the earlier places of the same token.
    induction : ndarray, shape (..., H)
        Mean weight of the tokens that followed the earlier places of the same token.
    """

    previous_token: Any
    duplicate_token: Any
    induction: Any

    def __repr__(self) -> str:
        return show_fields(self)

    def _repr_html_(self) -> str:
        return fields_html(self)


@in_default_mode
def head_scores(weights: ArrayLike | AttentionStatistics, token_ids: ArrayLike) -> HeadScores:
    """Return how much the heads look at the token before, at the same token, and at what followed it.

    Parameters
    ----------
    weights : array_like, shape (..., T_q, T_k), or AttentionStatistics
        Attention weights of tokens to themselves or earlier tokens, as `attention_weights` gives them; or statistics
        with top keys (``top_k=8``, say), which need no matrix: the weights of other keys count as 0.
    token_ids : array_like of int, shape (T_k,) or (..., T_k)
        The tokens. Leading axes are the axes of the weights before the heads. The queries are the last T_q of them.

    Returns
    -------
    HeadScores
        Means over the queries that have such a key: a token before, an earlier place of the same token, a token after
        such a place. Queries without weights, as of padding, do not count. NaN where none is left.

    Raises
    ------
    TypeError, ValueError
        weights is no array of floats, token_ids is none of integers, or their shapes do not fit.

    See Also
    --------
    attention_statistics : Top keys without the matrix.
    attention_rollout : How information flows through several layers.

    Notes
    -----
    The three patterns are from Elhage et al. (2021) and Olsson et al. (2022). An induction head completes
    "A B ... A" by looking at B. To find such heads, take random tokens and repeat them once.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> tokens = [5, 7, 9, 5, 7, 9]
    >>> weights = np.eye(6, k=-1)  # each token looks at the one before
    >>> weights[0, 0] = 1
    >>> scores = cattn.head_scores(weights[None], tokens)
    >>> scores.previous_token, scores.induction
    (array([1.]), array([0.]))
    """
    ids = read_integers(token_ids, "token_ids")
    if isinstance(ids, int) or ids.ndim == 0:
        raise ValueError("token_ids must have shape (T_k,) or (..., T_k), got ()")
    if isinstance(weights, AttentionStatistics):
        return _scores_of_top(weights, ids)
    matrix = as_array(weights, "weights")
    if matrix.ndim < 2 or matrix.shape[-1] != ids.shape[-1] or matrix.shape[-2] > matrix.shape[-1]:
        raise ValueError(
            f"weights must have shape (..., T_q, T_k) with T_q <= T_k = {ids.shape[-1]}, the number of token_ids, "
            f"got {matrix.shape}"
        )
    keys = np.broadcast_to(np.arange(ids.shape[-1]), matrix.shape)
    return _scores(keys, matrix, ids)


def _scores_of_top(statistics: AttentionStatistics, ids: NDArray[Any]) -> HeadScores:
    keys, weights = statistics.top_keys, statistics.top_weights
    if keys is None:
        raise ValueError("weights has no top_keys: pass top_k=8, say, to attention_statistics")
    if keys.shape[-2] > ids.shape[-1] or keys.max(initial=-1) >= ids.shape[-1]:
        raise ValueError(
            f"weights has {keys.shape[-2]} queries and keys up to {keys.max(initial=-1)}, token_ids has only "
            f"{ids.shape[-1]} tokens"
        )
    return _scores(keys, weights, ids)


def _scores(keys: NDArray[np.int64], weights: NDArray[Any], token_ids: NDArray[Any]) -> HeadScores:
    """Return the scores, given the keys and weights of each query, (..., H, T_q, n). Key index -1 means no key."""
    *lead, T_q, n = keys.shape
    T_k = token_ids.shape[-1]
    of_tokens = (*token_ids.shape[:-1], *(() if token_ids.ndim == 1 else (1,)), T_k)
    try:  # before all tokens are looked at
        fits = broadcast_shapes(of_tokens, (*lead, T_k)) == (*lead, T_k)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"token_ids has shape {token_ids.shape}, the weights {(*lead, T_q, T_k)}: its leading axes must be those "
            "before the heads"
        )
    checked: Any = as_integers(token_ids, "token_ids", -(2**63), 2**63 - 1)
    ids = np.broadcast_to(checked.reshape(of_tokens), (*lead, T_k))
    positions = np.broadcast_to(np.arange(T_k - T_q, T_k), (*lead, T_q))
    sums = [np.zeros((*lead, T_q), np.float64) for _ in range(4)]  # over the keys of each query
    for part in parts_of((*lead, T_q), max(1, PART // max(1, n))):  # signals are handled between two parts
        of_lead = tuple(i for axis, i in enumerate(part[:-1]) if axis < len(lead))
        of_part = _sums(
            keys[part], weights[part].astype(np.float64, copy=False), ids[of_lead], ids[..., T_k - T_q :][part],
            positions[part],
        )  # fmt: skip
        for whole, own in zip(sums, of_part, strict=True):
            whole[part] = own
    total, *patterns = sums
    sees = total != 0
    has_duplicate = sees & _has_earlier(ids)[..., T_k - T_q :]
    has_previous = sees & (positions > 0)
    counts = (has_previous, has_duplicate, has_duplicate)
    return HeadScores(*(_mean(own, count) for own, count in zip(patterns, counts, strict=True)))


def _sums(
    keys: NDArray[np.int64],
    weights: NDArray[np.float64],
    ids: NDArray[Any],
    own_ids: NDArray[Any],
    positions: NDArray[np.int64],
) -> tuple[NDArray[np.float64], ...]:
    """Return the sums over the keys of all weights, and of those that follow each of the three patterns."""
    own, position = own_ids[..., None], positions[..., None]
    flat = np.maximum(keys, 0)
    earlier = (keys >= 0) & (keys < position)
    duplicate = earlier & (_take(ids, flat) == own)
    # the token before the key is an earlier place of the query's token
    follows = (keys > 0) & (keys <= position) & (_take(ids, np.maximum(flat - 1, 0)) == own)
    previous = keys == position - 1
    return weights.sum(-1), *(np.where(which, weights, 0).sum(-1) for which in (previous, duplicate, follows))


def _take(ids: NDArray[Any], keys: NDArray[np.int64]) -> NDArray[Any]:
    """Return the tokens at the keys of each query."""
    shape = keys.shape
    flat: NDArray[Any] = np.take_along_axis(ids, keys.reshape(*shape[:-2], -1), -1).reshape(shape)
    return flat


def _has_earlier(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where a token occurs earlier in its sequence, in O(T log T)."""
    order = np.argsort(ids, axis=-1, kind="stable")
    ordered = np.take_along_axis(ids, order, -1)
    repeated = np.zeros(ids.shape, np.bool_)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    result = np.empty_like(repeated)
    np.put_along_axis(result, order, repeated, -1)
    return result


def _mean(sums: NDArray[np.float64], counts: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the mean over the queries that count."""
    total = np.where(counts, sums, 0).sum(-1)
    n = counts.sum(-1)
    mean: NDArray[np.float64] = np.divide(total, n, out=np.full(total.shape, np.nan), where=n > 0)
    return mean


@in_default_mode
def attention_rollout(weights: ArrayLike, *, residual: float = 0.5) -> NDArray[Any]:
    """Return how much each token of the last layer draws from each token of the input, through all layers.

    Parameters
    ----------
    weights : array_like, shape (L, ..., H, T, T)
        The attention weights of L layers, the first one first.
    residual : float
        The share of the residual connection, from 0 to 1.

    Returns
    -------
    ndarray, shape (..., T, T)
        The product of the layers' matrices, the last one first: each is the mean over the heads, mixed with the
        identity, and its rows are normalised. Rows sum to 1. The dtype is the dtype of the computation.

    Raises
    ------
    TypeError, ValueError
        weights is no array of floats of that shape, or residual is not between 0 and 1.

    See Also
    --------
    head_scores : What single heads look for.

    Notes
    -----
    The method is from Abnar and Zuidema (2020). Its matrices are T x T, so memory bounds T.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> uniform = np.full((2, 1, 2, 2), 0.5)  # two layers of one head
    >>> cattn.attention_rollout(uniform)
    array([[0.625, 0.375],
           [0.375, 0.625]])
    """
    layers = as_array(weights, "weights")
    share = _cattn._probability(residual, "residual")
    if layers.ndim < 4 or layers.shape[-1] != layers.shape[-2] or layers.shape[0] == 0 or layers.shape[-3] == 0:
        raise ValueError(
            f"weights must have shape (L, ..., H, T, T) with at least one layer and head, got {layers.shape}"
        )
    dtype: np.dtype[Any] = np.result_type(layers.dtype, np.float32)
    identity = np.eye(layers.shape[-1], dtype=dtype)
    flow: NDArray[Any] | None = None
    for layer in layers:
        mixed: NDArray[Any] = (1 - share) * layer.astype(dtype).mean(-3) + share * identity
        total = mixed.sum(-1, keepdims=True)
        mixed = np.divide(mixed, total, out=np.zeros_like(mixed), where=total > 0)
        flow = mixed if flow is None else mixed @ flow
    assert flow is not None
    return flow
