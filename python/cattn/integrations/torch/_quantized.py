"""Keys and values of one byte an element, with scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._input.objects import Quantized, no_scale_error, scale_error, split_scale
from ._tensors import DTYPES, QUANTIZED, check_class, check_tensor, dtype_of, of_read_only


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
    single: Tensor = scale.to(torch.float32)
    return single


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
    wide: Tensor = tensor.to(own).to(torch.float64 if dtype is torch.float64 else torch.float32)
    return wide


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
