"""The public functions on arrays, gathered: attention, softmax, dropout, masks."""

from ._attention import attention_weights, scaled_dot_product_attention
from ._causal import causal_attention
from ._explain import Explanation, explain
from ._gradients import attention_backward, dropout_backward, softmax_backward
from ._masks import causal_mask, get_alibi_slopes, show_mask, sliding_window
from ._merge import merge_attention
from ._softmax import dropout, masked_softmax, softmax
from ._varlen import varlen_attention

__all__ = [
    "Explanation",
    "attention_backward",
    "attention_weights",
    "causal_attention",
    "causal_mask",
    "dropout",
    "dropout_backward",
    "explain",
    "get_alibi_slopes",
    "masked_softmax",
    "merge_attention",
    "scaled_dot_product_attention",
    "show_mask",
    "sliding_window",
    "softmax",
    "softmax_backward",
    "varlen_attention",
]
