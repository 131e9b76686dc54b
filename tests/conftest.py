"""Fixtures of all tests: instruction sets, dtypes, paths, thread counts; and a check of the floating-point mode."""

import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

import cattn
from cattn import _cattn
from support import QUICK_CASES, number_of

os.environ.setdefault("MPLBACKEND", "Agg")  # matplotlib draws without a screen

# "ci" draws the same examples in every run, so that a failure can be repeated anywhere; "long" is for a night. One
# fixture may serve many examples: those that choose a kernel table or a path keep their choice. There is no deadline,
# and no check of slow choices, because the speed of the machine is no test result.
_common = hypothesis.settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("ci", _common, derandomize=True, database=None)
hypothesis.settings.register_profile("dev", _common)
hypothesis.settings.register_profile("quick", _common, derandomize=True, database=None, max_examples=33)
hypothesis.settings.register_profile("long", _common, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# The name of a case that runs on a table beside the one in use.
SLOWER = "a slower table"
# Tests of what stands beside the library, and takes the quick form a fifth of its time.
BESIDE = ("test_benchmarks.py", "test_build.py")
# The folders whose tests compare bits.
BITS = ("bits", "equivalences")


def table_names() -> list[str]:
    """Return the names of all kernel tables of this build, including those that this machine cannot run."""
    return [table["name"] for table in _cattn._isa_list()]


def processor() -> str:
    """Return the name of the processor, or of its architecture where the system does not give a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker from which docs/promises.md is made; the quick form draws a third of the examples."""
    if is_quick(config) and "HYPOTHESIS_PROFILE" not in os.environ:
        hypothesis.settings.load_profile("quick")
    config.addinivalue_line("markers", "promise(*names): the promises of docs/promises.toml that this test checks")


def pytest_report_header() -> list[str]:
    """Report the compiled kernel tables, and which of them this machine can run."""
    tables = _cattn._isa_list()
    runs = [table["name"] for table in tables if table["usable"]]
    lacks = [table["name"] for table in tables if not table["usable"]]
    header = f"cattn tables: {' '.join(table_names())}; this machine runs {' '.join(runs)}"
    if lacks:
        header += f", not {' '.join(lacks)}, which its processor lacks"
    return [header, f"in use: {_cattn._get_isa()} on {processor()}"]


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Write no letter for a subtest that passes: a test has one letter, and its failures are reported as ever."""
    passed = isinstance(report, pytest.SubtestReport) and report.when == "call" and report.passed
    if not passed or hasattr(report, "wasxfail") or config.get_verbosity() > 0:
        return None
    return "subtests passed", "", "SUBPASSED"


def slower_tables() -> list[str]:
    """Return "avx2" where this machine can run it beside the table in use.

    No other one: the tests compare with `scalar` anyway, and like `gnu128` it takes ten times as long. tools/machines
    compares the bits of both in each run of CI, and `--nightly` runs all tests on every table.
    """
    runs = [table["name"] for table in _cattn._isa_list() if table["usable"]]
    return ["avx2"] if "avx2" in runs and not _cattn._get_isa().startswith("avx2") else []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the third form; the first two are `pytest` and `pytest -m ""`."""
    parser.addoption(
        "--nightly",
        action="store_true",
        help="also run tests marked `long`, and run tests of kernel tables on each table",
    )


def is_quick(config: pytest.Config) -> bool:
    """Return whether this is the quick form."""
    return bool(config.option.markexpr == "not thorough")


def compares_bits(metafunc: pytest.Metafunc) -> bool:
    """Return whether a test compares bits, by its folder or its name."""
    words = metafunc.definition.name.split("_")
    return metafunc.definition.path.parent.name in BITS or not {"bit", "bits", "table", "tables"}.isdisjoint(words)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the kernel tables of tests that take `isa`.

    The quick form runs on the table in use. `-m ""` adds a slower table where bits are compared: whatever else is
    right on one table is right on all, for their bits are the same. `--nightly` has them all.
    """
    given = any("isa" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "isa" not in metafunc.fixturenames or given:
        return
    names = [_cattn._get_isa()]
    if metafunc.config.option.nightly:
        names = table_names()
    elif not is_quick(metafunc.config) and slower_tables() and compares_bits(metafunc):
        names.append(SLOWER)
    metafunc.parametrize("isa", names, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before the tests marked `thorough` are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `long`, and mark as `thorough` all but a few cases of each test function.

    Benchmarks and the build are thorough as a whole, and so are cases that the quick form does not have: those on a
    slower table. A random test runs in both forms: the quick form draws less.
    """
    if not config.option.nightly:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        draws_less = not is_quick(config) and hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        not_quick = given.get("share") == "others" or given.get("isa") == SLOWER
        if not_quick or item.path.name in BESIDE or draws_less:
            item.add_marker(pytest.mark.thorough)
        else:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same_function in cases.values():
        for item in sorted(same_function, key=lambda item: number_of(item.nodeid))[QUICK_CASES:]:
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Reset PyTorch's compiler after each test.

    It compiles a function eight times and then runs it as it is, without a word, so that a later test would compile
    nothing and compare a function with itself.
    """
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a kernel table, which is in use during the test; see `pytest_generate_tests`."""
    name: str = request.param
    if name == SLOWER:
        name = slower_tables()[0]
    before = _cattn._get_isa()
    usable = {table["name"]: table["usable"] for table in _cattn._isa_list()}
    if not usable[name]:
        pytest.skip(f"this machine lacks {name}")
    _cattn._set_isa(name)
    yield name
    _cattn._set_isa(before)


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> type[np.floating]:
    """The two dtypes of the computation."""
    return request.param


@pytest.fixture(params=["tile", "rows", "split", "tiny"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each path of attention, forced. "tiny" raises ValueError where a call is too large for it."""
    _cattn._set_path(request.param)
    yield request.param
    _cattn._set_path("auto")


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Thread counts, some larger than the machine has processors."""
    with cattn.num_threads(request.param):
        yield request.param


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator for inputs. Its seed is the test's name: each test has its own numbers, the same in every folder."""
    name = f"{request.node.path.name}::{request.node.nodeid.partition('::')[2]}"
    return np.random.default_rng(list(name.encode()))


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """A function ``normal(*shape, dtype=np.float32)`` that returns standard normal numbers."""
    return lambda *shape, dtype=np.float32: rng.standard_normal(shape).astype(dtype)


def _keeps_subnormals() -> bool:
    # Arrays, not Python floats: the compiler of Python folds constants.
    for kind, tiny in ((np.float32, 1e-40), (np.float64, 1e-310)):
        if not (np.full(1, tiny, kind) * np.ones(1, kind))[0] > 0:
            return False
    return True


@pytest.fixture(autouse=True)
def floating_point_mode() -> Iterator[None]:
    """Check that the test leaves subnormals switched on and rounding to nearest."""
    assert _keeps_subnormals(), "subnormals were off before the test"
    yield
    assert _keeps_subnormals(), "the test left subnormals switched off"
    third = np.ones(1) / np.full(1, 3.0)
    assert third[0] == 1 / 3, "the test left another rounding mode"
    assert (np.ones(1) + np.full(1, 2.0**-53))[0] == 1.0, "the test left another rounding mode"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Switch Ctrl-C on, also for child processes: a process that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
