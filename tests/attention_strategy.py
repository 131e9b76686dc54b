"""A hypothesis strategy for calls of attention: any mix of shapes, strides, dtypes and options."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

INF = np.inf
# Numbers of queries around one vector, one panel, micro-tiles of 6 and 12, chains of 16, 32 rows, a block of 96 rows.
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 95, 96, 97, 191, 192]
# Numbers of keys around the 8 chains of a sum, the chains of 16 and the runs of 96 of the product with the values, the
# 64 keys that share dropout counters, a key block of 192 and a key chunk of 1536.
KEYS = [1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 383, 384]
KEYS += [95, 96, 97, 287, 288, 289, 385, 575, 577]
LONG = [1535, 1536, 1537, 1729, 3071, 3072, 3073, 4700]
HEAD_DIMS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 200, 256, 300]


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], type]:
    """Draw the arguments of a call, and the dtype that it is computed in."""
    stored = draw(st.sampled_from([np.float32, np.float64, np.float16, ml_dtypes.bfloat16]))
    dtype = np.float64 if stored == np.float64 else np.float32
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    T_q, T_k = draw(st.sampled_from(ROWS)), draw(st.sampled_from([0, *KEYS]))
    D, D_v = draw(st.sampled_from(HEAD_DIMS[:20])), draw(st.sampled_from(HEAD_DIMS[:20]))
    batch_dims = draw(st.lists(st.integers(1, 2), max_size=2))
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = len(batch_dims) > 0 and draw(st.booleans())

    def broadcastable(shape: list[int]) -> list[int]:
        """Return the shape with some of its sizes set to 1."""
        return [1 if draw(st.integers(0, 4)) == 0 else n for n in shape]

    def lay_out(a: np.ndarray) -> np.ndarray:
        kind = draw(st.sampled_from(["C", "F", "reversed", "apart", "swapped"]))
        if kind == "F":
            return np.asfortranarray(a)
        if kind == "reversed":
            return a[..., ::-1, ::-1]
        if kind == "apart":
            return np.repeat(np.repeat(a, 2, axis=-1), 3, axis=-2)[..., ::3, ::2]
        return a if kind == "C" else np.ascontiguousarray(a.swapaxes(0, -2)).swapaxes(0, -2)

    def array(*shape: int) -> np.ndarray:
        return lay_out(rng.standard_normal(shape).astype(stored))

    query_dims, kv_dims = [*batch_dims, *[group * kv_heads] * heads], [*batch_dims, *[kv_heads] * heads]
    key_dims = broadcastable(batch_dims) + kv_dims[len(batch_dims) :]
    value_dims = broadcastable(batch_dims) + kv_dims[len(batch_dims) :]
    call: dict[str, Any] = {"query": array(*query_dims, T_q, D), "key": array(*key_dims, T_k, D)}
    call["value"] = array(*value_dims, T_k, D_v)

    def mask_shape() -> list[int]:
        shape = broadcastable([*query_dims, T_q, T_k])
        return shape[draw(st.integers(0, len(shape))) :]

    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind == "bool":
        call["attn_mask"] = lay_out_mask(rng.random(mask_shape()) < draw(st.sampled_from([0.05, 0.5, 0.95])), lay_out)
    elif kind == "float":
        shape = mask_shape()
        mask = np.where(rng.random(shape) < 0.2, -INF, rng.standard_normal(shape) + 3).astype(dtype)
        call["attn_mask"] = lay_out_mask(mask, lay_out)
    if draw(st.booleans()):
        call["bias"] = rng.standard_normal(mask_shape()).astype(dtype)
    num_heads = (query_dims[-1] if heads or len(batch_dims) == 2 else 1,)
    if draw(st.booleans()):
        call["softcap"] = draw(st.sampled_from([0, 0.7, 5.0, 50]))
    if draw(st.booleans()):
        call["alibi_slopes"] = rng.random(num_heads)
    if draw(st.booleans()):
        call["sinks"] = np.where(rng.random(num_heads) < 0.2, -INF, rng.standard_normal(num_heads) * 4)
    # With four dimensions axis -3 is the heads, whether the draw says so or not.
    batch = batch_dims if heads or len(batch_dims) < 2 else batch_dims[:-1]
    causal = draw(st.sampled_from([False, "upper_left", "lower_right", "offset", "offsets"]))
    call["is_causal"] = causal if causal in (False, "upper_left", "lower_right") else True
    if causal == "offset":
        call["query_offset"] = draw(st.integers(-T_q, T_k))
    elif causal == "offsets":
        call["query_offset"] = rng.integers(-T_q, T_k + 1, broadcastable(batch))
    else:
        call |= {"query_offset": 0} if call["is_causal"] is False else {}
    if draw(st.booleans()):
        call["window_size"] = tuple(draw(st.sampled_from([-1, None, 0, 1, 2, 30, 150])) for _ in range(2))
    if draw(st.booleans()):
        call["query_seq_lengths"] = rng.integers(0, T_q + 1, broadcastable(batch))
        call["key_value_seq_lengths"] = rng.integers(0, T_k + 1, broadcastable(batch))
    if draw(st.booleans()):
        call["key_value_seq_starts"] = rng.integers(0, T_k + 1, broadcastable(batch))
    if draw(st.booleans()):
        call |= {"dropout_p": draw(st.sampled_from([0.1, 0.5, 1.0])), "rng": draw(st.integers(0, 2**64 - 1))}
    if draw(st.integers(0, 3)) == 0:
        size = draw(st.sampled_from([1, 7, 16, 50, 64, 192, 300]))
        shape = broadcastable([*query_dims, -(-T_q // size), -(-T_k // size)])[draw(st.integers(0, len(query_dims))) :]
        blocks = rng.random(shape) < draw(st.sampled_from([0.1, 0.5, 0.9]))
        call |= {"block_mask": lay_out_mask(blocks, lay_out), "block_size": size}
    if draw(st.booleans()):
        call["scale"] = draw(st.floats(-1, 1))
    return call, dtype


def lay_out_mask(mask: np.ndarray, lay_out: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return lay_out(mask) if mask.ndim > 1 else mask
