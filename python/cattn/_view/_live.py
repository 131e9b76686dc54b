"""The options that a live view starts with, in the words of its page, and whether the weights come from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._input.arrays import read_integers
from ..functional import attention_weights
from ._contents import Weights

OPTIONS = ("is_causal", "window_size", "softcap", "alibi_slopes", "sinks", "attn_mask", "query_offset")
MOST_CELLS = 2**22  # of one stage, all layers and heads; as the page has it


def live_options(contents: Weights, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a page for weights that a call with the options `given` has computed."""
    if not {"query", "key"} <= contents.operands.keys():
        raise ValueError("live needs query and key, from which the page computes the weights again")
    n_layers, heads, seqlen_q, seqlen_k = contents.shape
    if n_layers * heads * seqlen_q * seqlen_k > MOST_CELLS:
        raise ValueError(f"live computes at most {MOST_CELLS:,} weights at a time, got shape {contents.shape}")
    for name in given:
        if name not in OPTIONS:
            raise ValueError(f"live has no option {name!r}: it takes {', '.join(OPTIONS)}")
    call: dict[str, Any] = {"query_offset": contents.info["offset"], **given}
    offset = read_integers(call["query_offset"], "query_offset")
    if not isinstance(offset, int):
        raise ValueError(f"live: query_offset must be one int for all heads, got an array of shape {offset.shape}")
    if isinstance(corner := call.get("is_causal"), str):  # the page counts by an offset
        offset = seqlen_k - seqlen_q if corner == "lower_right" else 0
        call |= {"is_causal": True, "query_offset": offset}
    if not {"is_causal", "attn_mask", "window_size"} & given.keys():
        call |= _mask_of(contents, offset)
    _check(contents, call)
    options = {**_numbers_of(call, heads), "scale": contents.operand_scale, "offset": offset}
    if call.get("attn_mask") is not None:
        mask = np.asarray(call["attn_mask"])
        if mask.dtype != np.bool_ or mask.shape != (seqlen_q, seqlen_k):
            wanted = f"of bool and of shape {(seqlen_q, seqlen_k)}, one for all heads"
            raise ValueError(f"live: attn_mask must be {wanted}, got {mask.dtype} of shape {mask.shape}")
        hidden = np.argwhere(~mask)
        options["cells"] = [f"{q},{k}" for q, k in hidden]
    return options


def _mask_of(contents: Weights, offset: int) -> dict[str, Any]:
    """Return the mask of the weights: what no head of any layer looks at is hidden."""
    seen = np.any([np.asarray(layer, np.float32) != 0 for layer in contents.layers], axis=(0, 1))
    if seen.all():
        return {}
    seqlen_q, seqlen_k = seen.shape
    causal = np.tri(seqlen_q, seqlen_k, offset, dtype=bool)
    return {"is_causal": True} if np.array_equal(seen, causal) else {"attn_mask": seen}


def _numbers_of(call: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Return the options that are numbers, as the page has them; `_check` has refused what is no finite number."""
    found: dict[str, Any] = {"causal": call.get("is_causal", False) is not False}
    left, right = (-1 if side is None else int(side) for side in call.get("window_size") or (-1, -1))
    if (left, right) != (-1, -1):
        if left < 0 or (left != right and not (found["causal"] and right in (0, -1))):
            raise ValueError(f"live has windows of as many keys before a query as after it, got {(left, right)}")
        found["window"] = left + 1
    if call.get("softcap"):
        found["softcap"] = float(call["softcap"])
    if call.get("alibi_slopes") is not None:
        slopes = np.broadcast_to(np.asarray(call["alibi_slopes"], np.float32), (heads,))
        found["slopes"] = slopes.astype(float).tolist()
    if call.get("sinks") is not None:
        sinks = np.unique(np.asarray(call["sinks"], np.float32))
        if sinks.size != 1:
            raise ValueError(f"live has one sink for all heads, got {sinks.size} different ones")
        if np.isfinite(sinks[0]):  # -inf is no sink
            found["sink"] = float(sinks[0])
    return found


def _check(contents: Weights, call: Mapping[str, Any]) -> None:
    """Raise an error unless the call computes the weights."""
    heads = contents.shape[1]
    given = (contents.operands[name] for name in ("query", "key"))
    query, key = (np.repeat(array, heads // array.shape[1], axis=1) for array in given)
    for layer, q, k in zip(contents.layers, query, key, strict=True):
        weights = attention_weights(q[None], k[None], scale=contents.operand_scale, **call)[0]
        with np.errstate(invalid="ignore"):
            near = np.allclose(np.asarray(layer, np.float64), weights, rtol=0, atol=0.01, equal_nan=True)
        if not near:
            raise ValueError(
                "live: query, key, scale and the mask that the zeros show do not give these weights; pass the "
                f"other options of the call, as live={{'softcap': 30.0}}, of {', '.join(OPTIONS)}"
            )
