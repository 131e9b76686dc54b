"""Progress of a long run: tqdm if it is installed, otherwise a plain line on stderr."""

import contextlib
import sys
import time
from types import TracebackType
from typing import Any

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
