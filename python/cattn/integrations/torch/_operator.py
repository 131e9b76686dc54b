"""The ways of attention through PyTorch: at once, with autograd, and as custom operators that PyTorch can trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._compute import backward, forward, row_shape, tokens_first
from ._tensors import as_array, check_class, is_batched_gradient, nobody_watches

# The arguments of both operators, without a repetition of the list in every function that takes them.
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? bias, Tensor? sinks"
_ARRAYS = (
    "Tensor? alibi_slopes, Tensor? query_offset, Tensor? query_seq_lengths, Tensor? key_value_seq_lengths, "
    "Tensor? key_value_seq_starts, Tensor? key_scale, Tensor? value_scale, Tensor? seed"
)
_NUMBERS = (
    "float dropout_p, str is_causal, float? scale, bool? enable_gqa, int window_left, int window_right, float? softcap"
)
N_OPERANDS, N_ARRAYS = 6, 8


def _read_options(
    alibi_slopes: Tensor | None,
    query_offset: Tensor | None,
    query_seq_lengths: Tensor | None,
    key_value_seq_lengths: Tensor | None,
    key_value_seq_starts: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: str,
    scale: float | None,
    enable_gqa: bool | None,
    window_left: int,
    window_right: int,
    softcap: float | None,
) -> dict[str, Any]:
    """Return the keyword arguments of cattn's functions."""
    return {
        "dropout_p": dropout_p,
        "is_causal": is_causal or False,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "query_offset": None if query_offset is None else as_array(query_offset),
        "query_seq_lengths": None if query_seq_lengths is None else as_array(query_seq_lengths),
        "key_value_seq_lengths": None if key_value_seq_lengths is None else as_array(key_value_seq_lengths),
        "key_value_seq_starts": None if key_value_seq_starts is None else as_array(key_value_seq_starts),
        "window_size": (window_left, window_right),
        "softcap": softcap,
        "alibi_slopes": None if alibi_slopes is None else as_array(alibi_slopes),
        "key_scale": None if key_scale is None else as_array(key_scale),
        "value_scale": None if value_scale is None else as_array(value_scale),
        "rng": None if seed is None else int(seed) % 2**64,
    }


def _write_options(options: dict[str, Any]) -> tuple[Any, ...]:
    """Return the operators' arguments after the operands; the inverse of `_read_options`."""
    arrays = (
        options.get("alibi_slopes"),
        options.get("query_offset"),
        options.get("query_seq_lengths"),
        options.get("key_value_seq_lengths"),
        options.get("key_value_seq_starts"),
        options.get("key_scale"),
        options.get("value_scale"),
    )
    seed = options.get("rng")
    return (
        *(None if array is None else torch.as_tensor(array) for array in arrays),
        None if seed is None else torch.tensor(seed - 2**64 if seed >= 2**63 else seed),
        options["dropout_p"],
        options["is_causal"] or "",
        options.get("scale"),
        options["enable_gqa"],
        *read_window(options.get("window_size")),
        options.get("softcap"),
    )


def read_window(window_size: Any) -> tuple[int, int]:
    """Return the two numbers of a window, which may be None."""
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair of ints, got {window_size!r}")
    left, right = (-1 if side is None else side for side in window_size)
    return left, right


class WithGradients(torch.autograd.Function):
    """Attention with gradients where nothing traces: it costs less than a custom operator."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Take the operands, the keyword arguments of cattn's functions, and whether the weights are wanted."""
        *operands, options, return_weights = arguments
        result = forward(tuple(operands), options, lse=True, weights=return_weights)
        ctx.save_for_backward(*operands, result.out, result.lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        if result.weights is not None:
            ctx.mark_non_differentiable(result.weights)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_weights: Any) -> Any:
        """Return the gradients of the operands."""
        *operands, out, lse = ctx.saved_tensors
        batched = any(grad is not None and is_batched_gradient(grad) for grad in (grad_out, grad_lse))
        if nobody_watches() and not batched:
            grads = backward(grad_out, grad_lse, tuple(operands), out, lse, ctx.options)
        else:  # vmap over several gradients, or compiled autograd
            grads = backward_operator(grad_out, grad_lse, out, lse, *operands, *_write_options(ctx.options))
        return (*(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)), None, None)


# ---- the custom operators ------------------------------------------------------------------------------------------
@torch.library.custom_op(
    "cattn::attention",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_OPERANDS}, {_ARRAYS}, {_NUMBERS}, bool return_weights) -> (Tensor, Tensor, Tensor)",
)
def attention_operator(*arguments: Any) -> Any:
    """Return the output, the log-sum-exp, and the weights or an empty tensor."""
    operands = arguments[:N_OPERANDS]
    for name, tensor in (("attn_mask", operands[3]), ("bias", operands[4])):
        if tensor is not None:
            check_class(tensor, name)
    result = forward(operands, _read_options(*arguments[N_OPERANDS:-1]), lse=True, weights=arguments[-1])
    return result.out, result.lse, operands[0].new_empty(0) if result.weights is None else result.weights


@torch.library.custom_op(
    "cattn::attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_OPERANDS}, {_ARRAYS}, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward_operator(
    grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> Any:
    """Return the gradients of the operands; an empty tensor for one that has none."""
    operands = arguments[:N_OPERANDS]
    grads = backward(grad_out, grad_lse, operands, out, lse, _read_options(*arguments[N_OPERANDS:]))
    return tuple(out.new_empty(0) if grad is None else grad for grad in grads)


def _empty_output(rows: tuple[int, ...], query: Tensor, value: Tensor) -> Tensor:
    """Return an empty output in the memory order of `forward`."""
    if len(rows) == 3 and tokens_first(query):
        return query.new_empty((rows[0], rows[2], rows[1], value.shape[-1])).transpose(1, 2)
    return query.new_empty((*rows, value.shape[-1]))


@attention_operator.register_fake
def _output_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = arguments[:3]
    rows = row_shape(query, key, value, arguments[N_OPERANDS + N_ARRAYS + 3])
    weights = query.new_empty((*rows, key.shape[-2]) if arguments[-1] else 0)
    return _empty_output(rows, query, value), query.new_empty(rows, dtype=torch.float64), weights


@backward_operator.register_fake
def _gradient_shapes(
    grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    query, key, value, attn_mask, bias, sinks = arguments[:N_OPERANDS]
    none = out.new_empty(0)
    additive = attn_mask is not None and attn_mask.dtype is not torch.bool and bias is None
    return (
        *(out.new_empty(x.shape) if x.dtype is out.dtype else out.new_empty(0) for x in (query, key, value)),
        attn_mask.new_empty(attn_mask.shape) if additive else none,
        out.new_empty(0) if bias is None else bias.new_empty(bias.shape),
        out.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    n = N_OPERANDS + N_ARRAYS
    ctx.save_for_backward(*output[:2], *inputs[:n])
    ctx.numbers = inputs[n:-1]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    grads = backward_operator(grad_out, grad_lse, *ctx.saved_tensors, *ctx.numbers)
    needed = ctx.needs_input_grad[:N_OPERANDS]
    rest = (None,) * (N_ARRAYS + len(ctx.numbers) + 1)
    return (*(g if n else None for g, n in zip(grads, needed, strict=True)), *rest)


attention_operator.register_autograd(_differentiate, setup_context=_save)
