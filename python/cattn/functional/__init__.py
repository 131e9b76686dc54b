"""The functions on arrays, gathered: the functions of `cattn`, and the layers around attention, which are here only.

>>> from cattn.functional import gelu, layer_norm
>>> gelu(layer_norm([1.0, 2.0, 4.0])).round(3)
array([-0.152, -0.105,  1.215])
"""

from .. import _cattn
from .._input import arrays, objects
from .._input.names import public_names
from .._input.types import (
    AttentionGradients,
    AttentionOutput,
    AttentionStatistics,
    AttentionTangents,
    CausalAlignmentWarning,
    LinearAttentionOutput,
)
from ..random import draw_seed
from ._attention import attention_weights, causal_attention, scaled_dot_product_attention
from ._choose_keys import choose_keys
from ._derivatives import attention_backward, attention_jvp, attention_jvp_backward, sum_gradients
from ._dropout import dropout, dropout_backward
from ._explain import Explanation, explain, make_explanation
from ._layers import (
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    rms_norm,
    rms_norm_backward,
    silu,
    silu_backward,
)
from ._linear_attention import causal_conv, causal_conv_backward, linear_attention, linear_attention_backward
from ._masks import causal_mask, get_alibi_slopes, show_mask, sliding_window
from ._merge import merge_attention
from ._rope import as_positions, as_rope_scaling, rope
from ._softmax import masked_softmax, masked_softmax_axes, softmax, softmax_axes, softmax_backward
from ._statistics import attention_statistics, varlen_attention_statistics
from ._varlen import varlen_attention, varlen_attention_backward

__all__ = [
    "Explanation",
    "attention_backward",
    "attention_jvp",
    "attention_jvp_backward",
    "attention_statistics",
    "attention_weights",
    "causal_attention",
    "causal_conv",
    "causal_conv_backward",
    "causal_mask",
    "choose_keys",
    "dropout",
    "dropout_backward",
    "explain",
    "gelu",
    "gelu_backward",
    "get_alibi_slopes",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_attention",
    "linear_attention_backward",
    "linear_backward",
    "masked_softmax",
    "merge_attention",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "scaled_dot_product_attention",
    "show_mask",
    "silu",
    "silu_backward",
    "sliding_window",
    "softmax",
    "softmax_backward",
    "varlen_attention",
    "varlen_attention_backward",
    "varlen_attention_statistics",
]
__dir__ = public_names(globals())

# Pickles and help name the public place of a function. Names that `cattn` has, too, get that one there.
for _name in __all__:
    globals()[_name].__module__ = __name__

# C imports nothing of this package: these are the functions and classes that it calls.
_cattn._register_helpers(
    as_array=arrays.as_array,
    as_mask=arrays.as_mask,
    as_bias=arrays.as_bias,
    as_bool=arrays.as_bool,
    read_integers=arrays.read_integers,
    read_key_indices=arrays.read_key_indices,
    as_positions=as_positions,
    dequantized=objects.dequantized,
    quantized_class=objects.Quantized,
    block_mask_class=objects.BlockMask,
    cast=arrays.cast,
    rounded=arrays.rounded,
    shares_memory=arrays.shares_memory,
    refuse_masked=arrays.refuse_masked,
    draw_seed=draw_seed,
    as_rope_scaling=as_rope_scaling,
    attention_output=AttentionOutput,
    attention_gradients=AttentionGradients,
    attention_tangents=AttentionTangents,
    linear_attention_output=LinearAttentionOutput,
    make_statistics=AttentionStatistics,
    causal_alignment_warning=CausalAlignmentWarning,
    softmax_axes=softmax_axes,
    masked_softmax_axes=masked_softmax_axes,
    sum_gradients=sum_gradients,
    make_explanation=make_explanation,
)
