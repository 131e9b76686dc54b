"""python -m benchmarks [group ...]: measure, print, keep, draw.

Groups are rows of one kind, all of them by default. "scaling" fits a model of time to a grid of sizes, "report" prints
the README's table from the results that are kept (with --into FILE, writes it there).
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cattn

from . import plots, report, scaling
from .groups import GROUPS, KEEP_MEMORY
from .machine import RESULTS, facts, memory_kept, save
from .probe import find_probe
from .timing import LAPS, Case, Measured, row_of


def progress(cases: Iterable[Any], group: str) -> Iterable[Any]:
    """Show how far a group is, where tqdm is installed."""
    with contextlib.suppress(ImportError):
        from tqdm.auto import tqdm

        return tqdm(cases, desc=group, unit="row", leave=False, dynamic_ncols=True)  # type: ignore[no-any-return]
    return cases


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="group", help=", ".join([*GROUPS, "scaling", "report"]))
    parser.add_argument("--list", action="store_true", help="name the groups and leave")
    parser.add_argument("--laps", type=int, help="how often to go through a group (default: until its ratios settle)")
    parser.add_argument("--rounds", type=int, help="rounds of each row in a lap (default: by time, 2 to 9)")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--no-plots", action="store_true", help="draw nothing")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="results to compare the ratios with")
    parser.add_argument("--into", type=Path, help="with report: the Markdown file to write the table into")
    found = parser.parse_args(arguments)
    known = [*GROUPS, "scaling", "report"]
    unknown = sorted(set(found.groups) - set(known))
    if unknown:
        parser.error(f"unknown group {', '.join(unknown)}; there are {', '.join(known)}")
    for option in ("laps", "rounds"):
        number = getattr(found, option)
        if number is not None and number < 1:
            parser.error(f"--{option} must be at least 1, got {number}")
    if found.against and (not found.against.is_dir() or found.against.resolve() == found.output.resolve()):
        parser.error(f"--against must be a folder of results other than the output's, got {found.against}")
    return found


class Group:
    """One group, and what its laps have found so far."""

    def __init__(self, name: str, found: argparse.Namespace) -> None:
        self.name, self.found = name, found
        self.rows: dict[str, dict[str, Any]] = {}
        self.measured: dict[str, Measured] = defaultdict(Measured)

    def lap(self, number: int, fewest: int, probe: Any) -> None:
        """Go through the rows once more, from the lap after the `fewest` on through those that have not settled."""
        with memory_kept() if self.name in KEEP_MEMORY else contextlib.nullcontext():
            for case in progress(GROUPS[self.name](probe), f"{self.name}, lap {number}"):
                name = case.name if isinstance(case, Case) else case["name"]
                if self.found.only not in name:
                    continue
                if not isinstance(case, Case):  # there at once, and not timed
                    self.rows[name] = case
                elif number <= fewest or not self.measured[name].settled():
                    self.measured[name].lap(case, probe.limits if probe else {}, self.found.rounds)
                    self.rows[name] = row_of(case, self.measured[name])

    def settled(self) -> bool:
        """Tell whether another lap would hardly change a ratio."""
        return all(case.settled() for case in self.measured.values())

    def tell(self) -> None:
        """Print the rows and keep them."""
        print("\n".join([f"\n{self.name}: {GROUPS[self.name].__doc__}", *map(report.line, self.rows.values())]))
        if self.rows and not self.found.only:
            save(self.found.output, self.name, list(self.rows.values()))


def measure(names: list[str], found: argparse.Namespace, probe: Any) -> None:
    """Run the groups lap by lap, in turn: then what changes within minutes meets all laps of a row alike."""
    fewest, most = (found.laps, found.laps) if found.laps else LAPS
    groups = [Group(name, found) for name in names]
    for number in range(1, most + 1):
        for group in list(groups):
            group.lap(number, fewest, probe)
            least = fewest if group.measured else 1
            if number == most or (number >= least and group.settled()):
                group.tell()
                groups.remove(group)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    found = parse(arguments)
    if found.list:
        print("\n".join(f"{name:<14} {group.__doc__}" for name, group in GROUPS.items()))
        return 0
    if found.groups == ["report"]:
        table = report.markdown(found.output)
        if found.into:
            report.write_into(found.into, table)
        else:
            print(table)
        return 0
    print("  ".join(f"{name} {value}" for name, value in facts().items()))
    with cattn.num_threads(1):
        probe = find_probe()
        groups = [name for name in found.groups if name in GROUPS] if found.groups else list(GROUPS)
        measure(groups, found, probe)
        if "scaling" in found.groups or not found.groups:
            scaling.run(found.output)
    if found.against:
        print("\n" + report.agreement(found.against, found.output, groups))
    if not found.no_plots:
        with contextlib.suppress(ImportError):
            for path in plots.draw(found.output):
                print(f"drawn: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
