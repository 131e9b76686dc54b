"""What a view shows, made ready for the page: a description in JSON's types, and one string of bytes.

The bytes are the arrays in their own dtype, so that the page shows exactly their numbers. What is larger than a limit
is reduced in blocks; the exact part in which the reader is interested is then sent on request.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._input.arrays import as_array, common_dtype, is_bfloat16
from .._input.types import AttentionStatistics, summary
from .._plot import as_text, strings, take_entry, token_labels
from ..functional import get_alibi_slopes

Array = NDArray[Any]
WeightsOf = Callable[[int, int, slice], Any]

WEIGHTS = "(T_q, T_k), (H, T_q, T_k) or (L, H, T_q, T_k)"
# Statistics in the order of their strips: the name of the field, its title, whether it belongs to queries or keys.
FIELDS = {
    "entropy": ("entropy (nats)", "queries"),
    "distance": ("mean distance (tokens)", "queries"),
    "max_weight": ("largest weight", "queries"),
    "received": ("weight received", "keys"),
    "received_max": ("largest weight received", "keys"),
    "sink_weight": ("weight of the sink", "queries"),
    "lse": ("log-sum-exp", "queries"),
    "max_score": ("largest score", "queries"),
}


class Rectangle(NamedTuple):
    """Queries q0 to q1 and keys k0 to k1 of one head."""

    layer: int
    head: int
    q0: int
    q1: int
    k0: int
    k1: int


def to_bytes(array: Array) -> bytes:
    """Return the numbers of an array, little-endian."""
    whole = np.ascontiguousarray(array)
    if is_bfloat16(whole.dtype):
        whole = whole.view(np.uint16)
    return whole.astype(whole.dtype.newbyteorder("<"), copy=False).tobytes()


def _largest_of_blocks(matrices: Array, block: int) -> Array:
    """Return the number farthest from 0 of each block of block x block; NaN where it has one."""
    if block == 1:
        return matrices
    numbers = matrices.astype(np.float32) if is_bfloat16(matrices.dtype) else matrices
    numbers = np.where(np.isneginf(numbers), 0, numbers)  # hidden scores
    low = high = numbers
    for axis in (-2, -1):
        starts = np.arange(0, matrices.shape[axis], block)
        low, high = np.minimum.reduceat(low, starts, axis), np.maximum.reduceat(high, starts, axis)
    return np.where(-low > high, low, high).astype(matrices.dtype)


def _means_of_blocks(rows: Array, block: int) -> Array:
    if block == 1:
        return rows
    starts = np.arange(0, rows.shape[-1], block)
    counts = np.diff(starts, append=rows.shape[-1])
    with np.errstate(invalid="ignore"):  # inf - inf
        return (np.add.reduceat(rows, starts, -1, dtype=np.float64) / counts).astype(rows.dtype)


def _smallest_block(size: Callable[[int], int], most: int) -> int:
    """Return the smallest power of two with size(block) <= most, or the first beyond all sizes."""
    return next(block for block in (1 << n for n in itertools.count()) if size(block) <= most or block > 2**20)


def _layer_names(layers: Sequence[object] | None, count: int) -> list[str] | None:
    return None if layers is None else [as_text(name) for name in strings(layers, "layers", count, "layers")]


def _sum_to_1(layer: Array) -> bool:
    """Return whether each row of weights sums to 1, or to 0 where it sees no key."""
    with np.errstate(invalid="ignore", over="ignore"):
        sums = (layer.astype(np.float32) if is_bfloat16(layer.dtype) else layer).sum(axis=-1, dtype=np.float64)
        return bool(((np.abs(sums - 1) <= (0.03 if layer.dtype.itemsize == 2 else 1e-3)) | ~(np.abs(sums) > 0)).all())


class Weights:
    """Attention weights of layers and heads."""

    def __init__(
        self, given: Any, tokens: Any, query_tokens: Any, layers: Any, entry: int | None = None, one_call: bool = False
    ) -> None:
        self.layers, batch = _matrices(given, entry, one_call)
        self.dtype = common_dtype(self.layers, "weights")
        heads, seqlen_q, seqlen_k = self.layers[0].shape
        self.shape = (len(self.layers), heads, seqlen_q, seqlen_k)
        keys, queries = token_labels(tokens, query_tokens, seqlen_q, seqlen_k)
        offset = max(seqlen_k - seqlen_q, 0)
        same = seqlen_q == seqlen_k if keys is None else queries == keys[offset:]
        if queries is not None and keys is None:
            same = False
        low, high = 0.0, 0.0
        for layer in self.layers:
            finite = layer[np.isfinite(layer)]
            low, high = min(low, float(finite.min(initial=0))), max(high, float(finite.max(initial=0)))
        are_weights = all(map(_sum_to_1, self.layers))
        if low < 0 and not are_weights and not any(np.isneginf(layer).any() for layer in self.layers):
            warnings.warn(
                "weights has negative numbers, and its rows do not sum to 1: these are scores or queries, which are "
                "drawn as they are; attention_weights(query, key) computes weights",
                stacklevel=4,
            )
        self.info: dict[str, Any] = {
            "kind": "weights",
            "title": "attention weights",
            "entry": f"entry {0 if entry is None else int(entry)} of {batch}" if batch > 1 else "",
            "note": "" if are_weights else "Rows do not sum to 1: these are no weights, or dropout has changed them.",
            # the axis before the heads: of one array, as attention_weights returns it, that is a batch
            "axis": "entry" if layers is None and getattr(given, "ndim", 0) == 4 else "layer",
            "n_layers": len(self.layers),
            "heads": heads,
            "T_q": seqlen_q,
            "T_k": seqlen_k,
            "offset": offset,
            "shared": same,
            "tokens": keys,
            "query_tokens": None if same else queries,
            "layers": _layer_names(layers, len(self.layers)),
            "dtype": self.dtype.name,
            "low": low,
            "high": high,
        }
        self.scale = "linear" if seqlen_k <= 32 or low < 0 else "log"
        self.operands: dict[str, Array] = {}
        self.operand_scale: float | None = None
        self.live: dict[str, Any] | None = None  # the options that a live view starts with

    def add_operands(self, given: dict[str, Any], entry: int | None, scale: float | None) -> None:
        """Keep queries, keys and values for the page, (L, H, T, D) in float32 or float64."""
        n_layers, heads, seqlen_q, seqlen_k = self.shape
        for name, obj in given.items():
            if obj is None:
                continue
            array = as_array(obj, name)
            if n_layers == 1 or entry is not None:
                array, _ = take_entry(array, entry, name)
            array = array.reshape((1,) * (4 - array.ndim) + array.shape)
            length = seqlen_q if name == "query" else seqlen_k
            fits = array.ndim == 4 and array.shape[0] == n_layers and array.shape[2] == length
            if not fits or array.shape[1] == 0 or heads % array.shape[1]:
                wanted = (*((n_layers,) if n_layers > 1 else ()), heads, length, "D")
                text = "(" + ", ".join(map(str, wanted)) + ")"
                raise ValueError(f"{name} must have shape {text}, as the weights, got {np.shape(obj)}")
            self.operands[name] = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
        if {"query", "key"} <= self.operands.keys():
            widths = self.operands["query"].shape[-1], self.operands["key"].shape[-1]
            if widths[0] != widths[1]:
                raise ValueError(f"query and key must have one head_dim, got {widths[0]} and {widths[1]}")
        self.operand_scale = None if scale is None else float(scale)
        if scale is not None and not np.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")

    def __repr__(self) -> str:
        return f"{self.dtype} {self.shape}"

    def interesting(self) -> tuple[list[int], int, int]:
        """Return the sharpest head, [layer, head], and query and key of its largest weight off the diagonal.

        The sharpest head has the largest mean of the largest weights of each query. Query and key are -1, the last
        ones, where all weights lie on the diagonal.
        """
        best, where = -np.inf, [0, 0]
        for i, layer in enumerate(self.layers):
            with np.errstate(invalid="ignore", over="ignore"):
                means = layer.max(axis=-1).astype(np.float64).mean(axis=-1)
            head = int(np.argmax(np.nan_to_num(means, nan=-np.inf)))
            if means[head] > best:
                best, where = float(means[head]), [i, head]
        seqlen_q, offset = self.shape[2], self.info["offset"]
        middle = seqlen_q // 2 if seqlen_q > 2 else 0  # the first queries see few keys
        rows = self.layers[where[0]][where[1], middle:].astype(np.float32)
        rows[~np.isfinite(rows)] = 0
        at = np.arange(len(rows))
        rows[at, np.minimum(at + middle + offset, rows.shape[1] - 1)] = 0
        if not rows.any():
            return where, -1, -1
        query, key = np.unravel_index(int(np.argmax(rows)), rows.shape)
        return where, int(query) + middle, int(key)

    def pack(self, most: int, *, rounds: bool = False) -> tuple[dict[str, Any], bytes]:
        """Return the description and at most so many bytes of weights.

        What is too large is rounded to float16, if that may be and is enough, or reduced in blocks.
        """
        n_layers, heads, seqlen_q, seqlen_k = self.shape
        dtype = self.dtype
        whole = n_layers * heads * seqlen_q * seqlen_k
        largest = max(-self.info["low"], self.info["high"])
        if rounds and dtype.itemsize > 2 and whole * dtype.itemsize > most >= 2 * whole and largest < 65504:
            dtype = np.dtype(np.float16)

        def size(block: int) -> int:
            cells = -(-seqlen_q // block) * -(-seqlen_k // block)
            return int(n_layers * heads * cells * dtype.itemsize)

        block = _smallest_block(size, most)
        data = b"".join(to_bytes(_largest_of_blocks(layer, block).astype(dtype)) for layer in self.layers)
        info = {**self.info, "block": block, "dtype": dtype.name, "bytes": len(data)}
        info["rounded"] = "float16" if dtype != self.dtype else ""
        return info, data + self._pack_operands(info, len(data), most)

    def _pack_operands(self, info: dict[str, Any], start: int, most: int) -> bytes:
        """Return the bytes of queries, keys and values, and describe them in `info`."""
        if not self.operands or sum(array.nbytes for array in self.operands.values()) > most:
            return b""
        data = bytes(-start % 8)
        described: dict[str, Any] = {"scale": self.operand_scale}
        for name, array in self.operands.items():
            part = to_bytes(array)
            place = {"start": start + len(data), "bytes": len(part), "dtype": array.dtype.name}
            described[name] = {**place, "heads": array.shape[1], "width": array.shape[-1]}
            data += part + bytes(-len(part) % 8)
        info["operands"] = described
        return data

    def pack_live(self) -> tuple[dict[str, Any], bytes]:
        """Return the description of a live view, and the bytes of queries, keys and values, one head each."""
        heads = self.shape[1]
        info, data = {**self.info, "options": self.live, "opens": self.interesting()[0]}, b""
        info["slopes"] = get_alibi_slopes(heads).astype(float).tolist()
        for name, array in self.operands.items():
            whole = np.repeat(array.astype(np.float32), heads // array.shape[1], axis=1)
            part = to_bytes(whole)
            info[name] = {"start": len(data), "bytes": len(part), "width": whole.shape[-1]}
            data += part
        return info, data

    def window(self, where: Rectangle) -> Array:
        """Return a part of a head's matrix."""
        return self.layers[where.layer][where.head, where.q0 : where.q1, where.k0 : where.k1].astype(self.dtype)


def _matrices(given: Any, entry: int | None, one_call: bool) -> tuple[list[Array], int]:
    """Return the weights of each layer, (H, T_q, T_k), and the number of entries of the batch.

    Four axes are layers, unless the weights are of one call, or an entry of a batch is asked for.
    """
    batch = 1
    if isinstance(given, (list, tuple)) and given and all(getattr(item, "ndim", 0) >= 3 for item in given):
        taken = [take_entry(as_array(item, f"weights[{i}]"), entry, f"weights[{i}]") for i, item in enumerate(given)]
        layers, batch = [layer for layer, _ in taken], taken[0][1]
        for i, layer in enumerate(layers):
            if layer.shape != layers[0].shape:
                raise ValueError(
                    f"weights[{i}] must have the shape of weights[0], {layers[0].shape}, got {layer.shape}"
                )
    else:
        array = as_array(given, "weights")
        if array.ndim < 2:
            raise ValueError(f"weights must have shape {WEIGHTS}, got {array.shape}")
        if one_call or (entry is not None and array.ndim <= 4):
            array, batch = take_entry(array, entry, "weights")
        elif array.ndim > 4 and entry is not None:  # (L, B, H, T_q, T_k)
            taken = [take_entry(layer, entry, "weights[0]") for layer in array]
            array, batch = np.stack([layer for layer, _ in taken]), taken[0][1]
        elif array.ndim > 4:  # a batch of one, before the layers or after them
            array = array.reshape(_without_ones(array.shape, 4, "weights", WEIGHTS))
        layers = list(array) if array.ndim == 4 else [array if array.ndim == 3 else array[None]]
    if not layers or layers[0].size == 0:
        shape = layers[0].shape if layers else np.shape(given)
        raise ValueError(f"weights must not be empty, got shape {shape}")
    return layers, batch


def _without_ones(shape: tuple[int, ...], ndim: int, name: str, wanted: str) -> tuple[int, ...]:
    """Return the shape with ndim axes: axes of length 1 before the last three go, the first ones first."""
    sizes = list(shape)
    while len(sizes) > ndim:
        if 1 not in sizes[:-3]:
            raise ValueError(f"{name} must have shape {wanted}, got {shape}: choose an entry of the batch by entry=")
        sizes.remove(1)
    return tuple(sizes)


class Statistics:
    """AttentionStatistics of layers and heads."""

    def __init__(
        self,
        given: AttentionStatistics,
        tokens: Any,
        query_tokens: Any,
        layers: Any,
        weights_of: WeightsOf | None,
        entry: int | None = None,
    ) -> None:
        self.weights_of = weights_of
        given, batch = _entry_of(given, entry)
        self.fields: dict[str, Array] = {}
        for name in FIELDS:
            if getattr(given, name) is not None:
                array = as_array(getattr(given, name), f"weights.{name}")
                self.fields[name] = _rows(array, f"weights.{name}", 1)
        if len(self.fields) > 1 and "sink_weight" in self.fields and not self.fields["sink_weight"].any():
            del self.fields["sink_weight"]  # without sinks
        if not self.fields:
            raise ValueError("weights is an AttentionStatistics without a statistic for each token")
        self.top_keys, self.top_weights = None, None
        if given.top_keys is not None:
            self.top_keys = _rows(np.asarray(given.top_keys), "weights.top_keys", 2)
            self.top_weights = _rows(as_array(given.top_weights, "weights.top_weights"), "weights.top_weights", 2)
        self.shape = next(iter(self.fields.values())).shape[:2]
        lengths = {FIELDS[name][1]: array.shape[-1] for name, array in self.fields.items()}
        seqlen_q = lengths.get("queries", lengths.get("keys", 0))
        seqlen_k = lengths.get("keys", seqlen_q)
        if "keys" not in lengths and tokens is not None and not isinstance(tokens, str):
            seqlen_k = max(seqlen_k, len(tokens))
        if seqlen_q == 0 or seqlen_k == 0 or 0 in self.shape:
            raise ValueError(f"weights must not be empty, got statistics of {seqlen_q} queries and {seqlen_k} keys")
        self._check_shapes(seqlen_q, seqlen_k)
        keys, queries = token_labels(tokens, query_tokens, seqlen_q, seqlen_k)
        offset = max(seqlen_k - seqlen_q, 0)
        same = seqlen_q <= seqlen_k if queries is None else keys is not None and queries == keys[offset:]
        self.info: dict[str, Any] = {
            "kind": "statistics",
            "title": "attention statistics",
            "entry": f"entry {entry} of {batch}" if batch > 1 else "",
            "axis": "entry" if layers is None else "layer",
            "n_layers": self.shape[0],
            "heads": self.shape[1],
            "T_q": seqlen_q,
            "T_k": seqlen_k,
            "length": max(seqlen_k, seqlen_q + offset),
            "offset": offset,
            "shared": same,
            "tokens": keys,
            "query_tokens": None if same else queries,
            "layers": _layer_names(layers, self.shape[0]),
            "windows": weights_of is not None,
        }
        self.scale = "linear"

    def _check_shapes(self, seqlen_q: int, seqlen_k: int) -> None:
        for name, array in self.fields.items():
            wanted = (*self.shape, seqlen_q if FIELDS[name][1] == "queries" else seqlen_k)
            if array.shape != wanted:
                raise ValueError(f"weights.{name} must have shape {wanted}, as the other statistics, got {array.shape}")
        for name, top in (("top_keys", self.top_keys), ("top_weights", self.top_weights)):
            if top is not None and top.shape[:3] != (*self.shape, seqlen_q):
                raise ValueError(f"weights.{name} must have shape {(*self.shape, seqlen_q, 'k')}, got {top.shape}")

    def __repr__(self) -> str:
        return ", ".join(f"{name}=<{summary(array)}>" for name, array in self.fields.items())

    def interesting(self) -> tuple[list[int], int, int]:
        """Return the head, query and key to open at: the first head and the last token."""
        return [0, 0], -1, -1

    def pack(self, most: int, *, rounds: bool = False) -> tuple[dict[str, Any], bytes]:
        """Return the description and about so many bytes; the keys of the largest weights only if they fit."""

        def size(block: int) -> int:
            parts = [array.nbytes // array.shape[-1] * -(-array.shape[-1] // block) for array in self.fields.values()]
            return int(sum(parts))

        block = _smallest_block(size, most)
        data = bytearray()

        def place(array: Array) -> dict[str, Any]:
            data.extend(bytes(-len(data) % 8))
            start = len(data)
            data.extend(to_bytes(array))
            return {"start": start, "bytes": len(data) - start, "dtype": array.dtype.name}

        fields = []
        for name, array in self.fields.items():
            title, kind = FIELDS[name]
            offset = self.info["offset"] if kind == "queries" else 0
            where = place(_means_of_blocks(array, block))
            fields.append({"name": name, "title": title, "length": array.shape[-1], "offset": offset, **where})
            fields[-1]["block"] = block
        info = {**self.info, "fields": fields, "top": None, "top_k": 0}
        if self.top_keys is not None and self.top_weights is not None and self.top_keys.shape[-1] > 0:
            keys = self.top_keys.astype(np.int32)
            if len(data) + keys.nbytes + self.top_weights.nbytes <= most:
                info.update(top={"keys": place(keys), "weights": place(self.top_weights)}, top_k=keys.shape[-1])
        return info, bytes(data)

    def window(self, where: Rectangle) -> Array:
        """Return a part of a head's matrix, as weights_of computes it."""
        if self.weights_of is None:
            raise ValueError("the view was made without weights_of")
        rows = as_array(self.weights_of(where.layer, where.head, slice(where.q0, where.q1)), "weights_of(...)")
        wanted = (where.q1 - where.q0, self.info["T_k"])
        rows = rows.reshape(rows.shape[-2:]) if rows.ndim > 2 and rows.size == np.prod(wanted) else rows
        if rows.shape != wanted:
            raise ValueError(f"weights_of(...) must return the shape (queries, T_k) = {wanted}, got {rows.shape}")
        return rows[:, where.k0 : where.k1]


def _entry_of(given: AttentionStatistics, entry: int | None) -> tuple[AttentionStatistics, int]:
    """Return the statistics of one entry of a batch, (B, H, T), and the number of entries."""
    if entry is None:
        return given, 1
    parts, batch = {}, 1
    for name, array in given._asdict().items():
        rank = 3 if name in ("top_keys", "top_weights") else 2  # heads, tokens, and the largest weights of each
        if array is not None:
            parts[name], batch = take_entry(
                as_array(array, name) if rank == 2 else np.asarray(array), entry, name, rank
            )
    return given._replace(**parts), batch


def _rows(array: Array, name: str, trailing: int) -> Array:
    """Return a statistic as (layers, heads, ...). Axes of length 1 before these two go."""
    lead, rest = list(array.shape[: array.ndim - trailing]), array.shape[array.ndim - trailing :]
    if array.ndim < trailing:
        raise ValueError(f"{name} must have at least {trailing} axes, got shape {array.shape}")
    while len(lead) > 2:
        if 1 not in lead[:-1]:
            raise ValueError(
                f"{name} must have the shape of one text, (L, H, T), got {array.shape}: take one of the batch"
            )
        lead.remove(1)
    return array.reshape((*[1] * (2 - len(lead)), *lead, *rest))
