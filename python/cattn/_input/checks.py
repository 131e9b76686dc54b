"""Checks of sizes, dtypes and words."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from .. import _cattn
from .arrays import load_ml_dtype

QUANTIZED = ("int8", "float8_e4m3fn")  # the dtypes of keys and values with scales


def is_word(value: object, word: str) -> bool:
    """Return whether value is this string. Arrays compare element by element, so `==` alone would not do."""
    return isinstance(value, str) and value == word


def as_int(value: object, name: str) -> int:
    """Return value as an int."""
    if type(value) is int:  # isinstance of a protocol is slow
        return value
    if not isinstance(value, (bool, np.bool_)) and isinstance(value, SupportsIndex):
        try:
            return operator.index(value)
        except (MemoryError, RecursionError):
            raise
        except Exception:
            pass
    raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None


def as_flag(value: object, name: str) -> bool:
    """Return the truth of value."""
    try:
        return bool(value)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}") from None


def as_size(value: object, name: str, minimum: int = 1, maximum: int = sys.maxsize) -> int:
    """Return value as an int from minimum to maximum."""
    size = as_int(value, name)
    if size < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {_cattn._shown(size)}")
    if size > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {_cattn._shown(size)}")
    return size


def as_head_counts(d_out: int, num_heads: object, num_kv_groups: object) -> tuple[int, int]:
    """Return the numbers of query heads, which share d_out, and of key-value heads; None is as many."""
    heads = as_size(num_heads, "num_heads")
    groups = heads if num_kv_groups is None else as_size(num_kv_groups, "num_kv_groups")
    if d_out % heads:
        raise ValueError(f"d_out must be a multiple of num_heads, got {d_out} and {heads}")
    if heads % groups:
        raise ValueError(f"num_heads must be a multiple of num_kv_groups, got {heads} and {groups}")
    return heads, groups


def as_dtype(dtype: DTypeLike, allowed: Sequence[str] = ("float32", "float64")) -> np.dtype[Any]:
    """Return dtype if its name is allowed. Those that are not NumPy's are types of ml_dtypes."""
    wanted: Any = dtype  # numpy.dtype(None) is float64, but None is not a dtype here
    for name in ("bfloat16", "float8_e4m3fn"):
        if name in allowed and is_word(dtype, name):
            wanted = load_ml_dtype(name, f"dtype is {name}")
    names = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
    # The methods of an object may raise anything. A type or a string has none: another exception than NumPy's comes
    # from the handler of a signal, and is not hidden.
    expected = (TypeError, ValueError, SyntaxError) if type(wanted) in (type, str) else Exception
    try:
        result: np.dtype[Any] | None = None if wanted is None else np.dtype(wanted)
    except MemoryError:
        raise
    except expected:
        raise TypeError(f"dtype must be {names}, got {_cattn._shown(dtype)}") from None
    if result is None or result.type.__name__ not in allowed:
        raise TypeError(f"dtype must be {names}, got {result}")
    return result.newbyteorder("=")
