"""The building blocks of the classes: `Linear`, `Dropout`, and the functions that draw their parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .. import _cattn
from .._input.arrays import as_array
from .._input.checks import as_dtype, as_flag, as_size
from .._input.contexts import in_default_mode
from .._input.names import with_hints
from .._input.types import RNG
from ..functional._dropout import dropout
from ..functional._layers import linear, linear_backward
from ..random import GeneratorOrNone, TorchGenerator, as_generator, generator_or_default, to_replay
from ._module import Kept, Module

__all__ = ["Dropout", "Linear"]

Array = NDArray[Any]


def draw_uniform(generator: GeneratorOrNone, d_in: int, d_out: int, dtype: np.dtype[Any]) -> Array:
    """Return numbers from [0, 1), shape (d_in, d_out), as ``torch.rand`` draws them."""
    generator = generator_or_default(generator)
    if isinstance(generator, TorchGenerator):
        return generator.rand(d_in, d_out, dtype=dtype)
    return generator.random((d_in, d_out), dtype=dtype.type)


@in_default_mode
def _draw_linear(
    generator: GeneratorOrNone, d_in: int, d_out: int, bias: bool, dtype: np.dtype[Any]
) -> tuple[Array, Array | None]:
    """Return weight and bias, uniform in +-1/sqrt(d_in), as ``torch.nn.Linear`` draws them."""
    generator = generator_or_default(generator)
    if isinstance(generator, TorchGenerator):
        return generator.linear(d_in, d_out, bias, dtype=dtype)
    bound = 1 / math.sqrt(d_in)
    weight = generator.uniform(-bound, bound, (d_out, d_in)).astype(dtype)
    return weight, generator.uniform(-bound, bound, d_out).astype(dtype) if bias else None


class Linear(Module):
    """A linear layer: ``x @ weight.T + bias`` on the last axis.

    Parameters
    ----------
    d_in, d_out : int
        Lengths of the last axis of the input and of the output.
    bias : bool
        Whether the layer has a bias.
    dtype : dtype
        float32 or float64.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        Source of the parameters, which are uniform in +-1/sqrt(d_in). A TorchGenerator draws, bit for bit, the
        parameters of ``torch.nn.Linear``. None is the generator of `manual_seed`; an int seeds a TorchGenerator.

    Attributes
    ----------
    weight : ndarray, shape (d_out, d_in)
        The matrix.
    bias : ndarray, shape (d_out,), or None
        The bias.

    See Also
    --------
    MultiHeadAttention : Has four of them.
    TorchGenerator : Draws the weights that PyTorch draws.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> layer = cattn.Linear(3, 2, bias=False, rng=123)
    >>> layer.weight = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    >>> layer([[1.0, 2.0, 3.0]])
    array([[1., 5.]])
    >>> layer.backward([[1.0, 0.0]])
    array([[1., 0., 0.]])
    >>> layer.grads["weight"]
    array([[1., 2., 3.],
           [0., 0., 0.]])
    """

    _parameters = ("weight", "bias")

    @with_hints
    def __init__(
        self, d_in: int, d_out: int, bias: bool = True, *, dtype: DTypeLike = np.float32, rng: RNG = None
    ) -> None:
        super().__init__()
        self.d_in = as_size(d_in, "d_in")
        self.d_out = as_size(d_out, "d_out")
        self.dtype = as_dtype(dtype)
        self.weight, self.bias = _draw_linear(
            as_generator(rng), self.d_in, self.d_out, as_flag(bias, "bias"), self.dtype
        )

    def __call__(self, x: ArrayLike) -> Array:
        """Return ``x @ weight.T + bias`` in the common dtype of x and the parameters.

        Parameters
        ----------
        x : array_like, shape (..., d_in)
            The input.

        Returns
        -------
        ndarray, shape (..., d_out)
        """
        self._kept = None
        array = as_array(x, "x")
        result = self._forward(array)
        if self.training:
            self._kept = Kept(result.shape, result.dtype, array.copy())
        return result

    def _propagate(self, kept: Kept, grad: Array) -> Array:
        return self._backward(kept.inputs, grad)

    def _forward(self, x: Array) -> Array:
        """Return the output without keeping x for the backward pass."""
        bias = None if self.bias is None else self._parameter("bias", (self.d_out,))
        return project(x, self._matrix().T, bias)

    def _matrix(self) -> Array:
        return self._parameter("weight", (self.d_out, self.d_in))

    def _backward(self, x: Array, grad: Array) -> Array:
        """Return the gradient of x, given the gradient of the output. Add to the gradients of the parameters."""
        rows = grad.reshape(*x.shape[:-1], self.d_out)
        grad_x, grad_weight, grad_bias = linear_backward(rows, x, self._matrix())
        self._add_gradient("weight", grad_weight)
        if self.bias is not None:
            self._add_gradient("bias", grad_bias)
        return grad_x

    def __repr__(self) -> str:
        return f"Linear({self.d_in}, {self.d_out}, bias={self.bias is not None}{show_dtype(self.dtype)})"


class Dropout(Module):
    """Drop elements in training mode, do nothing in evaluation mode.

    `backward` returns 0 where the last call dropped an element, else grad_out / (1 - p).

    Parameters
    ----------
    p : float
        Probability of dropping an element, in [0, 1].
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        Source of the dropout mask. None is the generator of `manual_seed`; an int seeds a TorchGenerator of the layer:
        unlike an int for the function `dropout`, it drops different elements in each call.

    Attributes
    ----------
    p : float
        The probability.

    See Also
    --------
    dropout : The function.
    MultiHeadAttention : Has one for its weights.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> drop = cattn.Dropout(0.5, rng=123)
    >>> drop(np.ones((2, 6)))
    array([[2., 2., 0., 2., 2., 0.],
           [0., 0., 0., 2., 0., 2.]])
    >>> drop.backward(np.ones((2, 6)))
    array([[2., 2., 0., 2., 2., 0.],
           [0., 0., 0., 2., 0., 2.]])
    >>> drop.eval()(np.ones(3))
    array([1., 1., 1.])
    """

    @with_hints
    def __init__(self, p: float = 0.5, *, rng: RNG = None) -> None:
        super().__init__()
        self.p = _cattn._probability(p, "dropout probability")
        self.rng = as_generator(rng)

    @property
    def active_p(self) -> float:
        """The probability in the present mode: 0 in evaluation mode."""
        return self.p if self.training else 0.0

    def draw_from(self) -> GeneratorOrNone:
        """Return the ``rng=`` of the next call of a function."""
        return generator_or_default(self.rng) if self.active_p > 0 else self.rng

    def __call__(self, x: ArrayLike) -> Array:
        """Return x with elements dropped and the others divided by 1 - p, or a copy in evaluation mode.

        Parameters
        ----------
        x : array_like
            The input, of any shape.

        Returns
        -------
        ndarray
            Has the shape and dtype of x.
        """
        self._kept = None
        rng = self.draw_from()
        replay = to_replay(rng) if self.active_p > 0 else None
        result = dropout(x, self.p, training=self.training, rng=rng)
        if self.training:
            self._kept = Kept(result.shape, result.dtype, (replay, self.p))
        return result

    def _propagate(self, kept: Kept, grad: Array) -> Array:
        replay, p = kept.inputs
        return dropout(grad, p, training=p > 0, rng=to_replay(replay))

    def __repr__(self) -> str:
        return f"Dropout({self.p})"


def project(x: Array, matrix: Array, bias: Array | None, name: str = "x") -> Array:
    """Return x @ matrix + bias."""
    if x.ndim == 0 or x.shape[-1] != matrix.shape[0]:
        raise ValueError(f"{name} has shape {x.shape}, wanted (..., {matrix.shape[0]})")
    return linear(x, matrix.T, bias)


def show_dtype(dtype: np.dtype[Any]) -> str:
    """Return the dtype as an argument in a repr, or "" for the default."""
    return "" if dtype == np.float32 else f", dtype={dtype}"
