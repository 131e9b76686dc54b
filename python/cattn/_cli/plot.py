"""``python -m cattn plot``: heat maps of attention weights in a file, drawn by `cattn.plot_attention`."""

import argparse
import sys
from typing import Any

import cattn
from cattn._cli.files import PIPE, STDOUT, Array, InputError, load, refuse_inputs
from cattn._cli.messages import plain_warnings, say
from cattn._cli.weights import add_entry, add_tokens, choose_entry, target_of, tokens_of
from cattn._plot import as_text
from cattn.nn._files import errors_name, replacing

DESCRIPTION = """\
Heat maps of attention weights in a .npy, .npz or .safetensors file. Needs pip install 'cattn[plot]'.

  cattn attend q.npy k.npy v.npy -o out.npy --causal --weights weights.npy
  cattn plot weights.npy -o heat.png --tokens "Your journey starts with one step"
  cattn plot results.npz:weights -o heat.pdf --entry 0 --heads 0,3

Weights have the shape (T_q, T_k), (H, T_q, T_k) with a panel for each head, or more batch dimensions before the heads,
from which --entry chooses. An archive holds them as "weights", as its only array, or as FILE:NAME."""
INPUTS = ("weights",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("weights", metavar="FILE", help="the weights: .npy, .npz, .safetensors; - is standard input")
    add("-o", "--output", required=True, metavar="FILE", help="the picture: .png, .pdf, .svg and others; - is a pipe")
    add_tokens(parser)
    add_entry(parser)
    add("--heads", metavar="N,N", help="the heads to draw, default all")
    add("--title", metavar="TEXT", help="title of the picture")
    add("--dpi", type=int, default=150, metavar="N", help="resolution of the picture, default 150")
    add("--force", action="store_true", help="write also to the file of the weights")
    add("--quiet", action="store_true", help="no closing line")


def _choose(weights: Array, options: argparse.Namespace) -> tuple[Array, list[str] | None]:
    """Return the heads to draw, (T_q, T_k) or (H, T_q, T_k), and a title for each."""
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

    target, kind = target_of(options.output, ["png", *Figure().canvas.get_supported_filetypes()])
    if not 10 <= options.dpi <= 1200:
        raise InputError(f"--dpi must be from 10 to 1200, got {options.dpi}")
    if not options.force:
        refuse_inputs("--output", target, {"weights": options.weights})
    weights, words = choose_entry(load(options.weights, "weights"), options.entry)
    weights, titles = _choose(weights, options)
    tokens, query_tokens = tokens_of(options.tokens, "--tokens"), tokens_of(options.query_tokens, "--query-tokens")
    with plain_warnings():
        try:
            axes: Any = cattn.plot_attention(weights, tokens, query_tokens=query_tokens, titles=titles)
        except (ValueError, TypeError) as error:
            raise InputError(f"{error} (weights: {options.weights})") from error
        figure = (axes if weights.ndim == 2 else axes[0]).figure
        try:
            title = ", ".join(part for part in (options.title, words) if part)
            if title:
                figure.suptitle(as_text(title), parse_math=False)
            if options.output == PIPE:
                with errors_name(STDOUT):
                    figure.savefig(sys.stdout.buffer, format=kind, dpi=options.dpi)
                return
            with replacing(target) as temporary, open(temporary, "wb") as stream:
                figure.savefig(stream, format=kind, dpi=options.dpi)
        finally:
            plt.close(figure)
    if not options.quiet:
        heads = f"{len(weights)} heads, " if weights.ndim == 3 else ""
        chosen = f"{words}, " if words else ""
        say(f"{options.output}: {chosen}{heads}{weights.shape[-2]} queries, {weights.shape[-1]} keys")
