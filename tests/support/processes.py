"""Other processes, without a limit by the clock: on a busy machine they may take any time.

A process ends as a failure if it uses more processor time than it may, or none at all for long: then it hangs.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import UNDER_SANITIZER

MOST_SECONDS = 3000.0 if UNDER_SANITIZER else 300.0
_HANGS = 600.0  # seconds without a hundredth of processor time
_PAUSE = 0.5


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time of a process and its children so far; None if this system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # not Linux, or the process has ended
        return None
    of_children = (cpu_seconds(int(child)) for child in children)
    return sum(map(int, fields[11:15])) / 100 + sum(seconds or 0.0 for seconds in of_children)


class Watch:
    """Looks at a process now and then, and tells whether it uses too much processor time, or hangs."""

    def __init__(self, pid: int, most: float = MOST_SECONDS) -> None:
        self._pid, self._most = pid, most
        self._used, self._since = 0.0, time.monotonic()

    def finds(self) -> str:
        """Return what is wrong, or an empty text."""
        used = cpu_seconds(self._pid)
        if used is None or used > self._used:
            self._used, self._since = used or self._used, time.monotonic()
        if self._used > self._most:
            return f"has used {self._used:.0f} s of processor time"
        return "hangs" if time.monotonic() - self._since > _HANGS else ""


def finish(process: subprocess.Popen[Any], given: Any = None, most: float = MOST_SECONDS) -> tuple[Any, Any]:
    """Return what a process writes until it ends."""
    watch = Watch(process.pid, most)
    while True:
        try:
            return process.communicate(given, timeout=_PAUSE)
        except subprocess.TimeoutExpired:
            given = None  # it has been taken
            if wrong := watch.finds():
                process.kill()
                raise AssertionError(f"{process.args!r} {wrong}: {process.communicate()}") from None


def run_command(
    command: Sequence[str | Path],
    *,
    given: Any = None,
    capture_output: bool = False,
    check: bool = False,
    most: float = MOST_SECONDS,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command as ``subprocess.run`` does; `given` is its standard input."""
    if given is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **options) as process:
        out, errors = finish(process, given, most)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done
