"""Every argument of every public function with objects that nobody should pass: an answer, or an error that names the
argument. No crash, and no call without end.

A right call of each function is made once for each argument and object. The short form makes a sample of these calls.
"""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import inspect
import itertools
import re
import signal
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from support import without

F = np.float32
torch: Any = pytest.importorskip("torch")


# ---- objects -------------------------------------------------------------------------------------------------------
class Word(str):
    """A str."""


class Whole(int):
    """An int that hides what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


class Pair(tuple):  # type: ignore[type-arg]
    """A tuple that is longer than it says."""

    def __len__(self) -> int:
        return 2


class Raising:
    """An object whose methods all fail."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def _fail(self, *_: object, **__: object) -> Any:
        raise self.error("of the object itself")

    __array__ = __len__ = __index__ = __int__ = __float__ = __bool__ = __iter__ = __getitem__ = _fail
    __eq__ = __repr__ = __str__ = __buffer__ = __complex__ = _fail  # type: ignore[assignment]
    __hash__ = object.__hash__


class LyingArray:
    """An object whose __array__ returns no array, __len__ no length and __index__ no int."""

    __array__ = __len__ = __index__ = __float__ = __bool__ = lambda self, *_, **__: "lie"  # type: ignore[assignment]


class Interface:
    """An object that describes memory that is not there."""

    __array_interface__ = {"shape": (3,), "typestr": "<f4", "version": 3, "data": "none"}  # noqa: RUF012


class Colour(enum.Enum):
    RED = "upper_left"


def deep(levels: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(levels):
        result = [result]
    return result


class Subclass(np.ndarray):
    pass


ODD: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(2, 3),
    "tensor of one": lambda: torch.tensor(True),
    "tensor of bools": lambda: torch.ones(3, dtype=torch.bool),
    "tensor with gradient": lambda: torch.ones(2, 3, requires_grad=True),
    "tensor, sparse": lambda: torch.ones(2, 3).to_sparse(),
    "tensor on meta": lambda: torch.ones(2, 3, device="meta"),
    "torch.dtype": lambda: torch.float32,
    "torch.Generator": lambda: torch.Generator(),
    "subclass of str": lambda: Word("upper_left"),
    "subclass of str, other word": lambda: Word("none"),
    "subclass of int": lambda: Whole(2),
    "subclass of int, giant": lambda: Whole(10**5000),
    "subclass of tuple": lambda: Pair((1, 2, 3)),
    "empty tuple": lambda: (),
    "empty list": list,
    "empty str": lambda: "",
    "giant int": lambda: 10**6000,
    "giant negative int": lambda: -(10**6000),
    "int beyond 64 bits": lambda: 2**64,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "complex": lambda: 1 + 2j,
    "Decimal": lambda: decimal.Decimal("0.5"),
    "Decimal NaN": lambda: decimal.Decimal("sNaN"),
    "Fraction": lambda: fractions.Fraction(10**5000, 7),
    "generator": lambda: (i for i in range(3)),
    "endless": itertools.count,
    "endless words": lambda: itertools.repeat("lse"),
    "raising TypeError": lambda: Raising(TypeError),
    "raising RuntimeError": lambda: Raising(RuntimeError),
    "raising ZeroDivisionError": lambda: Raising(ZeroDivisionError),
    "raising AttributeError": lambda: Raising(AttributeError),
    "raising IndexError": lambda: Raising(IndexError),
    "raising OverflowError": lambda: Raising(OverflowError),
    "lying": LyingArray,
    "array interface": Interface,
    "giant bytes": lambda: b"a" * 10**5,
    "giant bytearray": lambda: bytearray(10**5),
    "giant str": lambda: "a" * 10**5,
    "surrogate": lambda: "\ud800",
    "null": lambda: "a\0b",
    "memoryview": lambda: memoryview(b"abc"),
    "float16 scalar": lambda: np.float16(0.5),
    "int8 scalar": lambda: np.int8(1),
    "bool scalar": lambda: np.True_,
    "bfloat16 scalar": lambda: ml_dtypes.bfloat16(1),
    "longdouble scalar": lambda: np.longdouble(1),
    "str scalar": lambda: np.str_("upper_left"),
    "datetime scalar": lambda: np.datetime64(1, "s"),
    "array of no dimensions": lambda: np.array(1),
    "array of one bool": lambda: np.array(True),
    "array of no dimensions, float": lambda: np.array(0.5),
    "array of no dimensions, object": lambda: np.array(None),
    "array of no dimensions, str": lambda: np.array("upper_left"),
    "array of one": lambda: np.ones((1, 1, 1)),
    "array of 64 dimensions": lambda: np.ones((1,) * 64, F),
    "empty array": lambda: np.ones((0, 3), F),
    "array of ints": lambda: np.arange(6).reshape(2, 3),
    "masked array": lambda: np.ma.masked_array(np.ones((2, 3)), True),
    "masked constant": lambda: np.ma.masked,
    "structured array": lambda: np.zeros(3, [("a", "f4")]),
    "object array": lambda: np.array([None, 1], object),
    "object array of giants": lambda: np.array([10**5000, 2], object),
    "strings": lambda: np.array(["a", "b"]),
    "matrix": lambda: np.asmatrix(np.ones((2, 3))),
    "subclass of ndarray": lambda: np.ones((2, 3)).view(Subclass),
    "complex array": lambda: np.ones((2, 3), np.complex64),
    "float8 array": lambda: np.ones((2, 3), ml_dtypes.float8_e4m3fn),
    "int4 array": lambda: np.ones((2, 3), ml_dtypes.int4),
    "other byte order": lambda: np.ones((2, 3), ">f4"),
    "misaligned": lambda: np.ones(25, np.uint8)[1:].view(F),
    "deep list": lambda: deep(2000),
    "ragged list": lambda: [[1.0], [2.0, 3.0]],
    "list of itself": lambda: (lambda x: x.append(x) or x)([]),  # type: ignore[func-returns-value]
    "list of None": lambda: [None, None],
    "list of giants": lambda: [10**6000, 10**6000],
    "tuple of giants": lambda: (10**6000, -(10**6000)),
    "dict": lambda: {"rope_type": 10**6000},
    "dict of raising": lambda: {"rope_type": Raising(RuntimeError)},
    "set": lambda: {1, 2},
    "range": lambda: range(3),
    "deque": lambda: collections.deque([1, 2]),
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "object": object,
    "type": lambda: int,
    "function": lambda: len,
    "module": lambda: np.random,
    "namespace": lambda: types.SimpleNamespace(shape=(2, 3), dtype=F, ndim=2),
    "enum": lambda: Colour.RED,
    "slice": lambda: slice(3),
    "dtype": lambda: np.dtype("f4"),
    "dtype of objects": lambda: np.dtype(object),
    "None": lambda: None,
    "True": lambda: True,
}  # fmt: skip


# ---- right calls ---------------------------------------------------------------------------------------------------
Call = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
Q = np.linspace(-1, 1, 2 * 5 * 4, dtype=F).reshape(1, 2, 5, 4)
P = np.linspace(-1, 1, 5 * 2 * 4, dtype=F).reshape(5, 2, 4)
X = np.linspace(-1, 1, 24, dtype=F).reshape(4, 6)
EDGES = np.array([0, 2, 5])


def attention() -> dict[str, Any]:
    return {"query": Q, "key": Q, "value": Q, "rng": 3}


def forward() -> dict[str, Any]:
    result = cattn.scaled_dot_product_attention(Q, Q, Q, return_lse=True)
    return {"grad_out": Q, "out": result.out, "lse": result.lse, "merged": True, **attention()}


def tangents() -> dict[str, Any]:
    return {"query_tangent": Q, "value_tangent": Q, **attention()}


def derivatives() -> dict[str, Any]:
    result = cattn.attention_jvp(**tangents(), return_lse=True)
    return {"grad_out_tangent": Q, **result._asdict(), **tangents()}


def packed() -> dict[str, Any]:
    return {"query": P, "key": P, "value": P, "cu_seqlens_q": EDGES, "cu_seqlens_k": EDGES, "rng": 3}


def packed_backward() -> dict[str, Any]:
    result = cattn.varlen_attention(**packed(), return_lse=True)
    return {"grad_out": P, "out": result.out, "lse": result.lse, "merged": True, **packed()}


def cache() -> Any:
    made = cattn.KVCache(1, 2, 9, 4)
    made.append(Q, Q)
    return made


SIZES = {"d_in": 3, "d_out": 4, "context_length": 5, "dropout": 0.0}
CALLS: dict[str, Call] = {
    "scaled_dot_product_attention": lambda: (cattn.scaled_dot_product_attention, attention()),
    "causal_attention": lambda: (cattn.causal_attention, attention()),
    "attention_weights": lambda: (cattn.attention_weights, without(attention(), "value")),
    "attention_backward": lambda: (cattn.attention_backward, forward()),
    "attention_statistics": lambda: (cattn.attention_statistics, {"query": Q, "key": Q}),
    "choose_keys": lambda: (cattn.choose_keys, {"query": Q, "key": Q, "count": 2}),
    "explain": lambda: (cattn.explain, without(attention(), "rng")),
    "varlen_attention": lambda: (cattn.varlen_attention, packed()),
    "attention_jvp": lambda: (cattn.attention_jvp, tangents()),
    "attention_jvp_backward": lambda: (cattn.attention_jvp_backward, derivatives()),
    "varlen_attention_backward": lambda: (cattn.varlen_attention_backward, packed_backward()),
    "varlen_attention_statistics": lambda: (cattn.varlen_attention_statistics, without(packed(), "value", "rng")),
    "merge_attention": lambda: (cattn.merge_attention, {"outs": [X, X], "lses": [X[:, 0], X[:, 1]]}),
    "head_scores": lambda: (cattn.head_scores, {"weights": np.ones((2, 3, 3)), "token_ids": [1, 2, 1]}),
    "attention_rollout": lambda: (cattn.attention_rollout, {"weights": np.ones((2, 1, 3, 3))}),
    "softmax": lambda: (cattn.softmax, {"x": X}),
    "masked_softmax": lambda: (cattn.masked_softmax, {"scores": X}),
    "softmax_backward": lambda: (cattn.softmax_backward, {"grad_out": X, "weights": X}),
    "dropout": lambda: (cattn.dropout, {"x": X, "rng": 3}),
    "dropout_backward": lambda: (cattn.dropout_backward, {"grad_out": X, "rng": 3}),
    "dropout_backward, mask": lambda: (cattn.dropout_backward, {"grad_out": X, "mask": X > 0}),
    "causal_mask": lambda: (cattn.causal_mask, {"T_q": 3}),
    "show_mask": lambda: (cattn.show_mask, {"T_q": 3}),
    "sliding_window": lambda: (cattn.sliding_window, {"total": 3}),
    "get_alibi_slopes": lambda: (cattn.get_alibi_slopes, {"num_heads": 3}),
    "rope": lambda: (cattn.rope, {"x": X}),
    "rms_norm": lambda: (cattn.rms_norm, {"x": X}),
    "rms_norm_backward": lambda: (cattn.rms_norm_backward, {"grad_out": X, "x": X}),
    "linear_attention": lambda: (cattn.linear_attention, {"query": Q, "key": Q, "value": Q}),
    "linear_attention_backward": lambda: (
        cattn.functional.linear_attention_backward, {"grad_out": Q, "query": Q, "key": Q, "value": Q},
    ),
    "causal_conv": lambda: (cattn.functional.causal_conv, {"x": X, "weight": X.T}),
    "causal_conv_backward": lambda: (cattn.functional.causal_conv_backward, {"grad_out": X, "x": X, "weight": X.T}),
    "quantize": lambda: (cattn.quantize, {"x": X}),
    "dequantize": lambda: (cattn.dequantize, {"x": X.astype(np.int8), "scale": 1.0}),
    "dequantize, Quantized": lambda: (cattn.dequantize, {"x": cattn.quantize(X)}),
    "Quantized": lambda: (cattn.Quantized, {"values": X.astype(np.int8), "scale": 1.0}),
    "BlockMask": lambda: (cattn.BlockMask, {"blocks": X > 0, "size": 2}),
    "manual_seed": lambda: (cattn.manual_seed, {"seed": 3}),
    "set_num_threads": lambda: (cattn.set_num_threads, {"n": 2}),
    "num_threads": lambda: (cattn.num_threads, {"n": 2}),
    "show_config": lambda: (cattn.show_config, {"mode": "dicts"}),
    "TorchGenerator": lambda: (cattn.TorchGenerator, {"seed": 3}),
    "KVCache": lambda: (cattn.KVCache, {"batch_shape": 1, "num_kv_heads": 2, "max_len": 9, "head_dim": 4}),
    "KVCache.append": lambda: (cache().append, {"key": Q[:, :, :2], "value": Q[:, :, :2]}),
    "KVCache.truncate": lambda: (cache().truncate, {"n": 2}),
    "KVCache.keep": lambda: (cache().keep, {"indices": [1, 0]}),
    "KVCache.reorder": lambda: (cache().reorder, {"entries": [0, 0]}),
    "Linear": lambda: (cattn.Linear, {"d_in": 3, "d_out": 4}),
    "Dropout": lambda: (cattn.Dropout, {}),
    "SelfAttention_v1": lambda: (cattn.SelfAttention_v1, {"d_in": 3, "d_out": 4}),
    "SelfAttention_v2": lambda: (cattn.SelfAttention_v2, {"d_in": 3, "d_out": 4}),
    "CausalAttention": lambda: (cattn.CausalAttention, SIZES),
    "MultiHeadAttention": lambda: (cattn.MultiHeadAttention, SIZES | {"num_heads": 2}),
    "MultiHeadAttentionWrapper": lambda: (cattn.MultiHeadAttentionWrapper, SIZES | {"num_heads": 2}),
}  # fmt: skip
# Results and warnings take any object. The views have tests of their own.
OTHERS = {
    "AttentionGradients", "AttentionOutput", "AttentionStatistics", "AttentionTangents", "AttentionView",
    "CausalAlignmentWarning", "LinearAttentionGradients", "LinearAttentionOutput",
    "Explanation", "HeadScores", "get_num_threads", "plot_attention", "view_attention",
}  # fmt: skip


def test_every_public_function_is_called() -> None:
    public = {name for name in cattn.__all__ if callable(getattr(cattn, name))}
    assert public - OTHERS == {name.partition(",")[0].partition(".")[0] for name in CALLS} & public


@pytest.fixture
def in_time() -> Iterator[None]:
    """Stop a call without end, by its processor time."""
    if not hasattr(signal, "ITIMER_PROF"):  # Windows
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt("a call without end")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, 60)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def complaint(call: Call, argument: str, odd: str) -> str:
    """Return what is wrong about the error of this call, or ""."""
    function, arguments = call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = arguments | {argument: ODD[odd]()}
        try:
            function(**arguments)
        except (TypeError, ValueError) as error:
            # an array that does not fit another argument is the fault of either
            named = argument in str(error) or any(text in arguments for text in re.findall(r"\w+", str(error))[:1])
            return "" if named else f"{type(error).__name__}: {str(error)[:200]}"
        except MemoryError:
            return ""
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def check(name: str, sample: int | None) -> None:
    """Make the calls of a function; with a sample one of so many."""
    function, _ = CALLS[name]()
    wrong, arguments = [], [p for p in inspect.signature(function).parameters if p != "self"]
    for i, (argument, odd) in enumerate(itertools.product(arguments, ODD)):
        if sample is None or i % sample == 0:
            text = complaint(CALLS[name], argument, odd)
            wrong += [f"{name}({argument}=<{odd}>) {text}"] if text else []
    cattn.set_num_threads(None)
    assert not wrong, "\n".join(wrong)


@pytest.mark.promise("errors")
@pytest.mark.parametrize("name", CALLS)
def test_an_odd_object_is_an_error_that_names_its_argument(name: str, in_time: None) -> None:
    check(name, 7)  # no divisor of the number of objects: each meets another argument


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_all_odd_objects(name: str, in_time: None) -> None:
    check(name, None)
