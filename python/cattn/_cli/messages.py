"""What a command prints besides its result: closing lines, warnings, progress of a long run, and shaded cells."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
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


# Seconds. Shorter runs show nothing.
PATIENCE = 1.0


class Progress:
    """Report `total` steps; as a context manager it leaves the terminal tidy."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        self.total, self.done = total, 0
        self.quiet = quiet = quiet or sys.stderr is None or sys.stderr.closed
        self._start = time.monotonic()
        self._next = self._start + PATIENCE
        self._shown = False
        self._bar: Any = None
        if not quiet:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, unit="row", unit_scale=True, delay=PATIENCE, file=sys.stderr)

    def advance(self, steps: int) -> None:
        """Count `steps` more as done."""
        self.done += steps
        with contextlib.suppress(OSError):  # nobody reads it
            self._report(steps)

    def _report(self, steps: int) -> None:
        if self._bar is not None:
            self._bar.update(steps)
        elif not self.quiet and (now := time.monotonic()) >= self._next:
            terminal = sys.stderr.isatty()
            elapsed = now - self._start
            left = elapsed * (self.total - self.done) / max(self.done, 1)
            line = (
                f"cattn: {self.done / max(self.total, 1):4.0%} done, {elapsed:.0f} s so far, about {left:.0f} s to go"
            )
            print(f"\r{line}  " if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
            self._shown = terminal
            self._next = now + (0.2 if terminal else 5.0)  # seldom in a log file

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.close()
            elif self._shown:
                print(file=sys.stderr)


# From light to dark, in the numbers of the 256-colour palette. Text is black on the first ones, white on the others.
# Both colours of a cell are set, so that it can be read on dark and on light terminals.
BLUES = (195, 153, 117, 75, 33, 26, 19)
BLACK_ON = 5
BLACK, WHITE = 16, 231


def has_colours(stream: TextIO | None) -> bool:
    """Return whether to colour what is printed to stream: on terminals, unless NO_COLOR is set (no-color.org)."""
    if stream is None or stream.closed or os.environ.get("NO_COLOR"):  # None: the process has no such stream
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    term = os.environ.get("TERM", "")
    # Older consoles of Windows print the escapes instead. Windows Terminal sets WT_SESSION, but not TERM.
    known = "WT_SESSION" in os.environ if sys.platform == "win32" and not term else term not in ("", "dumb", "linux")
    return known and stream.isatty()


def shade_cell(text: str, darkness: float | None) -> str:
    """Return the text on a blue that is darker for larger numbers from 0 to 1; None is faint and has no colour."""
    if darkness is None:
        return f"\x1b[2m{text}\x1b[0m"
    step = min(int(darkness * len(BLUES)), len(BLUES) - 1)
    return f"\x1b[38;5;{BLACK if step < BLACK_ON else WHITE};48;5;{BLUES[step]}m{text}\x1b[0m"
