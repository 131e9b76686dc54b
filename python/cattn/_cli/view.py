"""``python -m cattn view``: attention weights in a file as one page of HTML, made by `cattn.view_attention`."""

import argparse
import sys
from typing import Any

import cattn
from cattn._cli.files import PIPE, STDOUT, InputError, load, refuse_inputs
from cattn._cli.messages import plain_warnings, say
from cattn._cli.weights import add_entry, add_tokens, choose_entry, target_of, tokens_of
from cattn.nn._files import errors_name

DESCRIPTION = """\
Attention weights in a .npy, .npz or .safetensors file as a page to look at with pointer and keyboard: one file of HTML
that fetches nothing. Needs no other package.

  cattn attend q.npy k.npy v.npy -o out.npy --causal --weights w.npy
  cattn view w.npy -o attention.html --tokens "Your journey starts with one step"
  cattn view layers.npz:weights -o model.html --layers

Weights have the shape (T_q, T_k), (H, T_q, T_k), or more batch dimensions before the heads, from which --entry chooses.
With --layers the first of four dimensions are the layers of one text."""
INPUTS = ("weights",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("weights", metavar="FILE", help="the weights: .npy, .npz, .safetensors; - is standard input")
    add("-o", "--output", required=True, metavar="FILE", help="the page: .html; - is standard output")
    add_tokens(parser)
    add_entry(parser)
    add("--layers", action="store_true", help="the first of four dimensions is layers, not a batch")
    add("--title", metavar="TEXT", help="heading and title of the page")
    add("--force", action="store_true", help="write also to the file of the weights")
    add("--quiet", action="store_true", help="no closing line")


def write(view: Any, options: argparse.Namespace) -> bool:
    """Write the page to the file of --output, or to standard output; return whether a closing line may follow."""
    if options.output == PIPE:
        with errors_name(STDOUT):
            sys.stdout.write(view.to_html())
        return False
    view.save(options.output)
    return not options.quiet


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    target, _ = target_of(options.output, ["html"])
    if not options.force:
        refuse_inputs("--output", target, {"weights": options.weights})
    weights, words = load(options.weights, "weights"), ""
    if not options.layers:
        weights, words = choose_entry(weights, options.entry)
    elif options.entry is not None:
        raise InputError("--entry and --layers do not go together: without --layers the first dimensions are a batch")
    tokens, query_tokens = tokens_of(options.tokens, "--tokens"), tokens_of(options.query_tokens, "--query-tokens")
    title = ", ".join(part for part in (options.title, words) if part) or None
    with plain_warnings():
        try:
            layers = range(len(weights)) if options.layers and weights.ndim == 4 else None
            view = cattn.view_attention(weights, tokens, query_tokens=query_tokens, title=title, layers=layers)
        except (ValueError, TypeError) as error:
            raise InputError(f"{error} (weights: {options.weights})") from error
        if write(view, options):
            say(f"{options.output}: {words + ', ' if words else ''}weights of shape {weights.shape}")
