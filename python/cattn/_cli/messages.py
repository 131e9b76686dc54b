"""What a command prints besides its result: a closing line, and warnings in one line each."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cattn.nn._files import errors_name, printable


def encodable(text: str) -> str:
    """Return text that standard output can show, with escapes of what its encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def finish(stream: TextIO | None) -> None:
    """Write what the stream still holds. If that fails, close it: else Python tries again at exit."""
    if stream is None or stream.closed:
        return
    try:
        with errors_name(Path("standard output")):
            stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            stream.close()
        raise


def tell(line: str) -> None:
    """Print a line to standard error, if there is one. Nothing that a name in it contains reaches the terminal raw."""
    if sys.stderr is None:  # print would take standard output instead
        return
    try:
        print(f"cattn: {printable(line)}", file=sys.stderr, flush=True)
    except ValueError:  # closed
        return
    except OSError:  # close it, too: else Python tries again at exit, and the exit code becomes 120
        with contextlib.suppress(OSError):
            sys.stderr.close()


def say(line: str) -> None:
    """Print a line after the result is written: a failure to print is not a failure of the command."""
    try:
        print(encodable(printable(line)))
        finish(sys.stdout)
    except ValueError:  # closed
        return
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            tell(f"warning: cannot write to standard output: {error.strerror}; {line}")


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each warning once, in one line without source code."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            tell(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
