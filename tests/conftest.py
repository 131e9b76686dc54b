"""What all tests share: instruction sets, dtypes, paths and threads as fixtures; a watch on the floating-point mode."""

import os
import platform
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

import cattn
from cattn import _cattn

os.environ.setdefault("MPLBACKEND", "Agg")  # pictures need no screen

# "ci" finds the same cases in every run, so that a red test is red for everybody; "long" is for a night. Fixtures that
# choose a table or a path may serve many examples, and the speed of the machine is no test result.
_common = hypothesis.settings(
    deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
hypothesis.settings.register_profile("ci", _common, derandomize=True, database=None)
hypothesis.settings.register_profile("dev", _common)
hypothesis.settings.register_profile("long", _common, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def table_names() -> list[str]:
    """Every instruction-set table of this build, also those that this machine cannot run."""
    return [table["name"] for table in _cattn._isa_list()]


def processor() -> str:
    """The processor's own name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker from which docs/promises.md is made."""
    config.addinivalue_line("markers", "promise(*names): the promises of docs/promises.toml that this test checks")


def pytest_report_header() -> list[str]:
    """What was compiled, what runs, and what is compiled but cannot be tested here."""
    tables = _cattn._isa_list()
    runs = [table["name"] for table in tables if table["usable"]]
    lacks = [table["name"] for table in tables if not table["usable"]]
    header = f"cattn tables: {' '.join(table_names())}; this machine runs {' '.join(runs)}"
    if lacks:
        header += f", not {' '.join(lacks)}, which its processor lacks"
    return [header, f"in use: {_cattn._get_isa()} on {processor()}"]


@pytest.fixture(params=table_names())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction-set table in turn; the one before is back afterwards."""
    name: str = request.param
    before = _cattn._get_isa()
    usable = {table["name"]: table["usable"] for table in _cattn._isa_list()}
    if not usable[name]:
        pytest.skip(f"this machine lacks {name}")
    _cattn._set_isa(name)
    yield name
    _cattn._set_isa(before)


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> type[np.floating]:
    """The two dtypes that are computed in."""
    return request.param


@pytest.fixture(params=["tile", "rows", "split", "tiny"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way of computing attention, forced; "tiny" raises ValueError where a call is too large for it."""
    _cattn._set_path(request.param)
    yield request.param
    _cattn._set_path("auto")


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Thread counts, also more than the machine has."""
    with cattn.num_threads(request.param):
        yield request.param


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random inputs: another stream for each test, the same in each run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """``normal(*shape, dtype=np.float32)``: standard normal numbers."""
    return lambda *shape, dtype=np.float32: rng.standard_normal(shape).astype(dtype)


def _keeps_subnormals() -> bool:
    # Arrays, not Python floats: nothing here may be folded to a constant.
    for kind, tiny in ((np.float32, 1e-40), (np.float64, 1e-310)):
        if not (np.full(1, tiny, kind) * np.ones(1, kind))[0] > 0:
            return False
    return True


@pytest.fixture(autouse=True)
def floating_point_mode() -> Iterator[None]:
    """No call may leave subnormals switched off, or rounding other than to nearest."""
    assert _keeps_subnormals(), "subnormals were off before the test"
    yield
    assert _keeps_subnormals(), "the test left subnormals switched off"
    third = np.ones(1) / np.full(1, 3.0)
    assert third[0] == 1 / 3, "the test left another rounding mode"
    assert (np.ones(1) + np.full(1, 2.0**-53))[0] == 1.0, "the test left another rounding mode"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C works here and in child processes: what a shell starts in the background inherits that it does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
