"""Second derivatives and forward mode: two more operators, and the rules of all derivatives and of torch.vmap.

The gradients are ``J.T @ g`` for the gradients g of the results, with the Jacobian J of attention. In reverse mode,
their own gradients for the cotangents t are ``J @ t`` for g, which `jvp_operator` computes, and the gradient of
``g . (J @ t)`` for the operands, which `jvp_backward_operator` computes. The same product, of the second derivative, g
and t, is the tangent of the gradients for tangents t of the operands. A third derivative is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._operator import (
    AXES,
    N_ARRAYS,
    N_OF_RESULTS,
    N_OPERANDS,
    OPERANDS,
    OPERANDS_SCHEMA,
    OPTIONS_SCHEMA,
    PLACE,
    attention_operator,
    backward,
    backward_of_derivative,
    backward_operator,
    derive,
    filled,
    forward,
    guard,
    read_options,
    tensors_schema,
)
from ._tensors import INSTEAD, OPERATOR, is_batched, is_readable, is_traceable, is_traced, without_compiler

TANGENTS = [f"{name}_tangent" for name in OPERANDS]
_OF_DERIVATIVE = ["grad_out", "grad_lse", *TANGENTS, "out", "lse", "out_tangent", "lse_tangent"]
N_OF_JVP, N_OF_DERIVATIVE = N_OPERANDS + 2, len(_OF_DERIVATIVE)


def _derive(*arguments: Any) -> tuple[Tensor, Tensor]:
    tangents, (out, lse) = arguments[:N_OPERANDS], arguments[N_OPERANDS:N_OF_JVP]
    operands, rest = arguments[N_OF_JVP:][:N_OPERANDS], arguments[N_OF_JVP + N_OPERANDS :]
    return derive(tangents, operands, out, lse, read_options(*rest))


def _backward_of_derivative(*arguments: Any) -> tuple[Tensor, ...]:
    grad_out, grad_lse, *tangents = arguments[: N_OPERANDS + 2]
    results, rest = arguments[N_OPERANDS + 2 : N_OF_DERIVATIVE], arguments[N_OF_DERIVATIVE:]
    operands, options = rest[:N_OPERANDS], read_options(*rest[N_OPERANDS:])
    return filled(backward_of_derivative(grad_out, grad_lse, tangents, operands, results, options), results[0])


@torch.library.custom_op(
    "cattn::attention_jvp",
    mutates_args=(),
    device_types="cpu",
    schema=f"({tensors_schema([*TANGENTS, 'out', 'lse'], ('out', 'lse'))}, {OPERANDS_SCHEMA}, {OPTIONS_SCHEMA})"
    " -> (Tensor, Tensor)",
)
def jvp_operator(*arguments: Any) -> Any:
    """Return the derivatives of the output and of lse."""
    return _derive(*arguments)


@torch.library.custom_op(
    "cattn::attention_jvp_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"({tensors_schema(_OF_DERIVATIVE, tuple(_OF_DERIVATIVE[-4:]))}, {OPERANDS_SCHEMA}, {OPTIONS_SCHEMA})"
    f" -> ({', '.join(['Tensor'] * N_OPERANDS)})",
)
def jvp_backward_operator(*arguments: Any) -> Any:
    """Return the gradients of the operands; an empty tensor for one that has none."""
    return _backward_of_derivative(*arguments)


@jvp_operator.register_fake
def _shapes_of_derivatives(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = arguments[N_OPERANDS:N_OF_JVP]
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


@jvp_backward_operator.register_fake
def _shapes_of_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    out, operands = arguments[N_OPERANDS + 2], arguments[N_OF_DERIVATIVE:][:N_OPERANDS]
    return filled([x if _has_gradient(i, operands) else None for i, x in enumerate(operands)], out)


def _has_gradient(i: int, operands: Sequence[Tensor | None]) -> bool:
    operand = operands[i]
    if operand is None or not operand.dtype.is_floating_point:
        return False
    return OPERANDS[i] != "attn_mask" or operands[OPERANDS.index("bias")] is None


# ---- the rules -----------------------------------------------------------------------------------------------------
def _refuse_weights(grad_weights: Tensor | None) -> None:
    if grad_weights is not None:
        raise NotImplementedError(f"{OPERATOR} has no second derivatives of its weights: {INSTEAD}")


def _given(grads: Sequence[Tensor | None], operands: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return cotangents of gradients, or tangents. An empty tensor is no gradient, and becomes None."""
    pairs = enumerate(zip(grads, operands, strict=True))
    return [g if operand is not None and _has_gradient(i, operands) else None for i, (g, operand) in pairs]


class _End(torch.autograd.Function):
    """The identity where third derivatives would begin, which are an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)  # the rules for torch.vmap want something
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        """Refuse third derivatives: every way to them leads here, or to ``jvp``."""
        raise NotImplementedError(f"{OPERATOR} has no third derivatives: {INSTEAD}")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(f"{OPERATOR} has no third derivatives: {INSTEAD}")


def _end(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the same tensors, whose derivatives are an error."""
    return tuple(
        x if x is None or not x.dtype.is_floating_point else _End.apply(x)  # type: ignore[no-untyped-call]
        for x in tensors
    )


def _product(
    jvp_backward: Callable[..., Any], grads: Sequence[Tensor | None], tangents: Sequence[Tensor | None],
    results: Sequence[Tensor], rest: Sequence[Any],
) -> Any:  # fmt: skip
    """Return the product of the second derivative, the gradients of the results, and the tangents.

    It may be differentiated once more by the tangents, in which it is linear, and by nothing else.
    """
    return jvp_backward(*_end(*grads), *tangents, *results, *_end(*rest[:N_OPERANDS]), *rest[N_OPERANDS:])


def differentiate_twice(
    jvp: Callable[..., Any], jvp_backward: Callable[..., Any], of_gradients: Sequence[Tensor | None],
    arguments: Sequence[Any], needed: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of the arguments of `backward_operator`, given the gradients of its results."""
    grad_out, grad_lse, grad_weights, out, lse = arguments[:N_OF_RESULTS]
    rest = arguments[N_OF_RESULTS:]
    operands = rest[:N_OPERANDS]
    result: list[Tensor | None] = [None] * len(arguments)
    tangents = _given(of_gradients, operands)
    if all(tangent is None for tangent in tangents):
        return result
    _refuse_weights(grad_weights)
    out_tangent, lse_tangent = jvp(*tangents, out, lse, *rest)
    result[:2] = None if grad_out is None else out_tangent, None if grad_lse is None else lse_tangent
    if any(needed[N_OF_RESULTS:][:N_OPERANDS]):
        grads = _product(jvp_backward, (grad_out, grad_lse), tangents, (out, lse, out_tangent, lse_tangent), rest)
        for i, grad in enumerate(_given(grads, operands)):
            result[N_OF_RESULTS + i] = grad if needed[N_OF_RESULTS + i] else None
    return result


def differentiate_derivative(
    backward: Callable[..., Any], jvp_backward: Callable[..., Any], of_derivatives: Sequence[Tensor | None],
    results: Sequence[Tensor], arguments: Sequence[Any], needed: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of the arguments of `jvp_operator`, given the gradients of its results."""
    tangents, (out, lse), rest = arguments[:N_OPERANDS], arguments[N_OPERANDS:N_OF_JVP], arguments[N_OF_JVP:]
    operands = rest[:N_OPERANDS]
    result: list[Tensor | None] = [None] * len(arguments)
    if all(grad is None for grad in of_derivatives):
        return result
    if any(needed[:N_OPERANDS]):
        grads = _given(backward(*of_derivatives, None, out, lse, *rest), operands)
        result[:N_OPERANDS] = [g if t is not None else None for t, g in zip(tangents, grads, strict=True)]
    if any(needed[N_OF_JVP:][:N_OPERANDS]):
        grads = _product(jvp_backward, of_derivatives, tangents, (out, lse, *results), rest)
        result[N_OF_JVP : N_OF_JVP + N_OPERANDS] = _given(grads, operands)
    return result


def differentiate_product(
    jvp: Callable[..., Any], jvp_backward: Callable[..., Any], of_gradients: Sequence[Tensor | None],
    arguments: Sequence[Any],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of the arguments of `jvp_backward_operator`, given the gradients of its results.

    It is linear in the tangents, by a symmetric matrix. The gradients of the other arguments, which are third
    derivatives of attention, are zeros here: they go to an `_End`.
    """
    grad_out, grad_lse, *tangents = arguments[: N_OPERANDS + 2]
    out, lse = arguments[N_OPERANDS + 2 : N_OPERANDS + 4]
    rest = arguments[N_OF_DERIVATIVE:]
    operands = rest[:N_OPERANDS]
    result: list[Tensor | None] = [None] * len(arguments)
    along = _given(of_gradients, operands)
    if all(tangent is None for tangent in along):
        return result
    derivatives = jvp(*along, out, lse, *rest)
    grads = _given(_product(jvp_backward, (grad_out, grad_lse), along, (out, lse, *derivatives), rest), operands)
    for i, tangent in enumerate(tangents):
        result[i + 2] = None if tangent is None else grads[i]
    for i in (0, 1, *range(N_OF_DERIVATIVE, N_OF_DERIVATIVE + N_OPERANDS)):
        argument = arguments[i]
        if argument is not None and argument.dtype.is_floating_point:
            result[i] = torch.zeros_like(argument)
    return result


# ---- what a context keeps: tensors, and the numbers after them -------------------------------------------------------
N_OF_BACKWARD = N_OF_RESULTS + N_OPERANDS + N_ARRAYS
N_OF_JVP_CALL = N_OF_JVP + N_OPERANDS + N_ARRAYS
N_OF_PRODUCT = N_OF_DERIVATIVE + N_OPERANDS + N_ARRAYS


def _keep(ctx: Any, n: int, arguments: Sequence[Any], results: Sequence[Tensor] = ()) -> None:
    """Keep the results and the arguments, of which the first n are tensors or None."""
    ctx.save_for_backward(*results, *arguments[:n])
    ctx.numbers = arguments[n:]
    ctx.set_materialize_grads(False)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, N_OF_BACKWARD, inputs)


def _differentiate(ctx: Any, *of_gradients: Tensor | None) -> tuple[Any, ...]:
    arguments = (*ctx.saved_tensors, *ctx.numbers)
    return tuple(
        differentiate_twice(jvp_operator, jvp_backward_operator, of_gradients, arguments, ctx.needs_input_grad)
    )


def _save_derivative(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, N_OF_JVP_CALL, inputs, output)


def _differentiate_derivative(ctx: Any, *of_derivatives: Tensor | None) -> tuple[Any, ...]:
    results, arguments = ctx.saved_tensors[:2], (*ctx.saved_tensors[2:], *ctx.numbers)
    return tuple(
        differentiate_derivative(
            backward_operator, jvp_backward_operator, of_derivatives, results, arguments, ctx.needs_input_grad
        )
    )


def _save_product(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, N_OF_PRODUCT, inputs)


def _differentiate_product(ctx: Any, *of_gradients: Tensor | None) -> tuple[Any, ...]:
    arguments = (*ctx.saved_tensors, *ctx.numbers)
    return tuple(differentiate_product(jvp_operator, jvp_backward_operator, of_gradients, arguments))


backward_operator.register_autograd(_differentiate, setup_context=_save)
jvp_operator.register_autograd(_differentiate_derivative, setup_context=_save_derivative)
jvp_backward_operator.register_autograd(_differentiate_product, setup_context=_save_product)
guard(backward_operator)
guard(jvp_operator)
guard(jvp_backward_operator)


# ---- the functions that torch.func transforms ------------------------------------------------------------------------
class _Transformed(torch.autograd.Function):
    """An operator with rules for all transforms. The arguments are the operator's."""

    generate_vmap_rule = True
    n_tensors: int  # of the arguments that are tensors or None
    keeps_results = False

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if cls.keeps_results else ()
        _keep(ctx, cls.n_tensors, inputs, results)
        ctx.save_for_forward(*results, *inputs[: cls.n_tensors])


def _run(operator: Any, direct: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call the operator where a batch of ``torch.vmap`` needs its rule or a trace must hold it, else the function.

    Autograd has been here already, and the operator's own rules would refuse tangents.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if not is_traceable() and not any(is_batched(x) or is_traced(x) for x in tensors):
        return direct(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    result = forward(arguments[:N_OPERANDS], read_options(*arguments[N_OPERANDS:]), lse=True, weights=False)
    assert result.lse is not None
    return result.out, result.lse


class Attention(_Transformed):
    """The output and the log-sum-exp."""

    n_tensors = N_OPERANDS + N_ARRAYS
    keeps_results = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _run(lambda *given: attention_operator(*given, False)[:2], _attend, arguments)

    @staticmethod
    def backward(ctx: Any, *of_results: Any) -> Any:
        grads: Any = Backward.apply(*of_results, None, *ctx.saved_tensors, *ctx.numbers)  # type: ignore[no-untyped-call]
        operands = ctx.saved_tensors[2:][:N_OPERANDS]
        return (*_given(grads, operands), *[None] * (N_ARRAYS + len(ctx.numbers)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        out, lse, *rest = ctx.saved_tensors
        return Jvp.apply(*_given(tangents[:N_OPERANDS], rest[:N_OPERANDS]), out, lse, *rest, *ctx.numbers)  # type: ignore[no-untyped-call]


# What is transformed is not compiled: the compiler cannot follow.
@without_compiler  # type: ignore[untyped-decorator]
def attend_transformed(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp, with derivatives by all transforms."""
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"torch.jit.trace records no derivatives of {OPERATOR}: use make_fx, or {INSTEAD[4:]}"
        )
    results: tuple[Tensor, Tensor] = Attention.apply(*arguments)  # type: ignore[no-untyped-call]
    return results


class Backward(_Transformed):
    """The gradients of the operands."""

    n_tensors = N_OF_BACKWARD

    @staticmethod
    def forward(*arguments: Any) -> Any:
        def direct(*given: Any) -> tuple[Tensor, ...]:
            operands, rest = given[N_OF_RESULTS:][:N_OPERANDS], given[N_OF_RESULTS + N_OPERANDS :]
            grad_out, grad_lse, grad_weights, out, lse = given[:N_OF_RESULTS]
            grads = backward(grad_out, grad_lse, grad_weights, operands, out, lse, read_options(*rest))
            return filled(grads, out)

        return _run(backward_operator, direct, arguments)

    @staticmethod
    def backward(ctx: Any, *of_gradients: Any) -> Any:
        arguments = (*ctx.saved_tensors, *ctx.numbers)
        return tuple(differentiate_twice(Jvp.apply, JvpBackward.apply, of_gradients, arguments, ctx.needs_input_grad))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        arguments = (*ctx.saved_tensors, *ctx.numbers)
        grad_out, grad_lse, _, out, lse = arguments[:N_OF_RESULTS]
        rest = arguments[N_OF_RESULTS:]
        operands = rest[:N_OPERANDS]
        of_results, of_operands = tangents[:2], _given(tangents[N_OF_RESULTS:][:N_OPERANDS], operands)
        parts: list[Any] = []
        if any(tangent is not None for tangent in of_results):
            parts.append(Backward.apply(*of_results, None, out, lse, *rest))  # type: ignore[no-untyped-call]
        if any(tangent is not None for tangent in of_operands):
            derivatives: Any = Jvp.apply(*of_operands, out, lse, *rest)  # type: ignore[no-untyped-call]
            results = (out, lse, *derivatives)
            parts.append(_product(JvpBackward.apply, (grad_out, grad_lse), of_operands, results, rest))
        if not parts:
            return (None,) * N_OPERANDS
        return tuple(sum(grads[1:], grads[0]) for grads in zip(*parts, strict=True))


def _check_trace(tangents: Sequence[Tensor | None], operands: Sequence[Tensor | None]) -> None:
    """Refuse a tensor that is its own tangent while ``make_fx`` records what becomes of tensors.

    If the tensor is a constant of the function and the tangent an argument, the trace would take one for the other.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None:
        return
    for name, tangent, operand in zip(OPERANDS, tangents, operands, strict=True):
        if tangent is None or operand is None or not is_readable(tangent) or is_batched(tangent) or is_batched(operand):
            continue
        if tangent.untyped_storage()._cdata == operand.untyped_storage()._cdata:
            raise NotImplementedError(
                f"{name} and its tangent are the same tensor, which make_fx cannot tell apart in {OPERATOR}: trace "
                "with a copy of one of them"
            )


class Jvp(_Transformed):
    """The derivatives of the output and of the log-sum-exp."""

    n_tensors = N_OF_JVP_CALL
    keeps_results = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        _check_trace(arguments[:N_OPERANDS], arguments[N_OF_JVP:][:N_OPERANDS])
        return _run(jvp_operator, _derive, arguments)

    @staticmethod
    def backward(ctx: Any, *of_derivatives: Any) -> Any:
        results, arguments = ctx.saved_tensors[:2], (*ctx.saved_tensors[2:], *ctx.numbers)
        return tuple(
            differentiate_derivative(
                Backward.apply, JvpBackward.apply, of_derivatives, results, arguments, ctx.needs_input_grad
            )
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{OPERATOR} has no forward mode over forward mode: use reverse mode for one of the two derivatives, as "
            f"torch.func.hessian does, or {INSTEAD[4:]}"
        )


class JvpBackward(_Transformed):
    """The gradients of the operands of `Jvp`."""

    n_tensors = N_OF_PRODUCT

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _run(jvp_backward_operator, _backward_of_derivative, arguments)

    @staticmethod
    def backward(ctx: Any, *of_gradients: Any) -> Any:
        arguments = (*ctx.saved_tensors, *ctx.numbers)
        return tuple(differentiate_product(Jvp.apply, JvpBackward.apply, of_gradients, arguments))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(f"{OPERATOR} has no third derivatives: {INSTEAD}")


# ---- torch.vmap: one call for the whole batch ------------------------------------------------------------------------
_RESULT_KINDS = ("matrix", "row", "matrix", "matrix", "row")
_JVP_KINDS = (*OPERANDS, "matrix", "row")
_DERIVATIVE_KINDS = ("matrix", "row", *OPERANDS, "matrix", "row", "matrix", "row")
_SEED, _DROPOUT_P, _ENABLE_GQA = (PLACE[name] for name in ("seed", "dropout_p", "enable_gqa"))


class _Layout:
    """The axes of one call under vmap, and the axes of the call that computes all of them.

    The batch of vmap becomes the first axis. A call without an axis of heads gets one of size 1: with four dimensions
    cattn takes axis -3 for heads.
    """

    def __init__(self, size: int, ndim: int, enable_gqa: bool | None) -> None:
        self.size = size
        self.adds_heads = not (ndim > 3 or (enable_gqa is True and ndim == 3))
        self.ndim = ndim + self.adds_heads

    def spread(self, tensor: Tensor, dim: int | None, ndim: int, heads: int | None = None) -> Tensor:
        """Return the tensor as (batch of vmap, `ndim` axes); `heads` is the place of an axis of heads to add."""
        tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        if self.adds_heads and heads is not None and tensor.ndim > -heads:
            tensor = tensor.unsqueeze(heads)
        missing = ndim + 1 - tensor.ndim
        tensor = tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:])
        return tensor.expand(self.size, *tensor.shape[1:])

    def drop_heads(self, tensor: Tensor, axis: int) -> Tensor:
        """Undo the addition of an axis of heads."""
        return tensor.squeeze(axis) if self.adds_heads else tensor


def _logical_ndim(tensor: Tensor, dim: int | None) -> int:
    return tensor.ndim - (dim is not None)


def _spread_arguments(size: int, dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> tuple[_Layout, list[Any]]:
    """Return the layout, and the arguments of the one call."""
    ndim = max(_logical_ndim(x, dim) for x, dim in zip(arguments[:3], dims, strict=False))
    layout = _Layout(size, ndim, arguments[_ENABLE_GQA])
    n = layout.ndim
    spread: list[Any] = []
    for name, x, dim in zip(list(PLACE)[:_SEED], arguments, dims, strict=False):
        axes = len(AXES[name])  # three with an axis of heads, one for a number of each head, none for the batch entry's
        spread.append(None if x is None else layout.spread(x, dim, n - 3 + axes, -3 if axes == 3 else None))
    seed, dim = arguments[_SEED], dims[_SEED]
    if seed is not None and dim is not None:  # batch entries have different masks already
        seed = seed.select(dim, 0)
    return layout, [*spread, seed, *arguments[_DROPOUT_P:]]


def _one_mask_for_all(dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> bool:
    """Return whether all calls have the same dropout mask, which depends on the batch entry within one call."""
    return arguments[_DROPOUT_P] > 0 and dims[_SEED] is None


def in_turn(operator: Any, size: int, dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> Any:
    """Call the operator once for each entry of vmap's batch."""
    results = [
        operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(map(torch.stack, zip(*results, strict=True)))
    return stacked, (0,) * len(stacked)


@attention_operator.register_vmap
def _attention_of_batch(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    if _one_mask_for_all(in_dims, arguments):
        return in_turn(attention_operator, info.batch_size, in_dims, arguments)
    layout, spread = _spread_arguments(info.batch_size, in_dims, arguments)
    out, lse, weights = attention_operator(*spread)
    wanted = arguments[-1]
    return (
        (layout.drop_heads(out, -3), layout.drop_heads(lse, -2), layout.drop_heads(weights, -3) if wanted else weights),
        (0, 0, 0 if wanted else None),
    )


@backward_operator.register_vmap
def _gradients_of_batch(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    dims, rest = in_dims[N_OF_RESULTS:], arguments[N_OF_RESULTS:]
    if _one_mask_for_all(dims, rest):
        return in_turn(backward_operator, info.batch_size, in_dims, arguments)
    layout, spread = _spread_arguments(info.batch_size, dims, rest)
    leading = _spread_leading(layout, _RESULT_KINDS, in_dims, arguments)
    return _gathered(info.batch_size, backward_operator(*leading, *spread), rest, dims)


def _spread_leading(layout: _Layout, kinds: Sequence[str], dims: tuple[int | None, ...], arguments: Any) -> list[Any]:
    """Spread the arguments before the operands: matrices and rows of results, and tangents of operands."""
    n = layout.ndim
    places: dict[str, tuple[int, int | None]] = {"matrix": (n, -3), "row": (n - 1, -2)}
    for name in OPERANDS:
        axes = len(AXES[name])
        places[name] = (n - 3 + axes, -3 if axes == 3 else None)
    return [
        None if x is None else layout.spread(x, dim, *places[kind])
        for x, dim, kind in zip(arguments, dims, kinds, strict=False)
    ]


def _gathered(size: int, grads: tuple[Tensor, ...], rest: tuple[Any, ...], dims: tuple[int | None, ...]) -> Any:
    """Return the gradients of the operands in their own shapes, with the batch first."""
    results: list[Tensor] = []
    out_dims: list[int | None] = []
    for grad, operand, dim in zip(grads, rest[:N_OPERANDS], dims, strict=False):
        if operand is None or (grad.numel() == 0 and operand.numel() > 0):
            results.append(grad)
            out_dims.append(None)
        else:
            shape = operand.shape if dim is None else operand.movedim(dim, 0).shape[1:]
            results.append(grad.reshape(size, *shape))
            out_dims.append(0)
    return tuple(results), tuple(out_dims)


@jvp_operator.register_vmap
def _derivatives_of_batch(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    dims, rest = in_dims[N_OF_JVP:], arguments[N_OF_JVP:]
    if _one_mask_for_all(dims, rest):
        return in_turn(jvp_operator, info.batch_size, in_dims, arguments)
    layout, spread = _spread_arguments(info.batch_size, dims, rest)
    out_tangent, lse_tangent = jvp_operator(*_spread_leading(layout, _JVP_KINDS, in_dims, arguments), *spread)
    return (layout.drop_heads(out_tangent, -3), layout.drop_heads(lse_tangent, -2)), (0, 0)


@jvp_backward_operator.register_vmap
def _second_derivatives_of_batch(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    dims, rest = in_dims[N_OF_DERIVATIVE:], arguments[N_OF_DERIVATIVE:]
    if _one_mask_for_all(dims, rest):
        return in_turn(jvp_backward_operator, info.batch_size, in_dims, arguments)
    layout, spread = _spread_arguments(info.batch_size, dims, rest)
    grads = jvp_backward_operator(*_spread_leading(layout, _DERIVATIVE_KINDS, in_dims, arguments), *spread)
    return _gathered(info.batch_size, grads, rest, dims)
