"""python -m benchmarks [group ...]: measure, print, keep, draw.

Groups are rows of one kind, all of them by default. "scaling" fits a model of time to a grid of sizes, "report" prints
the README's table from the results that are kept (with --into FILE, writes it there).
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

import cattn

from . import laps, plots, report, scaling
from .groups import GROUPS
from .laps import Group
from .machine import RESULTS, facts, save
from .probe import compile_probe
from .timing import LAPS


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


def tell(group: Group, found: argparse.Namespace) -> None:
    """Print the rows of a group and keep them."""
    rows = list(group.rows.values())
    print("\n".join([f"\n{group.name}: {GROUPS[group.name].__doc__}", *map(report.line, rows)]), flush=True)
    if rows and not found.only:
        save(found.output, group.name, rows)


def measure(names: list[str], found: argparse.Namespace, probe: Path | None) -> None:
    """Run the groups lap by lap, in turn: then what changes within minutes meets all laps of a row alike."""
    fewest, most = (found.laps, found.laps) if found.laps else LAPS
    plan = laps.Plan(found.rounds, found.only, fewest, probe)
    groups, number = {name: Group(name) for name in names}, 1
    try:
        for number in range(1, most + 1):
            for name in list(groups):
                group = groups[name] = laps.apart(laps.lap, groups[name], number, plan)
                least = fewest if group.measured else 1
                if number == most or (number >= least and group.settled()):
                    tell(groups.pop(name), found)
    except KeyboardInterrupt:
        if number > fewest:  # half an hour's work: all groups have the laps that they need
            for group in groups.values():
                tell(group, found)
        raise


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
    groups = [name for name in found.groups if name in GROUPS] if found.groups else list(GROUPS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(groups, found, compile_probe(Path(folder)))
        if "scaling" in found.groups or not found.groups:
            with cattn.num_threads(1):
                scaling.run(found.output)
    except KeyboardInterrupt:
        return 130
    if found.against:
        print("\n" + report.agreement(found.against, found.output, groups))
    if not found.no_plots:
        with contextlib.suppress(ImportError):
            for path in plots.draw(found.output):
                print(f"drawn: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
