"""The floating-point mode of computations in Python: the one that the promised results assume."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .. import _cattn
from .names import add_hint

P = ParamSpec("P")
R = TypeVar("R")


def in_default_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Make function round to nearest and keep subnormals, as the kernels do, in any mode that the caller has set."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return _cattn._in_default_mode(function, args, kwargs)
        except TypeError as error:
            add_hint(error, function)
            raise

    return call
