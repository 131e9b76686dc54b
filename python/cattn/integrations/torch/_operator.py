"""The ways of attention through PyTorch: at once, with autograd, and as custom operators that PyTorch can trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl

from cattn import _cattn

from ..._input.objects import split_blocks
from ._compute import backward, empty_output, forward, recorded, row_shape
from ._tensors import (
    as_array,
    as_tensor,
    check_class,
    is_batched_gradient,
    nobody_watches,
    of_read_only,
    untracked,
    without_compiler,
)

# The arguments of both operators, by csrc/call/operands.h: the operands, which may have gradients; the other arrays;
# the seed of the dropout; the numbers.
_WITH_GRADIENT = ("STORED", "KEYS", "VALUES", "MASK", "COMPUTED", "LOGITS")  # kinds
OPERANDS = [name for name, _, kind, *_ in _cattn._operands() if kind in _WITH_GRADIENT]
_ARRAYS = [name for name, _, kind, *_ in _cattn._operands() if kind not in _WITH_GRADIENT]
_NUMBERS = [(name, kind) for name, kind in _cattn._numbers() if kind not in ("LAYOUT", "SEED")]
_OF_RESULTS = ["grad_out", "grad_lse", "grad_weights", "out", "lse"]
N_OPERANDS, N_ARRAYS, N_OF_RESULTS = len(OPERANDS), len(_ARRAYS) + 1, len(_OF_RESULTS)
POSITIONS = [name for name, axes, kind, *_ in _cattn._operands() if kind in ("OFFSETS", "QUERY_COUNTS", "KEY_COUNTS")]
# The axes of each array without the batch, in letters.
AXES = {name: axes for name, axes, *_ in _cattn._operands()}

# The types of a number in an operator's schema, where a window is two of them.
_TYPES = {
    "PROBABILITY": "float {}",
    "ALIGNMENT": "str {}",
    "REAL": "float? {}",
    "CHOICE": "bool? {}",
    "WINDOW": "int {0}_left, int {0}_right",
    "COUNT": "int? {}",
    "PRODUCTS": "str? {}",
}


# The place of each argument in attention_operator.
_NAMES = [*OPERANDS, *_ARRAYS, "seed"]
for _name, _kind in _NUMBERS:
    _NAMES += [f"{_name}_left", f"{_name}_right"] if _kind == "WINDOW" else [_name]
PLACE = {name: place for place, name in enumerate(_NAMES)}


def tensors_schema(names: list[str], required: tuple[str, ...]) -> str:
    return ", ".join(f"Tensor{'' if name in required else '?'} {name}" for name in names)


OPERANDS_SCHEMA = tensors_schema(OPERANDS, ("query", "key", "value"))
_RESULTS_SCHEMA = tensors_schema(_OF_RESULTS, ("out", "lse"))
OPTIONS_SCHEMA = ", ".join(
    [tensors_schema([*_ARRAYS, "seed"], ()), *(_TYPES[kind].format(name) for name, kind in _NUMBERS)]
)


def read_options(*arguments: Any) -> dict[str, Any]:
    """Return the keyword arguments of cattn's functions, given an operator's arguments after the operands."""
    left = iter(arguments)
    options: dict[str, Any] = {name: None if (a := next(left)) is None else as_array(a) for name in _ARRAYS}
    seed = next(left)
    options["rng"] = None if seed is None else int(seed) % 2**64
    for name, kind in _NUMBERS:
        options[name] = (next(left), next(left)) if kind == "WINDOW" else next(left)
        if kind == "ALIGNMENT":
            options[name] = options[name] or False
    return options


def as_seed(number: int) -> Tensor:
    """Return a seed in [0, 2**64) as the tensor that the operators take."""
    return torch.tensor(number - 2**64 if number >= 2**63 else number, dtype=torch.int64, device="cpu")


def _as_constant(value: Any) -> Tensor | None:
    """Return an array or an int as a tensor; None and tensors as they are."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return as_tensor(value, torch.bfloat16 if value.dtype.name == "bfloat16" else None)
    return torch.tensor(value, dtype=torch.int64, device="cpu")


def write_options(options: dict[str, Any]) -> list[Any]:
    """Return the operators' arguments after the operands, given the keyword arguments of cattn's functions.

    Arrays may be tensors already. This is the inverse of `read_options`.
    """
    written = [_as_constant(options.get(name)) for name in _ARRAYS]
    seed = options.get("rng")
    written.append(as_seed(seed) if isinstance(seed, int) else seed)
    for name, kind in _NUMBERS:
        written += _WRITERS.get(kind, _write_number)(options.get(name), name)
    return written


def _write_number(number: Any, name: str) -> tuple[Any, ...]:
    return (number,)


def _write_window(window: Any, name: str) -> tuple[Any, ...]:
    """Return the two numbers of a window; it and each of them may be None."""
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{name} must be a pair of ints, got {window!r}")
    return tuple(-1 if side is None else side for side in window)


def read_block_mask(block_mask: Any) -> tuple[Tensor | None, Any]:
    """Return the blocks as a tensor, and their size, as the operators take them."""
    blocks, size = split_blocks(block_mask)
    if blocks is None:
        return None, None
    if isinstance(size, bool) or not isinstance(size, (int, np.integer, torch.SymInt)):
        raise TypeError(f"block_mask.size must be an int, got {type(size).__name__}")
    if size > 2**63 - 1:  # the error of cattn's own function; it checks the rest
        raise ValueError(f"block_mask.size must be at most {2**63 - 1}, got {size}")
    return of_read_only(blocks) if isinstance(blocks, np.ndarray) else blocks, size


_WRITERS: dict[str, Callable[[Any, str], tuple[Any, ...]]] = {
    "ALIGNMENT": lambda alignment, name: (alignment or "",),
    "WINDOW": _write_window,
}


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
        """Return the gradients of the operands, given the gradients of the output, lse and the weights."""
        *operands, out, lse = ctx.saved_tensors
        if nobody_watches() and not torch.is_grad_enabled() and not any(map(is_batched_gradient, of_results)):
            grads = recorded("cattn::attention_backward", backward, *of_results, operands, out, lse, ctx.options)
            return (*grads, None, None)
        # compiled autograd, vmap over several gradients, or create_graph=True
        grads = backward_operator(*of_results, out, lse, *operands, *write_options(ctx.options))
        return (*(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)), None, None)


# ---- the custom operators ------------------------------------------------------------------------------------------
@torch.library.custom_op(
    "cattn::attention",
    mutates_args=(),
    device_types="cpu",
    schema=f"({OPERANDS_SCHEMA}, {OPTIONS_SCHEMA}, bool return_weights) -> (Tensor, Tensor, Tensor)",
)
def attention_operator(*arguments: Any) -> Any:
    """Return the output, the log-sum-exp, and the weights or an empty tensor."""
    operands = arguments[:N_OPERANDS]
    for name, tensor in (("attn_mask", operands[3]), ("bias", operands[4])):
        if tensor is not None:
            check_class(tensor, name)
    result = forward(operands, read_options(*arguments[N_OPERANDS:-1]), lse=True, weights=arguments[-1])
    return result.out, result.lse, operands[0].new_empty(0) if result.weights is None else result.weights


@torch.library.custom_op(
    "cattn::attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_RESULTS_SCHEMA}, {OPERANDS_SCHEMA}, {OPTIONS_SCHEMA}) -> ({', '.join(['Tensor'] * N_OPERANDS)})",
)
def backward_operator(*arguments: Any) -> Any:
    """Return the gradients of the operands; an empty tensor for one that has none."""
    grad_out, grad_lse, grad_weights, out, lse = arguments[:N_OF_RESULTS]
    operands, rest = arguments[N_OF_RESULTS:][:N_OPERANDS], arguments[N_OF_RESULTS + N_OPERANDS :]
    grads = backward(grad_out, grad_lse, grad_weights, operands, out, lse, read_options(*rest))
    return filled(grads, out)


def filled(grads: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients as operators do: an empty tensor is none."""
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


@attention_operator.register_fake
def _output_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = arguments[:3]
    rows = row_shape(query, key, value, arguments[PLACE["enable_gqa"]])
    key_indices = arguments[PLACE["key_indices"]]
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


attention_operator.register_autograd(_differentiate, setup_context=_save)


_library: Any = torch.library.Library("cattn", "FRAGMENT")  # type: ignore[no-untyped-call]


def guard(operator: Any) -> None:
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
    checked = without_compiler(check_and_differentiate)
    _library.impl(overload._schema.name.split("::")[1], checked, "AutogradCPU", with_keyset=True)


guard(attention_operator)
