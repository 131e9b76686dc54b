"""Attention of tensors by cattn's functions, and its ways through PyTorch: at once, with autograd, as operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._library.autograd import make_autograd_impl

import cattn
from cattn import _cattn

from ..._input.objects import split_blocks
from ._tensors import (
    OPERATOR,
    as_array,
    as_tensor,
    check_class,
    is_batched_gradient,
    nobody_watches,
    of_read_only,
    untracked,
    without_compiler,
)

_profiler_enabled: Any = torch._C._autograd._profiler_enabled
# The arguments that may carry a gradient: query, key, value, attn_mask, bias, sinks, gate.
Operands: TypeAlias = Sequence[Tensor | None]


class Result(NamedTuple):
    """Tensors of a forward pass. lse and weights are None unless the caller wants them."""

    out: Tensor
    lse: Tensor | None
    weights: Tensor | None


def row_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool | None) -> tuple[int, ...]:
    """Return the shape of the output without its last axis, also of sizes that the compiler keeps as symbols.

    C sees only numbers, so that `cattn.explain` cannot answer here.
    """
    q, k, v = query.shape, key.shape, value.shape
    if q[:-2] == k[:-2] == v[:-2]:
        return q[:-1]
    heads = query.ndim > 2 if enable_gqa else enable_gqa is None and query.ndim > 3
    shared = 3 if heads else 2  # grouped heads do not broadcast: the output has the heads of the query
    broadcast_shapes: Any = torch.broadcast_shapes  # has no types
    batch = broadcast_shapes(q[:-shared], k[:-shared], v[:-shared])
    if heads and q[-3] == 1:  # one query head for all heads of keys
        return (*batch, *broadcast_shapes(k[-3:-2], v[-3:-2]), q[-2])
    return (*batch, *q[-shared:-1])


def tokens_first(query: Tensor) -> bool:
    """Return whether the tokens come before the heads in the memory of the query, (B, T, H, head_dim).

    The output follows, as PyTorch's does, so that its heads can be joined without a copy.
    """
    strides = query.stride()
    return len(strides) == 4 and strides[1] < strides[2] and query.shape[2] != 1


def empty_output(rows: tuple[int, ...], query: Tensor, value: Tensor) -> Tensor:
    """Return an output of these rows whose numbers are not set, in the memory order of the query."""
    if len(rows) == 3 and tokens_first(query):
        (_, heads, tokens), width = rows, value.shape[-1]
        strides = (tokens * heads * width, width, heads * width, 1)
        return query.new_empty_strided((*rows, width), strides)  # no view: those have no tangents of their own
    return query.new_empty((*rows, value.shape[-1]))


def recorded(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function; a profiler that is active shows it under this name, as it shows operators."""
    if not _profiler_enabled():
        return function(*arguments, **options)
    with torch.profiler.record_function(name):
        return function(*arguments, **options)


def _stored(tensor: Tensor, name: str, options: dict[str, Any]) -> Any:
    """Return a key or value as cattn's functions take it."""
    scale = options.get(f"{name}_scale")
    array = as_array(tensor, name)
    return array if scale is None else cattn.Quantized._of_argument(array, scale, name)


def _with_extras(options: dict[str, Any], operands: Operands) -> dict[str, Any]:
    """Return the keyword arguments of cattn's functions, with the operands that most calls do not have."""
    if "block_mask" in options or "key_scale" in options or "value_scale" in options:
        options = {name: x for name, x in options.items() if name not in ("key_scale", "value_scale")}
        blocks, size = options.pop("block_mask", None), options.pop("block_size", None)
        options["block_mask"] = None if blocks is None else cattn.BlockMask._of_argument(blocks, size)
    for name, operand in zip(OPERANDS[3:], operands[3:], strict=True):
        if operand is not None:
            options = {**options, name: as_array(operand, name)}
    return options


def forward(operands: Operands, options: dict[str, Any], lse: bool, weights: bool) -> Result:
    """Return attention of the operands, in tensors on the arrays of the result.

    lse is float64, because the gradients need its digits.
    """
    query, key, value = operands[:3]
    assert query is not None and key is not None and value is not None  # noqa: PT018
    attention: Any = cattn.scaled_dot_product_attention  # the overloads do not see through **options
    arrays = as_array(query, "query"), _stored(key, "key", options), _stored(value, "value", options)
    options = _with_extras(options, operands)
    out = None
    if tokens_first(query):
        try:
            rows = row_shape(query, key, value, options.get("enable_gqa"))
        except RuntimeError:  # cattn's own error names the argument whose shape is wrong
            rows = ()
        if len(rows) == 3:
            out = empty_output(rows, query, value)
            memory = as_array(out)
            options = {**options, "out": cattn.AttentionOutput(memory) if lse or weights else memory}
    if not lse and not weights:
        array = attention(*arrays, **options)
        return Result(as_tensor(array, query.dtype) if out is None else out, None, None)
    extras = attention(*arrays, return_lse=np.float64 if lse else False, return_weights=weights, **options)
    return Result(
        as_tensor(extras.out, query.dtype) if out is None else out,
        as_tensor(extras.lse) if lse else None,
        as_tensor(extras.weights, query.dtype) if weights else None,
    )


def backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands, given the gradients of the output, of lse and of the weights; None is 0.

    The mask has one only if it is additive and there is no bias. Quantized keys and values have none.
    """
    # The compiler gives zeros for an output that no loss depends on.
    if grad_weights is None or not bool(grad_weights.any()):
        return _backward_of_output(grad_out, grad_lse, operands, out, lse, options)
    by_weights = _backward_of_weights(grad_weights, operands, options)
    if grad_out is None and grad_lse is None:
        value, gate = operands[2], operands[-1]  # the weights do not depend on them
        assert value is not None
        of_value = torch.zeros_like(value) if value.dtype is out.dtype else None
        return (*by_weights[:2], of_value, *by_weights[3:-1], None if gate is None else torch.zeros_like(gate))
    by_output = _backward_of_output(grad_out, grad_lse, operands, out, lse, options)
    return tuple(a if b is None else a + b for a, b in zip(by_output, by_weights, strict=True))  # type: ignore[operator]


def _backward_of_weights(
    grad_weights: Tensor, operands: Operands, options: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands, given the weights' gradients: the output for the unit matrix as value."""
    query, key, value, *rest, _ = operands
    assert query is not None and key is not None and value is not None  # noqa: PT018
    size = key.shape[-2]
    if (key_indices := options.get("key_indices")) is not None:
        grad_weights = _of_all_keys(grad_weights, key_indices, size)
    unit = torch.eye(size, dtype=query.dtype, device="cpu").expand(*value.shape[:-2], size, size)
    operands = (query, key, unit, *rest, None)
    # The weights are those before dropout.
    options = {name: x for name, x in options.items() if name not in ("dropout_p", "rng", "value_scale")}
    again = forward(operands, options, lse=True, weights=False)
    assert again.lse is not None
    grads = _backward_of_output(grad_weights, None, operands, again.out, again.lse, options)
    return (*grads[:2], None, *grads[3:])


def _of_all_keys(grad_weights: Tensor, key_indices: NDArray[Any], size: int) -> Tensor:
    """Return the gradient of the weights of listed keys as a gradient of the weights of all keys.

    The output for the unit matrix is the sum of a key's weights. Where a list names it several times they are equal, so
    that each has the mean of their gradients.
    """
    indices = torch.from_numpy(key_indices.astype(np.int64)).expand(grad_weights.shape)
    wide, named, places = grad_weights.to(torch.float64), indices >= 0, indices.clamp(min=0)
    none = wide.new_zeros(*wide.shape[:-1], max(size, 1))
    total = none.scatter_add(-1, places, wide.where(named, 0))
    count = none.scatter_add(-1, places, named.to(wide.dtype))
    return (total / count.clamp(min=1))[..., :size].to(grad_weights.dtype)


def _backward_of_output(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands, given the gradients of the output and of lse; None is 0."""
    query, key, value = operands[:3]
    assert query is not None and key is not None and value is not None  # noqa: PT018
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        options = {**options, "grad_lse": as_array(grad_lse, "grad_lse")}
    grads = cattn.attention_backward(
        as_array(grad_out, "grad_out"), as_array(query, "query"), _stored(key, "key", options),
        _stored(value, "value", options), as_array(out, "out"), as_array(lse, "lse"),
        **_with_extras(options, operands),
    )  # fmt: skip
    return _as_gradients(grads, operands, out.dtype)


def derive(
    tangents: Operands, operands: Operands, out: Tensor, lse: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the derivatives of the output and of lse in the direction of the tangents; None is 0."""
    attention_jvp: Any = cattn.attention_jvp  # does not see through **options
    result = attention_jvp(
        *_inputs(operands), **_tangents(tangents, operands), return_lse=True, out=as_array(out, "out"),
        lse=as_array(lse, "lse"), **_with_extras(_of_second_order(options, operands), operands),
    )  # fmt: skip
    return as_tensor(result.out_tangent, out.dtype), as_tensor(result.lse_tangent).to(torch.float64)


def backward_of_derivative(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    tangents: Operands,
    operands: Operands,
    results: Sequence[Tensor],
    options: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands, given the gradients of the derivatives of the output and of lse.

    The results are the output, lse, and their derivatives.
    """
    out, lse, out_tangent, lse_tangent = results
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    options = _of_second_order(options, operands)
    if grad_lse is not None:
        options["grad_lse_tangent"] = as_array(grad_lse, "grad_lse")
    dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
    attention_jvp_backward: Any = cattn.attention_jvp_backward
    grads = attention_jvp_backward(
        as_array(grad_out, "grad_out"), *_inputs(operands), as_array(out, "out"), as_array(lse, "lse"),
        as_array(out_tangent, "out_tangent"), as_array(lse_tangent.to(dtype), "lse_tangent"),
        **_tangents(tangents, operands), **_with_extras(options, operands),
    )  # fmt: skip
    return _as_gradients(grads, operands, out.dtype)


def _inputs(operands: Operands) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    query, key, value = operands[:3]
    assert query is not None and key is not None and value is not None  # noqa: PT018
    return as_array(query, "query"), as_array(key, "key"), as_array(value, "value")


def _of_second_order(options: dict[str, Any], operands: Operands) -> dict[str, Any]:
    """Return the options of passes with tangents; an error if there is one that they do not have."""
    refused = {"key_scale": "a quantized key", "value_scale": "a quantized value", "key_indices": "key_indices"}
    refused |= {"compute_dtype": "compute_dtype", "gate": "a gate"}
    given = {**options, "gate": operands[-1]}
    for name, what in refused.items():
        if given.get(name) is not None:
            raise NotImplementedError(f"{OPERATOR} has no second derivatives and no forward mode with {what}")
    return {name: x for name, x in options.items() if name not in refused}


def _tangents(tangents: Operands, operands: Operands) -> dict[str, NDArray[Any]]:
    """Return the keyword arguments of the tangents. A bias has one, or else a float mask."""
    *inputs, of_mask, of_bias, of_sinks, _ = tangents
    of_bias = of_mask if operands[4] is None else of_bias
    names = ("query", "key", "value", "bias", "sinks")
    pairs = zip(names, (*inputs, of_bias, of_sinks), strict=True)
    return {n: as_array(x, n) for name, x in pairs if x is not None and (n := f"{name}_tangent")}


def _as_gradients(grads: Any, operands: Operands, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands; quantized keys and values have none."""
    _, key, value, attn_mask, bias, sinks, gate = operands
    assert key is not None and value is not None  # noqa: PT018
    return (
        as_tensor(grads.query, dtype),
        as_tensor(grads.key, dtype) if key.dtype is dtype else None,
        as_tensor(grads.value, dtype) if value.dtype is dtype else None,
        _as_gradient(grads.bias, attn_mask) if bias is None else None,
        _as_gradient(grads.bias, bias),
        _as_gradient(grads.sinks, sinks),
        _as_gradient(grads.gate, gate),
    )


def _as_gradient(array: NDArray[Any] | None, operand: Tensor | None) -> Tensor | None:
    """Return the gradient of a mask, a bias, sinks or a gate in its own dtype."""
    return None if array is None or operand is None else as_tensor(array).to(operand.dtype)


# The arguments of both operators, by csrc/call/operands.h: the operands, which may have gradients; the other arrays;
# the seed of the dropout; the numbers.
_WITH_GRADIENT = (*cattn.AttentionGradients._fields, "attn_mask")  # the gradient of a float mask is the bias's
OPERANDS = [name for name, *_ in _cattn._operands() if name in _WITH_GRADIENT]
_ARRAYS = [name for name, *_ in _cattn._operands() if name not in _WITH_GRADIENT]
_NUMBERS = [(name, kind) for name, kind in _cattn._numbers() if kind not in ("LAYOUT", "SEED")]
_OF_RESULTS = ["grad_out", "grad_lse", "grad_weights", "out", "lse"]
N_OPERANDS, N_ARRAYS, N_OF_RESULTS = len(OPERANDS), len(_ARRAYS) + 1, len(_OF_RESULTS)
POSITIONS = [name for name, axes, kind, *_ in _cattn._operands() if kind in ("OFFSETS", "QUERY_COUNTS", "KEY_COUNTS")]
# The axes of each array without the batch, in letters.
AXES = {name: axes for name, axes, *_ in _cattn._operands()}

# The types of a number in an operator's schema, where a window is two of them. A word has no kind.
TYPES: dict[str | None, str] = {
    None: "str? {}",
    "PROBABILITY": "float {}",
    "ALIGNMENT": "str {}",
    "REAL": "float? {}",
    "BOUND": "float? {}",
    "CHOICE": "bool? {}",
    "FLAG": "bool {}",
    "WINDOW": "int {0}_left, int {0}_right",
    "COUNT": "int? {}",
    "PRODUCTS": "str? {}",
    "LAYOUT": "str {}",
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
    [tensors_schema([*_ARRAYS, "seed"], ()), *(TYPES[kind].format(name) for name, kind in _NUMBERS)]
)


def read_options(*arguments: Any) -> dict[str, Any]:
    """Return the keyword arguments of cattn's functions, given an operator's arguments after the operands."""
    left = iter(arguments)
    options: dict[str, Any] = {name: None if (a := next(left)) is None else as_array(a, name) for name in _ARRAYS}
    seed = next(left)
    options["rng"] = None if seed is None else int(seed) % 2**64
    return options | read_numbers(_NUMBERS, left)


def read_numbers(numbers: Sequence[tuple[str, str | None]], left: Iterator[Any]) -> dict[str, Any]:
    """Return numbers of these names and kinds as cattn's functions take them, given an operator's arguments."""
    options: dict[str, Any] = {}
    for name, kind in numbers:
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
    return written + write_numbers(_NUMBERS, options)


def write_numbers(numbers: Sequence[tuple[str, str | None]], options: dict[str, Any]) -> list[Any]:
    """Return the operator's arguments for numbers of these names and kinds: the inverse of `read_numbers`."""
    return [x for name, kind in numbers for x in _WRITERS.get(kind, _write_number)(options.get(name), name)]


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


_WRITERS: dict[str | None, Callable[[Any, str], tuple[Any, ...]]] = {
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
        if (
            not torch.is_grad_enabled()
            and not any(map(is_batched_gradient, of_results))
            and nobody_watches(*of_results)
        ):
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
    for name, tensor in zip(OPERANDS, operands, strict=True):
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


def refuse_mixed_devices(arguments: Sequence[Any]) -> None:
    """Raise ValueError where one tensor of several has no numbers: the result would be on the CPU, and nobody's."""
    devices = sorted({str(x.device) for x in arguments if isinstance(x, Tensor)})
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {' and '.join(devices)}; cattn computes on the CPU")


@attention_operator.register_fake
def _output_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    refuse_mixed_devices(arguments)
    query, key, value = arguments[:3]
    rows = row_shape(query, key, value, arguments[PLACE["enable_gqa"]])
    key_indices = arguments[PLACE["key_indices"]]
    columns = key.shape[-2] if key_indices is None else key_indices.shape[-1]
    weights = query.new_empty((*rows, columns) if arguments[-1] else 0)
    return empty_output(rows, query, value), query.new_empty(rows, dtype=torch.float64), weights


@backward_operator.register_fake
def _gradient_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    out = arguments[N_OF_RESULTS - 2]
    query, key, value, attn_mask, bias, *others = arguments[N_OF_RESULTS:][:N_OPERANDS]
    additive = attn_mask is not None and attn_mask.dtype is not torch.bool and bias is None
    of_inputs = [x if x.dtype is out.dtype else None for x in (query, key, value)]
    of_operands = [*of_inputs, attn_mask if additive else None, bias, *others]
    return filled([None if x is None else x.new_empty(x.shape) for x in of_operands], out)


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


def guard(operator: Any, find_error: Callable[..., Exception | None] = untracked) -> None:
    """Refuse tensors of forward mode and ``torch.func.grad`` in an operator: the rules of autograd drop tangents.

    The dispatcher prefers a kernel for the autograd of the CPU to the one for all devices, which it calls.
    """
    overload = operator._opoverload
    names = [argument.name for argument in overload._schema.arguments]
    differentiate = make_autograd_impl(overload, operator)

    def check_and_differentiate(keyset: Any, *arguments: Any) -> Any:
        for name, argument in zip(names, arguments, strict=False):
            if isinstance(argument, Tensor) and (error := find_error(argument, name)) is not None:
                raise error
        return differentiate(keyset, *arguments)

    # Where the compiler leaves a call to Python, it compiles the functions inside. There the check would find that it
    # is being compiled and leave out the rest, and the tangent would be 0.
    checked = without_compiler(check_and_differentiate)
    _library.impl(overload._schema.name.split("::")[1], checked, "AutogradCPU", with_keyset=True)


guard(attention_operator)
