"""The functions of cattn in plain NumPy: to read, to learn from, and to test the C kernels against.

All inputs are computed in float64, and nothing here is fast: score matrices are built in full, as in a textbook.
Names, arguments and meaning follow the package, but results are float64 and ``rng`` is an int or None.

For a query i at position p = i + query_offset and a key j::

    score  = softcap(scale * (query[i] . key[j])) - slope * |p - j| + attn_mask[i, j] + bias[i, j]
             where softcap(s) is softcap * tanh(s / softcap), and masks are additive
    visible = attn_mask[i, j] is True, no term is -inf, j <= p if causal, p - left <= j <= p + right in a window,
              i < query_seq_lengths and key_value_seq_starts <= j < key_value_seq_lengths
    weight = exp(score) / sum of exp(score) over the visible keys, and 0 where a key is not visible
    out[i] = sum over the visible keys of dropout(weight) * value[j]

References
----------
- Vaswani et al., "Attention is all you need", NeurIPS 2017: scaled dot-product attention.
- Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: the generator Philox4x32-10.
- Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021.
- Ba, Kiros and Hinton, "Layer normalization", 2016.
- Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016.
- Yang, Kautz and Hatamizadeh, "Gated delta networks: improving Mamba2 with delta rule", ICLR 2025.
- Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019.
- Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 15, 2014.
"""

import inspect
import re

from .. import functional
from .._input.names import public_names
from ._attention import (
    attention_statistics,
    attention_weights,
    causal_attention,
    scaled_dot_product_attention,
    varlen_attention,
    varlen_attention_statistics,
)
from ._choose_keys import choose_keys
from ._derivatives import (
    attention_backward,
    attention_jvp,
    attention_jvp_backward,
    dropout_backward,
    softmax_backward,
    varlen_attention_backward,
)
from ._dropout import dropout, dropout_keep, philox4x32
from ._layers import (
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    rms_norm,
    rms_norm_backward,
    rope,
    rope_frequencies,
    silu,
    silu_backward,
)
from ._linear_attention import causal_conv, causal_conv_backward, linear_attention, linear_attention_backward
from ._masks import causal_mask
from ._softmax import masked_softmax, softmax, textbook_masked_softmax

__all__ = [
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
    "dropout_keep",
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_attention",
    "linear_attention_backward",
    "linear_backward",
    "masked_softmax",
    "philox4x32",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_frequencies",
    "scaled_dot_product_attention",
    "silu",
    "silu_backward",
    "softmax",
    "softmax_backward",
    "textbook_masked_softmax",
    "varlen_attention",
    "varlen_attention_backward",
    "varlen_attention_statistics",
]
__dir__ = public_names(globals())


def _add_examples() -> None:
    """Give the functions without examples those of the functions of `cattn` with their names."""
    heading = "Examples\n--------\n"
    for name in __all__:
        own, theirs = globals()[name], inspect.getdoc(getattr(functional, name, None)) or ""
        if own.__doc__ and heading in theirs and "Examples\n" not in own.__doc__:
            theirs = re.sub(r"\bcattn(\.functional\b|(?=\.\w+\())", "cattn.reference", theirs.partition(heading)[2])
            own.__doc__ = f"{inspect.cleandoc(own.__doc__)}\n\n{heading}{theirs}\n"


_add_examples()
