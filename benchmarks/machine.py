"""The machine: its name and versions, its malloc, and its limits (FMA peak, read bandwidth)."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn

from .contestants import PEERS

PROBE = Path(__file__).with_name("probe.c")
FLAGS = {  # instruction set: compiler flags, bytes of a vector
    **dict.fromkeys(
        ("avx512", "avx512_256", "avx512_256_bf16", "avx512_bf16_few", "avx512_bf16", "avx512_amx"),
        (["-mavx512f", "-mfma"], 64),
    ),
    **dict.fromkeys(("avx2_4x2", "avx2"), (["-mavx2", "-mfma"], 32)),
}
MOMENT = 2e-3  # seconds of one call of a probe


def cpu_name() -> str:
    """Return the CPU's name; family and model tell apart virtual machines that hide the model's number.

    It ends in "without AVX-512" where tools/avx2 hides these instructions.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    name = fields["model name"]
    if {"cpu family", "model"} <= fields.keys():
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    hides = cattn.show_config("dicts")["instruction_set"].startswith("avx2")
    return f"{name}, without AVX-512" if hides and "avx512f" in fields.get("flags", "").split() else name


def version(package: str) -> str | None:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """Describe the machine and the versions."""
    versions = {package: version(package) for package in ("numpy", *(peer.package for peer in PEERS.values()))}
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "instruction_set": cattn.show_config("dicts")["instruction_set"],
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cattn": cattn.__version__,
        **{package: number for package, number in versions.items() if number is not None},
    }


def keep_memory() -> None:
    """Make malloc keep the memory that is freed, until this process ends (glibc; elsewhere nothing happens).

    New pages cost a virtual machine several times more in one call than in the next. A contestant that writes gigabytes
    of scores would be timed by them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    trim_threshold, mmap_max = -1, -4  # malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


# ---- limits --------------------------------------------------------------------------------------------------------
def _flags() -> tuple[list[str], int]:
    return FLAGS.get(cattn.show_config("dicts")["instruction_set"], ([], 16))


def compile_probe(folder: Path, compiler: str | None = None) -> Path | None:
    """Return the compiled probe, or None after printing the reason."""
    flags, width = _flags()
    command = shlex.split(compiler or sysconfig.get_config_var("CC") or "cc")
    library = folder / "probe.so"
    try:
        subprocess.run(
            [*command, "-O2", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", *flags, f"-DBYTES={width}",
             str(PROBE), "-o", str(library)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no limits measured: the probe did not compile ({getattr(error, 'stderr', None) or error})")
        return None
    return library


class Probe:
    """The compiled probe. `limits` maps "float32" and "float64" to callables that return the flops they did."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        _, width = _flags()
        for name in ("peak_float", "peak_double"):
            function = getattr(self._library, name)
            function.argtypes, function.restype = [ctypes.c_long], ctypes.c_double
        self._library.read_bytes.argtypes = [ctypes.c_void_p, ctypes.c_long]
        self._library.read_bytes.restype = ctypes.c_uint64
        self.limits: dict[str, Callable[[], float]] = {
            "float32": self._peak(self._library.peak_float, width // 4),
            "float64": self._peak(self._library.peak_double, width // 8),
        }

    def _peak(self, function: Any, lanes: int) -> Callable[[], float]:
        start = time.perf_counter()
        function(100_000)
        loops = max(1000, int(100_000 * MOMENT / (time.perf_counter() - start)))

        def work() -> float:
            function(loops)
            return loops * self._library.chains() * lanes * 2.0

        return work

    def read(self, *arrays: NDArray[Any]) -> Callable[[], float]:
        """Return a callable that reads the arrays once and returns their bytes."""
        assert all(array.flags.c_contiguous for array in arrays)

        def work() -> float:
            for array in arrays:
                self._library.read_bytes(array.ctypes.data, array.nbytes)
            return float(sum(array.nbytes for array in arrays))

        return work

    def check_sum(self, array: NDArray[np.uint64]) -> int:
        """Return the sum that the read computes. A test compares it, to see that everything is read."""
        return int(self._library.read_bytes(array.ctypes.data, array.nbytes))
