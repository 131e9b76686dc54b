"""The page of a view: its module and style, a file that needs nothing else, and a picture for where no page can run."""

from __future__ import annotations

import base64
import functools
import io
import json
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from .._input.arrays import is_bfloat16
from .._plot import plot_attention
from ._contents import FIELDS, Statistics, Weights, _largest_of_blocks

# In the order in which their classes build on each other.
SCRIPTS = (
    *("numbers", "colours", "grids", "page", "heatmap", "text", "strips"),
    *("view", "weights", "statistics", "main"),
)
MOST_PANELS = 12  # of the picture
MOST_CELLS = 256  # of a panel of the picture, along one axis

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="cattn">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0; padding: 12px; background: Canvas; color: CanvasText; }}
@media (max-width: 500px) {{ body {{ padding: 6px; }} }}
{style}</style>
</head>
<body>
<main id="view"></main>
<noscript>This page draws attention weights by a script, which this browser does not run.</noscript>
<script type="application/json" id="state">{state}</script>
<script type="text/plain" id="weights">{weights}</script>
<script type="module">
{module}
fitIntoFrame();
const state = JSON.parse(document.getElementById("state").textContent);
state.weights = document.getElementById("weights").textContent;
showSaved(state, document.getElementById("view"));
</script>
</body>
</html>
"""


@functools.cache
def module() -> str:
    """Return the ES module of the views."""
    folder = resources.files(__package__)
    return "\n".join((folder / f"{name}.js").read_text("utf-8") for name in SCRIPTS)


@functools.cache
def style() -> str:
    """Return the style sheet of the views."""
    return (resources.files(__package__) / "view.css").read_text("utf-8")


def first_state(contents: Weights | Statistics) -> dict[str, Any]:
    """Return the traits that a view starts with, besides its contents."""
    return {"heads": [[0, 0]], "query": -1, "key": -1, "scale": contents.scale}


def page(contents: Weights | Statistics, title: str, most: int) -> str:
    """Return a page that needs no other file and no kernel."""
    info, data = contents.pack(most)
    state = json.dumps({"info": info, **first_state(contents)}, ensure_ascii=False)
    return PAGE.format(
        title=escape(title),
        style=style(),
        state=state.replace("<", "\\u003c"),  # a token must not end the script
        weights=base64.b64encode(data).decode("ascii"),
        module=module(),
    )


def picture(contents: Weights | Statistics) -> bytes | None:
    """Return the contents as a picture in PNG; None without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")  # not one of pyplot, which notebooks would show by itself
    _draw_weights(figure, contents) if isinstance(contents, Weights) else _draw_statistics(figure, contents)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80, facecolor="white")
    return file.getvalue()


def _head_title(contents: Weights | Statistics, layer: int, head: int) -> str:
    info = contents.info
    named = f"layer {info['layers'][layer] if info['layers'] else layer}, "
    return (named if info["n_layers"] > 1 or info["layers"] else "") + f"head {head}"


def _draw_weights(figure: Any, contents: Weights) -> None:
    """Draw the first heads."""
    n_layers, heads, seqlen_q, seqlen_k = contents.shape
    chosen = [(layer, head) for layer in range(n_layers) for head in range(heads)][:MOST_PANELS]
    block = -(-max(seqlen_q, seqlen_k) // MOST_CELLS)
    panels = np.stack([_largest_of_blocks(contents.layers[layer][head], block) for layer, head in chosen])
    columns = min(len(chosen), 4)
    rows = -(-len(chosen) // columns)
    width = 5.0 if len(chosen) == 1 else 2.8
    height = float(np.clip(width * seqlen_q / seqlen_k, 1.0, 8.0))
    figure.set_size_inches(columns * width + 1.4, rows * (height + 0.6))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[len(chosen) :]:
        unused.set_visible(False)
    named = block == 1 and contents.info["tokens"] is not None
    info = contents.info
    plot_attention(
        panels,
        info["tokens"] if named else None,
        axes[: len(chosen)],
        query_tokens=info["query_tokens"] if block == 1 else None,
        titles=[_head_title(contents, *each) for each in chosen] if n_layers * heads > 1 else "",
        label="weight" if block == 1 else f"largest weight of {block} x {block}",
    )


def _draw_statistics(figure: Any, contents: Statistics) -> None:
    """Draw each statistic as a heat map of heads and tokens."""
    n_layers, heads = contents.shape
    rows = n_layers * heads
    height = float(np.clip(rows * 0.14, 0.5, 3.0))
    figure.set_size_inches(9.0, len(contents.fields) * (height + 0.45) + 0.3)
    axes = figure.subplots(len(contents.fields), squeeze=False, sharex=True).ravel()
    for where, (name, array) in zip(axes, contents.fields.items(), strict=True):
        title, kind = FIELDS[name]
        numbers = array.reshape(rows, -1)
        numbers = numbers.astype(np.float32) if is_bfloat16(numbers.dtype) else numbers
        start = contents.info["offset"] if kind == "queries" else 0
        extent = (start - 0.5, start + numbers.shape[1] - 0.5, rows - 0.5, -0.5)
        image = where.imshow(np.ma.masked_invalid(numbers), aspect="auto", extent=extent, cmap="viridis")
        where.set_title(title, loc="left", fontsize="medium")
        where.set(ylabel="head", yticks=[0] if rows == 1 else [0, rows - 1])
        figure.colorbar(image, ax=where, pad=0.01)
    axes[-1].set_xlabel("token")
