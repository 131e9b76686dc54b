"""Tensors as arrays and back, and the tensors that cattn cannot read or differentiate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from ... import _cattn
from ..._input.arrays import check_storage, load_ml_dtype
from ..._input.objects import Quantized, no_scale_error, scale_error, split_scale

PLAIN = (Tensor, torch.nn.Parameter)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OTHERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8}
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
_TRACED = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")
OPERATOR = "cattn's attention (torch.ops.cattn.attention)"
INSTEAD = (
    "use PyTorch's scaled_dot_product_attention, outside use_cattn, with "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
)
_functorch: Any = torch._C._functorch
_private_torch: Any = torch
_private: Any = torch._C  # has no types for the functions that tell who watches
_forward_ad: Any = forward_ad
_inherited: Any = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_unpack_dual: Any = _private_torch._VF._unpack_dual  # works where the module knows of no level
without_compiler = (
    _private_torch._disable_dynamo
)  # torch.compiler.disable, which imports the compiler with the first call


def run_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function such that PyTorch's compiler leaves it and what it calls to Python.

    Where the compiler leaves a call to Python, it compiles the functions inside. There they would find that they are
    being compiled, and could not see who transforms the tensors.
    """
    eval_frame: Any = _private._dynamo.eval_frame
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # before PyTorch 2.7
        uncompiled: Callable[..., Any] = without_compiler(function)
        return uncompiled
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def as_array(tensor: Tensor, name: str = "a tensor") -> NDArray[Any]:
    """Return the tensor's memory as an array; a tensor whose memory does not hold its numbers is copied."""
    if type(tensor) in PLAIN and not tensor.is_neg():
        found = _cattn._array_of_tensor(tensor)
        if found is not None:
            return found
    if not tensor._is_zerotensor():
        check_storage(tensor, name)
    try:
        array: NDArray[Any] = tensor.numpy(force=True)  # also detached
    except TypeError:  # a dtype that NumPy does not have
        if (same_size := _OTHERS.get(tensor.dtype)) is None:
            raise
    else:
        return array
    plain = torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor.detach().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    return plain.view(same_size).numpy().view(load_ml_dtype(name, f"a tensor is of {name}"))


def as_tensor(array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
    """Return the array's memory as a tensor; an array of bfloat16 needs the dtype, because PyTorch does not know it."""
    found: Tensor | None = _cattn._tensor_of_array(array, Tensor)
    if found is not None:
        return found
    if dtype is torch.bfloat16:
        array = array.view(np.int16)
    tensor = torch.from_numpy(array)
    if array.size == 0:  # all strides are 0 in NumPy
        tensor = torch.empty(array.shape, dtype=tensor.dtype, device="cpu")
    return tensor.view(torch.bfloat16) if dtype is torch.bfloat16 else tensor


def of_read_only(array: NDArray[Any]) -> Tensor:
    """Return a tensor on an array's memory, to read. PyTorch has no read-only tensors, and warns of such arrays."""
    eighths = array.dtype.name == "float8_e4m3fn"
    numbers = array.view(np.uint8) if eighths else array
    tensor = torch.from_numpy(np.asarray(_Writable(numbers)))
    return tensor.view(torch.float8_e4m3fn) if eighths else tensor


class _Writable:
    """An array's memory for ``numpy.asarray``, as if it might be written to."""

    def __init__(self, array: NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}
        self.array = array  # keeps the memory


def is_plain(tensor: Any) -> bool:
    """Return whether this is a tensor of PyTorch's own classes, whose memory holds its numbers."""
    return type(tensor) in PLAIN


def is_traced(tensor: Any) -> bool:
    """Return whether this is a tensor that PyTorch traces with, which has no numbers."""
    return type(tensor).__module__ in _TRACED


def as_plain(tensor: Tensor) -> Tensor:
    """Return a tensor of a subclass as one of PyTorch's own class, if its memory holds its numbers."""
    dispatch: Any = type(tensor).__torch_dispatch__
    if is_plain(tensor) or dispatch is not Tensor.__torch_dispatch__ or is_causal_bias(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def is_readable(tensor: Any) -> bool:
    """Return whether this is a plain tensor whose memory can be read at once."""
    return type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested


def is_traceable() -> bool:
    """Return whether somebody compiles, traces or intercepts operators, who would not see another call."""
    return (
        torch.compiler.is_compiling()
        or _private._len_torch_dispatch_stack() > 0
        or _private._get_tracing_state() is not None
    )


def nobody_watches(*tensors: Tensor | None) -> bool:
    """Return whether PyTorch only computes: nothing compiles, traces, transforms or intercepts operators.

    Compiled code enters forward mode without a word to the module, so that the tensors are asked where code may have
    been compiled.
    """
    if is_traceable() or _functorch.peek_interpreter_stack() is not None or _forward_ad._current_level >= 0:
        return False
    if "torch._dynamo" not in sys.modules or not _private._is_fwd_grad_enabled():
        return True
    return not any(isinstance(x, Tensor) and x.is_floating_point() and _has_tangent(x) for x in tensors)


def check_memory(tensor: Tensor, name: str) -> None:
    """Raise RuntimeError for a tensor that PyTorch's next function would read from memory that it does not have."""
    if is_plain(tensor) and nobody_watches():
        check_storage(tensor, name)


def converted(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return the tensor in a dtype; PyTorch's own conversion does not look whether the memory is there."""
    if tensor.dtype is dtype:
        return tensor
    check_memory(tensor, name)
    return tensor.to(dtype)


def is_ours(**tensors: Tensor | None) -> bool:
    """Return whether cattn computes these tensors, whose memory must be there: PyTorch reads some of them first."""
    given = {name: x for name, x in tensors.items() if x is not None}
    ours = all(x.device.type == "cpu" and x.dtype in DTYPES for x in given.values())
    for name, x in given.items():
        if ours:
            check_memory(x, name)
    return ours


def is_batched(tensor: Tensor) -> bool:
    """Return whether this is a batch of ``torch.vmap``, or of a gradient with ``is_grads_batched=True``."""
    if torch.compiler.is_dynamo_compiling():  # it cannot trace the second question, nor does it meet such gradients
        return bool(_functorch.is_batchedtensor(tensor))
    return bool(_functorch.is_batchedtensor(tensor) or _functorch.is_legacy_batchedtensor(tensor))


def is_transformed(tensor: Tensor) -> bool:
    """Return whether this tensor is differentiated by ``torch.func``, or in forward mode."""
    return not torch.compiler.is_dynamo_compiling() and (_is_transformed(tensor) or _has_tangent(tensor))


def is_batched_gradient(gradient: Tensor | None) -> bool:
    """Return whether ``torch.autograd.grad(..., is_grads_batched=True)`` made this: it has a vmap of its own."""
    return gradient is not None and _functorch.is_legacy_batchedtensor(gradient)


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: autocast, if active, casts the tensor as it does for PyTorch's own function."""
    lowered = torch.is_autocast_enabled("cpu") and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return torch.get_autocast_dtype("cpu") if lowered else tensor.dtype


def _is_transformed(tensor: Tensor) -> bool:
    """Return whether ``torch.func.grad`` or a similar transform is active, which custom operators do not support."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def _has_tangent(tensor: Tensor) -> bool:
    """Return whether this tensor is one of forward-mode differentiation, whose tangents custom operators drop."""
    while _functorch.is_batchedtensor(tensor):  # torch.vmap has no rule for this question
        tensor = _functorch.get_unwrapped(tensor)
    follows = not (tensor.is_inference() or _private._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD))
    if not follows or tensor.layout is not torch.strided:
        return False  # PyTorch has no answer for tensors that no derivative follows, nor for sparse ones
    return _unpack_dual(tensor, level=0)[1] is not None  # there is one level, 0


def untracked(
    tensor: Tensor, name: str, operator: str = OPERATOR, function: str = "scaled_dot_product_attention"
) -> Exception | None:
    """Return the error for a tensor that is differentiated in a way that custom operators do not support, or None.

    The function is the one of this package that the operator belongs to. PyTorch has no linear attention instead.
    """
    if torch.compiler.is_dynamo_compiling():  # the operator itself looks when the compiler runs it
        return None
    attention = operator == OPERATOR
    if _has_tangent(tensor):
        instead = f": call cattn.integrations.torch.{function}, not compiled, or {INSTEAD[4:]}" if attention else ""
        return NotImplementedError(f"{name} has a tangent, but {operator} differentiates in reverse mode only{instead}")
    if _is_transformed(tensor):
        return NotImplementedError(
            f"{name} is under torch.func.grad, which {operator} does not support: call "
            f"cattn.integrations.torch.{function}, not compiled, {'' if attention else 'or '}use torch.autograd.grad"
            f"{f', or {INSTEAD[4:]}' if attention else ''}"
        )
    return None


def obstacle(tensor: Tensor, name: str) -> Exception | None:
    """Return the error for a tensor that cattn cannot read, or None."""
    if tensor.device.type != "cpu":  # with a mask on "meta" PyTorch would return uninitialised memory
        return ValueError(f"{name} is on {tensor.device}, cattn computes on the CPU")
    if tensor.layout is not torch.strided or tensor.is_nested:
        return TypeError(f"{name} is {'nested' if tensor.is_nested else tensor.layout}, cattn wants dense tensors")
    return None


def check_tensor(tensor: Any, name: str) -> None:
    """Raise the error of `obstacle`, or TypeError for what is not a tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if (error := obstacle(tensor, name)) is not None:
        raise error


def check_class(tensor: Tensor, name: str) -> None:
    """Refuse subclasses with a ``__torch_function__``: the memory of some, as PyTorch's causal biases, is not set."""
    if is_plain(tensor):
        return
    own: Any = type(tensor).__torch_function__
    # FakeTensor and the other classes that PyTorch traces with have none.
    if own is _private._disabled_torch_function_impl or getattr(own, "__func__", None) is _inherited:
        return
    cure = f"pass {name}.as_subclass(torch.Tensor) if its memory holds its numbers"
    raise TypeError(f"{name} must be a plain torch.Tensor, got {type(tensor).__name__}: {cure}")


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


def _check_constant(tensor: Tensor, name: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} requires grad, but has no gradient: pass {name}.detach()")


def _read_scale(scale: Any, name: str) -> Tensor | None:
    if scale is None:
        return None
    check_tensor(scale, name)
    check_class(scale, name)
    if scale.dtype is torch.bool or scale.is_complex():
        raise TypeError(f"{name} has dtype {scale.dtype}; it must hold real numbers")
    _check_constant(scale, name)
    return converted(scale, torch.float32, name)


def _read_input(tensor: Any, name: str, scale: Any, dtype: torch.dtype) -> Tensor:
    """Return a quantized tensor as it is, and another in the dtype of the computation beside a quantized one."""
    check_tensor(tensor, name)
    own = dtype_of(tensor)
    if scale is not None:
        if tensor.dtype not in QUANTIZED:
            raise scale_error(name, tensor.dtype)
        _check_constant(tensor, name)
        quantized: Tensor = tensor
        return quantized
    if tensor.dtype in QUANTIZED:
        raise no_scale_error(name, tensor.dtype)
    if own not in DTYPES or own is not dtype:
        raise TypeError(f"{name} has dtype {own}; query has {dtype}")
    return converted(converted(tensor, own, name), torch.float64 if dtype is torch.float64 else torch.float32, name)


def _split(stored: Any, name: str) -> tuple[Any, Any]:
    """Return a key or value and its scale, or None; arrays of a cattn.Quantized as tensors."""
    pair = split_scale(stored, name)
    return (of_read_only(pair[0]), of_read_only(pair[1])) if isinstance(stored, Quantized) else pair


def read_quantized(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the tensors of a call with scales, halves in float32."""
    (key, key_scale), (value, value_scale) = _split(key, "key"), _split(value, "value")
    check_tensor(query, "query")
    dtype = dtype_of(query)
    if dtype in QUANTIZED:
        raise no_scale_error("query", dtype)
    if dtype not in DTYPES:
        raise TypeError(f"query has dtype {dtype}; float16, bfloat16, float32 or float64")
    return (
        _read_input(query, "query", None, dtype),
        _read_input(key, "key", key_scale, dtype),
        _read_input(value, "value", value_scale, dtype),
        _read_scale(key_scale, "key.scale"),
        _read_scale(value_scale, "value.scale"),
    )
