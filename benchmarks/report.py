"""Results as tables: on the screen, and as Markdown for the README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .machine import load
from .timing import SHORT

TITLES = {"torch": "PyTorch SDPA", "numpy": "NumPy textbook", "onnxruntime": "onnxruntime", "jax": "JAX"}


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def aims(row: dict[str, Any]) -> str:
    """Return the targets of a row, and whether they are met."""
    signs = {True: "met", False: "missed", None: "no peer"}
    told = []
    for name, aim in row["targets"].items():
        measured = "" if aim["measured"] is None else f" {aim['measured']:.3g}"
        kind = {"percent": "% of limit", "microseconds": "µs"}.get(name, name)
        most = name in ("microseconds", "ms", "MiB")
        told.append(f"{kind}{measured} ({'≤' if most else '≥'} {aim['target']:.3g}, {signs[aim['met']]})")
    return "; ".join(told)


def line(row: dict[str, Any]) -> str:
    """Return one row for the screen."""
    parts = [f"{row['name']:<38}"]
    if "seconds" in row:
        ours = row["seconds"]["cattn"]
        parts.append(f"{duration(ours['median']):>8} ±{ours['spread']:>4.0%} {ours['quiet']:>4.0%} quiet")
        parts.append(f"{row['percent']:>5.0f} %" if "percent" in row else " " * 7)
        parts.append("  ".join(f"{name} {ratio:.2f}x" for name, ratio in row["ratios"].items()))
    elif "bytes" in row:
        parts.append("  ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in row["bytes"].items()))
    told = aims(row)
    return "  ".join(parts) + (f"\n{'':>6}{told}" if told else "")


def _rows(folder: Path, group: str) -> dict[str, Any]:
    kept = load(folder, group)
    return {row["name"]: row for row in kept["rows"]} if kept else {}


def changes(before: Path, now: Path, groups: list[str]) -> list[tuple[str, str, float]]:
    """Return (row, peer, change) of every ratio that two runs have in common, of rows of a millisecond and more."""
    found = []
    for group in groups:
        old, new = _rows(before, group), _rows(now, group)
        for name in old.keys() & new.keys():
            if "ratios" in new[name] and new[name]["seconds"]["cattn"]["median"] >= SHORT:
                was, ratios = old[name]["ratios"], new[name]["ratios"]
                found += [(f"{group}: {name}", peer, ratios[peer] / was[peer] - 1) for peer in ratios if peer in was]
    return sorted(found, key=lambda change: -abs(change[2]))


def agreement(before: Path, now: Path, groups: list[str]) -> str:
    """Say how far the ratios of two runs differ, and name the ten that differ most."""
    found = changes(before, now, groups)
    if not found:
        return f"{before} has no rows of a millisecond and more in common with this run"
    within = sum(abs(change) <= 0.1 for _, _, change in found)
    most = "".join(f"\n  {change:+5.0%}  {row}, against {peer}" for row, peer, change in found[:10])
    return f"{within} of {len(found)} ratios are within 10 % of the earlier run's; the furthest:{most}"


def markdown(folder: Path) -> str:
    """Return the table of the README: prefill against the peers, with the machine's name and the date."""
    kept = load(folder, "prefill")
    if kept is None:
        raise FileNotFoundError(f"no {folder / 'prefill.json'}: run `python -m benchmarks prefill` first")
    machine, rows = kept["machine"], kept["rows"]
    peers = [peer for peer in TITLES if any(peer in row["ratios"] for row in rows)]
    versions = ", ".join(f"{TITLES[peer].split()[0]} {machine[peer]}" for peer in peers if peer in machine)
    lines = [
        f"One thread, causal, medians of interleaved rounds (`python -m benchmarks prefill`; {machine['cpu']}, "
        f"{machine['instruction_set']} kernels, {machine['date']}; {versions}):",
        "",
        "| "
        + " | ".join(["dtype, (B, H, T, head_dim)", "cattn", "of the FMA peak", *(TITLES[p] for p in peers)])
        + " |",
        "| --- | --- | --- |" + " --- |" * len(peers),
    ]
    for row in rows:
        ratios = (f"{row['ratios'][p]:.1f} times as long" if p in row["ratios"] else "" for p in peers)
        share = f"{row['percent']:.0f} %" if "percent" in row else ""
        took = duration(row["seconds"]["cattn"]["median"])
        lines.append(f"| {row['dtype']} {tuple(row['shape'])} | {took} | {share} | " + " | ".join(ratios) + " |")
    return "\n".join(lines) + "\n"


def write_into(path: Path, table: str) -> None:
    """Put the table between the marks of a Markdown file."""
    begin, end = "<!-- benchmarks: begin -->\n", "<!-- benchmarks: end -->"
    text = path.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{path.name} has no marks '{begin.strip()}' and '{end}'")
    before, rest = text.split(begin, 1)
    path.write_text(before + begin + table + end + rest.split(end, 1)[1])
