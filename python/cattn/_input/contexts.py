"""Blocks of ``with`` that warn if they are not entered, and the floating-point mode of computations in Python."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from .. import _cattn
from .names import add_hint

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def warn_not_entered(call: str, instead: str = "") -> None:
    """Warn, at the line that drops the context manager."""
    warnings.warn(f"{call} has no effect without a block: write 'with {call}:'{instead}", RuntimeWarning, stacklevel=3)


class Block(contextlib.AbstractContextManager[T], Generic[T]):
    """A block of ``with``, which may be entered again, also inside itself; or a decorator."""

    def __init__(self, name: str, make: Callable[[], contextlib._GeneratorContextManager[T]]) -> None:
        self._name, self._make, self._used = name, make, False
        self._entered: list[contextlib._GeneratorContextManager[T]] = []

    def __enter__(self) -> T:
        self._used = True
        manager = self._make()
        result = manager.__enter__()
        self._entered.append(manager)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if not self._entered:
            raise RuntimeError(f"{self._name}() was not entered")
        return self._entered.pop().__exit__(kind, error, traceback)

    def __call__(self, function: F) -> F:
        self._used = True
        return self._make()(function)

    def __del__(self) -> None:
        if not self._used:
            warn_not_entered(f"{self._name}()")


def block(function: Callable[P, Iterator[T]]) -> Callable[P, Block[T]]:
    """Make a context manager of a generator function, as `contextlib.contextmanager` does."""
    make = contextlib.contextmanager(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(function.__name__, functools.partial(make, *args, **kwargs))

    return call


R = TypeVar("R")


def in_default_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Make function round to nearest and keep subnormals, as the kernels do, in any mode that the caller has set."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return _cattn._in_default_mode(function, args, kwargs)
        except TypeError as error:
            add_hint(error, function, (*args, *kwargs.values()))
            raise

    return call
