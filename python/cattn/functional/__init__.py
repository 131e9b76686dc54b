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
from . import (
    _attention,
    _choose_keys,
    _derivatives,
    _dropout,
    _explain,
    _layers,
    _linear_attention,
    _masks,
    _merge,
    _rope,
    _softmax,
    _varlen,
)
from ._attention import *
from ._choose_keys import *
from ._derivatives import *
from ._derivatives import sum_gradients
from ._dropout import *
from ._explain import *
from ._explain import make_explanation
from ._layers import *
from ._linear_attention import *
from ._masks import *
from ._merge import *
from ._rope import *
from ._rope import as_positions, as_rope_scaling
from ._softmax import *
from ._softmax import masked_softmax_axes, softmax_axes
from ._statistics import attention_statistics, varlen_attention_statistics
from ._varlen import *

__all__ = ["attention_statistics", "varlen_attention_statistics"]
__all__ += _attention.__all__
__all__ += _choose_keys.__all__
__all__ += _derivatives.__all__
__all__ += _dropout.__all__
__all__ += _explain.__all__
__all__ += _layers.__all__
__all__ += _linear_attention.__all__
__all__ += _masks.__all__
__all__ += _merge.__all__
__all__ += _rope.__all__
__all__ += _softmax.__all__
__all__ += _varlen.__all__
__all__.sort()
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
    warn_of_memory=arrays.warn_of_memory,
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
