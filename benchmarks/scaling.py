"""How time grows with T, head_dim, heads and threads, and a model of it.

A call takes

    call + wake (two threads or more) + tasks * task / threads + flops / rate / threads + scores * score / threads

plus, where keys and values stream by, bytes / bandwidth. Six constants, found by least squares of the relative error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn

from .machine import facts
from .report import duration
from .timing import interleave

ROUNDS = 15
TERMS = ("call", "wake", "task", "flop", "score", "byte")


@dataclass(frozen=True)
class Point:
    """One size that is measured."""

    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    threads: int

    def terms(self) -> NDArray[np.float64]:
        """Return how much of each term a call has."""
        causal = self.seqlen_q == self.seqlen_k
        pairs = self.seqlen_q * (self.seqlen_q + 1) / 2 if causal else self.seqlen_q * self.seqlen_k
        pairs *= self.heads
        blocks = -(-self.seqlen_q // 96) * self.heads
        share = min(self.threads, blocks)
        few = self.seqlen_q <= 16
        flops = 4.0 * pairs * self.head_dim
        streamed = 8.0 * self.heads * self.seqlen_k * self.head_dim if few else 0.0
        wake = float(self.threads > 1)
        tiled = np.array([blocks, flops, pairs]) * (not few)
        return np.array([1.0, wake, *tiled / share, streamed / share])

    def describe(self) -> str:
        """Return the size as text."""
        kind = "causal" if self.seqlen_q == self.seqlen_k else f"T_q={self.seqlen_q}"
        return f"H={self.heads} T={self.seqlen_k} D={self.head_dim} {kind}, threads {self.threads}"


def grid() -> Iterator[Point]:
    """Sizes from a bare call to thousands of tokens."""
    for threads in (1, 2):
        for head_dim in (32, 64, 128):
            for tokens, heads in ((128, 12), (256, 12), (512, 12), (1024, 12), (2048, 6), (4096, 2)):
                yield Point(heads, tokens, tokens, head_dim, threads)
        for heads in (2, 6, 24):
            yield Point(heads, 512, 512, 64, threads)
    yield Point(1, 1, 1, 64, 1)
    for tokens in (1024, 4096, 16384):
        yield Point(32, 1, tokens, 128, 1)


def call_of(point: Point) -> Callable[[], object]:
    """Return a call of one size."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, point.heads, point.seqlen_q, point.head_dim), dtype=np.float32)
    key, value = rng.standard_normal((2, 1, point.heads, point.seqlen_k, point.head_dim), dtype=np.float32)
    return functools.partial(cattn.causal_attention, query, key, value, out=np.empty_like(query))


def measure(points: list[Point]) -> NDArray[np.float64]:
    """Return the median seconds of each size: sizes take turns, so that no mood of the machine has one for itself."""
    found = {}
    for threads in {point.threads for point in points}:
        with cattn.num_threads(threads):
            found |= interleave({point: call_of(point) for point in points if point.threads == threads}, ROUNDS)
    return np.array([found[point].median for point in points])


def fit(points: list[Point], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the constants, none below 0, for the least sum of squared relative errors."""
    from scipy.optimize import nnls

    terms = np.array([point.terms() for point in points]) / seconds[:, None]
    scale = terms.max(axis=0)
    scale[scale == 0] = 1
    constants, _ = nnls(terms / scale, np.ones(len(points)))
    return constants / scale


def run(folder: Path, points: list[Point] | None = None, show: bool = True) -> dict[str, Any]:
    """Measure, fit, tell, and write results/scaling.md."""
    points = list(grid()) if points is None else points
    seconds = measure(points)
    constants = fit(points, seconds)
    predicted = np.array([point.terms() @ constants for point in points])
    errors = predicted / seconds - 1
    worst = int(np.abs(errors).argmax())
    machine = facts()
    flop, byte = constants[TERMS.index("flop")], constants[TERMS.index("byte")]
    told = [
        f"{machine['cpu']}, {machine['instruction_set']} kernels, {machine['date']}, float32.",
        "",
        f"A call costs {constants[0] * 1e6:.1f} µs, waking a second thread {constants[1] * 1e6:.1f} µs, "
        f"a task of 96 queries {constants[2] * 1e6:.2f} µs;",
        f"products run at {1e-9 / flop if flop else 0:.0f} GFLOP/s, "
        f"a score (exponential and sums) costs {constants[4] * 1e9:.3f} ns, "
        f"and decoding reads {1e-9 / byte if byte else 0:.1f} GB/s.",
        "",
        f"Largest deviation: {errors[worst]:+.0%} at {points[worst].describe()}; "
        f"{np.mean(np.abs(errors) <= 0.2):.0%} of the sizes within 20 %.",
        "",
        "| size | measured | predicted | deviation |",
        "| --- | --- | --- | --- |",
        *(
            f"| {p.describe()} | {duration(m)} | {duration(q)} | {e:+.0%} |"
            for p, m, q, e in zip(points, seconds, predicted, errors, strict=True)
        ),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling.md").write_text("# Time, measured and predicted\n\n" + "\n".join(told) + "\n")
    if show:
        print("\n".join(told))
    return {"constants": dict(zip(TERMS, constants.tolist(), strict=True)), "worst": float(errors[worst])}
