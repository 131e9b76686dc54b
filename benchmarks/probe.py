"""The limits of this machine, measured in the run that they are compared with: FMA peak and read bandwidth."""

from __future__ import annotations

import ctypes
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

SOURCE = Path(__file__).with_name("probe.c")
FLAGS = {  # instruction set: flags, bytes of a vector
    "avx512": (["-mavx512f", "-mfma"], 64),
    "avx2": (["-mavx2", "-mfma"], 32),
}
MOMENT = 2e-3  # seconds that one probe takes


def _flags() -> tuple[list[str], int]:
    return FLAGS.get(cattn.show_config("dicts")["instruction_set"], ([], 16))


def compile_probe(folder: Path, compiler: str | None = None) -> Path | None:
    """Return the compiled probe, or None with a word why not."""
    flags, width = _flags()
    command = shlex.split(compiler or sysconfig.get_config_var("CC") or "cc")
    library = folder / "probe.so"
    try:
        subprocess.run(
            [*command, "-O2", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", *flags, f"-DBYTES={width}",
             str(SOURCE), "-o", str(library)],
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
            return loops * 16 * lanes * 2.0

        return work

    def read(self, *arrays: NDArray[Any]) -> Callable[[], float]:
        """Return a probe that reads the arrays once and returns their bytes."""
        assert all(array.flags.c_contiguous for array in arrays)

        def work() -> float:
            for array in arrays:
                self._library.read_bytes(array.ctypes.data, array.nbytes)
            return float(sum(array.nbytes for array in arrays))

        return work


def check_sum(probe: Probe, array: NDArray[np.uint64]) -> int:
    """Return the sum that the bare read computes, to see that it reads everything."""
    return int(probe._library.read_bytes(array.ctypes.data, array.nbytes))
