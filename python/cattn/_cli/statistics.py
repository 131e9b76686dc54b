"""``python -m cattn statistics``: what heads look at, from queries and keys in files, without their weights."""

import argparse
import sys
from typing import Any

import numpy as np

import cattn
from cattn._cli.files import PIPE, STDOUT, Array, InputError, load, load_members, refuse_inputs
from cattn._cli.messages import encodable, plain_warnings, say
from cattn._cli.view import write
from cattn._cli.weights import add_entry, add_tokens, choose_entry, target_of, tokens_of
from cattn.nn._files import errors_name, save_arrays

DESCRIPTION = """\
Statistics of the attention weights of queries and keys in .npy, .npz or .safetensors files, of any length: the matrix
of weights is never held. Prints the mean of each head, and writes the statistics of each token.

  cattn statistics q.npy k.npy --causal
  cattn statistics qk.npz --causal -o statistics.npz
  cattn statistics q.npy k.npy --causal --top-k 4 -o statistics.html --tokens @tokens.txt

Shapes are as in cattn.attention_statistics: (..., T_q, D) and (..., T_k, D), from four dimensions on with heads on axis
-3; --entry chooses from the dimensions before the heads."""

SHOWN = {"entropy": "entropy", "max_weight": "largest", "distance": "distance"}

INPUTS = ("inputs", "mask", "sinks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def _inputs(options: argparse.Namespace) -> list[Array]:
    if len(options.inputs) == 1:
        return load_members(options.inputs[0], ["query", "key"])
    if len(options.inputs) == 2:
        return [load(spec, name) for name, spec in zip(("query", "key"), options.inputs, strict=True)]
    raise InputError(f"give query and key, or one file of both, got {len(options.inputs)} files")


def table(found: Any, *, sinks: bool) -> str:
    """Return the mean of each head as a table; the weight of the sink is a column where there are sinks."""
    shown = SHOWN | ({"sink_weight": "sink"} if sinks else {})
    columns = {title: getattr(found, name) for name, title in shown.items() if getattr(found, name) is not None}
    means = {title: np.atleast_1d(np.mean(array, axis=-1, dtype=np.float64)) for title, array in columns.items()}
    lines = ["head" + "".join(f"{title:>10}" for title in means)]
    heads = len(next(iter(means.values())))
    lines += [f"{head:>4}" + "".join(f"{mean[head]:>10.4f}" for mean in means.values()) for head in range(heads)]
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
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
    arrays = [choose_entry(array, options.entry) for array in _inputs(options)]
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
