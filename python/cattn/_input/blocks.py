"""Context managers that say so if a call of them is left without ``with``, where it has no effect."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def warn_not_entered(call: str, instead: str = "") -> None:
    """Warn, at the line that drops the context manager."""
    warnings.warn(f"{call} has no effect without a block: write 'with {call}:'{instead}", RuntimeWarning, stacklevel=3)


class Block(contextlib.AbstractContextManager[T], Generic[T]):
    """A block of ``with``, or a decorator."""

    def __init__(self, name: str, manager: contextlib._GeneratorContextManager[T]) -> None:
        self._name, self._manager, self._used = name, manager, False

    def __enter__(self) -> T:
        self._used = True
        return self._manager.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._manager.__exit__(kind, error, traceback)

    def __call__(self, function: F) -> F:
        self._used = True
        return self._manager(function)

    def __del__(self) -> None:
        if not self._used:
            warn_not_entered(f"{self._name}()")


def block(function: Callable[P, Iterator[T]]) -> Callable[P, Block[T]]:
    """Make a context manager of a generator function, as `contextlib.contextmanager` does."""
    make = contextlib.contextmanager(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(function.__name__, make(*args, **kwargs))

    return call
