"""PyTorch's matrix products by cattn: kernels of its operators on the CPU, while a context is active.

PyTorch dispatches a product below autograd, inference mode, autocast and compiled code. So one kernel for each operator
serves all of them, and the products of gradients as well.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import _cattn
from ...functional import linear
from ._fused import FUSED
from ._invariant import INVARIANT, REFUSED, kernel_that_refuses
from ._sums import notices
from ._tensors import DTYPES, as_array, as_tensor

# A smaller weight is left to PyTorch, whose calls take less time. The number of rows does not count: bits would depend
# on it.
LEAST_WEIGHT = 128 * 128


# ---- products ------------------------------------------------------------------------------------------------------
def _as_result(array: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    return as_tensor(array, like.dtype if like.dtype is torch.bfloat16 else None)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, of matrices or of batches of them."""
    return _as_result(_cattn._product(as_array(a), as_array(b).swapaxes(-1, -2), None), a)


def _multiply_vector(a: Tensor, x: Tensor) -> Tensor:
    return _multiply(a, x[:, None])[:, 0]


def _multiply_vectors(x: Tensor, y: Tensor) -> Tensor:
    return _multiply(x[None], y[:, None])[0, 0]


def _add(multiply: Callable[..., Tensor], added: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Return beta * added + alpha * a @ b, of halves rounded at the end. With beta = 0 the first is not read."""
    wide = torch.float32 if a.dtype.itemsize == 2 else a.dtype
    product = multiply(a.to(wide), b.to(wide))
    if alpha != 1 and a.shape[-1]:  # PyTorch reads no alpha where there is nothing to multiply
        product = product * alpha
    if beta != 0:
        product = product + (added.to(wide) if beta == 1 else added.to(wide) * beta)
    return product.to(a.dtype)


def _add_product(added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if a.ndim == 2 and beta == 1 and alpha == 1 and added.shape == (b.shape[1],):  # a layer with a bias
        return _as_result(linear(as_array(a), as_array(b).T, as_array(added)), a)
    return _add(_multiply, added, *_unless_zero(alpha, a, b), beta, alpha)


def _add_vector(added: Tensor, a: Tensor, x: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _add(_multiply_vector, added, *_unless_zero(alpha, a, x), beta, alpha)


def _unless_zero(alpha: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors. With alpha = 0 the BLAS does not read them, but PyTorch's own code for halves does."""
    if alpha != 0 or a.ndim == 3 or a.dtype.itemsize == 2:
        return a, b
    return torch.zeros_like(a), torch.zeros_like(b)


class _Operator(NamedTuple):
    """One of PyTorch's operators: the axes of its two factors, and our function."""

    name: str
    axes: tuple[int, int]
    compute: Callable[..., Tensor]
    adds: bool = False  # takes a tensor before the factors

    @property
    def forms(self) -> tuple[str, ...]:
        """The suffixes of the operators that have kernels of their own."""
        if self.name == "dot":
            return ("",)
        return ("", ".out", "_") if self.adds else ("", ".out")


_OPERATORS = (
    _Operator("mm", (2, 2), _multiply),
    _Operator("bmm", (3, 3), _multiply),
    _Operator("mv", (2, 1), _multiply_vector),
    _Operator("dot", (1, 1), _multiply_vectors),
    _Operator("addmm", (2, 2), _add_product, adds=True),
    _Operator("baddbmm", (3, 3), _add_product, adds=True),
    _Operator("addmv", (2, 1), _add_vector, adds=True),
)


def _fits(operator: _Operator, tensors: tuple[Any, ...], out: Tensor | None) -> bool:
    """Return whether cattn computes this; PyTorch raises the errors for wrong shapes and mixed dtypes."""
    *added, a, b = tensors
    everything = tensors if out is None else (*tensors, out)
    if not all(isinstance(x, Tensor) and x.layout is torch.strided and x.dtype is a.dtype for x in everything):
        return False
    if a.dtype not in DTYPES or (a.ndim, b.ndim) != operator.axes or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        return False
    if a.ndim == 3 and a.shape[0] != b.shape[0]:
        return False
    shape = (*a.shape[:-1], b.shape[-1]) if b.ndim > 1 else a.shape[:-1]
    sizes = zip(reversed(added[0].shape), reversed(shape), strict=False) if added else ()
    return all(n in (1, wanted) for n, wanted in sizes) and (not added or added[0].ndim <= len(shape))


def _kernel_of_product(operator: _Operator, overload: str, theirs: Any) -> Callable[..., Any]:
    n_tensors = 2 + operator.adds

    def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
        tensors, out = arguments[:n_tensors], options.get("out")
        weight = tensors[-1] if operator.axes[1] > 1 else tensors[-2]
        large = _active.all_sizes or math.prod(weight.shape[-2:]) >= LEAST_WEIGHT
        real = not any(isinstance(options.get(name), complex) for name in ("alpha", "beta"))
        ours = large and real and _fits(operator, tensors, out)
        _active.count(ours)
        if not ours:
            return theirs.call_boxed(keyset, *arguments, **options)
        options.pop("out", None)
        result = operator.compute(*arguments, **options)
        if overload.endswith("_"):
            return arguments[0].copy_(result)
        return result if out is None else out.resize_(result.shape).copy_(result)

    return kernel


# ---- contexts ------------------------------------------------------------------------------------------------------
class _Active:
    """The contexts that are active, in any thread. Kernels belong to the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counters: list[Callable[[bool], None]] = []
        self.n_invariant = 0
        self.products: Any = None  # libraries of kernels
        self.guards: Any = None

    @property
    def all_sizes(self) -> bool:
        """Whether cattn computes products with small weights, too."""
        return self.n_invariant > 0

    def count(self, ours: bool) -> None:
        """Count a product in every context."""
        for counter in tuple(self.counters):
            counter(ours)

    def begin(self, counter: Callable[[bool], None], invariant: bool) -> None:
        with self.lock:
            if self.products is None:
                self.products = _products.register()
            if invariant and self.guards is None:
                self.guards, notices.given = _guards.register(), False
                _register_fused(self.guards)
            self.counters.append(counter)
            self.n_invariant += invariant

    def end(self, counter: Callable[[bool], None], invariant: bool) -> None:
        with self.lock:
            self.counters.remove(counter)
            self.n_invariant -= invariant
            if self.n_invariant == 0 and self.guards is not None:
                self.guards.reset()
                self.guards = None
            if not self.counters:
                self.products.reset()
                self.products = None


_active = _Active()


class _Kernels:
    """Kernels for the CPU, each made from the kernel that it replaces, and those that refuse.

    They are made once. A registration takes a few microseconds, and is undone at the end of the last context.
    """

    def __init__(self, makers: dict[str, Callable[[Any], Callable[..., Any]]], refused: tuple[str, ...] = ()) -> None:
        self.makers, self.refused = makers, refused
        # PyTorch's list of kernels from Python has such names
        self.names = {f"aten/{name}/CPU" for name in (*makers, *refused)}
        self.made: dict[str, Callable[..., Any]] | None = None

    def register(self) -> Any:
        """Register the kernels and return the library whose `reset` removes them."""
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(
                "cattn computes PyTorch's products where torch.library.get_kernel exists, from PyTorch 2.9 on; this is "
                f"PyTorch {torch.__version__}"
            )
        alone = self.names.isdisjoint(torch.library._impls)
        kernels = self.made if alone and self.made is not None else self._make()
        if alone:  # otherwise somebody else's kernels are replaced, which may be gone the next time
            self.made = kernels
        library: Any = torch._C._dispatch_library("IMPL", "aten", "")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
            for name, kernel in kernels.items():
                library.impl(name, torch._C.DispatchKey.CPU, kernel, name not in self.refused)
        return library

    def _make(self) -> dict[str, Callable[..., Any]]:
        get_kernel: Any = torch.library.get_kernel
        made = {name: make(get_kernel(f"aten::{name}", "CPU")) for name, make in self.makers.items()}
        return made | {name: kernel_that_refuses(name) for name in self.refused}


_products = _Kernels(
    {
        operator.name + suffix: partial(_kernel_of_product, operator, operator.name + suffix)
        for operator in _OPERATORS
        for suffix in operator.forms
    }
)
_guards = _Kernels(INVARIANT, REFUSED)


def _register_fused(library: Any) -> None:
    """Register the kernels of fused layers, which take nested tensors, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kernel in FUSED.items():
            for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.NestedTensorCPU):
                library.impl(name, key, kernel, False)


@contextmanager
def products_by_cattn(counter: Callable[[bool], None], *, invariant: bool = False) -> Iterator[None]:
    """Let cattn compute PyTorch's products of CPU tensors; `counter` learns of each whether cattn computed it.

    With `invariant` also those with small weights, and the kernels of `_invariant` are there: sums are added in order,
    element-wise functions get full vectors, and operators whose rows depend on their batch raise an error.
    """
    _active.begin(counter, invariant)
    try:
        yield
    finally:
        _active.end(counter, invariant)
