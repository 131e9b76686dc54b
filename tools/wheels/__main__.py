"""Builds every wheel on one Linux machine, checks them and tries what can run here.

    python tools/wheels [long] [TARGET...]    for example: python tools/wheels musllinux_x86_64 windows_amd64

The wheels and the source distribution are left in dist/. zig (the package ziglang) is compiler, linker and C library of
every target. Needs the group "wheels", Python's headers and GCC. Where they are installed, QEMU (Debian: qemu-user
libc6-arm64-cross) and wine run the programs of other targets.

One wheel is built twice and must have the same bytes; long: every wheel, and all tests on x86-64.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build import ROOT, TARGETS, Python, Target, WheelError, build_wheel, make_sdist, pythons, run
from checks import CHECKS, compare_bits, try_wheel

DIST = ROOT / "dist"


def table(rows: list[list[str]]) -> str:
    """Return the rows with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" | ".join(f"{word:{n}}" for word, n in zip(row, widths, strict=True)).rstrip() for row in rows)


class Job:
    """Builds one wheel, checks it and tries it: a row of the table, and what failed."""

    def __init__(self, target: Target, python: Python, *, twice: bool, long: bool) -> None:
        self.target, self.python, self.twice, self.long = target, python, twice, long
        self.row: list[str] = []
        self.failures: list[str] = []

    def attempt(self, check: Callable[..., str], *arguments: object) -> str:
        """Return what the check says, or FAILED."""
        try:
            return check(*arguments)
        except (WheelError, OSError, ValueError, KeyError) as failure:
            self.failures.append(f"{check.__name__}: {failure}")
            return "FAILED"

    def run(self, sdist: Path, work: Path) -> None:
        """Do it."""
        start = time.monotonic()
        wheel = build_wheel(self.target, self.python, sdist, DIST, work)
        same = "-"
        if self.twice:
            again = build_wheel(self.target, self.python, sdist, work / "again", work)
            same = "yes" if again.path.read_bytes() == wheel.path.read_bytes() else "NO"
            if same == "NO":
                self.failures.append(f"{wheel.path.name} has other bytes when built again")
        built = time.monotonic() - start
        self.row = [wheel.path.name, f"{wheel.size / 1024:.0f}"]
        self.row += [self.attempt(check, wheel) for check in CHECKS.values()]
        self.row += [same, self.attempt(compare_bits, wheel, 400 if self.long else 24)]
        self.row.append(self.attempt(try_wheel, wheel, self.long, work))
        print(
            f"{wheel.path.name}: built in {built:.0f} s, tried in {time.monotonic() - start - built:.0f} s", flush=True
        )


def main(words: list[str]) -> None:
    """Build, check, try, one wheel on each processor; print one table."""
    long = "long" in words
    names = [word for word in words if word != "long"]
    if unknown := sorted(set(names) - {target.name for target in TARGETS}):
        sys.exit(f"tools/wheels: no target {unknown}; there are {', '.join(target.name for target in TARGETS)}")
    start = time.monotonic()
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="cattn-wheels-") as name:
        work = Path(name)
        sdist = make_sdist(DIST)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist)
        jobs: list[Job] = []
        for python in pythons(work):
            for target in TARGETS:
                if names and target.name not in names:
                    continue
                if python.free_threaded and target.system == "windows":
                    print(f"no cp314t wheel for {target.name}: it needs the import library of python314t.dll")
                    continue
                jobs.append(Job(target, python, twice=long or not jobs, long=long))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for done in [pool.submit(job.run, sdist, work) for job in jobs]:
                done.result()
    print(table([["wheel", "KiB", *CHECKS, "same twice", "bits.c", "tests"], *(job.row for job in jobs)]))
    print(f"done in {time.monotonic() - start:.0f} s")
    if failures := [failure for job in jobs for failure in job.failures]:
        sys.exit("\n".join(["tools/wheels:", *failures]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WheelError as failure:
        sys.exit(f"tools/wheels: {failure}")
