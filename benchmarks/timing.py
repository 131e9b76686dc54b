"""Interleaved timing: contestants take turns, round by round, so that the machine's moods meet all of them.

A group of rows is gone through several times, lap by lap, with new arrays each, so that neither a mood of minutes nor
where an array happens to lie in memory decides a row: laps go on until the ratios are known well enough. Rounds beside
which a canary says that another guest had a part of the core are not counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

LEAST = 5e-3  # seconds of one measurement: shorter calls are repeated within it, lest the peers leave only cold caches
BUDGET = 2.5  # seconds that the rounds of one case may take in a lap, but for the fewest rounds
FEWEST, MOST = 2, 9  # rounds of one lap
LAPS = 3, 16  # at least, at most
SETTLED = 0.025  # the standard error of a ratio, from lap to lap, that is small enough
SHORT = 1e-3  # rows of fewer seconds have the fewest laps, and are not compared between runs
RESTLESS = 1.4  # a round does not count if the canary took so many times its best, before or after
ENOUGH = 5  # quiet rounds of a row; where there are fewer, all count
NAP = 0.02  # seconds between looks
PATIENCE = 2.0  # seconds that one case may wait in a lap for the other guest to be gone
Name = TypeVar("Name")


@dataclass
class Timing:
    """Seconds of one contestant, round by round, and what is kept of them."""

    rounds: list[float]
    canary: list[float] = field(default_factory=list)  # seconds that it took beside each round, the worse of both sides
    quick: float = math.inf  # the same at its best

    def quiet(self) -> list[bool]:
        """Tell of each round whether it counts, were there enough."""
        return [took <= RESTLESS * self.quick for took in self.canary] or [True] * len(self.rounds)

    def counted(self) -> list[float]:
        """Return the quiet rounds, if there are enough, else all."""
        return _enough(self.rounds, self.quiet())

    @property
    def median(self) -> float:
        """The median of the rounds that count."""
        return statistics.median(self.counted())

    def kept(self) -> dict[str, float]:
        """Return median, best, the distance between the quartiles over the median, and the share of quiet rounds."""
        rounds, middle = self.counted(), self.median
        low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else (middle,) * 3
        share = statistics.mean(self.quiet())
        return {"median": middle, "best": min(rounds), "spread": (high - low) / middle, "quiet": share}

    def over(self, other: Timing, enough: int = ENOUGH) -> float:
        """Return the median of the ratios round by round: what slows a whole round down slows both."""
        ratios = [mine / its for mine, its in zip(self.rounds, other.rounds, strict=True)]
        both = [mine and its for mine, its in zip(self.quiet(), other.quiet(), strict=True)]
        return statistics.median(_enough(ratios, both, enough))


def _enough(rounds: list[float], quiet: list[bool], enough: int = ENOUGH) -> list[float]:
    return [r for r, counts in zip(rounds, quiet, strict=True) if counts] if sum(quiet) >= enough else rounds


@dataclass
class Case:
    """One row: what is timed, what limits it, what is aimed at."""

    name: str
    # "cattn" among them; or what makes them ready, if that takes its time: a lap may not need the row
    contestants: dict[str, Callable[[], object]] | Callable[[], dict[str, Callable[[], object]]]
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


def _count() -> int:
    total = 0
    for number in range(10_000):
        total += number * number
    return total


def canary() -> float:
    """Return the seconds of a short loop of the interpreter, the better of two.

    A virtual core may be half of a real one. While another guest works on the other half, such a loop takes 1.5 to 2
    times as long, and so do small calls; long ones take 1.1 to 1.3 times, a loop of nothing but multiplications 1.05.
    """
    return min(_once(_count, 1), _once(_count, 1))


def interleave(
    contestants: dict[Name, Callable[[], object]], rounds: int | None = None, quick: float = math.inf
) -> dict[Name, Timing]:
    """Time the contestants in turn. Rounds: from FEWEST to MOST, as many as the budget allows.

    `quick` is what the canary takes at its best, as far as it is known: a moment that is not quiet is waited out, if it
    does not last.
    """
    numbers, total = {}, 0.0
    for name, call in contestants.items():
        took = _once(call, 1)
        if took < LEAST:  # the first call may have found cold caches
            took = _once(call, 1)
        numbers[name] = max(1, round(LEAST / max(took, 1e-7)))
        total += took * numbers[name]
    if rounds is None:
        rounds = min(MOST, max(FEWEST, int(BUDGET / max(total, 1e-6))))
    timings = {name: Timing([]) for name in contestants}
    before, patience = canary(), PATIENCE
    quick = min(quick, before)
    for _ in range(rounds):
        for name, call in contestants.items():
            while before > RESTLESS * quick and patience > 0:
                time.sleep(NAP)
                patience -= NAP
                before = canary()
            timings[name].rounds.append(_once(call, numbers[name]))
            after = canary()
            timings[name].canary.append(max(before, after))
            before, quick = after, min(quick, after)
    for timing in timings.values():
        timing.quick = quick
    return timings


@dataclass
class Measured:
    """What the laps of one case have found so far."""

    laps: list[dict[str, Timing]] = field(default_factory=list)
    limit_work: float = 0.0  # what one call of the limit's probe does
    quick: float = math.inf  # the canary's best, of all that is known

    def lap(self, case: Case, limits: dict[str, Callable[[], float]], rounds: int | None = None) -> None:
        """Time one case together with its limit once more.

        `limits` are probes: each call takes a moment, and returns the work that it did in that time.
        """
        contestants = dict(case.contestants() if callable(case.contestants) else case.contestants)
        done: list[float] = []
        probe = limits.get(case.limit or "")
        if probe is not None:
            contestants["limit"] = lambda: done.append(probe())
        self.laps.append(interleave(contestants, rounds, self.quick))
        self.quick = self.laps[-1]["cattn"].quick
        self.limit_work = done[-1] if done else 0.0  # every call of a probe does the same work

    def times(self, laps: list[dict[str, Timing]] | None = None) -> dict[str, Timing]:
        """Return the rounds of some laps, else of all."""
        laps = self.laps if laps is None else laps
        return {
            name: Timing(
                [t for lap in laps for t in lap[name].rounds], [t for lap in laps for t in lap[name].canary], self.quick
            )
            for name in laps[0]
        }

    def settled(self) -> bool:
        """Tell whether another lap would hardly change the ratios."""
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
    """Return what is kept of a case, and say which targets are met."""
    times = measured.times()
    cattn = times["cattn"]
    row: dict[str, Any] = {"name": case.name, **case.facts}
    row["laps"] = len(measured.laps)
    row["seconds"] = {name: timing.kept() for name, timing in times.items() if name != "limit"}
    row["ratios"] = {name: t.over(cattn) for name, t in times.items() if name not in ("cattn", "limit")}
    if "limit" in times:
        work = measured.limit_work
        row["limit"] = {"kind": case.limit, "per_second": work / times["limit"].median}
        row["percent"] = 100 * case.work / work * times["limit"].over(cattn)
    ours = cattn.median
    row["targets"] = {
        name: {"target": target, **judge(name, target, row, ours, case.work)} for name, target in case.targets.items()
    }
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
