"""`use_cattn`: cattn's kernels of PyTorch's operator for attention, and the count of its calls."""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import cattn
from cattn._input.contexts import block

from ._attention import scaled_dot_product_attention
from ._products import products_by_cattn
from ._tensors import as_plain, is_causal_bias, is_plain, is_traced, run_uncompiled

_operator: Any = torch.ops.aten.scaled_dot_product_attention.default
_compiler: Any = importlib.import_module("torch.compiler.config") if find_spec("torch.compiler.config") else None
_COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd
# Without and with autograd, and the transforms of torch.func, whose key comes first. The keys of autocast and of
# TorchScript's tracer lie between, and call the next one.
_KEYS = ("CPU", "AutogradCPU", "FuncTorchDynamicLayerFrontMode")


@dataclass
class Seen:
    """Calls of PyTorch's operators inside ``use_cattn``; attention that compiled code holds does not count.

    Parameters
    ----------
    calls : int
        Calls that cattn computed.
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
        result = attention(*tensors, *options)
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
    return _operator._op_dk(_COMPOSITE, query, key, value, mask, **numbers)


class _Swap:
    """Counts the active contexts of `use_cattn`, which may overlap: the last one to end takes the kernels away."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: Any = None
        self.tag: str | None = None
        self.seen: list[Seen] = []

    def count(self, ours: bool) -> None:
        """Count a call in every active context."""
        with self.lock:
            for seen in self.seen:
                if ours:
                    seen.calls += 1
                else:
                    seen.passed_on += 1

    def begin(self, seen: Seen) -> None:
        with self.lock:
            if self.library is None:
                self.library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
                    for key in _KEYS:
                        self.library.impl("scaled_dot_product_attention", _kernel, key)
                # Modes that decompose operators, as the compiler's do, ask for this one.
                _operator.py_kernels[_COMPOSITE] = _kernel
                _operator._dispatch_cache.clear()
                # The compiler's caches on disk take graphs for equal that call the same operators of PyTorch.
                self.tag = getattr(_compiler, "cache_key_tag", None)
                if self.tag is not None:  # from PyTorch 2.7 on
                    _compiler.cache_key_tag = f"{self.tag}, attention by cattn {cattn.__version__}"
            self.seen.append(seen)

    def end(self, seen: Seen) -> None:
        with self.lock:
            self.seen = [other for other in self.seen if other is not seen]
            if not self.seen:
                self.library._destroy()
                self.library = None
                _operator.py_kernels.pop(_COMPOSITE, None)
                _operator._dispatch_cache.clear()
                if self.tag is not None:
                    _compiler.cache_key_tag = self.tag


_kernel = run_uncompiled(_attend)
_swap = _Swap()


# ---- contexts ------------------------------------------------------------------------------------------------------
@block
def use_cattn(*, linear: bool = False) -> Iterator[Seen]:
    """Compute PyTorch's ``scaled_dot_product_attention`` by cattn, for CPU tensors of real dtypes.

    Inside the context the operator ``aten::scaled_dot_product_attention`` has cattn's kernels, whoever calls it: the
    function under any name, also if it was imported before, PyTorch's modules, ``torch.ops.aten``, TorchScript,
    autocast and ``torch.func``. The following go to PyTorch as before: other devices and dtypes (also mixed dtypes,
    unless autocast makes them one), tensors of one dimension, nested and sparse tensors, and subclasses with
    ``__torch_dispatch__``. A wrong call raises PyTorch's error, whose context is cattn's. All threads of the process
    share the kernels; PyTorch's own return when the last of several contexts ends. Results computed inside keep
    cattn's backward pass outside. Recomputation by checkpointing must run inside. One object may be entered again, also
    inside itself.

    Attention that never comes to the operator is not seen; the documentation lists them.

    Parameters
    ----------
    linear : bool
        Also compute the matrix products of CPU tensors by `cattn.functional.linear`: of ``nn.Linear``, ``@``,
        ``torch.bmm``, and of their gradients, in eager and compiled code. A weight with fewer than 16,384 elements is
        left to PyTorch. A row then has the same bits alone and in any batch. Needs PyTorch 2.9 or later.

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
    with _swapped() as seen:
        if not linear:
            yield seen
            return
        with products_by_cattn(seen.count_product):
            yield seen


@block
def batch_invariant() -> Iterator[Seen]:
    """Compute on the CPU so that the bits of a text do not depend on the other texts of its batch, nor on padding.

    Inside the context, attention and all matrix products are cattn's, whatever their size, as with
    ``use_cattn(linear=True)``. Sums, means, variances and norms are rounded once, from float64 or exact sums, so that
    zeros of padding change no bit. Element-wise functions such as ``silu`` and ``gelu``, of which PyTorch computes the
    last elements by another formula, get full vectors. Operators whose rows may depend on the batch, and that have no
    such kernel, are a NotImplementedError: convolutions, recurrent layers of oneDNN, and attention that cattn does not
    take. Everything else is PyTorch's; the documentation lists what was compared.

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
    with _swapped() as seen, products_by_cattn(seen.count_product, invariant=True):
        yield seen


@contextlib.contextmanager
def _swapped() -> Iterator[Seen]:
    """Replace PyTorch's kernels of attention while the context is active."""
    seen = Seen()
    _swap.begin(seen)
    try:
        yield seen
    finally:
        _swap.end(seen)
