"""Arguments of attention in JAX that are no arrays, or must be known when a call is traced."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np


def read_seed(dropout_key: Any, dropout_p: float) -> Any:
    """Return the two words of a seed."""
    if dropout_key is None:
        raise ValueError(f"dropout_p is {dropout_p}: pass dropout_key, for example jax.random.key(0)")
    try:
        return jax.random.bits(dropout_key, (2,), np.uint32)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dropout_key must be one key of jax.random: {error}") from error


def read_side(obj: Any) -> int:
    """Return one side of a window: a number of keys, or -1 for no bound."""
    if obj is None:
        return -1
    try:
        side = operator.index(obj)
    except Exception:  # a tracer raises an error of JAX's own
        side = -1
    if isinstance(obj, (bool, np.bool_)) or side < 0:
        raise ValueError(
            f"local_window_size must be an int or (left, right), numbers of keys that are not negative and known when "
            f"the call is traced, got {obj!r}"
        )
    return min(side, 2**62)


def read_window(local_window_size: Any, causal: bool) -> tuple[int, int]:
    if isinstance(local_window_size, (tuple, list)):
        if len(local_window_size) != 2:
            raise ValueError(f"local_window_size must be an int or (left, right), got {local_window_size!r}")
        left, right = map(read_side, local_window_size)
    else:
        left = right = read_side(local_window_size)
    return left, 0 if causal else right


def check_static(**arguments: Any) -> None:
    for name, value in arguments.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"{name} must be known when the call is traced, got a tracer: make it a static argument")
