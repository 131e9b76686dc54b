"""Sizes and dtypes that classes are made with."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike


def as_size(value: object, name: str, minimum: int = 1) -> int:
    """Return value as an int of at least `minimum`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    size = operator.index(value)
    if size < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {size}")
    return size


def as_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return dtype, one of the two that cattn computes in."""
    wanted: Any = dtype  # numpy.dtype takes None for float64, which is no default here
    result: np.dtype[Any] | None = None if wanted is None else np.dtype(wanted)
    if result is None or result.type not in (np.float32, np.float64):
        raise TypeError(f"dtype must be float32 or float64, got {result}")
    return result.newbyteorder("=")
