"""Builds every wheel on one Linux machine, checks them and tries what can run here.

    python tools/wheels [long] [TARGET...]    for example: python tools/wheels musllinux_x86_64 windows_amd64

The wheels and the source distribution are left in dist/. zig (the package ziglang) is compiler, linker and C library of
every target. Needs the extra "wheels", Python's headers and GCC. Where they are installed, QEMU (Debian: qemu-user
libc6-arm64-cross) and wine run the programs of other targets.

One wheel is built twice and must have the same bytes; long: every wheel, and all tests on x86-64.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build import ROOT, Wheel, WheelError, build_wheel, make_sdist, pythons, run
from checks import CHECKS
from targets import TARGETS
from trials import compare_bits, try_wheel

DIST = ROOT / "dist"


def table(rows: list[list[str]]) -> str:
    """Return the rows with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" | ".join(f"{word:{n}}" for word, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(words: list[str]) -> None:
    """Build, check, try; print one table."""
    long = "long" in words
    names = [word for word in words if word != "long"]
    if unknown := sorted(set(names) - {target.name for target in TARGETS}):
        sys.exit(f"tools/wheels: no target {unknown}; there are {', '.join(target.name for target in TARGETS)}")
    start = time.monotonic()

    def step(text: str) -> None:
        print(f"== {text} ({time.monotonic() - start:.0f} s)", flush=True)

    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="cattn-wheels-") as name:
        work = Path(name)
        step("source distribution")
        sdist = make_sdist(DIST)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist)
        wheels: list[tuple[Wheel, str]] = []
        failures: list[str] = []
        for python in pythons(work):
            for target in TARGETS:
                if names and target.name not in names:
                    continue
                if python.free_threaded and target.system == "windows":
                    print(f"no cp314t wheel for {target.name}: it needs the import library of python314t.dll")
                    continue
                step(f"{target.name}, Python {python.variables['py_version_short']}")
                wheel = build_wheel(target, python, sdist, DIST, work)
                same = "-"
                if long or not wheels:
                    again = build_wheel(target, python, sdist, work / "again", work)
                    same = "yes" if again.path.read_bytes() == wheel.path.read_bytes() else "NO"
                    if same == "NO":
                        failures.append(f"{wheel.path.name} has other bytes when built again")
                wheels.append((wheel, same))
        rows = [["wheel", "KiB", *CHECKS, "same twice", "bits.c", "tests"]]
        step("checks")

        def attempt(check: Callable[..., str], *arguments: object) -> str:
            try:
                return check(*arguments)
            except (WheelError, OSError, ValueError, KeyError) as failure:
                failures.append(f"{check.__name__}: {failure}")
                return "FAILED"

        with ThreadPoolExecutor(2) as pool:
            checked = list(pool.map(lambda entry: [attempt(check, entry[0]) for check in CHECKS.values()], wheels))
        step("bits and tests")
        for (wheel, same), results in zip(wheels, checked, strict=True):
            bits = attempt(compare_bits, wheel, 400 if long else 24)
            tests = attempt(try_wheel, wheel, long, work)
            rows.append([wheel.path.name, f"{wheel.size / 1024:.0f}", *results, same, bits, tests])
    print(table(rows))
    step("done")
    if failures:
        sys.exit("\n".join(["tools/wheels:", *failures]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WheelError as failure:
        sys.exit(f"tools/wheels: {failure}")
