"""`use_cattn` and `batch_invariant`: cattn's kernels of PyTorch's operators, for attention and for matrix products."""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import cattn
from cattn._input.contexts import block

from ... import _cattn
from ..._input.arrays import check_storage
from ...functional import linear
from ._attention import ComputeDType, attend_at_once, read_compute_dtype, scaled_dot_product_attention
from ._invariant import INVARIANT, REFUSED, kernel_that_refuses, notices
from ._layers import ATTENTION, RECURRENT, Composite, layers, register_fused
from ._recurrent import recurrent_layers
from ._tensors import DTYPES, as_array, as_plain, as_tensor, is_causal_bias, is_plain, is_traced

# A smaller weight is left to PyTorch, whose calls take less time. The number of rows does not count: bits would depend
# on it.
LEAST_WEIGHT = 128 * 128


# ---- products ------------------------------------------------------------------------------------------------------
def _as_result(array: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    return as_tensor(array, like.dtype if like.dtype is torch.bfloat16 else None)


def _multiply(a: Tensor, b: Tensor, *, compute_dtype: str | None = None) -> Tensor:
    """Return a @ b, of matrices or of batches of them."""
    left, right = as_array(a, "the first factor"), as_array(b, "the second factor")
    return _as_result(_cattn._product(left, right.swapaxes(-1, -2), compute_dtype, False), a)


def _multiply_vector(a: Tensor, x: Tensor, *, compute_dtype: str | None = None) -> Tensor:
    return _multiply(a, x[:, None], compute_dtype=compute_dtype)[:, 0]


def _multiply_vectors(x: Tensor, y: Tensor, *, compute_dtype: str | None = None) -> Tensor:
    return _multiply(x[None], y[:, None], compute_dtype=compute_dtype)[0, 0]


def _add(
    multiply: Callable[..., Tensor], added: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any,
    compute_dtype: str | None,
) -> Tensor:  # fmt: skip
    """Return beta * added + alpha * a @ b, of halves rounded at the end. A factor of 0 leaves out its term."""
    wide = torch.float32 if a.dtype.itemsize == 2 else a.dtype
    for x, name in ((a, "the first factor"), (b, "the second factor"), (added, "the added tensor")):
        check_storage(x, name)  # PyTorch's conversions read what is not there
    if alpha == 0:
        a, b = torch.zeros_like(a), torch.zeros_like(b)
    product = multiply(a.to(wide), b.to(wide), compute_dtype=compute_dtype)
    if alpha not in (0, 1) and a.shape[-1]:  # where there is nothing to multiply, alpha is not read
        product = product * alpha
    if beta != 0:
        product = product + (added.to(wide) if beta == 1 else added.to(wide) * beta)
    return product.to(a.dtype)


def _add_product(
    added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, compute_dtype: Any = None
) -> Tensor:
    if a.ndim == 2 and beta == 1 and alpha == 1 and added.shape == (b.shape[1],):
        return _apply_layer(added, a, b, compute_dtype)
    return _add(_multiply, added, a, b, beta, alpha, compute_dtype)


def _apply_layer(bias: Tensor, x: Tensor, weight: Tensor, compute_dtype: Any) -> Tensor:
    arrays = as_array(x, "input"), as_array(weight, "weight").T, as_array(bias, "bias")
    return _as_result(linear(*arrays, compute_dtype=compute_dtype), x)


def _add_vector(
    added: Tensor, a: Tensor, x: Tensor, *, beta: Any = 1, alpha: Any = 1, compute_dtype: Any = None
) -> Tensor:
    return _add(_multiply_vector, added, a, x, beta, alpha, compute_dtype)


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


def _fits(operator: _Operator, added: Any, a: Any, b: Any, out: Any) -> bool:
    """Return whether cattn computes this; PyTorch raises the errors for wrong shapes and mixed dtypes."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    dtype, of_a, of_b = a.dtype, a.shape, b.shape
    if (len(of_a), len(of_b)) != operator.axes or dtype not in DTYPES or b.dtype is not dtype:
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    if of_a[-1] != of_b[0 if len(of_b) == 1 else -2] or (len(of_a) == 3 and of_a[0] != of_b[0]):
        return False
    if out is not None and not _is_like(out, dtype):
        return False
    if added is None:
        return True
    if not _is_like(added, dtype):
        return False
    shape = (*of_a[:-1], *of_b[len(of_a) - 1 :])
    own = added.shape
    if own == shape[len(shape) - len(own) :]:
        return True
    return len(own) <= len(shape) and all(n in (1, m) for n, m in zip(reversed(own), reversed(shape), strict=False))


def _is_layer(added: Any, a: Any, b: Any) -> bool:
    """Return whether this is the product of a layer with a bias, which `_fits` would find, too, in twice the time."""
    dtype, of_b = a.dtype, b.shape
    return (
        dtype is b.dtype is added.dtype
        and dtype in DTYPES
        and torch.strided is a.layout is b.layout is added.layout
        and len(of_b) == 2 == a.ndim
        and added.shape == of_b[1:]
        and a.shape[1] == of_b[0]
    )


def _is_like(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, Tensor) and x.dtype is dtype and x.layout is torch.strided


def _kernel_of_product(operator: _Operator, overload: str, theirs: Any) -> Callable[..., Any]:
    first = int(operator.adds)  # the place of the first factor
    weight_at = first + (operator.axes[1] > 1)
    compute, in_place, batched = operator.compute, overload.endswith("_"), operator.axes[1] == 3
    of_layers = overload == "addmm"

    def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
        weight = arguments[weight_at]
        size = math.prod(weight.shape[-2:]) if batched else weight.numel()
        ours = size >= LEAST_WEIGHT or _active.n_invariant > 0
        if ours and options:
            ours = not isinstance(options.get("alpha"), complex) and not isinstance(options.get("beta"), complex)
        is_layer = ours and of_layers and not options and _is_layer(*arguments)
        if ours and not is_layer:
            added = arguments[0] if first else None
            ours = _fits(operator, added, arguments[first], arguments[first + 1], options.get("out"))
        for counter in _active.counters:
            counter(ours)
        if not ours:
            return theirs.call_boxed(keyset, *arguments, **options)
        if is_layer:
            bias, x, _ = arguments
            return _apply_layer(bias, x, weight, _swap.compute_dtype if x.dtype is torch.bfloat16 else None)
        out = options.pop("out", None)
        if weight.dtype is torch.bfloat16:
            options["compute_dtype"] = _swap.compute_dtype
        result = compute(*arguments, **options)
        if in_place or out is not None:
            target = arguments[0] if in_place else out.resize_(result.shape)
            check_storage(target, "self" if in_place else "out")
            return target.copy_(result)
        return result

    return kernel


# ---- contexts ------------------------------------------------------------------------------------------------------
class _Active:
    """The contexts that are active, in any thread. Kernels belong to the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counters: tuple[Callable[[bool], None], ...] = ()
        self.n_invariant = 0
        self.products: Any = None  # libraries of kernels
        self.guards: Any = None

    def begin(self, counter: Callable[[bool], None], invariant: bool) -> None:
        with self.lock:
            if self.products is None:
                self.products = _products.register()
                layers.register()
            if invariant and self.guards is None:
                self.guards, notices.given = _guards.register(), False
                register_fused(RECURRENT, self.guards)
            self.counters = (*self.counters, counter)  # a new one: a kernel may be reading the old one
            self.n_invariant += invariant

    def end(self, counter: Callable[[bool], None], invariant: bool) -> None:
        with self.lock:
            left = list(self.counters)
            left.remove(counter)
            self.counters = tuple(left)
            self.n_invariant -= invariant
            if self.n_invariant == 0 and self.guards is not None:
                self.guards.reset()
                self.guards = None
            if not self.counters:
                self.products.reset()
                self.products = None
                layers.remove()


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


_compiler: Any = importlib.import_module("torch.compiler.config") if find_spec("torch.compiler.config") else None


@dataclass
class Seen:
    """Calls of PyTorch's operators inside ``use_cattn``; attention that compiled code holds does not count.

    Parameters
    ----------
    calls : int
        Calls that cattn computed, of attention and of the recurrences, short convolutions and indexers of transformers.
    passed_on : int
        Calls that PyTorch computed.
    products, products_passed_on : int
        The same for matrix products, where cattn computes those: of layers, of gradients, and in compiled code, too.
    """

    calls: int = 0
    passed_on: int = 0
    products: int = 0
    products_passed_on: int = 0

    def count_product(self, ours: bool) -> None:
        """Count a matrix product."""
        with _swap.lock:
            if ours:
                self.products += 1
            else:
                self.products_passed_on += 1


# ---- the kernel ----------------------------------------------------------------------------------------------------
def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Compute PyTorch's operator by cattn, or by PyTorch where cattn cannot.

    An operator that PyTorch composes of others has no formula of its own for autograd, for transforms and for tracing:
    the function here has them.
    """
    tensors: Any = (query, key, value, attn_mask)
    compute_dtype = _swap.compute_dtype if query.dtype is torch.bfloat16 else None
    if not dropout_p:
        try:
            found = attend_at_once(tensors, is_causal, scale, enable_gqa, compute_dtype)
        except (TypeError, ValueError):  # the call below raises it again
            found = None
        if found is not None:
            _swap.count(True)
            return found
    options = (dropout_p, is_causal, scale, enable_gqa)
    counts = True
    if not (is_plain(query) and is_plain(key) and is_plain(value) and (attn_mask is None or is_plain(attn_mask))):
        given = [x for x in tensors if x is not None]
        counts = not any(map(is_traced, given))
        if not all(is_plain(x := as_plain(y)) or is_traced(x) or is_causal_bias(x) for y in given):
            return _pass_on(tensors, options, counts)  # a class may compute PyTorch's operators itself
        tensors = tuple(None if x is None else as_plain(x) for x in tensors)
    attention: Any = scaled_dot_product_attention  # its overloads do not see through *options
    try:
        result = attention(*tensors, *options, compute_dtype=compute_dtype)
    except (TypeError, ValueError):
        return _pass_on(tensors, options, counts)  # raises PyTorch's error, with cattn's as its context
    if counts:
        _swap.count(True)
    return result


def _pass_on(tensors: tuple[Any, ...], options: tuple[Any, ...], counts: bool) -> Any:
    """Let PyTorch compute, by the operators of which it composes this one."""
    if counts:
        _swap.count(False)
    query, key, value, mask = tensors
    if is_causal_bias(mask):  # whose memory is uninitialised
        mask = mask._materialize(query.device)
    dropout_p, is_causal, scale, enable_gqa = options
    numbers = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _attention.compose(query, key, value, mask, **numbers)


class _Swap:
    """Counts the active contexts of `use_cattn`, which may overlap: the last one to end takes the kernels away."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fused: Any = None  # the library of PyTorch's fast path
        self.tag: str | None = None
        self.seen: list[Seen] = []
        self.compute_dtypes: list[tuple[Seen, str | None]] = []
        self.compute_dtype: str | None = None  # of bfloat16 tensors, in the context begun last

    def count(self, ours: bool) -> None:
        """Count a call in every active context."""
        with self.lock:
            for seen in self.seen:
                if ours:
                    seen.calls += 1
                else:
                    seen.passed_on += 1

    def _set_compute_dtypes(self, compute_dtypes: list[tuple[Seen, str | None]]) -> None:
        self.compute_dtypes = compute_dtypes
        self.compute_dtype = compute_dtypes[-1][1] if compute_dtypes else None
        # The compiler's caches on disk take graphs for equal that call the same operators of PyTorch.
        if self.tag is not None:
            ours = f"{self.tag}, attention by cattn {cattn.__version__}, {self.compute_dtype}"
            _compiler.cache_key_tag = ours if compute_dtypes else self.tag

    def begin(self, seen: Seen, compute_dtype: str | None) -> None:
        with self.lock:
            if not self.seen:
                _attention.register()
                self.fused = register_fused(ATTENTION)
                self.tag = getattr(_compiler, "cache_key_tag", None)  # from PyTorch 2.7 on
            self.seen.append(seen)
            self._set_compute_dtypes([*self.compute_dtypes, (seen, compute_dtype)])

    def end(self, seen: Seen) -> None:
        with self.lock:
            self.seen = [other for other in self.seen if other is not seen]
            self._set_compute_dtypes([entry for entry in self.compute_dtypes if entry[0] is not seen])
            if not self.seen:
                _attention.remove()
                self.fused.reset()


_attention = Composite("scaled_dot_product_attention", _attend)
_swap = _Swap()


# ---- contexts ------------------------------------------------------------------------------------------------------
@block
def use_cattn(*, linear: bool = False, compute_dtype: ComputeDType = None) -> Iterator[Seen]:
    """Compute PyTorch's ``scaled_dot_product_attention`` by cattn, for CPU tensors of real dtypes.

    Inside the context the operator ``aten::scaled_dot_product_attention`` has cattn's kernels, whoever calls it: the
    function under any name, also if it was imported before, PyTorch's modules, ``torch.ops.aten``, TorchScript,
    autocast and ``torch.func``. The fast path of PyTorch's modules is computed by its parts. The following go to
    PyTorch as before: other devices and dtypes (also mixed dtypes, unless autocast makes them one), tensors of one
    dimension, nested and sparse tensors, and subclasses with ``__torch_dispatch__``. A wrong call raises PyTorch's
    error, whose context is cattn's. All threads of the process share the kernels; PyTorch's own return when the last of
    several contexts ends. Results computed inside keep cattn's backward pass outside. Recomputation by checkpointing
    must run inside. One object may be entered again, also inside itself.

    Attention that never comes to the operator is not seen; the documentation lists them.

    Parameters
    ----------
    linear : bool
        Also compute the matrix products of CPU tensors by `cattn.functional.linear`: of ``nn.Linear``, ``@``,
        ``torch.bmm``, and of their gradients, in eager and compiled code. A weight with fewer than 16,384 elements is
        left to PyTorch. A row then has the same bits alone and in any batch. Needs PyTorch 2.9 or later.
    compute_dtype : {None, "bfloat16", "bfloat16_tiles", torch.bfloat16}
        How bfloat16 tensors are multiplied, as in `scaled_dot_product_attention` and `cattn.functional.linear`; by
        default in float32. Tensors of other dtypes are not rounded. Of several contexts the one begun last decides.

    Yields
    ------
    Seen
        Its ``calls`` counts the calls that cattn computed so far, ``passed_on`` those that went to PyTorch.

    Examples
    --------
    >>> import torch
    >>> from cattn.integrations.torch import use_cattn
    >>> x = torch.ones(1, 2, 4, 8)
    >>> with use_cattn() as seen:
    ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> seen
    Seen(calls=1, passed_on=0, products=0, products_passed_on=0)
    """
    with _swapped(compute_dtype) as seen:
        if not linear:
            yield seen
            return
        with products_by_cattn(seen.count_product):
            yield seen


@block
def batch_invariant(*, compute_dtype: ComputeDType = None) -> Iterator[Seen]:
    """Compute on the CPU so that the bits of a text do not depend on the other texts of its batch, nor on padding.

    Inside the context, attention and all matrix products are cattn's, whatever their size, as with
    ``use_cattn(linear=True)``. Sums, means, variances and norms are rounded once, from float64 or exact sums, so that
    zeros of padding change no bit. Element-wise functions such as ``silu`` and ``gelu``, of which PyTorch computes the
    last elements by another formula, get full vectors. Operators whose rows may depend on the batch, and that have no
    such kernel, are a NotImplementedError: convolutions over several channels, for example, and attention that
    cattn does not take. Everything else is PyTorch's; the documentation lists what was compared.

    Parameters
    ----------
    compute_dtype : {None, "bfloat16", "bfloat16_tiles", torch.bfloat16}
        How bfloat16 tensors are multiplied, as in `use_cattn`.

    Yields
    ------
    Seen
        As for `use_cattn`.

    Examples
    --------
    >>> import torch
    >>> from cattn.integrations.torch import batch_invariant
    >>> layer, x = torch.nn.Linear(300, 200), torch.randn(64, 300)
    >>> with batch_invariant():
    ...     print(torch.equal(layer(x)[:1], layer(x[:1])))
    True
    """
    with _swapped(compute_dtype) as seen, products_by_cattn(seen.count_product, invariant=True):
        yield seen


@contextlib.contextmanager
def _swapped(compute_dtype: ComputeDType) -> Iterator[Seen]:
    """Replace PyTorch's kernels of attention while the context is active."""
    seen = Seen()
    _swap.begin(seen, read_compute_dtype(compute_dtype))
    try:
        with recurrent_layers(_swap.count):
            yield seen
    finally:
        _swap.end(seen)
