"""Train a GPT of a million parameters to one hash: the same on every machine, with any number of threads.

    python examples/one_hash.py                              400 steps; prints the hashes, and checks the stored ones
    python examples/one_hash.py --folder run                 also writes a checkpoint every 50 steps, and the hashes
    python examples/one_hash.py --folder run --from 100 --to 150      repeats this segment of somebody's run
    python examples/one_hash.py --size tiny                  20 steps of a tiny model, in seconds

The model and its training are small_gpt.py's. Two hashes are printed for a step: SHA-256 of the weights, which is the
result, and of the state, which is all that the next step reads: the text, the weights, and the means of the gradients
and of their squares. The hashed bytes are float32 in little-endian order, array after array in the order of their
names, and before them, for the state, the text. The text has sums in words, from a generator of its own; `--text` takes
any other file, and whoever repeats a segment needs the same one.

Whoever repeats a segment reads the checkpoint at its start, makes its steps alone, and compares both hashes at its end
with those that the folder states. The segments of a run can be shared among parties; the first begins at step 0, which
needs no checkpoint. It is an error if a hash differs.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from small_gpt import GPT, Training, random_bits

Array = np.ndarray[Any, np.dtype[Any]]
CHECKPOINT = "{:05d}.npz"
STORED = Path(__file__).with_suffix(".txt")  # the hashes of the text below
WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)


class Size(NamedTuple):
    """The numbers of a model and of its training; there is a checkpoint after every `every` steps."""

    d: int
    heads: int
    layers: int
    context: int
    rows: int
    steps: int
    every: int
    rate: float


SIZES = {"full": Size(128, 4, 5, 128, 8, 400, 50, 2e-3), "tiny": Size(32, 4, 2, 48, 4, 20, 5, 4e-3)}


class Claim(NamedTuple):
    """The hashes after a step, as hexadecimal digits."""

    weights: str
    state: str


def in_words(number: int) -> str:
    """Return a number below 200 in words."""
    if number >= 100:
        return "one hundred" + (f" and {in_words(number - 100)}" if number > 100 else "")
    words = WORDS.split()
    if number < 20:
        return words[number]
    return words[18 + number // 10] + (f"-{words[number % 10]}" if number % 10 else "")


def text(sums: int = 5000) -> bytes:
    """Return sums in words, one a line."""
    pairs = (random_bits("sums", sums, 2) % np.uint64(100)).tolist()
    return "".join(f"{in_words(a)} and {in_words(b)} are {in_words(a + b)}\n" for a, b in pairs).encode()


def start(size: Size, data: bytes) -> Training:
    """Return a training before its first step."""
    if len(data) <= size.context:
        raise ValueError(f"the text must have more bytes than the context, {size.context}, got {len(data)}")
    return Training(GPT(size.d, size.heads, size.layers, size.context), data, size.steps, size.rows, size.rate)


def arrays_of(training: Training) -> dict[str, Array]:
    """Return the arrays that the next step reads."""
    parts = {"weights": training.model.weights, "first": training.first, "second": training.second}
    return {f"{part} {name}": array for part, arrays in parts.items() for name, array in arrays.items()}


def digest(arrays: Mapping[str, Array], data: bytes = b"") -> str:
    """Return SHA-256 of data, then float32 in little-endian order, array after array in the order of their names."""
    found = hashlib.sha256(data)
    for name in sorted(arrays):
        found.update(arrays[name].astype("<f4").tobytes())
    return found.hexdigest()


def claim_of(training: Training) -> Claim:
    """Return both hashes."""
    return Claim(digest(training.model.weights), digest(arrays_of(training), training.ids.astype(np.uint8).tobytes()))


def read_claims(path: Path, size: str) -> dict[int, Claim]:
    """Return the stated hashes of each step; a line has a size, a step and both hashes."""
    rows = [line.split() for line in path.read_text("utf-8").splitlines()]
    if wrong := [" ".join(row) for row in rows if len(row) != 4 or row[0] not in SIZES or not row[1].isdecimal()]:
        raise ValueError(f"a line of {path} must be a size, a step and two hashes, got {wrong[0]!r}")
    return {int(step): Claim(weights, state) for name, step, weights, state in rows if name == size}


def resume(training: Training, folder: Path, step: int, claims: Mapping[int, Claim]) -> None:
    """Continue after a step, from its checkpoint; its hashes must be the stated ones."""
    path = folder / CHECKPOINT.format(step)
    if not path.exists():
        raise ValueError(f"--from is {step}, but {path} does not exist")
    try:
        with np.load(path) as stored:
            found = dict(stored)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be an archive of NumPy's arrays, but cannot be read: {error}") from error
    arrays = arrays_of(training)
    if found.keys() != arrays.keys():
        others = sorted(found.keys() ^ arrays.keys())
        raise ValueError(f"{path} must have the arrays of this size; one side alone has {', '.join(others)}")
    for name, array in arrays.items():
        if (found[name].shape, found[name].dtype.newbyteorder("=")) != (array.shape, array.dtype):
            got = f"{found[name].dtype} of {found[name].shape}"
            raise ValueError(f"{name!r} of {path} must be {array.dtype} of {array.shape}, got {got}")
        array[...] = found[name]
    training.done = step
    check(training, claims, path.name)


def check(training: Training, claims: Mapping[int, Claim], where: str = "this run") -> None:
    """Fail if a hash is not the stated one."""
    for kind, found, stated in zip(Claim._fields, claim_of(training), claims[training.done], strict=True):
        if found != stated:
            raise ValueError(f"after step {training.done} the hash of the {kind} is {stated}, but {where} has {found}")


def steps(training: Training, stop: int, at: Iterable[int]) -> Iterable[tuple[float, Claim]]:
    """Go on until a step, and yield the loss and the hashes after some of the steps."""
    while training.done < stop:
        loss = training.step()
        if training.done in at:
            yield loss, claim_of(training)


def show(step: int, loss: float | None, claim: Claim) -> None:
    """Print the hashes of a step."""
    about = "start      " if loss is None else f"loss {loss:.4f}"
    print(f"step {step:3d}  {about}  weights {claim.weights}\n{'':23}state   {claim.state}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--text", type=Path, metavar="FILE", help="learn from the bytes of this file")
    parser.add_argument("--folder", type=Path, help="for checkpoints and hashes.txt")
    parser.add_argument("--from", type=int, metavar="STEP", dest="first", help="repeat the steps after this one")
    parser.add_argument("--to", type=int, metavar="STEP", dest="last", help="and stop after this one")
    given = parser.parse_args(arguments)
    size = SIZES[given.size]
    marks = range(0, size.steps + 1, size.every)
    first, last = given.first or 0, size.steps if given.last is None else given.last
    if not 0 <= first < last <= size.steps:
        parser.error(f"--from and --to must be steps 0 <= from < to <= {size.steps}, got {first} and {last}")
    repeats = given.first is not None or given.last is not None
    if given.folder is None and (first or (repeats and given.text)):
        parser.error("--from and --to need --folder, which has the checkpoints and the hashes of the run")
    try:
        training = start(size, given.text.read_bytes() if given.text else text())
        claims = dict[int, Claim]()
        if repeats and given.folder:
            claims = read_claims(given.folder / "hashes.txt", given.size)
        elif not given.text:
            claims = read_claims(STORED, given.size)
        if repeats and (missing := [step for step in (first, last) if step not in claims]):
            raise ValueError(f"--from and --to must be steps with a stated hash, {sorted(claims)}, got {missing[0]}")
        if first:
            resume(training, given.folder, first, claims)
        elif claims:
            check(training, claims)
        show(first, None, claim_of(training))
        keeps = given.folder is not None and not repeats
        if keeps:
            given.folder.mkdir(parents=True, exist_ok=True)
            lines = [" ".join([given.size, "0", *claim_of(training)])]
        for loss, claim in steps(training, last, {*marks, last}):
            show(training.done, loss, claim)
            if keeps:
                np.savez(given.folder / CHECKPOINT.format(training.done), **arrays_of(training))  # type: ignore[arg-type]
                lines.append(" ".join([given.size, str(training.done), *claim]))
                Path(given.folder, "hashes.txt").write_text("\n".join([*lines, ""]), "utf-8")
            if training.done in claims:
                check(training, claims)
    except (OSError, ValueError) as error:
        sys.exit(f"one_hash.py: {error}")
    compared = f"the hashes after steps {first} to {last} are the stated ones"
    print(compared if claims else "no hashes are stated to compare")


if __name__ == "__main__":
    main()
