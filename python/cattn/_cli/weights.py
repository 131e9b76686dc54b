"""What the commands that show weights have in common: the tokens, and the entry of the batch."""

import argparse
from pathlib import Path

from cattn._cli.files import PIPE, Array, InputError
from cattn.nn._files import followed


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
