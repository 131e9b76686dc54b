"""Saves the views of docs/view.md: four heads whose queries and keys are made by hand, and their statistics."""

from pathlib import Path
from typing import Any

import numpy as np

import cattn

TEXT = "the cat sat on the mat . the dog sat on the rug . the cat saw the dog . the dog saw the cat ."


WORDS = ("cat", "dog", "mouse", "fox", "owl", "horse", "child")
DEEDS = ("saw", "heard", "met", "followed", "fed")


def made_by_hand(tokens: list[str]) -> dict[str, Any]:
    """Return the arguments of four heads over the tokens, query and key of shape (4, T, d).

    A query and a key are the sum of two parts: which token it is, and where it stands. Each head asks for something
    else: the previous token, the same token, what came after the same token, and the tokens near by.
    """
    n = len(tokens)
    words = sorted(set(tokens))
    is_word = np.eye(len(words))[[words.index(token) for token in tokens]]
    place = np.eye(n)
    before = np.roll(place, -1, axis=1)  # a query that fits the key of the previous place
    after_word = np.roll(is_word, 1, axis=0)  # the word before each key
    after_word[0] = 0
    nothing = np.zeros_like(is_word)
    nowhere = np.zeros_like(place)
    query = [(nothing, before), (is_word, nowhere), (is_word, nowhere), (nothing, nowhere)]
    key = [(nothing, place), (is_word, nowhere), (after_word, nowhere), (nothing, nowhere)]
    joined = [np.stack([np.concatenate(parts, axis=1) for parts in side]) for side in (query, key)]
    arrays = {name: side.astype(np.float32) for name, side in zip(("query", "key"), joined, strict=True)}
    return {**arrays, "is_causal": True, "enable_gqa": True, "scale": 10.0, "alibi_slopes": [0.0, 0.0, 0.0, 0.5]}


def long_text(rng: np.random.Generator) -> list[str]:
    """Return 1,000 tokens: sentences of five words."""
    sentences = (["the", rng.choice(WORDS), rng.choice(DEEDS), "the", rng.choice(WORDS)] for _ in range(200))
    return [str(word) for sentence in sentences for word in sentence]


def write(folder: Path) -> None:
    """Save the views."""
    tokens = TEXT.split()
    weights = cattn.attention_weights(**made_by_hand(tokens))
    cattn.view_attention(weights, tokens).save(folder / "heads.html", title="Four heads made by hand")
    tokens = long_text(np.random.default_rng(0))
    fields = ["entropy", "distance", "max_weight", "received"]
    statistics = cattn.attention_statistics(**made_by_hand(tokens), statistics=fields, top_k=4)
    cattn.view_attention(statistics, tokens).save(folder / "statistics.html", title="Statistics of four heads")
