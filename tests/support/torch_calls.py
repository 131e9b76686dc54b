"""Tensors, and calls of attention in PyTorch, for the tests of its integration."""

from __future__ import annotations

from typing import Any

import torch

from cattn.integrations import torch as bridge
from cattn.integrations.torch._operator import write_options

attention = bridge.scaled_dot_product_attention
theirs = torch.nn.functional.scaled_dot_product_attention
Call = dict[str, Any]  # the keyword arguments of a function, of tensors
INPUTS = ("query", "key", "value")


def tensor(*shape: int, seed: int = 1) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [tensor(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


def given(*shapes: tuple[int, ...], **options: Any) -> Call:
    """Return a call of query, key and value of these shapes, or of one shape for all three."""
    shapes = shapes if len(shapes) == 3 else shapes * 3
    return {name: tensor(*shape, seed=i) for i, (name, shape) in enumerate(zip(INPUTS, shapes, strict=True))} | options


def in_words(call: Call) -> Call:
    """Return the call with the words and defaults that cattn's own function has."""
    words = {True: "upper_left", torch.bfloat16: "bfloat16"}
    call = {"enable_gqa": False} | call
    return call | {name: words.get(call[name], call[name]) for name in ("is_causal", "compute_dtype") if name in call}


def operator_arguments(return_weights: bool = False, **call: Any) -> tuple[Any, ...]:
    """Return the arguments of ``torch.ops.cattn.attention``, in their order."""
    options = {"dropout_p": 0.0, "is_causal": False} | in_words(call)
    operands = [call.get(name) for name in (*INPUTS, "attn_mask", "bias", "sinks", "gate")]
    return (*operands, *write_options(options), return_weights)
