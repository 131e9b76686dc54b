"""PyTorch's fused layers, of which `batch_invariant` computes the parts one after the other.

`torch.nn.MultiheadAttention` and `torch.nn.TransformerEncoderLayer` call them in ``eval()`` mode without gradients.
Their products and softmax are no operators, so that kernels of operators do not reach them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's name for it


def _each(function: Callable[..., tuple[Tensor, Any]], inputs: tuple[Tensor, ...], mask: Any) -> tuple[Tensor, Any]:
    """Return the output of nested tensors, whose sequences are computed alone; no weights."""
    if mask is not None:
        raise NotImplementedError("batch_invariant() has no kernel for a nested tensor with a mask")
    parts = [
        function(*(x.unsqueeze(0) for x in each))[0].squeeze(0)
        for each in zip(*(x.unbind() for x in inputs), strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that they are a prototype
        return torch.nested.as_nested_tensor(parts), None


def _attend(
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


def _encode(
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
        return _attend(x, x, x, embed_dim, num_heads, *weights, mask, need_weights=False, mask_type=mask_type)[0]

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


FUSED: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": _attend,
    "_transformer_encoder_layer_fwd": _encode,
}
