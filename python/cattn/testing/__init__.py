"""Tests for other attention: what is wrong with it, and whether its rounding errors fit its dtype.

`diagnose` calls a function or module on small inputs and names its mistake, and `assert_attention_close` compares one
result with the exact one. Both take NumPy arrays and PyTorch tensors; PyTorch is imported only by its owner.

>>> import numpy as np
>>> from cattn.testing import diagnose
>>> def attention(query, key, value):
...     weights = np.exp(query @ key.T / np.sqrt(query.shape[-1])) * np.tri(len(query))
...     return weights / weights.sum(axis=0) @ value
>>> [mistake.name for mistake in diagnose(attention).mistakes]
['softmax_axis']
"""

from .._input.names import public_names
from ._close import assert_attention_close
from ._diagnose import diagnose
from ._report import Mistake, Report

__all__ = ["Mistake", "Report", "assert_attention_close", "diagnose"]
__dir__ = public_names(globals())

# Pickles and help name the public place, which stays when the files change.
for _object in (Mistake, Report, assert_attention_close, diagnose):
    _object.__module__ = __name__
