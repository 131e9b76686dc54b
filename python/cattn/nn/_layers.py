"""The base class: modes, parameters and their gradients, state dicts, files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

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

if TYPE_CHECKING:
    from ._files import FilePath
    from ._state_dict import LoadResult

__all__ = ["Dropout", "Linear", "Module"]
Array = NDArray[Any]


class _Slot(NamedTuple):
    """An attribute that holds a parameter."""

    name: str  # in the state dict
    owner: Module
    attribute: str


class Kept(NamedTuple):
    """The part of a forward pass that `Module.backward` needs."""

    shape: tuple[int, ...]  # of the output
    dtype: np.dtype[Any]  # of the output
    inputs: Any  # of the class's own backward pass


class Module:
    """Base of the classes: a tree of modules whose leaves hold arrays.

    Attributes
    ----------
    training : bool
        Whether dropout is active; True at first.
    """

    _parameters: ClassVar[tuple[str, ...]] = ()  # attributes that hold an array, or None

    def __init__(self) -> None:
        self.training = True
        # A `Kept` or similar of the last forward pass in training, None without one, or the error text of `backward`.
        self._kept: Any = None
        self._gradients: dict[str, Array] = {}  # of the parameters of this module, not of its children

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: everything except the arrays kept for `backward`."""
        return vars(self) | {"_kept": None}

    def _children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item

    def _slots(self) -> Iterator[_Slot]:
        """Yield every slot that holds a parameter, in the order of the state dict."""
        for name in self._parameters:
            if getattr(self, name) is not None:
                yield _Slot(name, self, name)
        for prefix, child in self._children():
            yield from (slot._replace(name=f"{prefix}.{slot.name}") for slot in child._slots())

    def _tied(self) -> Iterable[list[_Slot]]:
        """Return the slots of each parameter: several if the parameter, or its module, is tied."""
        held = [(slot, getattr(slot.owner, slot.attribute)) for slot in self._slots()]  # references keep the ids unique
        places: dict[int, list[_Slot]] = {}
        for slot, value in held:
            places.setdefault(id(value), []).append(slot)
        return places.values()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module and all its parts, and return the module.

        Parameters
        ----------
        mode : bool
            Whether dropout is active and forward passes keep arrays for `backward`. False frees these arrays.
        """
        self.training = bool(mode)
        if not mode:
            self._kept = None
        for _, child in self._children():
            child.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode, without dropout, in the module and all its parts, and return the module."""
        return self.train(False)

    def parameters(self) -> Iterator[Array]:
        """Iterate over the parameters, as in PyTorch; `named_parameters` has their names, too.

        Yields
        ------
        ndarray
            The arrays themselves, to be changed in place. Tied weights appear once.

        Examples
        --------
        >>> import cattn
        >>> sum(parameter.size for parameter in cattn.Linear(3, 2).parameters())
        8
        """
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """Iterate over the parameters and their names.

        Yields
        ------
        tuple of str and ndarray
            A name of `state_dict`, and the array itself, to be changed in place. Tied weights appear once, under their
            first name. `load_state_dict` and assignments replace the arrays.

        Examples
        --------
        >>> import cattn
        >>> layer = cattn.Linear(3, 2, rng=123)
        >>> parameters = dict(layer.named_parameters())
        >>> parameters["bias"] += 1  # as an optimiser does
        >>> parameters["bias"] is layer.bias
        True
        """
        for slots in self._tied():
            name, owner, attribute = slots[0]
            parameter = np.asarray(getattr(owner, attribute))
            if not isinstance(getattr(owner, attribute), np.ndarray):  # a list: np.asarray made a copy
                for slot in slots:
                    setattr(slot.owner, slot.attribute, parameter)
            yield name, parameter

    @property
    def grads(self) -> dict[str, Array]:
        """The gradients by the names of the parameters, summed over the calls of `backward` since `zero_grad`.

        A gradient has the shape and dtype of its parameter (float64 if that holds integers). The gradient of tied
        weights is the sum over their uses. Parameters without a gradient so far are missing.
        """
        grads: dict[str, Array] = {}
        for slots in self._tied():
            owned = (slot.owner._gradients.get(slot.attribute) for slot in slots)
            parts = {id(part): part for part in owned if part is not None}
            if parts:
                total, *others = parts.values()
                for part in others:
                    total += part
                for slot in slots:
                    slot.owner._gradients[slot.attribute] = total  # later gradients are added to the same array
                grads[slots[0].name] = total
        return grads

    def zero_grad(self) -> None:
        """Delete the gradients of the module and all its parts."""
        self._gradients = {}
        for _, child in self._children():
            child.zero_grad()

    def _parameter(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return a parameter as an array. Check it, because a user may assign any object."""
        label = f"{type(self).__name__}.{name}"
        array = as_array(getattr(self, name), label)
        if array.shape != shape:
            raise ValueError(f"{label} has shape {array.shape}, wanted {shape}")
        return array

    def _add_gradient(self, name: str, gradient: Array) -> None:
        """Add to the gradient of a parameter of this module."""
        if name in self._gradients:
            self._gradients[name] += gradient
        else:
            dtype = as_array(getattr(self, name), name).dtype
            self._gradients[name] = np.array(gradient, dtype=dtype, order="C")

    def backward(self, grad_out: ArrayLike) -> Array:
        """Return the gradient of the last call's x, and add the gradients of the parameters to `grads`.

        Parameters
        ----------
        grad_out : array_like
            Gradient of the output of the call, in its shape; for attention, of the context vectors.

        Returns
        -------
        ndarray
            The gradient of x, in the shape of x and the dtype of the output.

        Raises
        ------
        RuntimeError
            No call was made in training mode, or the last one had a cache.
        TypeError, ValueError
            grad_out does not hold real numbers, or has another shape.

        Notes
        -----
        A call in training mode keeps the arrays that `backward` needs; the next call replaces them, `eval` frees them.
        Change the parameters after `backward`, not before.

        Attention keeps x, queries, keys, values, context vectors, and the log-sum-exp of each query. `backward`
        computes the weights again, block by block. Dropout draws its mask again. If it draws from a `TorchGenerator`,
        no other thread may draw from that generator during a call of attention.

        Examples
        --------
        >>> import numpy as np
        >>> import cattn
        >>> mha = cattn.MultiHeadAttention(4, 4, context_length=8, dropout=0.1, num_heads=2, rng=123)
        >>> x = np.random.default_rng(0).standard_normal((3, 4), dtype=np.float32)
        >>> context = mha(x)
        >>> mha.backward(2 * context).shape  # of the loss (context**2).sum()
        (3, 4)
        >>> for name, parameter in mha.named_parameters():
        ...     parameter -= 0.01 * mha.grads[name]
        >>> mha.zero_grad()
        """
        kept = self._kept
        if kept is None:
            raise RuntimeError(
                "backward goes back through the last forward pass in training mode, and there was none: "
                "call train() and the module first"
            )
        if isinstance(kept, str):
            raise RuntimeError(kept)
        grad = as_array(grad_out, "grad_out")
        if grad.shape != kept.shape:
            raise ValueError(f"grad_out has shape {grad.shape}, wanted {kept.shape}")
        return self._propagate(kept, grad.astype(kept.dtype, copy=False))

    def _propagate(self, kept: Any, grad: Array) -> Array:
        """Return the gradient of x, given the gradient of the output. Add to the gradients of the parameters."""
        raise NotImplementedError

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
        return {name: np.asarray(getattr(owner, attribute)) for name, owner, attribute in self._slots()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, *, prefix: str | None = None
    ) -> LoadResult:
        """Load the parameters from a state dict of cattn, of PyTorch, or in another naming scheme.

        Parameters
        ----------
        state_dict : mapping of str to array_like
            Arrays or tensors of any floating dtype. The names may share a prefix (``transformer.h.0.attn.``), and are
            the book's (W_query, W_q), the names of ``torch.nn.MultiheadAttention`` (in_proj_weight), of GPT-2 (c_attn,
            c_proj), of Llama and others (q_proj, k_proj, v_proj, o_proj; wq, wk, wv, wo; qkv, proj), or the names
            of separate heads (heads.0.W_query). Causal masks among them are ignored.
        strict : bool
            If False, parameters without an array keep their values, and arrays without a parameter are ignored.
        prefix : str, optional
            Only names that start with it are read: ``"transformer.h.0.attn."`` chooses one layer of a model. By default
            all are, and they must belong to one module.

        Returns
        -------
        LoadResult
            The lists missing_keys and unexpected_keys, which are empty if strict.

        Raises
        ------
        TypeError
            An array does not hold real numbers.
        ValueError
            A name is missing, unexpected or ambiguous, or a shape is wrong. The message lists all such errors, and the
            module is unchanged.

        Notes
        -----
        The name decides the layout of a matrix: ``W_query.weight`` is (d_out, d_in) as in ``nn.Linear``, ``W_query``
        alone is (d_in, d_out), as in SelfAttention_v1. Each is converted to the layout of this class. Only c_attn and
        c_proj are in use for both layouts; there the shape of c_attn decides.

        Copies of the arrays replace the module's arrays. Tied weights stay tied; if the state dict has two arrays for
        them, the last one counts, as in PyTorch.

        Examples
        --------
        >>> import cattn
        >>> v1, v2 = cattn.SelfAttention_v1(3, 2, rng=1), cattn.SelfAttention_v2(3, 2, rng=2)
        >>> v1.load_state_dict(v2.state_dict())
        LoadResult(missing_keys=[], unexpected_keys=[])
        >>> bool((v1.W_query == v2.W_query.weight.T).all())
        True
        """
        from ._state_dict import match  # imported here, as _files below, because few programs need it

        new, result = match(state_dict, self.state_dict(), strict=strict, what=repr(self), prefix=prefix)
        for slots in self._tied():
            for array in (new[slot.name] for slot in slots if slot.name in new):
                for slot in slots:
                    setattr(slot.owner, slot.attribute, array)
        return result

    def save(self, path: FilePath) -> None:
        """Write the parameters to a file. An existing file is replaced when the new one is complete.

        A process that is killed meanwhile leaves a file ``.cattn-*.part`` beside it, which may be deleted.

        Parameters
        ----------
        path : path-like
            Ends in ``.npz`` or ``.safetensors`` (which needs the package safetensors).

        Raises
        ------
        ValueError
            The path has another ending.
        ImportError
            safetensors is not installed.
        """
        from ._files import save_arrays

        save_arrays(path, self.state_dict())

    def load(self, path: FilePath, strict: bool = True, *, prefix: str | None = None) -> LoadResult:
        """Load the parameters from a ``.npz`` or ``.safetensors`` file.

        Parameters
        ----------
        path : path-like
            The file, with names in any scheme that `load_state_dict` knows.
        strict : bool
            As in `load_state_dict`.
        prefix : str, optional
            As in `load_state_dict`.

        Returns
        -------
        LoadResult
            As `load_state_dict`.

        Raises
        ------
        TypeError, ValueError
            As `load_state_dict`; also if the file is damaged or has another ending.
        ImportError
            safetensors is not installed.
        """
        from ._files import load_arrays

        arrays = load_arrays(path)
        try:
            return self.load_state_dict(arrays, strict, prefix=prefix)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from error


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
