"""Pictures of the results: ratios, percent of the peak and memory, against the length of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .machine import load
from .report import TITLES


def draw(folder: Path) -> list[Path]:
    """Draw what there are results of; returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    kept = [(prefill, load(folder, "prefill")), (memory, load(folder, "memory"))]
    return [path for function, results in kept if results for path in function(folder, results)]


def _axes(title: str, ylabel: str, lengths: list[int]) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6.4, 3.6), dpi=110, layout="constrained")
    ax.set(xlabel="T, tokens", ylabel=ylabel, xscale="log")
    ax.set_title(title, fontsize="medium")
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    return figure, ax


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path)
    plt.close(figure)
    return path


def prefill(folder: Path, results: dict[str, Any]) -> list[Path]:
    """How many times as long the peers take, and which part of the FMA peak is used."""
    rows = [row for row in results["rows"] if row["dtype"] == "float32" and row["shape"][3] == 64]
    where = f"{results['machine']['cpu']}, {results['machine']['instruction_set']}, one thread, float32, head_dim 64"
    lengths = [row["T"] for row in rows]
    figure, ax = _axes(where, "times as long as cattn", lengths)
    for peer, title in TITLES.items():
        points = [(row["T"], row["ratios"][peer]) for row in rows if peer in row["ratios"]]
        if points:
            ax.plot(*zip(*points, strict=True), "o-", label=title)
    ax.axhline(1, color="0.3", linewidth=1)
    ax.set_ylim(bottom=0)
    ax.legend()
    paths = [_save(figure, folder / "ratios.png")]
    if all("percent" in row for row in rows):
        figure, ax = _axes(where, "% of the FMA peak", lengths)
        ax.plot(lengths, [row["percent"] for row in rows], "o-", label="cattn")
        for peer, title in TITLES.items():
            points = [(row["T"], row["percent"] / row["ratios"][peer]) for row in rows if peer in row["ratios"]]
            if points:
                ax.plot(*zip(*points, strict=True), "o--", label=title)
        ax.set_ylim(0, 100)
        ax.legend()
        paths.append(_save(figure, folder / "percent.png"))
    return paths


def memory(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Memory beyond inputs and outputs."""
    rows = results["rows"]
    figure, ax = _axes("12 heads, float32, head_dim 64", "MiB beyond inputs and output", [row["T"] for row in rows])
    for name in rows[0]["bytes"]:
        sizes = [max(row["bytes"][name], 4096) / 2**20 for row in rows]
        ax.plot([row["T"] for row in rows], sizes, "o-", label={"cattn": "cattn"}.get(name, TITLES.get(name, name)))
    ax.set_yscale("log")
    ax.legend()
    return [_save(figure, folder / "memory.png")]
