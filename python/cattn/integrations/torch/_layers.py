"""Layers of which PyTorch computes a row by one way or another: here each goes one way, through the operators.

`Composite` puts a kernel in the place of an operator that PyTorch composes of others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's name for it

from ._tensors import dtype_of, run_uncompiled

_COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd
# Without and with autograd, and the transforms of torch.func, whose key comes first. The keys of autocast and of
# TorchScript's tracer lie between, and call the next one.
_KEYS = ("CPU", "AutogradCPU", "FuncTorchDynamicLayerFrontMode")
HALVES = (torch.float16, torch.bfloat16)


class Composite:
    """A kernel in the place of one of PyTorch's operators that has no kernels, since PyTorch composes it of others.

    Such an operator has no formula of its own for autograd, for transforms and for tracing: the kernel has them.
    """

    def __init__(self, name: str, kernel: Callable[..., Any]) -> None:
        self.name, self.kernel = name, run_uncompiled(kernel)
        self.operator: Any = getattr(torch.ops.aten, name).default
        self.library: Any = None

    def register(self) -> None:
        """Put the kernel in the place of PyTorch's operators."""
        self.library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
            for key in _KEYS:
                self.library.impl(self.name, self.kernel, key)
        # Modes that decompose operators, as the compiler's do, ask for this one.
        self.operator.py_kernels[_COMPOSITE] = self.kernel
        self.operator._dispatch_cache.clear()

    def remove(self) -> None:
        """Put PyTorch's operators back."""
        self.library._destroy()
        self.library = None
        self.operator.py_kernels.pop(_COMPOSITE, None)
        self.operator._dispatch_cache.clear()

    def compose(self, *arguments: Any, **options: Any) -> Any:
        """Return the result of the operators of which PyTorch composes this one."""
        return self.operator._op_dk(_COMPOSITE, *arguments, **options)


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``aten::linear``.

    PyTorch takes ``addmm`` for a matrix and for contiguous memory, which rounds a half once, and else a product and a
    sum, which round it twice.
    """
    if (
        bias is None
        or x.ndim in (0, 2)
        or weight.ndim != 2
        or x.shape[-1] != weight.shape[1]
        or dtype_of(x) not in HALVES
        or not (x.layout is torch.strided is weight.layout)
    ):
        found: Tensor = layers.compose(x, weight, bias)
        return found
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).reshape(*x.shape[:-1], weight.shape[0])


layers = Composite("linear", _apply)


def _run_lstm(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor, hidden: Tensor, cell: Tensor,
    reverse: bool, batch_sizes: list[int], mode: int, hidden_size: int, num_layers: int, has_biases: bool,
    *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute ``aten::mkldnn_rnn_layer``, a direction of a layer, by PyTorch's steps where oneDNN is not there.

    PyTorch takes those for packed sequences of different lengths, too, so that the bits must be theirs.
    """
    steps = F.linear(x, weight_ih, bias_ih if has_biases else None).unbind()
    outs: list[Tensor] = []
    for step in reversed(steps) if reverse else steps:
        gates = (F.linear(hidden, weight_hh, bias_hh if has_biases else None) + step).chunk(4, 1)
        cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh()
        hidden = gates[3].sigmoid() * cell.tanh()
        outs.append(hidden)
    return torch.stack(outs[::-1] if reverse else outs), hidden.clone(), cell, x.new_empty(0)


def _each(function: Callable[..., tuple[Tensor, Any]], inputs: tuple[Tensor, ...], mask: Any) -> tuple[Tensor, Any]:
    """Return the output of nested tensors, whose sequences are computed alone; no weights."""
    if mask is not None:
        raise NotImplementedError("use_cattn() and batch_invariant() have no kernel for a nested tensor with a mask")
    parts = [
        function(*(x.unsqueeze(0) for x in each))[0].squeeze(0)
        for each in zip(*(x.unbind() for x in inputs), strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that they are a prototype
        return torch.nested.as_nested_tensor(parts), None


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Compute ``aten::_native_multi_head_attention``; the kinds of masks are of queries, of keys, and of both."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        padding = mask if mask_type == 1 else None
        of_pairs = mask if mask_type != 1 else None
        if of_pairs is not None and of_pairs.ndim == 4:
            sizes = (query.shape[0], num_heads, query.shape[1], key.shape[1])
            of_pairs = of_pairs.expand(sizes).flatten(0, 1)
        out, weights = F.multi_head_attention_forward(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), embed_dim, num_heads, qkv_weight,
            qkv_bias, None, None, False, 0.0, proj_weight, proj_bias, training=False, key_padding_mask=padding,
            need_weights=need_weights, attn_mask=of_pairs, average_attn_weights=average_attn_weights,
        )  # fmt: skip
        return out.transpose(0, 1), weights

    if query.is_nested:
        return _each(attend, (query, key, value), mask)
    return attend(query, key, value)


def _encode_fused(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``aten::_transformer_encoder_layer_fwd``."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _attend_fused(x, x, x, embed_dim, num_heads, *weights, mask, need_weights=False, mask_type=mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def encode(x: Tensor) -> tuple[Tensor, None]:
        first, second = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)
        if norm_first:
            x = x + attend(norm(x, *first))
            return x + feed_forward(norm(x, *second)), None
        x = norm(x + attend(x), *first)
        return norm(x + feed_forward(x), *second), None

    return (_each(encode, (src,), mask) if src.is_nested else encode(src))[0]


# For each fused operator its kernel, and the keys under which PyTorch looks for one.
Fused: TypeAlias = dict[str, tuple[Callable[..., Any], tuple[str, ...]]]
ATTENTION: Fused = {
    "_native_multi_head_attention": (_attend_fused, ("CPU", "NestedTensorCPU")),
    "_transformer_encoder_layer_fwd": (_encode_fused, ("CPU", "NestedTensorCPU")),
}
RECURRENT: Fused = {"mkldnn_rnn_layer": (_run_lstm, ("CPU", "AutogradCPU"))}


def register_fused(table: Fused, library: Any = None) -> Any:
    """Register the kernels of a table and return the library whose `reset` removes them."""
    library = library or torch._C._dispatch_library("IMPL", "aten", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (kernel, keys) in table.items():
            for key in keys:
                library.impl(name, getattr(torch._C.DispatchKey, key), kernel, False)
    return library
