"""The chapter's attention classes, from three bare matrices to many heads, on the fused functions."""

from .._input.names import public_names
from ._chapter import CausalAttention, MultiHeadAttention, MultiHeadAttentionWrapper, SelfAttention_v1, SelfAttention_v2
from ._layers import Dropout, Linear

__all__ = [
    "CausalAttention",
    "Dropout",
    "Linear",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "SelfAttention_v1",
    "SelfAttention_v2",
]
__dir__ = public_names(globals())

# Pickles and help name the public place of a class, which stays when the files change.
for _name in __all__:
    globals()[_name].__module__ = __name__
