"""Interleaved timing: contestants take turns, round by round, so that the machine's moods meet all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

LEAST = 1e-3  # seconds of one measurement: shorter calls are repeated within it
BUDGET = 6.0  # seconds that the rounds of one case may take, but for the fewest rounds
FEWEST = 5


@dataclass
class Timing:
    """Seconds of one contestant over the rounds of one run."""

    median: float
    best: float
    spread: float  # (third quartile - first quartile) / median


@dataclass
class Case:
    """One row: what is timed, what limits it, what is aimed at."""

    name: str
    contestants: dict[str, Callable[[], object]]  # "cattn" among them
    limit: str | None = None  # a key of Probe.limits
    work: float = 0.0  # flops or bytes of one call of cattn, in units of the limit
    # "percent", "microseconds", "GF/s", "GB/s", or the least ratio to a peer
    targets: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def _once(call: Callable[[], object], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def interleave(contestants: dict[str, Callable[[], object]], rounds: int | None = None) -> dict[str, Timing]:
    """Time the contestants in turn. Rounds: at least 5, at most 25, as many as the budget allows."""
    numbers, total = {}, 0.0
    for name, call in contestants.items():
        call()
        took = _once(call, 1)
        numbers[name] = max(1, round(LEAST / max(took, 1e-7)))
        total += took * numbers[name]
    if rounds is None:
        rounds = min(25, max(FEWEST, int(BUDGET / max(total, 1e-6))))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            seconds[name].append(_once(call, numbers[name]))
    return {name: summary(times) for name, times in seconds.items()}


def summary(times: list[float]) -> Timing:
    """Return median, best and spread."""
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (middle, middle, middle)
    return Timing(middle, min(times), (high - low) / middle)


def run(case: Case, limits: dict[str, Callable[[], float]], rounds: int | None = None) -> dict[str, Any]:
    """Time one case together with its limit, and say which targets are met.

    `limits` are probes: each call takes a moment, and returns the work that it did in that time.
    """
    contestants = dict(case.contestants)
    done: list[float] = []
    probe = limits.get(case.limit or "")
    if probe is not None:
        contestants["limit"] = lambda: done.append(probe())
    times = interleave(contestants, rounds)
    ours = times["cattn"].median
    row: dict[str, Any] = {"name": case.name, **case.facts}
    row["seconds"] = {name: asdict(timing) for name, timing in times.items() if name != "limit"}
    row["ratios"] = {name: t.median / ours for name, t in times.items() if name not in ("cattn", "limit")}
    if probe is not None:
        rate = done[-1] / times["limit"].median
        row["limit"] = {"kind": case.limit, "per_second": rate}
        row["percent"] = 100 * case.work / ours / rate
    aims = case.targets.items()
    row["targets"] = {name: {"target": target, **judge(name, target, row, ours, case.work)} for name, target in aims}
    return row


def judge(name: str, target: float, row: dict[str, Any], ours: float, work: float = 0.0) -> dict[str, Any]:
    """Compare one target with what was measured; nothing to compare with gives None."""
    if name == "microseconds":
        return {"measured": ours * 1e6, "met": ours * 1e6 <= target}
    measured: float | None
    if name in ("GF/s", "GB/s"):
        measured = work / ours / 1e9
    elif name == "percent":
        measured = row.get("percent")
    elif name == "best peer":
        measured = min(row["ratios"].values(), default=None)
    else:
        measured = row["ratios"].get(name)
    return {"measured": measured, "met": None if measured is None else measured >= target}
