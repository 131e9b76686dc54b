"""Statistics of attention weights, from their matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cattn._input.objects import Stored
from cattn._input.types import AttentionStatistics

from ._attention import normalize, pad, padded_options, score, unpad
from ._masks import Causal
from ._shared import numbers, quiet


@quiet
def attention_statistics(
    query: ArrayLike,
    key: Stored,
    attn_mask: ArrayLike | None = None,
    is_causal: Causal = False,
    *,
    statistics: str | Sequence[str] | None = None,
    top_k: int = 0,
    observation_window: int | None = None,
    sinks: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    **options: Any,
) -> AttentionStatistics:
    """Return statistics of the attention weights.

    A row with NaN among its weights, or with NaN for its log-sum-exp, has NaN in all of its statistics. The other
    options are the same as in `attention_weights`.

    Examples
    --------
    >>> attention_statistics(np.zeros((2, 3)), np.zeros((2, 3)), is_causal=True).received
    array([1.5, 0.5])
    """
    if "key_indices" in options:
        raise TypeError("attention_statistics takes no key_indices")
    problem = score((query, key, key), attn_mask, is_causal, query_seq_lengths=query_seq_lengths, **options)
    scores, visible = problem.scores, problem.visible
    w, lse = normalize(scores, visible, sinks)
    T_q, T_k = scores.shape[-2:]
    undefined = np.isnan(lse) | np.isnan(w).any(-1)
    w = np.where(visible & undefined[..., None], np.nan, w)
    best = np.where(visible & ~undefined[..., None], scores, -np.inf)
    max_score = np.where(np.isnan(lse), np.nan, best.max(-1, initial=-np.inf))
    sink = np.zeros_like(lse) if sinks is None else np.exp(numbers(sinks, "sinks")[..., None] - lse)
    order = np.argsort(-best, axis=-1, kind="stable")[..., :top_k]
    seen = np.take_along_axis(best, order, -1) > -np.inf
    top_weights = np.where(undefined[..., None], np.nan, np.take_along_axis(w, order, -1) * seen)
    n = np.asarray(T_q if query_seq_lengths is None else query_seq_lengths)[..., None, None, None]
    counts = np.arange(T_q)[:, None] >= n - (T_q if observation_window is None else observation_window)
    counted = np.where(counts, w, 0.0)
    fields = {
        "lse": lse,
        "max_score": max_score,
        "entropy": 0.0 - np.where(w == 0, 0.0, w * np.log(w)).sum(-1),  # +0 for a single key
        "max_weight": np.where(undefined, np.nan, w.max(-1, initial=0.0)),
        "sink_weight": np.where(undefined, np.nan, np.nan_to_num(sink, nan=0.0)),
        "distance": (w * np.abs(problem.position[..., None, :, None] - np.arange(T_k))).sum(-1),
        "received": counted.sum(-2),
        "received_max": counted.max(-2, initial=0.0),
    }
    names = [statistics] if isinstance(statistics, str) else list(fields) if statistics is None else statistics
    wanted = {name: fields[name] for name in names}
    if top_k:
        wanted |= {"top_keys": np.where(seen, order, -1), "top_weights": top_weights}
    if problem.one_head:  # the axis of heads is the third from the end of top keys, the second of all others
        wanted = {name: a.squeeze(-3 if name.startswith("top") else -2) for name, a in wanted.items()}
    return AttentionStatistics(**wanted)


def varlen_attention_statistics(
    query: ArrayLike,
    key: Stored,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    alignment: str | None = None,
    **keywords: Any,
) -> AttentionStatistics:
    """Return the statistics of packed sequences: (total_q, H, D), (total_k, H_kv, D).

    The sequences are padded to a batch with lengths, as in `varlen_attention`.

    Examples
    --------
    >>> x = np.zeros((3, 1, 2))
    >>> varlen_attention_statistics(x, x, [0, 2, 3], [0, 2, 3]).received
    array([[1., 1., 1.]])
    """
    edges_q, edges_k = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k)
    result = attention_statistics(
        pad(query, edges_q, "query"), pad(key, edges_k, "key"), **padded_options(edges_q, edges_k, alignment, keywords)
    )
    fields = {}
    for name, field in result._asdict().items():
        if field is None:
            continue
        edges = edges_k if name.startswith("received") else edges_q
        rows = unpad(field.reshape(*field.shape[:3], -1), edges).swapaxes(0, 1)  # (H, total, 1 or top_k)
        fields[name] = rows if name.startswith("top") else rows[..., 0]
    return AttentionStatistics(**fields)
