"""Attention by cattn on PyTorch's CPU tensors: with gradients, under ``torch.compile``, and in place of PyTorch's own.

Two custom operators, forward and backward, which PyTorch can trace. Memory is shared, not copied: cattn reads PyTorch's
tensors in place, and its results become tensors.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

import cattn
from cattn._input.arrays import load_bfloat16

__all__ = ["scaled_dot_product_attention", "use_cattn"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_theirs = torch.nn.functional.scaled_dot_product_attention
_unpack_dual: Any = torch.autograd.forward_ad.unpack_dual  # has no types


def _as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's memory as an array."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(load_bfloat16("a tensor is of bfloat16"))
    return tensor.numpy()


def _as_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return the array's memory as a tensor."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# The arguments of both operators, without a repetition of the list in every function that takes them.
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask"
_OPTIONS = "Tensor seed, float dropout_p, bool is_causal, float? scale, bool enable_gqa, bool lower_right=False"


def _read_options(
    attn_mask: Tensor | None,
    seed: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    lower_right: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments of cattn's functions. PyTorch leaves out a last argument that has its default."""
    if attn_mask is not None:
        _check_mask_type(attn_mask)
    return {
        "attn_mask": None if attn_mask is None else _as_array(attn_mask),
        "dropout_p": dropout_p,
        "is_causal": ("lower_right" if lower_right else "upper_left") if is_causal else False,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "rng": int(seed) % 2**64 if dropout_p else None,
    }


def _is_plain(tensor: Any) -> bool:
    """Return whether this is a tensor of PyTorch's own classes, whose memory holds its numbers."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _is_causal_bias(attn_mask: Any) -> bool:
    """Return whether this is ``torch.nn.attention.bias.causal_lower_right`` or ``causal_upper_left``."""
    # Importing the module takes a second. Whoever has an instance has imported it.
    module: Any = None if _is_plain(attn_mask) else sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(attn_mask, module.CausalBias)


def _check_mask_type(attn_mask: Tensor) -> None:
    """Refuse subclasses of tensors: the memory of some, such as PyTorch's causal biases, is uninitialised."""
    # FakeTensor and the other classes that PyTorch traces with have no __torch_function__.
    if not _is_plain(attn_mask) and type(attn_mask).__torch_function__ is not torch._C._disabled_torch_function_impl:
        raise TypeError(f"attn_mask must be a plain torch.Tensor, got {type(attn_mask).__name__}")


def _read_causal_bias(bias: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """Return a causal bias as a mask, or None and whether causality is aligned to the lower right.

    As in PyTorch, the sizes of a bias count only for the lower right of a matrix that is not square.
    """
    sizes = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or sizes[0] == sizes[1]:
        return None, False
    if sizes == (*query.shape[-2:-1], *key.shape[-2:-1]):
        return None, True
    return torch.ones(sizes, dtype=torch.bool, device="cpu").tril(sizes[1] - sizes[0]), False


def _row_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Return the shape of the output without its last axis."""
    heads = enable_gqa and query.ndim > 2
    shared = 3 if heads else 2  # grouped heads do not broadcast: the output has those of the query
    broadcast_shapes: Any = torch.broadcast_shapes  # has no types
    batch = broadcast_shapes(*(t.shape[:-shared] for t in (query, key, value)))
    if heads and query.shape[-3] == 1:  # one query head for all heads of keys
        return (*batch, *broadcast_shapes(key.shape[-3:-2], value.shape[-3:-2]), query.shape[-2])
    return (*batch, *query.shape[-shared:-1])


@torch.library.custom_op(
    "cattn::attention", mutates_args=(), device_types="cpu", schema=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *options: Any) -> Any:
    """Return the output and the log-sum-exp, which is float64 because the gradients need its digits."""
    try:
        rows = _row_shape(query, key, value, enable_gqa=options[4])
    except RuntimeError:  # cattn's own error names the argument whose shape is wrong
        rows = ()
    lse = np.empty(rows, np.float64)
    result = cattn.scaled_dot_product_attention(
        _as_array(query),
        _as_array(key),
        _as_array(value),
        return_lse=True,
        out=cattn.AttentionOutput(lse=lse),
        **_read_options(attn_mask, *options),
    )
    assert result.out is not None
    return _as_tensor(result.out, query.dtype), torch.from_numpy(lse)


@torch.library.custom_op(
    "cattn::attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, out: Tensor, lse: Tensor,
    *options: Any,
) -> Any:  # fmt: skip
    """Return the gradients of query, key, value and an additive mask, or an empty tensor if there is no such mask."""
    grads = cattn.attention_backward(
        *map(_as_array, (grad_out, query, key, value, out, lse)), **_read_options(attn_mask, *options)
    )
    mask = torch.empty(0) if grads.bias is None else torch.from_numpy(grads.bias)
    if attn_mask is not None and grads.bias is not None:
        mask = mask.to(attn_mask.dtype)
    return (*(_as_tensor(grad, query.dtype) for grad in grads[:3]), mask)


@_attention.register_fake
def _output_shapes(
    query: Tensor, key: Tensor, value: Tensor, _attn_mask: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    rows = _row_shape(query, key, value, enable_gqa=options[4])
    return query.new_empty((*rows, value.shape[-1])), query.new_empty(rows, dtype=torch.float64)


@_attention_backward.register_fake
def _gradient_shapes(
    _grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    additive = attn_mask is not None and attn_mask.dtype is not torch.bool
    mask = attn_mask.new_empty(attn_mask.shape) if additive and attn_mask is not None else torch.empty(0)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), mask


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, seed, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, attn_mask, *output, seed)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Any, ...]:
    query, key, value, attn_mask, out, lse, seed = ctx.saved_tensors
    grads = _attention_backward(grad_out, query, key, value, attn_mask, out, lse, seed, *ctx.options)
    mask = grads[3] if ctx.needs_input_grad[3] else None
    return (*grads[:3], mask, None, *(None for _ in ctx.options))


_attention.register_autograd(_differentiate, setup_context=_save)


def _has_tangent(tensor: Tensor) -> bool:
    """Return whether forward-mode differentiation is active: custom operators drop the tangents without an error."""
    return not torch.compiler.is_compiling() and _unpack_dual(tensor).tangent is not None


def _is_transformed(tensor: Tensor) -> bool:
    """Return whether ``torch.func.grad`` or a similar transform is active, which custom operators do not support."""
    functorch = torch._C._functorch
    while not torch.compiler.is_compiling() and functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _obstacle(tensor: Tensor, name: str) -> Exception | None:
    """Return the error for a tensor that cattn cannot read or differentiate, or None."""
    if tensor.device.type != "cpu":  # with a mask on "meta" PyTorch would return uninitialised memory
        return ValueError(f"{name} is on {tensor.device}, cattn computes on the CPU")
    if tensor.layout is not torch.strided or tensor.is_nested:
        return TypeError(f"{name} is {'nested' if tensor.is_nested else tensor.layout}, cattn wants dense tensors")
    if _has_tangent(tensor):
        return NotImplementedError(f"{name} has a tangent, but cattn differentiates in reverse mode only")
    if _is_transformed(tensor):
        return NotImplementedError(f"{name} is under torch.func.grad, use torch.autograd.grad or PyTorch's function")
    return None


def _check(tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if (error := _obstacle(tensor, name)) is not None:
        raise error


def _dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: autocast, if active, casts the tensor as it does for PyTorch's own function."""
    lowered = torch.is_autocast_enabled("cpu") and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return torch.get_autocast_dtype("cpu") if lowered else tensor.dtype


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of CPU tensors by cattn, with the arguments of PyTorch's function of this name.

    Parameters
    ----------
    query : Tensor, shape (..., T_q, head_dim)
        Queries, on the CPU, of float16, bfloat16 (with ``ml_dtypes``), float32 or float64. Key and value have the same
        dtype. ``torch.autocast`` casts all but float64 first, as for PyTorch's own function.
    key : Tensor, shape (..., T_k, head_dim)
        Keys.
    value : Tensor, shape (..., T_k, d_v)
        Values.
    attn_mask : Tensor, optional
        Boolean (True where the key is visible) or float (added to the scores). It may be combined with is_causal. Also
        ``torch.nn.attention.bias.causal_lower_right`` and ``causal_upper_left``, without is_causal.
    dropout_p : float
        Probability of dropping a weight. The seed of the dropout mask is drawn from PyTorch's default generator, so
        that ``torch.manual_seed`` and checkpointing repeat it. The mask itself is cattn's, not PyTorch's.
    is_causal : bool
        Query i sees the keys j <= i.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    enable_gqa : bool
        Heads (axis -3) of query may be a multiple of those of key and value.

    Returns
    -------
    Tensor, shape (..., T_q, d_v)
        Differentiable once, in query, key, value and an additive mask. The output of a query that sees no key is 0.

    Raises
    ------
    TypeError, ValueError
        As `cattn.scaled_dot_product_attention`; also for other devices and dtypes, for arguments that are not tensors,
        and for an attn_mask of any other subclass of Tensor.
    NotImplementedError
        In forward-mode differentiation, and under ``torch.func.grad`` and similar transforms.

    Notes
    -----
    `cattn.set_num_threads` sets the number of threads. Gradients have the same bits for any number of them.

    Examples
    --------
    >>> import torch
    >>> from cattn.integrations.torch import scaled_dot_product_attention
    >>> x = torch.eye(3, requires_grad=True)
    >>> out = scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> out.sum().backward()
    >>> x.grad.shape
    torch.Size([3, 3])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check(tensor, name)
        dtype = _dtype_of(tensor)
        if dtype not in _DTYPES or dtype is not _dtype_of(query):
            wanted = "float16, bfloat16, float32 or float64" if name == "query" else f"query has {_dtype_of(query)}"
            raise TypeError(f"{name} has dtype {dtype}; {wanted}")
    lower_right = False
    if _is_causal_bias(attn_mask):
        if is_causal:
            raise ValueError("attn_mask is a CausalBias: is_causal must be False")
        attn_mask, lower_right = _read_causal_bias(attn_mask, query, key)
        is_causal = attn_mask is None
    if attn_mask is not None:
        _check(attn_mask, "attn_mask")
        _check_mask_type(attn_mask)
        attn_mask = attn_mask.to(_dtype_of(attn_mask))
    query, key, value = (tensor.to(_dtype_of(tensor)) for tensor in (query, key, value))
    # Plain Python, which PyTorch's compiler can trace. The operator checks the range.
    if not isinstance(dropout_p, (int, float, np.floating)):
        raise TypeError(f"dropout_p must be a real number, got {type(dropout_p).__name__}")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}: the operator knows upper_left alone")
    if dropout_p > 0.0:
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    else:
        seed = torch.zeros((), dtype=torch.int64)
    out: Tensor
    out, _lse = _attention(query, key, value, attn_mask, seed, dropout_p, is_causal, scale, enable_gqa, lower_right)
    return out


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
        bias = _is_causal_bias(attn_mask)
        tensors = (query, key, value) if attn_mask is None or bias else (query, key, value, attn_mask)
        dense = all(isinstance(tensor, Tensor) and not tensor.is_nested for tensor in tensors)
        if dense and has_torch_function(tensors):
            return handle_torch_function(self, tensors, *arguments, **options)
        inputs = (query, key, value)
        ours = (
            dense
            and all(_is_plain(x) and _obstacle(x, "") is None for x in tensors)
            and all(x.ndim >= 2 and _dtype_of(x) in _DTYPES and _dtype_of(x) == _dtype_of(query) for x in inputs)
        )
        if not ours:
            if bias:  # its method recognises only the function under PyTorch's name
                return handle_torch_function(self, (attn_mask,), *arguments, **options)
            return _theirs(*arguments, **options)
        if isinstance(dropout_p, Tensor):
            dropout_p = dropout_p.item()
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, *args, **options)

    __call__.__qualname__ = _theirs.__name__


_dispatch = _Dispatcher()


class _Swap:
    """Counts the active contexts of `use_cattn`, which may overlap: the last one to end restores PyTorch's function."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.uses = 0
        self.before: Any = None


_swap = _Swap()


@contextlib.contextmanager
def use_cattn() -> Iterator[None]:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` by cattn's, for CPU tensors of real dtypes.

    Inside the context every call by that name runs cattn, also calls from PyTorch's own modules. The following go to
    PyTorch as before: other devices and dtypes (also mixed dtypes, unless autocast makes them one), tensors of one
    dimension, nested and sparse tensors, forward-mode differentiation, ``torch.func.grad``, and compiled TorchScript.
    Subclasses with ``__torch_function__`` and modes (``TorchFunctionMode``) see the function as they do without the
    context. The name belongs to the process, so all threads share it; PyTorch's function returns when the last of
    several contexts ends. Results computed inside keep cattn's backward pass outside. Recomputation by checkpointing
    must run inside.

    Yields
    ------
    None

    Examples
    --------
    >>> import torch
    >>> from cattn.integrations.torch import use_cattn
    >>> x = torch.ones(1, 2, 4, 8)
    >>> with use_cattn():
    ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> out.shape
    torch.Size([1, 2, 4, 8])
    """
    with _swap.lock:
        if _swap.uses == 0:
            # torch.jit.script compiles a call of this object as one of PyTorch's own function.
            torch.jit._builtins._register_builtin(_dispatch, "aten::scaled_dot_product_attention")
            _swap.before = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = _dispatch
        _swap.uses += 1
    try:
        yield
    finally:
        with _swap.lock:
            _swap.uses -= 1
            if _swap.uses == 0:
                torch.nn.functional.scaled_dot_product_attention = _swap.before
