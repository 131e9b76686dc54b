"""Turns bytes into arguments of every kind: arrays with any strides, numbers, objects whose methods raise."""

from __future__ import annotations

import array
import decimal
import fractions
from typing import Any

import ml_dtypes
import numpy as np

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
QUANTIZED = (np.int8, ml_dtypes.float8_e4m3fn)
OTHERS = (np.int64, np.int8, np.uint64, np.bool_, np.complex64, np.longdouble, object, "U1", "S3", "M8[s]", "f4,i2")
OTHERS = (*OTHERS, ">f4", ">f8", ">i8", ml_dtypes.float8_e5m2)
SIZES = (0, 1, 2, 3, 5, 8, 17)


class Ours(Exception):  # noqa: N818
    """Raised by our hostile objects; cattn must let it through."""


class Bytes:
    """Choices from bytes; after their end every choice is 0."""

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
    """Return an array of this shape and dtype with any strides."""
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
    if kind == 6 and a.size and a.dtype != np.int8:
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
