"""`use_cattn`: cattn under the name of PyTorch's function, and the count of its calls."""

from __future__ import annotations

import contextlib
import pkgutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from cattn._input.blocks import block

from ._attention import scaled_dot_product_attention
from ._products import products_by_cattn
from ._tensors import DTYPES, dtype_of, is_causal_bias, is_plain, obstacle

_theirs = torch.nn.functional.scaled_dot_product_attention
_PARAMETERS = frozenset(("is_causal", "scale", "enable_gqa"))  # PyTorch's, after dropout_p


@dataclass
class Seen:
    """Calls of PyTorch's name inside ``use_cattn``; calls of compiled code do not count.

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


class _Dispatcher:
    """The function under PyTorch's name: it calls cattn or PyTorch, depending on the tensors.

    It compares equal to PyTorch's function, so that classes and modes find it in their tables of functions.
    """

    __name__ = __qualname__ = _theirs.__name__
    __doc__ = _theirs.__doc__

    def __eq__(self, other: object) -> bool:
        return other is self or other is _theirs

    def __hash__(self) -> int:
        return hash(_theirs)

    def __call__(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, *args: Any, **options: Any
    ) -> Any:
        arguments = (query, key, value, attn_mask, dropout_p, *args)
        bias = is_causal_bias(attn_mask)
        tensors = (query, key, value) if attn_mask is None or bias else (query, key, value, attn_mask)
        dense = all(isinstance(tensor, Tensor) and not tensor.is_nested for tensor in tensors)
        if dense and has_torch_function(tensors):
            return handle_torch_function(self, tensors, *arguments, **options)
        inputs = (query, key, value)
        ours = (
            dense
            and all(is_plain(x) and obstacle(x, "") is None for x in tensors)
            and all(x.ndim >= 2 and dtype_of(x) in DTYPES and dtype_of(x) == dtype_of(query) for x in inputs)
        )
        if not ours:
            return self._pass_on(bias, *arguments, **options)
        if isinstance(dropout_p, Tensor):
            dropout_p = dropout_p.item()
        if isinstance(dropout_p, bool):  # a number for PyTorch
            dropout_p = float(dropout_p)
        try:
            result = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, *args, **options)
        except (TypeError, ValueError):
            if torch.compiler.is_compiling() or not _PARAMETERS.issuperset(options):
                raise
            return self._pass_on(bias, *arguments, **options)  # raises PyTorch's error, with cattn's as its context
        _swap.count(True)
        return result

    def _pass_on(self, bias: bool, *arguments: Any, **options: Any) -> Any:
        """Let PyTorch compute."""
        _swap.count(False)
        if bias:  # its method recognises only the function under PyTorch's name
            return handle_torch_function(self, (arguments[3],), *arguments, **options)
        return _theirs(*arguments, **options)

    def __reduce__(self) -> Any:
        """Pickle as a function: by PyTorch's name, which may have PyTorch's function where it is loaded."""
        return pkgutil.resolve_name, (f"torch.nn.functional:{self.__name__}",)

    def __copy__(self) -> _Dispatcher:
        return self

    def __deepcopy__(self, memo: Any) -> _Dispatcher:
        return self

    __call__.__qualname__ = _theirs.__name__


_dispatch = _Dispatcher()


class _Swap:
    """Counts the active contexts of `use_cattn`, which may overlap: the last one to end restores PyTorch's function."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.uses = 0
        self.before: Any = None
        self.seen: list[Seen] = []

    def count(self, ours: bool) -> None:
        """Count a call in every active context. The compiler would guard the numbers, and compile every call again."""
        if torch.compiler.is_compiling():
            return
        with self.lock:
            for seen in self.seen:
                if ours:
                    seen.calls += 1
                else:
                    seen.passed_on += 1


_swap = _Swap()


@block
def use_cattn(*, linear: bool = False) -> Iterator[Seen]:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` by cattn's, for CPU tensors of real dtypes.

    Inside the context every call by that name runs cattn, also calls from PyTorch's own modules. The following go to
    PyTorch as before: other devices and dtypes (also mixed dtypes, unless autocast makes them one), tensors of one
    dimension, nested and sparse tensors, and compiled TorchScript. Subclasses with ``__torch_function__`` and modes
    (``TorchFunctionMode``) see the function as they do without the context. A wrong call raises PyTorch's error, whose
    context is cattn's. The name belongs to the process, so all threads share it; PyTorch's function returns when the
    last of several contexts ends. Results computed inside keep cattn's backward pass outside. Recomputation by
    checkpointing must run inside.

    Calls that never come to this name are not seen; the documentation lists them.

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
    zeros of padding change no bit. Element-wise functions such as `silu` and `gelu`, of which PyTorch computes the last
    elements by another formula, get full vectors. Operators whose rows may depend on the batch, and that have no such
    kernel, are a NotImplementedError: convolutions, recurrent layers of oneDNN, and attention that cattn does not take.
    Everything else is PyTorch's; the documentation lists what was compared.

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
    """Replace PyTorch's function while the context is active."""
    with _swap.lock:
        if _swap.uses == 0:
            # torch.jit.script compiles a call of this object as one of PyTorch's own function.
            torch.jit._builtins._register_builtin(_dispatch, "aten::scaled_dot_product_attention")
            _swap.before = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = _dispatch
        _swap.uses += 1
        seen = Seen()
        _swap.seen.append(seen)
    try:
        yield seen
    finally:
        with _swap.lock:
            _swap.uses -= 1
            _swap.seen = [other for other in _swap.seen if other is not seen]
            if _swap.uses == 0:
                torch.nn.functional.scaled_dot_product_attention = _swap.before
