"""python -m benchmarks [group ...]: measure, print, keep the results, draw.

A group is a set of rows of one kind; all groups run by default, and "scaling", which fits a model of the time to a grid
of sizes. By name only: "train_gpt" runs examples/train_gpt.py, "report" prints the table of docs/performance.md
from the kept results (with --into FILE, writes it there).
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import tempfile
from pathlib import Path

import cattn

from . import laps, report, scaling
from .groups import GROUPS
from .laps import Group
from .machine import compile_probe, facts
from .report import RESULTS, save
from .timing import LAPS

EXAMPLES = Path(__file__).parent.parent / "examples"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*GROUPS, "scaling", "train_gpt", "report"]
    parser.add_argument("groups", nargs="*", metavar="group", help=", ".join(known))
    parser.add_argument("--list", action="store_true", help="list the groups and exit")
    parser.add_argument("--laps", type=int, help="laps of each group (default: until its ratios settle)")
    parser.add_argument("--rounds", type=int, help="rounds of each row in a lap (default: by time, 2 to 9)")
    parser.add_argument("--only", default="", help="only rows whose name contains this text; nothing is kept")
    parser.add_argument("--no-plots", action="store_true", help="draw nothing")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="earlier results to compare the ratios with")
    parser.add_argument("--into", type=Path, help="with report: the Markdown file to write the table into")
    found = parser.parse_args(arguments)
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


def finish(group: Group, found: argparse.Namespace) -> None:
    """Print the rows of a group and keep them."""
    rows = list(group.rows.values())
    print("\n".join([f"\n{group.name}: {GROUPS[group.name].__doc__}", *map(report.line, rows)]), flush=True)
    if rows and not found.only:
        save(found.output, group.name, rows)


def measure(names: list[str], found: argparse.Namespace, probe: Path | None) -> None:
    """Run the groups in turn, lap by lap: a change of the machine within minutes then meets all groups alike."""
    fewest, most = (found.laps, found.laps) if found.laps else LAPS
    plan = laps.Plan(found.rounds, found.only, fewest, probe)
    groups, number = {name: Group(name) for name in names}, 1
    try:
        for number in range(1, most + 1):
            for name in list(groups):
                group = groups[name] = laps.apart(laps.lap, groups[name], number, plan)
                least = fewest if group.measured else 1
                if number == most or (number >= least and group.settled()):
                    finish(groups.pop(name), found)
    except KeyboardInterrupt:
        if number > fewest:  # every group has had the fewest laps, so half an hour of work is not thrown away
            for group in groups.values():
                finish(group, found)
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
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
            measure(groups, found, compile_probe(Path(folder)) if groups else None)
        if "scaling" in found.groups or not found.groups:
            with cattn.num_threads(1):
                scaling.run(found.output)
        if "train_gpt" in found.groups:
            save(found.output, "train_gpt", runpy.run_path(str(EXAMPLES / "train_gpt.py"))["compare"]())
    except KeyboardInterrupt:
        return 130
    if found.against:
        print("\n" + report.agreement(found.against, found.output, groups))
    if not found.no_plots:
        with contextlib.suppress(ImportError):
            if path := report.draw(found.output):
                print(f"drawn: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
