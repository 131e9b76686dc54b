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
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ... import _cattn
from ...functional import linear
from ._tensors import DTYPES, as_array, as_tensor

# A smaller weight is left to PyTorch, whose calls take less time. The number of rows does not count: bits would depend
# on it.
LEAST_WEIGHT = 128 * 128


# ---- products ------------------------------------------------------------------------------------------------------
def _as_result(array: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    return as_tensor(array, like.dtype if like.dtype is torch.bfloat16 else None)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, of matrices or of batches of them."""
    return _as_result(_cattn._product(as_array(a), as_array(b).swapaxes(-1, -2)), a)


def _multiply_vector(a: Tensor, x: Tensor) -> Tensor:
    return _multiply(a, x[:, None])[:, 0]


def _add(added: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Return beta * added + alpha * product. With beta = 0 the first is not read."""
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (added if beta == 1 else added * beta)


def _add_product(added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if a.ndim == 2 and beta == 1 and alpha == 1 and added.shape == (b.shape[1],):  # a layer with a bias
        return _as_result(linear(as_array(a), as_array(b).T, as_array(added)), a)
    return _add(added, _multiply(a, b), beta, alpha)


def _add_vector(added: Tensor, a: Tensor, x: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _add(added, _multiply_vector(a, x), beta, alpha)


class _Operator(NamedTuple):
    """One of PyTorch's operators: the axes of its two factors, and our function."""

    name: str
    axes: tuple[int, int]
    compute: Callable[..., Tensor]
    adds: bool = False  # takes a tensor before the factors


_OPERATORS = (
    _Operator("mm", (2, 2), _multiply),
    _Operator("bmm", (3, 3), _multiply),
    _Operator("mv", (2, 1), _multiply_vector),
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
        ours = large and _fits(operator, tensors, out)
        _active.count(ours)
        if not ours:
            return theirs.call_boxed(keyset, *arguments, **options)
        options.pop("out", None)
        result = operator.compute(*arguments, **options)
        if overload.endswith("_"):
            return arguments[0].copy_(result)
        return result if out is None else out.resize_(result.shape).copy_(result)

    return kernel


# ---- what batch_invariant adds -------------------------------------------------------------------------------------
def _sum_in_order(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the sum over some axes, one term after the other: zeros before or after the others change no bit."""
    array = as_array(x)
    wide = array if array.dtype.itemsize > 2 else array.astype(np.float32)
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    terms = np.ascontiguousarray(wide.transpose(*axes, *kept))
    terms = terms.reshape(math.prod(x.shape[axis] for axis in axes), math.prod(x.shape[axis] for axis in kept))
    # NumPy adds a single column pairwise; accumulate has no other order than that of the terms
    total = np.add.accumulate(terms, axis=0)[-1] if terms.shape[1] == 1 else np.add.reduce(terms, axis=0)
    return torch.from_numpy(total).to(x.dtype).reshape([x.shape[axis] for axis in kept])


def _kernel_of_sum(theirs: Any, mean: bool) -> Callable[..., Any]:
    def kernel(keyset: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        axes = tuple(sorted({d % x.ndim for d in dim})) if dim and x.ndim else tuple(range(x.ndim))
        # PyTorch's sum over the last axis does not depend on the other rows
        if axes in ((), (x.ndim - 1,)) or x.dtype not in DTYPES or x.layout is not torch.strided or x.numel() == 0:
            return theirs.call_boxed(keyset, x, dim, keepdim, **options)
        wanted = options.get("dtype") or x.dtype
        total = _sum_in_order(x.to(wanted), axes)
        total = total / math.prod(x.shape[axis] for axis in axes) if mean else total
        for axis in axes if keepdim else ():
            total = total.unsqueeze(axis)
        out = options.get("out")
        return total if out is None else out.resize_(total.shape).copy_(total)

    return kernel


_SUMS = {"sum.dim_IntList": False, "sum.IntList_out": False, "mean.dim": True, "mean.out": True}
# Operators whose rows may have other bits in another batch, and that have no kernel here.
_REFUSED = ("convolution", "mkldnn_rnn_layer", "_scaled_dot_product_flash_attention_for_cpu")


def _kernel_that_refuses(name: str) -> Callable[..., NoReturn]:
    def kernel(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"batch_invariant() has no kernel for torch.ops.aten.{name}: the bits of a row may depend on its batch"
        )

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
        self.fast_path = True

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
                self.products = _install_products()
            if invariant and self.guards is None:
                self.guards = _install_guards()
                # the fast path of PyTorch's own encoder layers has products that are no operators
                self.fast_path = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.counters.append(counter)
            self.n_invariant += invariant

    def end(self, counter: Callable[[bool], None], invariant: bool) -> None:
        with self.lock:
            self.counters.remove(counter)
            self.n_invariant -= invariant
            if self.n_invariant == 0 and self.guards is not None:
                self.guards._destroy()
                self.guards = None
                torch.backends.mha.set_fastpath_enabled(self.fast_path)
            if not self.counters:
                self.products._destroy()
                self.products = None


_active = _Active()


def _install(kernels: dict[str, Callable[[Any], Callable[..., Any]]], refused: tuple[str, ...] = ()) -> Any:
    """Register kernels for the CPU, each made from the kernel that it replaces, and those that refuse."""
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        raise RuntimeError(
            "cattn computes PyTorch's products where torch.library.get_kernel exists, from PyTorch 2.9 on; this is "
            f"PyTorch {torch.__version__}"
        )
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
        for name, make in kernels.items():
            library.impl(name, make(get_kernel(f"aten::{name}", "CPU")), "CPU", with_keyset=True)
        for name in refused:
            library.impl(name, _kernel_that_refuses(name), "CPU")
    return library


def _install_products() -> Any:
    kernels: dict[str, Callable[[Any], Callable[..., Any]]] = {}
    for operator in _OPERATORS:
        for suffix in ("", ".out", "_") if operator.adds else ("", ".out"):
            overload = operator.name + suffix
            kernels[overload] = partial(_kernel_of_product, operator, overload)
    return _install(kernels)


def _install_guards() -> Any:
    kernels: dict[str, Callable[[Any], Callable[..., Any]]] = {}
    for name, mean in _SUMS.items():
        kernels[name] = partial(_kernel_of_sum, mean=mean)
    return _install(kernels, _REFUSED)


@contextmanager
def products_by_cattn(counter: Callable[[bool], None], *, invariant: bool = False) -> Iterator[None]:
    """Let cattn compute PyTorch's products of CPU tensors; `counter` learns of each whether cattn computed it.

    With `invariant` also those with small weights, sums are added in order, and operators whose rows depend on their
    batch raise an error.
    """
    _active.begin(counter, invariant)
    try:
        yield
    finally:
        _active.end(counter, invariant)
