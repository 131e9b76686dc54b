"""What a bug report says about the system, the versions and the kernels (``python -m cattn info``), and their speed."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn
from cattn import _cattn
from cattn._cli.messages import encodable
from cattn._config import config_lines
from cattn.nn._files import printable

# Packages that exchange arrays with cattn, or that its extras install.
PACKAGES = ("torch", "ml_dtypes", "safetensors", "onnx", "matplotlib", "tqdm", "threadpoolctl")
VARIABLES = re.compile("CATTN_|OMP_|OPENBLAS_NUM|MKL_NUM|KMP_")


def _output(*command: str) -> str:
    """Return what a program prints on both streams, or nothing if it cannot be run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=5, check=False)
        return done.stdout.decode(errors="replace").strip()
    return ""


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def libc() -> str:
    """Return the C library and its version, or "unknown"."""
    if sys.platform != "linux":
        return "the system's"
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if name := os.confstr("CS_GNU_LIBC_VERSION"):  # such as "glibc 2.36"
            return name
    # The dynamic loader of musl is its libc, and prints the version if it is run without arguments.
    loader = re.search(r"\S*/(ld-musl-|libc\.musl-)\S+", _read("/proc/self/maps"))
    if loader:
        version = re.search(r"Version (\S+)", _output(loader[0]))
        return f"musl {version[1]}" if version else "musl"
    return " ".join(platform.libc_ver()).strip() or "unknown"


def cpu() -> str:
    """Return the name of the CPU, or of its architecture where the system has no name."""
    name = ""
    if sys.platform == "linux":
        facts = dict(re.findall(r"^([^\t:]+?)\s*: *(.*)$", _read("/proc/cpuinfo"), re.MULTILINE))
        arm = [facts[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in facts]
        name = facts.get("model name") or facts.get("cpu") or facts.get("uarch") or ""
        if not name and arm:
            name = f"{platform.machine()}, implementer, part, variant {' '.join(arm)}"
    elif sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return name or platform.processor() or platform.machine() or "unknown"


def _system() -> str:
    name = f"{platform.system()} {platform.release()} {platform.machine()}"
    with contextlib.suppress(OSError):
        return f"{name}, {platform.freedesktop_os_release().get('PRETTY_NAME', 'unknown distribution')}"
    if sys.platform == "darwin":
        return f"{name}, macOS {platform.mac_ver()[0]}"
    return name


def _installed() -> str:
    found = []
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found) or "none"


def facts() -> dict[str, Any]:
    """Return everything that is printed, the micro-tiles last."""
    config = cattn.show_config(mode="dicts")
    tables, threads = config.pop("tables"), config.pop("num_threads")
    del config["machine"], config["platform"]  # `system` and `libc` have them
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if VARIABLES.match(name)]
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    result = {
        "system": _system(),
        "libc": libc(),
        "cpu": cpu(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": config["numpy"],
        "cattn": config.pop("version"),
        "instruction_set": config.pop("instruction_set"),
        "bit_contract": config.pop("bit_contract"),
        "threads": f"{threads} on {cpus} CPUs",
        "environment": " ".join(variables) or "no variable set",
        "packages": _installed(),
    }
    return {**result, **{key: entry for key, entry in config.items() if key not in result}, "tables": tables}


def run() -> None:
    """Carry out the command."""
    print("\n".join(encodable(printable(line)) for line in config_lines(facts())))


SHAPE = (1, 12, 1024, 64)
RUNS = 5
PATIENCE = 1.5  # seconds. All runs of the scalar table would take longer.
# BLAS libraries read these when they are loaded. Both sides of the comparison use one thread.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1")


def textbook(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    attn_mask: NDArray[Any] | None = None,
    is_causal: bool = False,
) -> NDArray[Any]:
    """Attention as a textbook writes it, scores in full."""
    scores = query @ key.swapaxes(-1, -2) / query.dtype.type(np.sqrt(query.shape[-1]))
    for mask in (np.tri(*scores.shape[-2:], dtype=np.bool_) if is_causal else None, attn_mask):
        if mask is not None:
            scores = np.where(mask, scores, scores.dtype.type(-np.inf)) if mask.dtype == bool else scores + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights @ value)


def _seconds(function: Callable[..., Any], arrays: list[NDArray[Any]]) -> float:
    start = time.perf_counter()
    function(*arrays)
    return time.perf_counter() - start


def compare() -> tuple[float, float]:
    """Return the median seconds of cattn on one thread and of NumPy, measured alternately after a first run."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(SHAPE, np.float32) for _ in range(3)]
    cattn_seconds: list[float] = []
    numpy_seconds: list[float] = []
    until = time.perf_counter() + PATIENCE
    with cattn.num_threads(1):
        while len(cattn_seconds) < 2 or (len(cattn_seconds) <= RUNS and time.perf_counter() < until):
            cattn_seconds.append(_seconds(cattn.causal_attention, arrays))
            numpy_seconds.append(_seconds(partial(textbook, is_causal=True), arrays))
    return statistics.median(cattn_seconds[1:]), statistics.median(numpy_seconds[1:])


def measure() -> str:
    """Return three lines about the kernels in use and their speed."""
    try:  # in a process of its own, so that NumPy's threads can be limited
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env={**os.environ, **ONE_THREAD},
            capture_output=True,
            check=True,
            timeout=60,
        )
        cattn_seconds, numpy_seconds = json.loads(done.stdout)
        note = "one thread: "
    except (OSError, subprocess.SubprocessError, ValueError):
        cattn_seconds, numpy_seconds = compare()
        note = "cattn on one thread, NumPy as configured:\n"
    threads = cattn.get_num_threads()
    ratio = numpy_seconds / cattn_seconds
    return (
        f"This machine: {_cattn._get_isa()} kernels, {threads} thread{'s' if threads != 1 else ''}.\n"
        f"Causal attention at T = {SHAPE[-2]}, {SHAPE} float32,\n"
        f"{note}{1e3 * cattn_seconds:.1f} ms, {ratio:.1f} times as fast as textbook NumPy "
        f"({1e3 * numpy_seconds:.0f} ms)."
    )


if __name__ == "__main__":
    print(json.dumps(compare(), allow_nan=False))
