"""The pictures of the site, its logo and its card for links.

The build of the documentation draws them into docs/_pictures, which Git ignores. They need cattn's extra "plot".
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

import cattn

FOLDER = Path(__file__).parent / "_pictures"
TOKENS = ["Your", "journey", "starts", "with", "one", "step"]
Panel = tuple[str, Any]  # title and matrix


def draw(name: str, panels: Sequence[Panel], queries: Sequence[str] | None = None, **options: Any) -> None:
    """Draw panels side by side."""
    figure, axes = plt.subplots(1, len(panels), figsize=(3.7 * len(panels), 3.9), layout="constrained", dpi=150)
    for index, (ax, (title, matrix)) in enumerate(zip(axes, panels, strict=True)):
        labels = {"query_tokens": queries} if queries and index == len(panels) - 1 else {}
        cattn.plot_attention(matrix, TOKENS, ax, titles=title, label="", **labels, **options)
        ax.set_ylabel("query" if index == 0 else "")
    figure.savefig(FOLDER / name, facecolor="white")
    plt.close(figure)


def write() -> None:
    """Draw all pictures, unless they are newer than this file: Sphinx copies what changes."""
    last = FOLDER / "card.png"
    if last.exists() and last.stat().st_mtime > Path(__file__).stat().st_mtime:
        return
    FOLDER.mkdir(exist_ok=True)
    rng = np.random.default_rng(4)
    query, key = rng.standard_normal((2, 6, 4))

    def weights(**options: Any) -> Any:
        return cattn.attention_weights(query, key, **options)

    draw(
        "hero.png",
        [
            ("scores: query · key", weights(stage="qk", is_causal=True)),
            ("later tokens hidden: −inf", weights(stage="mask", is_causal=True)),
            ("softmax: the weights", weights(is_causal=True)),
        ],
    )
    draw(
        "masks.png",
        [
            ("causal", weights(is_causal=True)),
            ("window of three tokens", weights(is_causal=True, window_size=(2, 0))),
            ("two tokens of padding", weights(key_value_seq_lengths=4)),
        ],
    )
    draw(
        "options.png",
        [
            ("scale four times as large", weights(is_causal=True, scale=2.0)),
            ("ALiBi: nearby tokens count more", head_weights(query, key, alibi_slopes=[1.0])),
            ("a sink takes a share of each row", head_weights(query, key, sinks=[1.0])),
        ],
    )
    draw(
        "dropout.png",
        [
            ("weights", weights(is_causal=True)),
            ("dropped, or divided by 0.7", weights(is_causal=True, dropout_p=0.3, rng=1, stage="dropout")),
        ],
    )
    draw(
        "decoding.png",
        [
            ("the full pass", weights(is_causal=True)),
            ("the last token alone", cattn.attention_weights(query[-1:], key)),
        ],
        queries=TOKENS[-1:],
    )

    draw_statistics()
    draw_logo()
    draw_card()


def shares() -> Any:
    """Return six rows of causal weights, relative to the largest of their row."""
    query, key = np.random.default_rng(7).standard_normal((2, 6, 4))
    weights = cattn.attention_weights(query, key, is_causal=True)
    return weights / weights.max(axis=-1, keepdims=True)


def draw_logo() -> None:
    """Draw a triangle of six rows, whose colours are weights."""
    cells, colours = [], np.rint(255 * plt.get_cmap("Blues")(0.3 + 0.6 * shares()))
    for row, column in np.argwhere(np.tri(6)):
        red, green, blue, _ = colours[row, column]
        colour = f"#{int(red):02x}{int(green):02x}{int(blue):02x}"
        cells.append(f'<rect x="{10 * column + 2}" y="{10 * row + 2}" width="9" height="9" rx="1.5" fill="{colour}"/>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 63 63">'
    (FOLDER / "logo.svg").write_text("\n".join([head, *cells, "</svg>"]) + "\n", encoding="utf-8")


def draw_card() -> None:
    """Draw the picture that accompanies links to the site."""
    figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    triangle = figure.add_axes((0.04, 0.12, 0.4, 0.76))
    triangle.imshow(np.ma.masked_where(np.tri(6) == 0, 0.3 + 0.6 * shares()), cmap="Blues", vmin=0, vmax=1)
    triangle.set_xticks(np.arange(7) - 0.5, [""] * 7)
    triangle.set_yticks(np.arange(7) - 0.5, [""] * 7)
    triangle.grid(color="white", linewidth=8)
    triangle.tick_params(length=0)
    triangle.spines[:].set_visible(False)
    figure.text(0.48, 0.6, "cattn", size=76, weight="bold", color="#08306b")
    figure.text(0.485, 0.47, "Attention for NumPy, in C", size=28, color="#333333")
    figure.text(0.485, 0.36, "fast · shows you the weights\nthe same bits every time", size=22, va="top")
    figure.savefig(FOLDER / "card.png")
    plt.close(figure)


def draw_statistics() -> None:
    """Draw the weights of one head, with a bar for each query or key, for each statistic."""
    rng = np.random.default_rng(3)
    query, key = rng.standard_normal((2, 6, 4)) * 1.5
    options = {"is_causal": True, "enable_gqa": True, "sinks": [-0.5]}
    weights = cattn.attention_weights(query[None], key[None], **options)[0]
    result = cattn.attention_statistics(query[None], key[None], top_k=1, **options)
    for name in ("lse", "max_score", "entropy", "max_weight", "sink_weight", "distance", "received", "received_max"):
        draw_statistic(name, weights, getattr(result, name)[0])
    draw_statistic("top_keys", weights, result.top_weights[0, :, 0], result.top_keys[0, :, 0])


def draw_statistic(name: str, weights: Any, numbers: Any, keys: Any = None) -> None:
    """Draw weights, and a statistic of the queries beside them or of the keys below them."""
    columns = name.startswith("received")
    shape = {"nrows": 2, "height_ratios": [3, 1]} if columns else {"ncols": 2, "width_ratios": [3, 1.2]}
    share = {"sharex": True} if columns else {"sharey": True}
    figure, (left, bars) = plt.subplots(
        figsize=(3.4, 4.3) if columns else (4.6, 3.4), layout="constrained", dpi=150, **shape, **share
    )
    cattn.plot_attention(weights, TOKENS, left)
    left.images[0].colorbar.remove()
    left.set_aspect("auto")  # as high or wide as the bars
    places = np.arange(len(numbers))
    drawn = (bars.bar if columns else bars.barh)(places, numbers, color="tab:orange")
    bars.bar_label(drawn, fmt="%.2f", padding=2, size=8)
    bars.margins(**{"y" if columns else "x": 0.35})
    bars.tick_params("x", rotation=45 if columns else 0)
    bars.set_title(name.replace("_", " "), size=10)
    bars.spines[["top", "right"]].set_visible(False)
    if keys is not None:
        left.scatter(keys, places, marker="o", facecolors="none", edgecolors="tab:orange", s=160, linewidths=2)
    figure.savefig(FOLDER / f"statistic_{name}.png", facecolor="white")
    plt.close(figure)


def head_weights(query: Any, key: Any, **options: Any) -> Any:
    """Return the weights of one head, for options that have one number a head."""
    return cattn.attention_weights(query[None], key[None], is_causal=True, enable_gqa=True, **options)[0]
