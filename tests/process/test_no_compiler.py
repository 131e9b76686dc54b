"""Without a compiler the build stops at once, and the error says how to get one."""

import os
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.processes import run_command

pytest.importorskip("setuptools")

CURES = {"Debian": "apt install gcc", "Fedora": "dnf install gcc", "macOS": "xcode-select", "Windows": "Visual Studio"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not use CC")
@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_a_build_without_a_compiler_says_how_to_get_one(missing: str, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    if missing == "headers":
        compiler.write_text(
            "#!/bin/sh\necho 'probe.c:1: fatal error: Python.h: No such file or directory' >&2\nexit 1\n"
        )
        compiler.chmod(0o755)
    done = run_command(
        [sys.executable, "setup.py", "build", "--build-base", str(tmp_path / "build")],
        cwd=ROOT, env={**os.environ, "CC": str(compiler)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: cattn needs a C compiler and Python's headers (")
    assert str(compiler) in error
    assert all(system in error and cure in error for system, cure in CURES.items())
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) < 12, "the error must not drown"
    assert not any(line.startswith(("copying", "creating build")) for line in lines)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("build/lib*/**/*.py"))
