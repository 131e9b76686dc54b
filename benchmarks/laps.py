"""Laps: every group is measured several times, each time in a new process, until its ratios settle.

A lap has new arrays, and a process like a user's: neither the place of an array in memory nor the heap, thread pools
and caches of an earlier group decide a row.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import cattn

from .contestants import best_peer, matrix_products, product_size
from .groups import GROUPS, KEEP_MEMORY
from .machine import Probe, keep_memory
from .timing import ENOUGH, SETTLED, SHORT, Case, Timing, interleave

Found = TypeVar("Found")
PRODUCT = "product of "  # before the name of a library whose matrix product is timed


@dataclass
class Measured:
    """The laps of one case so far."""

    laps: list[dict[str, Timing]] = field(default_factory=list)
    limit_work: float = 0.0  # flops or bytes of one call of the probe
    quick: float = math.inf  # the canary's best so far
    notes: dict[str, Any] = field(default_factory=dict)  # of CheckedCalls

    def lap(self, case: Case, limits: dict[str, Callable[[], float]], rounds: int | None = None) -> None:
        """Time one case and its limit once more.

        `limits` are probes: each call takes a moment and returns the work that it did.
        """
        prepared = case.contestants() if callable(case.contestants) else case.contestants
        self.notes = getattr(prepared, "notes", {})
        contestants = dict(prepared)
        done: list[float] = []
        probe = limits.get(case.limit or "")
        if probe is not None:
            contestants["limit"] = lambda: done.append(probe())
        if case.beside_products:
            products = matrix_products(case.facts["dtype"], case.work)
            contestants |= {PRODUCT + name: call for name, call in products.items()}
        self.laps.append(interleave(contestants, rounds, self.quick))
        self.quick = self.laps[-1]["cattn"].quick
        self.limit_work = done[-1] if done else 0.0  # the same in every call

    def times(self, laps: list[dict[str, Timing]] | None = None) -> dict[str, Timing]:
        """Return the rounds of the given laps, by default of all."""
        laps = self.laps if laps is None else laps
        return {
            name: Timing(
                [t for lap in laps for t in lap[name].rounds], [t for lap in laps for t in lap[name].canary], self.quick
            )
            for name in laps[0]
        }

    def settled(self) -> bool:
        """Return whether another lap would hardly change the ratios."""
        first, *more = self.laps
        if not more:
            return False
        ours = self.times()["cattn"]
        if sum(ours.quiet()) < min(ENOUGH, len(ours.rounds)):
            return False
        if ours.median < SHORT:
            return True
        laps = [self.times([lap]) for lap in self.laps]
        for name in first.keys() - {"cattn"}:
            ratios = [lap[name].over(lap["cattn"], enough=1) for lap in laps]
            if statistics.stdev(ratios) > SETTLED * len(ratios) ** 0.5 * statistics.mean(ratios):
                return False
        return True


def row_of(case: Case, measured: Measured) -> dict[str, Any]:
    """Return the row to keep: times, ratios, percent of the limit, targets."""
    times = measured.times()
    cattn = times["cattn"]
    row: dict[str, Any] = {"name": case.name, **case.facts, **measured.notes}
    row["laps"] = len(measured.laps)
    calls = {name: timing for name, timing in times.items() if name != "limit" and not name.startswith(PRODUCT)}
    row["seconds"] = {name: timing.kept() for name, timing in calls.items()}
    row["ratios"] = {name: timing.over(cattn) for name, timing in calls.items() if name != "cattn"}
    row["best_peer"] = best_peer(row["ratios"], row.get("other_arithmetic", ()))
    if "limit" in times:
        work, limit = measured.limit_work, times["limit"]
        if case.limit in ("float32", "float64"):  # a constant of the CPU: other guests can only lower what is measured
            per_second, percent = work / min(limit.rounds), case.work / work * min(limit.rounds) / cattn.median
        else:  # a share of the memory's bandwidth, which changes from round to round
            per_second, percent = work / limit.median, case.work / work * limit.over(cattn)
        row["limit"] = {"kind": case.limit, "per_second": per_second}
        row["percent"] = 100 * percent
    ours = cattn.median
    if case.beside_products:
        row["product"] = product_of(case, times)
    row["targets"] = {
        name: {"target": target, **judge(name, target, row, ours, case.work)} for name, target in case.targets.items()
    }
    return row


def product_of(case: Case, times: dict[str, Timing]) -> dict[str, Any]:
    """Return the library of the quickest matrix product, its flops in a second, and cattn's percentage of them."""
    seconds = {name.removeprefix(PRODUCT): t.median for name, t in times.items() if name.startswith(PRODUCT)}
    best = min(seconds, key=seconds.__getitem__)
    per_second = 2.0 * product_size(case.work) ** 3 / seconds[best]
    return {"best": best, "per_second": per_second, "percent": 100 * case.work / times["cattn"].median / per_second}


def judge(name: str, target: float, row: dict[str, Any], ours: float, work: float = 0.0) -> dict[str, Any]:
    """Compare one target with the measurement. `met` is None if its peer did not take part."""
    if name == "microseconds":
        return {"measured": ours * 1e6, "met": ours * 1e6 <= target}
    measured: float | None
    if name in ("GF/s", "GB/s"):
        measured = work / ours / 1e9
    elif name == "percent":
        measured = row.get("percent")
    elif name == "best peer":
        measured = row["ratios"].get(row["best_peer"])
    else:
        measured = row["ratios"].get(name)
    return {"measured": measured, "met": None if measured is None else measured >= target}


@dataclass(frozen=True)
class Plan:
    """The options of the command line for all groups."""

    rounds: int | None = None  # of a lap; None: as many as the time allows
    only: str = ""  # only rows whose name contains this text
    fewest: int = 1  # laps of a timed row
    probe: Path | None = None  # the compiled probe, if it could be compiled


@dataclass
class Group:
    """One group and the results of its laps so far."""

    name: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=lambda: defaultdict(Measured))
    quick: float = math.inf  # the canary's best in any row

    def settled(self) -> bool:
        """Return whether another lap would hardly change a ratio."""
        return all(case.settled() for case in self.measured.values())


def progress(cases: Iterable[Any], title: str) -> Iterable[Any]:
    """Show a progress bar, where tqdm is installed."""
    with contextlib.suppress(ImportError):
        from tqdm.auto import tqdm

        return tqdm(cases, desc=title, unit="row", leave=False, dynamic_ncols=True)  # type: ignore[no-any-return]
    return cases


def lap(group: Group, number: int, plan: Plan) -> Group:
    """Measure the rows once more. After the fewest laps, only rows that have not settled."""
    if group.name in KEEP_MEMORY:
        keep_memory()
    with cattn.num_threads(1):
        probe = Probe(plan.probe) if plan.probe else None
        for case in progress(GROUPS[group.name](probe), f"{group.name}, lap {number}"):
            name = case.name if isinstance(case, Case) else case["name"]
            if plan.only not in name:
                continue
            if not isinstance(case, Case):  # a finished row without times
                group.rows[name] = case
                continue
            measured = group.measured[name]
            measured.quick = group.quick
            if number <= plan.fewest or not measured.settled():
                measured.lap(case, probe.limits if probe else {}, plan.rounds)
            group.quick = measured.quick
            group.rows[name] = row_of(case, measured)
    return group


def apart(function: Callable[..., Found], *arguments: Any) -> Found:
    """Call a function in a new process and return its result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
