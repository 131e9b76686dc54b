"""Causal attention, one thread: cattn against PyTorch's fused kernel and the NumPy textbook, interleaved.

python -m benchmarks.bench_attention [--rounds N]
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from numpy.typing import NDArray

import cattn

from .common import as_row, cpu_name, interleave, save

SHAPES = [(1, 12, 128, 64), (1, 12, 512, 64), (1, 12, 1024, 64), (1, 12, 2048, 64), (1, 8, 1024, 128), (8, 12, 64, 64)]


def textbook(query: NDArray[np.float32], key: NDArray[np.float32], value: NDArray[np.float32]) -> NDArray[np.float32]:
    """Causal attention as a NumPy user writes it: scores, mask, softmax, product."""
    scores = query @ key.swapaxes(-1, -2) * np.float32(1 / np.sqrt(query.shape[-1]))
    scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value


def main() -> None:
    """Run, print a table, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds

    torch.set_num_threads(1)
    fused = torch.nn.functional.scaled_dot_product_attention
    print(f"{cpu_name()}, one thread, float32, causal; medians of {rounds} interleaved rounds\n")
    columns = f"{'cattn ms':>10} {'GF/s':>6} {'torch ms':>10} {'ratio':>6} {'NumPy ms':>10} {'ratio':>6}  spread"
    print(f"{'shape':>18} {columns}")
    rows = []
    with cattn.num_threads(1):
        for shape in SHAPES:
            rng = np.random.default_rng(0)
            query, key, value = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
            tensors = [torch.from_numpy(array) for array in (query, key, value)]
            times = interleave(
                {
                    "cattn": lambda q=query, k=key, v=value: cattn.causal_attention(q, k, v),
                    "torch": lambda t=tensors: fused(*t, is_causal=True),
                    "numpy": lambda q=query, k=key, v=value: textbook(q, k, v),
                },
                rounds=rounds,
            )
            batch, heads, length, depth = shape
            gigaflops = 4e-9 * batch * heads * depth * length * (length + 1) / 2 / times["cattn"].median
            ours, torch_, numpy_ = (times[name].median for name in ("cattn", "torch", "numpy"))
            print(
                f"{shape!s:>18} {ours * 1e3:10.2f} {gigaflops:6.0f} {torch_ * 1e3:10.2f} {torch_ / ours:6.2f} "
                f"{numpy_ * 1e3:10.2f} {numpy_ / ours:6.2f}  {times['cattn'].spread:.0%}"
            )
            rows += [as_row(timing, shape=shape, dtype="float32", threads=1) for timing in times.values()]
    print(f"\nkept in {save('attention', rows).name}")


if __name__ == "__main__":
    main()
