"""Errors as text: a line for the screen, Markdown tables for docs/accuracy.md."""

from __future__ import annotations

from typing import Any

TITLES = {"cattn": "cattn", "torch": "PyTorch", "jax": "JAX", "numpy": "NumPy"}
MOST = {"rms": 1.1, "largest": 2.0}  # targets of attention and its gradients, relative to the best peer's error

Row = dict[str, Any]


def number(x: float) -> str:
    """Return a number with two or three digits, large ones with an exponent."""
    if x == 0:
        return "0"
    return f"{x:.1e}".replace("e+0", "e").replace("e+", "e") if x >= 1e4 else f"{x:.{0 if x >= 99.5 else 2}f}"


def cancels(row: Row) -> bool:
    """Return whether the quantity is a sum whose terms cancel; oracle.py explains its unit."""
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


def line(row: Row) -> str:
    """Return one row for the screen."""
    cells = "  ".join(f"{title} {cell(row, who)}" for who, title in TITLES.items())
    judged = "".join(f"  {ratio:.2f}" for ratio in ratios(row).values())
    name = f"{row['name']}, {row['quantity']}"
    return f"{row['dtype']:<9} {name:<36} {cells}{judged}{' (beyond)' if beyond(row) else ''}"


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


def markdown(kept: dict[str, Any]) -> str:
    """Return all tables, folded."""
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
        lines.append(f"- {dtype}: {within} of {len(part)} rows within 1.1 (RMS) and 2 (largest) of the best peer")
    if oracle := kept.get("oracle"):
        worst = max(oracle.values())
        lines += ["", f"The oracle differs from mpmath by at most {worst:.1g} of these units in float64."]
    return "\n".join(lines) + "\n"
