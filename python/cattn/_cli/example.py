"""``python -m cattn example``: the six tokens of the walk as files, on which the other commands can be tried."""

import argparse
from pathlib import Path

import numpy as np

from cattn._cli import walk
from cattn._cli.files import InputError
from cattn._cli.messages import say
from cattn.nn._files import replacing

DESCRIPTION = """\
Writes the six tokens of the walk as files: q.npy, k.npy and v.npy, two numbers for each token, and tokens.txt. With
them the lines that `python -m cattn` ends with run as they stand.

  cattn example
  cattn attend q.npy k.npy v.npy -o out.npy --causal --weights w.npy
  cattn view w.npy -o attention.html --tokens @tokens.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="where, default here")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--quiet", action="store_true", help="no closing line")


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(f"{options.folder}: there is no such directory")
    arrays = dict(zip(("q.npy", "k.npy", "v.npy"), walk.projections(), strict=True))
    names = [*arrays, "tokens.txt"]
    there = [name for name in names if (folder / name).exists()]
    if there and not options.force:
        raise InputError(f"{', '.join(there)} in {options.folder} would be replaced: choose another folder, or --force")
    for name in names:
        with replacing(folder / name) as temporary, open(temporary, "wb") as stream:
            if name in arrays:
                np.save(stream, arrays[name])
            else:
                stream.write("".join(f"{token}\n" for token in walk.TOKENS).encode())
    if not options.quiet:
        say(f"{options.folder}: {', '.join(names)}")
