"""Attention by cattn on PyTorch's CPU tensors: with gradients, under ``torch.compile``, and in place of PyTorch's own.

Memory is shared, not copied: cattn reads PyTorch's tensors in place, and its results become tensors.
`cattn.integrations.torch.nn` has the chapter's classes as PyTorch modules.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError(f"cattn.integrations.torch needs PyTorch: pip install 'cattn[torch]' ({_error})") from _error

from typing import Any as _Any

from ..._input.names import public_names
from . import nn
from ._attention import scaled_dot_product_attention
from ._choose_keys import choose_keys
from ._linear_attention import causal_conv, linear_attention
from ._swap import Seen, batch_invariant, use_cattn

__all__ = [
    "Seen",
    "batch_invariant",
    "causal_conv",
    "choose_keys",
    "linear_attention",
    "nn",
    "scaled_dot_product_attention",
    "use_cattn",
]
__dir__ = public_names(globals())

_wrapped: _Any
for _object in (Seen, batch_invariant, use_cattn):
    _object.__module__ = __name__
for _wrapped in (causal_conv, choose_keys, linear_attention, scaled_dot_product_attention):
    _wrapped.__module__ = __name__
    _wrapped.__wrapped__.__module__ = __name__  # of which the hint for an unknown keyword reads what is refused here
