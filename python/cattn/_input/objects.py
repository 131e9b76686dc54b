"""Arguments that are two things in one: numbers and their scales (Quantized), blocks and their size (BlockMask)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .arrays import (
    _as_readable,
    _quiet,
    as_bool,
    broadcast_shapes,
    converted,
    is_bfloat16,
    is_quantized,
    parts_of,
    read_array,
)
from .checks import as_size
from .contexts import in_default_mode
from .names import with_hints

__all__ = ["BlockMask", "Quantized"]
Array = NDArray[Any]
_set_field = object.__setattr__


def _read_only(array: Array) -> Array:
    """Return a view that nobody writes through."""
    view = array[...]
    view.setflags(write=False)
    return view


def read_quantized(
    obj: object, name: str, scale: object, scale_name: str = "scale"
) -> tuple[Array, NDArray[np.float32]]:
    """Return an array of one byte and a copy of its scales."""
    array = read_array(obj, name)
    if not is_quantized(array.dtype):
        raise TypeError(f"{name} has dtype {array.dtype}, wanted int8 or float8_e4m3fn (of ml_dtypes)")
    factors = as_scale(scale, scale_name)
    check_scale_fits(array, factors, scale_name, name)
    own = np.array(factors)
    refuse_scale(own, scale_name)
    return array, own


class NoArray:
    """An object that NumPy must not wrap in an array of one object."""

    __slots__ = ()
    _instead: str  # where the object goes, for errors

    if not TYPE_CHECKING:  # a type checker would take it for an array

        def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
            raise TypeError(f"a {type(self).__name__} is not an array: {self._instead}")


class _Pair(NoArray):
    """A pair that does not change: it unpacks, is compared by identity, and is checked again when it is unpickled."""

    __slots__ = ("__weakref__",)
    _members: tuple[str, str]

    def _set(self, **fields: Any) -> Self:
        for name, field in fields.items():
            _set_field(self, name, field)
        return self

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} does not change: make another one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} does not change: make another one")

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, name) for name in self._members)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self)


@final
class Quantized(_Pair):
    """Numbers of one byte and their scales: a ``key`` or ``value`` of attention, a ``weight`` of `functional.linear`.

    Each element means ``values.astype(np.float32) * scale``, rounded once. Attention has the bits of a call with the
    array of these products, which is not made. The scales are checked here, so that no call has to.

    Parameters
    ----------
    values : array_like of int8 or float8_e4m3fn (of ``ml_dtypes``)
        The numbers. An array is not copied: the object has a read-only view of it.
    scale : array_like of float, broadcasting to the shape of values
        Positive numbers from 2**-100 to 2**100. They are copied, and converted to float32: (..., T_k, 1) is a scale for
        each token, (..., 1, head_dim) one for each channel.

    Attributes
    ----------
    values : ndarray of int8 or float8_e4m3fn
        The numbers; read-only.
    scale : ndarray of float32
        The scales, in the shape in which they were given; read-only.
    shape, ndim, dtype
        The shape, number of dimensions and dtype of values.
    nbytes
        The bytes of both arrays.

    Raises
    ------
    TypeError
        values has another dtype, or scale is not an array of real numbers.
    ValueError
        scale does not broadcast to values, or has a number outside of 2**-100 to 2**100.

    See Also
    --------
    quantize : Makes one of an array of floats.
    dequantize : The array of products.
    KVCache : Its keys and values are such objects if it is made with ``dtype="int8"``.

    Notes
    -----
    ``values, scale = quantized`` unpacks it. Two objects are equal only if they are the same one.

    Who writes to the array that was given as values changes the numbers, but no scale. The objects that a cache gives
    are views of its memory, into which `KVCache` writes checked scales only.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> key = cattn.Quantized(np.array([[10, -127], [3, 4]], np.int8), [[0.5], [2.0]])
    >>> key
    Quantized(int8 (2, 2), scale float32 (2, 1))
    >>> cattn.dequantize(key)
    array([[  5. , -63.5],
           [  6. ,   8. ]], dtype=float32)
    >>> x = np.ones((2, 2), np.float32)
    >>> cattn.scaled_dot_product_attention(x, key, x)
    array([[1., 1.],
           [1., 1.]], dtype=float32)
    """

    __slots__ = ("_bits", "scale", "values")

    values: Array
    scale: NDArray[np.float32]
    _bits: Array | None  # what C reads: int8, or float8_e4m3fn as uint8; None if nothing was checked

    _members = ("values", "scale")
    _instead = "only key and value of attention and weight of linear may be one: pass cattn.dequantize of it"

    @with_hints
    def __init__(self, values: ArrayLike, scale: ArrayLike) -> None:
        self._set_checked(*read_quantized(values, "values", scale))

    def _set_checked(self, values: Array, scale: NDArray[np.float32]) -> Quantized:
        return self._set_views(_read_only(values), _read_only(scale))

    def _set_views(self, values: Array, scale: NDArray[np.float32]) -> Quantized:
        # Each step of decoding makes two: this is `_set` without a dict.
        _set_field(self, "values", values)
        _set_field(self, "scale", scale)
        _set_field(self, "_bits", values if values.dtype == np.int8 else values.view(np.uint8))
        return self

    @classmethod
    def _of_checked(cls, values: Array, scale: NDArray[np.float32]) -> Quantized:
        """Return one of arrays that fit each other and whose owner keeps the promise."""
        return cls.__new__(cls)._set_checked(values, scale)

    @classmethod
    def _of_views(cls, values: Array, scale: NDArray[np.float32]) -> Quantized:
        """Return one of such arrays that are read-only views already."""
        return cls.__new__(cls)._set_views(values, scale)

    @classmethod
    def _of_argument(cls, values: ArrayLike, scale: ArrayLike, name: str) -> Quantized:
        """Return one of the parts of an argument, which errors name."""
        return cls._of_checked(*read_quantized(values, name, scale, f"{name}.scale"))

    @classmethod
    def _of_leaves(cls, values: Any, scale: Any) -> Quantized:
        """Return one of objects of another library. Nothing is checked before a function of cattn reads them."""
        return cls.__new__(cls)._set(values=values, scale=scale, _bits=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of values."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions of values."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of values and scale."""
        return self.values.nbytes + self.scale.nbytes

    def __repr__(self) -> str:
        return f"Quantized({self.dtype} {self.shape}, scale {self.scale.dtype} {tuple(self.scale.shape)})"


@final
class BlockMask(_Pair):
    """Which blocks of queries and keys are visible, for ``block_mask`` of attention.

    It has the result, bit for bit, of the boolean attn_mask that repeats each element `size` times along both axes, and
    goes together with all other masks. But hidden blocks take neither time nor memory.

    Parameters
    ----------
    blocks : array_like of bool
        True shows all pairs of a block of `size` queries by `size` keys, False hides them. Broadcasts to
        (..., ceil(T_q / size), ceil(T_k / size)). An array is not copied: the object has a read-only view of it.
    size : int
        Number of queries and of keys of a block, at least 1.

    Attributes
    ----------
    blocks : ndarray of bool
        The blocks; read-only.
    size : int
        The size.

    Raises
    ------
    TypeError
        blocks is not boolean, or size is not an int.
    ValueError
        size is smaller than 1.

    See Also
    --------
    scaled_dot_product_attention : Takes one as ``block_mask``.
    explain : Tells how many blocks of keys are visited.

    Notes
    -----
    ``blocks, size = block_mask`` unpacks it. Two objects are equal only if they are the same one.

    Examples
    --------
    Two documents of two tokens each:

    >>> import numpy as np
    >>> import cattn
    >>> documents = cattn.BlockMask(np.eye(2, dtype=bool), 2)
    >>> documents
    BlockMask(bool (2, 2), size=2)
    >>> x = np.zeros((4, 1))
    >>> cattn.attention_weights(x, x, block_mask=documents)
    array([[0.5, 0.5, 0. , 0. ],
           [0.5, 0.5, 0. , 0. ],
           [0. , 0. , 0.5, 0.5],
           [0. , 0. , 0.5, 0.5]])
    """

    __slots__ = ("blocks", "size")

    blocks: NDArray[np.bool_]
    size: int

    _members = ("blocks", "size")
    _instead = "attention takes it by an argument of its own: pass block_mask="

    @with_hints
    def __init__(self, blocks: ArrayLike, size: int) -> None:
        self._set_checked(blocks, size, "blocks", "size")

    def _set_checked(self, blocks: ArrayLike, size: int, name: str, size_name: str) -> BlockMask:
        # C counts sizes in 64 bits.
        return self._set(blocks=_read_only(as_bool(blocks, name, "")), size=as_size(size, size_name, maximum=2**63 - 1))

    @classmethod
    def _of_argument(cls, blocks: ArrayLike, size: int) -> BlockMask:
        """Return one of the parts of ``block_mask``, which errors name."""
        return cls.__new__(cls)._set_checked(blocks, size, "block_mask", "block_mask.size")

    @classmethod
    def _of_leaves(cls, blocks: Any, size: int) -> BlockMask:
        """Return one of an object of another library. Nothing is checked before a function of cattn reads it."""
        return cls.__new__(cls)._set(blocks=blocks, size=size)

    def __repr__(self) -> str:
        return f"BlockMask({self.blocks.dtype} {tuple(self.blocks.shape)}, size={self.size})"


# The key or value of attention in NumPy.
Stored: TypeAlias = ArrayLike | Quantized


# ---- at the doors of other libraries, whose own arrays these classes do not hold ----
def split_scale(obj: Any, name: str) -> tuple[Any, Any]:
    """Return a key or value and its scale: None, unless it is a Quantized or a pair (values, scale)."""
    if isinstance(obj, Quantized):
        return obj.values, obj.scale
    if not isinstance(obj, tuple):
        return obj, None
    if len(obj) != 2:
        raise TypeError(
            f"{name} must be an array, a cattn.Quantized or a pair (values, scale), got a tuple of {len(obj)}"
        )
    return obj


def no_scale_error(name: str, dtype: Any) -> TypeError:
    """Return the error for a query, key or value of quantized numbers alone."""
    cure = "multiply it by its scale" if name == "query" else f"pass the pair ({name}, scale) or a cattn.Quantized"
    return TypeError(f"{name} has dtype {dtype} and no scale: {cure}")


def split_blocks(obj: Any) -> tuple[Any, Any]:
    """Return the blocks and the size of a block mask: a BlockMask, or a pair (blocks, size). Twice None for None."""
    if obj is None:
        return None, None
    if isinstance(obj, BlockMask):
        return obj.blocks, obj.size
    if not isinstance(obj, tuple) or len(obj) != 2:
        raise TypeError(f"block_mask must be a cattn.BlockMask or a pair (blocks, size), got {type(obj).__name__}")
    return obj


def scale_error(name: str, dtype: object) -> TypeError:
    """Return the error for scales of numbers that are not quantized."""
    return TypeError(f"{name} has dtype {dtype} and a scale; scales belong to int8 and float8_e4m3fn")


@in_default_mode
@_quiet
def as_scale(obj: object, name: str) -> Array:
    """Return scales in float32."""
    array = read_array(obj, name)
    if array.dtype.kind not in "iuf" and not is_bfloat16(array.dtype):
        raise TypeError(f"{name} has dtype {array.dtype}; it must hold real numbers: float32, or what rounds to it")
    return _as_readable(array if array.dtype == np.float32 else converted(array, np.float32), name)


# The C code multiplies scales by powers of two, which must not underflow or overflow.
LEAST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100


def refuse_scale(scale: Array, name: str) -> None:
    """Raise ValueError if a scale is zero, negative, infinite, NaN, or beyond the limits."""
    if _cattn._are_scales(scale):
        return
    wrong = np.argwhere(~((scale >= LEAST_SCALE) & (scale <= LARGEST_SCALE)))
    if len(wrong):
        place = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"{name} must be positive and finite, from 2**-100 to 2**100, got {scale[place]} at {place}; places of a "
            f"cache that hold no token yet take any such number, for instance 1"
        )


@in_default_mode
@_quiet
def multiply(array: Array, scale: Array) -> NDArray[np.float32]:
    """Return the numbers of a quantized array, each rounded once."""
    result = np.empty_like(array, np.float32)
    factors = np.broadcast_to(scale, array.shape)
    for part in parts_of(array.shape):
        np.multiply(array[part].astype(np.float32), factors[part], out=result[part])
    return result


def check_scale_fits(array: Array, scale: Array, name: str = "scale", whose: str = "x") -> None:
    """Raise ValueError unless a scale broadcasts to the shape of its array."""
    try:
        fits = broadcast_shapes(array.shape, scale.shape) == array.shape
    except ValueError:
        fits = False
    if not fits:
        lacks_last = scale.ndim == array.ndim - 1 and all(
            own in (1, size) for own, size in zip(scale.shape, array.shape[:-1], strict=True)
        )
        hint = f": for a scale of each token pass {name}[..., None]" if lacks_last and scale.ndim else ""
        raise ValueError(
            f"{name} has shape {scale.shape}, which does not broadcast to the shape of {whose} {array.shape}{hint}"
        )


def dequantized(array: Array, scale: Array) -> Array:
    """Return float64 numbers that are the products array * scale in float32. The array may be bits of float8_e4m3fn."""
    if array.dtype == np.uint8:
        array = array.view(sys.modules["ml_dtypes"].float8_e4m3fn)
    return converted(multiply(array, scale), np.float64)
