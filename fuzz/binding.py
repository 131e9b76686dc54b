#!/usr/bin/env python
"""Fuzz target of the binding: calls of every public function with any arguments.

Bytes become a call that works: tests/support/functions.py chooses it. Then up to three arguments are replaced by
anything: wrong types, swapped bytes, subclasses, objects whose methods raise, sizes beyond memory, outputs that overlap
inputs or are read-only. Half of the calls name every parameter, also those that have their defaults. The
call must return, or raise a documented exception whose message names an argument. A call that raises must not have
written to its output or drawn random numbers. Anything else is a finding.

    python fuzz/binding.py [libFuzzer's options] [corpus]   with atheris, as tools/fuzz does
    from binding import run; run(data)                      one input without atheris: tests/project/test_tools.py
"""

from __future__ import annotations

import array
import decimal
import fractions
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

try:
    import atheris
except ImportError:
    import cattn
else:
    with atheris.instrument_imports(include=["cattn"]):
        import cattn
from cattn import _cattn
from support.calls import SMALL, STORED, Choose, floats, from_bytes, one_in
from support.functions import FUNCTIONS

MOST_MEMORY = 2 << 30
ALLOWED = (TypeError, ValueError, MemoryError, OverflowError)

# Messages may name the arguments of the call, and these.
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
# Messages that Python words: about keywords, positions and objects whose methods fail.
FOREIGN = re.compile(
    r"nonsense|Hostile|non-string|returned non-|__\w+__|unhashable|NotImplemented|cannot be interpreted as an integer"
    r"|unexpected keyword|required positional|positional argument|takes no arguments"
)


SIZES = SMALL.rows
OTHERS = (np.int64, np.int8, np.uint64, np.bool_, np.complex64, np.longdouble, object, "U1", "S3", "M8[s]", "f4,i2")
OTHERS = (*OTHERS, ">f4", ">f8", ">i8", ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn)
ONES = np.ones((2, 3), np.float32)
# Functions that take their arguments by position only, and have no name of their own.
IN_ORDER: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear_attention_backward": (
        _cattn._linear_gradients,
        dict.fromkeys(("grad_out", "grad_state", "query", "key", "value"), ONES)
        | dict.fromkeys(("decay", "beta", "state", "scale", "seq_lengths", "cu_seqlens", "layout")),
    ),
}


class Finding(Exception):  # noqa: N818 - the word in libFuzzer's reports
    """A call misbehaved."""


class Ours(Exception):  # noqa: N818
    """Raised by our hostile objects; cattn must let it through."""


# ---- arguments of every kind -----------------------------------------------------------------------------------------
def odd(choose: Choose, a: np.ndarray) -> np.ndarray:
    """Return the numbers read-only, misaligned or with swapped bytes, or with one that is not finite."""
    kind = choose(range(4))
    if kind == 0:
        a = a.copy()
        a.flags.writeable = False
    elif kind == 1 and a.dtype in (np.float32, np.float64):
        return misaligned(a)
    elif kind == 2 and a.dtype.kind == "f":
        return a.astype(a.dtype.newbyteorder())
    elif kind == 3 and a.size and a.dtype.kind == "f":
        a = a.copy()
        a.reshape(-1)[choose(range(min(a.size, 256)))] = choose((np.nan, np.inf, -np.inf, 0.0))
    return a


def odd_numbers(choose: Choose, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return odd(choose, floats(choose, *shape, dtype=dtype))


def misaligned(a: np.ndarray) -> np.ndarray:
    memory = np.zeros(a.nbytes + 1, np.uint8)
    moved = memory[1:].view(a.dtype).reshape(a.shape)
    moved[...] = a
    return moved


def any_shape(choose: Choose) -> tuple[int, ...]:
    return tuple(choose(SIZES) for _ in range(choose(range(5))))


class Subclass(np.ndarray):
    """A subclass with an attribute of its own."""

    def __array_finalize__(self, obj: Any) -> None:
        self.special = getattr(obj, "special", None)


class Hostile:
    """An object whose methods raise, or return a wrong type."""

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
    """An array interface without an address."""

    __array_interface__ = {"shape": (2, 3), "typestr": "<f4", "version": 3, "data": "nowhere"}  # noqa: RUF012


class BadDLPack:
    def __dlpack__(self, **_: Any) -> Any:
        raise Ours("__dlpack__")

    def __dlpack_device__(self) -> Any:
        return (1, 0)


def any_array(choose: Choose) -> Any:
    kind = choose(range(20))
    shape = any_shape(choose)
    if kind < 5:
        return odd_numbers(choose, shape, choose(STORED))
    if kind < 9:
        return np.zeros(shape, choose(OTHERS))
    if kind == 9:
        return odd_numbers(choose, shape, np.float32).tolist()
    if kind == 10:
        return np.zeros(shape, np.float32).view(Subclass)
    if kind == 11:
        return np.matrix(np.ones((choose(SIZES), choose(SIZES)), np.float32))
    if kind == 12:
        return np.ma.masked_array(np.ones(shape, np.float32), one_in(choose, 2))
    if kind == 13:
        return [[1.0], [1.0, 2.0]]
    if kind == 14:
        return choose((array.array("f", [1, 2]), memoryview(np.ones((2, 3), np.float32)), b"ab", "ab", bytearray(8)))
    if kind == 15:  # more than any memory, in one element
        return np.broadcast_to(np.float32(1), choose(((3, 2**40), (1, 2**40, 3), (2, 2**20, 2**30))))
    if kind == 16:
        return np.lib.stride_tricks.as_strided(np.ones(4, np.float32), (3, 2), (4, 4))  # overlaps itself
    if kind == 17:
        return np.ones((1,) * choose((5, 32, 63, 64)), np.float32)
    return odd_numbers(choose, shape, np.float32) > 0


def any_number(choose: Choose) -> Any:
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
    return choose((plain, plain, odd, rare)[choose(range(4))])


def any_thing(choose: Choose) -> Any:
    kind = choose(range(8))
    if kind < 3:
        return any_array(choose)
    if kind < 5:
        return any_number(choose)
    if kind == 5:
        return Hostile(choose(range(4)))
    if kind == 6:
        return choose((None, object(), BadInterface(), BadDLPack(), iter((1, 2)), lambda: 1, Ellipsis, slice(1)))
    return choose(("upper_left", "lower_right", "neg_inf", "renormalize", "qk", "dropout", True, False, None, (-1, 3)))


# ---- one input -----------------------------------------------------------------------------------------------------
def memory_of(arguments: dict[str, Any]) -> list[tuple[np.ndarray, bytes]]:
    """Return copies of the outputs before the call."""
    out = arguments.get("out")
    fields = out if isinstance(out, cattn.AttentionOutput) else (out,)
    return [(a, a.tobytes()) for a in fields if isinstance(a, np.ndarray) and a.nbytes < 1 << 20 and a.dtype != object]


def overlapping(choose: Choose, arguments: dict[str, Any]) -> Any:
    """Return an output that is an input, a view of one, or read-only."""
    inputs = [a for a in arguments.values() if isinstance(a, np.ndarray) and a.ndim and a.size < 1 << 20]
    if not inputs:
        return None
    a = choose(inputs)
    kind = choose(range(4))
    if kind == 0:
        return a
    if kind == 1:
        return a[..., ::-1]
    if kind == 2 and a.ndim:
        return cattn.AttentionOutput(a, choose((None, a)), choose((None, a)), None)
    still = a.copy()
    still.flags.writeable = False
    return still


def check(error: Exception, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise Finding unless the documentation promises this exception and its message names an argument."""
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


def chosen(choose: Choose) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a function and arguments that fit."""
    kind = choose(range(16))
    if kind == 0:
        function, arguments = choose(list(IN_ORDER.values()))
        return lambda **given: function(*given.values()), dict(arguments)
    function, make = FUNCTIONS[choose(list(FUNCTIONS))]
    arguments = make(choose, SMALL)
    if kind < 8 and not hasattr(function, "names"):
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind != p.VAR_KEYWORD and p.default is not p.empty}
        arguments = {**defaults, **arguments}
    return function, arguments


def takes_hours(function: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    """Return whether a call would count the pairs of arrays that nobody allocates, or make millions of heads."""
    if function is cattn.explain:
        return any(isinstance(a, np.ndarray) and a.size > 1 << 32 for a in arguments.values())
    if function is cattn.show_mask:  # explain checks its arguments, and counts
        return isinstance(arguments["T_q"], int) and 1 << 24 < arguments["T_q"] < 1 << 62
    heads = arguments.get("num_heads")
    return isinstance(heads, int) and heads > 1 << 16


def run(raw_bytes: bytes) -> None:
    """Make the call of these bytes; raise Finding if it misbehaves."""
    choose = from_bytes(raw_bytes)
    replaced = choose(range(4))
    function, arguments = chosen(choose)
    names = list(arguments)
    for _ in range(replaced):
        name = choose(names)
        old = arguments[name]
        if name == "out" and one_in(choose, 2):
            arguments[name] = overlapping(choose, arguments)
        elif type(old) is np.ndarray and old.size < 1 << 20 and one_in(choose, 2):
            arguments[name] = odd(choose, old)
        else:
            arguments[name] = any_thing(choose)
    if not takes_hours(function, arguments):
        call(function, arguments)


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Make a call; raise Finding if it misbehaves."""
    before = memory_of(arguments)
    rng = arguments.get("rng")
    state = rng.get_state() if isinstance(rng, cattn.TorchGenerator) else None
    try:
        function(**arguments)
    except AssertionError as error:
        raise Finding(str(error)) from error
    except Exception as error:
        check(error, function, arguments)
        for out, bits in before:
            if out.tobytes() != bits:
                raise Finding("a call that raised has written to out") from error
        if state is not None and not np.array_equal(rng.get_state(), state):
            raise Finding("a call that raised has drawn") from error


def bounded() -> None:
    """Let allocations of gigabytes fail, and ignore warnings of NumPy."""
    import resource  # Windows has none, and runs the stored inputs

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    bounded()
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
