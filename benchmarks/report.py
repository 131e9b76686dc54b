"""Results: kept as JSON in one file for each machine, printed, as a table of the site, and as a picture."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .contestants import PEERS
from .machine import facts
from .timing import SHORT

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


# ---- files ---------------------------------------------------------------------------------------------------------
def save(folder: Path, group: str, rows: list[Row], **extra: Any) -> Path:
    """Keep a group in the JSON file of this machine: its facts, `extra`, and one line for each row."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = facts()
    path = folder / f"{'_'.join(re.findall('[a-z0-9]+', machine['cpu'].lower()))}.json"
    groups = json.loads(path.read_text("utf-8")) if path.exists() else {}
    groups[group] = {"machine": machine, **extra, "rows": [_short(row) for row in rows]}
    path.write_text("{\n" + ",\n".join(_text(name, groups[name]) for name in sorted(groups)) + "\n}\n", "utf-8")
    return path


def _text(group: str, kept: dict[str, Any]) -> str:
    """Return the entry of a group: one line for each fact and each row."""
    head = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in kept.items() if name != "rows"]
    rows = ",\n".join(f"   {json.dumps(row)}" for row in kept["rows"])
    return f" {json.dumps(group)}: {{\n" + ",\n".join([*head, f'  "rows": [\n{rows}\n  ]']) + "\n }"


def _short(value: Any) -> Any:
    """Return a value with its floats rounded to six digits, more than any measurement has."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def load_all(folder: Path, group: str) -> list[dict[str, Any]]:
    """Return the kept results of a group, one for each machine, the newest first."""
    machines = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    found: list[dict[str, Any]] = [machine[group] for machine in machines if group in machine]
    return sorted(found, key=lambda kept: str(kept["machine"]["date"]), reverse=True)


def load(folder: Path, group: str) -> dict[str, Any] | None:
    """Return the newest kept results of a group among all machines, if there are any."""
    return next(iter(load_all(folder, group)), None)


# ---- text ----------------------------------------------------------------------------------------------------------
def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def targets(row: Row) -> str:
    """Return the targets of a row, and whether they are met."""
    signs = {True: "met", False: "missed", None: "no peer"}
    texts = []
    for name, target in row["targets"].items():
        measured = "" if target["measured"] is None else f" {target['measured']:.3g}"
        kind = {"percent": "% of limit", "microseconds": "µs"}.get(name, name)
        sign = "≤" if name in ("microseconds", "ms", "MiB") else "≥"
        texts.append(f"{kind}{measured} ({sign} {target['target']:.3g}, {signs[target['met']]})")
    return "; ".join(texts)


def line(row: Row) -> str:
    """Return one row for the screen."""
    parts, lines = [f"{row['name']:<38}"], list[str]()
    if "seconds" in row:
        ours = row["seconds"]["cattn"]
        parts.append(f"{duration(ours['median']):>8} ±{ours['spread']:>4.0%} {ours['quiet']:>4.0%} quiet")
        parts.append(f"{row['percent']:>5.0f} %" if "percent" in row else " " * 7)
        if "product" in row:
            parts.append(f"{row['product']['percent']:.0f} % of {row['product']['best']}'s product")
        parts.append(best(row))
        lines.append("  ".join(contestant(row, name) for name in row["ratios"]))
        if "errors" in row:
            star = "; * computes in fewer bits" if row["other_arithmetic"] else ""
            lines.append(f"largest errors in brackets; cattn's is {row['errors']['cattn']:.0e}{star}")
        if row.get("left_out"):
            lines.append(f"left out: {left_out(row['left_out'])}")
    elif "bytes" in row:
        parts.append("  ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in row["bytes"].items()))
    lines.append(targets(row))
    return "\n      ".join(["  ".join(parts), *filter(None, lines)])


def left_out(reasons: dict[str, str]) -> str:
    """Return the peers that are left out, reason by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(found)}: {reason}" for reason, found in names.items())


def contestant(row: Row, name: str) -> str:
    """Return the ratio and the largest error of a contestant, with a star if its arithmetic is not the row's."""
    star = "*" if name in row.get("other_arithmetic", ()) else ""
    error = f" ({row['errors'][name]:.0e})" if name in row.get("errors", {}) else ""
    return f"{name} {row['ratios'][name]:.2f}x{star}{error}"


def best(row: Row) -> str:
    """Return the best peer, and the peers of fewer bits that take less time."""
    name, ratios = row.get("best_peer"), row["ratios"]
    most = ratios[name] if name else math.inf
    others = [f"{other} {ratios[other]:.2f}x*" for other in row.get("other_arithmetic", ()) if ratios[other] < most]
    return "; ".join(([f"best peer {name} {most:.2f}x"] if name else []) + others)


def changes(before: Path, now: Path, groups: list[str]) -> list[tuple[str, str, float]]:
    """Return (row, peer, change) for the ratios that two runs share, of rows of a millisecond and more."""
    found = []
    for group in groups:
        old, new = (
            {row["name"]: row for row in (load(folder, group) or {"rows": []})["rows"]} for folder in (before, now)
        )
        for name in old.keys() & new.keys():
            if "ratios" in new[name] and new[name]["seconds"]["cattn"]["median"] >= SHORT:
                was, ratios = old[name]["ratios"], new[name]["ratios"]
                found += [(f"{group}: {name}", peer, ratios[peer] / was[peer] - 1) for peer in ratios if peer in was]
    return sorted(found, key=lambda change: -abs(change[2]))


def agreement(before: Path, now: Path, groups: list[str]) -> str:
    """Say how many ratios of two runs agree, and list the ten that differ most."""
    found = changes(before, now, groups)
    if not found:
        return f"{before} has no rows of a millisecond and more in common with this run"
    within = sum(abs(change) <= 0.1 for _, _, change in found)
    most = "".join(f"\n  {change:+5.0%}  {row}, against {peer}" for row, peer, change in found[:10])
    return f"{within} of {len(found)} ratios are within 10 % of the earlier run's; the furthest:{most}"


def markdown(folder: Path) -> str:
    """Return the table of docs/performance.md: prefill against the best peer of each row, a column for each machine."""
    found = load_all(folder, "prefill")
    if not found:
        raise FileNotFoundError(f"{folder} has no results of prefill: run `python -m benchmarks prefill` first")
    named = [f"{kept['machine']['cpu']}, {kept['machine']['instruction_set']} kernels" for kept in found]
    lines = [
        "The time of the best other library in units of cattn's, and cattn's share of the FMA peak; one thread, causal",
        "unless all keys are visible, medians of interleaved rounds (`python -m benchmarks prefill`):",
        "",
        "| query | " + " | ".join(named) + " |",
        "| --- |" + " --- |" * len(found),
    ]
    rows = [{row["name"]: row for row in kept["rows"]} for kept in found]
    lines += [f"| {name} | " + " | ".join(_cell(of.get(name)) for of in rows) + " |" for name in rows[0]]
    lines.append("")
    for kept, name in zip(found, named, strict=True):
        machine = kept["machine"]
        packages = {peer.package: peer.title.split()[0] for peer in PEERS.values() if peer.package in machine}
        versions = ", ".join(f"{title} {machine[package]}" for package, title in packages.items())
        lines.append(f"- {name}: {machine['date']}, {versions}.")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    """Return a machine's cell of the table: the best peer's ratio and name, and the share of the peak."""
    if row is None:
        return ""
    first = row.get("best_peer")
    best = [f"{row['ratios'][first]:.2f}× ({PEERS[first].title})"] if first in PEERS else []
    return ", ".join([*best, *([f"{row['percent']:.0f} %"] if "percent" in row else [])])


def write_into(path: Path, table: str) -> None:
    """Put the table between the marks of a Markdown file."""
    begin, end = "<!-- benchmarks: begin -->\n", "<!-- benchmarks: end -->"
    text = path.read_text("utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{path.name} has no marks '{begin.strip()}' and '{end}'")
    before, rest = text.split(begin, 1)
    path.write_text(before + begin + table + end + rest.split(end, 1)[1], "utf-8")


# ---- the picture -----------------------------------------------------------------------------------------------------
def draw(folder: Path) -> Path | None:
    """Draw the ratios of causal attention by sequence length from the kept results of all machines. Return the file."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    found = load_all(folder, "prefill")
    if not found:
        return None
    figure, axes = plt.subplots(
        1, len(found), figsize=(3 + 3.6 * len(found), 4), dpi=110, layout="constrained", sharey=True, squeeze=False
    )
    for ax, kept in zip(axes[0], found, strict=True):
        _draw_machine(ax, kept, mpl.colormaps["tab20"])  # more colors than there are peers
    axes[0, 0].set_ylabel("times as long as cattn")
    axes[0, 0].set_ylim(bottom=0)
    curves = {curve.get_label(): curve for ax in axes[0] for curve in ax.get_lines()[:-1]}
    figure.legend(list(curves.values()), list(curves), loc="outside right center", fontsize="small")
    figure.suptitle("one thread, causal float32, head_dim 64", fontsize="medium")
    path = folder / "ratios.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def _draw_machine(ax: Any, kept: dict[str, Any], colors: Callable[[int], Any]) -> None:
    """Draw one curve for each peer, in the peer's own color, and then a line at 1."""
    rows = [row for row in kept["rows"] if row["dtype"] == "float32" and row["shape"][3] == 64]
    rows = [row for row in rows if row.get("keys") is None]  # causal
    machine = kept["machine"]
    ax.set(xlabel="T, tokens", xscale="log")
    ax.set_title(f"{machine['cpu']}\n{machine['instruction_set']} kernels", fontsize="small")
    lengths = [row["T"] for row in rows]
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    for number, (name, peer) in enumerate(PEERS.items()):
        points = [(row["T"], row["ratios"][name]) for row in rows if name in row["ratios"]]
        if points:
            ax.plot(*zip(*points, strict=True), "o-", color=colors(number), label=peer.title)
    ax.axhline(1, color="0.3", linewidth=1)
