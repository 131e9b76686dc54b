"""Saves the views of docs/view.md: four heads whose queries and keys are made by hand, and their statistics."""

from pathlib import Path

import numpy as np

import cattn

TEXT = "the cat sat on the mat . the dog sat on the rug . the cat saw the dog . the dog saw the cat ."


def heads(tokens: list[str]) -> np.ndarray:
    """Return the weights of four heads over the tokens, shape (4, T, T).

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
    slopes = [0.0, 0.0, 0.0, 0.5]
    return cattn.attention_weights(*joined, is_causal=True, scale=5.0, alibi_slopes=slopes, enable_gqa=True)


def write(folder: Path) -> None:
    """Save the views."""
    tokens = TEXT.split()
    weights = heads(tokens).astype(np.float32)
    cattn.view_attention(weights, tokens).save(folder / "heads.html", title="Four heads made by hand")
