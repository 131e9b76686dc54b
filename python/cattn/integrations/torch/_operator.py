"""The ways of attention through PyTorch: at once, with autograd, and as custom operators that PyTorch can trace."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl

from ._compute import backward, empty_output, forward, recorded, row_shape
from ._tensors import (
    INSTEAD,
    OPERATOR,
    as_array,
    as_tensor,
    check_class,
    is_batched_gradient,
    nobody_watches,
    untracked,
)

# The arguments of both operators, without a repetition of the list in every function that takes them.
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? bias, Tensor? sinks"
_ARRAYS = (
    "Tensor? alibi_slopes, Tensor? query_offset, Tensor? query_seq_lengths, Tensor? key_value_seq_lengths, "
    "Tensor? key_value_seq_starts, Tensor? key_scale, Tensor? value_scale, Tensor? block_mask, Tensor? key_indices, "
    "Tensor? seed"
)
_NUMBERS = (
    "float dropout_p, str is_causal, float? scale, bool? enable_gqa, int window_left, int window_right, "
    "float? softcap, int? block_size"
)
_OF_RESULTS = "Tensor? grad_out, Tensor? grad_lse, Tensor? grad_weights, Tensor out, Tensor lse"
N_OPERANDS, N_ARRAYS, N_OF_RESULTS = 6, 10, 5


def _read_options(
    alibi_slopes: Tensor | None,
    query_offset: Tensor | None,
    query_seq_lengths: Tensor | None,
    key_value_seq_lengths: Tensor | None,
    key_value_seq_starts: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    block_mask: Tensor | None,
    key_indices: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: str,
    scale: float | None,
    enable_gqa: bool | None,
    window_left: int,
    window_right: int,
    softcap: float | None,
    block_size: int | None,
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
        "block_mask": None if block_mask is None else as_array(block_mask),
        "block_size": block_size,
        "key_indices": None if key_indices is None else as_array(key_indices),
        "rng": None if seed is None else int(seed) % 2**64,
    }


def as_seed(number: int) -> Tensor:
    """Return a seed in [0, 2**64) as the tensor that the operators take."""
    return torch.tensor(number - 2**64 if number >= 2**63 else number, dtype=torch.int64, device="cpu")


def _as_constant(value: Any) -> Tensor:
    """Return an array or an int as a tensor."""
    if isinstance(value, np.ndarray):
        return as_tensor(value, torch.bfloat16 if value.dtype.name == "bfloat16" else None)
    return torch.tensor(value, dtype=torch.int64, device="cpu")


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
        options.get("block_mask"),
        options.get("key_indices"),
    )
    seed = options.get("rng")
    return (
        *(None if array is None else _as_constant(array) for array in arrays),
        None if seed is None else as_seed(seed),
        options["dropout_p"],
        options["is_causal"] or "",
        options.get("scale"),
        options["enable_gqa"],
        *read_window(options.get("window_size")),
        options.get("softcap"),
        read_block_size(options.get("block_size")),
    )


def read_window(window_size: Any) -> tuple[int, int]:
    """Return the two numbers of a window, which may be None."""
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair of ints, got {window_size!r}")
    left, right = (-1 if side is None else side for side in window_size)
    return left, right


def read_block_size(block_size: Any) -> Any:
    """Return the number of queries and of keys of a block as the operators take it."""
    if block_size is None:
        return None
    if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer, torch.SymInt)):
        raise TypeError(f"block_size must be an int, got {type(block_size).__name__}")
    if block_size > 2**63 - 1:  # the error of cattn's own function; it checks the rest
        raise ValueError(f"block_size must be at most {2**63 - 1}, got {block_size}")
    return block_size


class WithGradients(torch.autograd.Function):
    """Attention with gradients where nothing traces: it costs less than a custom operator."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Take the operands, the keyword arguments of cattn's functions, and whether the weights are wanted."""
        *operands, options, return_weights = arguments
        result = recorded("cattn::attention", forward, operands, options, True, return_weights)
        ctx.save_for_backward(*operands, result.out, result.lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return result.out, result.lse, result.weights

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> Any:
        """Return the gradients of the operands, given those of the output, lse and the weights."""
        *operands, out, lse = ctx.saved_tensors
        if nobody_watches() and not torch.is_grad_enabled() and not any(map(is_batched_gradient, of_results)):
            grads = recorded("cattn::attention_backward", backward, *of_results, operands, out, lse, ctx.options)
            return (*grads, None, None)
        # compiled autograd, vmap over several gradients, or create_graph=True
        grads = backward_operator(*of_results, out, lse, *operands, *_write_options(ctx.options))
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
    schema=f"({_OF_RESULTS}, {_OPERANDS}, {_ARRAYS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward_operator(*arguments: Any) -> Any:
    """Return the gradients of the operands; an empty tensor for one that has none."""
    grad_out, grad_lse, grad_weights, out, lse = arguments[:N_OF_RESULTS]
    operands, rest = arguments[N_OF_RESULTS:][:N_OPERANDS], arguments[N_OF_RESULTS + N_OPERANDS :]
    grads = backward(grad_out, grad_lse, grad_weights, operands, out, lse, _read_options(*rest))
    return tuple(out.new_empty(0) if grad is None else grad for grad in grads)


@attention_operator.register_fake
def _output_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = arguments[:3]
    rows = row_shape(query, key, value, arguments[N_OPERANDS + N_ARRAYS + 3])
    key_indices = arguments[N_OPERANDS + N_ARRAYS - 2]
    columns = key.shape[-2] if key_indices is None else key_indices.shape[-1]
    weights = query.new_empty((*rows, columns) if arguments[-1] else 0)
    return empty_output(rows, query, value), query.new_empty(rows, dtype=torch.float64), weights


@backward_operator.register_fake
def _gradient_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    out = arguments[N_OF_RESULTS - 2]
    query, key, value, attn_mask, bias, sinks = arguments[N_OF_RESULTS:][:N_OPERANDS]
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


def _differentiate(ctx: Any, *of_results: Tensor | None) -> tuple[Any, ...]:
    grads = backward_operator(*of_results, *ctx.saved_tensors, *ctx.numbers)
    needed = ctx.needs_input_grad[:N_OPERANDS]
    rest = (None,) * (N_ARRAYS + len(ctx.numbers) + 1)
    return (*(g if n else None for g, n in zip(grads, needed, strict=True)), *rest)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _differentiate_twice(ctx: Any, *of_gradients: Any) -> NoReturn:
    """Refuse second derivatives: every way to them, with create_graph=True, leads here."""
    raise NotImplementedError(f"{OPERATOR} has no second derivatives: {INSTEAD}")


attention_operator.register_autograd(_differentiate, setup_context=_save)
backward_operator.register_autograd(_differentiate_twice, setup_context=_save_nothing)


def _guard(operator: Any, library: Any) -> None:
    """Refuse tensors of forward mode and ``torch.func.grad`` in an operator: the rules of autograd drop tangents.

    The dispatcher prefers a kernel for the autograd of the CPU to the one for all devices, which it calls.
    """
    overload = operator._opoverload
    names = [argument.name for argument in overload._schema.arguments]
    differentiate = make_autograd_impl(overload, operator)

    def check_and_differentiate(keyset: Any, *arguments: Any) -> Any:
        for name, argument in zip(names, arguments, strict=False):
            if isinstance(argument, Tensor) and (error := untracked(argument, name)) is not None:
                raise error
        return differentiate(keyset, *arguments)

    # Where the compiler leaves a call to Python, it compiles the functions inside. There the check would find that it
    # is being compiled and leave out the rest, and the tangent would be 0.
    checked = _without_compiler(check_and_differentiate)
    library.impl(overload._schema.name.split("::")[1], checked, "AutogradCPU", with_keyset=True)


_private: Any = torch
_without_compiler = _private._disable_dynamo  # torch.compiler.disable, which imports the compiler with the first call
_library: Any = torch.library.Library("cattn", "FRAGMENT")  # type: ignore[no-untyped-call]
_guard(attention_operator, _library)
_guard(backward_operator, _library)
