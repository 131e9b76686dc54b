"""``python -m cattn info``: what a bug report needs to say about the system, the versions and the kernels."""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cattn
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
