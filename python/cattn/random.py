"""PyTorch's CPU random numbers without PyTorch: the generator class, and the generator that all modules share.

The same seed gives the same numbers as torch 2.13 on x86-64 with AVX2, bit for bit, on every machine. The C type
``_cattn.TorchStream`` draws them; this file checks shapes and dtypes.
"""

from __future__ import annotations

import copy
import operator
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import _cattn
from ._input.arrays import as_array, read_array
from ._input.checks import as_dtype, as_int, as_size
from ._input.names import public_names, with_hints

__all__ = ["TorchGenerator", "default_generator", "manual_seed"]
__dir__ = public_names(globals())

Size = SupportsIndex | Iterable[SupportsIndex]


def _allocate(size: tuple[Size, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialised array of the shape that ``f(2, 3)``, ``f((2, 3))`` or ``f([2, 3])`` means."""
    if len(size) == 1 and isinstance(size[0], Iterable) and getattr(size[0], "ndim", 1) > 0:
        size = tuple(size[0])
    shape = []
    for n in size:
        try:
            shape.append(as_int(n, "size"))
        except TypeError:
            raise TypeError(f"size must be ints or one tuple of ints, got {type(n).__name__}") from None
        if shape[-1] < 0:
            raise ValueError(f"size must not be negative, got {_cattn._shown(shape[-1])}")
    try:
        return np.empty(shape, dtype)
    except ValueError as error:  # too many dimensions, or more bytes than can be addressed
        raise ValueError(f"size {tuple(shape)} is too large: {error}") from error


def _empty(size: tuple[Size, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialised array of float32 or float64."""
    kind = as_dtype(dtype)
    if np.dtype(dtype) != kind:  # another byte order
        raise TypeError(f"dtype must be float32 or float64, got {np.dtype(dtype)}")
    return _allocate(size, kind)


def _integer(value: object, name: str) -> int:
    """Return value as an int of 64 bits."""
    number = as_int(value, name)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must be in -2**63 <= {name} < 2**63, got {_cattn._shown(number)}")
    return number


class TorchGenerator(_cattn.TorchStream):
    """A random generator with the numbers of PyTorch's CPU generator for the same seed.

    All methods draw from one sequence of numbers, as scripts do after ``torch.manual_seed(seed)``. A call that raises
    leaves the generator as it was. Threads may share a generator: each call draws its numbers without interruption.
    Generators can be pickled and copied; a copy continues independently from the same place.

    Parameters
    ----------
    seed : int
        From -2**63 to 2**64 - 1, as ``torch.manual_seed`` takes it; negative seeds are read in two's complement. Seeds
        that agree in their low 32 bits give the same numbers.
    dropout : {"aten", "mkl"}
        How dropout masks are drawn: as current builds of PyTorch do, or as older x86 builds with Intel's MKL do. Only
        dropout masks depend on it.

    Raises
    ------
    TypeError, ValueError
        seed is not an int, or out of range; dropout is neither of the two.

    See Also
    --------
    manual_seed : Seeds the generator that all modules share.
    dropout : Takes a generator as ``rng``.
    scaled_dot_product_attention : Takes a generator as ``rng``.

    Notes
    -----
    Numbers come from the Mersenne Twister MT19937 (Matsumoto and Nishimura, 1998). Sizes are given as ints or as one
    tuple; arrays are filled in row-major order, as PyTorch fills contiguous tensors. float64 ``randn`` and sizes below
    16 use the logarithm, sine and cosine of the C library, as PyTorch does: the last bit depends on the platform.

    Examples
    --------
    >>> import cattn
    >>> g = cattn.TorchGenerator(123)
    >>> g.rand(2, 3).round(4)
    array([[0.2961, 0.5166, 0.2517],
           [0.6886, 0.074 , 0.8665]], dtype=float32)
    >>> cattn.dropout([1.0, 1.0, 1.0, 1.0], 0.5, rng=cattn.TorchGenerator(123))
    array([2., 2., 0., 2.])
    """

    __slots__ = ()

    @with_hints
    def __init__(self, seed: int, dropout: Literal["aten", "mkl"] = "aten") -> None:
        self._seed(seed, dropout)

    def rand(self, *size: Size, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Draw uniform numbers from [0, 1), as ``torch.rand``.

        Parameters
        ----------
        *size : ints, or one tuple of ints
            Shape of the result. Without sizes it is a 0-dimensional array.
        dtype : dtype
            float32 or float64.

        Returns
        -------
        ndarray
            Multiples of 2**-24 (float32) or 2**-53 (float64).

        Raises
        ------
        TypeError, ValueError
            size does not hold ints or is negative, or dtype is another.

        Examples
        --------
        >>> import cattn
        >>> cattn.TorchGenerator(123).rand(3).round(4)
        array([0.2961, 0.5166, 0.2517], dtype=float32)
        """
        return self._uniform(_empty(size, dtype), 0.0, 1.0)

    def randn(self, *size: Size, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Draw normal numbers of mean 0 and standard deviation 1, as ``torch.randn``.

        Parameters
        ----------
        *size : ints, or one tuple of ints
            Shape of the result. Without sizes it is a 0-dimensional array.
        dtype : dtype
            float32 or float64.

        Returns
        -------
        ndarray

        Raises
        ------
        TypeError, ValueError
            size does not hold ints or is negative, or dtype is another.

        Notes
        -----
        Fewer than 16 numbers are drawn in pairs (Box and Muller, 1958); an odd one is kept for the next such call. From
        16 on they are drawn 16 at a time, by polynomials in float32.

        Examples
        --------
        >>> import cattn
        >>> cattn.TorchGenerator(123).randn(3).round(4)
        array([-0.1115,  0.1204, -0.3696], dtype=float32)
        """
        return self._normal(_empty(size, dtype))

    def uniform(self, low: float, high: float, *size: Size, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Draw uniform numbers from [low, high), as ``tensor.uniform_(low, high)``.

        Parameters
        ----------
        low, high : float
            Finite, low <= high.
        *size : ints, or one tuple of ints
            Shape of the result. Without sizes it is a 0-dimensional array.
        dtype : dtype
            float32 or float64.

        Returns
        -------
        ndarray

        Raises
        ------
        TypeError, ValueError
            size does not hold ints or is negative, low or high is not a number, low is above high, one of them or their
            difference is not finite in dtype, or dtype is another.

        Examples
        --------
        >>> import cattn
        >>> cattn.TorchGenerator(123).uniform(-1, 1, 3).round(4)
        array([-0.4078,  0.0331, -0.4967], dtype=float32)
        """
        return self._uniform(_empty(size, dtype), low, high)

    def randint(
        self,
        low: int | Iterable[SupportsIndex] = 0,
        high: int | Iterable[SupportsIndex] | None = None,
        size: Size | None = None,
        *,
        dtype: DTypeLike = np.int64,
    ) -> NDArray[Any]:
        """Draw integers from low <= n < high, as ``torch.randint``.

        Parameters
        ----------
        low, high : int
            ``randint(high, size)`` starts from 0. Within 64 bits, low < high.
        size : int or tuple of ints
            Shape of the result.
        dtype : dtype
            An integer type that holds low and high - 1.

        Returns
        -------
        ndarray

        Raises
        ------
        TypeError
            low, high or size is not an int, size is missing, or dtype is not an integer type.
        ValueError
            low is not below high, dtype cannot hold the numbers, or size is negative.

        Notes
        -----
        A number is a random word modulo high - low; below 2**28 the word has 32 bits, from there on 64.

        Examples
        --------
        >>> import cattn
        >>> cattn.TorchGenerator(123).randint(10, (5,))
        array([2, 9, 2, 0, 0])
        """
        if size is None and high is not None:
            low, high, size = 0, cast(Any, low), cast(Any, high)
        low, high = (0, low) if high is None and low != 0 else (low, high)  # randint(high, size=size)
        if size is None or high is None:
            raise TypeError("randint needs high and size: randint(high, size) or randint(low, high, size)")
        first, end = _integer(low, "low"), _integer(high, "high")
        try:
            kind = np.dtype(dtype)
        except TypeError:
            raise TypeError(f"dtype must be an integer type, got {_cattn._shown(dtype)}") from None
        if kind.kind not in "iu":
            raise TypeError(f"dtype must be an integer type, got {kind}")
        if first < end and not np.iinfo(kind).min <= first <= end - 1 <= np.iinfo(kind).max:
            raise ValueError(f"dtype {kind} cannot hold low={first} to high={end}")
        wide = _allocate((size,), np.int64)
        narrow = wide if kind == np.int64 else np.empty(wide.shape, kind)  # nothing may fail after the draw
        self._integers(wide, first, end)
        if narrow is not wide:
            narrow[...] = wide
        return narrow

    def bernoulli(self, p: ArrayLike, *size: Size, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Draw ones with probability p, and zeros otherwise.

        Parameters
        ----------
        p : float or array_like
            In [0, 1]. A number: as ``tensor.bernoulli_(p)``, 64 random bits for each element. An array: as
            ``torch.bernoulli(p)``, 32 bits in float32 and 64 in float64; integers and lists become float64.
        *size : ints, or one tuple of ints
            Shape of the result, if p is a number.
        dtype : dtype
            float32 or float64, the dtype of the result, if p is a number.

        Returns
        -------
        ndarray

        Raises
        ------
        TypeError, ValueError
            size does not hold ints, is negative or is given with an array, p is not in [0, 1], or dtype is another.

        Examples
        --------
        >>> import cattn
        >>> cattn.TorchGenerator(123).bernoulli(0.5, 6)
        array([1., 1., 0., 1., 1., 0.], dtype=float32)
        """
        if isinstance(p, (int, float, np.number)):
            return self._bernoulli(_empty(size, dtype), p)
        if size:
            raise TypeError("size is that of p where p is an array: leave it out")
        each = np.array(as_array(p, "p"), order="C")  # a copy: C accepts only writable arrays
        if each.itemsize < 4:
            raise TypeError("p must be float32 or float64 where it is an array, got halves")
        if not np.all((each >= 0) & (each <= 1)):
            raise ValueError("p must be in [0, 1] everywhere")
        return self._bernoulli(np.empty(each.shape, each.dtype), each)

    def linear(
        self, in_features: int, out_features: int, bias: bool = True, *, dtype: DTypeLike = np.float32
    ) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Draw the weight and the bias of a linear layer, as ``torch.nn.Linear`` initialises them.

        Parameters
        ----------
        in_features, out_features : int
            Sizes of the layer's input and output.
        bias : bool
            Whether the layer has a bias.
        dtype : dtype
            float32 or float64.

        Returns
        -------
        weight : ndarray, shape (out_features, in_features)
        bias : ndarray, shape (out_features,), or None
            Both uniform between -1/sqrt(in_features) and 1/sqrt(in_features).

        Raises
        ------
        TypeError, ValueError
            A size is not an int, or negative, or dtype is another.

        Notes
        -----
        The bound of the weight is computed as PyTorch does (He et al., 2015, with a slope of sqrt(5)). For some sizes
        it differs from the bound of the bias in the last bit.

        Examples
        --------
        >>> import cattn
        >>> weight, bias = cattn.TorchGenerator(123).linear(3, 2)
        >>> weight.round(4)
        array([[-0.2354,  0.0191, -0.2867],
               [ 0.2177, -0.4919,  0.4232]], dtype=float32)
        >>> bias.shape
        (2,)
        """
        rows, columns = as_size(out_features, "out_features", 0), as_size(in_features, "in_features", 0)
        weight = _empty((rows, columns), dtype)
        offset = _empty((rows,), dtype) if bias else None
        return self._linear(weight, offset)

    def dropout_mask(self, p: float, *size: Size) -> NDArray[np.bool_]:
        """Draw the mask of one dropout: True where an element is kept.

        ``cattn.dropout(x, p, rng=generator)`` keeps the same elements, and so does ``torch.nn.functional.dropout``.

        Parameters
        ----------
        p : float
            Probability of dropping an element, in [0, 1]. 0 and 1 draw nothing.
        *size : ints, or one tuple of ints
            Shape of the mask.

        Returns
        -------
        ndarray of bool

        Raises
        ------
        TypeError, ValueError
            size does not hold ints or is negative, or p is not a number in [0, 1].

        Examples
        --------
        >>> import cattn
        >>> cattn.TorchGenerator(123).dropout_mask(0.5, 2, 3)
        array([[ True,  True, False],
               [ True,  True, False]])
        """
        return self._dropout_mask(_allocate(size, np.bool_), p, 0)

    @property
    def dropout(self) -> Literal["aten", "mkl"]:
        """How dropout masks are drawn: "aten" or "mkl"."""
        return self._settings()[1]

    def initial_seed(self) -> int:
        """Return the seed, 0 <= seed < 2**64."""
        return self._settings()[0]

    def manual_seed(self, seed: int) -> TorchGenerator:
        """Start again from seed, and return the generator. `dropout` does not change.

        Parameters
        ----------
        seed : int
            As for the class.
        """
        self._seed(seed, None)
        return self

    def get_state(self) -> NDArray[np.uint8]:
        """Return the state in PyTorch's format.

        Returns
        -------
        ndarray of uint8, shape (5056,)
            The state that ``torch.get_rng_state()`` returns at this place; PyTorch continues from it after
            ``torch.set_rng_state(torch.from_numpy(state))``. `dropout` is not part of it.

        Examples
        --------
        >>> import cattn
        >>> g = cattn.TorchGenerator(123)
        >>> state = g.get_state()
        >>> first = g.rand(3)
        >>> g.set_state(state)
        >>> bool((g.rand(3) == first).all())
        True
        """
        return self._get_state()

    def set_state(self, state: ArrayLike) -> None:
        """Continue from a state of `get_state` or of ``torch.get_rng_state()``.

        Parameters
        ----------
        state : array_like of uint8, shape (5056,)
            An array, or a tensor.

        Raises
        ------
        TypeError
            state is not uint8.
        ValueError
            state has another size, or is not valid. The generator is as it was.
        """
        array = read_array(state, "state")
        if array.dtype != np.uint8:
            raise TypeError(f"state must be uint8, got {array.dtype}")
        self._set_state(np.array(array.ravel(), order="C"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.dropout, self.get_state()), super().__getstate__()

    def __repr__(self) -> str:
        seed, dropout = self._settings()
        return f"{type(self).__name__}({seed})" if dropout == "aten" else f"{type(self).__name__}({seed}, {dropout!r})"


def _restored(kind: type[TorchGenerator], dropout: str, state: NDArray[np.uint8]) -> TorchGenerator:
    """Rebuild a generator from its pickle. Pickles name this function: do not rename it."""
    generator = kind.__new__(kind)
    generator._seed(0, dropout)
    generator.set_state(state)
    return generator


_default: TorchGenerator | None = None
_default_lock = threading.Lock()


def default_generator() -> TorchGenerator:
    """Return the generator that all modules without a generator of their own draw from.

    Before the first `cattn.manual_seed` it is seeded from the system's entropy.

    Returns
    -------
    TorchGenerator
        Always the same object.

    Examples
    --------
    >>> import cattn.random
    >>> cattn.random.default_generator() is cattn.manual_seed(123)
    True
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = TorchGenerator(int.from_bytes(os.urandom(8), "little"))
        return _default


@with_hints
def manual_seed(seed: int) -> TorchGenerator:
    """Seed the generator that all modules share, as ``torch.manual_seed`` does.

    Parameters
    ----------
    seed : int
        From -2**63 to 2**64 - 1; see `TorchGenerator`.

    Returns
    -------
    TorchGenerator
        The generator, so that ``rng=cattn.manual_seed(123)`` draws from it.

    Raises
    ------
    TypeError, ValueError
        seed is not an int, or out of range.

    See Also
    --------
    TorchGenerator : A generator of its own.
    dropout : Takes the result as ``rng``.

    Notes
    -----
    The classes draw weights and dropout from this generator. The functions do not use it by themselves: pass it as
    ``rng``.

    Examples
    --------
    >>> import cattn
    >>> cattn.dropout([[1.0, 1.0, 1.0]] * 2, 0.5, rng=cattn.manual_seed(123))
    array([[2., 2., 0.],
           [2., 2., 0.]])
    """
    return default_generator().manual_seed(seed)


# ---- the meaning of the argument rng: a seed for functions, a generator for classes ----------------------------------
# A string, because the attribute access would import numpy.random, which is slow.
GeneratorOrNone: TypeAlias = "TorchGenerator | np.random.Generator | None"


def _numpy_generator(rng: Any, accepted: str) -> np.random.Generator:
    # NumPy recurses without end into the rows of a numpy.matrix, so pass an exact ndarray.
    torch: Any = sys.modules.get("torch")  # not imported: there are no generators of PyTorch
    if torch is not None and isinstance(rng, torch.Generator):
        raise TypeError(
            f"rng must be {accepted}, got a torch.Generator: pass cattn.TorchGenerator({rng.initial_seed()}), which "
            f"draws the same numbers"
        )
    if rng is np.random:
        raise TypeError(f"rng must be {accepted}, got the module numpy.random: pass numpy.random.default_rng()")
    exact = np.asarray(rng) if isinstance(rng, np.ndarray) else rng
    # NumPy would read each byte as a number, and recurse without end into a list of itself.
    if isinstance(rng, (str, bytes, bytearray, memoryview)) or _is_deep(rng):
        raise TypeError(f"rng must be {accepted}, got {type(rng).__name__}")
    try:
        return np.random.default_rng(exact)
    except ValueError as error:
        raise ValueError(f"rng must be {accepted}: {error}") from error
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # of the object's own methods
        raise TypeError(f"rng must be {accepted}: {error}") from error


def _is_deep(obj: object, levels: int = 4) -> bool:
    """Return whether lists are nested more than `levels` levels."""
    return isinstance(obj, (list, tuple)) and (levels == 0 or any(_is_deep(item, levels - 1) for item in obj))


def draw_seed(rng: Any) -> int:
    """Return the 64-bit seed of one call: an int is the seed itself, a generator draws one."""
    try:
        return operator.index(rng)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        accepted = "None, an int, a cattn.TorchGenerator, or what numpy.random.default_rng takes"
        return int(_numpy_generator(rng, accepted).integers(0, 2**64, dtype=np.uint64))


def as_generator(rng: Any) -> GeneratorOrNone:
    """Return the generator of a class. None stays None: each use draws from the generator of `manual_seed`."""
    if rng is None or isinstance(rng, TorchGenerator):
        return rng
    accepted = "None, an int, a TorchGenerator or a numpy.random.Generator"
    if isinstance(rng, (bool, np.bool_)):
        raise TypeError(f"rng must be {accepted}, got bool")
    if isinstance(rng, SupportsIndex) and getattr(rng, "ndim", 0) == 0:
        try:
            seed = operator.index(rng)
        except (MemoryError, RecursionError):
            raise
        except Exception:
            pass
        else:
            if not -(2**63) <= seed < 2**64:
                raise ValueError(f"rng must be in -2**63 <= rng < 2**64 if it is an int, got {_cattn._shown(seed)}")
            return TorchGenerator(seed)
    return _numpy_generator(rng, accepted)


def generator_or_default(generator: GeneratorOrNone) -> TorchGenerator | np.random.Generator:
    """Return the generator to draw from now."""
    return default_generator() if generator is None else generator


def to_replay(generator: GeneratorOrNone) -> GeneratorOrNone:
    """Return a copy, which repeats the next draws of the generator."""
    return copy.deepcopy(generator)
