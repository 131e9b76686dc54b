"""Options whose bits are the bits of another call: a row says which one; each file of questions asks every row.

A new option gets a row here, and all questions are asked: forward pass, gradients, tangents, statistics and stages,
strides, poison and random calls. A question that an option refuses is in the row with the error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import cattn
from cattn.reference._attention import repeat_blocks
from cattn.reference._masks import Ranges
from support import BF16, HALVES, INF, NAN, WORDS, assert_same_bits, each, looped, quiet, widened, without
from support.calls import (
    F8,
    calls,
    chooser,
    dequantized,
    gathered_calls,
    in_bytes,
    quantize,
    tokens_first,
)
from support.derivatives import TANGENTS
from support.laws import poisoned

Call = dict[str, Any]
Ask = Callable[[Call], Any]  # makes the call, and returns a tuple of arrays with names
PREFERRED = cattn._cattn._get_isa()
BLOCK, CHUNK = cattn._cattn._block_keys(), cattn._cattn._chunk_keys()
FLOATS: list[Any] = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ABOUT_VALUES = ("value", "dropout_p", "rng", "gate", "value_tangent")


@dataclasses.dataclass(frozen=True, repr=False)
class Row:
    """An option, and the equivalent of a call that has it."""

    option: str
    cases: dict[str, Callable[[Any], Call]]  # by the dtype of the arrays
    equivalent: Callable[[Ask, Call], Any]  # what the question gives for the other call, in the form of this one
    drawn: st.SearchStrategy[Call]
    dtypes: list[Any] = dataclasses.field(default_factory=lambda: FLOATS)
    poisoned: Callable[[Call], list[Call]] = lambda call: []  # the call with other numbers where nothing is seen
    seen: Callable[[Call, str, np.ndarray], np.ndarray] = lambda call, stage, weights: weights  # of weights of a stage
    refuses: dict[str, str] = dataclasses.field(default_factory=dict)  # question: text of the error
    derivatives: bool = True  # whether those, too, are an equivalence
    sums_of_its_own: tuple[str, ...] = ()  # who shares an array, so that its gradient is added in an order of its own

    def __repr__(self) -> str:
        return self.option


def lengths_of(call: Call) -> tuple[int, int]:
    return call["query"].shape[-2], call["key"].shape[-2]


def assert_same_fields(found: Any, right: Any, what: str) -> None:
    for name, a in right._asdict().items():
        b = getattr(found, name)
        assert (b is None) == (a is None), f"{name}, {what}"
        if a is not None and name != "dropout_seed":
            assert_same_bits(b, a, f"{name}, {what}")


def assert_equivalent(row: Row, ask: Ask, call: Call, what: str) -> None:
    """Compare what the question gives for the call and for the equivalent one, with one thread and with three."""
    with cattn.num_threads(1):
        right = row.equivalent(ask, call)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            assert_same_fields(ask(call), right, f"{what}, {threads} threads")


def outputs(call: Call) -> cattn.AttentionOutput:
    """Return attention with every optional output. Check that these do not change the output itself."""
    extras = {"return_weights": True, "return_lse": True, "return_dropout_mask": "dropout_p" in call}
    result: cattn.AttentionOutput = cattn.scaled_dot_product_attention(**call, **extras)
    assert_same_bits(cattn.scaled_dot_product_attention(**call), result.out, "output without extras")
    return result


def numbers(seed: Any, *shape: int, dtype: Any = np.float64) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def attend(
    T_q: int, T_k: int, dtype: Any = np.float32, *, heads: int = 4, D: int = 11, D_v: int = 19, **options: Any
) -> Call:
    """Return a call of grouped heads; an option that is a function makes its value from the dtype."""
    shapes = {"query": (2, heads, T_q, D), "key": (2, 2, T_k, D), "value": (2, 2, T_k, D_v)}
    arrays = {name: numbers([i, T_q, T_k], *shapes[name], dtype=dtype) for i, name in enumerate(shapes)}
    return arrays | options


def bools(seed: int, *shape: int, p: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < p


SCORES: Call = {"softcap": 3.0, "alibi_slopes": [0.5, 0.1, 0.02, 0.0], "window_size": (150, 0)}
SINKS = np.broadcast_to([0.5, -1, -INF, 2.0], (2, 4))  # each entry has its own, so that it has its own gradient
DROPOUT: Call = {"dropout_p": 0.3, "rng": 9}
LOWER: Call = {"is_causal": "lower_right"}


def case(*sizes: int, **options: Any) -> Callable[[Any], Call]:
    return lambda dtype: attend(*sizes, dtype, **options)


# ---- block_mask: a mask of single pairs ------------------------------------------------------------------------------
def of_pairs(call: Call) -> Call:
    """Return the call with a mask of single pairs in the place of the blocks."""
    call = dict(call)
    mask = repeat_blocks(*call.pop("block_mask"), *lengths_of(call))
    given = call.get("attn_mask")
    if given is None or given.dtype == bool:
        return call | {"attn_mask": mask if given is None else given & mask}
    return call | {"attn_mask": np.where(mask, given, given.dtype.type(-INF))}


def unseen_by_blocks(call: Call) -> list[Call]:
    """Poison in the keys and values that no query of the group sees."""
    heads = [call[name].shape[:-2] for name in ("query", "key", "value")]
    if heads != [(2, 4), (2, 2), (2, 2)] or 0 in lengths_of(call):
        return []
    mask = np.broadcast_to(of_pairs(call)["attn_mask"], (2, 4, *lengths_of(call)))
    hidden = ~mask.reshape(2, 2, -1, mask.shape[-1]).any(axis=2)[..., None]
    return [
        call | {name: np.where(hidden, call[name].dtype.type(poison), call[name]) for name in ("key", "value")}
        for poison in (NAN, INF)
    ]


def blocked(size: int, T_q: int, T_k: int, p: float = 0.3, **options: Any) -> Callable[[Any], Call]:
    heads = options.get("heads", 4)
    blocks = options.pop("blocks", None)
    if blocks is None:
        blocks = bools(size, 2, heads, -(-T_q // size), -(-T_k // size), p=p)
    return case(T_q, T_k, block_mask=cattn.BlockMask(blocks, size), **options)


def boolean(call: Call) -> Call:
    """Return the call without a float mask, whose gradient would have the shape of the blocks' mask."""
    return without(call, "attn_mask") if "attn_mask" in call and call["attn_mask"].dtype != bool else call


@st.composite
def with_blocks(draw: st.DrawFn) -> Call:
    call = boolean(without(draw(calls())[0], "block_mask"))
    size = draw(st.sampled_from([1, 7, 16, 50, 64, 192]))
    blocks = bools(draw(st.integers(0, 2**32)), *(-(-n // size) for n in lengths_of(call)), p=0.4)
    return call | {"block_mask": cattn.BlockMask(blocks, size)}


DIAGONAL = np.add.outer(np.arange(100), np.arange(400))
BLOCK_MASK = Row(
    "block_mask",
    {
        **{f"blocks of {size}": blocked(size, 110, 400) for size in (1, 7, 16, 50, 64, 128, 192, 200, 500)},
        "chunks without a visible key": blocked(64, 20, 2 * CHUNK + 900, 0.02),
        "a row of blocks is hidden": blocked(
            50, 300, 200, blocks=np.arange(6)[:, None] % 2 == np.zeros(4, int), sinks=SINKS
        ),
        "nothing is visible": blocked(64, 100, 300, -1),
        "every fourth block": blocked(16, 110, 400, blocks=DIAGONAL[:7, :25] % 4 == 0),
        "every other key": blocked(1, 100, 400, blocks=DIAGONAL % 2 == 0),
        "documents, causal": blocked(
            16, 230, 230, blocks=np.arange(15)[:, None] // 4 == np.arange(15) // 4, is_causal=True
        ),
        "a step of decoding": blocked(64, 1, 2000, **LOWER),
        "a few steps": blocked(50, 6, 1700, **LOWER),
        "few tokens": blocked(7, 2, 30, heads=2),
        "window, softcap, slopes, sinks": blocked(16, 110, 400, 0.5, sinks=SINKS, **LOWER, **SCORES),
        "lengths and starts": blocked(
            50, 200, 300, 0.5, key_value_seq_lengths=[290, 130], query_seq_lengths=[200, 7],
            key_value_seq_starts=[60, 0],
        ),
        "masks and dropout": blocked(
            16, 140, 300, attn_mask=bools(1, 140, 300, p=0.8), bias=numbers(2, 4, 1, 300), **DROPOUT
        ),
        "broadcast, not contiguous": blocked(
            50, 140, 300, blocks=np.asfortranarray(bools(3, 2, 4, 3, 12))[:, 1:2, :, ::-2], bias=numbers(4, 4, 140, 1)
        ),
        "one row of blocks for all": blocked(50, 140, 300, blocks=np.arange(6) % 3 != 1),
    },
    equivalent=lambda ask, call: ask(of_pairs(call)),
    drawn=with_blocks(),
    poisoned=unseen_by_blocks,
)  # fmt: skip


# ---- key_value_seq_starts: each entry without its padding ------------------------------------------------------------
# The axes of keys, of arguments and of results.
AXES = {"key": -2, "value": -2, "attn_mask": -1, "bias": -1, "key_tangent": -2, "value_tangent": -2, "bias_tangent": -1}
PADDED = {"weights": -1, "dropout_mask": -1, "key": -2, "value": -2, "bias": -1, "received": -1, "received_max": -1}


def batch_of(call: Call) -> tuple[int, ...]:
    """Return the batch dimensions: all axes before the heads, which only calls of rank 4 and more have."""
    arrays = [call[name] for name in ("query", "key", "value") if name in call]
    rank = max(a.ndim for a in arrays)
    end = -3 if rank > 3 else -2
    return np.broadcast_shapes(*((1,) * (rank + end - len(a.shape[:end])) + a.shape[:end] for a in arrays))


def starts_of(call: Call) -> np.ndarray:
    return np.broadcast_to(call["key_value_seq_starts"], batch_of(call))


def cut(x: np.ndarray, start: int, axis: int, length: int) -> np.ndarray:
    """Return the part from `start` on, unless the axis is absent or broadcast."""
    if x.ndim < -axis or x.shape[axis] != length:
        return x
    return x[(..., slice(start, None), *(slice(None),) * (-axis - 1))]


def without_padding(call: Call, start: int) -> Call:
    """Return the call on the keys from `start` on, whose queries stand at the same places before them."""
    T_q, T_k = lengths_of(call)
    call = without(call, "key_value_seq_starts")
    if "block_mask" in call and start % call["block_mask"].size != 0:
        call = of_pairs(call)
    lengths = np.asarray(call.get("key_value_seq_lengths", T_k))
    offset = call.pop("query_offset", None)
    if call.get("is_causal", False) == "lower_right":
        offset = lengths - call.get("query_seq_lengths", T_q)
    call["query_offset"] = np.asarray(0 if offset is None else offset) - start
    call["is_causal"] = "upper_left" if call.get("is_causal", False) else False
    for name, axis in AXES.items():
        if name in call:
            call[name] = each(lambda a, axis=axis: cut(np.asarray(a), start, axis, T_k), call[name])
    if "block_mask" in call:
        blocks, size = call["block_mask"]
        call["block_mask"] = cattn.BlockMask(cut(blocks, start // size, -1, -(-T_k // size)), size)
    if "key_value_seq_lengths" in call:
        call["key_value_seq_lengths"] = np.maximum(lengths - start, 0)
    return call


def put_back(call: Call, start: int, found: Any) -> Any:
    """Put the padding back into a result: weights of zero, no gradient, keys that count from it."""
    T_k, fields = call["key"].shape[-2], found._asdict()
    for name, axis in PADDED.items():
        x = fields.get(name)
        if x is not None and x.shape[axis] == T_k - start:
            widths = [(0, 0)] * x.ndim
            widths[axis] = (start, 0)
            fill = -INF if call.get("stage") == "mask" else name == "dropout_mask"
            fields[name] = np.pad(x, widths, constant_values=np.asarray(fill).astype(x.dtype))
    if "top_k" in call and call["top_k"] > 0:
        top_k, shape = call["top_k"], (*fields["lse"].shape, call["top_k"])
        keys, weights = np.full(shape, -1), np.zeros(shape, fields["lse"].dtype)
        if fields["top_keys"] is not None:
            own = fields["top_keys"]
            keys[..., : own.shape[-1]] = np.where(own < 0, -1, own + start)
            weights[..., : own.shape[-1]] = fields["top_weights"]
        assert top_k <= T_k
        fields |= {"top_keys": keys, "top_weights": weights}
    return type(found)(**fields)


def entry_by_entry(ask: Ask, call: Call) -> Any:
    starts, found = starts_of(call), None
    for start in np.unique(starts).tolist():
        part = put_back(call, start, ask(without_padding(call, start)))
        if found is None:
            found = part
            continue
        pick = starts == start
        found = type(part)(
            *(
                np.where(pick.reshape(pick.shape + (1,) * (new.ndim - pick.ndim)), new, old)
                if isinstance(new, np.ndarray)
                else old
                for new, old in zip(part, found, strict=True)
            )
        )
    return found


def before_the_starts(call: Call, poison: float) -> Call:
    """Return the call with poison in all keys, values and biases before the starts."""
    call, starts, T_k = dict(call), starts_of(call), call["key"].shape[-2]
    for name in ("key", "value"):
        if isinstance(call[name], np.ndarray):
            hidden = np.arange(T_k) < starts[..., None]
            hidden = hidden[..., None, :, None] if call[name].ndim > 3 else hidden[..., None]
            call[name] = np.where(hidden, call[name].dtype.type(poison), call[name])
    if "bias" in call and call["bias"].shape[-1] == T_k:
        call["bias"] = np.where(np.arange(T_k) < starts.min(), poison, call["bias"])
    return call


def padded(T_q: int, T_k: int, starts: Any, **options: Any) -> Callable[[Any], Call]:
    return lambda dtype: before_the_starts(attend(T_q, T_k, dtype, key_value_seq_starts=starts, **options), NAN)


def before_starts_only(call: Call, stage: str, weights: np.ndarray) -> np.ndarray:
    """The early stages hide nothing yet."""
    if stage not in ("qk", "softcap", "bias"):
        return weights
    return np.where(np.arange(weights.shape[-1]) < starts_of(call)[:, None, None, None], 0, weights)


def each_entry_has_its_own(call: Call) -> Call:
    """Return the call in which no two batch entries share what has a gradient."""
    call, batch = dict(call), batch_of(call)
    axes = 3 if max(call[name].ndim for name in ("query", "key", "value")) > 3 else 2
    for name in ("key", "value", "attn_mask", "bias", "sinks", "gate"):
        if isinstance(call.get(name), (np.ndarray, list)):
            x = np.asarray(call[name])
            n = 1 if name == "sinks" else axes
            x = x.reshape((1,) * (n - x.ndim) + x.shape)
            shape = x.shape[-n:]
            if name in ("attn_mask", "bias"):
                shape = (*shape[:-1], call["key"].shape[-2])
                if "block_mask" in call:  # becomes part of a mask of single pairs
                    heads = max((call[a].shape[-3] for a in ("query", "key", "value") if call[a].ndim > 2), default=1)
                    shape = (heads, *lengths_of(call))[-n:]
            call[name] = np.broadcast_to(x, (*batch, *shape)).copy()
    return call


STARTS = Row(
    "key_value_seq_starts",
    {
        "many queries": padded(150, 500, [3, 401]),
        "causal": padded(150, 150, [149, 20], is_causal=True),
        "a step of decoding": padded(1, 700, [BLOCK + 5, 650], **LOWER),
        "a few steps": padded(6, 2 * CHUNK + 90, [CHUNK + 5, 100], **LOWER),
        "few tokens": padded(2, 30, [0, 29], heads=2, **LOWER),
        "no key is left": padded(100, 200, [200, 0], sinks=SINKS, **LOWER),
        "the start is after the length": padded(
            40, 300, [250, 10], key_value_seq_lengths=[200, 190], query_seq_lengths=[40, 7]
        ),
        "window, softcap, slopes, sinks": padded(99, 400, [280, 190], sinks=SINKS, **LOWER, **SCORES),
        "masks and dropout": padded(
            40, 300, [250, 10], attn_mask=bools(1, 40, 300), bias=numbers(2, 2, 4, 1, 300), **DROPOUT
        ),
        "a bias of queries": padded(130, 420, [201, 77], bias=numbers(2, 2, 4, 130, 1), **LOWER),
        "blocks": padded(130, 650, [100, 333], block_mask=cattn.BlockMask(bools(1, 2, 1, 6, 26), 25), **LOWER),
        "one start for all": padded(100, 300, 97, query_offset=np.array([200, 40]), is_causal=True),
    },
    equivalent=entry_by_entry,
    drawn=calls(["key_value_seq_starts"])
    .filter(lambda drawn: 0 not in drawn[0]["query"].shape[:-2])
    .map(lambda drawn: each_entry_has_its_own(boolean(drawn[0]) if "block_mask" in drawn[0] else drawn[0])),
    poisoned=lambda call: [before_the_starts(call, INF)],
    seen=before_starts_only,
    sums_of_its_own=("entries",),  # test_options.py has the order
)  # fmt: skip


# ---- layout: arrays with the heads first -----------------------------------------------------------------------------
# Arguments and results with tokens and heads; all others have the heads before the queries in both layouts.
ORDERED = {"query", "key", "value", "gate", "out", "grad_out", "out_tangent", *TANGENTS}
ORDERED -= {"bias_tangent", "sinks_tangent"}


def swapped(x: Any) -> Any:
    return np.swapaxes(x, -3, -2)


def heads_first(ask: Ask, call: Call) -> Any:
    call = without(call, "layout")
    found = ask(call | {name: each(swapped, x) for name, x in call.items() if name in ORDERED})
    return type(found)(
        **{name: swapped(x) if name in ORDERED and x is not None else x for name, x in found._asdict().items()}
    )


@st.composite
def in_any_form(draw: st.DrawFn) -> Call:
    call, dtype = draw(st.one_of(calls(with_heads=True), gathered_calls(with_heads=True)))
    if dtype == np.float32 and "key_indices" not in call and draw(st.integers(0, 3)) == 0:
        call = quantize(chooser(draw), call)
    return tokens_first(call)


LAYOUT = Row(
    "layout",
    {
        name: lambda dtype, of=of: tokens_first(of(dtype))
        for name, of in {
            "many queries": case(150, 500),
            "a step of decoding": case(1, 700, **LOWER),
            "a few steps": case(6, 2 * CHUNK + 90, **LOWER),
            "few tokens": case(2, 30, heads=2, **LOWER),
            "one gate for all": case(9, 30, gate=numbers(5, 1, 1, 1)),
            "window, softcap, slopes, sinks": case(99, 400, sinks=SINKS, **LOWER, **SCORES),
            "masks and dropout": case(
                40, 300, attn_mask=bools(1, 40, 300), bias=numbers(2, 2, 4, 1, 300), **DROPOUT
            ),
            "blocks": blocked(25, 130, 650, **LOWER),
        }.items()
    },
    equivalent=heads_first,
    drawn=in_any_form(),
)  # fmt: skip


# ---- Quantized: the products of bytes and scales in float32 ----------------------------------------------------------
@st.composite
def with_bytes(draw: st.DrawFn) -> Call:
    call = quantize(chooser(draw), draw(calls())[0])
    if draw(st.booleans()) and isinstance(call["value"], cattn.Quantized):
        call["value"] = cattn.Quantized(call["value"].values, draw(st.sampled_from([0.5, np.float64(0.1), [[0.25]]])))
    return call


QUANTIZED = Row(
    "Quantized",
    {
        name: lambda dtype, sizes=sizes, options=options: in_bytes(attend(*sizes, **options), *dtype)
        for name, (sizes, options) in {
            "many queries": ((150, 500), {}),
            "causal": ((150, 150), {"is_causal": True}),
            "a step of decoding": ((1, 700), {"D": 64, "D_v": 64, **LOWER}),
            "a step with wide heads": ((1, 300), {"D": 128, "D_v": 144}),
            "a step for one query head": ((1, 300), {"heads": 2, "D": 96, "D_v": 80}),
            "two heads a group, odd widths": ((1, 333), {"D": 77, "D_v": 33}),
            "a few steps": ((4, 2 * CHUNK + 90), {"D": 64, "D_v": 16, **LOWER}),
            "few tokens": ((2, 30), {"heads": 2, **LOWER}),
            "no keys": ((3, 0), {"heads": 2}),
            "no columns": ((3, 20), {"heads": 2, "D": 0, "D_v": 0}),
            "window, softcap, slopes, sinks": ((99, 400), {"sinks": SINKS, **LOWER, **SCORES}),
            "masks, lengths and dropout": (
                (40, 300),
                {
                    "attn_mask": bools(1, 40, 300), "bias": numbers(2, 4, 1, 300), "query_seq_lengths": [40, 7],
                    "key_value_seq_lengths": [290, 190], "key_value_seq_starts": [0, 25], **DROPOUT,
                },
            ),
        }.items()
    },
    equivalent=lambda ask, call: ask(dequantized(call)),
    drawn=with_bytes(),
    dtypes=[(np.int8, "token"), (np.int8, "element"), (F8, "channel"), (F8, "one")],
    refuses={"tangents": "key is quantized and has no tangent"},
)  # fmt: skip


# ---- key_indices: the keys of the list, in its order -----------------------------------------------------------------
def of_the_list(ask: Ask, call: Call) -> Any:
    """One list for all queries, which names no key twice: the call on these keys alone."""
    indices, T_k = call["key_indices"], call["key"].shape[-2]
    places = np.flatnonzero(indices >= 0)
    keys, own = indices[places], without(call, "key_indices")
    for name, axis in AXES.items():
        if name in own and np.ndim(own[name]) >= -axis:
            own[name] = np.take(own[name], keys, axis) if np.shape(own[name])[axis] == T_k else own[name]
    found = ask(own)
    fields = found._asdict()
    for name, axis in PADDED.items():
        x = fields.get(name)
        if x is not None and x.shape[axis] == len(keys):
            in_list = name in ("weights", "dropout_mask")
            shape = list(x.shape)
            shape[axis] = len(indices) if in_list else T_k
            full = np.full(shape, -INF if "stage" in call and call["stage"] != "softmax" else 0).astype(x.dtype)
            np.moveaxis(full, axis, 0)[places if in_list else keys] = np.moveaxis(x, axis, 0)
            fields[name] = full
    return type(found)(**fields)


def unlisted(call: Call) -> list[Call]:
    """Poison in the keys that the list does not name."""
    named = np.isin(np.arange(call["key"].shape[-2]), call["key_indices"])[:, None]
    return [call | {name: np.where(named, call[name], call[name].dtype.type(NAN)) for name in ("key", "value")}]


def some_list(seed: int, T_k: int, n: int) -> np.ndarray:
    return np.where(bools(seed, n, p=0.1), -1, np.random.default_rng(seed).permutation(T_k)[:n])


def listed(T_q: int, T_k: int, n: int, **options: Any) -> Callable[[Any], Call]:
    return case(T_q, T_k, key_indices=some_list(n, T_k, n), **options)


@st.composite
def with_a_list(draw: st.DrawFn) -> Call:
    """Without the options that count keys, which the call on the list's keys would count anew."""
    call = without(draw(calls())[0], "block_mask", "alibi_slopes", "dropout_p", "rng", *Ranges._fields)
    T_k = call["key"].shape[-2]
    n = min(T_k, draw(st.sampled_from([1, 5, 16, 97, 193, 250])))
    return call | {"key_indices": some_list(draw(st.integers(0, 2**32)), T_k, n)}


KEY_INDICES = Row(
    "key_indices",
    {
        "many queries": listed(150, 500, 210),
        "a step of decoding": listed(1, 700, 300),
        "a few steps": listed(6, 2 * CHUNK + 90, CHUNK + 300),
        "few tokens": listed(2, 30, 12, heads=2),
        "no keys": listed(5, 30, 0),
        "masks, softcap, sinks": listed(
            99, 400, 250, attn_mask=bools(1, 99, 400), bias=numbers(2, 2, 4, 99, 400), softcap=3.0, sinks=SINKS
        ),
    },
    equivalent=of_the_list,
    drawn=with_a_list(),
    poisoned=unlisted,
    refuses={"tangents": "key_indices", "statistics": "key_indices"},
    sums_of_its_own=("queries", "heads"),  # tests/bits/test_key_indices.py has the order
)


# ---- halves: the call on the same numbers in float32, rounded once ---------------------------------------------------
def rounded_once(ask: Ask, call: Call) -> Any:
    """Round output and weights; the log-sum-exp and statistics are float32."""
    found, fields = ask(widened(call)), {}
    kind = np.result_type(*(call[name] for name in ("query", "key", "value") if name in call))
    for name, x in found._asdict().items():
        fields[name] = quiet(x, kind) if name in ("out", "weights") and x is not None and kind in HALVES else x
    return type(found)(**fields)


STORED_AS_HALVES = Row(
    "halves",
    {
        "many queries": case(150, 500, is_causal="upper_left"),
        "a step of decoding": case(1, CHUNK + 77, **LOWER),
        "a few steps": case(7, 2 * CHUNK + 3),
        "few tokens": case(2, 30, heads=2, **LOWER),
        "window": case(130, 3 * BLOCK + 20, window_size=(40, 3), query_offset=200),
        "window, softcap, slopes, sinks": case(99, 400, sinks=SINKS, **LOWER, **SCORES),
        "masks, lengths and dropout": case(
            40, 300, attn_mask=bools(1, 40, 300), bias=numbers(2, 4, 40, 300), query_seq_lengths=[40, 7],
            key_value_seq_lengths=[290, 190], key_value_seq_starts=[0, 25], **DROPOUT,
        ),
        "bias of halves": lambda dtype: attend(101, 400, dtype, bias=numbers(3, 4, 101, 400, dtype=dtype)),
        "one head of many": case(9, 50, heads=6),
        "no key": case(5, 0),
        "large scores": case(33, 70, scale=50.0),
    },
    equivalent=rounded_once,
    drawn=calls().map(lambda drawn: drawn[0]).filter(lambda call: call["query"].dtype in HALVES),
    dtypes=HALVES,
    derivatives=False,  # they start from the rounded output
)  # fmt: skip


# ---- compute_dtype: the call on inputs that are rounded to bfloat16 already ------------------------------------------
def rounded_first(ask: Ask, call: Call) -> Any:
    near = {name: quiet(quiet(call[name], BF16), np.float32) for name in ("query", "key", "value") if name in call}
    return ask(call | near)


def with_products(call: Call, word: str) -> Call:
    """Return the call with products of bfloat16 on numbers of float32."""
    wide = {name: quiet(x, np.float32) for name, x in call.items() if isinstance(x, np.ndarray) and x.dtype in FLOATS}
    return call | wide | {"compute_dtype": word}


PRODUCTS = Row(
    "compute_dtype",
    {
        name: lambda word, of=of: with_products(of(np.float32), word)
        for name, of in STORED_AS_HALVES.cases.items()
        if name != "bias of halves"
    },
    equivalent=rounded_first,
    drawn=st.builds(with_products, calls().map(lambda drawn: drawn[0]), st.sampled_from(WORDS)),
    dtypes=list(WORDS),
    poisoned=lambda call: [poisoned(call)],
    refuses={"tangents": "compute_dtype", "statistics": "compute_dtype"},
)


# ---- gate: the output before it, times the output for a single key whose value is 1 ---------------------------------
def times_the_gate(ask: Ask, call: Call) -> Any:
    """The output is rounded to a half after the product; statistics and weights do not know the gate."""
    call = dict(call)
    gate = call.pop("gate", None)
    found = ask(widened(call))
    if gate is None or getattr(found, "out", None) is None:
        return ask(call)
    one, stored = quiet(gate, found.out.dtype), np.result_type(call["query"], call["value"])
    queries, key = np.zeros((*one.shape[:-1], 1), one.dtype), np.zeros((*one.shape[:-2], 1, 1), one.dtype)
    value = np.ones((*one.shape[:-2], 1, one.shape[-1]), one.dtype)
    factor = cattn.scaled_dot_product_attention(queries, key, value, gate=one)
    with np.errstate(all="ignore"):
        fields = {"out": quiet(found.out * factor, stored)}
    if found.weights is not None:
        fields["weights"] = quiet(found.weights, stored)
    return found._replace(**fields)


def gated(T_q: int, T_k: int, *shape: int, scale: float = 4.0, **options: Any) -> Callable[[Any], Call]:
    return lambda dtype: attend(
        T_q,
        T_k,
        dtype,
        gate=quiet(scale * numbers(5, *(shape or (2, options.get("heads", 4), T_q, 19))), dtype),
        **options,
    )


@st.composite
def with_a_gate(draw: st.DrawFn) -> Call:
    call = without(draw(calls())[0], "gate")
    result = cattn.explain(**call)
    shape = result.outputs["out"][0]
    own = [size if draw(st.booleans()) else 1 for size in shape[draw(st.integers(0, len(shape) - 2)) :]]
    return call | {"gate": quiet(10 * numbers(draw(st.integers(0, 2**32)), *own), result.outputs["out"][1])}


GATE = Row(
    "gate",
    {
        "many queries": gated(150, 500),
        "causal": gated(150, 150, is_causal=True),
        "a number of each head": gated(130, 300, 2, 4, 130, 1),
        "a number of each column": gated(9, 300, 1, 19),
        "a step of decoding": gated(1, CHUNK + 77, **LOWER),
        "a few steps": gated(6, 2 * CHUNK + 90, **LOWER),
        "few tokens": gated(2, 30, heads=2, **LOWER),
        "no keys": gated(3, 0, heads=2),
        "far from 0": gated(40, 70, scale=90.0),
        "window, softcap, slopes, sinks": gated(99, 400, sinks=SINKS, **LOWER, **SCORES),
        "masks and dropout": gated(40, 300, attn_mask=bools(1, 40, 300), bias=numbers(2, 4, 1, 300), **DROPOUT),
        "a list of keys": gated(20, 300, key_indices=np.arange(0, 300, 7)),
    },
    equivalent=times_the_gate,
    drawn=with_a_gate(),
    refuses={"tangents": "gate"},
    derivatives=False,  # another product begins them: tests/values/test_backward.py
)


ROWS = {
    row.option: row for row in (BLOCK_MASK, STARTS, LAYOUT, QUANTIZED, KEY_INDICES, STORED_AS_HALVES, PRODUCTS, GATE)
}
CASES = [(row, name) for row in ROWS.values() for name in row.cases]
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))


def name_of(case: tuple[Row, str]) -> str:
    return f"{case[0].option}, {case[1]}"


every_case = looped("row, name", CASES, ids=name_of)


def dtypes_of(row: Row, name: str, isa: str) -> list[Any]:
    """Return all dtypes for the table in use, and one for each of the others, in turn."""
    if isa == PREFERRED:
        return row.dtypes
    return [row.dtypes[list(row.cases).index(name) % len(row.dtypes)]]


def is_refused(row: Row, question: str, ask: Ask) -> bool:
    """Return whether the row refuses the question, which must be an error with the text of the row."""
    if question not in row.refuses:
        return False
    with pytest.raises((TypeError, ValueError), match=row.refuses[question]):
        ask(row.cases["few tokens"](row.dtypes[0]))
    return True
