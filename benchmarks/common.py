"""What every benchmark shares: interleaved timing, the machine's own peak, and how results are kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass
class Timing:
    """Seconds of one contestant over the rounds of one run."""

    name: str
    median: float
    best: float
    spread: float  # (third quartile - first quartile) / median


def interleave(contestants: dict[str, Callable[[], object]], *, rounds: int, warm_up: int = 2) -> dict[str, Timing]:
    """Time the contestants in turn, round by round, so that a change of the machine's mood meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        for _ in range(warm_up):
            call()
    for _ in range(rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    timings = {}
    for name, times in seconds.items():
        middle = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (middle, middle, middle)
        timings[name] = Timing(name, middle, min(times), (high - low) / middle)
    return timings


def cpu_name() -> str:
    """Return the CPU's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that a result belongs to."""
    import numpy as np

    import cattn

    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cattn": cattn.__version__,
        "instruction_set": cattn.show_config(mode="dicts")["instruction_set"],
    }


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Keep a run as JSON under results/, with the machine it was made on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return path


def as_row(timing: Timing, **facts: Any) -> dict[str, Any]:
    """Flatten a timing and what was timed into one row of a result."""
    return {**facts, **asdict(timing)}
