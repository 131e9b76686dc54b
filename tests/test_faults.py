"""Faults: no memory, Ctrl-C at any moment, fork and exit in the middle of a call, a second interpreter."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cattn

HERE = Path(__file__).parent
UNDER_SANITIZER = any(name in os.environ.get("LD_PRELOAD", "") for name in ("libasan", "libtsan"))


def python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another Python, which imports the same cattn and the helpers of these tests."""
    path = os.pathsep.join([str(Path(cattn.__file__).parents[1]), str(HERE)])
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


# ---- no memory -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def failing_allocations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which allocations fail."""
    if platform.libc_ver()[0] != "glibc" or UNDER_SANITIZER:
        pytest.skip("takes the place of glibc's allocator")
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip("needs a C compiler")
    shim = tmp_path_factory.mktemp("shim") / "failing_allocations.so"
    flags = ["-O1", "-fno-optimize-sibling-calls", "-shared", "-fPIC", "-o", str(shim)]
    subprocess.run([compiler, str(HERE / "data/failing_allocations.c"), *flags], check=True, timeout=60)
    return {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}


def test_every_allocation_may_fail(failing_allocations: dict[str, str]) -> None:
    done = python(HERE / "fail_every_allocation.py", **failing_allocations)
    assert done.returncode == 0, done.stderr
    failures = json.loads(done.stdout)
    # scratch of callers and workers, of the split path, turns of gradients, threads; results, and what holds them
    assert failures.keys() == {"posix_memalign", "malloc", "calloc", "pthread_create", "within"}
    assert sum(failures.values()) > 250


@pytest.mark.parametrize(
    ("fault", "says"), [("leak", "blocks leak"), ("write", "an input was written"), ("lie", "another result")]
)
def test_a_fault_without_memory_would_show(failing_allocations: dict[str, str], fault: str, says: str) -> None:
    done = python(HERE / "fail_every_allocation.py", fault, **failing_allocations)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(says)
