"""Threads: setting their number, the GIL, fork, Ctrl-C, several callers, floating-point flags, stacks, signals."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cattn
from support import ROOT, UNDER_SANITIZER, ctrl_c_after, needs_fork
from support.processes import long_calls, run_command

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    yield
    cattn.set_num_threads(None)


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    return run_command([sys.executable, "-c", code], capture_output=True, text=True, env=clean | environment)


PRINT = "import cattn; print(cattn.get_num_threads())"


@pytest.mark.promise("settings")
@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"CATTN_NUM_THREADS": "3"}, "3"),
        ({"OMP_NUM_THREADS": "5"}, "5"),
        ({"OMP_NUM_THREADS": "4,2"}, "4"),
        ({"CATTN_NUM_THREADS": "2", "OMP_NUM_THREADS": "7"}, "2"),
        ({"CATTN_NUM_THREADS": "", "OMP_NUM_THREADS": "7"}, "7"),
    ],
)
def test_the_environment_sets_the_number_of_threads(environment: dict[str, str], threads: str) -> None:
    assert child(PRINT, **environment).stdout.strip() == threads


def test_without_a_variable_there_are_at_most_as_many_threads_as_processors() -> None:
    assert 1 <= int(child(PRINT).stdout) <= CPUS


@pytest.mark.promise("settings")
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_threads_in_the_environment_is_an_import_error(value: str) -> None:
    done = child(PRINT, CATTN_NUM_THREADS=value)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "CATTN_NUM_THREADS" in done.stderr


def test_an_unknown_kernel_table_in_the_environment_is_an_import_error() -> None:
    done = child(PRINT, CATTN_ISA="avx1024")
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "CATTN_ISA" in done.stderr
    assert "scalar" in done.stderr


@pytest.mark.promise("settings")
def test_the_kernel_table_of_the_environment_is_used() -> None:
    code = "import cattn; print(cattn.show_config('dicts')['instruction_set'])"
    assert child(code, CATTN_ISA="scalar").stdout.strip() == "scalar"


@pytest.mark.promise("settings")
def test_the_context_overrides_the_process_and_ends_with_it() -> None:
    cattn.set_num_threads(3)
    assert cattn.get_num_threads() == 3
    with cattn.num_threads(2):
        assert cattn.get_num_threads() == 2
        with pytest.raises(RuntimeError), cattn.num_threads(5):
            raise RuntimeError
        assert cattn.get_num_threads() == 2
        seen: list[int] = []
        other = threading.Thread(target=lambda: seen.append(cattn.get_num_threads()))
        other.start()
        other.join()
        assert seen == [3], "the context applies to its own thread only"
    assert cattn.get_num_threads() == 3


def test_repr_of_the_context_shows_its_number() -> None:
    with cattn.num_threads(np.int64(3)) as context:
        assert repr(context) == "cattn.num_threads(3)"


@pytest.mark.promise("settings")
def test_threadpoolctl_limits_cattn() -> None:
    import threadpoolctl

    cattn.set_num_threads(4)  # registers the controller
    with threadpoolctl.threadpool_limits(1, user_api="cattn"):
        assert cattn.get_num_threads() == 1
    assert cattn.get_num_threads() == 4
    assert "cattn" in {pool["user_api"] for pool in threadpoolctl.threadpool_info()}


def work(length: int = 700) -> tuple[np.ndarray, ...]:
    return tuple(np.random.default_rng(1).standard_normal((3, 2, 4, length, 32), dtype=np.float32))


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


@needs_fork
@pytest.mark.promise("fork")
def test_fork_after_threads_were_used() -> None:
    query, key, value = work()
    with cattn.num_threads(3):
        expected = bits(cattn.causal_attention(query, key, value))
        pid = os.fork()
        if pid == 0:
            same = bits(cattn.causal_attention(query, key, value)) == expected
            os._exit(0 if same else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert bits(cattn.causal_attention(query, key, value)) == expected


@needs_fork
@pytest.mark.promise("fork")
def test_fork_while_another_thread_computes() -> None:
    query, key, value = work()
    cattn.set_num_threads(2)
    expected = bits(cattn.causal_attention(query, key, value))
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            cattn.causal_attention(query, key, value)

    busy = threading.Thread(target=compute)
    busy.start()
    try:
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                same = bits(cattn.causal_attention(query, key, value)) == expected
                os._exit(0 if same else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        busy.join()


def test_callers_in_several_threads_get_the_same_bits() -> None:
    query, key, value = work()
    cattn.set_num_threads(2)
    expected = bits(cattn.causal_attention(query, key, value))
    wrong: list[int] = []

    def compute() -> None:
        for i in range(10):
            if bits(cattn.causal_attention(query, key, value)) != expected:
                wrong.append(i)

    callers = [threading.Thread(target=compute) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.promise("GIL")
def test_the_gil_is_free_during_a_long_call() -> None:
    query, key, value = work(4000)
    cattn.set_num_threads(1)
    steps = 0
    done = threading.Event()

    def count() -> None:
        nonlocal steps
        while not done.is_set():
            steps += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        most = 0
        for _ in range(50):  # a busy machine may not run the other thread; with the GIL taken it has one step at most
            before = steps
            cattn.causal_attention(query, key, value)
            most = max(most, steps - before)
            if most > 10:
                break
        assert most > 2, "the other thread did not run"
    finally:
        done.set()
        counter.join()


@pytest.mark.promise("Ctrl-C")
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "name", ["tile", "rows", "dropout", "softmax", "gradients", "gradients, drawn", "linear", "dequantize"]
)
def test_ctrl_c_stops_a_long_call(name: str, threads: int) -> None:
    """Within 0.1 s of processor time for each thread: on a busy machine the clock tells nothing."""
    call = long_calls()[name]
    if name in ("softmax", "dequantize"):  # one call may end before the signal: repeat it
        once = call

        def call() -> object:
            while True:
                once()

    delays: list[float] = []
    with cattn.num_threads(threads):
        while len(delays) < 3 and min(delays, default=1.0) >= 0.1:  # other threads of the tests may compute, too
            with ctrl_c_after(0.3) as sent:
                with pytest.raises(KeyboardInterrupt):
                    call()
                delays.append((time.process_time() - sent[0]) / threads)
        assert min(delays) < 0.1, delays
        x = np.eye(3)
        np.testing.assert_allclose(cattn.softmax(x).sum(-1), 1)  # the next call works


def test_no_call_raises_or_leaves_a_floating_point_flag() -> None:
    x = np.array([[1e300, np.nan], [np.inf, 5e-324]])
    with np.errstate(all="raise"):
        cattn.causal_attention(x, x, x)
        cattn.softmax(x)
        cattn.masked_softmax(x, is_causal=True, method="renormalize")
        cattn.dropout(x, 0.5, rng=1)
        cattn.causal_attention(*[np.ones((2, 2), np.float32)] * 3, alibi_slopes=[1e-300], sinks=[1e-300])
        assert np.float64(1) + 1 == 2, "a flag is left for the next operation of NumPy"


def test_more_threads_than_the_limit_count_as_the_limit() -> None:
    """The limit is 256. Gradients need memory for each thread."""
    x = np.ones((2, 40, 8))
    result = cattn.causal_attention(x, x, x, return_lse=True)
    with cattn.num_threads(2**31 - 1):
        assert cattn.get_num_threads() == 256
        grads = cattn.attention_backward(x, x, x, x, result.out, result.lse, is_causal=True)
    np.testing.assert_array_equal(
        grads.key, cattn.attention_backward(x, x, x, x, result.out, result.lse, is_causal=True).key
    )


AFFINITY = """
import os, numpy as np, cattn
two = sorted(os.sched_getaffinity(0))[:2]
x = np.ones((64, 200, 16))
cattn.set_num_threads(2)
for cpu in two:
    os.sched_setaffinity(0, [cpu])
    cattn.causal_attention(x, x, x)
workers = [int(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
assert any(os.sched_getaffinity(task) == {cpu} for task in workers), [os.sched_getaffinity(task) for task in workers]
"""


@pytest.mark.promise("small stacks")
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one processor, or not Linux"
)
def test_workers_follow_the_callers_processors() -> None:
    """A thread that is confined to one processor, then to another, takes its workers along."""
    child(AFFINITY, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1").check_returncode()


# For children that import cattn and the helpers of these tests.
PATH = os.pathsep.join([str(Path(cattn.__file__).parents[1]), str(ROOT / "tests")])

SMALL_STACK = """
import threading
from support import public_calls

def calls():
    for name, call in public_calls.CALLS.items():
        print(name, flush=True)
        call()
    print("done")

for call in public_calls.CALLS.values():  # imports what it needs, on the large stack
    call()
threading.stack_size(65536)
thread = threading.Thread(target=calls)
thread.start()
thread.join()
"""


@pytest.mark.promise("small stacks")
@pytest.mark.skipif(UNDER_SANITIZER, reason="sanitizers make frames larger")
def test_every_public_function_runs_on_a_stack_of_64_kib() -> None:
    done = child(SMALL_STACK, PYTHONPATH=PATH)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1:]) == (0, ["done"]), (lines[-1:], done.stderr)


# Paints the stack of a thread below what is in use, makes a call, and looks how far the paint is gone. A frame larger
# than the page that guards a stack may jump over it without a crash, so that a call that returns proves little.
PAINTED_STACK = """
import ctypes
import threading

from support import public_calls

KIB = 1024
IN_USE, PAINTED = 24 * KIB, 176 * KIB
libc = ctypes.CDLL(None)
libc.pthread_self.restype = ctypes.c_void_p

def top_of_stack():
    attributes = ctypes.create_string_buffer(256)
    assert libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes) == 0
    low, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert libc.pthread_attr_getstack(attributes, ctypes.byref(low), ctypes.byref(size)) == 0
    return low.value + size.value

def measure(name, call):
    first = top_of_stack() - IN_USE - PAINTED
    ctypes.memset(first, ord("Z"), PAINTED)
    call()
    left = ctypes.string_at(first, PAINTED)
    used[name] = IN_USE + len(left.lstrip(b"Z"))

used = {}
threading.stack_size(256 * KIB)
for name, call in public_calls.CALLS.items():
    call()
    thread = threading.Thread(target=measure, args=(name, call))
    thread.start()
    thread.join()
assert len(used) == len(public_calls.CALLS) and max(used.values()) > IN_USE
print({name: size // KIB for name, size in used.items() if size > 50 * KIB})
"""


@pytest.mark.promise("small stacks")
@pytest.mark.skipif(UNDER_SANITIZER or not sys.platform.startswith("linux"), reason="not a release build, or not Linux")
def test_no_public_function_needs_more_than_50_kib_of_stack(isa: str) -> None:
    """So on a stack of 64 KiB a fifth is left for the caller, the C library and other compilers' frames."""
    if isa == "gnu512":
        pytest.skip("only tests run this table, whose vectors are wider than the registers")
    done = child(PAINTED_STACK, CATTN_ISA=isa, PYTHONPATH=PATH)
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr


def test_a_num_threads_object_may_be_shared_by_threads() -> None:
    """Each thread gets its own previous number back."""
    shared, barrier, found = cattn.num_threads(2), threading.Barrier(2), {}

    def enter_first() -> None:
        with shared:
            barrier.wait()
            barrier.wait()
        found["first"] = cattn.get_num_threads()

    def enter_second() -> None:
        with cattn.num_threads(3):
            barrier.wait()
            with shared:
                found["inside"] = cattn.get_num_threads()
                barrier.wait()
            found["second"] = cattn.get_num_threads()

    before = cattn.get_num_threads()
    threads = [threading.Thread(target=f) for f in (enter_first, enter_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": before, "inside": 2, "second": 3}
    with pytest.raises(RuntimeError, match="num_threads was not entered in this thread"):
        shared.__exit__(None, None, None)
    assert pickle.loads(pickle.dumps(shared)).n == copy.copy(shared).n == 2


def test_a_block_that_is_never_entered_says_so() -> None:
    """Python drops the object at once, and nothing would have happened."""
    with pytest.warns(RuntimeWarning, match=r"num_threads\(3\) has no effect.*set_num_threads\(3\)") as caught:
        cattn.num_threads(3)
    assert caught[0].filename == __file__
    for wrong in ("3", 0):
        with pytest.raises((TypeError, ValueError)):
            cattn.num_threads(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'n'"):
        cattn.num_threads(N=3)  # type: ignore[call-arg]


# ---- signal handlers that call cattn ---------------------------------------------------------------------------------
# A handler that is slower than its timer: whenever it computes, the next signal comes. Each poll of a computation would
# run the handler once more, on top of it, until the stack ends; a small stack makes that quick.
NESTED = """
import signal
import time
import numpy as np
import cattn
from support.processes import ALARM, set_alarm

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
