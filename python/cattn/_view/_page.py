"""The page of a view: its module and style, a file that needs nothing else, and a picture for where no page can run."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import zlib
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from .._input.arrays import is_bfloat16
from .._plot import as_text, plot_attention
from ._contents import FIELDS, Statistics, Weights, _largest_of_blocks

# In the order in which their classes build on each other.
SCRIPTS = ("data", "page", "heatmap", "forms", "view", "weights", "statistics")
LIVE_SCRIPTS = (*SCRIPTS[:-1], "core", "live")
CORE = "core.wasm"
NO_CORE = """\
live views need the compiled core of WebAssembly, which this installation lacks; wheels have it. In a clone: \
pip install ziglang && python tools/live && pip install ."""
PIXELS_PER_INCH = 80  # of the picture on a page
MOST_PANELS = 6  # of the picture; more heads are drawn on one sheet
MOST_CELLS = 256  # of a panel, along one axis
MOST_CELLS_OF_A_TILE = 48  # of a head on the sheet

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'{policy}; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="cattn">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0; padding: 12px; background: Canvas; color: CanvasText; }}
@media (max-width: 500px) {{ body {{ padding: 6px; }} }}
.unseen {{ position: absolute; width: 1px; height: 1px; margin: 0; overflow: hidden; clip-path: inset(50%); }}
{style}</style>
</head>
<body>
{heading}<main id="view"></main>
<noscript>This page draws attention weights by a script, which this browser does not run.</noscript>
<script type="application/json" id="state">{state}</script>
{data}
<script type="module">
{module}
fitIntoFrame();
const state = JSON.parse(document.getElementById("state").textContent);
const packed = (id) => unpack(document.getElementById(id).textContent);
{start}
</script>
</body>
</html>
"""
SHOW_SAVED = """\
state.weights = await packed("weights");
showSaved(state, document.getElementById("view"));"""
SHOW_LIVE = 'showLive(state, await packed("operands"), await packed("core"), document.getElementById("view"));'


@functools.cache
def module(names: tuple[str, ...] = SCRIPTS) -> str:
    """Return the ES module of the views, or other scripts of this folder."""
    folder = resources.files(__package__)
    return short("\n".join((folder / f"{name}.js").read_text("utf-8") for name in names))


def short(script: str) -> str:
    """Return a script without its indentation, and without the lines that are comments: a fifth of its bytes."""
    return re.sub(r"^ *//.*\n|^ +", "", script, flags=re.MULTILINE)


def core() -> bytes:
    """Return the compiled core of live views."""
    file = resources.files(__package__) / CORE
    if not file.is_file():
        raise RuntimeError(NO_CORE)
    return file.read_bytes()


@functools.cache
def style() -> str:
    """Return the style sheet of the views."""
    return (resources.files(__package__) / "view.css").read_text("utf-8")


def first_state(contents: Weights | Statistics) -> dict[str, Any]:
    """Return the traits that a view starts with, besides its contents."""
    head, query, key = contents.interesting()
    return {"heads": [head], "query": query, "key": key, "scale": contents.scale}


def page(contents: Weights | Statistics, title: str, most: int) -> str:
    """Return a page that needs no other file and no kernel."""
    if isinstance(contents, Weights) and contents.live is not None:
        info, data = contents.pack_live()
        return fill(title, info, {"operands": data, "core": core()}, LIVE_SCRIPTS, SHOW_LIVE)
    info, data = contents.pack(most, rounds=True)
    return fill(title, {"info": info, **first_state(contents)}, {"weights": data}, SCRIPTS, SHOW_SAVED)


def fill(
    title: str, state: dict[str, Any], data: dict[str, bytes], scripts: tuple[str, ...], start: str, more: str = ""
) -> str:
    """Return the page with a state and data, whose scripts, and `more` of them, are followed by `start`."""
    heading = state.get("info", state).get("heading")
    parts = (
        # half of causal weights are zeros, for which level 1 is enough
        f'<script type="text/plain" id="{name}">'
        f"{base64.b64encode(zlib.compress(part, 9 if name == 'core' else 1)).decode('ascii')}</script>"
        for name, part in data.items()
    )
    return PAGE.format(
        title=escape(as_text(title)),
        heading="" if heading else f'<h1 class="unseen">{escape(as_text(title))}</h1>\n',
        policy=" 'wasm-unsafe-eval'" if "core" in data else "",
        style=style(),
        state=json.dumps(state, ensure_ascii=False, allow_nan=False).replace(
            "<", "\\u003c"
        ),  # a token must not end the script
        data="\n".join(parts),
        module="\n".join([module(scripts), short(more)]),
        start=start,
    )


def picture(contents: Weights | Statistics) -> tuple[bytes, dict[str, int]] | None:
    """Return the contents as a picture in PNG, and its size on a page; None without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")  # not one of pyplot, which notebooks would show by itself
    _draw_weights(figure, contents) if isinstance(contents, Weights) else _draw_statistics(figure, contents)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * PIXELS_PER_INCH, facecolor="white")  # sharp on displays of high density
    width, height = (round(PIXELS_PER_INCH * inches) for inches in figure.get_size_inches())
    return file.getvalue(), {"width": width, "height": height}


def _head_title(contents: Weights | Statistics, layer: int, head: int) -> str:
    info = contents.info
    named = f"{info['axis']} {info['layers'][layer] if info['layers'] else layer}, "
    return (named if info["n_layers"] > 1 or info["layers"] else "") + f"head {head}"


def _draw_weights(figure: Any, contents: Weights) -> None:
    """Draw each head as a panel, or all on one sheet if they are many."""
    n_layers, heads, seqlen_q, seqlen_k = contents.shape
    if n_layers * heads > MOST_PANELS:
        _draw_sheet(figure, contents)
        return
    chosen = [(layer, head) for layer in range(n_layers) for head in range(heads)]
    block = -(-max(seqlen_q, seqlen_k) // MOST_CELLS)
    panels = np.stack([_largest_of_blocks(contents.layers[layer][head], block) for layer, head in chosen])
    columns = 2 if len(chosen) == 4 else min(len(chosen), 3)
    rows = -(-len(chosen) // columns)
    width = 5.0 if len(chosen) == 1 else 3.0
    height = float(np.clip(width * seqlen_q / seqlen_k, 1.0, 8.0))
    figure.set_size_inches(columns * width + 1.4, rows * (height + 0.6))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[len(chosen) :]:
        unused.set_visible(False)
    info = contents.info
    named = max(seqlen_q, seqlen_k) * 0.16 < width  # inches of a line of text
    plot_attention(
        panels,
        info["tokens"] if named else None,
        axes[: len(chosen)],
        query_tokens=info["query_tokens"] if named else None,
        titles=[_head_title(contents, *each) for each in chosen] if len(chosen) > 1 else "",
        label=_label(block),
    )


def _label(block: int) -> str:
    return "weight" if block == 1 else f"largest weight of {block} x {block}"


def _draw_sheet(figure: Any, contents: Weights) -> None:
    """Draw all heads beside each other: a row for each layer, or rows of eight heads of one layer."""
    n_layers, heads, seqlen_q, seqlen_k = contents.shape
    columns = heads if n_layers > 1 else 8
    block = -(-max(seqlen_q, seqlen_k) // MOST_CELLS_OF_A_TILE)
    tiles = [tile for layer in contents.layers for tile in _largest_of_blocks(layer, block)]
    height, width = tiles[0].shape
    gap = 1 + max(height, width) // 16
    rows = -(-len(tiles) // columns)
    sheet = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap), tiles[0].dtype)
    for i, tile in enumerate(tiles):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        sheet[top : top + height, left : left + width] = tile
    scale = min(9.0 / sheet.shape[1], 9.0 / sheet.shape[0])
    figure.set_size_inches(sheet.shape[1] * scale + 2.0, sheet.shape[0] * scale + 0.6)
    axes = figure.subplots()
    plot_attention(sheet, ax=axes, annotate=False, label=_label(block))
    middles = [np.arange(count) * (size + gap) + size / 2 for count, size in ((columns, width), (rows, height))]
    if n_layers > 1:
        names = contents.info["layers"] or [str(layer) for layer in range(n_layers)]
        axes.set(xlabel="head", ylabel=contents.info["axis"])
    else:
        names = [f"{first} to {min(first + columns, heads) - 1}" for first in range(0, heads, columns)]
        axes.set(xlabel="", ylabel="heads")
    axes.set_xticks(middles[0], range(heads) if n_layers > 1 else [""] * columns)
    axes.set_yticks(middles[1], names, parse_math=False)
    axes.tick_params(length=0)


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
