"""cattn: causal attention, masked softmax and dropout for NumPy arrays, written in C.

>>> import numpy as np
>>> import cattn
>>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
>>> cattn.causal_attention(x, x, x).round(2)
array([[1.  , 0.  ],
       [0.33, 0.67],
       [0.75, 0.75]])

Start here:

causal_attention             no token sees a later one; also of one query and a `KVCache`, as in decoding
scaled_dot_product_attention attention with any mask, in the order of PyTorch's arguments
view_attention               look at weights in a notebook or in a file of HTML; `attention_weights` returns them
MultiHeadAttention           the book's classes, with `backward`, `state_dict` and `load_state_dict`
integrations, testing        PyTorch, transformers, JAX, Keras, dask, ONNX; `testing.diagnose` finds mistakes
"""

from typing import TYPE_CHECKING, Any

from . import nn
from ._config import show_config
from ._input import types as _types
from ._input.objects import BlockMask, Quantized
from ._input.types import *
from ._plot import plot_attention
from ._threads import get_num_threads, num_threads, set_num_threads
from ._version import __version__
from .cache import KVCache
from .functional import (
    Explanation,
    attention_backward,
    attention_jvp,
    attention_jvp_backward,
    attention_statistics,
    attention_weights,
    causal_attention,
    causal_mask,
    choose_keys,
    dropout,
    dropout_backward,
    explain,
    get_alibi_slopes,
    linear_attention,
    masked_softmax,
    merge_attention,
    rms_norm,
    rms_norm_backward,
    rope,
    scaled_dot_product_attention,
    show_mask,
    sliding_window,
    softmax,
    softmax_backward,
    varlen_attention,
    varlen_attention_backward,
    varlen_attention_statistics,
)
from .functional._statistics import HeadScores, attention_rollout, head_scores
from .nn import *
from .random import TorchGenerator, manual_seed

if TYPE_CHECKING:
    from . import law, reference, testing
    from ._view import AttentionView, view_attention
    from .functional._quantize import dequantize, quantize

__all__ = [
    "AttentionView",
    "BlockMask",
    "Explanation",
    "HeadScores",
    "KVCache",
    "Quantized",
    "TorchGenerator",
    "__version__",
    "attention_backward",
    "attention_jvp",
    "attention_jvp_backward",
    "attention_rollout",
    "attention_statistics",
    "attention_weights",
    "causal_attention",
    "causal_mask",
    "choose_keys",
    "dequantize",
    "dropout",
    "dropout_backward",
    "explain",
    "get_alibi_slopes",
    "get_num_threads",
    "head_scores",
    "law",
    "linear_attention",
    "manual_seed",
    "masked_softmax",
    "merge_attention",
    "num_threads",
    "plot_attention",
    "quantize",
    "reference",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "scaled_dot_product_attention",
    "set_num_threads",
    "show_config",
    "show_mask",
    "sliding_window",
    "softmax",
    "softmax_backward",
    "testing",
    "varlen_attention",
    "varlen_attention_backward",
    "varlen_attention_statistics",
    "view_attention",
]
__all__ += _types.__all__
__all__ += nn.__all__
__all__.sort()


_LATER = {
    "AttentionView": "._view",
    "dequantize": ".functional._quantize",
    "quantize": ".functional._quantize",
    "view_attention": "._view",
}

# Pickles and help name the public place of a function or class, which stays when the files change.
for _name in __all__:
    if getattr(globals().get(_name), "__module__", f"{__name__}.nn") != f"{__name__}.nn":
        globals()[_name].__module__ = __name__


def __getattr__(name: str) -> Any:
    """Import the modules, views and quantize, which take time, at their first use."""
    import importlib

    if name in ("integrations", "law", "reference", "testing"):
        return importlib.import_module(f".{name}", __name__)
    if name in _LATER:
        found = globals()[name] = getattr(importlib.import_module(_LATER[name], __name__), name)
        found.__module__ = __name__  # as above
        return found
    from ._input.names import no_attribute

    modules = ("functional", "nn", "testing", "random")
    raise no_attribute(name, __all__, {each: importlib.import_module(f".{each}", __name__).__all__ for each in modules})


def __dir__() -> list[str]:
    """List the public names and modules, also those that are imported at their first use."""
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *special, "cache", "functional", "integrations", "nn", "random"})
