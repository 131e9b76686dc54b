"""Signal handlers that call cattn while a call of cattn runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cattn
from support import ROOT
from support.processes import run_command

# A handler that is slower than its timer: whenever it computes, the next signal comes. Each poll of a computation would
# run the handler once more, on top of it, until the stack ends; a small stack makes that quick.
NESTED = """
import signal
import time
import numpy as np
import cattn
from support.alarm import ALARM, set_alarm

cattn.set_num_threads(1)
n, runs, depth, deepest = 1, 0, 0, 0


def call():
    x = np.broadcast_to(np.float32(1), (n, 64, 16))
    cattn.causal_attention(x, x, x)


def handler(*_):
    global runs, depth, deepest
    runs += 1
    if runs == {runs}:
        set_alarm(0)
    if runs < {runs}:
        depth += 1
        deepest = max(depth, deepest)
        call()
        depth -= 1


def duration():
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


while duration() < 0.03:  # polled at least once
    n *= 2
signal.signal(ALARM, handler)
set_alarm(0.005, 0.005)
while runs < {runs}:
    call()
print(deepest, depth)
"""


def small_stack() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_STACK, (2 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def test_handlers_do_not_nest_without_end() -> None:
    path = os.pathsep.join([str(Path(cattn.__file__).parents[1]), str(ROOT / "tests")])
    code = NESTED.format(runs=60)
    done = run_command(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
        preexec_fn=None if sys.platform == "win32" else small_stack,  # Windows: 2 MB is what python.exe asks for
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    deepest, left = map(int, done.stdout.split())
    assert deepest > 1, "the handler ran during a call of its own"
    assert left == 0
