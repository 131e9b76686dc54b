"""Rules of ``torch.vmap`` for the operators: one call for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._operator import AXES, N_OF_RESULTS, N_OPERANDS, OPERANDS, PLACE, attention_operator, backward_operator
from ._second import N_OF_DERIVATIVE, N_OF_JVP, jvp_backward_operator, jvp_operator

_OF_RESULTS = ("matrix", "row", "matrix", "matrix", "row")
_OF_JVP = (*OPERANDS, "matrix", "row")
_OF_DERIVATIVE = ("matrix", "row", *OPERANDS, "matrix", "row", "matrix", "row")
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


def _in_turn(operator: Any, size: int, dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> Any:
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
        return _in_turn(attention_operator, info.batch_size, in_dims, arguments)
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
        return _in_turn(backward_operator, info.batch_size, in_dims, arguments)
    layout, spread = _spread_arguments(info.batch_size, dims, rest)
    leading = _spread_leading(layout, _OF_RESULTS, in_dims, arguments)
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
        return _in_turn(jvp_operator, info.batch_size, in_dims, arguments)
    layout, spread = _spread_arguments(info.batch_size, dims, rest)
    out_tangent, lse_tangent = jvp_operator(*_spread_leading(layout, _OF_JVP, in_dims, arguments), *spread)
    return (layout.drop_heads(out_tangent, -3), layout.drop_heads(lse_tangent, -2)), (0, 0)


@jvp_backward_operator.register_vmap
def _second_derivatives_of_batch(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    dims, rest = in_dims[N_OF_DERIVATIVE:], arguments[N_OF_DERIVATIVE:]
    if _one_mask_for_all(dims, rest):
        return _in_turn(jvp_backward_operator, info.batch_size, in_dims, arguments)
    layout, spread = _spread_arguments(info.batch_size, dims, rest)
    grads = jvp_backward_operator(*_spread_leading(layout, _OF_DERIVATIVE, in_dims, arguments), *spread)
    return _gathered(info.batch_size, grads, rest, dims)
