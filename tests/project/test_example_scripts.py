"""The scripts of examples/ that the pages on clients show: they agree with cattn, before and after the change."""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from support import ROOT
from support.processes import run_command

EXAMPLES = ROOT / "examples"
MODELS = runpy.run_path(str(EXAMPLES / "numpy_models.py"))


@pytest.mark.parametrize("case", MODELS["cases"](70), ids=lambda case: case.name)
def test_a_model_gives_the_same_numbers_by_cattn(case: Any) -> None:
    plain, ours = case.plain(), case.by_cattn()
    for a, b in zip(plain, ours, strict=True) if isinstance(plain, tuple) else [(plain, ours)]:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_the_page_shows_the_code_of_the_script() -> None:
    """The page removes the indented lines of the functions before the change."""
    page = (EXAMPLES.parent / "docs" / "in_your_model.md").read_text("utf-8")
    script = {line.strip() for line in (EXAMPLES / "numpy_models.py").read_text("utf-8").splitlines()}
    removed = [line[1:].strip() for line in page.splitlines() if line.startswith("-    ")]
    assert len(removed) >= 10
    assert [line for line in removed if line not in script] == []


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
@pytest.mark.parametrize("processes", [1, 4])
def test_the_ring_of_mpi_processes_agrees_with_one_call(processes: int) -> None:
    """The script itself compares. Open MPI wants to be asked for more processes than cores, and for the user root."""
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    crowded = ["--oversubscribe"] if "Open MPI" in version or "OpenRTE" in version else []
    run = run_command(
        ["mpirun", *crowded, "-n", str(processes), sys.executable, str(EXAMPLES / "ring_attention.py")],
        capture_output=True, text=True, env={**os.environ, **variables},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{processes} processes, {processes * 512} tokens, largest difference")
