"""Statistics of attention weights, computed without their matrix: signatures and documentation of the C functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, Unpack

from numpy.typing import ArrayLike

from .._input.objects import Stored
from .._input.types import Alignment, AttentionStatistics
from ._options import DenseOptions, PackedOptions
from ._signature import implemented_in_c

__all__ = ["attention_statistics", "varlen_attention_statistics"]

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
    key : array_like or Quantized, shape (..., T_k, head_dim)
        Keys.
    attn_mask : array_like, optional
        Boolean (True where the key is visible) or float (added).
    is_causal : bool or {"upper_left", "lower_right"}
        Which keys a query sees.

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
