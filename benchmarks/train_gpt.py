"""A small GPT trained in PyTorch, with PyTorch's attention and with cattn's in its place: losses and time.

``python -m benchmarks.train_gpt`` trains two layers on the sources of Python's standard library, byte by byte, T=1024:
once without dropout from one seed with both, step by step in turn; then with dropout 0.1, three seeds with PyTorch and
one with cattn.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

import cattn
from cattn.integrations.torch import use_cattn

from .machine import save


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and added to what came before."""

    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.feed = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of shape (B, T, d) one layer further."""
        batch, tokens, d = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        context = nn.functional.scaled_dot_product_attention(*heads, dropout_p=p, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(batch, tokens, d))
        y: torch.Tensor = x + self.feed(self.norm2(x))
        return y


class GPT(nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self, d: int, heads: int, layers: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, d), nn.Embedding(context, d)
        self.blocks = nn.Sequential(*(Block(d, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, 256)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def text() -> torch.Tensor:
    """Return the sources of some modules that are on every machine."""
    modules = (argparse, inspect, json, statistics, contextlib)
    return torch.tensor(list("\n".join(inspect.getsource(module) for module in modules).encode()))


def losses(data: torch.Tensor, seed: int, dropout: float, tokens: int) -> Iterator[float]:
    """Train, one step for each loss that is asked for."""
    torch.manual_seed(seed)
    model = GPT(128, 4, 2, tokens, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    while True:
        start = int(torch.randint(len(data) - tokens - 1, (1,), generator=order))
        piece = data[start : start + tokens + 1]
        loss = nn.functional.cross_entropy(model(piece[None, :-1])[0], piece[1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        yield loss.item()


def step(run: Iterator[float], swapped: bool) -> tuple[float, float]:
    """Return the loss of the next step, and its seconds."""
    with use_cattn() if swapped else contextlib.nullcontext():
        begin = time.perf_counter()
        loss = next(run)
        return loss, time.perf_counter() - begin


def train(data: torch.Tensor, steps: int, tokens: int) -> dict[str, Any]:
    """Run everything, step by step in turn."""
    found: dict[str, Any] = {}
    bar = tqdm(total=steps * 6, desc="train_gpt")
    for name, dropout, runs in (
        ("dropout 0", 0.0, {"torch": (0, False), "cattn": (0, True)}),
        ("dropout 0.1", 0.1, {"torch": (0, False), "torch 1": (1, False), "torch 2": (2, False), "cattn": (0, True)}),
    ):
        trained = {who: (losses(data, seed, dropout, tokens), swapped) for who, (seed, swapped) in runs.items()}
        states = {who: torch.get_rng_state() for who in trained}
        curves: dict[str, list[float]] = {who: [] for who in trained}
        seconds: dict[str, list[float]] = {who: [] for who in trained}
        for _ in range(steps):
            for who, (run, swapped) in trained.items():
                torch.set_rng_state(states[who])  # each run has PyTorch's generator for itself
                loss, took = step(run, swapped)
                states[who] = torch.get_rng_state()
                curves[who].append(loss)
                seconds[who].append(took)
                bar.update()
        found[name] = {
            "losses": curves,
            "median step, ms": {who: 1e3 * statistics.median(times) for who, times in seconds.items()},
        }
    bar.close()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Train, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_gpt", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with cattn.num_threads(1):
        found = train(text(), options.steps, options.tokens)
    plain, dropped = found["dropout 0"], found["dropout 0.1"]
    furthest = max(abs(a - b) for a, b in zip(plain["losses"]["torch"], plain["losses"]["cattn"], strict=True))
    last = {who: statistics.mean(curve[-10:]) for who, curve in dropped["losses"].items()}
    print(f"dropout 0: losses differ by at most {furthest:.1e} over {options.steps} steps")
    print("dropout 0.1: mean of the last ten losses:", ", ".join(f"{who} {loss:.3f}" for who, loss in last.items()))
    for name, result in found.items():
        times = result["median step, ms"]
        ratio = times["torch"] / times["cattn"]
        print(f"{name}: a step takes {times['torch']:.0f} ms, with cattn {times['cattn']:.0f} ms: {ratio:.2f}x")
    save(options.output, "train_gpt", [{"name": name, **result} for name, result in found.items()])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
