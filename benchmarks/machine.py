"""What a result belongs to: the machine, its memory, the versions, the date; and the folder where results are kept."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import cattn

RESULTS = Path(__file__).parent / "results"
PEERS = ("numpy", "torch", "jax", "onnxruntime")


def cpu_name() -> str:
    """Return the CPU's name as the system gives it; family and model tell virtual machines' apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in told:
        return platform.processor() or platform.machine()
    if {"cpu family", "model"} <= told.keys():
        return f"{told['model name']} (family {told['cpu family']}, model {told['model']})"
    return told["model name"]


def version(package: str) -> str | None:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """Describe the machine and the versions."""
    versions = {peer: version(peer) for peer in PEERS}
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "instruction_set": cattn.show_config("dicts")["instruction_set"],
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cattn": cattn.__version__,
        **{peer: number for peer, number in versions.items() if number is not None},
    }


def keep_memory() -> None:
    """Have malloc keep what it once got, from here to the end of the process (glibc; elsewhere nothing happens).

    Who writes gigabytes of scores is else timed by how the kernel hands out pages, which on a virtual machine changes
    from call to call by several times.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    trim_threshold, mmap_max = -1, -4  # malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


def save(folder: Path, group: str, rows: list[dict[str, Any]], **beside: Any) -> Path:
    """Keep the rows of a group as JSON, a line each, and what belongs to all of them beside."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{group}.json"
    about = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in {"machine": facts(), **beside}.items()]
    lines = ",\n".join(f"  {json.dumps(_short(row))}" for row in rows)
    path.write_text("{\n" + ",\n".join([*about, f' "rows": [\n{lines}\n ]']) + "\n}\n")
    return path


def _short(value: Any) -> Any:
    """Return a value with its floats rounded to six digits, more than any measurement has."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def load(folder: Path, group: str) -> dict[str, Any] | None:
    """Return what was kept of a group."""
    path = folder / f"{group}.json"
    return json.loads(path.read_text()) if path.exists() else None
