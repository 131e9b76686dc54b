"""Statistics of attention: cattn's and the reference's of the same call, and how far they may differ."""

from typing import Any

import numpy as np

import cattn
from cattn import reference

FIELDS = list(cattn.AttentionStatistics._fields)
NOT_OF_STATISTICS = ("value", "dropout_p", "rng")


def statistics(call: dict[str, Any], **more: Any) -> cattn.AttentionStatistics:
    return cattn.attention_statistics(**{name: a for name, a in call.items() if name not in NOT_OF_STATISTICS} | more)


def expected(call: dict[str, Any], **more: Any) -> cattn.AttentionStatistics:
    options = {name: a for name, a in call.items() if name not in NOT_OF_STATISTICS}
    return reference.attention_statistics(**options | more)


def check_statistics(actual: Any, call: dict[str, Any], options: dict[str, Any]) -> Any:
    """Check every field against the reference, whose statistics are returned. `call` has no halves."""
    wanted = expected(call, **options)
    query, key = call["query"], call["key"]
    dtype = np.float64 if query.dtype == np.float64 else np.float32
    eps, top_k = np.finfo(dtype).eps, options.get("top_k", 0)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    # a score is a sum of products that are rounded; an error of the score is a relative error of the weight
    with np.errstate(all="ignore"):
        scores = reference.attention_weights(
            **{n: a for n, a in call.items() if n not in (*NOT_OF_STATISTICS, "sinks")}, stage="mask"
        )
    size = np.abs(scores[np.isfinite(scores)]).max(initial=1)
    scale = abs(call.get("scale", 1.0)) * np.abs(query).max(initial=1, where=np.isfinite(query))
    error = eps * (8 * size + 4 * query.shape[-1] * scale + 40)
    positions = np.abs(np.asarray(call.get("query_offset", 0))).max(initial=0) + 2 * (seqlen_q + seqlen_k)
    sizes = {"entropy": 2 + np.log(max(seqlen_k, 2)), "distance": positions, "received": seqlen_q, "lse": size}
    for name in FIELDS:
        a, b = getattr(actual, name), getattr(wanted, name)
        assert (a is None) == (b is None), name
        if a is None or name == "top_keys":
            continue
        assert a.shape == b.shape, name
        assert a.dtype == dtype, name
        np.testing.assert_allclose(a, b, rtol=error, atol=error * sizes.get(name, size), err_msg=name)
    if top_k > 0:
        # keys may change places where scores differ by less than their rounding errors
        assert actual.top_keys.shape == wanted.top_keys.shape
        assert ((actual.top_keys == -1) == (wanted.top_keys == -1)).all()
    return wanted
