"""Random calls of attention that work, with any mix of shapes, strides, dtypes and options.

Every choice is made by `choose(options)`, which returns one of them: from hypothesis (`drawn`), from a NumPy generator
(`from_rng`) or from the bytes of a fuzzer (`from_bytes`). The options of attention are the rows of
csrc/call/operands.h: a new row of a known kind is drawn without an edit here.

Every operand has its own strides, its own broadcast axes and its own range of numbers, so that code which takes a
number of its neighbour gives another result.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

import cattn
from cattn import _cattn
from support import quiet

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

INF = np.inf
F8 = ml_dtypes.float8_e4m3fn
STORED = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
QUANTIZED = [np.int8, F8]
# Numbers of queries around one vector, one panel, micro-tiles of 6 and 12, chains of 16, 32 rows, a block of 96 rows.
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 95, 96, 97, 191, 192]
# Numbers of keys around the 8 chains of a sum, the chains of 16 and the runs of 96 of the product with the values, the
# 64 keys that share dropout counters, a key block of 192 and a key chunk of 1536.
KEYS = [1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 383, 384]
KEYS += [95, 96, 97, 287, 288, 289, 385, 575, 577]
LONG = [1535, 1536, 1537, 1729, 3071, 3072, 3073, 4700]
HEAD_DIMS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 200, 256, 300]

Call = dict[str, Any]
Choose = Callable[[Sequence[Any]], Any]
Function = Callable[..., Any]


class Limits(NamedTuple):
    """The sizes that a call may have."""

    rows: Sequence[int] = (*ROWS, 0)
    keys: Sequence[int] = (0, *KEYS)
    widths: Sequence[int] = HEAD_DIMS[:20]


LIMITS = Limits()
SMALL = Limits(*[(0, 1, 2, 3, 5, 8, 17)] * 3)  # for a fuzzer


# ---- where the choices come from -------------------------------------------------------------------------------------
def drawn(make: Callable[..., Any], *arguments: Any, **options: Any) -> SearchStrategy[Any]:
    """Return a hypothesis strategy for make(choose, ...)."""
    from hypothesis import strategies as st

    @st.composite
    def strategy(draw: st.DrawFn) -> Any:
        return make(lambda things: draw(st.sampled_from(things)), *arguments, **options)

    return strategy()


def chooser(draw: Any) -> Choose:
    """Return the choices of a hypothesis test that draws: `draw` of a composite strategy or of data."""
    from hypothesis import strategies as st

    return lambda options: draw(st.sampled_from(options))


def from_rng(rng: np.random.Generator) -> Choose:
    return lambda options: options[int(rng.integers(len(options)))]


def from_bytes(data: bytes) -> Choose:
    """Each byte is a choice; after their end every choice is the first one."""
    left = iter(data)

    def choose(options: Sequence[Any]) -> Any:
        byte, n = next(left, 0), len(options)
        return options[byte % n if n <= 256 else byte * n >> 8]

    return choose


def one_in(choose: Choose, n: int) -> bool:
    return bool(choose(range(n)) == n - 1)


def some(choose: Choose, options: Sequence[Any], most: int) -> list[Any]:
    return [choose(options) for _ in range(choose(range(most + 1)))]


def seed(choose: Choose) -> np.random.Generator:
    """Return the numbers of an array, whose seed is chosen."""
    return np.random.default_rng(choose(range(2**32)))


# ---- arrays ----------------------------------------------------------------------------------------------------------
def lay_out(choose: Choose, a: np.ndarray) -> np.ndarray:
    """Return the same numbers with other strides."""
    kind = choose(["C", "F", "part of F", "reversed", "apart", "swapped"]) if a.ndim > 0 else "C"
    if a.ndim == 1:
        a = np.repeat(a[::-1] if kind == "reversed" else a, 3)[::3] if kind in ("apart", "reversed") else a
        return a[::-1] if kind == "reversed" else a
    if kind == "F":
        return np.asfortranarray(a)
    if kind == "part of F":
        return np.asfortranarray(np.concatenate([a, a]))[: len(a)]
    if kind == "reversed":
        return np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1]
    if kind == "apart":
        return np.repeat(np.repeat(a, 2, axis=-1), 3, axis=-2)[..., ::3, ::2]
    return a if kind == "C" else np.ascontiguousarray(a.swapaxes(0, -2)).swapaxes(0, -2)


def broadcastable(choose: Choose, shape: Sequence[int], n: int = 5) -> list[int]:
    """Return the shape with one in n of its sizes set to 1."""
    return [1 if one_in(choose, n) else size for size in shape]


def numbers(choose: Choose) -> Callable[[np.random.Generator, Any], np.ndarray]:
    """Choose what gives random numbers of a shape: normal ones, or a few halves with zeros of both signs and ties."""
    if not one_in(choose, 4):
        return lambda rng, shape: rng.standard_normal(shape)
    return lambda rng, shape: rng.integers(-2, 3, shape) * np.where(rng.random(shape) < 0.5, 0.5, -0.5)


def floats(choose: Choose, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Return normal numbers with any strides."""
    return lay_out(choose, seed(choose).standard_normal(shape).astype(dtype))


def random_bytes(rng: np.random.Generator, shape: Sequence[int], kind: Any) -> np.ndarray:
    """Return numbers of one byte, all but NaN."""
    values = rng.integers(-128, 128, shape).astype(np.int8)
    if kind is np.int8:
        return values
    return np.where(values & 0x7F == 0x7F, np.int8(0x7E), values).view(F8)


def scale_shape(shape: tuple[int, ...], scales: str) -> tuple[int, ...]:
    """Return the shape of the scales of a key or value: one for each token, channel, head or element, or one."""
    *lead, T, D = shape
    return {
        "token": (*lead, T, 1),
        "channel": (*lead, 1, D),
        "one": (),
        "element": (*lead, T, D),
        "head": (*lead, 1, 1),
    }[scales]


def in_bytes(call: Call, kind: Any, scales: str, *, names: tuple[str, ...] = ("key", "value")) -> Call:
    """Return the call with random bytes for key and value, laid out as its own arrays."""
    rng = np.random.default_rng(call["key"].shape)
    call = dict(call)
    for name in names:
        old = call[name].values if isinstance(call[name], cattn.Quantized) else call[name]
        new = np.empty_like(old, dtype=kind)  # with the order of axes in memory, if not the gaps
        new[...] = random_bytes(rng, old.shape, kind)
        step = 0.02 if kind is np.int8 else 0.01
        call[name] = cattn.Quantized(new, rng.uniform(0.5, 1.5, scale_shape(old.shape, scales)) * step)
    return call


def dequantized(call: Call) -> Call:
    """Return the call with the products of bytes and scales in float32 for each quantized key and value."""
    stored = {name: x for name, x in call.items() if isinstance(x, cattn.Quantized)}
    return call | {name: quiet(x.values, np.float32) * x.scale for name, x in stored.items()}


# ---- the rows of csrc/call/operands.h --------------------------------------------------------------------------------
class Row(NamedTuple):
    """An array among attention's options."""

    name: str
    axes: str
    kind: str
    fits: str
    calls: list[str]


OPERANDS = {row[0]: Row(*row) for row in _cattn._operands()}
NUMBERS: dict[str, str] = dict(_cattn._numbers())
# The options that change how the inputs are passed or multiplied, or what a pair of a query and a key is. Tests leave
# them out that compute on the inputs themselves.
WAYS = ("enable_gqa", "layout", "compute_dtype", "key_indices", "key_scale", "value_scale")
NOT_OF_LISTS = ("alibi_slopes", "dropout_p", "rng")  # key_indices goes with none of them
REALS = {
    "REAL": (0.5, 0.0, 1.0, -1.0, -0.3, 1e-3, 1e-42, -1e-300),
    "BOUND": (0.7, 5.0, 50, 0),
    "PROBABILITY": (0.1, 0.5, 1.0),
}
ORDERED = ("query", "key", "value", "gate", "grad_out", "out")  # what `layout` is about, and the tangents of these


def options_of(function: Function) -> list[str]:
    """Return the rows among the parameters of a public function."""
    return [name for name in inspect.signature(function).parameters if name in OPERANDS or name in NUMBERS]


class Sizes:
    """The dtypes of a call and its sizes: the batch, and each letter of the axes of an operand."""

    def __init__(self, choose: Choose, limits: Limits, *, long: bool, with_heads: bool, alone: bool) -> None:
        """`alone`: inputs of three dimensions are (heads, T, D), as with enable_gqa=True."""
        self.stored = choose(STORED)
        self.dtype: Any = np.float64 if self.stored is np.float64 else np.float32
        self.content = numbers(choose)
        T, S = choose(limits.rows), choose(limits.keys)
        if long and one_in(choose, 16):
            T, S = choose(ROWS[:9]), choose(LONG)
        self.batch = [choose([1, 2, 1, 2, 1, 2, 0]) for _ in range(choose(range(with_heads and not alone, 3)))]
        group, K = choose((1, 2, 3)), choose((1, 2))
        self.heads = with_heads or ((alone or len(self.batch) > 0) and choose((False, True)))
        if not self.heads and len(self.batch) == 2:  # with four dimensions axis -3 is the heads
            self.heads, group, K = True, 1, self.batch.pop()
        K = K if self.heads else 1
        self.block, n = choose((1, 7, 16, 50, 64, 192, 300)), choose((0, 1, 5, 16, 33, 97, 193, 250))
        self.letters = {"N": group * K if self.heads else 1, "K": K, "T": T, "S": S, "L": min(n, 8 * S + 8)}
        self.letters |= {"H": choose(limits.widths), "D": choose(limits.widths)}
        self.letters |= {"X": -(-T // self.block), "Y": -(-S // self.block)}

    def axes_of(self, letters: str) -> list[int]:
        """Return the sizes of axes; an array of pairs has no axis for heads if the inputs have none."""
        return [self.letters[c] for c in letters if c not in "NK" or self.heads or len(letters) == 1]

    def shape(self, choose: Choose, row: Row) -> list[int]:
        """Choose the shape of an operand."""
        own = self.axes_of(row.axes)
        if row.kind == "STORED":
            return [*self.batch, *own]
        if row.fits == "EXACTLY":
            return [*broadcastable(choose, self.batch), *own]
        fixed = sum(c in "XYL" or row.axes == "N" for c in row.axes)  # the last axes, which are never left out
        shape = broadcastable(choose, [*self.batch, *own])
        if row.axes == "N":
            shape[-1] = own[-1]
        return shape[choose(range(len(shape) - fixed + 1)) :]


Maker = Callable[[Choose, Sizes, np.random.Generator, list[int]], np.ndarray]


def _mask(choose: Choose, sizes: Sizes, rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    if choose((False, True)):
        return np.asarray(rng.random(shape) < choose([0.05, 0.5, 0.95]))
    return np.where(rng.random(shape) < 0.2, -INF, rng.standard_normal(shape) + 3).astype(sizes.dtype)


def _lists(choose: Choose, sizes: Sizes, rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    S = sizes.letters["S"]
    found = rng.integers(0, S, shape) if S > 0 else np.full(shape, -1)
    kind = choose(["any", "in order", "one key", "no holes"])
    if kind == "in order":
        found = np.sort(found, axis=-1)
    elif kind == "one key":
        found[...] = found.max(initial=-1)
    if kind != "no holes":
        found = np.where(rng.random(shape) < choose([0.1, 0.5, 1]), -1, found)
    return found.astype(choose([np.int64, np.int32, np.int16]))


def _stored(_: Choose, sizes: Sizes, rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    return np.asarray(sizes.content(rng, shape)).astype(sizes.stored)


def _up_to(letter: str, low: str = "") -> Maker:
    def make(_: Choose, sizes: Sizes, rng: np.random.Generator, shape: list[int]) -> np.ndarray:
        least = -sizes.letters[low] if low else 0
        return np.asarray(rng.integers(least, sizes.letters[letter] + 1, shape))

    return make


KINDS: dict[str, Maker] = {
    **dict.fromkeys(("STORED", "KEYS", "VALUES", "GATES"), _stored),
    "MASK": _mask,
    "COMPUTED": lambda _, sizes, rng, shape: np.asarray(rng.standard_normal(shape), sizes.dtype),
    "OFFSETS": _up_to("S", "T"),
    "QUERY_COUNTS": _up_to("T"),
    "KEY_COUNTS": _up_to("S"),
    "SLOPES": lambda _, sizes, rng, shape: np.asarray(rng.random(shape)),
    "LOGITS": lambda _, sizes, rng, shape: np.where(rng.random(shape) < 0.2, -INF, rng.standard_normal(shape) * 4),
    "BLOCKS": lambda choose, sizes, rng, shape: np.asarray(rng.random(shape) < choose([0.1, 0.5, 0.9])),
    "LISTS": _lists,
}
WINDOWS = [-1, None, 0, 1, 2, 30, 150]


def operand(choose: Choose, sizes: Sizes, row: Row) -> Any:
    shape = sizes.shape(choose, row)
    found = lay_out(choose, KINDS[row.kind](choose, sizes, seed(choose), shape))
    return cattn.BlockMask(found, sizes.block) if row.kind == "BLOCKS" else found


def number(choose: Choose, name: str) -> Any:
    """Return a number of attention that depends on nothing else."""
    kind = NUMBERS[name]
    if kind == "WINDOW":
        return tuple(choose(WINDOWS) for _ in range(2))
    return choose(REALS[kind])


def positions(choose: Choose, sizes: Sizes, names: Collection[str]) -> Call:
    """Choose causality and the positions of the queries, which exclude each other in part."""
    kind = choose([False, "upper_left", "lower_right", "offset", "offsets"])
    if "is_causal" not in names:  # the function is causal
        kind = choose(["offset", "offsets", *[None] * (sizes.letters["T"] <= sizes.letters["S"])])
    found: Call = {}
    if kind in ("offset", "offsets") and "query_offset" in names:
        given = operand(choose, sizes, OPERANDS["query_offset"])
        found["query_offset"] = given if kind == "offsets" else int(given.max(initial=0))
    elif kind is False and "query_offset" in names:
        found["query_offset"] = 0
    if "is_causal" in names:
        found["is_causal"] = kind if kind in (False, "upper_left", "lower_right") else True
    return found


def quantize(choose: Choose, call: Call) -> Call:
    """Return the call with bytes for key, value or both, whose scales have shapes and strides of their own."""
    found = dict(call)
    names = choose([["key"], ["value"], ["key", "value"], ["key", "value"]])
    for name in names if "value" in call else ["key"]:
        shape, kind = list(call[name].shape), choose(QUANTIZED)
        values = lay_out(choose, random_bytes(seed(choose), shape, kind))
        own = broadcastable(choose, shape, 2)
        own = own[choose(range(len(own) + 1)) :]
        scale = lay_out(choose, (seed(choose).uniform(0.5, 1.5, own) * 0.01).astype(np.float32))
        # Attention takes scales of any strides, as a cache has them; the constructor copies.
        found[name] = cattn.Quantized._of_checked(values, scale)
    return found


def options(choose: Choose, sizes: Sizes, names: Sequence[str], always: Collection[str] = ()) -> Call:
    """Choose what is neither an input nor a matter of the inputs' form: masks, positions, numbers, dropout."""
    found = positions(choose, sizes, names)
    lists = "key_indices" in always or ("key_indices" in names and one_in(choose, 6))
    for name in names:
        row = OPERANDS.get(name)
        if name in ("is_causal", "query_offset", "rng", "enable_gqa", "layout", "compute_dtype"):
            continue
        if row and row.fits == "EXACTLY":
            continue
        if name == "key_indices":
            wanted = lists
        else:
            wanted = not (lists and name in NOT_OF_LISTS) and one_in(choose, 4 if row and row.kind == "BLOCKS" else 2)
        if wanted or name in always:
            found[name] = operand(choose, sizes, row) if row else number(choose, name)
    if "dropout_p" in found:
        found["rng"] = choose(range(2**62)) * 4 + 3
    return found


def tokens_first(call: Call) -> Call:
    """Return the call with tokens before heads."""
    rank = max(call[name].ndim for name in ("query", "key", "value") if name in call)
    found = dict(call)
    for name, x in call.items():
        if not (name.removesuffix("_tangent") in ORDERED or name == "grad_out_tangent") or x is None:
            continue
        parts = (*x,) if isinstance(x, cattn.Quantized) else (x,)
        # a scale of fewer axes gets the axes that are swapped
        full = [a if a.ndim > 2 else a.reshape((1,) * (rank - a.ndim) + a.shape) for a in map(np.asarray, parts)]
        swapped = [a.swapaxes(-3, -2) for a in full]
        found[name] = cattn.Quantized._of_checked(*swapped) if len(swapped) == 2 else swapped[0]
    return found | {"layout": "bthd"}


def attention(
    choose: Choose,
    function: Function = cattn.scaled_dot_product_attention,
    *,
    without: Collection[str] = (),
    always: Collection[str] = (),
    limits: Limits = LIMITS,
    long: bool = False,
    with_heads: bool = False,
) -> tuple[Call, Sizes]:
    """Choose inputs and options of a function of attention.

    `without`: these rows are left out. `always`: these arrays are not. `long`: some calls have several chunks of keys.
    `with_heads`: all have heads.
    """
    names = [name for name in options_of(function) if name not in without]
    derived = "query_tangent" in inspect.signature(function).parameters
    sizes = Sizes(choose, limits, long=long, with_heads=with_heads, alone="enable_gqa" in names)
    call = {name: operand(choose, sizes, OPERANDS[name]) for name in ("query", "key", "value") if name in names}
    call |= options(choose, sizes, names, always)
    if "key_scale" not in without and not derived and one_in(choose, 4):
        call = quantize(choose, call)
    grouped = sizes.letters["N"] != sizes.letters["K"]
    if "enable_gqa" in names:
        call["enable_gqa"] = choose([None, True] if grouped else [None, True, False] if sizes.heads else [None, False])
        if sizes.heads and not sizes.batch:
            call["enable_gqa"] = True
    if "compute_dtype" in names and one_in(choose, 4) and _products_fit(call, function):
        call["compute_dtype"] = choose(["bfloat16", "bfloat16", "bfloat16_tiles"])
    if "layout" in names and sizes.heads and one_in(choose, 4):
        call = tokens_first(call)
    return call, sizes


def calls(always: Collection[str] = (), **options: Any) -> SearchStrategy[tuple[Call, type]]:
    """Return a strategy for calls without WAYS, and the dtype that each is computed in."""
    return drawn(_with_dtype, always=always, without=[name for name in WAYS if name not in always], **options)


def gathered_calls(**options: Any) -> SearchStrategy[tuple[Call, type]]:
    """Return a strategy for calls with key_indices, and the dtype that each is computed in."""
    return calls(["key_indices", "key_scale"], **options)


def _with_dtype(choose: Choose, **options: Any) -> tuple[Call, type]:
    call, sizes = attention(choose, **options)
    return call, sizes.dtype


def _products_fit(call: Call, function: Function) -> bool:
    inputs = [call[name] for name in ("query", "key", "value") if name in call]
    quantized = any(isinstance(a, cattn.Quantized) for a in inputs)
    differentiates = "grad_out" in inspect.signature(function).parameters
    return all(a.dtype not in (np.float16, np.float64) for a in inputs) and not (quantized and differentiates)


def statistics_options(choose: Choose, most_keys: int) -> Call:
    """Choose the options of attention_statistics alone. Each statistic may be the only one."""
    names = [name for name in cattn.AttentionStatistics._fields if not name.startswith("top")]
    wanted = choose([None, choose(names), sorted({choose(names) for _ in range(choose(range(6)))})])
    found = {"statistics": wanted, "top_k": min(choose([0, 0, 1, 3, 8]), most_keys)}
    return found | {"observation_window": choose([None, 1, 7, 20, 96, 1000])}


# ---- packed sequences ------------------------------------------------------------------------------------------------
def packed(
    choose: Choose,
    function: Function = cattn.varlen_attention,
    *,
    without: Collection[str] = (),
    limits: Limits = Limits(ROWS[:-2], KEYS[:24], HEAD_DIMS[:17]),  # noqa: B008 - a named tuple of constants
) -> Call:
    """Choose the arguments of a function of packed sequences."""
    names = [name for name in options_of(function) if name not in without]
    sizes = Sizes(choose, limits, long=False, with_heads=True, alone=True)
    n = choose((1, 2, 3, 4))
    sizes.batch = [n]
    edges = []
    for most in (limits.rows, limits.keys):
        lengths = [choose([0, *most]) for _ in range(n)]
        edges.append(np.cumsum([0, *lengths], dtype=choose([np.int32, np.int64])))
    call: Call = {}
    for name, total in (("query", edges[0][-1]), ("key", edges[1][-1]), ("value", edges[1][-1])):
        if name in names:
            heads, _, width = sizes.axes_of(OPERANDS[name].axes)
            call[name] = lay_out(choose, _stored(choose, sizes, seed(choose), [int(total), heads, width]))
    if "key_scale" not in without and choose((False, True)):
        call = quantize(choose, call)
    call |= {f"cu_seqlens_{x}": lay_out(choose, each) for x, each in zip("qk", edges, strict=True)}
    call |= options(choose, sizes, [name for name in names if name not in ("is_causal", "gate")])
    call.pop("query_offset", None)
    if "gate" in names and choose((False, True)):
        heads, _, width = sizes.axes_of(OPERANDS["gate"].axes)
        shape = broadcastable(choose, [int(edges[0][-1]), heads, width])
        call["gate"] = lay_out(choose, _stored(choose, sizes, seed(choose), shape))
    call |= choose([{"is_causal": "upper_left"}, {"is_causal": "lower_right"}, {"is_causal": True}, {}])
    if call.get("is_causal") in (True, None):
        call["alignment"] = choose(["upper_left", "lower_right"])
    if "compute_dtype" in names and one_in(choose, 4) and _products_fit(call, function):
        call["compute_dtype"] = "bfloat16"
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


def padded(call: Call, filling: float = np.nan) -> Call:
    """Return the call of scaled_dot_product_attention for the same sequences as a batch, padded with NaN."""
    found = dict(call)
    edges_q, edges_k = found.pop("cu_seqlens_q"), found.pop("cu_seqlens_k")
    found["query"] = pad(call["query"], edges_q, filling)
    if "gate" in call:
        shape = (*call["query"].shape[:-1], np.shape(getattr(call["value"], "values", call["value"]))[-1])
        found["gate"] = pad(np.broadcast_to(call["gate"], shape), edges_q, filling)
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


# ---- what belongs to a call of one function --------------------------------------------------------------------------
def again(call: Call) -> Call:
    """Return the call with generators in the state that these have, and results of its own."""
    found = dict(call)
    if "rng" in found:
        found["rng"] = copy.deepcopy(found["rng"])
    out = found.get("out")
    if "lse" not in found and isinstance(out, tuple):
        found["out"] = cattn.AttentionOutput(*(None if a is None else a.copy("K") for a in out[:4]))
    elif "lse" not in found and out is not None:
        found["out"] = out.copy("K")
    if found.get("state_out") is not None:
        found["state_out"] = found["state_out"].copy("K")
    return found


def cotangent(like: np.ndarray) -> np.ndarray:
    """Return small numbers that are exact in any dtype and any rounding direction."""
    return ((np.arange(like.size) * 7 % 32 - 16) / 8).reshape(like.shape).astype(like.dtype)


def direction(choose: Choose, call: Call) -> Call:
    """Return tangents for some of the inputs."""
    found = {}
    for name in ("query", "key", "value", "bias", "sinks"):
        if name in call and not one_in(choose, 4):
            a = np.asarray(call[name])
            found[f"{name}_tangent"] = lay_out(choose, (np.arange(a.size) % 7 / 4 - 0.75).reshape(a.shape)).astype(
                a.dtype
            )
    return found
