"""Second derivatives and forward mode: two more operators, and the rules that all derivatives follow.

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

from ._compute import backward, backward_of_derivative, derive, forward
from ._operator import (
    N_ARRAYS,
    N_OF_RESULTS,
    N_OPERANDS,
    OPERANDS,
    OPERANDS_SCHEMA,
    OPTIONS_SCHEMA,
    attention_operator,
    backward_operator,
    filled,
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
