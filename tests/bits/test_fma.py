"""cattn's own fused multiply-add, for C libraries whose fma() is wrong, against the one of this machine."""

import os
import re
import shutil
from pathlib import Path

import pytest

from support import ROOT
from support.processes import run_command

# Of the program's results, on every machine.
HASHES = {"fma": "734b7981b6393354", "fmaf": "00098094f593f017"}


def test_the_own_fma_rounds_as_the_one_of_the_c_library(tmp_path: Path) -> None:
    """All triples of special values and millions of random ones; the last column says that they are hard ones."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip("needs a C compiler")
    program = tmp_path / "fma"
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", f"-I{ROOT / 'csrc'}"]
    command = [compiler, *flags, ROOT / "tests" / "core" / "fma.c", "-o", program, "-lm"]
    run_command(command, check=True)
    done = run_command([program, "2000000"], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
    first, *lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["fma", "fmaf"]
    for line in lines:
        found = re.fullmatch(r"\w+: (\d+) triples, hash (\w{16}), wrong: library (\d+), plain (\d+)", line)
        assert found is not None
        n, results, library, plain = found.groups()
        assert int(n) > 2_000_000
        assert results == HASHES[line.split(":")[0]]
        assert "own" in first or int(library) == 0
        assert int(plain) > 50_000
