"""The calls of cattn's functions on the memory of tensors, for every way through PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import cattn

from ._tensors import as_array, as_tensor

# The attention function's arguments that may carry a gradient, in the order of `Operands`.
DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "bias", "sinks")


class Result(NamedTuple):
    """Tensors of a forward pass. lse and weights are None unless the caller wants them."""

    out: Tensor
    lse: Tensor | None
    weights: Tensor | None


def row_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool | None) -> tuple[int, ...]:
    """Return the shape of the output without its last axis."""
    q, k, v = query.shape, key.shape, value.shape
    if q[:-2] == k[:-2] == v[:-2]:
        return q[:-1]
    heads = query.ndim > 2 if enable_gqa else enable_gqa is None and query.ndim > 3
    shared = 3 if heads else 2  # grouped heads do not broadcast: the output has those of the query
    broadcast_shapes: Any = torch.broadcast_shapes  # has no types
    batch = broadcast_shapes(q[:-shared], k[:-shared], v[:-shared])
    if heads and q[-3] == 1:  # one query head for all heads of keys
        return (*batch, *broadcast_shapes(k[-3:-2], v[-3:-2]), q[-2])
    return (*batch, *q[-shared:-1])


def tokens_first(query: Tensor) -> bool:
    """Return whether the tokens come before the heads in the memory of the query, (B, T, H, head_dim).

    The output follows, as PyTorch's does, so that its heads can be joined without a copy.
    """
    return query.ndim == 4 and query.shape[2] != 1 and query.stride(1) < query.stride(2)


def forward(operands: tuple[Tensor | None, ...], options: dict[str, Any], lse: bool, weights: bool) -> Result:
    """Return attention of the operands, named by `DIFFERENTIABLE`, in tensors on the arrays of the result.

    lse is float64, because the gradients need its digits.
    """
    query, key, value, attn_mask, bias, sinks = operands
    assert query is not None and key is not None and value is not None  # noqa: PT018
    attention: Any = cattn.scaled_dot_product_attention  # the overloads do not see through **options
    arrays = as_array(query), as_array(key), as_array(value)
    if attn_mask is not None:
        options = {**options, "attn_mask": as_array(attn_mask)}
    if bias is not None:
        options = {**options, "bias": as_array(bias)}
    if sinks is not None:
        options = {**options, "sinks": as_array(sinks)}
    if tokens_first(query):
        try:
            rows = row_shape(query, key, value, options["enable_gqa"])
        except RuntimeError:  # cattn's own error names the argument whose shape is wrong
            rows = ()
        if len(rows) == 3:
            out = np.empty((rows[0], rows[2], rows[1], value.shape[-1]), arrays[0].dtype).swapaxes(1, 2)
            options = {**options, "out": cattn.AttentionOutput(out) if lse or weights else out}
    if not lse and not weights:
        return Result(as_tensor(attention(*arrays, **options), query.dtype), None, None)
    extras = attention(*arrays, return_lse=np.float64 if lse else False, return_weights=weights, **options)
    return Result(
        as_tensor(extras.out, query.dtype),
        torch.from_numpy(extras.lse) if lse else None,
        as_tensor(extras.weights, query.dtype) if weights else None,
    )


def backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    operands: tuple[Tensor | None, ...],
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands, given those of the output and of lse; None is 0.

    The mask has one only if it is additive and there is no bias. Quantized keys and values have none.
    """
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        options = {**options, "grad_lse": as_array(grad_lse)}
    named: dict[str, Any] = {
        name: as_array(x) for name, x in zip(DIFFERENTIABLE[3:], operands[3:], strict=True) if x is not None
    }
    query, key, value = (as_array(x) for x in operands[:3] if x is not None)
    grads = cattn.attention_backward(
        as_array(grad_out), query, key, value, as_array(out), as_array(lse), **named, **options
    )
    dtype = out.dtype
    of_mask = grads.bias if operands[4] is None else None
    of_bias = None if operands[4] is None else grads.bias
    return (
        *(
            as_tensor(grad, dtype) if operand is not None and operand.dtype is dtype else None
            for grad, operand in zip(grads[:3], operands, strict=False)
        ),
        *(
            None if grad is None or operand is None else torch.from_numpy(grad).to(operand.dtype)
            for grad, operand in zip((of_mask, of_bias, grads.sinks), operands[3:], strict=True)
        ),
    )
