"""Tensors as arrays and back, and the tensors that cattn cannot read or differentiate."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from ..._input.arrays import load_ml_dtype

PLAIN = (Tensor, torch.nn.Parameter)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
_functorch: Any = torch._C._functorch
_private: Any = torch._C  # has no types for the functions that tell who watches
_forward_ad: Any = forward_ad


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's memory as an array."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(load_ml_dtype("bfloat16", "a tensor is of bfloat16"))
    try:
        return tensor.numpy()
    except TypeError:  # a dtype that NumPy does not have
        if tensor.dtype is not torch.float8_e4m3fn:
            raise
    return tensor.view(torch.int8).numpy().view(load_ml_dtype("float8_e4m3fn", "a tensor is of float8_e4m3fn"))


def as_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return the array's memory as a tensor."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def is_plain(tensor: Any) -> bool:
    """Return whether this is a tensor of PyTorch's own classes, whose memory holds its numbers."""
    return type(tensor) in PLAIN


def is_readable(tensor: Any) -> bool:
    """Return whether this is a plain tensor whose memory can be read at once."""
    return type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested


def nobody_watches() -> bool:
    """Return whether PyTorch only computes: nothing compiles, traces, transforms or intercepts operators."""
    return (
        not torch.compiler.is_compiling()
        and _functorch.peek_interpreter_stack() is None
        and _private._len_torch_dispatch_stack() == 0
        and _private._get_tracing_state() is None
        and _forward_ad._current_level < 0
    )


def is_batched_gradient(tensor: Tensor) -> bool:
    """Return whether ``torch.autograd.grad(..., is_grads_batched=True)`` made this: it has a vmap of its own."""
    batched: bool = _functorch.is_legacy_batchedtensor(tensor)
    return batched


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: autocast, if active, casts the tensor as it does for PyTorch's own function."""
    lowered = torch.is_autocast_enabled("cpu") and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return torch.get_autocast_dtype("cpu") if lowered else tensor.dtype


def _has_tangent(tensor: Tensor) -> bool:
    """Return whether forward-mode differentiation is active: custom operators drop the tangents without an error."""
    return not torch.compiler.is_compiling() and _forward_ad.unpack_dual(tensor).tangent is not None


def _is_transformed(tensor: Tensor) -> bool:
    """Return whether ``torch.func.grad`` or a similar transform is active, which custom operators do not support."""
    while not torch.compiler.is_compiling() and _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def obstacle(tensor: Tensor, name: str) -> Exception | None:
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


def check_tensor(tensor: Any, name: str) -> None:
    """Raise the error of `obstacle`, or TypeError for what is not a tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if (error := obstacle(tensor, name)) is not None:
        raise error


def check_class(tensor: Tensor, name: str) -> None:
    """Refuse subclasses of tensors: the memory of some, such as PyTorch's causal biases, is uninitialised."""
    # FakeTensor and the other classes that PyTorch traces with have no __torch_function__.
    if not is_plain(tensor) and type(tensor).__torch_function__ is not torch._C._disabled_torch_function_impl:
        raise TypeError(f"{name} must be a plain torch.Tensor, got {type(tensor).__name__}")


def is_causal_bias(attn_mask: Any) -> bool:
    """Return whether this is ``torch.nn.attention.bias.causal_lower_right`` or ``causal_upper_left``."""
    # Importing the module takes a second. Whoever has an instance has imported it.
    if attn_mask is None or is_plain(attn_mask):
        return False
    module: Any = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(attn_mask, module.CausalBias)


def read_causal_bias(bias: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, str]:
    """Return a causal bias as a mask, or None and the alignment of causality.

    As in PyTorch, the sizes of a bias count only for the lower right of a matrix that is not square.
    """
    sizes = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or sizes[0] == sizes[1]:
        return None, "upper_left"
    if sizes == (*query.shape[-2:-1], *key.shape[-2:-1]):
        return None, "lower_right"
    return torch.ones(sizes, dtype=torch.bool, device="cpu").tril(sizes[1] - sizes[0]), ""
