"""Laps of a group, each in a process of its own: it starts as a user's program does.

No group finds the memory, the thread pools or the caches that another one left.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import cattn

from .groups import GROUPS, KEEP_MEMORY
from .machine import keep_memory
from .probe import Probe
from .timing import Case, Measured, row_of

Found = TypeVar("Found")


@dataclass(frozen=True)
class Plan:
    """What the command line says of all groups."""

    rounds: int | None = None  # of a lap; None: as many as the time allows
    only: str = ""  # rows whose name holds this text
    fewest: int = 1  # laps of a row that is timed
    probe: Path | None = None  # compiled, where the limits can be measured


@dataclass
class Group:
    """One group, and what its laps have found so far."""

    name: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=lambda: defaultdict(Measured))
    quick: float = math.inf  # the canary's best in any row

    def settled(self) -> bool:
        """Tell whether another lap would hardly change a ratio."""
        return all(case.settled() for case in self.measured.values())


def progress(cases: Iterable[Any], told: str) -> Iterable[Any]:
    """Show how far a lap is, where tqdm is installed."""
    with contextlib.suppress(ImportError):
        from tqdm.auto import tqdm

        return tqdm(cases, desc=told, unit="row", leave=False, dynamic_ncols=True)  # type: ignore[no-any-return]
    return cases


def lap(group: Group, number: int, plan: Plan) -> Group:
    """Go through the rows once more, from the lap after the fewest on through those that have not settled."""
    if group.name in KEEP_MEMORY:
        keep_memory()
    with cattn.num_threads(1):
        probe = Probe(plan.probe) if plan.probe else None
        for case in progress(GROUPS[group.name](probe), f"{group.name}, lap {number}"):
            name = case.name if isinstance(case, Case) else case["name"]
            if plan.only not in name:
                continue
            if not isinstance(case, Case):  # there at once, and not timed
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
    """Return what a function returns in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
