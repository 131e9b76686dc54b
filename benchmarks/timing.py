"""Interleaved timing: contestants take turns, round by round, so that other load on the machine meets all of them.

A canary runs before and after every measurement. A round does not count if the canary was slow: another guest of the
host was using the core.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

LEAST = 5e-3  # seconds of one measurement: shorter calls are repeated, or caches would hold the last peer's data
BUDGET = 2.5  # seconds for the rounds of one case in a lap, beyond the fewest rounds
FEWEST, MOST = 2, 9  # rounds of one lap
LAPS = 3, 16  # fewest and most
SETTLED = 0.025  # laps go on until the standard error of each ratio is this small
SHORT = 1e-3  # rows of fewer seconds get the fewest laps and are not compared between runs
RESTLESS = 1.4  # a round is restless if the canary took more than this many times its best, before or after
ENOUGH = 5  # quiet rounds of a row; with fewer, all rounds count
PAUSE = 0.02  # seconds before each measurement, in which threads of the last contestant stop to spin
NAP = 0.02  # seconds between two canaries while waiting for a quiet moment
PATIENCE = 2.0  # seconds that one case may wait in a lap
Name = TypeVar("Name")


@dataclass
class Timing:
    """Seconds of one contestant, round by round, and their statistics."""

    rounds: list[float]
    canary: list[float] = field(default_factory=list)  # the slower of the two canaries around each round
    quick: float = math.inf  # the canary's best

    def quiet(self) -> list[bool]:
        """Return for each round whether it was quiet."""
        return [took <= RESTLESS * self.quick for took in self.canary] or [True] * len(self.rounds)

    def counted(self) -> list[float]:
        """Return the quiet rounds if there are enough, else all rounds."""
        return _enough(self.rounds, self.quiet())

    @property
    def median(self) -> float:
        """Median of the rounds that count."""
        return statistics.median(self.counted())

    def kept(self) -> dict[str, float]:
        """Return median, best, spread (interquartile range over the median) and the share of quiet rounds."""
        rounds, middle = self.counted(), self.median
        low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else (middle,) * 3
        share = statistics.mean(self.quiet())
        return {"median": middle, "best": min(rounds), "spread": (high - low) / middle, "quiet": share}

    def over(self, other: Timing, enough: int = ENOUGH) -> float:
        """Return the median of the ratios, round by round: load that lasts a whole round cancels out."""
        ratios = [mine / its for mine, its in zip(self.rounds, other.rounds, strict=True)]
        both = [mine and its for mine, its in zip(self.quiet(), other.quiet(), strict=True)]
        return statistics.median(_enough(ratios, both, enough))


def _enough(rounds: list[float], quiet: list[bool], enough: int = ENOUGH) -> list[float]:
    return [r for r, counts in zip(rounds, quiet, strict=True) if counts] if sum(quiet) >= enough else rounds


@dataclass
class Case:
    """One row: the calls to time, the limit of the machine, the targets."""

    name: str
    # The calls by name, "cattn" among them; or a function that prepares them, which a lap without this row never calls
    contestants: dict[str, Callable[[], object]] | Callable[[], dict[str, Callable[[], object]]]
    limit: str | None = None  # a key of Probe.limits
    work: float = 0.0  # flops or bytes of one call of cattn
    # "percent" of the limit, "microseconds", "GF/s", "GB/s", "best peer", or a peer: the smallest ratio to it
    targets: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    beside_products: bool = False  # whether matrix products of as many flops are timed, too


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
    """Return the seconds of a short Python loop, the better of two.

    A virtual core may be one of the two threads of a real core. While another guest uses the other thread, such a loop
    takes 1.5 to 2 times as long. So do small calls; long calls take 1.1 to 1.3 times as long, multiplications 1.05.
    """
    return min(_once(_count, 1), _once(_count, 1))


def interleave(
    contestants: dict[Name, Callable[[], object]], rounds: int | None = None, quick: float = math.inf
) -> dict[Name, Timing]:
    """Time the contestants in turn, for FEWEST to MOST rounds, as many as the budget allows.

    `quick` is the canary's best so far. A restless moment is waited out while the patience lasts.
    """
    numbers, total = {}, 0.0
    for name, call in contestants.items():
        took = _once(call, 1)
        if took < LEAST:  # the first call may have had cold caches
            took = _once(call, 1)
        numbers[name] = max(1, round(LEAST / max(took, 1e-7)))
        total += took * numbers[name]
    if rounds is None:
        rounds = min(MOST, max(FEWEST, int(BUDGET / max(total, 1e-6))))
    timings = {name: Timing([]) for name in contestants}
    patience = PATIENCE
    for _ in range(rounds):
        for name, call in contestants.items():
            time.sleep(PAUSE)
            before = canary()
            quick = min(quick, before)
            while before > RESTLESS * quick and patience > 0:
                time.sleep(NAP)
                patience -= NAP
                before = canary()
            timings[name].rounds.append(_once(call, numbers[name]))
            after = canary()
            timings[name].canary.append(max(before, after))
            quick = min(quick, after)
    for timing in timings.values():
        timing.quick = quick
    return timings
