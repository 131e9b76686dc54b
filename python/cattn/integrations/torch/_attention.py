"""The public function: checks its tensors and takes the shortest way through PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

import cattn

from ..._input.names import with_hints
from ..._input.objects import BlockMask, Quantized, no_scale_error
from ..._input.types import Alignment, AttentionOutput, Layout, Window
from ...functional._options import documented, spelled_out
from ._derivatives import attend_transformed
from ._operator import (
    POSITIONS,
    WithGradients,
    as_seed,
    attention_operator,
    forward,
    read_block_mask,
    recorded,
    tokens_first,
    write_options,
)
from ._tensors import (
    DTYPES,
    QUANTIZED,
    as_array,
    as_tensor,
    check_class,
    check_memory,
    check_tensor,
    converted,
    dtype_of,
    is_batched,
    is_causal_bias,
    is_readable,
    is_transformed,
    nobody_watches,
    read_causal_bias,
    read_quantized,
)

_ALIGNMENTS = {False: "", True: "upper_left", "upper_left": "upper_left", "lower_right": "lower_right"}


_NUMBER: Any = (int, float, np.floating)
_of_arrays: Any = cattn.scaled_dot_product_attention

ComputeDType: TypeAlias = Literal["bfloat16", "bfloat16_tiles"] | torch.dtype | None


class RangeOptions(TypedDict, total=False):
    """Options of functions in which queries see ranges of keys."""

    layout: Layout
    bias: Tensor | None
    query_offset: int | Tensor | None
    query_seq_lengths: int | Tensor | None
    key_value_seq_lengths: int | Tensor | None
    key_value_seq_starts: int | Tensor | None
    window_size: Window


class _ScoreOptions(TypedDict, total=False):
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class _Options(RangeOptions, _ScoreOptions, total=False):
    """The options that PyTorch's function does not have."""

    block_mask: BlockMask | tuple[Tensor, int] | None
    key_indices: Tensor | None
    gate: Tensor | None
    compute_dtype: Literal["bfloat16", "bfloat16_tiles"] | torch.dtype | None
    rng: int | torch.Generator | None


class _Plain(_Options, total=False):
    return_weights: Literal[False]
    return_lse: Literal[False]


class _Extras(_Options, total=False):
    return_weights: bool
    return_lse: bool


def read_compute_dtype(compute_dtype: object) -> str | None:
    """Return the argument as cattn's functions take it."""
    if compute_dtype is None:
        return None
    if compute_dtype is torch.bfloat16:
        return "bfloat16"
    if isinstance(compute_dtype, str) and compute_dtype in ("bfloat16", "bfloat16_tiles"):
        return compute_dtype
    raise ValueError(
        f"compute_dtype must be None, 'bfloat16', 'bfloat16_tiles' or torch.bfloat16, got {compute_dtype!r}"
    )


def are_tokens_first(layout: object) -> bool:
    if layout is None or (isinstance(layout, str) and layout in ("bhtd", "bthd")):
        return layout == "bthd"
    raise ValueError(f"layout must be 'bhtd' or 'bthd', got {layout!r}")


def _put_heads_first(tensors: dict[str, Any]) -> list[Any]:
    """Return query, key, value, the scales of the last two and the gate, given with the tokens before the heads."""
    shapes = {"query": "T_q, heads, head_dim", "key": "T_k, heads, head_dim", "value": "T_k, heads, d_v"}
    for name, shape in shapes.items():
        check_tensor(tensors[name], name)
        if (ndim := tensors[name].ndim) < 3:
            raise ValueError(f"{name} must have at least 3 dimensions (..., {shape}) for layout='bthd', got {ndim}")
    single = all(tensors[name].ndim == 3 for name in shapes)
    found: list[Any] = []
    for x in tensors.values():
        if x is not None and x.ndim > 1:  # a scale or a gate may have fewer dimensions
            x = (x if x.ndim > 2 else x[None]).transpose(-3, -2)
        found.append(x)
    if single:  # without a batch, axis -3 counts heads only with another axis before it
        found[0] = found[0][None]
    return [*found, single]


def read_alignment(is_causal: Any) -> str:
    if type(is_causal) in (bool, str) and is_causal in _ALIGNMENTS:
        return _ALIGNMENTS[is_causal]
    raise TypeError(f'is_causal must be a bool, "upper_left" or "lower_right", got {is_causal!r}')


def _draw_seed(rng: Any) -> Tensor:
    """Return the seed of the dropout mask, as a tensor that the compiler can follow."""
    if rng is None or isinstance(rng, torch.Generator):
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu", generator=rng)
    if isinstance(rng, bool) or not isinstance(rng, (int, np.integer)):
        raise TypeError(f"rng must be None, an int or a torch.Generator, got {type(rng).__name__}")
    if not 0 <= rng < 2**64:
        raise ValueError(f"rng must be in [0, 2**64), got {rng}")
    return as_seed(int(rng))


def as_positions(value: Any, name: str) -> Any:
    """Return an int or a tensor of ints as a tensor."""
    if value is None:
        return None
    if isinstance(value, (int, torch.SymInt)):
        number: Any = value
        return torch.full((), number, dtype=torch.int64, device="cpu")
    check_tensor(value, name)
    check_class(value, name)
    return value


def _own_array(tensor: Tensor, name: str) -> Any:
    """Return a copy of a tensor: the caller may change the tensor before backward runs."""
    return as_array(tensor, name).copy()


def _is_any_transformed(operands: Sequence[Tensor], *others: Tensor | None) -> bool:
    """Return whether ``torch.func`` or forward mode differentiates one of the operands."""
    for tensor in others:
        if tensor is not None and is_transformed(tensor):
            raise NotImplementedError("alibi_slopes and scales have no derivatives: pass them by another argument")
    return any(map(is_transformed, operands))


def _is_followed(mask: Tensor, gradients: bool, transformed: bool) -> bool:
    """Return whether a mask may have derivatives: a batch of torch.vmap does not say whether it requires any."""
    return mask.is_floating_point() if transformed or is_batched(mask) else gradients and mask.requires_grad


def _weights(operands: tuple[Tensor | None, ...], options: dict[str, Any]) -> Tensor:
    """Return the weights before dropout as the output for the unit matrix, which has all derivatives."""
    query, key, value, *rest = operands
    assert query is not None and key is not None and value is not None  # noqa: PT018
    if options["key_indices"] is not None:
        raise NotImplementedError("return_weights and key_indices do not go together under torch.func")
    size = key.shape[-2]
    unit = torch.eye(size, dtype=query.dtype, device="cpu").expand(*value.shape[:-2], size, size)
    without = write_options(options | {"dropout_p": 0.0, "rng": None, "value_scale": None})
    results: tuple[Tensor, Tensor] = attend_transformed(query, key, unit, *rest, *without)
    return results[0]


def check_inputs(query: Any, key: Any, value: Any) -> None:
    """Raise the error for tensors that cattn cannot read."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(tensor, name)
        check_class(tensor, name)
        dtype = dtype_of(tensor)
        if dtype in QUANTIZED:
            raise no_scale_error(name, dtype)
        if dtype not in DTYPES or dtype is not dtype_of(query):
            wanted = "float16, bfloat16, float32 or float64" if name == "query" else f"query has {dtype_of(query)}"
            raise TypeError(f"{name} has dtype {dtype}; {wanted}")


def cast_inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as autocast casts them."""
    return tuple(converted(x, dtype_of(x), n) for n, x in (("query", query), ("key", key), ("value", value)))


def check_others(others: dict[str, Any]) -> None:
    for name, tensor in others.items():
        if tensor is not None:
            check_tensor(tensor, name)
            check_class(tensor, name)


def _are_direct(query: Any, key: Any, value: Any, *others: Tensor | None) -> bool:
    """Return whether PyTorch only computes, and cattn may read the first three at once."""
    return (
        is_readable(query)
        and is_readable(key)
        and is_readable(value)
        and nobody_watches(query, key, value, *others)
        and not torch.is_autocast_enabled("cpu")
    )


def _have_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.dtype is key.dtype is value.dtype and query.dtype in DTYPES


def attend_at_once(
    tensors: Any, is_causal: bool, scale: float | None, enable_gqa: bool, compute_dtype: str | None
) -> Tensor | None:
    """Return attention without gradients of tensors that cattn may read at once, or None where it may not.

    The tensors are query, key, value and the mask.
    """
    query, key, value, attn_mask = tensors
    if not _are_direct(query, key, value, attn_mask) or not _have_one_dtype(query, key, value):
        return None
    if attn_mask is not None and not is_readable(attn_mask):
        return None
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    ):
        return None
    options: dict[str, Any] = {"enable_gqa": enable_gqa}
    if is_causal:
        options["is_causal"] = "upper_left"
    if scale is not None:
        options["scale"] = scale
    if compute_dtype is not None:
        options["compute_dtype"] = compute_dtype
    found: Tensor
    if attn_mask is None and not tokens_first(query):  # the shortest way, for most calls
        arrays = as_array(query, "query"), as_array(key, "key"), as_array(value, "value")
        array = recorded("cattn::attention", _of_arrays, *arrays, **options)
        found = as_tensor(array, query.dtype)
    else:
        found = recorded("cattn::attention", forward, (*tensors, None, None, None), options, False, False)[0]
    return found


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor | Quantized | tuple[Tensor, Tensor],
    value: Tensor | Quantized | tuple[Tensor, Tensor],
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    scale: float | None = ...,
    enable_gqa: bool | None = ...,
    **options: Unpack[_Plain],
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor | Quantized | tuple[Tensor, Tensor],
    value: Tensor | Quantized | tuple[Tensor, Tensor],
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    scale: float | None = ...,
    enable_gqa: bool | None = ...,
    **options: Unpack[_Extras],
) -> Any: ...
@with_hints
@partial(documented, words="Tensor")
@spelled_out()
def scaled_dot_product_attention(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
    scale: float | None = None,
    enable_gqa: bool | None = False,
    **options: Unpack[_Extras],
) -> Any:
    """Compute attention of CPU tensors by cattn, with PyTorch's arguments first and then cattn's other ones.

    Parameters
    ----------
    query : Tensor, shape (..., T_q, head_dim)
        Queries, on the CPU, of float16, bfloat16 (with ``ml_dtypes``), float32 or float64. Key and value have the same
        dtype. ``torch.autocast`` casts all but float64 first, as for PyTorch's own function.
    key : Tensor, shape (..., T_k, head_dim), Quantized, or (Tensor, Tensor)
        Keys. A `cattn.Quantized`, or a pair of tensors ``(values, scale)``: values of ``torch.int8`` or
        ``torch.float8_e4m3fn``, whose elements are the products with their scales in float32. A scale broadcasts to the
        values: (..., T_k, 1) has one for each token. Halves of the other tensors are then computed in float32, and the
        output is rounded. Quantized tensors and scales have no gradient.
    value : Tensor, shape (..., T_k, d_v), Quantized, or (Tensor, Tensor)
        Values. They may be quantized, too.
    attn_mask : Tensor, optional
        Boolean (True where the key is visible) or float (added to the scores). It may be combined with is_causal. Also
        ``torch.nn.attention.bias.causal_lower_right`` and ``causal_upper_left``, without is_causal.
    is_causal : bool or {"upper_left", "lower_right"}
        Query i sees the keys j <= i ("upper_left", the meaning of True), or j <= i + T_k - T_q.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    enable_gqa : bool, optional
        Heads (axis -3) of query may be a multiple of the heads of key and value. None infers it from the shapes.

    Returns
    -------
    Tensor, shape (..., T_q, d_v), or AttentionOutput
        Differentiable once, in query, key, value, bias, an additive mask, sinks and gate. The output of a query that
        sees no key is 0. With return_weights or return_lse it is a `cattn.AttentionOutput` of tensors.

    Other Parameters
    ----------------
    layout : {"bhtd", "bthd"}
        Order of heads and tokens in query, key, value and the output. "bthd" is (..., T, H, head_dim), of three or more
        dimensions, of which axis -2 counts heads. Masks, weights and lse always have the heads before the queries.
    bias : Tensor, optional
        Float, added to the scaled scores besides attn_mask. Broadcasts to (..., T_q, T_k).
    query_offset : int or Tensor of int, optional
        Position of the first query, for causality, window_size and alibi_slopes.
    key_value_seq_starts : int or Tensor of int, optional
        Index of the first valid key: padding on the left. Lengths and positions still count from key 0.
    alibi_slopes : Tensor, shape (H,) or (..., H), optional
        The slope of ALiBi for each query head. It has no gradient.
    sinks : Tensor, shape (H,) or (..., H), optional
        One extra logit for each query head.
    block_mask : BlockMask or (Tensor of bool, int), optional
        Which blocks of queries and keys are visible; hidden blocks take no time. The blocks broadcast to
        (..., ceil(T_q / size), ceil(T_k / size)).
    key_indices : Tensor of int, shape (..., T_q, n) or (..., 1, n), optional
        The keys that each query sees, -1 for none; see `cattn.scaled_dot_product_attention`.
    gate : Tensor, optional
        Multiplies the output by its sigmoid. Broadcasts to the output, in whose dtype it is read.
    compute_dtype : {None, "bfloat16", "bfloat16_tiles", torch.bfloat16}
        bfloat16 rounds float32 query, key, value and the weights to bfloat16 for the two products; see
        `cattn.scaled_dot_product_attention`. The gradients are computed in float32, from the rounded inputs.
    rng : int or torch.Generator, optional
        Seed of the dropout mask, or the generator that draws it. None is PyTorch's default generator, so that
        ``torch.manual_seed`` and checkpointing repeat it. The mask itself is cattn's, not PyTorch's.
    return_weights : bool
        Also return the weights before dropout, which are differentiable too.
    return_lse : bool
        Also return the log-sum-exp of each row, which is differentiable too: for a z-loss, or results that are merged.

    Raises
    ------
    TypeError, ValueError
        As `cattn.scaled_dot_product_attention`; also for other devices and dtypes, for arguments that are not tensors,
        and for subclasses of Tensor with a ``__torch_function__`` of their own, but for these two as attn_mask.
    NotImplementedError
        For third derivatives, forward mode over forward mode, second derivatives of weights, forward mode and second
        derivatives with key_indices or a gate, and for alibi_slopes, scales or quantized tensors that require a
        gradient.

    Notes
    -----
    `cattn.set_num_threads` sets the number of threads. Gradients have the same bits for any number of them.

    Without gradients the function reads the tensors and calls `cattn.scaled_dot_product_attention` at once. With
    gradients it is a ``torch.autograd.Function``, and so under ``torch.func`` and in forward mode. Where PyTorch
    compiles or traces, it is the custom operator ``torch.ops.cattn.attention``. ``torch.vmap`` makes one call of the
    whole batch, except for dropout with ``randomness="same"``.

    Examples
    --------
    >>> import torch
    >>> from cattn.integrations.torch import scaled_dot_product_attention
    >>> x = torch.eye(3, requires_grad=True)
    >>> out = scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> out.sum().backward()
    >>> x.grad.shape
    torch.Size([3, 3])
    >>> result = scaled_dot_product_attention(x, x, x, sinks=torch.zeros(1), return_weights=True)
    >>> result.weights.sum(-1) < 1
    tensor([True, True, True])
    """
    given: dict[str, Any] = {**options}
    scaled = not isinstance(key, Tensor) or not isinstance(value, Tensor)
    given["key_scale"] = given["value_scale"] = None
    if scaled:
        check_tensor(query, "query")
        dtype = dtype_of(query)
        query, key, value, given["key_scale"], given["value_scale"] = read_quantized(query, key, value)
    first, single = are_tokens_first(given.pop("layout")), False
    if first:
        others = {name: given[name] for name in ("key_scale", "value_scale", "gate")}
        query, key, value, *found, single = _put_heads_first({"query": query, "key": key, "value": value} | others)
        given |= zip(others, found, strict=True)
    alignment = read_alignment(is_causal)
    if is_causal_bias(attn_mask):
        if alignment:
            raise ValueError("attn_mask is a CausalBias: is_causal must be False")
        attn_mask, alignment = read_causal_bias(attn_mask, query, key)
    if not isinstance(dropout_p, _NUMBER):
        raise TypeError(f"dropout_p must be a real number, got {type(dropout_p).__name__}")
    given |= {"dropout_p": dropout_p, "is_causal": alignment or False, "scale": scale, "enable_gqa": enable_gqa}
    given["block_mask"], given["block_size"] = read_block_mask(given["block_mask"])
    wanted = {name: given.pop(name) for name in ("return_lse", "return_weights")}
    operands = (query, key, value, attn_mask, *(given.pop(name) for name in ("bias", "sinks", "gate")))
    out, lse, weights = _attend(operands, given, scaled, *wanted.values())
    if scaled:
        out, weights = out.to(dtype), None if weights is None else weights.to(dtype)
    if first:
        out = out.transpose(-3, -2)
    if single:
        parts: Any = ((out, True), (lse, wanted["return_lse"]), (weights, wanted["return_weights"]))
        out, lse, weights = (x[0] if there else x for x, there in parts)
    if not any(wanted.values()):
        return out
    if wanted["return_lse"] and query.dtype is not torch.float64:
        lse = lse.to(torch.float32)
    return AttentionOutput(out, weights if wanted["return_weights"] else None, lse if wanted["return_lse"] else None)


def _attend(
    operands: tuple[Any, ...], options: dict[str, Any], scaled: bool, return_lse: bool, return_weights: bool
) -> Any:
    """Return the output, and the log-sum-exp and the weights if they are wanted, by the shortest way."""
    *inputs, attn_mask, bias, sinks, gate = operands
    extras = [tensor for tensor in (attn_mask, bias, sinks, gate) if tensor is not None]  # most calls have none
    slopes, *others = (options[name] for name in ("alibi_slopes", "block_mask", "key_indices"))
    direct = (
        _are_direct(*inputs, *extras)
        and (scaled or _have_one_dtype(*inputs))
        and all(map(is_readable, extras))
        and all(x is None or is_readable(x) for x in (slopes, *others))
    )
    if not direct:
        if not scaled:
            check_inputs(*inputs)
            inputs = list(cast_inputs(*inputs))
        names = ("attn_mask", "bias", "alibi_slopes", "sinks", "gate")
        check_others(dict(zip(names, (attn_mask, bias, slopes, sinks, gate), strict=True)))
        check_others({name: options[name] for name in ("block_mask", "key_indices")})
        attn_mask = None if attn_mask is None else converted(attn_mask, dtype_of(attn_mask), "attn_mask")
        bias = None if bias is None else converted(bias, dtype_of(bias), "bias")
    constants = (slopes, options["key_scale"], options["value_scale"])
    transformed = not direct and _is_any_transformed((*inputs, *extras), *constants)
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *extras))
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("alibi_slopes requires grad, but has no gradient: pass alibi_slopes.detach()")
    if bias is not None and attn_mask is not None and _is_followed(attn_mask, gradients, transformed):
        check_memory(attn_mask, "attn_mask")
        check_memory(bias, "bias")
        halves = attn_mask.element_size() == bias.element_size() == 2  # whose sum would be rounded once more
        bias = (attn_mask.float() if halves else attn_mask) + bias  # both have the gradient of their sum
        attn_mask = None
    operands = (*inputs, attn_mask, bias, sinks, gate)
    options["rng"] = _draw_seed(options["rng"]) if options["dropout_p"] > 0.0 else None
    options["compute_dtype"] = read_compute_dtype(options["compute_dtype"])
    if direct:
        return _attend_directly(operands, options, gradients, return_lse, return_weights)
    for name in POSITIONS:
        options[name] = as_positions(options[name], name)
    written = write_options(options)
    if not transformed:
        return attention_operator(*operands, *written, return_weights)
    return *attend_transformed(*operands, *written), _weights(operands, options) if return_weights else None


def _attend_directly(
    operands: tuple[Any, ...], options: dict[str, Any], gradients: bool, return_lse: bool, return_weights: bool
) -> Any:
    """Do the same for tensors whose memory cattn may read at once."""
    read = _own_array if gradients else as_array
    seed = options["rng"]
    options = {
        name: read(option, name) if isinstance(option, Tensor) else option
        for name, option in options.items()
        if option is not None
    }
    if seed is not None:
        options["rng"] = int(seed) % 2**64
    if gradients:
        return WithGradients.apply(*operands, options, return_weights)  # type: ignore[no-untyped-call]
    return recorded("cattn::attention", forward, operands, options, return_lse, return_weights)
