"""What cattn and the tests' log say about the machine they run on. The other machines are tools/machines' business."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import conftest
from cattn import _cattn
from support import ROOT
from support.processes import run_command


@pytest.mark.promise("AVX-512 is tested")
def test_the_log_names_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [{"name": "scalar", "usable": True}, {"name": "avx2", "usable": True}, {"name": "avx512", "usable": False}]
    monkeypatch.setattr(_cattn, "_isa_list", lambda: tables)
    monkeypatch.setattr(_cattn, "_get_isa", lambda: "avx2")
    assert conftest.pytest_report_header() == [
        "cattn tables: scalar avx2 avx512; this machine runs scalar avx2, not avx512, which its processor lacks",
        f"in use: avx2 on {conftest.processor()}",
    ]
    assert conftest.processor()


@pytest.mark.promise("AVX-512 is tested")
@pytest.mark.skipif(os.environ.get("CATTN_TABLES") != "all", reason="a build for this machine has fewer tables")
def test_every_table_is_compiled_wherever_it_can_be() -> None:
    """Also the one that the processor lacks: the compiler at least has seen it."""
    names = {table["name"] for table in _cattn._isa_list()}
    assert names >= {"scalar", "gnu128"}
    if platform.machine() in ("x86_64", "AMD64"):
        assert names >= {"avx2", "avx512_256", "avx512"}
        in_place = Path(_cattn.__file__).resolve().is_relative_to(ROOT)
        assert ("gnu512" in names) == in_place  # for the tests only, not in wheels


AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDS = {"avx2": AVX2, "avx512_256": AVX512, "avx512": AVX512}
NEEDS |= {name: AVX512 | {"avx512_bf16"} for name in ("avx512_256_bf16", "avx512_bf16_few", "avx512_bf16")}
NEEDS |= {"avx512_amx": AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}}


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Return the features of this processor that Linux knows and supports."""
    file = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not file.exists():
        pytest.skip("needs the flags of an x86 processor in /proc/cpuinfo")
    return set(next(line for line in file.read_text().splitlines() if line.startswith("flags")).split())


def test_the_detected_features_are_those_that_the_system_lists(flags: set[str]) -> None:
    usable = {table["name"]: table["usable"] for table in _cattn._isa_list()}
    assert usable["scalar"]
    for name in NEEDS.keys() & usable.keys():
        assert usable[name] == (NEEDS[name] <= flags)


def import_errors(isa: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", "import cattn"]
    environment = {**os.environ, "CATTN_ISA": isa}
    return run_command(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("table", [table for table in _cattn._isa_list() if table["usable"]], ids=lambda t: t["name"])
def test_a_table_without_fma_warns_on_a_processor_with_fma(table: dict[str, Any], flags: set[str]) -> None:
    done = import_errors(table["name"])
    assert done.returncode == 0
    if table["has_fma"] or "fma" not in flags:
        assert done.stderr == ""
        return
    assert f"RuntimeWarning: the kernel table '{table['name']}' is in use because CATTN_ISA selects it" in done.stderr
    assert "usable: scalar, " in done.stderr
    failed = import_errors(table["name"], "-Werror::RuntimeWarning")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("RuntimeWarning: the kernel table ")


def test_the_default_table_does_not_warn() -> None:
    if os.environ.get("CATTN_TABLES") not in (None, "", "all"):
        pytest.skip("CATTN_TABLES chooses")
    assert import_errors("").stderr == ""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git applies the patches to a clone")
def test_the_planted_bugs_fit_the_source() -> None:
    """tools/sanitize plants them, to see that its checks find them."""
    names = re.findall(r"^=== (\w+):", (ROOT / "tools" / "planted").read_text("utf-8"), re.MULTILINE)
    assert len(names) > 3
    for name in names:
        patch = subprocess.run([ROOT / "tools" / "planted", name], capture_output=True, check=True).stdout
        done = subprocess.run(["git", "apply", "--check"], cwd=ROOT, input=patch, capture_output=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr.decode()}"
