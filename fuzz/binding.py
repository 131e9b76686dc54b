"""Fuzz target of the binding: calls of every public function, and of the C functions behind them, with any arguments.

Bytes become a call that works, of which up to three arguments are then replaced by something of any kind: wrong types,
odd strides, swapped bytes, subclasses, objects whose methods raise, sizes beyond memory, outputs that overlap inputs or
may not be written. The call returns, or raises a documented exception whose message names an argument; a call that
raises has written nothing and drawn nothing. Anything else is a finding.

    python fuzz/binding.py [libFuzzer's options] [corpus]   needs atheris; tools/fuzz calls it so
    from binding import run; run(data)                      one input, without atheris (tests/test_fuzz.py)
"""

from __future__ import annotations

import array
import ctypes
import decimal
import fractions
import inspect
import re
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

try:
    import atheris
except ImportError:
    atheris = None

import ml_dtypes
import numpy as np

if atheris is None:
    import cattn
else:
    with atheris.instrument_imports(include=["cattn"]):
        import cattn
from cattn import _cattn
from cattn._types import AttentionOutput

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
OTHERS = (np.int64, np.int8, np.uint64, np.bool_, np.complex64, np.longdouble, object, "U1", "S3", "M8[s]", "f4,i2")
OTHERS = (*OTHERS, ">f4", ">f8", ">i8", ml_dtypes.float8_e5m2)
SIZES = (0, 1, 2, 3, 5, 8, 17)
ALLOWED = (TypeError, ValueError, MemoryError, OverflowError)
CANARY = 0x5A
MOST_MEMORY = 2 << 30


class Finding(Exception):  # noqa: N818 - what it is called in libFuzzer's reports too
    """What the fuzzer is to find."""


class Ours(Exception):  # noqa: N818
    """Raised by our own hostile objects; passes through."""


class Bytes:
    """Choices from bytes; behind their end all are 0."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, n: int) -> int:
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1] % n

    def chance(self, n: int) -> bool:
        return self.below(n) == n - 1

    def pick(self, things: Any) -> Any:
        return things[self.below(len(things))]


# ---- arrays --------------------------------------------------------------------------------------------------------
def numbers(data: Bytes, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of this shape and dtype, laid out anyhow."""
    n = int(np.prod(shape))
    start = data.below(256)
    flat = ((np.arange(start, start + n) * 37 % 64) / 16.0 - 2.0).astype(dtype)
    a = flat.reshape(shape)
    kind = data.below(10)
    if kind == 1:
        return np.asfortranarray(a)
    if kind == 2 and a.ndim:
        return a[..., ::-1]
    if kind == 3 and a.ndim:
        return np.repeat(a, 2, axis=-1)[..., ::2]
    if kind == 4 and a.ndim > 1:
        return np.ascontiguousarray(a.swapaxes(0, -2)).swapaxes(0, -2)
    if kind == 5:
        a.flags.writeable = False
    if kind == 6 and a.size:
        a.reshape(-1)[data.below(a.size)] = data.pick((np.nan, np.inf, -np.inf, 0.0))
    if kind == 7 and a.dtype in (np.float32, np.float64):
        return misaligned(a)
    if kind == 8:
        return a.astype(a.dtype.newbyteorder()) if a.dtype.kind == "f" else a
    return a


def misaligned(a: np.ndarray) -> np.ndarray:
    memory = np.zeros(a.nbytes + 1, np.uint8)
    moved = memory[1:].view(a.dtype).reshape(a.shape)
    moved[...] = a
    return moved


def any_shape(data: Bytes) -> tuple[int, ...]:
    return tuple(data.pick(SIZES) for _ in range(data.below(5)))


class Subclass(np.ndarray):
    """An array that thinks that it is something special."""

    def __array_finalize__(self, obj: Any) -> None:
        self.special = getattr(obj, "special", None)


class Hostile:
    """An object one of whose methods raises, or returns what it should not."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def _act(self, name: str, usual: Any) -> Any:
        if self.kind == 0:
            raise Ours(name)
        return usual if self.kind == 1 else "nonsense" if self.kind == 2 else NotImplemented

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._act("__array__", np.ones((2, 3)))

    def __index__(self) -> Any:
        return self._act("__index__", 1)

    def __float__(self) -> Any:
        return self._act("__float__", 0.5)

    def __bool__(self) -> Any:
        return self._act("__bool__", True)

    def __len__(self) -> Any:
        return self._act("__len__", 2)

    def __getitem__(self, index: Any) -> Any:
        if self.kind == 1 and isinstance(index, int) and index > 2:
            raise IndexError
        return self._act("__getitem__", 1.0)

    def __iter__(self) -> Any:
        return self._act("__iter__", iter((1, 2)))

    def __eq__(self, other: object) -> Any:
        return self._act("__eq__", False)

    def __hash__(self) -> Any:
        return self._act("__hash__", 7)

    def __repr__(self) -> Any:
        return self._act("__repr__", "Hostile()")


class BadInterface:
    """An array, it says."""

    __array_interface__ = {"shape": (2, 3), "typestr": "<f4", "version": 3, "data": "nowhere"}  # noqa: RUF012


class BadDLPack:
    def __dlpack__(self, **_: Any) -> Any:
        raise Ours("__dlpack__")

    def __dlpack_device__(self) -> Any:
        return (1, 0)


def any_array(data: Bytes) -> Any:
    kind = data.below(20)
    shape = any_shape(data)
    if kind < 5:
        return numbers(data, shape, data.pick(FLOATS))
    if kind < 9:
        return np.zeros(shape, data.pick(OTHERS))
    if kind == 9:
        return numbers(data, shape, np.float32).tolist()
    if kind == 10:
        return np.zeros(shape, np.float32).view(Subclass)
    if kind == 11:
        return np.matrix(np.ones((data.pick(SIZES), data.pick(SIZES)), np.float32))
    if kind == 12:
        return np.ma.masked_array(np.ones(shape, np.float32), data.chance(2))
    if kind == 13:
        return [[1.0], [1.0, 2.0]]
    if kind == 14:
        return data.pick((array.array("f", [1, 2]), memoryview(np.ones((2, 3), np.float32)), b"ab", "ab", bytearray(8)))
    if kind == 15:  # more than any memory, in one element
        return np.broadcast_to(np.float32(1), data.pick(((3, 2**40), (1, 2**40, 3), (2, 2**20, 2**30))))
    if kind == 16:
        return np.lib.stride_tricks.as_strided(np.ones(4, np.float32), (3, 2), (4, 4))  # overlaps itself
    if kind == 17:
        return np.ones((1,) * data.pick((5, 32, 63, 64)), np.float32)
    return numbers(data, shape, np.float32) > 0


def any_number(data: Bytes) -> Any:
    plain = (
        0,
        1,
        -1,
        2,
        7,
        2**31,
        2**63,
        -(2**63),
        2**64,
        2**70,
        0.5,
        -0.5,
        1.0,
        1e-46,
        1e300,
        np.nan,
        np.inf,
        -np.inf,
    )
    odd = (True, "1", "", b"1", 1j, np.float32(0.5), np.int8(3), np.bool_(True), np.float16(2), np.longdouble(1))
    rare = (decimal.Decimal("0.5"), fractions.Fraction(1, 2), (), (1, 2), [1], {}, {"a": 1}, range(3), np.float64, len)
    return data.pick((plain, plain, odd, rare)[data.below(4)])


def any_thing(data: Bytes) -> Any:
    kind = data.below(8)
    if kind < 3:
        return any_array(data)
    if kind < 5:
        return any_number(data)
    if kind == 5:
        return Hostile(data.below(4))
    if kind == 6:
        return data.pick((None, object(), BadInterface(), BadDLPack(), iter((1, 2)), lambda: 1, Ellipsis, slice(1)))
    return data.pick(
        ("upper_left", "lower_right", "neg_inf", "renormalize", "qk", "dropout", True, False, None, (-1, 3))
    )


# ---- calls that work -----------------------------------------------------------------------------------------------
class Shapes:
    """Sizes and a dtype that belong together."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.dtype = data.pick(FLOATS)
        self.compute = np.float64 if self.dtype is np.float64 else np.float32
        self.lead = tuple(data.pick((1, 2, 2, 3, 0)) for _ in range(data.below(3)))
        self.groups, self.kv_heads = 1 + data.below(2), 1 + data.below(2)
        self.T_q, self.T_k, self.D, self.D_v = (data.pick(SIZES) for _ in range(4))
        self.with_heads = len(self.lead) > 0 and data.chance(2)
        self.heads = (self.groups * self.kv_heads,) if self.with_heads else ()

    def make(self, *shape: int, dtype: Any = None) -> np.ndarray:
        return numbers(self.data, shape, self.dtype if dtype is None else dtype)

    def out(self, *shape: int, dtype: Any = None) -> np.ndarray:
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        return np.full(int(np.prod(shape)) * dtype.itemsize, CANARY, np.uint8).view(dtype).reshape(shape)

    def rng(self) -> Any:
        makers: list[Callable[[], Any]] = [
            lambda: 5,
            lambda: cattn.TorchGenerator(3),
            lambda: np.random.default_rng(1),
            lambda: np.random.RandomState(1),
            lambda: np.random.SeedSequence(4),
        ]
        return self.data.pick(makers)()

    def attention(self) -> dict[str, Any]:
        kv = (self.kv_heads,) if self.with_heads else ()
        call = {
            "query": self.make(*self.lead, *self.heads, self.T_q, self.D),
            "key": self.make(*self.lead, *kv, self.T_k, self.D),
            "value": self.make(*self.lead, *kv, self.T_k, self.D_v),
        }
        data = self.data
        one_head = not self.with_heads and len(self.lead) < 2
        shape = (*self.lead, *self.heads, self.T_q, self.T_k)
        heads = (1,) if one_head else ((self.heads or self.lead[-1:])[-1],)
        options: dict[str, Callable[[], Any]] = {
            "attn_mask": lambda: self.make(*shape, dtype=np.float32) > 0,
            "bias": lambda: self.make(*shape[-2:], dtype=self.compute),
            "scale": lambda: 0.5,
            "softcap": lambda: 3.0,
            "alibi_slopes": lambda: np.full(heads, 0.5),
            "sinks": lambda: np.full(heads, 0.5),
            "query_offset": lambda: data.below(9),
            "window_size": lambda: (data.below(4), 0),
            "key_value_seq_lengths": lambda: data.below(self.T_k + 1),
            "query_seq_lengths": lambda: data.below(self.T_q + 1),
        }
        for name, make in options.items():
            if data.chance(5):
                call[name] = make()
        if data.chance(3):
            call |= {"dropout_p": 0.5, "rng": self.rng()}
        return call

    def outputs(self, d: int | None = None) -> np.ndarray:
        return self.out(*self.lead, *self.heads, self.T_q, self.D_v if d is None else d)


def attention(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    call = s.attention() | {"is_causal": data.pick((False, True, "upper_left", "lower_right"))}
    if call["is_causal"] == "lower_right":
        call.pop("query_offset", None)
    for name in ("need_weights", "return_lse", "return_dropout_mask"):
        call[name] = data.chance(4)
    if data.chance(3):
        call["out"] = s.outputs()
    return call


def causal(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    return s.attention() | ({"out": s.outputs()} if data.chance(3) else {})


def weights(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    call = s.attention()
    del call["value"]
    call["stage"] = data.pick(("qk", "softcap", "bias", "mask", "softmax", "dropout"))
    return call | ({"out": s.outputs(s.T_k)} if data.chance(3) else {})


def explained(data: Bytes) -> dict[str, Any]:
    call = Shapes(data).attention()
    return {name: call[name] for name in call if name in inspect.signature(cattn.explain).parameters}


def backward(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    call = s.attention()
    if "dropout_p" in call:
        call["rng"] = data.pick((5, cattn.TorchGenerator(3)))
    lse = s.make(*s.lead, *s.heads, s.T_q, dtype=s.compute)
    shape = (*s.lead, *s.heads, s.T_q, s.D_v)
    return call | {"grad_out": s.make(*shape), "out": s.make(*shape), "lse": lse}


def packed(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    q, k = ([data.pick(SIZES) for _ in range(2)] for _ in range(2))
    heads = s.groups * s.kv_heads
    call = {
        "query": s.make(sum(q), heads, s.D),
        "key": s.make(sum(k), s.kv_heads, s.D),
        "value": s.make(sum(k), s.kv_heads, s.D_v),
        "cu_seqlens_q": np.cumsum([0, *q]),
        "cu_seqlens_k": np.cumsum([0, *k]),
        "is_causal": data.pick((False, True, "upper_left", "lower_right")),
    }
    if data.chance(3):
        call |= {"dropout_p": 0.5, "rng": 5}
    return call | ({"out": s.out(sum(q), heads, s.D_v)} if data.chance(3) else {})


def rowwise(name: str, **more: Callable[[Bytes], Any]) -> Callable[[Bytes], dict[str, Any]]:
    def make(data: Bytes) -> dict[str, Any]:
        s = Shapes(data)
        shape = (*s.lead, s.T_q, s.T_k)
        call = {name: s.make(*shape)} | {key: value(data) for key, value in more.items() if data.chance(2)}
        if "mask" in call or "where" in call:
            key = "mask" if "mask" in call else "where"
            call[key] = s.make(*shape[-2:], dtype=np.float32) > 0
        if "weights" in more:
            call["weights"] = s.make(*shape)
        return call | ({"out": s.out(*shape)} if data.chance(3) else {})

    return make


def axis(data: Bytes) -> int:
    return data.below(4) - 2


def merging(data: Bytes) -> dict[str, Any]:
    s, n = Shapes(data), 1 + data.below(3)
    shape = (*s.lead, s.T_q)
    return {
        "outs": [s.make(*shape, s.D_v) for _ in range(n)],
        "lses": [s.make(*shape, dtype=s.compute) for _ in range(n)],
    }


def constant(**arguments: Any) -> Callable[[Bytes], dict[str, Any]]:
    return lambda data: {name: value(data) if callable(value) else value for name, value in arguments.items()}


# ---- what is called ------------------------------------------------------------------------------------------------
def fill_cache(batch_shape: Any, num_kv_heads: Any, key: Any, value: Any, n: Any, dtype: Any) -> Any:
    """A cache's life; its refusals leave it as it was."""
    cache = cattn.KVCache(batch_shape, num_kv_heads, 6, 3, dtype=dtype)
    one = np.ones((*cache.batch_shape, cache.num_kv_heads, 2, 3), np.float16)
    cache.append(one, one)
    before = cache.lengths, cache.k.copy()
    for change in (lambda: cache.append(key, value), lambda: cache.truncate(n)):
        try:
            change()
        except Exception:
            same = np.array_equal(cache.lengths, before[0]) and cache.k.tobytes() == before[1].tobytes()
            if not same:
                raise Finding("a cache that refused has changed") from None
            raise
        before = cache.lengths, cache.k.copy()
    return cache.query_offset()


def run_layer(x: Any, num_heads: Any, num_kv_groups: Any, dropout: Any, rng: Any, grad_out: Any) -> Any:
    layer = cattn.MultiHeadAttention(3, 4, 8, dropout, num_heads, num_kv_groups=num_kv_groups, rng=rng)
    return layer(x), layer.backward(grad_out)


def load_layer(state_dict: Any, strict: Any) -> Any:
    layer = cattn.Linear(3, 2, rng=1)
    before = layer.weight.copy()
    try:
        return layer.load_state_dict(state_dict, strict)
    except Exception:
        if layer.weight.tobytes() != before.tobytes():
            raise Finding("a state_dict that was refused has changed the weights") from None
        raise


def draw(method: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return getattr(cattn.TorchGenerator(1), method)(**arguments)

    parameters = [p for p in inspect.signature(getattr(cattn.TorchGenerator, method)).parameters if p != "self"]
    call.names = parameters  # type: ignore[attr-defined]
    return call


def few_slopes(num_heads: Any) -> Any:
    """Not for billions of heads: they would all be made, in Python."""
    return None if isinstance(num_heads, int) and num_heads > 1 << 16 else cattn.get_alibi_slopes(num_heads)


def set_threads(n: Any) -> None:
    try:
        cattn.set_num_threads(n)
    finally:
        cattn.set_num_threads(None)


def raw(name: str) -> Callable[..., Any]:
    """A C function, its arguments in the order of the stub."""
    function = getattr(_cattn, name)

    def call(**arguments: Any) -> Any:
        return function(*arguments.values())

    return call


RAW = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "bias", "query_offset"]
RAW += ["query_seq_lengths", "key_value_seq_lengths", "window_size", "softcap", "alibi_slopes", "sinks", "rng"]
RAW += ["need_weights", "return_lse", "return_dropout_mask", "out"]
DEFAULTS = {"dropout_p": 0.0, "is_causal": False, "need_weights": False, "return_lse": False}
DEFAULTS |= {"return_dropout_mask": False, "window_size": (-1, -1)}


def raw_attention(data: Bytes) -> dict[str, Any]:
    call = Shapes(data).attention()
    return {name: call.get(name, DEFAULTS.get(name)) for name in RAW}


def raw_weights(data: Bytes) -> dict[str, Any]:
    return raw_attention(data) | {"stage": data.pick(("qk", "mask", "softmax", "dropout"))}


def raw_backward(data: Bytes) -> dict[str, Any]:
    call = backward(data)
    last = {"grad_out": call.pop("grad_out"), "forward_out": call.pop("out"), "forward_lse": call.pop("lse")}
    return {name: call.get(name, DEFAULTS.get(name)) for name in RAW} | last


def whole(data: Bytes) -> dict[str, np.ndarray]:
    return {"weight": numbers(data, (2, 3), np.float32), "bias": numbers(data, (2,), np.float32)}


Maker = Callable[[Bytes], dict[str, Any]]
SHAPE = np.ones((2, 3), np.float32)
CALLS: list[tuple[Callable[..., Any], Maker]] = [
    (cattn.scaled_dot_product_attention, attention),
    (cattn.causal_attention, causal),
    (cattn.attention_weights, weights),
    (cattn.attention_backward, backward),
    (cattn.varlen_attention, packed),
    (cattn.explain, explained),
    (cattn.softmax, rowwise("x", axis=axis, where=axis, scale=axis)),
    (cattn.masked_softmax, rowwise("scores", mask=axis, is_causal=lambda d: d.chance(2), query_offset=axis)),
    (cattn.softmax_backward, rowwise("grad_out", weights=axis, axis=axis)),
    (cattn.dropout, rowwise("x", p=lambda d: d.pick((0.0, 0.5, 1.0)), rng=lambda d: 3, training=lambda d: d.chance(2))),
    (cattn.dropout_backward, rowwise("grad_out", p=lambda d: 0.5, rng=lambda d: 3)),
    (cattn.merge_attention, merging),
    (cattn.causal_mask, constant(T_q=lambda d: d.pick(SIZES), T_k=lambda d: d.pick(SIZES), query_offset=axis)),
    (cattn.show_mask, constant(T_q=lambda d: d.pick(SIZES), T_k=3, is_causal="upper_left")),
    (cattn.sliding_window, constant(total=4)),
    (few_slopes, constant(num_heads=4)),
    (cattn.TorchGenerator, constant(seed=4, dropout="aten")),
    (draw("linear"), constant(in_features=3, out_features=2, bias=True)),
    (draw("bernoulli"), constant(p=0.5)),
    (draw("set_state"), constant(state=lambda d: cattn.TorchGenerator(2).get_state())),
    (draw("manual_seed"), constant(seed=5)),
    (set_threads, constant(n=2)),
    (fill_cache, constant(batch_shape=2, num_kv_heads=1, key=SHAPE, value=SHAPE, n=1, dtype="float32")),
    (
        run_layer,
        constant(
            x=lambda d: numbers(d, (2, 3), np.float32),
            num_heads=2, num_kv_groups=1, dropout=0.5, rng=3,
            grad_out=lambda d: numbers(d, (2, 4), np.float32),
        ),
    ),
    (load_layer, constant(state_dict=whole, strict=True)),
    (raw("attention"), raw_attention),
    (raw("explain"), raw_attention),
    (raw("attention_weights"), raw_weights),
    (raw("attention_backward"), raw_backward),
    (raw("softmax"), constant(x=SHAPE, axis=-1, where=None, scale=1.0, out=None)),
    (
        raw("masked_softmax"),
        constant(scores=SHAPE, mask=None, is_causal=False, query_offset=0, scale=1.0, method="neg_inf", out=None),
    ),
    (raw("softmax_backward"), constant(grad_out=SHAPE, weights=SHAPE, scale=1.0, out=None)),
    (raw("dropout"), constant(x=SHAPE, p=0.5, training=True, rng=3, return_mask=True, out=None)),
    (raw("causal_mask"), constant(T_q=3, T_k=4, is_causal=True, query_offset=0, window_size=(-1, -1))),
]  # fmt: skip

# Names of arguments that a message may use: those of the call, what they are called inside, and these.
WORDS = {"dtype", "max_len", "head_dim", "v_head_dim", "cache", "outs", "lses", "size", "probability", "d_in", "d_out"}
WORDS |= {
    "heads",
    "lse",
    "seed",
    "state",
    "key",
    "value",
    "weights",
    "p",
    "mask",
    "leading",
    "forced",
    "rng",
    "low",
    "weight",
}
# What is not ours to word: Python's own words for keywords, positions and objects that misbehave.
FOREIGN = re.compile(
    r"nonsense|Hostile|non-string|returned non-|__\w+__|unhashable|NotImplemented|cannot be interpreted as an integer"
    r"|unexpected keyword|required positional|positional argument|takes no arguments"
)


# ---- one input -----------------------------------------------------------------------------------------------------
def memory_of(arguments: dict[str, Any]) -> list[tuple[np.ndarray, bytes]]:
    """Outputs as they are before the call."""
    out = arguments.get("out")
    fields = out if isinstance(out, AttentionOutput) else (out,)
    return [(a, a.tobytes()) for a in fields if isinstance(a, np.ndarray) and a.nbytes < 1 << 20 and a.dtype != object]


def overlapping(data: Bytes, arguments: dict[str, Any]) -> Any:
    """An output that is an input, part of it, or may not be written."""
    inputs = [a for a in arguments.values() if isinstance(a, np.ndarray) and a.ndim and a.size < 1 << 20]
    if not inputs:
        return None
    a = data.pick(inputs)
    kind = data.below(4)
    if kind == 0:
        return a
    if kind == 1:
        return a[..., ::-1]
    if kind == 2 and a.ndim:
        return AttentionOutput(a, data.pick((None, a)), data.pick((None, a)), None)
    still = a.copy()
    still.flags.writeable = False
    return still


def check(error: Exception, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Is this an exception that the documentation promises, in words that help?"""
    if isinstance(error, Finding):
        raise error
    if isinstance(error, (Ours, Warning)):
        return
    message = str(error)
    if not isinstance(error, ALLOWED) and type(error).__name__ != "BufferError":
        raise Finding(f"{type(error).__name__}: {message}") from error
    if isinstance(error, MemoryError) or FOREIGN.search(message):
        return
    names = WORDS | set(arguments) | set(getattr(function, "names", ()))
    if not names & set(re.findall(r"\w+", message)):
        raise Finding(f"names no argument: {type(error).__name__}: {message}") from error


def run(raw_bytes: bytes) -> None:
    """Make the call that these bytes stand for; raise Finding for what should not be."""
    data = Bytes(raw_bytes)
    replaced = [(data.below(32), data.below(4)) for _ in range(data.below(4))]
    function, make = data.pick(CALLS)
    arguments = make(data)
    names = list(arguments)
    for index, _ in replaced:
        name = names[index % len(names)]
        arguments[name] = overlapping(data, arguments) if name == "out" and data.chance(2) else any_thing(data)
    if data.chance(16):
        arguments["out"] = overlapping(data, arguments) if "out" in names else arguments.get("out")
        arguments = {name: arguments[name] for name in arguments if name in names}
    before = memory_of(arguments)
    rng = arguments.get("rng")
    state = rng.get_state() if isinstance(rng, cattn.TorchGenerator) else None
    try:
        function(**arguments)
    except Exception as error:
        check(error, function, arguments)
        for out, bits in before:
            if out.tobytes() != bits:
                raise Finding("a call that raised has written to out") from error
        if state is not None and not np.array_equal(rng.get_state(), state):
            raise Finding("a call that raised has drawn") from error


def bounded() -> None:
    """No allocation of gigabytes may succeed, and no NumPy warning may stop a call."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    ctypes.CDLL(None).malloc_trim(0)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    bounded()
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
