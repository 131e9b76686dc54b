"""Train a small GPT in PyTorch, with PyTorch's attention and with cattn's, and compare losses and times.

The GPT has two layers and reads the sources of Python's standard library, byte by byte, 1024 at a time. Without dropout
both attentions start from the same seed. With dropout 0.1 there are three seeds with PyTorch and one with cattn. The
runs take turns, step by step. This takes some minutes; `--steps` and `--tokens` make it shorter. It needs PyTorch and
tqdm.

`--page docs/live_gpt.npz` trains the GPT of the site's live page instead, by page_gpt.py, in a quarter of an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

import cattn
from cattn.integrations.torch import use_cattn


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a layer norm and with a residual connection."""

    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.feed = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, of the shape (B, T, d) of x."""
        batch, tokens, d = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        context = nn.functional.scaled_dot_product_attention(*heads, dropout_p=p, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(batch, tokens, d))
        y: torch.Tensor = x + self.feed(self.norm2(x))
        return y


class GPT(nn.Module):
    """A GPT on bytes."""

    def __init__(self, d: int, heads: int, layers: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, d), nn.Embedding(context, d)
        self.blocks = nn.Sequential(*(Block(d, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, 256) of the next byte."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def text() -> torch.Tensor:
    """Return the sources of some modules of the standard library."""
    modules = (argparse, inspect, json, statistics, contextlib)
    return torch.tensor(list("\n".join(inspect.getsource(module) for module in modules).encode()))


def losses(data: torch.Tensor, seed: int, dropout: float, tokens: int) -> Iterator[float]:
    """Train. Every loss is the result of one step."""
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


def compare(steps: int = 100, tokens: int = 1024) -> list[dict[str, Any]]:
    """Train without and with dropout, on one thread; return the losses and the median time of a step."""
    torch.set_num_threads(1)
    data = text()
    rows: list[dict[str, Any]] = []
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
                torch.set_rng_state(states[who])  # each run has its own state of PyTorch's generator
                with cattn.num_threads(1):
                    loss, took = step(run, swapped)
                states[who] = torch.get_rng_state()
                curves[who].append(loss)
                seconds[who].append(took)
                bar.update()
        medians = {who: 1e3 * statistics.median(times) for who, times in seconds.items()}
        rows.append({"name": name, "losses": curves, "median step, ms": medians})
    bar.close()
    plain, dropped = (row["losses"] for row in rows)
    furthest = max(abs(a - b) for a, b in zip(plain["torch"], plain["cattn"], strict=True))
    last = ", ".join(f"{who} {statistics.mean(curve[-10:]):.3f}" for who, curve in dropped.items())
    print(f"dropout 0: losses differ by at most {furthest:.1e} over {steps} steps")
    print(f"dropout 0.1: mean of the last ten losses: {last}")
    for row in rows:
        times = row["median step, ms"]
        ratio = times["torch"] / times["cattn"]
        print(f"{row['name']}: a step takes {times['torch']:.0f} ms, with cattn {times['cattn']:.0f} ms: {ratio:.2f}x")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--page", metavar="FILE", help="train the GPT of the live page, and write it there")
    found = parser.parse_args()
    if found.page:
        import page_gpt

        page_gpt.train(found.page, found.steps or 3200)
    else:
        compare(found.steps or 100, found.tokens)
