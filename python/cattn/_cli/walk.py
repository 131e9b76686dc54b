"""The walk through the chapter, causal attention on six tokens step by step; and ``example``, these tokens as files."""

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import cattn
from cattn._cli.files import Command, InputError
from cattn._cli.messages import has_colours, say, shade_cell
from cattn.nn._files import replacing

Floats = NDArray[np.float32]

TOKENS = ("Your", "journey", "starts", "with", "one", "step")
INPUTS = np.array(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ],
    np.float32,
)
# The weights of torch's nn.Linear(3, 2, bias=False) after manual_seed(789). Rows are outputs.
W_QUERY = np.array([[0.316059083, 0.456808567, 0.51183486], [-0.1682854, -0.337877035, -0.0917738676]], np.float32)
W_KEY = np.array([[0.405805826, -0.470420539, 0.236805201], [0.213360742, -0.260050654, -0.510542989]], np.float32)
W_VALUE = np.array([[0.252569884, -0.14147827, -0.196181342], [0.519107401, -0.0851675794, -0.204327047]], np.float32)


NEXT = """\
What to try next:
  python -m cattn example    the six tokens as files, for the next three lines
  python -m cattn attend q.npy k.npy v.npy -o out.npy --causal --weights w.npy
                             attention of arrays in files
  python -m cattn view w.npy -o attention.html --tokens @tokens.txt
                             a page to look at; cattn.view_attention in Python
  python -m cattn statistics q.npy k.npy --causal
                             what heads look at, for texts of any length
  python -c "import cattn; help(cattn.causal_attention)"
                             the call that does it all
  examples/01_chapter.ipynb  this walk as a notebook, in the repository"""


def _table(numbers: NDArray[np.floating], *, header: bool = False, shade: bool = False) -> str:
    """Return a table with a row for each token and four digits; with `shade`, larger numbers on darker cells."""
    lines = [" " * 9 + "".join(f"{token:>9}" for token in TOKENS)] if header else []
    seen = np.isfinite(numbers) & (numbers != 0)  # the others are hidden or dropped
    low, high = float(numbers[seen].min()), float(numbers[seen].max())
    if 0 < low < high / 2:  # numbers that lie close to each other fill the whole range of colours
        low = 0.0
    for token, row, visible in zip(TOKENS, numbers, seen, strict=True):
        cells = [f"{number:9.4f}" for number in row]
        if shade:
            darkness = [(x - low) / (high - low) if show else None for x, show in zip(row, visible, strict=True)]
            cells = list(map(shade_cell, cells, darkness))
        lines.append(f"  {token:<7}" + "".join(cells))
    return "\n".join(lines)


def projections() -> tuple[Floats, Floats, Floats]:
    """Return query, key and value of the six tokens."""
    return INPUTS @ W_QUERY.T, INPUTS @ W_KEY.T, INPUTS @ W_VALUE.T


def run() -> None:
    """Print the walk."""
    query, key, value = projections()
    scale = 1 / np.sqrt(key.shape[-1])
    scores = query @ key.T
    weights = cattn.attention_weights(query, key)
    visible = cattn.causal_mask(len(TOKENS))
    by_fill = cattn.masked_softmax(scores, visible, scale=scale)
    by_division = cattn.masked_softmax(scores, visible, scale=scale, method="renormalize")
    context = cattn.causal_attention(query, key, value)
    table = partial(_table, shade=has_colours(sys.stdout))

    title = f"cattn {cattn.__version__}: causal attention in six steps"
    print(f"{title}\n{'=' * len(title)}")
    print(f'The text is "{" ".join(TOKENS)}". A token is 3 numbers, from')
    print("which three matrices make its query, its key and its value, 2 numbers each.")
    print("Below, rows are queries and columns are keys.")
    if has_colours(sys.stdout):
        print("Darker cells hold larger numbers; hidden and dropped cells have no colour.")

    print("\n1. Scores: the product of every query with every key")
    print(table(scores, header=True))
    print("\n2. Attention weights: softmax(scores / sqrt(2)), so that every row sums to 1")
    print(table(weights, header=True))

    print("\n3. The future is hidden: a token sees itself and earlier ones, and the scores")
    print("   of later ones become -inf")
    print(table(np.where(visible, scores, -np.inf)))

    print("\n4. Causal attention weights: the softmax of step 2, of these scores")
    print(table(by_fill))
    difference = float(np.abs(by_fill - by_division).max())
    print("   Weights of step 2 that become 0, with each row divided by its sum, are the")
    print(f"   same: the largest difference is {difference:.1e}")

    print("\n5. Dropout, while training: each weight is dropped with p = 0.5, or doubled")
    print("   (the book's mask: rng=cattn.manual_seed(123))")
    print(table(cattn.dropout(by_fill, 0.5, rng=cattn.TorchGenerator(123))))

    print("\n6. Context vectors: the visible values, weighted (no dropout). One call does")
    print("   steps 1 to 6, cattn.causal_attention(query, key, value):")
    print(table(context))

    _promises(query, key, value, context)


def _promises(query: Floats, key: Floats, value: Floats, context: NDArray[np.floating]) -> None:
    """Print the shapes, and that a token does not depend on later ones."""
    batch = [np.stack([x, x]) for x in (query, key, value)]
    heads = [np.broadcast_to(x, (2, 4, *x.shape)) for x in (query, key, value)]
    print("\nShapes:")
    for name, arrays in (("one text", (query, key, value)), ("a batch of two", batch), ("with four heads", heads)):
        result = cattn.causal_attention(*arrays)
        print(f"  {name:<16} query {arrays[0].shape!s:<13} -> context {result.shape}")

    other_key, other_value = key.copy(), value.copy()
    other_key[-1], other_value[-1] = np.nan, np.inf
    changed = cattn.causal_attention(query, other_key, other_value)
    same = np.array_equal(changed[:-1], context[:-1])
    print(f'With NaN in place of "{TOKENS[-1]}", the five rows before it are')
    print(f"the same to the bit: {same}\n")


_EXAMPLE_DESCRIPTION = """\
Writes the six tokens of the walk as files: q.npy, k.npy and v.npy, two numbers for each token, and tokens.txt. With
them the lines that `python -m cattn` ends with run as they stand.

  cattn example
  cattn attend q.npy k.npy v.npy -o out.npy --causal --weights w.npy
  cattn view w.npy -o attention.html --tokens @tokens.txt"""


def _add_example_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="where, default here")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--quiet", action="store_true", help="no closing line")


def _run_example(options: argparse.Namespace) -> None:
    """Carry out the command."""
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(f"{options.folder}: there is no such directory")
    arrays = dict(zip(("q.npy", "k.npy", "v.npy"), projections(), strict=True))
    names = [*arrays, "tokens.txt"]
    there = [name for name in names if (folder / name).exists()]
    if there and not options.force:
        raise InputError(f"{', '.join(there)} in {options.folder} would be replaced: choose another folder, or --force")
    for name in names:
        with replacing(folder / name) as temporary, open(temporary, "wb") as stream:
            if name in arrays:
                np.save(stream, arrays[name])
            else:
                stream.write("".join(f"{token}\n" for token in TOKENS).encode())
    if not options.quiet:
        say(f"{options.folder}: {', '.join(names)}")


EXAMPLE = Command(
    "the six tokens of the walk as files, to try the other commands",
    _EXAMPLE_DESCRIPTION,
    (),
    _add_example_arguments,
    _run_example,
)
