"""The kernels that this machine uses, and the time of attention compared with NumPy."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn
from cattn import _cattn

SHAPE = (1, 12, 1024, 64)
RUNS = 5
PATIENCE = 1.5  # seconds. All runs of the scalar table would take longer.
# BLAS libraries read these when they are loaded. Both sides of the comparison use one thread.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1")


def textbook(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    """Causal attention as a textbook writes it, scores in full; T_q = T_k."""
    scores = query @ key.swapaxes(-1, -2) / np.float32(np.sqrt(query.shape[-1]))
    scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights @ value)


def _seconds(function: Callable[..., Any], arrays: list[NDArray[Any]]) -> float:
    start = time.perf_counter()
    function(*arrays)
    return time.perf_counter() - start


def compare() -> tuple[float, float]:
    """Return the median seconds of cattn on one thread and of NumPy, measured alternately after a first run."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(SHAPE, np.float32) for _ in range(3)]
    cattn_seconds: list[float] = []
    numpy_seconds: list[float] = []
    until = time.perf_counter() + PATIENCE
    with cattn.num_threads(1):
        while len(cattn_seconds) < 2 or (len(cattn_seconds) <= RUNS and time.perf_counter() < until):
            cattn_seconds.append(_seconds(cattn.causal_attention, arrays))
            numpy_seconds.append(_seconds(textbook, arrays))
    return statistics.median(cattn_seconds[1:]), statistics.median(numpy_seconds[1:])


def measure() -> str:
    """Return three lines about the kernels in use and their speed."""
    try:  # in a process of its own, so that NumPy's threads can be limited
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env={**os.environ, **ONE_THREAD},
            capture_output=True,
            check=True,
            timeout=60,
        )
        cattn_seconds, numpy_seconds = json.loads(done.stdout)
        note = "one thread: "
    except (OSError, subprocess.SubprocessError, ValueError):
        cattn_seconds, numpy_seconds = compare()
        note = "cattn on one thread, NumPy as configured:\n"
    threads = cattn.get_num_threads()
    ratio = numpy_seconds / cattn_seconds
    return (
        f"This machine: {_cattn._get_isa()} kernels, {threads} thread{'s' if threads != 1 else ''}.\n"
        f"Causal attention at T = {SHAPE[-2]}, {SHAPE} float32,\n"
        f"{note}{1e3 * cattn_seconds:.1f} ms, {ratio:.1f} times as fast as textbook NumPy "
        f"({1e3 * numpy_seconds:.0f} ms)."
    )


if __name__ == "__main__":
    print(json.dumps(compare()))
