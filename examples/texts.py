"""Texts that every machine with Python has, for the notebooks: the source code of the standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


def library_texts(modules: str) -> dict[str, str]:
    """Return the source code of modules, whose names are separated by white space."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = {}
    for name in modules.split():
        path = library / f"{name}.py"
        path = path if path.exists() else library / name / "__init__.py"  # some have become packages
        texts[name] = path.read_text(encoding="utf-8")
    return texts


class Characters(NamedTuple):
    """A text by characters: their list, the index of each, and the text as indices, to learn from and to check."""

    characters: list[str]
    index: dict[str, int]
    learn: np.ndarray[Any, np.dtype[Any]]
    check: np.ndarray[Any, np.dtype[Any]]


def by_characters(texts: Iterable[str], aside: int) -> Characters:
    """Join the ASCII characters of texts; one part of `aside` is kept to check with."""
    text = "".join(character for character in "".join(texts) if character.isascii())
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    data = np.array([index[character] for character in text])
    cut = len(data) * (aside - 1) // aside
    return Characters(characters, index, data[:cut], data[cut:])


def byte_pairs(texts: Iterable[str], size: int) -> Any:
    """Train a tokenizer of bytes and the most frequent pairs of tokens, until there are `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer
