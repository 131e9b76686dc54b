"""python -m benchmarks.accuracy: errors of cattn, PyTorch, JAX and NumPy on the same inputs, against the oracle.

Measures (a few minutes), prints, and keeps the errors in results/; docs/accuracy.md shows them. --exhaustive takes
every float32 instead: exp from 0 down to where it becomes 0, tanh up to where it is 1; it fails beyond the bounds of
docs/accuracy.md. Needs the extra "test". JAX takes part where it is installed, and mpmath checks the oracle.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np

from . import accuracy_cases as cases
from .contestants import jax_or_none
from .report import RESULTS, load, save

TITLES = {"cattn": "cattn", "torch": "PyTorch", "jax": "JAX", "numpy": "NumPy"}
PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"

Row = dict[str, Any]


def bounds() -> dict[str, list[float]]:
    """Return the bounds that the tables of docs/accuracy.md promise, by the names in their first columns."""
    found = {}
    for line in PAGE.read_text("utf-8").splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if numbers := [float(cell) for cell in cells if re.fullmatch(r"[\d.]+", cell)]:
            found[name] = numbers
    return found


BOUNDS = bounds()
MOST = dict(zip(("rms", "largest"), BOUNDS["attention"], strict=True))  # relative to the best peer's error


def number(x: float) -> str:
    """Return a number with two or three digits, large ones with an exponent."""
    if x == 0:
        return "0"
    return f"{x:.1e}".replace("e+0", "e").replace("e+", "e") if x >= 1e4 else f"{x:.{0 if x >= 99.5 else 2}f}"


def cancels(row: Row) -> bool:
    """Return whether the quantity is a sum whose terms cancel; accuracy_cases.py explains its unit."""
    return row["group"] == "attention" or row["quantity"] == "softmax_backward"


def cell(row: Row, who: str) -> str:
    """Return RMS and largest error of one contestant."""
    error = row["errors"].get(who)
    if error is None:
        return "–"
    units = ("rms", "largest") if cancels(row) else ("ulp_rms", "ulp_largest")
    if error["lost"]:
        return "not finite"
    return " / ".join(number(error[unit]) for unit in units)


def ratios(row: Row) -> dict[str, float]:
    """Return cattn's errors relative to the best peer's; infinite if some of cattn's results are not finite."""
    errors = row["errors"]
    peers = [error for who, error in errors.items() if who != "cattn" and not error["lost"]]
    if not cancels(row) or not peers:
        return {}
    best = {unit: min(peer[unit] for peer in peers) for unit in MOST}
    if errors["cattn"]["lost"]:
        return dict.fromkeys(MOST, float("inf"))
    return {unit: errors["cattn"][unit] / least for unit, least in best.items() if least}


def beyond(row: Row) -> bool:
    """Return whether cattn's error is beyond the target."""
    return any(ratio > MOST[unit] for unit, ratio in ratios(row).items())


def table(rows: list[Row]) -> list[str]:
    """Return the rows of one group and dtype as a Markdown table."""
    judged = any(map(cancels, rows))
    head = ["inputs", "", *TITLES.values()] + (["of the best peer"] if judged else [])
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    before = None
    for row in rows:
        cells = [cell(row, who) for who in TITLES]
        if judged:
            text = " / ".join(f"{ratio:.2f}" for ratio in ratios(row).values())
            cells.append(f"**{text}**" if beyond(row) else text)
        lines.append("| " + " | ".join([row["name"] if row["name"] != before else "", row["quantity"], *cells]) + " |")
        before = row["name"]
    return lines


def markdown(folder: Path = RESULTS) -> str:
    """Return the tables of the kept results, folded, for docs/accuracy.md."""
    kept = load(folder, "accuracy")
    if kept is None:
        raise FileNotFoundError(f"{folder} has no errors: run `python -m benchmarks.accuracy` first")
    machine, rows = kept["machine"], kept["rows"]
    versions = ", ".join(f"{TITLES[peer]} {machine[peer]}" for peer in TITLES if peer in machine)
    lines = [f"Versions: {versions}; {machine['cpu']}, {machine['instruction_set']} kernels, {machine['date']}.", ""]
    for group, title in (
        ("functions", "Functions of one number, in ULP"),
        ("softmax", "Softmax, in ULP; softmax_backward in eps times the RMS of the result"),
        ("attention", "Attention and its gradients, in eps times the RMS of the result"),
    ):
        lines += [f"### {title}", "", "RMS / largest error.", ""]
        for dtype in dict.fromkeys(row["dtype"] for row in rows if row["group"] == group):
            part = [row for row in rows if (row["group"], row["dtype"]) == (group, dtype)]
            lines += [f":::{{dropdown}} {dtype}", *table(part), ":::", ""]
    judged = [row for row in rows if ratios(row)]
    for dtype in dict.fromkeys(row["dtype"] for row in judged):
        part = [row for row in judged if row["dtype"] == dtype]
        within = len(part) - sum(map(beyond, part))
        most = " and ".join(f"{ratio:g} ({unit})" for unit, ratio in MOST.items())
        lines.append(f"- {dtype}: {within} of {len(part)} rows within {most} of the best peer")
    if oracle := kept.get("oracle"):
        worst = max(oracle.values())
        lines += ["", f"The oracle's functions differ from mpmath's by at most {worst:.1g} ULP of float64."]
    if (every := load(folder, "accuracy_exhaustive")) and every["step"] == 1:
        worst = ", ".join(f"{name} {ulp:.3g} ULP" for name, ulp in every["rows"][0].items())
        lines += ["", f"The largest errors over all numbers of float32: {worst} ({every['machine']['date']})."]
    return "\n".join(lines) + "\n"


def every_float32(first: int = 0, last: int | None = None, step: int = 1) -> dict[str, float]:
    """Return the largest error in ULP of exp and tanh in float32, over all numbers between two bit patterns."""
    ends = {
        "exp": (cases.exp, np.exp, np.float32(-87.336544), -1),
        "tanh": (cases.tanh, np.tanh, np.float32(10), 1),
    }
    worst = {}
    for name, (ours, right, end, sign) in ends.items():
        stop = int(np.abs(end).view(np.uint32)) + 1 if last is None else last
        largest = 0.0
        for begin in range(first, stop, 2**20 * step):
            x = sign * np.arange(begin, min(begin + 2**20 * step, stop), step, dtype=np.uint32).view(np.float32)
            exact = right(x.astype(np.float64))
            largest = max(largest, float((np.abs(ours(x) - exact) / cases.spacing(exact, np.float32)).max()))
        worst[name] = largest
    return worst


def measure(only: str, folder: Path) -> None:
    """Measure, print and keep all cases, or those whose group, dtype and name contain a text."""
    jax_or_none()  # sets its threads before anything else imports it
    rows = {}
    if only and (kept := load(folder, "accuracy")):
        rows = {_key(row): row for row in kept["rows"]}
    for case in cases.cases():
        if only in f"{case.group} {np.dtype(case.dtype).name} {case.name}":
            found = case.run()
            rows |= {_key(row): row for row in found}
            print(np.dtype(case.dtype).name, *table(found), sep="\n", flush=True)
    checked = cases.check()
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
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the results")
    found = parser.parse_args(arguments)
    found.output.mkdir(parents=True, exist_ok=True)
    if found.exhaustive:
        worst = every_float32(step=found.exhaustive)
        print("\n".join(f"{name:<20} {ulp:.3f} ULP at most" for name, ulp in worst.items()))
        save(found.output, "accuracy_exhaustive", [worst], step=found.exhaustive)
        return int(any(ulp > BOUNDS[name][0] for name, ulp in worst.items()))
    if found.report:
        print(markdown(found.output))
    else:
        measure(found.only, found.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
