"""The commands that show weights: ``view``, ``plot`` and ``statistics``."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import cattn
from cattn._cli.files import PIPE, STDOUT, Array, Command, InputError, load, load_members, refuse_inputs
from cattn._cli.messages import encodable, plain_warnings, say
from cattn._plot import as_text
from cattn.nn._files import errors_name, followed, replacing, save_arrays


def add_tokens(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name tokens."""
    add = parser.add_argument
    add("--tokens", metavar="TEXT", help="the T_k tokens, with spaces between them; @FILE has one on each line")
    add("--query-tokens", metavar="TEXT", help="the T_q tokens of the queries; by default the last of --tokens")


def add_entry(parser: argparse.ArgumentParser) -> None:
    """Declare the option that chooses from a batch."""
    parser.add_argument("--entry", type=int, metavar="N", help="the batch entry to show, where there are several: 0")


def tokens_of(text: str | None, option: str) -> list[str] | None:
    """Return the tokens that an option names."""
    if text is None or not text.startswith("@"):
        return None if text is None else text.split()
    try:
        lines = Path(text[1:]).read_text(encoding="utf-8-sig").split("\n")  # a token may be another line separator
        return lines[:-1] if lines[-1] == "" else lines
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"{option}: {text[1:]}: {reason}") from error


def choose_entry(array: Array, entry: int | None, rank: int = 3) -> tuple[Array, str]:
    """Return one entry of a batch, and words that name it where there are several."""
    if array.ndim <= rank:
        if entry not in (None, 0):
            raise InputError(f"--entry must be 0 for shape {array.shape}, which has no batch, got {entry}")
        return array, ""
    entries = array.reshape(-1, *array.shape[-rank:])
    index = 0 if entry is None else entry
    if not 0 <= index < len(entries):
        raise InputError(f"--entry must be from 0 to {len(entries) - 1} for shape {array.shape}, got {index}")
    return entries[index], f"entry {index} of {len(entries)}" if len(entries) > 1 else ""


def target_of(output: str, kinds: list[str]) -> tuple[Path, str]:
    """Return the file that an option names, and its kind; - is standard output, of the first kind."""
    if output == PIPE:
        return Path(output), kinds[0]
    target = followed(output)
    kind = target.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise InputError(f"{output}: the name must end in .{', .'.join(sorted(set(kinds)))}")
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"{output}: there is no such directory, or the name is a directory's")
    return target, kind


_VIEW_DESCRIPTION = """\
Attention weights in a .npy, .npz or .safetensors file as a page to look at with pointer and keyboard: one file of HTML
that fetches nothing. Needs no other package.

  cattn attend q.npy k.npy v.npy -o out.npy --causal --weights w.npy
  cattn view w.npy -o attention.html --tokens "Your journey starts with one step"
  cattn view layers.npz:weights -o model.html --layers
  cattn view w.npy -o live.html --live q.npy k.npy v.npy

Weights have the shape (T_q, T_k), (H, T_q, T_k), or more batch dimensions before the heads, from which --entry chooses.
With --layers the first of four dimensions are the layers of one text. With --live the page computes the weights anew
from queries, keys and values, and its reader can change the mask, the temperature and dropout."""


def _add_view_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("weights", metavar="FILE", help="the weights: .npy, .npz, .safetensors; - is standard input")
    add("-o", "--output", required=True, metavar="FILE", help="the page: .html; - is standard output")
    add_tokens(parser)
    add_entry(parser)
    add("--layers", action="store_true", help="the first of four dimensions is layers, not a batch")
    add("--title", metavar="TEXT", help="heading and title of the page")
    add("--live", nargs="+", default=[], metavar="FILE", help="queries, keys and values, for a page that computes")
    add("--force", action="store_true", help="write also to the files of the weights and of --live")
    add("--quiet", action="store_true", help="no closing line")


def write(view: Any, options: argparse.Namespace) -> bool:
    """Write the page to the file of --output, or to standard output; return whether a closing line may follow."""
    if options.output == PIPE:
        with errors_name(STDOUT):
            sys.stdout.write(view.to_html())
        return False
    view.save(options.output)
    return not options.quiet


OPERANDS = ("query", "key", "value")


def _operands(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arrays of --live: two or three files, or one file of all."""
    files = options.live
    if len(files) == 1:
        arrays = load_members(files[0], OPERANDS)
    elif len(files) <= len(OPERANDS):
        arrays = [load(file, name) for name, file in zip(OPERANDS, files, strict=False)]
    else:
        raise InputError(f"--live: give query, key and value, or one file of all, got {len(files)} files")
    rank = 4 if options.layers else 3
    return {name: choose_entry(a, options.entry, rank)[0] for name, a in zip(OPERANDS, arrays, strict=False)}


def _run_view(options: argparse.Namespace) -> None:
    """Carry out the command."""
    target, _ = target_of(options.output, ["html"])
    if not options.force:
        live = dict(zip(OPERANDS, options.live, strict=False))
        refuse_inputs("--output", target, {"weights": options.weights, **live})
    weights, words = load(options.weights, "weights"), ""
    if not options.layers:
        weights, words = choose_entry(weights, options.entry)
    elif options.entry is not None:
        raise InputError("--entry and --layers do not go together: without --layers the first dimensions are a batch")
    tokens, query_tokens = tokens_of(options.tokens, "--tokens"), tokens_of(options.query_tokens, "--query-tokens")
    title = ", ".join(part for part in (options.title, words) if part) or None
    operands = _operands(options)
    with plain_warnings():
        try:
            layers = range(len(weights)) if options.layers and weights.ndim == 4 else None
            view = cattn.view_attention(
                weights, tokens, query_tokens=query_tokens, title=title, layers=layers, live=bool(operands), **operands
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"{error} (weights: {options.weights})") from error
        if write(view, options):
            say(f"{options.output}: {words + ', ' if words else ''}weights of shape {weights.shape}")


VIEW = Command(
    "the attention weights in a file as a page of HTML to look at",
    _VIEW_DESCRIPTION,
    ("weights", "live"),
    _add_view_arguments,
    _run_view,
)


_PLOT_DESCRIPTION = """\
Heat maps of attention weights in a .npy, .npz or .safetensors file. Needs pip install 'cattn[plot]'.

  cattn attend q.npy k.npy v.npy -o out.npy --causal --weights weights.npy
  cattn plot weights.npy -o heat.png --tokens "Your journey starts with one step"
  cattn plot results.npz:weights -o heat.pdf --entry 0 --heads 0,3

Weights have the shape (T_q, T_k), (H, T_q, T_k) with a panel for each head, or more batch dimensions before the heads,
from which --entry chooses. An archive holds them as "weights", as its only array, or as FILE:NAME."""


def _add_plot_arguments(parser: argparse.ArgumentParser) -> None:
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


def _choose_heads(weights: Array, options: argparse.Namespace) -> tuple[Array, list[str] | None]:
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


def _run_plot(options: argparse.Namespace) -> None:
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
    weights, titles = _choose_heads(weights, options)
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


PLOT = Command(
    "the attention weights in a file as heat maps, drawn by matplotlib",
    _PLOT_DESCRIPTION,
    ("weights",),
    _add_plot_arguments,
    _run_plot,
)


_STATISTICS_DESCRIPTION = """\
Statistics of the attention weights of queries and keys in .npy, .npz or .safetensors files, of any length: the matrix
of weights is never held. Prints the mean of each head, and writes the statistics of each token.

  cattn statistics q.npy k.npy --causal
  cattn statistics qk.npz --causal -o statistics.npz
  cattn statistics q.npy k.npy --causal --top-k 4 -o statistics.html --tokens @tokens.txt

Shapes are as in cattn.attention_statistics: (..., T_q, D) and (..., T_k, D), from four dimensions on with heads on axis
-3; --entry chooses from the dimensions before the heads."""

_COLUMNS = {"entropy": "entropy", "max_weight": "largest", "distance": "distance"}


def _add_statistics_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="FILE", help="query and key, or one file that holds both; - is standard input")
    add("-o", "--output", metavar="FILE", help="the statistics: .npz or .safetensors, or .html to look at")
    add("--causal", nargs="?", const="lower_right", choices=("upper_left", "lower_right"), help="hide later keys")
    add("--window", nargs=2, type=int, metavar=("L", "R"), help="the keys that a query sees before and after its own")
    add("--scale", type=float, metavar="X", help="factor of the scores, default 1/sqrt(D)")
    add("--softcap", type=float, metavar="X", help="bound of the scaled scores")
    add("--mask", metavar="FILE", help="bool: True where the key is visible; or floats to add")
    add("--sinks", metavar="FILE", help="one extra logit for each query head, (H,), in the softmax denominator")
    add("--top-k", type=int, default=0, metavar="N", help="also the N keys with the largest weights of each query")
    add_tokens(parser)
    add_entry(parser)
    add("--title", metavar="TEXT", help="heading and title of the page")
    add("--force", action="store_true", help="write also to a file that is an input")
    add("--quiet", action="store_true", help="no table and no closing line")


def _query_and_key(options: argparse.Namespace) -> list[Array]:
    if len(options.inputs) == 1:
        return load_members(options.inputs[0], ["query", "key"])
    if len(options.inputs) == 2:
        return [load(spec, name) for name, spec in zip(("query", "key"), options.inputs, strict=True)]
    raise InputError(f"give query and key, or one file of both, got {len(options.inputs)} files")


def table(found: Any, *, sinks: bool) -> str:
    """Return the mean of each head as a table; the weight of the sink is a column where there are sinks."""
    shown = _COLUMNS | ({"sink_weight": "sink"} if sinks else {})
    columns = {title: getattr(found, name) for name, title in shown.items() if getattr(found, name) is not None}
    means = {title: np.atleast_1d(np.mean(array, axis=-1, dtype=np.float64)) for title, array in columns.items()}
    lines = ["head" + "".join(f"{title:>10}" for title in means)]
    heads = len(next(iter(means.values())))
    lines += [f"{head:>4}" + "".join(f"{mean[head]:>10.4f}" for mean in means.values()) for head in range(heads)]
    return "\n".join(lines)


def _run_statistics(options: argparse.Namespace) -> None:
    """Carry out the command."""
    kind = ""
    if options.output is not None:
        target, kind = target_of(options.output, ["npz", "html", "safetensors"])
        if options.output == PIPE:
            raise InputError("--output - is not for statistics: the table goes to standard output")
        if not options.force:
            inputs = {"query": options.inputs[0], "key": options.inputs[-1]}
            inputs |= {"attn_mask": options.mask, "sinks": options.sinks}
            refuse_inputs("--output", target, {name: spec for name, spec in inputs.items() if spec is not None})
    arrays = [choose_entry(array, options.entry) for array in _query_and_key(options)]
    (query, words), (key, _) = arrays
    given: dict[str, Any] = {"scale": options.scale, "softcap": options.softcap, "top_k": options.top_k}
    given |= {"window_size": tuple(options.window)} if options.window else {}
    given |= {"attn_mask": load(options.mask, "attn_mask")} if options.mask is not None else {}
    given |= {"sinks": load(options.sinks, "sinks")} if options.sinks is not None else {}
    given |= {"enable_gqa": True} if query.ndim == 3 else {}
    tokens, query_tokens = tokens_of(options.tokens, "--tokens"), tokens_of(options.query_tokens, "--query-tokens")
    with plain_warnings():
        try:
            found = cattn.attention_statistics(query, key, is_causal=options.causal or False, **given)
            if kind == "html":
                title = ", ".join(part for part in (options.title, words) if part) or None
                view = cattn.view_attention(found, tokens, query_tokens=query_tokens, title=title)
        except (ValueError, TypeError) as error:
            raise InputError(f"{error} ({', '.join(map(str, options.inputs))})") from error
        if kind == "html":
            write(view, options)
        elif kind:
            save_arrays(target, {name: array for name, array in found._asdict().items() if array is not None})
    if not options.quiet:
        with errors_name(STDOUT):
            print(encodable(table(found, sinks=options.sinks is not None)), file=sys.stdout)
        if kind:
            say(f"{options.output}: {words + ', ' if words else ''}{query.shape[-2]} queries, {key.shape[-2]} keys")


STATISTICS = Command(
    "what heads look at, from queries and keys, without their weights",
    _STATISTICS_DESCRIPTION,
    ("inputs", "mask", "sinks"),
    _add_statistics_arguments,
    _run_statistics,
)
