"""What the classes have in common: training mode, state dicts, files; and their two building blocks."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ._arrays import as_array
from ._checks import as_dtype, as_size
from ._softmax import dropout
from ._types import RNG
from .random import TorchGenerator, default_generator

if TYPE_CHECKING:
    from ._state_dict import LoadResult
    from ._weights_io import FilePath

__all__ = ["Dropout", "Linear", "Module"]

Array = NDArray[Any]


Generator: TypeAlias = "TorchGenerator | np.random.Generator | None"  # a string: numpy.random is slow to import


def as_generator(rng: RNG) -> Generator:
    """Return what rng stands for in a class: None stays None, the generator of `manual_seed` at each use."""
    if rng is None or isinstance(rng, TorchGenerator):
        return rng
    if isinstance(rng, (bool, np.bool_)):
        raise TypeError("rng must be None, an int, a TorchGenerator or a numpy.random.Generator, got bool")
    if isinstance(rng, SupportsIndex) and getattr(rng, "ndim", 0) == 0:
        return TorchGenerator(operator.index(rng))
    # as an exact array: NumPy recurses without end into the rows of a numpy.matrix
    seed: Any = np.asarray(rng) if isinstance(rng, np.ndarray) else rng
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise type(error)(f"rng must be None, an int, a TorchGenerator or a numpy.random.Generator: {error}") from error


def draw_uniform(generator: Generator, d_in: int, d_out: int, dtype: np.dtype[Any]) -> Array:
    """Return numbers from [0, 1), shape (d_in, d_out), as ``torch.rand``."""
    generator = default_generator() if generator is None else generator
    if isinstance(generator, TorchGenerator):
        return generator.rand(d_in, d_out, dtype=dtype)
    return generator.random((d_in, d_out), dtype=dtype.type)


def _draw_linear(
    generator: Generator, d_in: int, d_out: int, bias: bool, dtype: np.dtype[Any]
) -> tuple[Array, Array | None]:
    """Return weight and bias, uniform in +-1/sqrt(d_in), as ``torch.nn.Linear`` draws them."""
    generator = default_generator() if generator is None else generator
    if isinstance(generator, TorchGenerator):
        return generator.linear(d_in, d_out, bias, dtype=dtype)
    bound = 1 / math.sqrt(d_in)
    weight = generator.uniform(-bound, bound, (d_out, d_in)).astype(dtype)
    return weight, generator.uniform(-bound, bound, d_out).astype(dtype) if bias else None


class Module:
    """Base of the classes: a tree of modules whose leaves hold arrays.

    Attributes
    ----------
    training : bool
        Whether dropout is active; True at first.
    """

    training: bool
    _parameters: ClassVar[tuple[str, ...]] = ()  # attributes that hold an array, or None

    def __init__(self) -> None:
        self.training = True

    def _children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item

    def train(self, mode: bool = True) -> Self:
        """Switch training mode, here and in every part, and return the module.

        Parameters
        ----------
        mode : bool
            Whether dropout is active.
        """
        self.training = bool(mode)
        for _, child in self._children():
            child.train(mode)
        return self

    def eval(self) -> Self:
        """Switch dropout off, here and in every part, and return the module."""
        return self.train(False)

    def state_dict(self) -> dict[str, Array]:
        """Return the parameters by name, as ``torch.nn.Module.state_dict`` names them.

        Returns
        -------
        dict of str to ndarray
            The arrays themselves, not copies.

        Examples
        --------
        >>> import cattn
        >>> sorted(cattn.Linear(3, 2, rng=123).state_dict())
        ['bias', 'weight']
        """
        own = ((name, getattr(self, name)) for name in self._parameters)
        state = {name: np.asarray(value) for name, value in own if value is not None}
        for prefix, child in self._children():
            state |= {f"{prefix}.{name}": value for name, value in child.state_dict().items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Take the parameters from a state dict: one of ours, PyTorch's, or one in another naming scheme.

        Parameters
        ----------
        state_dict : mapping of str to array_like
            Arrays or tensors of any floating dtype. The names may share a prefix (``transformer.h.0.attn.``), and are
            those of the book (W_query, W_q), of ``torch.nn.MultiheadAttention`` (in_proj_weight), of GPT-2 (c_attn,
            c_proj), of Llama and others (q_proj, k_proj, v_proj, o_proj; wq, wk, wv, wo; qkv, proj), or those of
            separate heads (heads.0.W_query). Masks among them are left out.
        strict : bool
            False: parameters without an array keep theirs, and arrays without a parameter are ignored.

        Returns
        -------
        LoadResult
            The lists missing_keys and unexpected_keys, empty when strict.

        Raises
        ------
        TypeError
            An array does not hold real numbers.
        ValueError
            Something is missing, unexpected, ambiguous or of the wrong shape: the message lists everything. The
            module is unchanged then.

        Notes
        -----
        The name decides how a matrix lies: ``W_query.weight`` is (d_out, d_in) as in ``nn.Linear``, ``W_query`` alone
        is (d_in, d_out), as in SelfAttention_v1. Each is converted to the layout of this class. Only c_attn and
        c_proj are in use for both; there the shape of c_attn decides.

        The arrays are copied, and replace those of the module.

        Examples
        --------
        >>> import cattn
        >>> v1, v2 = cattn.SelfAttention_v1(3, 2, rng=1), cattn.SelfAttention_v2(3, 2, rng=2)
        >>> v1.load_state_dict(v2.state_dict())
        LoadResult(missing_keys=[], unexpected_keys=[])
        >>> bool((v1.W_query == v2.W_query.weight.T).all())
        True
        """
        from ._state_dict import match  # here, and the files' below: most programs load no weights, and import faster

        own = self.state_dict()
        new, result = match(state_dict, own, strict=strict, what=repr(self))
        for name, array in new.items():
            owner: Any = self
            *path, attribute = name.split(".")
            for step in path:
                owner = owner[int(step)] if step.isdecimal() else getattr(owner, step)
            setattr(owner, attribute, array)
        return result

    def save(self, path: FilePath) -> None:
        """Write the parameters to a file; one that exists is replaced when the new one is complete.

        Parameters
        ----------
        path : path-like
            Ends in ``.npz`` or ``.safetensors`` (which needs the package safetensors).

        Raises
        ------
        ValueError
            Another ending.
        ImportError
            safetensors is not installed.
        """
        from ._weights_io import save_arrays

        save_arrays(path, self.state_dict())

    def load(self, path: FilePath, strict: bool = True) -> LoadResult:
        """Take the parameters from a ``.npz`` or ``.safetensors`` file.

        Parameters
        ----------
        path : path-like
            The file; its names may be those of any scheme that `load_state_dict` knows.
        strict : bool
            As in `load_state_dict`.

        Returns
        -------
        LoadResult
            As `load_state_dict`.

        Raises
        ------
        TypeError, ValueError
            As `load_state_dict`; or the file is damaged, or ends otherwise.
        ImportError
            safetensors is not installed.
        """
        from ._weights_io import load_arrays

        return self.load_state_dict(load_arrays(path), strict)


class Linear(Module):
    """An affine map of the last axis: ``x @ weight.T + bias``.

    Parameters
    ----------
    d_in, d_out : int
        Length of the last axis before and after.
    bias : bool
        Whether there is a bias.
    dtype : dtype
        float32 or float64.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        Where the parameters are drawn from: uniform in +-1/sqrt(d_in), by a TorchGenerator bit for bit those of
        ``torch.nn.Linear``. None is the generator of `manual_seed`, an int seeds a TorchGenerator.

    Attributes
    ----------
    weight : ndarray, shape (d_out, d_in)
        The matrix.
    bias : ndarray, shape (d_out,), or None
        The bias.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> layer = cattn.Linear(3, 2, bias=False, rng=123)
    >>> layer.weight = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    >>> layer([[1.0, 2.0, 3.0]])
    array([[1., 5.]])
    """

    _parameters = ("weight", "bias")

    def __init__(
        self, d_in: int, d_out: int, bias: bool = True, *, dtype: DTypeLike = np.float32, rng: RNG = None
    ) -> None:
        super().__init__()
        self.d_in = as_size(d_in, "d_in")
        self.d_out = as_size(d_out, "d_out")
        self.dtype = as_dtype(dtype)
        self.weight: Array
        self.bias: Array | None
        self.weight, self.bias = _draw_linear(as_generator(rng), self.d_in, self.d_out, bool(bias), self.dtype)

    def __call__(self, x: ArrayLike) -> Array:
        """Return the map of x, in the dtype that x and weight share.

        Parameters
        ----------
        x : array_like, shape (..., d_in)
            What is mapped.

        Returns
        -------
        ndarray, shape (..., d_out)
        """
        return project(as_array(x, "x"), np.asarray(self.weight).T, self.bias)

    def __repr__(self) -> str:
        return f"Linear({self.d_in}, {self.d_out}, bias={self.bias is not None}{show_dtype(self.dtype)})"


class Dropout(Module):
    """Drops elements in training mode, does nothing in evaluation mode.

    Parameters
    ----------
    p : float
        Probability of an element to be dropped, in [0, 1].
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        Where the bits come from. None is the generator of `manual_seed`, an int seeds a TorchGenerator of the module:
        unlike an int for the function `dropout` it drops others in each call.

    Attributes
    ----------
    p : float
        As given.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> drop = cattn.Dropout(0.5, rng=123)
    >>> drop(np.ones((2, 6)))
    array([[2., 2., 0., 2., 2., 0.],
           [0., 0., 0., 2., 0., 2.]])
    >>> drop.eval()(np.ones(3))
    array([1., 1., 1.])
    """

    def __init__(self, p: float = 0.5, *, rng: RNG = None) -> None:
        super().__init__()
        if isinstance(p, (bool, np.bool_, str)) or not hasattr(p, "__float__"):
            raise TypeError(f"dropout probability must be a number, got {type(p).__name__}")
        try:
            self.p = float(p)
        except (TypeError, ValueError):  # an array of several
            raise TypeError(f"dropout probability must be a number, got {type(p).__name__}") from None
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
        self.rng = as_generator(rng)

    @property
    def active_p(self) -> float:
        """The probability that counts now: 0 outside of training."""
        return self.p if self.training else 0.0

    def draw_from(self) -> Generator:
        """Return what ``rng=`` of a function takes now."""
        return default_generator() if self.rng is None and self.active_p > 0 else self.rng

    def __call__(self, x: ArrayLike) -> Array:
        """Return x with elements dropped and the others divided by 1 - p; a copy outside of training.

        Parameters
        ----------
        x : array_like
            Of any shape.

        Returns
        -------
        ndarray
            Shape and dtype of x.
        """
        return dropout(x, self.p, training=self.training, rng=self.draw_from())

    def __repr__(self) -> str:
        return f"Dropout({self.p})"


def project(x: Array, matrix: Array, bias: Array | None, name: str = "x") -> Array:
    """Return x @ matrix + bias, all rows of x in one product."""
    if x.ndim == 0 or x.shape[-1] != matrix.shape[0]:
        raise ValueError(f"{name} has shape {x.shape}, wanted (..., {matrix.shape[0]})")
    result: Array = (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], matrix.shape[1])
    if bias is None:
        return result
    bias = np.asarray(bias)
    return np.add(result, bias, out=result if np.result_type(result, bias) == result.dtype else None)


def show_dtype(dtype: np.dtype[Any]) -> str:
    """Return what a repr says of a dtype: nothing of the usual one."""
    return "" if dtype == np.float32 else f", dtype={dtype}"
