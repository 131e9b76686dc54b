"""The number of threads, for the process and for a block of code. threadpoolctl can read and set it, too.

The first of these that is set counts: the `num_threads` block of the calling thread, `set_num_threads`,
CATTN_NUM_THREADS, OMP_NUM_THREADS, the CPUs that this process may use. Results have the same bits for any number.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

from . import _cattn
from ._input.checks import as_size
from ._input.contexts import warn_not_entered
from ._input.names import with_hints
from ._version import __version__

__all__ = ["get_num_threads", "num_threads", "set_num_threads"]

_registered = False


def _register_threadpoolctl() -> None:
    """Register cattn with threadpoolctl, if that is imported.

    An import of threadpoolctl here would make ``import cattn`` slow. So cattn registers when it is imported after
    threadpoolctl, or at the first call of a function of this module.
    """
    global _registered
    threadpoolctl: Any = sys.modules.get("threadpoolctl")
    if _registered or threadpoolctl is None or not hasattr(threadpoolctl, "register"):
        return

    class CattnController(threadpoolctl.LibController):  # type: ignore[misc]
        """The thread pool of cattn, for threadpoolctl."""

        user_api = "cattn"
        internal_api = "cattn"
        filename_prefixes = ("_cattn",)

        get_num_threads = staticmethod(_cattn.get_num_threads)
        set_num_threads = staticmethod(_cattn.set_num_threads)

        def get_version(self) -> str:
            return __version__

    threadpoolctl.register(CattnController)
    _registered = True


def get_num_threads() -> int:
    """Return the maximal number of threads of a call from this thread.

    Returns
    -------
    int
        At least 1. Small calls use fewer.

    See Also
    --------
    set_num_threads : Sets the number for the process.
    num_threads : Sets the number in a block.

    Examples
    --------
    >>> import cattn
    >>> with cattn.num_threads(1):
    ...     cattn.get_num_threads()
    1
    """
    _register_threadpoolctl()
    return _cattn.get_num_threads()


@with_hints
def set_num_threads(n: int | None) -> None:
    """Set the number of threads for the whole process.

    Parameters
    ----------
    n : int or None
        At least 1. None restores the setting of the environment. More threads than CPUs are allowed, but useless.

    Raises
    ------
    TypeError, ValueError
        n is not an int, or below 1.

    See Also
    --------
    num_threads : Sets the number in a block, for one thread.
    get_num_threads : Returns the number.

    Notes
    -----
    ``threadpoolctl.threadpool_limits`` sets the same number if threadpoolctl was imported before cattn, or before a
    call of one of cattn's thread functions.

    Examples
    --------
    >>> import cattn
    >>> cattn.set_num_threads(2)
    >>> cattn.get_num_threads()
    2
    >>> cattn.set_num_threads(None)
    """
    _register_threadpoolctl()
    _cattn.set_num_threads(n)


class _Before(threading.local):
    """The counts that the blocks of each thread restore."""

    def __init__(self) -> None:
        self.counts: list[int] = []


class num_threads:  # noqa: N801 - a function to its users
    """Use n threads within a ``with`` block, in the calling thread only.

    The end of the block restores the former count, also after an exception. Blocks nest.

    Parameters
    ----------
    n : int
        At least 1.

    Raises
    ------
    TypeError, ValueError
        n is not an int, or below 1.

    See Also
    --------
    set_num_threads : Sets the number for the process.
    get_num_threads : Returns the number.

    Examples
    --------
    >>> import cattn
    >>> with cattn.num_threads(3):
    ...     cattn.get_num_threads()
    3
    """

    _used = True  # until the call is known to be right

    @with_hints
    def __init__(self, n: int) -> None:
        self.n = as_size(n, "n", maximum=2**31 - 1)
        self._before = _Before()
        self._used = False

    def __reduce__(self) -> tuple[type[num_threads], tuple[int], dict[str, bool]]:
        self._used = True  # elsewhere
        return num_threads, (self.n,), {"_used": True}

    def __enter__(self) -> num_threads:
        self._used = True
        _register_threadpoolctl()
        self._before.counts.append(_cattn._override_num_threads(self.n))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._before.counts:
            raise RuntimeError("num_threads was not entered in this thread")
        _cattn._override_num_threads(self._before.counts.pop())

    def __repr__(self) -> str:
        return f"cattn.num_threads({self.n})"

    def __del__(self) -> None:
        if not self._used:
            warn_not_entered(repr(self), f", or cattn.set_num_threads({self.n}) for the process")


_register_threadpoolctl()
