"""What a reader of python/cattn/testing/vectors.json must find, and how the results come into the file.

cd tests && python -m support.vectors --write    computes the results of every line, also of a new one
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

import cattn
from cattn.testing import _vectors
from support import find, paired, without

Vector = dict[str, Any]
Results = Mapping[str, np.ndarray]
ATTENTION = "scaled_dot_product_attention"
MOST_BYTES = 65536


def problems(vectors: Iterable[Vector]) -> Iterator[tuple[Vector, str]]:
    return ((vector, dtype) for vector in vectors for dtype in vector["results"])


def call_of(vector: Vector, dtype: str, generator: Any = cattn.TorchGenerator, *pairs: Any) -> dict[str, Any]:
    """Return the arguments of cattn's function, and that it returns every result. `pairs` are as in `paired`."""
    call = dict(paired(_vectors.arguments(vector, dtype), *pairs))
    if isinstance(call.get("rng"), dict):
        call["rng"] = generator(call["rng"]["TorchGenerator"])
    wishes = {ATTENTION: ["return_weights", "return_lse"], "linear_attention": ["return_state"]}
    return call | dict.fromkeys(wishes.get(vector["function"], []), True) | (
        {"return_scores": True} if vector["function"] == "choose_keys" else {})  # fmt: skip


def named(result: Any) -> Results:
    """Return the arrays of a result, of any library, by their names."""
    if isinstance(result, tuple) and not hasattr(result, "_asdict"):
        result = dict(zip(("indices", "scores"), result, strict=True))
    found = result._asdict() if isinstance(result, tuple) else result
    found = found if isinstance(found, dict) else {"out": found}
    return {name: np.asarray(x) for name, x in found.items() if hasattr(x, "shape")}


def of_numpy(vector: Vector, dtype: str) -> Results:
    return named(find(vector["function"])(**call_of(vector, dtype)))


def differing(vectors: Iterable[Vector], read: Callable[[Vector, str], Results]) -> list[str]:
    """Return the results that a reader computes otherwise."""
    found = []
    for vector, dtype in problems(vectors):
        for name, array in read(vector, dtype).items():
            if _vectors.stored(_vectors.in_hex(array)) != vector["results"][dtype][name]:
                found.append(f"{vector['name']}, {dtype}, {name}")
    return found


def flipped(vectors: list[Vector], number: int) -> list[Vector]:
    """Return the vectors with one bit of the output of one of them flipped."""
    changed = copy.deepcopy(vectors)
    vector, dtype = list(problems(changed))[number]
    name, digits = next(iter(vector["results"][dtype].items()))
    at = len(digits) - 1 - number % 8
    vector["results"][dtype][name] = f"{digits[:at]}{int(digits[at], 16) ^ 1 << number % 4:x}{digits[at + 1 :]}"
    return changed


def assert_every_flipped_bit_is_found(vectors: list[Vector], read: Callable[[Vector, str], Results]) -> None:
    for number, (vector, dtype) in enumerate(problems(vectors)):
        name = next(iter(vector["results"][dtype]))
        assert differing(flipped(vectors, number), read) == [f"{vector['name']}, {dtype}, {name}"]


# ---- tests/core/vectors.c --------------------------------------------------------------------------------------------
LETTERS = {"float32": "f4", "float64": "f8", "int8": "i1", "bool": "b1", "int64": "i8"}
NUMBERS = {"upper_left": 1, "lower_right": 2, "bfloat16": 1, "bfloat16_tiles": 2}


def read_in_c() -> list[Vector]:
    """Return what the program reads: attention with heads before tokens."""
    vectors = _vectors.read()["vectors"]
    return [vector for vector in vectors if vector["function"] == ATTENTION and "layout" not in vector["options"]]


def in_words(vector: Vector, dtype: str) -> str:
    """Return a vector as the lines that the program reads."""
    shapes = {name: shape for name, (_, _, shape) in vector["arrays"].items()}
    options = without(vector["options"], "enable_gqa", "block_size")
    sizes = [*shapes["query"][:2], shapes["key"][1], shapes["query"][2], *shapes["key"][2:], shapes["value"][3]]
    sizes += [shapes.get("key_indices", [0])[-1], vector["options"].get("block_size", 1)]
    lines = [f"attention {LETTERS[dtype][1]} {' '.join(map(str, sizes))}"]
    for name, (kind, seed, shape) in vector["arrays"].items():
        count, first, unit, own = _vectors.read()["draws"][kind]
        letter = LETTERS[dtype if own == "any" else own]
        lines.append(f"array {name} {letter} {seed} {count} {first} {unit!r} {len(shape)} {' '.join(map(str, shape))}")
    for name, given in options.items():
        name, given = next(iter(given.items())) if isinstance(given, dict) else (name, given)
        numbers = [NUMBERS.get(x, x) for x in (given if isinstance(given, list) else [given])]
        lines.append(f"given {name} {len(numbers)} {' '.join(map(str, numbers))}")
    return "\n".join([*lines, "run", ""])


def of_c(vectors: list[Vector], output: str) -> Callable[[Vector, str], Results]:
    """Return the reader of what the program has printed for these vectors."""
    found: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    lines = iter(output.splitlines())
    for vector, dtype in problems(vectors):
        bits = {name: next(lines).split(" ") for name in vector["results"][dtype]}
        assert [*bits] == [name for name, _ in bits.values()]
        found[vector["name"], dtype] = {
            name: np.frombuffer(bytes.fromhex(digits), f">{LETTERS[dtype]}") for name, digits in bits.values()
        }
    return lambda vector, dtype: found[vector["name"], dtype]


# ---- the file --------------------------------------------------------------------------------------------------------
def text() -> str:
    """Return the file with the results that the functions give now; a line begins with its name."""
    lines = []
    for line in _vectors.FILE.read_text("utf-8").splitlines():
        if line.startswith('{"name"'):
            vector = json.loads(line.rstrip(","))
            for dtype in vector["results"]:
                arrays = of_numpy(vector, dtype).items()
                vector["results"][dtype] = {name: _vectors.stored(_vectors.in_hex(x)) for name, x in arrays}
            line = json.dumps(vector, separators=(",", ":")) + "," * line.endswith(",")
        lines.append(line + "\n")
    return "".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    _vectors.FILE.write_text(text(), "utf-8")
