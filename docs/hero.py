"""Draw docs/_static/hero.png, the picture on the first page: three steps of causal attention on six tokens.

Run it after a change: python docs/hero.py. It needs cattn with its extra "plot".
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

import cattn

TOKENS = ["Your", "journey", "starts", "with", "one", "step"]
STEPS = {
    "qk": "scores: query · key",
    "mask": "later tokens hidden: −inf",
    "softmax": "softmax: the weights",
}


def draw(path: Path) -> None:
    """Draw the three steps side by side."""
    rng = np.random.default_rng(4)
    query, key = rng.standard_normal((2, 6, 4))
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.9), layout="constrained", dpi=150)
    for ax, (stage, title) in zip(axes, STEPS.items(), strict=True):
        matrix = cattn.attention_weights(query, key, is_causal=True, stage=stage)
        cattn.plot_attention(matrix, TOKENS, ax, titles=title, annotate=True, label="")
        if ax is not axes[0]:
            ax.set_ylabel("")
    figure.savefig(path, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).parent / "_static" / "hero.png")
