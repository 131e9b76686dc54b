"""Linear attention of tensors, and the short convolution before it: gradients, transforms and operators of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

import cattn
from cattn import _cattn, functional

from ..._input.doors import BESIDE_ATTENTION
from ..._input.names import with_hints
from ..._input.types import Layout, LinearAttentionOutput
from ...functional._options import documented
from ._attention import are_tokens_first, as_positions, cast_inputs, check_inputs, check_others
from ._derivatives import in_turn
from ._operator import TYPES, filled, guard, recorded, refuse_mixed_devices, tensors_schema
from ._tensors import (
    DTYPES,
    as_array,
    as_tensor,
    check_class,
    check_tensor,
    is_batched,
    is_traceable,
    nobody_watches,
    untracked,
)

Results: TypeAlias = tuple[Tensor, Tensor | None]
_WITH_GRADIENT = ("STORED", "COMPUTED", "PROMOTED")  # the kinds of arrays that hold no counts


# ---- functions with gradients --------------------------------------------------------------------------------------
class _Differentiable:
    """A function of tensors and then of numbers, with two results: the output and the last state.

    The tensors, of which some may be None, begin with those that have gradients. The function is called at once, by
    autograd, or as an operator where PyTorch compiles or traces.
    """

    def __init__(self, function: Callable[..., Any], what: str, shapes: Callable[..., Any]) -> None:
        """Take cattn's function, whose arguments are rows of the table in C: those that are not refused here."""
        self.name = name = function.__name__
        self.of_arrays, self.backward_of_arrays = function, getattr(functional, f"{name}_backward")
        self.what = f"cattn's {what} (torch.ops.cattn.{name})"
        rows = [row for row in _cattn._functions()[name] if row[0] not in BESIDE_ATTENTION[f"torch.{name}"]]
        kinds = {row[0]: row[2] for row in rows if row[1] == "ARRAY"}
        numbers = {row[0]: TYPES[row[2]].format(row[0]) for row in rows if row[1] in ("NUMBER", "WORD")}
        self.names, self.arguments, self.n = [*kinds], [*kinds, *numbers], len(kinds)
        self.n_gradients = n_gradients = sum(kind in _WITH_GRADIENT for kind in kinds.values())
        schema = tensors_schema(self.names, ("query", "key", "value", "x", "weight"))
        schema = ", ".join([schema, *numbers.values()])
        gradients = f"(Tensor grad_out, Tensor grad_state, {schema}) -> ({', '.join(['Tensor'] * n_gradients)})"
        self.operator = self._define(name, self._operate, f"({schema}) -> (Tensor, Tensor)", shapes)
        self.operator_backward = self._define(f"{name}_backward", self._differentiate, gradients, self._like)
        self.operator.register_autograd(partial(self._gradients, self.operator_backward), setup_context=self._save)
        self.operator_backward.register_autograd(self._refuse_second)
        self.function = self._function("_compute", self.operator, lambda: self._function_backward.apply)
        self._function_backward: Any = self._function("_differentiate", self.operator_backward, None)

    def _define(self, name: str, function: Any, schema: str, shapes: Any) -> Any:
        operator: Any = torch.library.custom_op(
            f"cattn::{name}", lambda *a: function(*a), mutates_args=(), device_types="cpu", schema=schema
        )
        operator.register_fake(shapes)
        operator.register_vmap(lambda info, dims, *a: in_turn(operator, info.batch_size, dims, a))
        guard(operator, partial(untracked, operator=self.what, function=self.name))
        return operator

    def __call__(self, *arguments: Any, return_state: bool) -> Any:
        tensors = [x for x in arguments[: self.n_gradients] if x is not None]
        if is_traceable():
            results = self.operator(*arguments)
        elif nobody_watches(*tensors) and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            results = self._compute(*arguments, return_state=return_state)
        else:
            results = self.function.apply(*arguments)
        return LinearAttentionOutput(*results) if return_state else results[0]

    def _operate(self, *arguments: Any) -> Results:
        for name, tensor in zip(self.names, arguments, strict=False):
            if tensor is not None:
                check_class(tensor, name)
        return self._compute(*arguments)

    def _compute(self, *arguments: Any, return_state: bool = True) -> Results:
        given = dict(zip(self.arguments, arguments, strict=True))
        found = self._call("", self.of_arrays, given | {"return_state": return_state})
        out, state = found if return_state else (found, None)
        return _as_tensor(out, arguments[0]), None if state is None else _as_tensor(state, arguments[0])

    def _differentiate(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the gradients of the arguments that have one; an empty tensor for one that is not there."""
        given = dict(zip(("grad_out", "grad_state", *self.arguments), arguments, strict=True))
        grads = zip(self._call("_backward", self.backward_of_arrays, given), arguments[2:], strict=False)
        found = [None if x is None else _as_tensor(grad, x).to(x.dtype).contiguous() for grad, x in grads]
        return filled(found, arguments[0])

    def _call(self, suffix: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Call a function of cattn on the arrays of the tensors, and on what else is given."""

        def call() -> Any:
            return function(**{name: as_array(x, name) if isinstance(x, Tensor) else x for name, x in given.items()})

        return recorded(f"cattn::{self.name}{suffix}", call)

    def _like(self, *arguments: Any) -> tuple[Tensor, ...]:
        given = arguments[2:][: self.n_gradients]
        return filled([None if x is None else x.new_empty(x.shape) for x in given], arguments[0])

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[: self.n])
        ctx.numbers = inputs[self.n :]

    def _gradients(self, function: Any, ctx: Any, *of_results: Tensor) -> tuple[Any, ...]:
        grads = function(*of_results, *ctx.saved_tensors, *ctx.numbers)
        needed = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(g if n else None for g, n in needed), *[None] * (self.n - self.n_gradients + len(ctx.numbers)))

    def _refuse_second(self, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{self.what} has no second derivatives")

    def _refuse_forward(self, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{self.what} has no forward mode")

    def _function(self, name: str, operator: Any, backward: Any) -> Any:
        """Return a function of autograd, which ``torch.func`` and ``torch.vmap`` can transform."""

        def forward(*arguments: Any) -> Any:
            # A batch of torch.vmap needs the operator's rule, and a trace must hold the operator.
            if not is_traceable() and not any(isinstance(x, Tensor) and is_batched(x) for x in arguments):
                return getattr(self, name)(*arguments)
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments)

        def differentiate(ctx: Any, *of_results: Any) -> Any:
            return self._refuse_second() if backward is None else self._gradients(backward(), ctx, *of_results)

        methods = {"forward": forward, "setup_context": lambda *a: self._save(*a), "backward": differentiate}
        methods["jvp"] = self._refuse_forward
        made = {name: staticmethod(method) for name, method in methods.items()}
        return type(operator._name, (torch.autograd.Function,), {**made, "generate_vmap_rule": True})


def _as_tensor(array: Any, like: Tensor) -> Tensor:
    """Return an array as a tensor; of two bytes it has the dtype of a tensor that was given."""
    return as_tensor(array, like.dtype if array.dtype.itemsize == 2 else None)


# ---- linear attention ------------------------------------------------------------------------------------------------
def _shapes(*arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the shapes of the output and of the states, given the arguments of the operator."""
    query, key, value, _, _, state, _, cu_seqlens = arguments[:8]
    tokens_first, packed = arguments[-1] == "bthd", cu_seqlens is not None
    of_state = () if state is None or packed else tuple(state.shape)
    nd = max(query.ndim, key.ndim, value.ndim, len(of_state))
    has_heads = nd > 3 or (nd == 3 and (tokens_first or packed))
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if tokens_first:
        shapes = [(*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in shapes]
    kept = 3 if has_heads else 2
    broadcast: Any = torch.broadcast_shapes  # has no types
    batch = tuple(broadcast(*(shape[:-kept] for shape in (*shapes, of_state))))
    n_queries, n_keys, n_values = (shape[-3] if has_heads and len(shape) > 2 else 1 for shape in shapes)
    n_states = max(n_keys, n_values)
    out, states = [max(n_states, n_queries), shapes[0][-2], shapes[2][-1]], [n_states, shapes[0][-1], shapes[2][-1]]
    if tokens_first:
        out[:2] = out[1::-1]
    if not has_heads:
        del out[0], states[0]
    sequences = (cu_seqlens.shape[0] - 1,) if packed else ()
    return (*batch, *out), (*batch, *sequences, *states)


def _linear_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    refuse_mixed_devices(arguments)
    query, (out, state) = arguments[0], _shapes(*arguments)
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty(out), query.new_empty(state, dtype=dtype)


_linear_attention = _Differentiable(cattn.linear_attention, "linear attention", _linear_fake)


@with_hints
@partial(documented, like=cattn.linear_attention, words="Tensor")
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    seq_lengths: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    layout: Layout = "bhtd",
    return_state: bool = False,
) -> Any:
    """Compute linear attention of CPU tensors, as `cattn.linear_attention` does of arrays.

    Parameters
    ----------
    query : Tensor, shape (..., N_q, T, d_k)
        Queries, on the CPU, of float16, bfloat16 (with ``ml_dtypes``), float32 or float64. Key and value have the same
        dtype. ``torch.autocast`` casts the three first, all but float64.
    state : Tensor, shape (..., N, d_k, d_v), optional
        The state before the first token. It is not changed.

    Returns
    -------
    Tensor, shape (..., max(N, N_q), T, d_v), or LinearAttentionOutput
        Differentiable once, in reverse mode, in the first six arguments. With return_state it is a
        `cattn.LinearAttentionOutput` of tensors.

    Raises
    ------
    TypeError, ValueError
        As `cattn.linear_attention`; also for other devices, mixed dtypes and arguments that are not tensors.
    NotImplementedError
        For second derivatives and forward mode.

    Notes
    -----
    Where PyTorch compiles or traces, it is the custom operator ``torch.ops.cattn.linear_attention``, which stays in
    one graph. ``torch.vmap`` makes a call for each entry of its batch.

    Examples
    --------
    >>> import torch
    >>> from cattn.integrations.torch import linear_attention
    >>> x = torch.eye(3, requires_grad=True)
    >>> out, state = linear_attention(x, x, x, decay=-torch.ones(3), beta=torch.ones(3), return_state=True)
    >>> out.sum().backward()
    >>> state.shape, x.grad.shape
    (torch.Size([3, 3]), torch.Size([3, 3]))
    """
    check_inputs(query, key, value)
    query, key, value = cast_inputs(query, key, value)
    seq_lengths = as_positions(seq_lengths, "seq_lengths")
    others = {"decay": decay, "beta": beta, "state": state, "seq_lengths": seq_lengths, "cu_seqlens": cu_seqlens}
    check_others(others)
    word = "bthd" if are_tokens_first(layout) else "bhtd"
    return _linear_attention(query, key, value, *others.values(), scale, word, return_state=return_state)


# ---- the short convolution -------------------------------------------------------------------------------------------
def _conv_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    refuse_mixed_devices(arguments)
    x, weight = arguments[:2]
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-2], weight.shape[-1] - 1, x.shape[-1]))


_causal_conv = _Differentiable(functional.causal_conv, "short convolution", _conv_fake)


@with_hints
@partial(documented, like=functional.causal_conv, words="Tensor")
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    return_state: bool = False,
) -> Any:
    """Compute the short convolution of CPU tensors, as `cattn.functional.causal_conv` does of arrays.

    Parameters
    ----------
    x : Tensor, shape (..., T, C)
        The tokens, of float16, bfloat16 (with ``ml_dtypes``), float32 or float64, which the other tensors have, too.
    state : Tensor, shape (..., K - 1, C), optional
        The tokens before the first one. It is not changed.

    Returns
    -------
    Tensor, shape (..., T, C), or LinearAttentionOutput
        Differentiable once, in reverse mode, in all tensors.

    Raises
    ------
    TypeError, ValueError
        As `cattn.functional.causal_conv`; also for other devices, mixed dtypes and arguments that are not tensors.
    NotImplementedError
        For second derivatives and forward mode.

    Examples
    --------
    >>> import torch
    >>> from cattn.integrations.torch import causal_conv
    >>> causal_conv(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0, 1.0]])).flatten()
    tensor([ 1., 12., 23.])
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "state": state}
    check_tensor(x, "x")
    check_others(tensors)
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dtype not in DTYPES or tensor.dtype is not x.dtype):
            raise TypeError(f"{name} has dtype {tensor.dtype}; x has {x.dtype}")
    return _causal_conv(*tensors.values(), activation, return_state=return_state)
