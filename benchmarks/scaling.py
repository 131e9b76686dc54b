"""A model of the time: how it grows with T, head_dim, heads and threads.

    time = call + wake + (tasks · task + flops · flop + scores · score + bytes · byte) / threads

A task is 96 queries of one head. Scores are the visible pairs of a query and a key; each costs an exponential and its
part of the sums. Bytes are keys and values, for calls with few queries, which stream them. `wake` is paid with two
threads or more. The six constants are fitted by least squares of the relative error.
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

from .groups import qkv
from .report import duration, save
from .timing import Timing, interleave

ROUNDS = 15
TERMS = ("call", "wake", "task", "flop", "score", "byte")


@dataclass(frozen=True)
class Point:
    """One size; causal if there are as many queries as keys."""

    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    threads: int

    def terms(self) -> NDArray[np.float64]:
        """Return how much of each term a call has."""
        keys = (self.seqlen_k + 1) / 2 if self.seqlen_q == self.seqlen_k else self.seqlen_k
        pairs = self.heads * self.seqlen_q * keys
        tasks = -(-self.seqlen_q // 96) * self.heads
        if self.seqlen_q <= 16:
            work = [0, 0, 0, 8.0 * self.heads * self.seqlen_k * self.head_dim]
        else:
            work = [tasks, 4.0 * pairs * self.head_dim, pairs, 0]
        return np.array([1.0, self.threads > 1, *np.array(work) / min(self.threads, tasks)])

    def __str__(self) -> str:
        kind = "causal" if self.seqlen_q == self.seqlen_k else f"T_q={self.seqlen_q}"
        return f"H={self.heads} T={self.seqlen_k} D={self.head_dim} {kind}, threads {self.threads}"

    def call(self) -> Callable[[], object]:
        """Return a call of this size."""
        shapes = [(1, self.heads, length, self.head_dim) for length in (self.seqlen_q, self.seqlen_k)]
        query, key, value = qkv(shapes[0], kv_shape=shapes[1])
        return functools.partial(cattn.causal_attention, query, key, value, out=np.empty_like(query))


def grid() -> Iterator[Point]:
    """Return sizes from an empty call to thousands of tokens."""
    for threads in (1, 2):
        for head_dim in (32, 64, 128):
            for tokens, heads in ((128, 12), (256, 12), (512, 12), (1024, 12), (2048, 6), (4096, 2)):
                yield Point(heads, tokens, tokens, head_dim, threads)
        for heads in (2, 6, 24):
            yield Point(heads, 512, 512, 64, threads)
    yield Point(1, 1, 1, 64, 1)
    for tokens in (1024, 4096, 16384):
        yield Point(32, 1, tokens, 128, 1)


def measure(points: list[Point]) -> NDArray[np.float64]:
    """Return the median seconds of each size. The sizes take turns."""
    found: dict[Point, Timing] = {}
    for threads in {point.threads for point in points}:
        with cattn.num_threads(threads):
            found |= interleave({point: point.call() for point in points if point.threads == threads}, ROUNDS)
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
    """Measure, fit, print, and keep the constants and the measured and predicted time of each size."""
    points = list(grid()) if points is None else points
    seconds = measure(points)
    constants = fit(points, seconds)
    predicted = np.array([point.terms() @ constants for point in points])
    errors = predicted / seconds - 1
    worst = int(np.abs(errors).argmax())
    call, wake, task, flop, score, byte = constants
    rows = [
        {"name": str(point), "measured": float(measured), "predicted": float(model)}
        for point, measured, model in zip(points, seconds, predicted, strict=True)
    ]
    named = dict(zip(TERMS, constants.tolist(), strict=True))
    save(folder, "scaling", rows, constants=named)
    if show:
        print(
            f"A call costs {call * 1e6:.1f} µs, waking a second thread {wake * 1e6:.1f} µs, "
            f"a task of 96 queries {task * 1e6:.2f} µs;\n"
            f"products run at {1e-9 / flop if flop else 0:.0f} GFLOP/s, "
            f"a score (exponential and sums) costs {score * 1e9:.3f} ns, "
            f"and decoding reads {1e-9 / byte if byte else 0:.1f} GB/s.\n"
            f"Largest deviation: {errors[worst]:+.0%} at {points[worst]}; "
            f"{np.mean(np.abs(errors) <= 0.2):.0%} of the sizes within 20 %."
        )
        for row, error in zip(rows, errors, strict=True):
            times = duration(float(row["measured"])), duration(float(row["predicted"]))
            print(f"{row['name']:<44} {times[0]:>8} {times[1]:>8} {error:+.0%}")
    return {"constants": named, "worst": float(errors[worst])}
