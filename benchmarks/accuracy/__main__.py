"""python -m benchmarks.accuracy: errors of cattn, PyTorch, JAX and NumPy on the same inputs, against the oracle.

Measures (a few minutes), prints, and keeps results/accuracy.json. With --into docs/accuracy.md also writes the tables
there; with --report from the kept results, without measuring. --exhaustive takes every float32 instead: exp from 0 down
to where it becomes 0, tanh up to where it is 1. Needs the extra "test". JAX takes part where it is installed, and
mpmath checks the oracle.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from ..contestants import jax_or_none
from ..machine import facts
from ..report import RESULTS, load, save, write_into
from . import contestants, oracle
from .cases import cases
from .report import Row, line, markdown


def every_float32(first: int = 0, last: int | None = None, step: int = 1) -> dict[str, float]:
    """Return the largest error in ULP of exp and tanh in float32, over all numbers between two bit patterns."""
    ends = {
        "exp": (contestants.exp, np.exp, np.float32(-87.336544), -1),
        "tanh": (contestants.tanh, np.tanh, np.float32(10), 1),
    }
    worst = {}
    for name, (ours, right, end, sign) in ends.items():
        stop = int(np.abs(end).view(np.uint32)) + 1 if last is None else last
        largest = 0.0
        for begin in range(first, stop, 2**20 * step):
            x = sign * np.arange(begin, min(begin + 2**20 * step, stop), step, dtype=np.uint32).view(np.float32)
            exact = right(x.astype(np.float64))
            largest = max(largest, float((np.abs(ours(x) - exact) / oracle.spacing(exact, np.float32)).max()))
        worst[name] = largest
    return worst


def measure(only: str, folder: Path) -> None:
    """Measure, print and keep all cases, or those whose group, dtype and name contain a text."""
    jax_or_none()  # sets its threads before anything else imports it
    rows = {}
    if only and (kept := load(folder, "accuracy")):
        rows = {_key(row): row for row in kept["rows"]}
    for case in cases():
        if only in f"{case.group} {np.dtype(case.dtype).name} {case.name}":
            for row in case.run():
                rows[_key(row)] = row
                print(line(row), flush=True)
    checked = oracle.check()
    print("the oracle's own errors:", ", ".join(f"{name} {error:.1g}" for name, error in checked.items()))
    save(folder, "accuracy", list(rows.values()), oracle=checked)


def _key(row: Row) -> tuple[str, ...]:
    return row["group"], row["dtype"], row["name"], row["quantity"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--exhaustive", type=int, nargs="?", const=1, metavar="STEP", help="every float32 (or every STEP-th) instead"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, print the kept results")
    parser.add_argument(
        "--only", default="", help='measure only cases whose name contains this text ("attention float32 softcap")'
    )
    parser.add_argument("--into", type=Path, help="the Markdown file to write the tables into")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the results")
    found = parser.parse_args(arguments)
    found.output.mkdir(parents=True, exist_ok=True)
    if found.exhaustive:
        worst = every_float32(step=found.exhaustive)
        print("\n".join(f"{name:<20} {ulp:.3f} ULP at most" for name, ulp in worst.items()))
        path = found.output / "accuracy_exhaustive.json"
        path.write_text(json.dumps({"machine": facts(), "step": found.exhaustive, "float32": worst}, indent=1) + "\n")
        return 0
    if not found.report:
        measure(found.only, found.output)
    kept = load(found.output, "accuracy")
    if found.into and kept:
        write_into(found.into, markdown(kept))
    elif found.report and kept:
        print(markdown(kept))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
