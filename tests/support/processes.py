"""Other processes, among them a browser; signals after a given time, calls that take long.

Processes run without a limit by the clock: on a busy machine they may take any time. A process ends as a failure if it
uses more processor time than it may, or none at all for long: then it hangs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
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


# ---- a browser for the tests of the views: Playwright (PyPI) with the system's Chromium (Debian: chromium) ----------
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PLAYWRIGHT = importlib.util.find_spec("playwright") is not None

needs_browser = pytest.mark.skipif(
    not (PLAYWRIGHT and CHROMIUM), reason="needs playwright (PyPI) and Chromium (Debian's package chromium)"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Tab:
    """A page that records what it fetches and what goes wrong in it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))

    def open(self, path: Path) -> Any:
        """Show a saved view, and wait until it is drawn."""
        self.context.set_offline(True)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(".cattn-view[data-theme]")
        return self.page


# ---- signals ---------------------------------------------------------------------------------------------------------
# SIGALRM, and on Windows, where no timer sends signals, SIGINT.
if sys.platform == "win32":
    ALARM = signal.SIGINT
    _kernel = ctypes.WinDLL("kernel32")
    _kernel.CreateTimerQueueTimer.argtypes = (
        ctypes.POINTER(ctypes.c_void_p), *[ctypes.c_void_p] * 3, *[ctypes.c_ulong] * 3,
    )  # fmt: skip
    _kernel.DeleteTimerQueueTimer.argtypes = (ctypes.c_void_p,) * 3
    # The function of the C library, not Python's: a call may hold the GIL while it runs.
    _raise = ctypes.cast(getattr(ctypes.CDLL("ucrtbase"), "raise"), ctypes.c_void_p)
    _IN_TIMER_THREAD, _WAIT_FOR_CALLBACKS = 0x20, ctypes.c_void_p(-1)
    _timers: list[ctypes.c_void_p] = []

    def set_alarm(seconds: float, interval: float = 0.0) -> None:
        """Raise ALARM in that time, and then in these intervals. 0 seconds: no more."""
        while _timers:
            _kernel.DeleteTimerQueueTimer(None, _timers.pop(), _WAIT_FOR_CALLBACKS)
        if seconds > 0:
            timer = ctypes.c_void_p()
            due, period = (max(1, round(1000 * t)) if t > 0 else 0 for t in (seconds, interval))
            started = _kernel.CreateTimerQueueTimer(
                ctypes.byref(timer), None, _raise, ctypes.c_void_p(ALARM), due, period, _IN_TIMER_THREAD
            )
            assert started, ctypes.WinError()
            _timers.append(timer)

else:
    ALARM = signal.SIGALRM

    def set_alarm(seconds: float, interval: float = 0.0) -> None:
        """Raise ALARM in that time, and then in these intervals. 0 seconds: no more."""
        signal.setitimer(signal.ITIMER_REAL, seconds, interval)


# ---- calls that take many seconds ------------------------------------------------------------------------------------
def long_calls() -> dict[str, Callable[[], object]]:
    """Return calls that take many seconds. Zero strides make their arrays long without memory."""
    one = np.ones((1, 16), np.float32)
    long = np.broadcast_to(one, (1 << 19, 16))
    few = np.broadcast_to(one, (1 << 31, 16))
    scores = np.broadcast_to(np.float32(1), (1 << 10, 1 << 22))
    out = np.empty((1 << 18, 16), np.float32)
    sums = np.broadcast_to(np.float32(1), (2, 1 << 34))
    stored = cattn.Quantized(np.broadcast_to(np.int8(1), (1 << 21, 64)), np.float32(1))
    return {
        "linear": lambda: cattn.functional.linear(sums, sums),
        "dequantize": lambda: cattn.dequantize(stored),
        "tile": lambda: cattn.scaled_dot_product_attention(long[: 1 << 18], long, long, out=out),
        "rows": lambda: cattn.scaled_dot_product_attention(one, few, few),
        "dropout": lambda: cattn.scaled_dot_product_attention(
            long[: 1 << 18], long, long, dropout_p=0.5, rng=cattn.TorchGenerator(1), out=out
        ),
        "softmax": lambda: cattn.softmax(scores[:, : 1 << 20], axis=-1),
        "gradients": lambda: cattn.attention_backward(
            long[: 1 << 18], long[: 1 << 18], long, long, out, np.zeros(1 << 18, np.float32)
        ),
        "gradients, drawn": lambda: cattn.attention_backward(
            long[: 1 << 18], long[: 1 << 18], long, long, out, np.zeros(1 << 18, np.float32), dropout_p=0.5,
            rng=cattn.TorchGenerator(1),
        ),
    }  # fmt: skip
