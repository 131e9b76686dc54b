"""What a command prints besides its result: a closing line, and warnings in one line each."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any


def say(line: str) -> None:
    """Print a line after the result is written: a failure to print is not a failure of the command."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # else Python tries again at exit
        if not isinstance(error, BrokenPipeError):
            print(f"cattn: warning: cannot write to standard output: {error.strerror}; {line}", file=sys.stderr)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each warning once, in one line without source code."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            print(f"cattn: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
