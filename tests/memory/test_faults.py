"""Faults: no memory, Ctrl-C at any moment, fork and interpreter exit during a call, a second interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from support import ROOT, UNDER_SANITIZER, needs_fork
from support.processes import ALARM, Watch, run_command, set_alarm
from support.public_calls import SHARES, contents

SUPPORT = (str(ROOT / "tests"), str(Path(__file__).parent))  # where child processes import helpers


def python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run another Python, which imports the same cattn and the helpers of these tests.

    The leak check at its end is off: some tests leak on purpose, and the sanitizer fails itself if threads are ending.
    """
    environment["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    path = os.pathsep.join([str(Path(cattn.__file__).parents[1]), *SUPPORT])
    return run_command(
        [sys.executable, "-X", "faulthandler", *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


# ---- no memory -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def failing_allocations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables that make allocations fail."""
    if platform.libc_ver()[0] != "glibc" or UNDER_SANITIZER:
        pytest.skip("the shim replaces glibc's allocator")
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip("needs a C compiler")
    shim = tmp_path_factory.mktemp("shim") / "failing_allocations.so"
    flags = ["-O1", "-fno-optimize-sibling-calls", "-shared", "-fPIC", "-o", str(shim)]
    run_command([*compiler, str(ROOT / "tests/data/failing_allocations.c"), *flags], check=True)
    return {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}


@pytest.mark.promise("no memory")
@pytest.mark.parametrize("share", range(SHARES))
def test_every_allocation_may_fail(share: int, failing_allocations: dict[str, str]) -> None:
    done = python(ROOT / "tests" / "support" / "public_calls.py", "sweep", str(share), **failing_allocations)
    assert done.returncode == 0, done.stderr
    failures = json.loads(done.stdout)
    # scratch of callers, of workers and of the split path, tickets of gradients, threads; results and their containers
    assert failures.keys() <= {"posix_memalign", "malloc", "calloc", "pthread_create", "within"}
    assert {"malloc", "within"} & failures.keys()


@pytest.mark.parametrize(
    ("fault", "says"), [("leak", "blocks leak"), ("write", "an input was written"), ("lie", "another result")]
)
def test_a_wrong_reaction_to_a_failed_allocation_is_found(
    failing_allocations: dict[str, str], fault: str, says: str
) -> None:
    done = python(ROOT / "tests" / "support" / "public_calls.py", fault, **failing_allocations)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(says)


# ---- exit of the interpreter ---------------------------------------------------------------------------------------
EXIT = """
import atexit, os, sys, threading, time, types
import numpy as np
import cattn
from cattn import _cattn
from support.processes import long_calls

cattn.set_num_threads(2)
call = long_calls()[{name!r}]


def deep(n):
    "Make the call deep in the thread's stack, which the system unmaps when the thread ends."
    return call() if n == 0 else list(map(deep, [n - 1]))


class Late:
    "Delay the end of the interpreter until the threads that return to it have ended."
    def __init__(self):
        self.lock = threading.Lock()
        self.lock.acquire()

    def __del__(self):
        self.lock.acquire(timeout=0.1)  # on Windows, time.sleep needs an event for Ctrl-C that is closed by now
        print("late", cattn_at_exit().tolist(), flush=True)


def cattn_at_exit():
    return cattn.softmax(np.zeros(2))


def n_threads():
    "Count the threads of the process. Asking the pool would take it from the call."
    return len(os.listdir("/proc/self/task"))


sys.modules["late"] = types.ModuleType("late")
sys.modules["late"].object = Late()
atexit.register(lambda: print("atexit", cattn_at_exit().tolist(), flush=True))
linux = sys.platform == "linux"
before = linux and n_threads()
thread = threading.Thread(target=deep, args=(60,), daemon=True)
thread.start()
while linux and n_threads() < before + 2:  # the machine may be busy
    time.sleep(0.05)
    assert thread.is_alive(), "the call has no worker"
time.sleep(0.1 if linux else 1)
while _cattn._release():  # succeeds only between two waves of chunks, when no call holds the pool
    time.sleep(0.01)
    assert thread.is_alive(), "the call is over"
"""


@pytest.mark.promise("exit")
@pytest.mark.parametrize("name", ["tile", "rows", "dropout", "gradients", "gradients, drawn"])
def test_the_interpreter_may_exit_while_a_daemon_thread_computes(name: str) -> None:
    done = python("-c", EXIT.format(name=name))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["atexit [0.5, 0.5]", "late [0.5, 0.5]"]


# ---- fork ----------------------------------------------------------------------------------------------------------
def finish(pid: int) -> int:
    """Wait for a child and return its exit code. A child that hangs is killed: -9."""
    watch = Watch(pid)
    while not watch.finds():
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


X = np.random.default_rng(1).standard_normal((2, 2, 1500, 32), dtype=np.float32)
MANY = np.broadcast_to(X, (32, *X.shape))
SOME = MANY[:6]
RESULT = cattn.scaled_dot_product_attention(SOME, SOME, SOME, return_lse=True)
DROPPED = cattn.scaled_dot_product_attention(
    SOME, SOME, SOME, dropout_p=0.5, rng=cattn.TorchGenerator(1), return_lse=True
)
BUSY: dict[str, Callable[[], object]] = {  # each call takes longer than the 20 ms between two checks for signals
    "tile": lambda: cattn.causal_attention(MANY, MANY, MANY),
    "stream": lambda: cattn.causal_attention(SOME, SOME, SOME, dropout_p=0.5, rng=cattn.TorchGenerator(1)),
    "gradients": lambda: cattn.attention_backward(SOME, SOME, SOME, SOME, RESULT.out, RESULT.lse),
    "gradients, stream": lambda: cattn.attention_backward(
        SOME, SOME, SOME, SOME, DROPPED.out, DROPPED.lse, dropout_p=0.5, rng=cattn.TorchGenerator(1)
    ),
}


@pytest.fixture
def on_alarm() -> Iterator[Callable[[Callable[[], None], float], None]]:
    """A function ``on_alarm(action, seconds)``: the action runs once, in a signal handler."""

    def arm(action: Callable[[], None], seconds: float) -> None:
        signal.signal(ALARM, lambda *_: action())
        set_alarm(seconds)

    before = signal.getsignal(ALARM)
    yield arm
    set_alarm(0)
    signal.signal(ALARM, before)


@pytest.mark.long
@needs_fork
@pytest.mark.promise("fork")
@pytest.mark.parametrize("name", BUSY)
def test_a_signal_handler_may_fork_during_a_call(
    name: str, on_alarm: Callable[[Callable[[], None], float], None]
) -> None:
    """The call has workers. In the parent it continues; in the child KeyboardInterrupt ends it."""
    call, parent = BUSY[name], os.getpid()
    children, codes = list[int](), list[int]()
    computing = False

    def fork() -> None:
        if pid := os.fork():
            children.append(pid)
        elif not computing:
            os._exit(0)

    with cattn.num_threads(3):
        start = time.monotonic()
        expected = contents(call())
        duration = time.monotonic() - start
        for step in range(60):  # at least eight, and until one fork was during the call
            if step >= 8 and 10 in codes:
                break
            computing = True
            on_alarm(fork, duration * (step % 8 + 1) / 10)
            try:
                code = 0 if contents(call()) == expected else 3
            except KeyboardInterrupt:
                code = 10
            if os.getpid() != parent:
                os._exit(code if contents(call()) == expected else 4)
            computing = False
            if os.getpid() != parent:  # a child forked after the check above and before `computing` changed
                os._exit(0)
            assert code == 0
            while len(children) <= step:  # the call ended before the alarm
                time.sleep(0.001)
            codes.append(finish(children[step]))
    assert set(codes) <= {0, 10}, codes
    assert 10 in codes, "no fork was during a call"


# A draw of a quarter of a second and more: of arithmetic, for memory that was there before costs no time.
DRAW, OF_DOUBLES = (1 << 24,), {"dtype": np.float64}


@needs_fork
@pytest.mark.parametrize("forks_again", [False, True])
def test_a_generator_of_a_thread_that_the_child_lacks(forks_again: bool) -> None:
    """The child, or its child, cannot know how far the draw had come: RuntimeError until the generator is seeded."""
    generator = cattn.TorchGenerator(1)
    expected = generator.get_state()
    calls: list[Callable[[], object]] = [
        generator.get_state, lambda: generator.rand(1), lambda: cattn.dropout(X, 0.5, rng=generator),
    ]  # fmt: skip
    seen: list[Any] = []

    def in_new_thread() -> None:  # may well get the name of the one that is gone
        pid = os.fork() if forks_again else 0
        if pid:
            os._exit(finish(pid) & 0xFF)
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                seen.append("was forked while another thread was drawing" in str(error))
        with contextlib.suppress(ValueError):
            generator.set_state(np.zeros_like(expected))
        with contextlib.suppress(RuntimeError):
            generator.get_state()
            os._exit(5)  # a state that is refused is none
        generator.manual_seed(1)
        seen.append((generator.get_state() == expected).all())
        os._exit(0 if seen == [True] * 4 else 3)

    for _ in range(60):  # until a fork is in the middle of a draw: the machine may be busy
        drawing = threading.Thread(target=generator.manual_seed(1).randn, args=DRAW, kwargs=OF_DOUBLES)
        drawing.start()
        time.sleep(0.03)
        pid = os.fork()
        if pid == 0:
            thread = threading.Thread(target=in_new_thread)
            thread.start()
            thread.join()
            os._exit(4)
        in_the_middle = drawing.is_alive()
        drawing.join()
        code = finish(pid)
        if in_the_middle:
            break
    assert in_the_middle
    assert code == 0


@needs_fork
@pytest.mark.promise("fork")
def test_a_fork_by_a_handler_that_waits_for_a_generator(on_alarm: Callable[[Callable[[], None], float], None]) -> None:
    """The child's wait ends, too, though the thread that drew does not exist there."""
    forks: list[int] = []
    waiting = False

    def fork() -> None:
        if not waiting:
            on_alarm(fork, 0.005)
        elif drawing.is_alive():
            forks.append(os.fork())

    for _ in range(60):  # until the alarm meets the wait: the machine may be busy
        generator = cattn.TorchGenerator(1)
        drawing = threading.Thread(target=generator.randn, args=DRAW, kwargs=OF_DOUBLES)
        drawing.start()
        time.sleep(0.01)
        on_alarm(fork, 0.005)
        waiting = True
        try:
            generator.get_state()
            refused = False
        except RuntimeError:
            refused = True
        waiting = False
        if forks == [0]:
            os._exit(7 if refused else 8)
        assert not refused
        drawing.join()
        if forks:
            break
    assert [finish(pid) for pid in forks] == [7]


MULTIPROCESSING = """
import multiprocessing, sys, threading
import numpy as np
import cattn


def attend(seed):
    x = np.random.default_rng(seed).standard_normal((2, 500, 16), dtype=np.float32)
    return cattn.causal_attention(x, x, x, dropout_p=0.1, rng=seed).tobytes()


def fail(_):
    raise ZeroDivisionError


if __name__ == "__main__":
    cattn.set_num_threads(2)
    expected = [attend(seed) for seed in range(6)]
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [attend(7) for _ in iter(stop.is_set, True)])
    busy.start()
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        assert pool.map(attend, range(6)) == expected
        try:
            pool.map(fail, [0])
        except ZeroDivisionError:
            pass
        assert pool.map(attend, range(6)) == expected
    stop.set()
    busy.join()
    assert [attend(seed) for seed in range(6)] == expected
"""


@pytest.mark.promise("fork")
@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=needs_fork), "spawn", pytest.param("forkserver", marks=needs_fork)]
)
def test_multiprocessing_pools_give_the_same_bits(tmp_path: Path, method: str) -> None:
    """The pool starts and ends while a thread computes, as in PyTorch's data loaders."""
    script = tmp_path / "pool.py"
    script.write_text(MULTIPROCESSING)
    done = python(script, method)
    assert (done.returncode, done.stderr) == (0, "")


JOBLIB = """
import sys
import joblib
import numpy as np
import cattn


def attend(x, seed):
    return cattn.causal_attention(x, x, x, dropout_p=0.1, rng=seed).tobytes()


if __name__ == "__main__":
    cattn.set_num_threads(2)
    x = np.random.default_rng(0).standard_normal((2, 500, 16), dtype=np.float32)
    expected = [attend(x, seed) for seed in range(6)]
    parallel = joblib.Parallel(n_jobs=2, backend=sys.argv[1], max_nbytes=1000)  # x goes as a read-only memory map
    assert parallel(joblib.delayed(attend)(x, seed) for seed in range(6)) == expected
"""


@pytest.mark.promise("fork")
@pytest.mark.parametrize("backend", ["loky", "multiprocessing", "threading"])
def test_joblib_gives_the_same_bits(tmp_path: Path, backend: str) -> None:
    pytest.importorskip("joblib")
    script = tmp_path / "pool.py"
    script.write_text(JOBLIB)
    done = python(script, backend)
    assert done.returncode == 0, done.stderr


# ---- interpreters --------------------------------------------------------------------------------------------------
SECOND_INTERPRETER = """
import sys
import cattn._cattn
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

# NumPy cannot be imported in a second interpreter, so load the extension alone
CODE = '''
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("cattn._cattn", {path!r}, loader=ExtensionFileLoader("cattn._cattn", {path!r}))
try:
    spec.loader.exec_module(module_from_spec(spec))
except ImportError as error:
    print(error, flush=True)
try:
    import cattn
except ImportError as error:
    print("ImportError", flush=True)
'''
second = interpreters.create()
interpreters.run_string(second, f"import sys; sys.path[:] = {sys.path}" + CODE.format(path=cattn._cattn.__file__))
interpreters.destroy(second)
print(cattn.softmax([0.0, 0.0]))
"""


@pytest.mark.promise("second interpreter")
@pytest.mark.skipif(sys.platform == "win32", reason="NumPy does not load in a second interpreter on Windows")
def test_a_second_interpreter_is_refused() -> None:
    """The module in the first interpreter keeps working."""
    done = python("-c", SECOND_INTERPRETER)
    assert (done.returncode, done.stderr) == (0, "")
    refused, *rest = done.stdout.splitlines()
    assert refused == "cattn is in use in another interpreter of this process" or (
        sys.version_info >= (3, 12) and "does not support loading in subinterpreters" in refused
    )
    assert rest == ["ImportError", "[0.5 0.5]"]


@pytest.mark.skipif(sys.platform == "win32", reason="NumPy does not load in a second interpreter on Windows")
def test_cattn_may_run_in_any_single_interpreter() -> None:
    code = "import cattn; print(cattn.softmax([0.0, 0.0]))"
    script = f"import _xxsubinterpreters as i; one = i.create(); i.run_string(one, {code!r}); i.destroy(one)"
    if sys.version_info >= (3, 12):
        pytest.skip("NumPy refuses all but the first interpreter")
    done = python("-W", "ignore", "-c", script)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[0.5 0.5]\n")


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------
INTERRUPTED = """
import gc, signal, sys
import numpy as np
import cattn
from support.public_calls import SHARES, contents
from test_faults import BUSY

armed = False


def interrupt(*_):
    "Raise as Python's own handler does, but only during the call."
    if armed:
        raise KeyboardInterrupt


signal.signal(signal.SIGINT, interrupt)
cattn.set_num_threads(2)
generator = cattn.TorchGenerator(1)
state = generator.get_state()
x = np.ones((1 << 20, 8), np.float32)
calls = {**BUSY, "draw": lambda: cattn.dropout(x, 0.5, rng=generator), "softmax": lambda: cattn.softmax(x)}
expected, moved = {}, {}
for name, call in calls.items():
    generator.set_state(state)
    expected[name] = contents(call())
    moved[name] = generator.get_state()
counts = {name: 0 for name in calls}
before = sys.getallocatedblocks()
for _ in range(ROUNDS):
    for name, call in calls.items():
        generator.set_state(state)
        print(name, flush=True)  # from now on the parent sends its signal
        try:
            armed = True
            call()
            armed = False
        except KeyboardInterrupt:
            armed = False
            counts[name] += 1
            now = generator.get_state()  # the state after the draw if the signal came after the computation
            if not ((now == state).all() or (now == moved[name]).all()):
                print("the generator has moved halfway", file=sys.stderr)
        generator.set_state(state)
        if contents(call()) != expected[name]:
            print("other bits after an interrupt", name, file=sys.stderr)
        input()  # the parent has sent it
gc.collect()
if sys.getallocatedblocks() - before > ROUNDS:
    print("blocks leak", file=sys.stderr)
print(sum(counts.values()))
"""


@pytest.mark.long
@pytest.mark.promise("Ctrl-C")
def test_ctrl_c_may_come_at_any_moment() -> None:
    """Forty signals, each within 60 ms of the start of a call. Whether they interrupt it or not, the next is right."""
    rounds, random = 7, np.random.default_rng(1)
    path = os.pathsep.join([str(Path(cattn.__file__).parents[1]), *SUPPORT])
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.replace("ROUNDS", str(rounds))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        for _ in range(rounds * (len(BUSY) + 2)):
            child.stdout.readline()
            time.sleep(random.uniform(0, 0.06))
            child.send_signal(signal.SIGINT)
            print(file=child.stdin, flush=True)
        interrupted = int(child.stdout.readline())
        assert child.stderr.read() == ""
    assert child.returncode == 0
    assert interrupted >= 10, "most signals came after their calls"
