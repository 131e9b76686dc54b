"""The public functions on arrays, gathered: attention, softmax, dropout, masks."""

from ._attention import attention_weights, scaled_dot_product_attention
from ._causal import causal_attention, causal_mask
from ._softmax import dropout, masked_softmax, softmax

__all__ = [
    "attention_weights",
    "causal_attention",
    "causal_mask",
    "dropout",
    "masked_softmax",
    "scaled_dot_product_attention",
    "softmax",
]
