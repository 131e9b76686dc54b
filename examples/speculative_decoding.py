"""Speculative decoding by a chain and by a tree of drafts: every byte and every logit has the bits of greedy decoding.

    python examples/speculative_decoding.py

A table of the text proposes what may come next, and the GPT of small_gpt.py checks all proposals in one call. A chain
has one proposal for each place. A tree has several, and each of its nodes attends to its own path. `KVCache.truncate`
drops what was refused of a chain, and `KVCache.keep` keeps the accepted path of a tree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from small_gpt import GPT, Array, Attend, text

import cattn


class Run(NamedTuple):
    """Bytes, the logits that each was chosen from, and the number of calls of the model."""

    tokens: list[int]
    logits: Array
    calls: int


def greedy(model: GPT, prompt: bytes, count: int) -> Run:
    """Decode byte by byte."""
    caches = model.new_caches()
    rows = [model(list(prompt), caches)[-1]]
    tokens = [int(rows[-1].argmax())]
    while len(tokens) < count:
        rows.append(model(tokens[-1:], caches)[-1])
        tokens.append(int(rows[-1].argmax()))
    return Run(tokens, np.stack(rows), count)


# ---- drafts ----
class Drafts:
    """What came next in a text after each three bytes, the most frequent first."""

    def __init__(self, data: bytes) -> None:
        found: dict[bytes, Counter[int]] = defaultdict(Counter)
        for i in range(3, len(data)):
            found[data[i - 3 : i]][data[i]] += 1
        self.next = {before: [byte for byte, _ in counts.most_common(3)] for before, counts in found.items()}

    def chain(self, before: bytes, length: int) -> list[int]:
        """Return up to so many bytes, each the most frequent after the others."""
        drafts: list[int] = []
        while len(drafts) < length and (choices := self.next.get((before + bytes(drafts))[-3:])):
            drafts.append(choices[0])
        return drafts

    def tree(self, before: bytes, widths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the bytes of a tree's nodes and their parents; node 0 is the last byte of `before`."""
        tokens, parents, texts, level = [before[-1]], [-1], [before], [0]
        for width in widths:
            children = []
            for parent in level:
                for byte in self.next.get(texts[parent][-3:], [])[:width]:
                    children.append(len(tokens))
                    tokens.append(byte)
                    parents.append(parent)
                    texts.append(texts[parent] + bytes([byte]))
            level = children
        return tokens, parents


# ---- checks ----
def by_chain(model: GPT, drafts: Drafts, prompt: bytes, count: int, length: int = 5) -> Run:
    """Decode with a chain of drafts."""
    caches = model.new_caches(room=length)
    rows = [model(list(prompt), caches)[-1]]
    tokens, calls = [int(rows[-1].argmax())], 1
    while len(tokens) < count:
        kept = int(caches[0].lengths)
        proposed = drafts.chain(prompt + bytes(tokens), min(length, count - len(tokens) - 1))
        logits = model([tokens[-1], *proposed], caches)
        calls += 1
        for i, row in enumerate(logits):
            rows.append(row)
            tokens.append(int(row.argmax()))
            if i == len(proposed) or tokens[-1] != proposed[i]:
                break
        for cache in caches:
            cache.truncate(kept + i + 1)
    return Run(tokens, np.stack(rows), calls)


def attend_along(paths: list[list[int]]) -> Attend:
    """Return attention in which query i sees the tokens of path i and no others."""
    lists = np.full((len(paths), max(map(len, paths))), -1)
    for row, path in zip(lists, paths, strict=True):
        row[: len(path)] = path

    def attend(query: Array, cache: cattn.KVCache) -> Array:
        return cattn.scaled_dot_product_attention(query, cache.k, cache.v, key_indices=lists)

    return attend


def by_tree(model: GPT, drafts: Drafts, prompt: bytes, count: int, widths: Sequence[int] = (3, 2, 1, 1)) -> Run:
    """Decode with a tree of drafts."""
    caches = model.new_caches(room=40)
    rows = [model(list(prompt), caches)[-1]]
    tokens, calls = [int(rows[-1].argmax())], 1
    while len(tokens) < count:
        kept = int(caches[0].lengths)
        proposed, parents = drafts.tree(prompt + bytes(tokens), widths[: count - len(tokens) - 1])
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else range(kept)), kept + i])
        positions = [len(path) - 1 for path in paths]
        logits = model(proposed, caches, positions, attend_along(paths))
        calls += 1
        node: int | None = 0
        while node is not None:
            last = node
            rows.append(logits[node])
            tokens.append(int(logits[node].argmax()))
            children = (i for i, parent in enumerate(parents) if parent == last and proposed[i] == tokens[-1])
            node = next(children, None)
        for cache in caches:
            cache.keep(paths[last])
    return Run(tokens, np.stack(rows), calls)


def compare(model: GPT, drafts: Drafts, prompt: bytes, count: int) -> dict[str, Run]:
    """Decode in three ways and check that all bytes and bits are equal."""
    runs = {
        "greedy": greedy(model, prompt, count),
        "chain": by_chain(model, drafts, prompt, count),
        "tree": by_tree(model, drafts, prompt, count),
    }
    right = runs["greedy"]
    for name, run in runs.items():
        if run.tokens != right.tokens or run.logits.tobytes() != right.logits.tobytes():
            raise SystemExit(f"{name} differs from greedy decoding")
    return runs


if __name__ == "__main__":
    model = GPT()
    model.train(text(), 200, seed=2)
    runs = compare(model, Drafts(text()), b"    def __init__(self, ", 100)
    print(bytes(runs["greedy"].tokens).decode(errors="replace"))
    for name, run in runs.items():
        print(f"{name}: {len(run.tokens)} bytes in {run.calls} calls of the model, logits equal in every bit")
