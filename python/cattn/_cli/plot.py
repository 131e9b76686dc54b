"""``python -m cattn plot``: heat maps of attention weights in a file, drawn by `cattn.plot_attention`."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import cattn
from cattn._cli.files import Array, InputError, load, refuse_inputs
from cattn._cli.messages import plain_warnings, say
from cattn._plot import as_text
from cattn.nn._files import replacing

DESCRIPTION = """\
Heat maps of attention weights in a .npy, .npz or .safetensors file. Needs pip install 'cattn[plot]'.

  cattn attend q.npy k.npy v.npy -o out.npy --causal --weights weights.npy
  cattn plot weights.npy -o heat.png --tokens "Your journey starts with one step"
  cattn plot results.npz:weights -o heat.pdf --entry 0 --heads 0,3

Weights have the shape (T_q, T_k), (H, T_q, T_k) with a panel for each head, or more batch dimensions before the heads,
from which --entry chooses. An archive holds them as "weights", as its only array, or as FILE:NAME."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("weights", metavar="FILE", help="the weights: .npy, .npz, .safetensors")
    add("-o", "--output", required=True, metavar="FILE", help="the picture: .png, .pdf, .svg and others")
    add("--tokens", metavar="TEXT", help="the T_k tokens, with spaces between them; @FILE has one on each line")
    add("--query-tokens", metavar="TEXT", help="the T_q tokens of the queries; by default the last of --tokens")
    add("--entry", type=int, metavar="N", help="the batch entry to draw, where there are several")
    add("--heads", metavar="N,N", help="the heads to draw, default all")
    add("--title", metavar="TEXT", help="title of the picture")
    add("--dpi", type=int, default=150, metavar="N", help="resolution of the picture, default 150")
    add("--force", action="store_true", help="write also to the file of the weights")
    add("--quiet", action="store_true", help="no closing line")


def _tokens(text: str | None, option: str) -> list[str] | None:
    """Return the tokens that an option names."""
    if text is None or not text.startswith("@"):
        return None if text is None else text.split()
    try:
        lines = Path(text[1:]).read_text(encoding="utf-8-sig").split("\n")  # a token may be another line separator
        return lines[:-1] if lines[-1] == "" else lines
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"{option}: {text[1:]}: {reason}") from error


def _choose(weights: Array, options: argparse.Namespace) -> tuple[Array, list[str] | None]:
    """Return the weights to draw, (T_q, T_k) or (H, T_q, T_k), and a title for each head."""
    if weights.ndim < 4:
        if options.entry is not None:
            raise InputError(f"--entry needs weights of four dimensions or more, got shape {weights.shape}")
    else:
        entries = weights.reshape(-1, *weights.shape[-3:])
        entry = 0 if options.entry is None and len(entries) == 1 else options.entry
        if entry is None or not 0 <= entry < len(entries):
            got = "none" if entry is None else entry
            raise InputError(
                f"--entry must be from 0 to {len(entries) - 1} for weights of shape {weights.shape}, got {got}"
            )
        weights = entries[entry]
    if options.heads is None:
        return weights, None
    try:
        heads = [int(part) for part in options.heads.split(",")]
    except ValueError:
        heads = [-1]
    count = weights.shape[0] if weights.ndim == 3 else 0
    if not all(0 <= head < count for head in heads):
        most = f"from 0 to {count - 1}" if count else "of weights of three dimensions"
        raise InputError(f"--heads must be numbers of heads {most}, got {options.heads} for shape {weights.shape}")
    return weights[heads], [f"head {head}" for head in heads]


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InputError("cattn plot needs matplotlib: pip install 'cattn[plot]'") from error
    if "matplotlib.pyplot" not in sys.modules:
        mpl.use("agg")  # no window, and no display needed
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    target = Path(os.path.realpath(options.output))
    kinds = Figure().canvas.get_supported_filetypes()
    kind = target.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise InputError(f"{options.output}: pictures end in .{', .'.join(sorted(kinds))}")
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"{options.output}: there is no such directory, or the name is a directory's")
    if not 10 <= options.dpi <= 1200:
        raise InputError(f"--dpi must be from 10 to 1200, got {options.dpi}")
    if not options.force:
        refuse_inputs("--output", target, {"weights": options.weights})
    weights, titles = _choose(load(options.weights, "weights"), options)
    tokens, query_tokens = _tokens(options.tokens, "--tokens"), _tokens(options.query_tokens, "--query-tokens")
    with plain_warnings():
        try:
            axes: Any = cattn.plot_attention(weights, tokens, query_tokens=query_tokens, titles=titles)
        except (ValueError, TypeError) as error:
            raise InputError(f"{error} (weights: {options.weights})") from error
        figure = (axes if weights.ndim == 2 else axes[0]).figure
        try:
            if options.title is not None:
                figure.suptitle(as_text(options.title), parse_math=False)
            with replacing(target) as temporary, open(temporary, "wb") as stream:
                figure.savefig(stream, format=kind, dpi=options.dpi)
        finally:
            plt.close(figure)
    if not options.quiet:
        heads = f"{len(weights)} heads, " if weights.ndim == 3 else ""
        say(f"{options.output}: {heads}{weights.shape[-2]} queries, {weights.shape[-1]} keys")
