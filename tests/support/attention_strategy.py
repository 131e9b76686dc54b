"""Hypothesis strategies for calls of attention: any mix of shapes, strides, dtypes and options.

Every operand has its own strides, its own broadcast axes and its own range of numbers, so that code which takes a
number of its neighbour gives another result.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import cattn

INF = np.inf
F8 = ml_dtypes.float8_e4m3fn
STORED = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
# Numbers of queries around one vector, one panel, micro-tiles of 6 and 12, chains of 16, 32 rows, a block of 96 rows.
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 95, 96, 97, 191, 192]
# Numbers of keys around the 8 chains of a sum, the chains of 16 and the runs of 96 of the product with the values, the
# 64 keys that share dropout counters, a key block of 192 and a key chunk of 1536.
KEYS = [1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 383, 384]
KEYS += [95, 96, 97, 287, 288, 289, 385, 575, 577]
LONG = [1535, 1536, 1537, 1729, 3071, 3072, 3073, 4700]
HEAD_DIMS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 200, 256, 300]


# ---- arrays ----------------------------------------------------------------------------------------------------------
def lay_out(draw: st.DrawFn, a: np.ndarray) -> np.ndarray:
    """Return the same numbers with other strides."""
    kind = draw(st.sampled_from(["C", "F", "reversed", "apart", "swapped"])) if a.ndim > 0 else "C"
    if a.ndim == 1:
        a = np.repeat(a[::-1] if kind == "reversed" else a, 3)[::3] if kind in ("apart", "reversed") else a
        return a[::-1] if kind == "reversed" else a
    if kind == "F":
        return np.asfortranarray(a)
    if kind == "reversed":
        return np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1]
    if kind == "apart":
        return np.repeat(np.repeat(a, 2, axis=-1), 3, axis=-2)[..., ::3, ::2]
    return a if kind == "C" else np.ascontiguousarray(a.swapaxes(0, -2)).swapaxes(0, -2)


def broadcastable(draw: st.DrawFn, shape: list[int], one_in: int = 5) -> list[int]:
    """Return the shape with some of its sizes set to 1."""
    return [1 if draw(st.integers(1, one_in)) == 1 else n for n in shape]


def numbers(draw: st.DrawFn) -> Callable[[np.random.Generator, Any], np.ndarray]:
    """Draw what gives random numbers of a shape: normal ones, or few whole ones, with zeros of both signs and ties."""
    if draw(st.integers(0, 3)) < 3:
        return lambda rng, shape: rng.standard_normal(shape)
    return lambda rng, shape: rng.integers(-2, 3, shape) * np.where(rng.random(shape) < 0.5, 0.5, -0.5)


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Return numbers of one byte, all but NaN."""
    values = rng.integers(-128, 128, shape).astype(np.int8)
    if kind is np.int8:
        return values
    return np.where(values & 0x7F == 0x7F, np.int8(0x7E), values).view(F8)


def quantize(draw: st.DrawFn, call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with bytes for key, value or both, whose scales have shapes and strides of their own."""
    rng, found = np.random.default_rng(draw(st.integers(0, 2**32))), dict(call)
    names = draw(st.sampled_from([["key"], ["value"], ["key", "value"], ["key", "value"]]))
    for name in names if "value" in call else ["key"]:
        shape, kind = call[name].shape, draw(st.sampled_from([np.int8, F8]))
        values = lay_out(draw, random_bytes(rng, shape, kind))
        own = broadcastable(draw, list(shape), 2)
        own = own[draw(st.integers(0, len(own))) :]
        step = 0.02 if kind is np.int8 else 0.01
        scale = lay_out(draw, (rng.uniform(0.5, 1.5, own) * step).astype(np.float32))
        # Attention takes scales of any strides, as a cache has them; the constructor copies.
        found[name] = cattn.Quantized._of_checked(values, scale)
    return found


# ---- calls -----------------------------------------------------------------------------------------------------------
@st.composite
def calls(draw: st.DrawFn, long: bool = False, with_heads: bool = False) -> tuple[dict[str, Any], type]:
    """Draw the arguments of a call, and the dtype that it is computed in.

    `long`: some have several chunks of keys. `with_heads`: all have four axes or more.
    """
    stored = draw(st.sampled_from(STORED))
    dtype = np.float64 if stored == np.float64 else np.float32
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    T_q, T_k = draw(st.sampled_from([*ROWS, 0])), draw(st.sampled_from([0, *KEYS]))
    if long and draw(st.integers(0, 15)) == 15:
        T_q, T_k = draw(st.sampled_from(ROWS[:9])), draw(st.sampled_from(LONG))
    D, D_v = draw(st.sampled_from(HEAD_DIMS[:20])), draw(st.sampled_from(HEAD_DIMS[:20]))
    batch_dims = draw(st.lists(st.sampled_from([1, 2, 1, 2, 1, 2, 0]), min_size=int(with_heads), max_size=2))
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = with_heads or (len(batch_dims) > 0 and draw(st.booleans()))

    content = numbers(draw)

    def array(*shape: int) -> np.ndarray:
        return lay_out(draw, content(rng, shape).astype(stored))

    query_dims, kv_dims = [*batch_dims, *[group * kv_heads] * heads], [*batch_dims, *[kv_heads] * heads]
    key_dims = broadcastable(draw, batch_dims) + kv_dims[len(batch_dims) :]
    value_dims = broadcastable(draw, batch_dims) + kv_dims[len(batch_dims) :]
    call: dict[str, Any] = {"query": array(*query_dims, T_q, D), "key": array(*key_dims, T_k, D)}
    call["value"] = array(*value_dims, T_k, D_v)

    def mask_shape() -> list[int]:
        shape = broadcastable(draw, [*query_dims, T_q, T_k])
        return shape[draw(st.integers(0, len(shape))) :]

    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind == "bool":
        call["attn_mask"] = lay_out(
            draw, np.asarray(rng.random(mask_shape()) < draw(st.sampled_from([0.05, 0.5, 0.95])))
        )
    elif kind == "float":
        shape = mask_shape()
        mask = np.where(rng.random(shape) < 0.2, -INF, rng.standard_normal(shape) + 3).astype(dtype)
        call["attn_mask"] = lay_out(draw, mask)
    if draw(st.booleans()):
        call["bias"] = lay_out(draw, rng.standard_normal(mask_shape()).astype(dtype))
    # With four dimensions axis -3 is the heads, whether the draw says so or not.
    num_heads = query_dims[-1] if heads or len(batch_dims) == 2 else 1
    batch = batch_dims if heads or len(batch_dims) < 2 else batch_dims[:-1]

    def per_head() -> list[int]:
        shape = [*broadcastable(draw, batch), num_heads]
        return shape[draw(st.integers(0, len(batch))) :]

    def per_entry(low: int, high: int) -> np.ndarray:
        return lay_out(draw, rng.integers(low, high + 1, broadcastable(draw, batch)))

    if draw(st.booleans()):
        call["softcap"] = draw(st.sampled_from([0, 0.7, 5.0, 50]))
    if draw(st.booleans()):
        call["alibi_slopes"] = lay_out(draw, rng.random(per_head()))
    if draw(st.booleans()):
        shape = per_head()
        call["sinks"] = lay_out(draw, np.where(rng.random(shape) < 0.2, -INF, rng.standard_normal(shape) * 4))
    causal = draw(st.sampled_from([False, "upper_left", "lower_right", "offset", "offsets"]))
    call["is_causal"] = causal if causal in (False, "upper_left", "lower_right") else True
    if causal == "offset":
        call["query_offset"] = draw(st.integers(-T_q, T_k))
    elif causal == "offsets":
        call["query_offset"] = per_entry(-T_q, T_k)
    else:
        call |= {"query_offset": 0} if call["is_causal"] is False else {}
    if draw(st.booleans()):
        call["window_size"] = tuple(draw(st.sampled_from([-1, None, 0, 1, 2, 30, 150])) for _ in range(2))
    if draw(st.booleans()):
        call["query_seq_lengths"] = per_entry(0, T_q)
        call["key_value_seq_lengths"] = per_entry(0, T_k)
    if draw(st.booleans()):
        call["key_value_seq_starts"] = per_entry(0, T_k)
    if draw(st.booleans()):
        call |= {"dropout_p": draw(st.sampled_from([0.1, 0.5, 1.0])), "rng": draw(st.integers(0, 2**64 - 1))}
    if draw(st.integers(0, 3)) == 0:
        size = draw(st.sampled_from([1, 7, 16, 50, 64, 192, 300]))
        shape = broadcastable(draw, [*query_dims, -(-T_q // size), -(-T_k // size)])
        shape = shape[draw(st.integers(0, len(query_dims))) :]
        blocks = rng.random(shape) < draw(st.sampled_from([0.1, 0.5, 0.9]))
        call["block_mask"] = cattn.BlockMask(lay_out(draw, blocks), size)
    if draw(st.booleans()):
        call["scale"] = draw(st.floats(-1, 1))
    return call, dtype


@st.composite
def gathered_calls(draw: st.DrawFn, with_heads: bool = False) -> tuple[dict[str, Any], type]:
    """Draw the arguments of a call with key_indices, and the dtype that it is computed in."""
    call, dtype = draw(calls(with_heads=with_heads))
    for name in ("alibi_slopes", "dropout_p", "rng"):
        call.pop(name, None)
    if dtype == np.float32 and draw(st.integers(0, 3)) == 0:
        call = quantize(draw, call)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    T_k, n = call["key"].shape[-2], draw(st.sampled_from([0, 1, 5, 16, 33, 97, 193, 250]))
    shape = broadcastable(draw, [*call["query"].shape[:-1], n], 3)
    shape = [*shape[draw(st.integers(0, len(shape) - 1)) : -1], n]
    indices = rng.integers(0, T_k, shape) if T_k > 0 else np.full(shape, -1)
    kind = draw(st.sampled_from(["any", "in order", "one key", "no holes"]))
    if kind == "in order":
        indices = np.sort(indices, axis=-1)
    elif kind == "one key":
        indices[...] = indices.max(initial=-1)
    if kind != "no holes":
        indices = np.where(rng.random(shape) < draw(st.sampled_from([0.1, 0.5, 1])), -1, indices)
    integers = draw(st.sampled_from([np.int64, np.int32, np.int16]))
    return call | {"key_indices": lay_out(draw, indices.astype(integers))}, dtype


@st.composite
def statistics_options(draw: st.DrawFn, most_keys: int) -> dict[str, Any]:
    """Draw the options of attention_statistics alone. Each statistic may be the only one."""
    names = [name for name in cattn.AttentionStatistics._fields if not name.startswith("top")]
    wanted = st.one_of(st.none(), st.sampled_from(names), st.lists(st.sampled_from(names), unique=True))
    found = {"statistics": draw(wanted), "top_k": min(draw(st.sampled_from([0, 0, 1, 3, 8])), most_keys)}
    return found | {"observation_window": draw(st.sampled_from([None, 1, 7, 20, 96, 1000]))}


# ---- packed sequences ------------------------------------------------------------------------------------------------
@st.composite
def packed_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of varlen_attention."""
    stored, n = draw(st.sampled_from(STORED)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = [draw(st.lists(st.sampled_from([0, *most]), min_size=n, max_size=n)) for most in (ROWS[:-2], KEYS[:24])]
    edges = [np.cumsum([0, *each], dtype=draw(st.sampled_from([np.int32, np.int64]))) for each in lengths]
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads, D, D_v = group * kv_heads, draw(st.sampled_from(HEAD_DIMS[:17])), draw(st.sampled_from(HEAD_DIMS[:17]))
    shapes = {"query": (edges[0][-1], heads, D), "key": (edges[1][-1], kv_heads, D)}
    shapes |= {"value": (edges[1][-1], kv_heads, D_v)}
    content = numbers(draw)
    call: dict[str, Any] = {name: lay_out(draw, content(rng, shape).astype(stored)) for name, shape in shapes.items()}
    if draw(st.booleans()):
        call = quantize(draw, call)
    call |= {f"cu_seqlens_{x}": lay_out(draw, each) for x, each in zip("qk", edges, strict=True)}
    call |= draw(st.sampled_from([{"is_causal": "upper_left"}, {"is_causal": "lower_right"}, {"is_causal": True}, {}]))
    if call.get("is_causal") in (True, None):
        call["alignment"] = draw(st.sampled_from(["upper_left", "lower_right"]))
    if draw(st.booleans()):
        call["window_size"] = tuple(draw(st.sampled_from([-1, None, 0, 1, 9, 50])) for _ in range(2))

    def per_head() -> list[int]:
        return [*([draw(st.sampled_from([1, n]))] if draw(st.booleans()) else []), heads]

    if draw(st.booleans()):
        call["alibi_slopes"] = lay_out(draw, rng.random(per_head()))
    if draw(st.booleans()):
        shape = per_head()
        call["sinks"] = lay_out(draw, np.where(rng.random(shape) < 0.2, -INF, rng.standard_normal(shape) * 4))
    if draw(st.booleans()):
        call["softcap"] = draw(st.sampled_from([0.7, 5.0, 50]))
    if draw(st.booleans()):
        call["scale"] = draw(st.floats(-1, 1))
    if draw(st.booleans()):
        call |= {"dropout_p": draw(st.sampled_from([0.1, 0.5, 1.0])), "rng": draw(st.integers(0, 2**64 - 1))}
    return call


def pad(rows: np.ndarray, edges: np.ndarray, filling: Any = np.nan) -> np.ndarray:
    """Return packed rows (total, H, D) as a batch (B, H, longest, D)."""
    lengths = np.diff(edges)
    batch = np.full((len(lengths), int(lengths.max(initial=0)), *rows.shape[1:]), filling, rows.dtype)
    for entry, first, n in zip(batch, edges[:-1], lengths, strict=True):
        entry[:n] = rows[first : first + n]
    return batch.swapaxes(1, 2)


def unpad(batch: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Undo `pad`."""
    return np.concatenate([entry[:, :n].swapaxes(0, 1) for entry, n in zip(batch, np.diff(edges), strict=True)])


def padded(call: dict[str, Any], filling: float = np.nan) -> dict[str, Any]:
    """Return the call of scaled_dot_product_attention for the same sequences as a batch, padded with NaN."""
    found = dict(call)
    edges_q, edges_k = found.pop("cu_seqlens_q"), found.pop("cu_seqlens_k")
    found["query"] = pad(call["query"], edges_q, filling)
    for name in ("key", "value"):
        if name not in call:
            continue
        rows, scale = call[name] if isinstance(call[name], cattn.Quantized) else (call[name], None)
        found[name] = pad(rows, edges_k, 99 if rows.dtype == np.int8 else filling)
        if scale is not None:
            scales = pad(np.broadcast_to(scale, rows.shape), edges_k, 2.0**100 if filling else 1)
            found[name] = cattn.Quantized(found[name], scales)
    found |= {"query_seq_lengths": np.diff(edges_q), "key_value_seq_lengths": np.diff(edges_k)}
    if alignment := found.pop("alignment", None):
        found["query_offset"] = np.diff(edges_k) - np.diff(edges_q) if alignment == "lower_right" else 0
        found["is_causal"] = bool(found.get("is_causal"))
    return found
